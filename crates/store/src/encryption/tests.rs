//! Tests of the encryption, with objects of another program and with damaged objects.

use proptest::prelude::*;

use super::*;
use crate::SecretData;
use crate::testing::content;

const TEXT: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

fn key() -> Key {
    Key::parse("first", TEXT.as_bytes()).unwrap()
}

fn other_key() -> Key {
    let text = "B".repeat(42) + "A=";
    Key::parse("second", text.as_bytes()).unwrap()
}

fn keys(all: impl IntoIterator<Item = Key>) -> Keys {
    let mut keys = Keys::default();
    all.into_iter().for_each(|key| keys.add(key));
    keys
}

fn salt() -> [u8; SALT] {
    std::array::from_fn(|index| 100 + u8::try_from(index).unwrap())
}

/// Encrypts the content in pieces of `length` bytes.
fn sealed(mut encryptor: Encryptor, content: &[u8], length: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for piece in content.chunks(length) {
        encryptor.push(piece, &mut out).unwrap();
    }
    encryptor.finish(&mut out).unwrap();
    out
}

fn encrypted(content: &[u8]) -> Vec<u8> {
    sealed(Encryptor::new(&key()).unwrap(), content, 1000)
}

fn opened(keys: Keys, stored: &[u8], length: usize) -> Result<Vec<u8>, Error> {
    let mut decryptor = Decryptor::new(keys);
    let mut out = Vec::new();
    for piece in stored.chunks(length) {
        decryptor.push(piece, &mut out)?;
    }
    decryptor.finish(&mut out)?;
    Ok(out)
}

fn decrypted(stored: &[u8]) -> Result<Vec<u8>, Error> {
    opened(keys([key()]), stored, 1000)
}

#[test]
fn stored_size_is_size_of_encrypted_object() {
    for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5] {
        let stored = encrypted(&content(size));
        assert_eq!(stored.len() as u64, stored_size(size as u64), "{size}");
    }
    assert_eq!(stored_size(u64::MAX), u64::MAX);
}

/// A Python program with the library `cryptography` wrote these objects, following docs/internals/backup-encryption.md.
/// Every later release must be able to read them.
#[test]
fn encryption_matches_output_of_independent_program() {
    assert_eq!(key().id().to_string(), "a62e0f7753a4df18");
    let header = "45746364456e6331a62e0f7753a4df18\
                  6465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283";
    for (content, expected) in [
        ("", "0c37aa7e95001bc7b49e3cb054d819ff"),
        ("etcd", "4dc1e04e87260992c8e4028b686fee4e4e31fc86"),
    ] {
        let encryptor = Encryptor::with_salt(&key(), salt()).unwrap();
        let stored = sealed(encryptor, content.as_bytes(), 1);
        assert_eq!(hex::encode(&stored), format!("{header}{expected}"));
        assert_eq!(decrypted(&stored).unwrap(), content.as_bytes());
    }
    // This content has three chunks.
    let content: Vec<u8> = (0..150_000_u32).map(|index| (index % 251) as u8).collect();
    let encryptor = Encryptor::with_salt(&key(), salt()).unwrap();
    let stored = sealed(encryptor, &content, 777);
    assert_eq!(stored.len(), 150_096);
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &stored);
    assert_eq!(
        hex::encode(digest.as_ref()),
        "7ff4c346bbf94a0e264b9ae227236d9c03068dbd3d99c782be35e066757ba355"
    );
    assert!(decrypted(&stored).unwrap() == content);
}

#[test]
fn encrypted_content_round_trips_at_chunk_boundaries() {
    for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7] {
        let content = content(size);
        let stored = encrypted(&content);
        let chunks = size.div_ceil(CHUNK).max(1);
        assert_eq!(stored.len(), HEADER + size + chunks * TAG);
        for length in [1, 999, CHUNK + TAG, 1 << 20] {
            assert!(opened(keys([key()]), &stored, length).unwrap() == content);
        }
    }
}

