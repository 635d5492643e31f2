//! Verifies that the stored data equals the sent data. Performs no I/O.
//!
//! The CRC32C that the store returns for a part verifies the part. A store without CRC32C compares the part's
//! `Content-MD5`. At the end, the checksum or entity tag of the whole object must match the checksums of its parts.

use md5::{Digest as _, Md5};

use super::base64;
use crate::port::Error;

/// A part that the store has accepted.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) number: i32,
    pub(super) size: usize,
    /// The entity tag of the part.
    pub(super) tag: String,
    /// The CRC32C that was sent with the part. `None` if the store does not support CRC32C.
    pub(super) crc32c: Option<u32>,
    /// The MD5 that was sent with the part. `None` if the CRC32C has verified the part.
    pub(super) md5: Option<[u8; 16]>,
}

/// A CRC32C in the format of S3 headers: big endian, in base64.
pub(super) fn header_value(crc32c: u32) -> String {
    base64(&crc32c.to_be_bytes())
}

/// The expected checksums of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Whole {
    /// The CRC32C of the parts' checksums (`COMPOSITE`), and the CRC32C of all bytes (`FULL_OBJECT`). `None` if the
    /// object was sent in one request, or if a part was sent without a CRC32C.
    crc32c: Option<[String; 2]>,
    /// The required entity tag of the object. `None` if the store does not use MD5 for entity tags, or if a part was
    /// sent without an MD5.
    tag: Option<String>,
    /// The entity tag that S3 would derive from the entity tags of the parts. Some stores use other entity tags.
    composed: Option<String>,
}

impl Whole {
    /// The expected checksums of an object that was sent in one request.
    pub(super) fn of_single_request(md5: [u8; 16], tag: &str) -> Self {
        let (md5, tag) = (hex::encode(md5), tag.trim_matches('"'));
        Self {
            crc32c: None,
            // If objects are encrypted with KMS keys, the entity tag is not the MD5 of the content. In this case, `tag`
            // is `None`, and `verify` does not compare entity tags.
            tag: (tag == md5).then_some(md5),
            composed: None,
        }
    }

    /// The expected checksums of an object that was sent in several parts.
    pub(super) fn of_parts(parts: &[Part]) -> Self {
        Self {
            crc32c: crc32c(parts),
            tag: tag(parts),
            composed: composed(parts),
        }
    }

    /// Whether the request for the object's metadata must request the checksum of the object.
    pub(super) fn has_checksum(&self) -> bool {
        self.crc32c.is_some()
    }

