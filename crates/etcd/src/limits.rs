//! Limits for the responses of a member. The endpoint in an EtcdBackup may belong to a hostile server, so a response
//! may have any size. Performs no I/O.

/// Maximum number of members in a member list. A longer list is rejected, because a shortened list would hide members
/// (invariant 1).
pub(crate) const MAX_MEMBERS: usize = 32;

/// Maximum number of client URLs of one member, and maximum number of its peer URLs.
pub(crate) const MAX_URLS: usize = 32;

/// Maximum number of client URLs in a member list. The limit exists because callers send requests to all URLs
/// concurrently.
const MAX_CLIENT_URLS: usize = 128;

/// Maximum length of a URL or a name in bytes.
const MAX_URL: usize = 2_048;

/// Maximum number of members to which one call is sent.
pub(crate) const MAX_ENDPOINTS: usize = 32;

/// Maximum size in bytes of a response, except a snapshot or a watch. The largest response of a real member is a member
/// list with a few KiB. A hostile list of empty members takes 45 times its size in memory, for each open call.
pub(crate) const MAX_ANSWER: usize = 32 << 10;

/// Maximum size of a snapshot in bytes. etcd recommends a quota of at most 8 GiB for a database.
pub(crate) const MAX_SNAPSHOT: u64 = 100 << 30;

/// Maximum number of characters of an etcd text in a condition.
const MAX_TEXT: usize = 1_000;

/// The name and the URLs of a member.
pub(crate) struct MemberText<'a> {
    pub(crate) name: &'a str,
    pub(crate) peer_urls: &'a [String],
    pub(crate) client_urls: &'a [String],
}

/// Fails if a member list exceeds a limit. `count` is the number of members in the list.
pub(crate) fn check_members<'a>(
    count: usize,
    members: impl Iterator<Item = MemberText<'a>>,
) -> Result<(), String> {
    let rejected = |what: String| {
        Err(format!(
            "the member list {what}: check that the endpoint is an etcd member"
        ))
    };
    if count > MAX_MEMBERS {
        return rejected(format!(
            "has {count} members, and at most {MAX_MEMBERS} are supported"
        ));
    }
    let mut client_urls = 0;
    for member in members {
        let urls = member.peer_urls.len().max(member.client_urls.len());
        if urls > MAX_URLS {
            return rejected(format!(
                "has a member with {urls} URLs, and at most {MAX_URLS} are supported"
            ));
        }
        client_urls += member.client_urls.len();
        let texts = member.peer_urls.iter().chain(member.client_urls);
        let longest = texts.map(String::len).max().unwrap_or_default();
        if longest.max(member.name.len()) > MAX_URL {
            return rejected(format!("has a name or URL of more than {MAX_URL} bytes"));
        }
    }
    if client_urls > MAX_CLIENT_URLS {
        return rejected(format!(
            "has {client_urls} client URLs, and at most {MAX_CLIENT_URLS} are supported"
        ));
    }
    Ok(())
}

/// Shortens a text of a member, so that it fits into a condition.
pub(crate) fn shortened(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a list of `count` members. Each has `urls` URLs of `length` bytes.
    fn check(count: usize, urls: usize, length: usize) -> Result<(), String> {
        let urls = vec!["u".repeat(length); urls];
        let members = (0..count).map(|_| MemberText {
            name: "n",
            peer_urls: &urls,
            client_urls: &urls,
        });
        check_members(count, members)
    }

    #[test]
    fn member_list_of_hostile_etcd_is_limited() {
        for (count, urls, length) in [(0, 0, 0), (7, 4, 300), (32, 4, 2_048), (4, 32, 10)] {
            assert_eq!(check(count, urls, length), Ok(()));
        }
        for (count, urls, length, expected) in [
            (33, 1, 10, "33 members"),
            (1, 33, 10, "33 URLs"),
            (5, 32, 10, "160 client URLs"),
            (1, 1, 2_049, "more than 2048 bytes"),
        ] {
            let error = check(count, urls, length).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(shortened(&"ü".repeat(2_000)).chars().count(), 1_000);
    }
}