#[test]
fn objects_with_equal_content_have_different_salt_and_ciphertext() {
    let content = content(1000);
    let (one, other) = (encrypted(&content), encrypted(&content));
    assert_eq!(
        one[..BEGINNING + KeyId::LENGTH],
        other[..BEGINNING + KeyId::LENGTH]
    );
    assert_ne!(one[HEADER - SALT..], other[HEADER - SALT..]);
    assert_ne!(one[HEADER..], other[HEADER..]);
    assert!(one.windows(16).all(|window| window != &content[..16]));
}

/// Decryption of a truncated object fails, even if the object ends between two chunks.
#[test]
fn decryption_detects_truncation() {
    let stored = encrypted(&content(2 * CHUNK + 100));
    let ends = [
        0,
        7,
        HEADER - 1,
        HEADER,
        HEADER + 1,
        HEADER + TAG,
        HEADER + CHUNK + TAG - 1,
        HEADER + CHUNK + TAG,
        HEADER + CHUNK + TAG + 1,
        HEADER + 2 * (CHUNK + TAG),
        stored.len() - 1,
    ];
    for end in ends {
        let error = decrypted(&stored[..end]).unwrap_err();
        let expected = matches!(error, Error::Truncated | Error::Damaged { .. });
        assert!(expected, "{end}: {error:?}");
    }
}

#[test]
fn decryption_rejects_reordered_repeated_or_appended_chunks() {
    let stored = encrypted(&content(3 * CHUNK));
    let (header, chunks) = stored.split_at(HEADER);
    let chunks: Vec<&[u8]> = chunks.chunks(CHUNK + TAG).collect();
    assert_eq!(chunks.len(), 3);
    for order in [
        vec![1, 0, 2],
        vec![0, 2, 1],
        vec![0, 0, 2],
        vec![0, 0, 1, 2],
        vec![0, 1, 1, 2],
        vec![0, 2],
        vec![1, 2],
        vec![0, 1],
        vec![2],
        vec![0, 1, 2, 2],
        vec![0, 1, 2, 0],
    ] {
        let mut changed = header.to_vec();
        for index in &order {
            changed.extend_from_slice(chunks[*index]);
        }
        let error = decrypted(&changed).unwrap_err();
        assert!(
            matches!(error, Error::Damaged { .. }),
            "{order:?}: {error:?}"
        );
    }
    for more in [1, TAG, CHUNK + TAG] {
        let appended = [stored.as_slice(), &vec![0; more]].concat();
        assert!(decrypted(&appended).is_err(), "{more}");
    }
}

/// Decryption of a chunk from another object fails, even if both objects have the same user key. Each object has its
/// own derived key.
#[test]
fn decryption_rejects_chunk_of_another_object() {
    let content = content(2 * CHUNK);
    let (one, other) = (encrypted(&content), encrypted(&content));
    let at = HEADER + CHUNK + TAG;
    let mixed = [&one[..at], &other[at..]].concat();
    let error = decrypted(&mixed).unwrap_err();
    assert!(
        matches!(error, Error::Damaged { chunk: 1, .. }),
        "{error:?}"
    );
    let other_header = [&other[..HEADER], &one[HEADER..]].concat();
    let error = decrypted(&other_header).unwrap_err();
    assert!(
        matches!(error, Error::Damaged { chunk: 0, .. }),
        "{error:?}"
    );
}

#[test]
fn decryption_key_is_found_among_several_keys() {
    let stored = encrypted(b"content");
    let both = keys([other_key(), key()]);
    assert_eq!(opened(both, &stored, 100).unwrap(), b"content");
    let error = opened(keys([other_key()]), &stored, 100).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&key().id().to_string()), "{text}");
    assert!(
        text.contains(&format!("second (ID {})", other_key().id())),
        "{text}"
    );
    assert!(matches!(error, Error::UnknownKey { .. }));
    assert!(opened(Keys::default(), &stored, 100).is_err());
}

/// An attacker can write the ID of a known key into the header of an object that is encrypted with another key.
#[test]
fn decryption_rejects_wrong_key_with_expected_id() {
    let mut stored = sealed(Encryptor::new(&other_key()).unwrap(), b"content", 100);
    stored[BEGINNING..BEGINNING + KeyId::LENGTH].copy_from_slice(key().id().as_bytes());
    let error = decrypted(&stored).unwrap_err();
    assert!(
        matches!(error, Error::Damaged { chunk: 0, .. }),
        "{error:?}"
    );
}