    /// Invariant 12: fails if the reported checksums do not match the sent data. A store that has reported checksums of
    /// the parts must report a checksum of the object, or the entity tag that S3 would derive from the parts.
    pub(super) fn verify(&self, crc32c: Option<&str>, tag: Option<&str>) -> Result<(), Error> {
        // A composite checksum ends with a dash and the number of parts.
        let reported = crc32c.map(|text| text.split('-').next().unwrap_or_default());
        let by_crc32c = match (&self.crc32c, reported) {
            (Some(expected), Some(reported)) => Some(expected.iter().any(|text| text == reported)),
            _ => None,
        };
        let by_tag = match (&self.tag, tag) {
            (Some(expected), Some(reported)) => Some(reported.trim_matches('"') == expected),
            _ => None,
        };
        match (by_crc32c, by_tag) {
            (Some(false), _) | (_, Some(false)) => Err(Error::Other(
                "the checksum of the stored object does not match the sent data".to_owned(),
            )),
            // The entity tag proves that the object consists of the sent parts. Each part was verified when it was
            // sent, so no checksum of the object is needed.
            (None, None) if tag.is_some_and(|reported| self.matches_composed_tag(reported)) => {
                Ok(())
            }
            (None, None) if self.crc32c.is_some() => Err(Error::Other(
                "the store reported checksums of the parts but not of the object".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    fn matches_composed_tag(&self, tag: &str) -> bool {
        self.composed.as_deref() == Some(tag.trim_matches('"'))
    }
}

fn crc32c(parts: &[Part]) -> Option<[String; 2]> {
    let (mut of_parts, mut of_all) = (0, 0);
    for part in parts {
        let crc32c = part.crc32c?;
        of_parts = crc32c::crc32c_append(of_parts, &crc32c.to_be_bytes());
        of_all = crc32c::crc32c_combine(of_all, crc32c, part.size);
    }
    Some([header_value(of_parts), header_value(of_all)])
}

/// The required entity tag of the whole object. `None` if a part was sent without an MD5, or if its entity tag is not
/// this MD5.
fn tag(parts: &[Part]) -> Option<String> {
    let is_its_md5 = |part: &Part| {
        let md5 = part.md5.map(hex::encode);
        md5.as_deref() == Some(part.tag.trim_matches('"'))
    };
    parts.iter().all(is_its_md5).then(|| composed(parts))?
}

/// The entity tag that S3 would derive from the entity tags of the parts, which need not be MD5s.
fn composed(parts: &[Part]) -> Option<String> {
    let mut whole = Md5::new();
    for part in parts {
        let tag = part.tag.trim_matches('"');
        if tag.len() != 32 || !tag.is_ascii() {
            return None;
        }
        for at in (0..tag.len()).step_by(2) {
            whole.update([u8::from_str_radix(&tag[at..at + 2], 16).ok()?]);
        }
    }
    let digest: [u8; 16] = whole.finalize().into();
    Some(format!("{}-{}", hex::encode(digest), parts.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::s3::md5_of;

    const CONTENTS: [&[u8]; 3] = [b"first", b"second", b"3"];

    fn parts(crc32c: bool, md5: bool) -> Vec<Part> {
        CONTENTS
            .iter()
            .zip(1..)
            .map(|(content, number)| Part {
                number,
                size: content.len(),
                tag: format!("\"{}\"", hex::encode(md5_of(content))),
                crc32c: crc32c.then(|| crc32c::crc32c(content)),
                md5: md5.then(|| md5_of(content)),
            })
            .collect()
    }

    #[test]
    fn checksum_has_s3_header_format() {
        // "4waSgw==" encodes 0xE3069283, the published CRC32C of the text "123456789".
        assert_eq!(header_value(crc32c::crc32c(b"123456789")), "4waSgw==");
    }

    /// Invariant 12: the checksum of the object must match the checksums of the sent parts.
    #[test]
    fn invariant_12_object_checksum_must_match_part_checksums() {
        let whole = Whole::of_parts(&parts(true, false));
        let of_parts: Vec<u8> = CONTENTS
            .iter()
            .flat_map(|content| crc32c::crc32c(content).to_be_bytes())
            .collect();
        let composite = header_value(crc32c::crc32c(&of_parts));
        let full = header_value(crc32c::crc32c(&CONTENTS.concat()));
        for reported in [format!("{composite}-3"), composite, full] {
            assert!(whole.verify(Some(&reported), None).is_ok(), "{reported}");
            assert!(whole.verify(Some(&reported), Some("any")).is_ok());
        }
        for reported in [None, Some("AAAAAA==-3"), Some("")] {
            assert!(whole.verify(reported, Some("any")).is_err(), "{reported:?}");
        }
        // Without a checksum of the whole object, the entity tag proves that the object consists of these parts.
        let tag = whole.composed.clone().unwrap();
        assert!(whole.verify(None, Some(&format!("\"{tag}\""))).is_ok());
        assert!(whole.verify(Some("AAAAAA==-3"), Some(&tag)).is_err());
        // Parts in another order have another checksum of the object.
        let mut other = parts(true, false);
        other.swap(0, 1);
        assert_ne!(Whole::of_parts(&other), whole);
    }

    /// Invariant 12: without CRC32C checksums, the entity tag of the object must match the MD5s of the parts.
    #[test]
    fn invariant_12_object_tag_must_match_parts() {
        let whole = Whole::of_parts(&parts(false, true));
        assert!(!whole.has_checksum());
        let tag = whole.tag.clone().unwrap();
        assert!(tag.ends_with("-3"));
        assert!(whole.verify(None, Some(&format!("\"{tag}\""))).is_ok());
        assert!(whole.verify(None, Some("\"other-3\"")).is_err());
        // With KMS keys, the entity tag of a part is not its MD5, so the entity tag of the object cannot be predicted.
        // `verify` accepts every entity tag of such an object, because the store has checked each part against its
        // `Content-MD5`.
        let mut opaque = parts(false, true);
        opaque[1].tag = "opaque".to_owned();
        let opaque = Whole::of_parts(&opaque);
        assert!(opaque.verify(None, Some("opaque-3")).is_ok());
        // `both` expects a checksum and an entity tag. The store may report only the entity tag. `verify` rejects a
        // wrong checksum, and a response without checksum and entity tag.
        let both = Whole::of_parts(&parts(true, true));
        assert!(both.verify(None, Some(&tag)).is_ok());
        assert!(both.verify(Some("AAAAAA=="), Some(&tag)).is_err());
        assert!(both.verify(None, None).is_err());
    }
}
