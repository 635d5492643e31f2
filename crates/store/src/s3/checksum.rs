//! What proves that the store holds what was sent. Pure.
//!
//! A part is proven by the CRC32C that the store has calculated of what it took and says in its answer, where the
//! store knows that: processors have an instruction for it. Elsewhere by `Content-MD5`, which every store compares,
//! and by an entity tag that is the part's MD5. The whole is proven by what follows from its parts.

use md5::{Digest as _, Md5};

use super::base64;
use crate::port::Error;

/// A part the store has taken.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) number: i32,
    pub(super) size: usize,
    /// As the store calls it.
    pub(super) tag: String,
    /// Sent with the part, where the store knows it.
    pub(super) crc32c: Option<u32>,
    /// Sent with the part, where that is not what proves it.
    pub(super) md5: Option<[u8; 16]>,
}

/// A CRC32C as headers have it.
pub(super) fn written(crc32c: u32) -> String {
    base64(&crc32c.to_be_bytes())
}

/// What the store has to say of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Whole {
    /// Its CRC32C: that of its parts' (`COMPOSITE`), or that of all bytes (`FULL_OBJECT`).
    crc32c: Option<[String; 2]>,
    /// Its entity tag.
    tag: Option<String>,
    /// Its entity tag, if the store makes it of its parts' own, which it need not.
    composed: Option<String>,
}

impl Whole {
    /// Of an object sent in one request.
    pub(super) fn of_one(md5: [u8; 16], tag: &str) -> Self {
        let (md5, tag) = (hex::encode(md5), tag.trim_matches('"'));
        Self {
            crc32c: None,
            // A tag that is no MD5 says nothing.
            tag: (tag == md5).then_some(md5),
            composed: None,
        }
    }

    /// Of an object put together of parts.
    pub(super) fn of_parts(parts: &[Part]) -> Self {
        Self {
            crc32c: crc32c(parts),
            tag: tag(parts),
            composed: composed(parts),
        }
    }

    /// Whether the store has to be asked for the checksum.
    pub(super) fn has_checksum(&self) -> bool {
        self.crc32c.is_some()
    }

    /// Invariant 12: what the store says of what it holds must be what follows from what was sent. Where it has
    /// calculated checksums of the parts, it has to say that of the whole, or at least a tag that proves it.
    pub(super) fn is_proven_by(
        &self,
        crc32c: Option<&str>,
        tag: Option<&str>,
    ) -> Result<(), Error> {
        // Behind that of a composite stands the number of parts.
        let said = crc32c.map(|text| text.split('-').next().unwrap_or_default());
        let by_crc32c = match (&self.crc32c, said) {
            (Some(expected), Some(said)) => Some(expected.iter().any(|text| text == said)),
            _ => None,
        };
        let by_tag = match (&self.tag, tag) {
            (Some(expected), Some(said)) => Some(said.trim_matches('"') == expected),
            _ => None,
        };
        match (by_crc32c, by_tag) {
            (Some(false), _) | (_, Some(false)) => Err(Error::Other(
                "the stored object's checksum is not that of what was sent".to_owned(),
            )),
            // Its parts are proven, and it is they.
            (None, None) if tag.is_some_and(|said| self.is_composed_of_its_parts(said)) => Ok(()),
            (None, None) if self.crc32c.is_some() => Err(Error::Other(
                "it does not say the checksum of the stored object, and said those of its parts"
                    .to_owned(),
            )),
            _ => Ok(()),
        }
    }

    fn is_composed_of_its_parts(&self, tag: &str) -> bool {
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
    Some([written(of_parts), written(of_all)])
}

/// If the store makes tags of MD5s, as its parts then show.
fn tag(parts: &[Part]) -> Option<String> {
    let is_its_md5 = |part: &Part| {
        let md5 = part.md5.map(hex::encode);
        md5.as_deref() == Some(part.tag.trim_matches('"'))
    };
    parts.iter().all(is_its_md5).then(|| composed(parts))?
}

/// As S3 makes the tag of an object from those of its parts, whatever they say of what is in these.
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
    fn a_checksum_is_written_as_the_documentation_of_s3_has_it() {
        // The check value of CRC32C is that of these nine digits.
        assert_eq!(written(crc32c::crc32c(b"123456789")), "4waSgw==");
    }

    /// Invariant 12.
    #[test]
    fn invariant_12_the_whole_is_proven_by_what_follows_from_its_parts() {
        let whole = Whole::of_parts(&parts(true, false));
        let of_parts: Vec<u8> = CONTENTS
            .iter()
            .flat_map(|content| crc32c::crc32c(content).to_be_bytes())
            .collect();
        let composite = written(crc32c::crc32c(&of_parts));
        let full = written(crc32c::crc32c(&CONTENTS.concat()));
        for said in [format!("{composite}-3"), composite, full] {
            assert!(whole.is_proven_by(Some(&said), None).is_ok(), "{said}");
            assert!(whole.is_proven_by(Some(&said), Some("any")).is_ok());
        }
        for said in [None, Some("AAAAAA==-3"), Some("")] {
            assert!(whole.is_proven_by(said, Some("any")).is_err(), "{said:?}");
        }
        // A store that keeps the whole's checksum to itself: the tag says that it is made of these parts.
        let tag = whole.composed.clone().unwrap();
        assert!(
            whole
                .is_proven_by(None, Some(&format!("\"{tag}\"")))
                .is_ok()
        );
        assert!(whole.is_proven_by(Some("AAAAAA==-3"), Some(&tag)).is_err());
        // The order is part of it.
        let mut other = parts(true, false);
        other.swap(0, 1);
        assert_ne!(Whole::of_parts(&other), whole);
    }

    /// Invariant 12.
    #[test]
    fn invariant_12_where_no_checksum_is_known_the_tag_proves_it() {
        let whole = Whole::of_parts(&parts(false, true));
        assert!(!whole.has_checksum());
        let tag = whole.tag.clone().unwrap();
        assert!(tag.ends_with("-3"));
        assert!(
            whole
                .is_proven_by(None, Some(&format!("\"{tag}\"")))
                .is_ok()
        );
        assert!(whole.is_proven_by(None, Some("\"other-3\"")).is_err());
        // What is no MD5 says nothing, as with keys of KMS; `Content-MD5` was compared.
        let mut opaque = parts(false, true);
        opaque[1].tag = "opaque".to_owned();
        let opaque = Whole::of_parts(&opaque);
        assert!(opaque.is_proven_by(None, Some("opaque-3")).is_ok());
        // Both are known: either is enough, and none may be wrong.
        let both = Whole::of_parts(&parts(true, true));
        assert!(both.is_proven_by(None, Some(&tag)).is_ok());
        assert!(both.is_proven_by(Some("AAAAAA=="), Some(&tag)).is_err());
        assert!(both.is_proven_by(None, None).is_err());
    }
}
