//! Decrypts and decompresses a stored backup, for people who restore it without the operators. Uses no network.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use api::problem::Chain;
use bytes::Bytes;
use clap::Args;
use store::encryption::{Key, Keys};
use store::unpack::{self, Unpacker};

/// Maximum number of bytes that one read of the object returns.
const PIECE: usize = 1 << 20;

/// Arguments of the command `decrypt`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Decrypt {
    /// File with a key: the content of one entry of the Secret. Repeat the flag for several keys
    #[arg(long = "key", value_name = "FILE", required = true)]
    keys: Vec<PathBuf>,
}

/// Why the backup was not decrypted.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot read the key file {0}")]
    KeyFile(PathBuf, #[source] io::Error),
    #[error(
        "the file {0} is not a key: a key is the base64 text of 32 random bytes, as in the Secret"
    )]
    NotAKey(PathBuf),
    #[error("cannot read the standard input")]
    Input(#[source] io::Error),
    #[error("cannot write the standard output")]
    Output(#[source] io::Error),
    #[error("the backup cannot be decrypted, and the output is not complete")]
    Content(#[from] unpack::Error),
    #[error("the command panicked, which is a defect: report it")]
    Panicked,
}

/// Reads the object from the standard input, and writes the snapshot to the standard output. Returns true if the
/// snapshot is complete.
pub(crate) async fn run(arguments: &Decrypt) -> bool {
    let files = arguments.keys.clone();
    let work = tokio::task::spawn_blocking(move || {
        let keys = read_keys(&files)?;
        decrypt(keys, &mut io::stdin().lock(), &mut io::stdout().lock())
    });
    match work.await.unwrap_or(Err(Error::Panicked)) {
        Ok(size) => {
            tracing::info!(bytes = size, "the snapshot is complete");
            true
        }
        Err(error) => {
            tracing::error!("{}", Chain(&error));
            false
        }
    }
}

fn read_keys(files: &[PathBuf]) -> Result<Keys, Error> {
    let mut keys = Keys::default();
    for file in files {
        let text = std::fs::read(file).map_err(|error| Error::KeyFile(file.clone(), error))?;
        let key = Key::parse(&name_of(file), &text);
        keys.add(key.map_err(|_| Error::NotAKey(file.clone()))?);
    }
    Ok(keys)
}

fn name_of(file: &Path) -> String {
    file.display().to_string()
}

/// Decrypts and decompresses the object, and writes the snapshot. Returns the number of bytes of the snapshot.
fn decrypt(keys: Keys, object: &mut impl Read, snapshot: &mut impl Write) -> Result<u64, Error> {
    let mut unpacker = Unpacker::new(Some(keys));
    let mut written = 0;
    let mut buffer = vec![0; PIECE];
    loop {
        let read = match object.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map_err(Error::Input)?,
        };
        if read == 0 {
            unpacker.end()?;
        } else {
            unpacker.push(Bytes::copy_from_slice(&buffer[..read]))?;
        }
        while let Some(piece) = unpacker.piece()? {
            snapshot.write_all(&piece).map_err(Error::Output)?;
            written += piece.len() as u64;
        }
        if read == 0 {
            unpacker.finish()?;
            snapshot.flush().map_err(Error::Output)?;
            return Ok(written);
        }
    }
}

#[cfg(test)]
mod tests {
    use store::encryption::Encryptor;

    use super::*;

    const TEXT: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n";

    fn key() -> Key {
        Key::parse("first", TEXT.as_bytes()).unwrap()
    }

    fn encrypted(content: &[u8]) -> Vec<u8> {
        let mut object = Vec::new();
        let mut encryptor = Encryptor::new(&key()).unwrap();
        encryptor.push(content, &mut object).unwrap();
        encryptor.finish(&mut object).unwrap();
        object
    }

    #[test]
    fn key_file_decrypts_only_complete_objects() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, TEXT).unwrap();
        let content = vec![7; 3 * PIECE + 5];
        let object = encrypted(&content);
        let mut out = Vec::new();
        let keys = read_keys(std::slice::from_ref(&file)).unwrap();
        let size = decrypt(keys.clone(), &mut object.as_slice(), &mut out).unwrap();
        assert_eq!(size, content.len() as u64);
        assert!(out == content);
        let mut truncated = &object[..object.len() - 1];
        let error = decrypt(keys, &mut truncated, &mut Vec::new()).unwrap_err();
        assert!(matches!(error, Error::Content(_)), "{error:?}");
    }

    #[test]
    fn error_about_wrong_decryption_key_contains_required_key_id() {
        let other = Key::parse("other", "B".repeat(42).as_bytes());
        assert!(other.is_err());
        let other = Key::parse("other", ("B".repeat(42) + "A=").as_bytes()).unwrap();
        let mut keys = Keys::default();
        keys.add(other);
        let object = encrypted(b"content");
        let error = decrypt(keys, &mut object.as_slice(), &mut Vec::new()).unwrap_err();
        let text = Chain(&error).to_string();
        assert!(text.contains(&key().id().to_string()), "{text}");
    }

    #[test]
    fn unusable_key_file_is_reported_with_reason() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        let text = |file: &PathBuf| {
            read_keys(std::slice::from_ref(file))
                .unwrap_err()
                .to_string()
        };
        assert!(text(&file).contains("cannot read the key file"));
        std::fs::write(&file, "not a key").unwrap();
        assert!(text(&file).contains("base64 text of 32 random bytes"));
    }
}
