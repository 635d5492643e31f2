//! What is looked at in an answer before the Azure client parses it. Its parser, quick-xml 0.31, needs time that grows
//! with the square of a tag's attributes, and memory for every namespace a tag declares (RUSTSEC-2026-0194 and
//! RUSTSEC-2026-0195), and whoever makes an EtcdBackup may name the endpoint. The service's own tags are short.

/// More than the longest list of the service: 100,000 blocks, or 5,000 blobs with their properties.
pub(super) const LONGEST_ANSWER: usize = 32 << 20;

/// A tag with its attributes.
const LONGEST_TAG: usize = 2 << 10;

/// The reason why the parser is not to see this.
pub(super) fn check(xml: &[u8]) -> Result<(), &'static str> {
    let xml = xml.strip_prefix(b"\xef\xbb\xbf").unwrap_or(xml);
    let mut tag: Option<(usize, Option<u8>)> = None;
    for (at, &byte) in xml.iter().enumerate() {
        match &mut tag {
            None if byte == b'<' => {
                // Without comments, sections and instructions a tag ends where this takes it to end.
                match xml.get(at + 1) {
                    Some(b'!') => return Err("an answer in XML has a comment or a section"),
                    Some(b'?') if at > 0 => return Err("an answer in XML has an instruction"),
                    _ => tag = Some((at, None)),
                }
            }
            None => {}
            Some((since, _)) if at - *since > LONGEST_TAG => {
                return Err("an answer in XML has a tag longer than 2 KiB");
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
    fn lists_and_errors_of_the_service_pass() {
        let list = "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ServiceEndpoint=\"https://a/\" \
                    ContainerName=\"c\"><Blobs><Blob><Name>a > b 'c</Name></Blob></Blobs><NextMarker /></EnumerationResults>";
        assert_eq!(check(list.as_bytes()), Ok(()));
        assert_eq!(check(b""), Ok(()));
        assert_eq!(check(b"not XML"), Ok(()));
        let long = format!("<Name>{}</Name>", "x".repeat(1 << 20));
        assert_eq!(check(long.as_bytes()), Ok(()));
    }

    #[test]
    fn a_tag_of_many_attributes_never_reaches_the_parser() {
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
