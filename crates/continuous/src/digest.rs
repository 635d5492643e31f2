//! The SHA-256 of an object. A segment names its predecessor in the chain by this digest. Performs no I/O.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// Number of bytes of a digest in the name of an object.
const SHORT: usize = 8;

/// The SHA-256 of a whole object.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Calculates the digest of an object.
    pub fn of(object: &[u8]) -> Self {
        Self(Sha256::digest(object).into())
    }

    /// The beginning of the digest, which the names of objects contain.
    pub fn short(&self) -> ShortDigest {
        let mut short = [0; SHORT];
        for (to, from) in short.iter_mut().zip(self.0) {
            *to = from;
        }
        ShortDigest(short)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The first 8 bytes of a [`Digest`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShortDigest([u8; SHORT]);

impl ShortDigest {
    /// Parses 16 hexadecimal digits in lower case.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut short = [0; SHORT];
        hex::decode_to_slice(text, &mut short).ok()?;
        let parsed = Self(short);
        (parsed.to_string() == text).then_some(parsed)
    }
}

impl fmt::Display for ShortDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for ShortDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