#[test]
fn object_of_other_format_is_reported_as_unencrypted() {
    let mut stored = encrypted(b"content");
    stored[7] = b'2';
    assert_eq!(decrypted(&stored), Err(Error::NotEncrypted));
    assert_eq!(decrypted(&[0; 1000]), Err(Error::NotEncrypted));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Decryption of an object with one flipped bit fails, at any position of the bit.
    #[test]
    fn decryption_detects_flipped_bit(at in 0_usize..(HEADER + 2 * (CHUNK + TAG)), bit in 0_u8..8) {
        let mut stored = encrypted(&content(2 * CHUNK));
        stored[at] ^= 1 << bit;
        prop_assert!(decrypted(&stored).is_err());
    }

    /// Decryption of random bytes, with or without a valid header before them, fails and causes no panic.
    #[test]
    fn decryption_rejects_random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..500), header in any::<bool>()) {
        let mut stored = if header { encrypted(b"")[..HEADER].to_vec() } else { Vec::new() };
        stored.extend_from_slice(&bytes);
        prop_assert!(decrypted(&stored).is_err());
    }
}

#[test]
fn key_is_base64_of_32_bytes() {
    let parse = |text: &str| Key::parse("k", text.as_bytes());
    assert_eq!(parse(&format!(" {TEXT}\n")).unwrap().id(), key().id());
    for text in [
        "",
        "secret",
        &TEXT[..40],
        &TEXT.repeat(2),
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ] {
        assert_eq!(
            parse(text),
            Err(KeyError::Malformed("k".to_owned())),
            "{text}"
        );
    }
    assert!(Key::parse("k", &[0xff; 32]).is_err());
}

/// Invariant 14: a key never appears in a log line or in a message.
#[test]
fn invariant_14_debug_text_contains_no_key() {
    let shown = format!("{:?} {:?}", key(), keys([key()]));
    assert!(shown.contains("a62e0f7753a4df18"), "{shown}");
    assert!(
        !shown.contains("AAEC") && !shown.contains("1, 2, 3"),
        "{shown}"
    );
}

fn secret(entries: &[(&str, &str)]) -> SecretData {
    let entries = entries.iter();
    entries
        .map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec()))
        .collect()
}

#[test]
fn new_backup_uses_named_key_or_only_key_of_secret() {
    let two = secret(&[("2026", TEXT), ("2027", "garbage")]);
    let name =
        |data: &SecretData, name| for_new_backups(data, name).map(|key| key.name().to_owned());
    assert_eq!(name(&two, Some("2026")), Ok("2026".to_owned()));
    assert_eq!(
        name(&secret(&[("2026", TEXT)]), None),
        Ok("2026".to_owned())
    );
    assert_eq!(
        name(&two, None),
        Err(KeyError::Ambiguous("2026, 2027".to_owned()))
    );
    assert_eq!(
        name(&two, Some("2028")),
        Err(KeyError::Missing("2028".to_owned()))
    );
    assert_eq!(
        name(&two, Some("2027")),
        Err(KeyError::Malformed("2027".to_owned()))
    );
    assert_eq!(name(&SecretData::new(), None), Err(KeyError::Empty));
}

#[test]
fn missing_decryption_key_error_contains_id_and_name() {
    let keys = Keys::of(&secret(&[("2026", TEXT), ("notes", "text")]));
    assert_eq!(keys.require("a62e0f7753a4df18", "2026"), Ok(()));
    // `require` finds the key by its ID, so it accepts another name.
    assert_eq!(keys.require("a62e0f7753a4df18", "renamed"), Ok(()));
    let text = keys.require("ffff", "2025").unwrap_err().to_string();
    for part in [
        "ID ffff",
        "\"2025\"",
        "2026 (ID a62e0f7753a4df18)",
        "notes (not a key)",
    ] {
        assert!(text.contains(part), "{text}");
    }
}
