//! Reads the keys of a Secret. An error names the key and the remedy, never a value (invariant 14).

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use crate::port::Error;

/// The keys and values of a Secret, from the API server or from the directory where the Secret is mounted.
pub type SecretData = BTreeMap<String, Vec<u8>>;

/// Reads all keys of a Secret from the directory where it is mounted.
///
/// # Errors
/// Fails if the directory or the file of a key cannot be read.
pub fn mounted(directory: &Path) -> io::Result<SecretData> {
    let mut data = SecretData::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let key = entry.file_name().to_string_lossy().into_owned();
        // The kubelet adds directories and links whose names start with two dots. These entries are skipped, because no
        // key of a Secret starts with two dots. A key may start with one dot.
        if !key.starts_with("..") && entry.path().is_file() {
            data.insert(key, fs::read(entry.path())?);
        }
    }
    Ok(data)
}

/// The value of a required key as text. Removes white space at both ends, because `echo` and editors add it.
pub(crate) fn text<'a>(data: &'a SecretData, key: &str, remedy: &str) -> Result<&'a str, Error> {
    optional(data, key)?.ok_or_else(|| {
        let others: Vec<&str> = data.keys().map(String::as_str).collect();
        let others = match others.as_slice() {
            [] => "the Secret has no keys".to_owned(),
            others => format!("the Secret has only these keys: {}", others.join(", ")),
        };
        invalid_key(key, format!("is missing ({others}): {remedy}"))
    })
}

/// The value of an optional key as text. `None` if the key is missing or its value is empty.
pub(crate) fn optional<'a>(data: &'a SecretData, key: &str) -> Result<Option<&'a str>, Error> {
    let Some(bytes) = data.get(key) else {
        return Ok(None);
    };
    let text =
        std::str::from_utf8(bytes).map_err(|_| invalid_key(key, "is not text".to_owned()))?;
    Ok(Some(text.trim()).filter(|text| !text.is_empty()))
}

/// Fails if an unknown key is a misspelled known key, because the value of the misspelled key would be ignored. Accepts
/// other unknown keys, because other programs may use the same Secret.
pub(crate) fn reject_misspelled(data: &SecretData, known: &[&str]) -> Result<(), Error> {
    let plain = |key: &str| key.to_ascii_lowercase().replace(['-', '_', '.'], "");
    for key in data.keys().filter(|key| !known.contains(&key.as_str())) {
        if let Some(meant) = known.iter().find(|known| plain(known) == plain(key)) {
            return Err(invalid_key(
                key,
                format!("is an unknown key: rename it to {meant}"),
            ));
        }
    }
    Ok(())
}

pub(crate) fn invalid_key(key: &str, problem: String) -> Error {
    Error::Secret {
        key: key.to_owned(),
        problem,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// The directory has the layout in which the kubelet mounts a Secret.
    #[test]
    fn every_key_of_mounted_secret_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let content = directory.join("..2026_11_27");
        fs::create_dir(&content).unwrap();
        symlink("..2026_11_27", directory.join("..data")).unwrap();
        let keys = [("key", "a"), (".hidden", "b")];
        for (key, value) in keys {
            fs::write(content.join(key), value).unwrap();
            symlink(Path::new("..data").join(key), directory.join(key)).unwrap();
        }
        let expected = keys.map(|(key, value)| (key.to_owned(), value.as_bytes().to_vec()));
        assert_eq!(mounted(directory).unwrap(), SecretData::from(expected));
        assert!(mounted(&directory.join("missing")).is_err());
    }
}
