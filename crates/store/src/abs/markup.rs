//! Checks a response before the Azure client parses it, because users choose the endpoint and a response may be
//! malicious. The client's parser (quick-xml 0.31) needs quadratic time for the attributes of a tag, and memory for
//! each namespace (RUSTSEC-2026-0194 and RUSTSEC-2026-0195).

use crate::limits::MAX_PAGE_ENTRIES;

/// Every error of [`check`] starts with this text.
pub(super) const FAULT: &str = "an XML response";

/// Maximum length in bytes of a tag with its attributes. Azure sends short tags.
const MAX_TAG: usize = 2 << 10;

/// Maximum number of tags whose names start with `Blob`. Azure sends two such tags for each blob, `Blob` and
/// `BlobType`. The parser needs more than 1 KiB of memory for each `Blob` or `BlobPrefix`, even if it is empty.
const MAX_BLOB_TAGS: usize = 2 * MAX_PAGE_ENTRIES;

/// Maximum number of tags in a response. The parser stores every unknown property of a blob, so tags of any name need
/// memory. A page of 1,000 blobs has about 40,000 tags.
const MAX_TAGS: usize = 200_000;

/// Fails if the response exceeds a limit, or if the parser could read it differently from this check.
pub(super) fn check(xml: &[u8]) -> Result<(), &'static str> {
    let xml = xml.strip_prefix(b"\xef\xbb\xbf").unwrap_or(xml);
    let mut tag: Option<(usize, Option<u8>)> = None;
    let (mut tags, mut blob_tags) = (0, 0);
    for (at, &byte) in xml.iter().enumerate() {
        match &mut tag {
            None if byte == b'<' => {
                tags += 1;
                if tags > MAX_TAGS {
                    return Err("an XML response has more tags than one page may have");
                }
                // A `>` inside a comment, a CDATA section or a processing instruction does not end a tag. This function
                // does not recognize the ends of these parts, and could count other tags than the XML parser. It
                // therefore rejects responses with such parts.
                match xml.get(at + 1) {
                    Some(b'!') => {
                        return Err("an XML response contains a comment or a CDATA section");
                    }
                    Some(b'?') if at > 0 => {
                        return Err("an XML response contains a processing instruction");
                    }
                    Some(b'B')
                        if xml
                            .get(at + 1..)
                            .is_some_and(|name| name.starts_with(b"Blob")) =>
                    {
                        blob_tags += 1;
                        if blob_tags > MAX_BLOB_TAGS {
                            return Err("an XML response lists more blobs than one page may have");
                        }
                        tag = Some((at, None));
                    }
                    _ => tag = Some((at, None)),
                }
            }
            None => {}
            Some((since, _)) if at - *since > MAX_TAG => {
                return Err("an XML response contains a tag longer than 2 KiB");
            }
            Some((_, quote)) => match (*quote, byte) {
                (None, b'"' | b'\'') => *quote = Some(byte),
                (None, b'>') => tag = None,
                (Some(open), _) if open == byte => *quote = None,
                _ => {}
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_store_xml_tags_of_a_page_are_limited() {
        let list = |count: usize| {
            let blobs = "<BlobPrefix><Name/></BlobPrefix>".repeat(count);
            check(format!("<EnumerationResults>{blobs}</EnumerationResults>").as_bytes())
        };
        assert_eq!(list(MAX_BLOB_TAGS), Ok(()));
        assert!(list(MAX_BLOB_TAGS + 1).is_err());
        let properties = |count: usize| check("<a/>".repeat(count).as_bytes());
        assert_eq!(properties(MAX_TAGS), Ok(()));
        assert!(properties(MAX_TAGS + 1).is_err());
    }

    #[test]
    fn xml_check_accepts_azure_lists_and_errors() {
        let list = "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ServiceEndpoint=\"https://a/\" \
                    ContainerName=\"c\"><Blobs><Blob><Name>a > b 'c</Name></Blob></Blobs><NextMarker /></EnumerationResults>";
        assert_eq!(check(list.as_bytes()), Ok(()));
        assert_eq!(check(b""), Ok(()));
        assert_eq!(check(b"not XML"), Ok(()));
        let long = format!("<Name>{}</Name>", "x".repeat(1 << 20));
        assert_eq!(check(long.as_bytes()), Ok(()));
    }

    #[test]
    fn xml_tag_with_many_attributes_is_rejected() {
        let many = |separator: &str| {
            let names = (0..500).map(|number| format!(" xmlns:n{number}={separator}"));
            format!(
                "<a>{}</a>",
                format_args!("<b{}/>", names.collect::<String>())
            )
        };
        for separator in ["'>'", "\">\"", "'\"'"] {
            assert!(check(many(separator).as_bytes()).is_err(), "{separator}");
        }
        for hidden in ["<!-- > <x \" -->", "<![CDATA[ > <x ' ]]>", "<?x > <y ' ?>"] {
            let text = format!("<a>{hidden}{}</a>", many("'>'"));
            assert!(check(text.as_bytes()).is_err(), "{hidden}");
        }
    }
}
