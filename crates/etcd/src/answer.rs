//! What etcd and the transport below it answer, turned into [`Error`]. Pure: no I/O here.

use std::error::Error as StdError;

use crate::port::Error;

/// gRPC codes by number, as the protocol defines them.
mod code {
    pub(super) const DEADLINE_EXCEEDED: i32 = 4;
    pub(super) const PERMISSION_DENIED: i32 = 7;
    pub(super) const RESOURCE_EXHAUSTED: i32 = 8;
    pub(super) const FAILED_PRECONDITION: i32 = 9;
    pub(super) const UNAVAILABLE: i32 = 14;
    pub(super) const UNAUTHENTICATED: i32 = 16;
}

/// What etcd says to the promotion of a member that votes already.
pub(crate) const ALREADY_VOTER: &str = "etcdserver: can only promote a learner member";

/// How the answer to a compaction ends that was done before.
pub(crate) const COMPACTED: &str = "required revision has been compacted";

/// What etcd says to a user, and to a role, that is there already.
pub(crate) const USER_EXISTS: &str = "user name already exists";
pub(crate) const ROLE_EXISTS: &str = "role name already exists";

/// How the answer to a read ends that an election interrupts.
pub(crate) const LEADER_CHANGED: &str = "leader changed";

/// What a learner says to everything but `Status`.
pub(crate) const NOT_FOR_LEARNER: &str = "etcdserver: rpc not supported for learner";

/// Turns what the client library returned for a call to `endpoint` into the port's words.
pub(crate) fn classify(endpoint: &str, error: &etcd_client::Error) -> Error {
    match error {
        etcd_client::Error::GRpcStatus(status) => {
            // A status made on this side of the wire has a cause; one that etcd sent has none.
            if let Some(cause) = status.source() {
                return transport(endpoint, &chain(cause));
            }
            answered(endpoint, status.code() as i32, status.message())
        }
        etcd_client::Error::TransportError(cause) => transport(endpoint, &chain(cause)),
        etcd_client::Error::IoError(cause) => transport(endpoint, &chain(cause)),
        other => Error::Other(format!("{endpoint}: {other}")),
    }
}

fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

fn transport(endpoint: &str, text: &str) -> Error {
    const TLS_WORDS: [&str; 4] = ["certificate", "handshake", "InvalidContentType", "tls"];
    // A connection that ended, in words that hold one of those all the same.
    const ENDED: [&str; 2] = ["close_notify", "handshake eof"];
    let shown = format!("{endpoint}: {text}");
    let ended = ENDED.iter().any(|word| text.contains(word));
    if !ended && TLS_WORDS.iter().any(|word| text.contains(word)) {
        Error::Tls(shown)
    } else {
        Error::Unreachable(shown)
    }
}

/// The texts are those of etcd's `rpctypes`; they have been the same since 3.4.
fn answered(endpoint: &str, code: i32, message: &str) -> Error {
    let shown = || format!("{endpoint}: {}", message.trim_start_matches("etcdserver: "));
    if message.contains("member not found") {
        return Error::MemberNotFound;
    }
    // The ID is a hash of the URLs and the second: the same ID means the same URLs, added a moment ago.
    if message.contains("Peer URLs already exists") || message.contains("member ID already exist") {
        return Error::PeerUrlExists;
    }
    if message == ALREADY_VOTER {
        return Error::Other(shown());
    }
    if message.contains("request timed out") || code == code::DEADLINE_EXCEEDED {
        return Error::Timeout(shown());
    }
    if code == code::PERMISSION_DENIED
        || code == code::UNAUTHENTICATED
        || [
            "authentication failed",
            "invalid auth token",
            "user name is empty",
            "user name not found",
            "permission denied",
        ]
        .iter()
        .any(|text| message.contains(text))
    {
        return Error::AccessDenied(shown());
    }
    match code {
        code::UNAVAILABLE | code::RESOURCE_EXHAUSTED | code::FAILED_PRECONDITION => {
            Error::Unavailable(shown())
        }
        _ => Error::Other(shown()),
    }
}

/// Of the errors of several members the one that says most about the cluster: an answer before silence.
pub(crate) fn most_telling(errors: Vec<Error>) -> Error {
    fn rank(error: &Error) -> u8 {
        match error {
            Error::MemberNotFound | Error::PeerUrlExists => 0,
            Error::AccessDenied(_) => 1,
            Error::Other(_) => 2,
            Error::Unavailable(_) => 3,
            Error::Timeout(_) => 4,
            Error::Tls(_) => 5,
            Error::Unreachable(_) => 6,
        }
    }
    if errors
        .iter()
        .all(|error| matches!(error, Error::Unreachable(_)))
    {
        let texts: Vec<String> = errors
            .into_iter()
            .filter_map(|error| match error {
                Error::Unreachable(text) => Some(text),
                _ => None,
            })
            .collect();
        return Error::Unreachable(if texts.is_empty() {
            "no client URL is known".to_owned()
        } else {
            texts.join("; ")
        });
    }
    errors
        .into_iter()
        .min_by_key(rank)
        .unwrap_or_else(|| Error::Unreachable("no client URL is known".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_what_etcd_refuses_for_now_as_unavailable() {
        for (code, message) in [
            (14, "etcdserver: unhealthy cluster"),
            (14, "etcdserver: no leader"),
            (14, "etcdserver: leader changed"),
            (9, "etcdserver: too many learner members in cluster"),
            (
                9,
                "etcdserver: can only promote a learner member which is in sync with leader",
            ),
            (
                9,
                "etcdserver: re-configuration failed due to not enough started members",
            ),
            (9, "etcdserver: not leader"),
            (9, NOT_FOR_LEARNER),
            (8, "etcdserver: too many requests"),
        ] {
            assert!(
                matches!(answered("e", code, message), Error::Unavailable(_)),
                "{message}"
            );
        }
    }

    #[test]
    fn tells_the_definite_answers_apart() {
        assert!(matches!(
            answered("e", 5, "etcdserver: member not found"),
            Error::MemberNotFound
        ));
        assert!(matches!(
            answered("e", 9, "etcdserver: Peer URLs already exists"),
            Error::PeerUrlExists
        ));
        assert!(matches!(
            answered("e", 14, "etcdserver: request timed out"),
            Error::Timeout(_)
        ));
        assert!(matches!(
            answered(
                "e",
                3,
                "etcdserver: authentication failed, invalid user ID or password"
            ),
            Error::AccessDenied(_)
        ));
        assert!(matches!(
            answered("e", 15, "etcdserver: corrupt cluster"),
            Error::Other(_)
        ));
    }

    #[test]
    fn an_answer_tells_more_than_silence() {
        let error = most_telling(vec![
            Error::Unreachable("a".into()),
            Error::Unavailable("b: no leader".into()),
            Error::Timeout("c".into()),
        ]);
        assert!(matches!(error, Error::Unavailable(_)), "{error}");
    }

    #[test]
    fn names_every_member_that_could_not_be_reached() {
        let error = most_telling(vec![
            Error::Unreachable("a: refused".into()),
            Error::Unreachable("b: refused".into()),
        ]);
        assert_eq!(
            error.to_string(),
            "no member could be reached: a: refused; b: refused"
        );
    }
}
