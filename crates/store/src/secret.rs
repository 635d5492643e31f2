//! Reading the keys of a Secret. An error names the key and what to do, never a value (invariant 14).

use std::collections::BTreeMap;

use crate::port::Error;

/// A Secret's data, or what the directory of a mounted Secret holds.
pub type SecretData = BTreeMap<String, Vec<u8>>;

/// A key that has to be there and be text. White space at its ends, which `echo` and editors add, is dropped.
pub(crate) fn text<'a>(data: &'a SecretData, key: &str, remedy: &str) -> Result<&'a str, Error> {
    optional(data, key)?.ok_or_else(|| {
        let others: Vec<&str> = data.keys().map(String::as_str).collect();
        let others = match others.as_slice() {
            [] => "it has no keys".to_owned(),
            others => format!("it has {}", others.join(", ")),
        };
        wrong(key, format!("is missing ({others}): {remedy}"))
    })
}

/// As [`text`], for a key that may be missing or empty.
pub(crate) fn optional<'a>(data: &'a SecretData, key: &str) -> Result<Option<&'a str>, Error> {
    let Some(bytes) = data.get(key) else {
        return Ok(None);
    };
    let text = std::str::from_utf8(bytes).map_err(|_| wrong(key, "is not text".to_owned()))?;
    Ok(Some(text.trim()).filter(|text| !text.is_empty()))
}

/// Refuses a key that is a known one in another spelling: it would be ignored, and the user would look for the
/// fault elsewhere. Other keys are somebody else's: a Secret may serve several readers.
pub(crate) fn spelt(data: &SecretData, known: &[&str]) -> Result<(), Error> {
    let plain = |key: &str| key.to_ascii_lowercase().replace(['-', '_', '.'], "");
    for key in data.keys().filter(|key| !known.contains(&key.as_str())) {
        if let Some(meant) = known.iter().find(|known| plain(known) == plain(key)) {
            return Err(wrong(key, format!("is not known: call it {meant}")));
        }
    }
    Ok(())
}

/// What is wrong with a key.
pub(crate) fn wrong(key: &str, problem: String) -> Error {
    Error::Secret {
        key: key.to_owned(),
        problem,
    }
}
