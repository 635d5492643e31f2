//! Tests of the segment format, with valid and damaged objects.
#![allow(clippy::unwrap_used, clippy::panic)]

use etcd::{Change, Value};
use proptest::prelude::*;

use super::*;
use crate::error::SegmentError;
use crate::fixture::{self, BASE_REVISION, base, transaction};
use crate::record::{Gap, GapReason, Moment, Transaction};

fn identity() -> Identity {
    Identity {
        cluster_id: 7,
        base_revision: BASE_REVISION,
        first: BASE_REVISION + 1,
        previous: base().digest,
    }
}

/// A segment with these records. The records may break the rules of the format.
fn sealed(records: &[Record]) -> Sealed {
    let messages: Vec<_> = records
        .iter()
        .map(|record| {
            let revision = match record {
                Record::Transaction(it) => Some(it.revision),
                _ => None,
            };
            (encoded(record), revision)
        })
        .collect();
    sealed_messages(&messages)
}

fn sealed_messages(messages: &[(Vec<u8>, Option<i64>)]) -> Sealed {
    let mut builder = SegmentBuilder::new(identity()).unwrap();
    for (message, revision) in messages {
        builder.push(message, *revision).unwrap();
    }
    builder.seal().unwrap()
}

fn record(revision: i64) -> Record {
    Record::Transaction(transaction(revision))
}

fn gap(after: i64) -> Record {
    Record::Gap(Gap {
        after,
        reason: GapReason::Compacted,
        observed: 9,
    })
}

fn error_of(object: &[u8]) -> SegmentError {
    Segment::decode(object).unwrap_err()
}

/// Scans the object in pieces of this length.
fn scanned(object: &[u8], length: usize) -> Result<Times, SegmentError> {
    let mut scanner = Scanner::new();
    for piece in object.chunks(length) {
        scanner.push(piece)?;
    }
    scanner.finish()
}

/// The result that a scan of this segment must have.
fn times_of(segment: &Segment) -> Times {
    let transactions = segment.records.iter().filter_map(|record| match record {
        Record::Transaction(it) => Some(Moment {
            revision: it.revision,
            time: it.observed,
        }),
        _ => None,
    });
    let gap = segment.records.iter().find_map(|record| match record {
        Record::Gap(gap) => Some(*gap),
        _ => None,
    });
    Times {
        last: segment.header.last,
        digest: segment.digest,
        transactions: transactions.collect(),
        gap,
    }
}

#[test]
fn all_kinds_of_records_round_trip() {
    let mut records = fixture::records(11);
    records.extend(fixture::records(12));
    records.push(gap(12));
    let sealed = sealed(&records);
    let segment = Segment::decode(&sealed.object).unwrap();
    assert_eq!(segment.records, records);
    assert_eq!(segment.digest, sealed.digest);
    assert_eq!((sealed.name.first, sealed.name.last), (11, 12));
    assert_eq!(sealed.name.previous, base().digest.short());
    for length in [1, 7, 139, 140, 141, sealed.object.len()] {
        let times = scanned(&sealed.object, length).unwrap();
        assert_eq!(times, times_of(&segment), "{length}");
    }
    let empty = sealed_messages(&[(encoded(&gap(10)), None)]);
    assert_eq!((empty.name.first, empty.name.last), (11, 10));
    assert_eq!(Segment::decode(&empty.object).unwrap().records, [gap(10)]);
}

/// The bytes of a header must not change, because other programs read the format.
#[test]
fn header_has_specified_layout() {
    let object = sealed(&[record(11)]).object;
    assert_eq!(&object[..8], b"\x89ETCDSEG");
    assert_eq!(&object[8..16], [0, 0, 0, 1, 0, 0, 0, 0]);
    assert_eq!(&object[16..24], [0, 0, 0, 0, 0, 0, 0, 7]);
    assert_eq!(&object[24..32], 10_i64.to_be_bytes());
    assert_eq!(&object[32..40], 11_i64.to_be_bytes());
    assert_eq!(&object[40..48], 11_i64.to_be_bytes());
    assert_eq!(&object[48..80], base().digest.0);
    assert_eq!(&object[80..88], 1_u64.to_be_bytes());
    assert_eq!(
        &object[96..104],
        ((object.len() - 140) as u64).to_be_bytes()
    );
    assert_eq!(&object[104..136], Digest::of(&object[140..]).0);
    assert_eq!(
        &object[136..140],
        crc32c::crc32c(&object[..136]).to_be_bytes()
    );
    assert_eq!(&object[140..144], [0x28, 0xb5, 0x2f, 0xfd]);
}

#[test]
fn record_has_specified_encoding() {
    let lease = Record::Lease(crate::record::Lease {
        id: 5,
        ttl: Some(60),
        seen: 7,
    });
    assert_eq!(encoded(&lease), [0x12, 6, 0x08, 5, 0x10, 60, 0x18, 7]);
    let change = Record::Transaction(Transaction {
        revision: 3,
        observed: 1,
        changes: vec![fixture::deletion(b"k")],
    });
    let expected = [0x0a, 9, 0x08, 3, 0x10, 1, 0x1a, 3, 0x0a, 1, b'k'];
    assert_eq!(encoded(&change), expected);
}

#[test]
fn truncated_or_extended_segment_is_rejected() {
    let object = sealed(&fixture::records(11)).object;
    for length in [0, 7, 8, 139, 140, object.len() - 1] {
        let error = error_of(&object[..length]);
        assert!(
            matches!(error, SegmentError::Truncated { .. }),
            "{length}: {error}"
        );
        assert_eq!(scanned(&object[..length], 100), Err(error));
    }
    let longer = [object.as_ref(), b"x"].concat();
    assert!(matches!(error_of(&longer), SegmentError::TooLong { .. }));
    assert_eq!(scanned(&longer, longer.len()), Err(error_of(&longer)));
    assert_eq!(error_of(b"{}"), SegmentError::NotASegment);
}

#[test]
fn unknown_version_or_flags_are_rejected() {
    let object = sealed(&[record(11)]).object;
    for (offset, expected) in [(11, (3, 0)), (15, (1, 2))] {
        let mut changed = object.to_vec();
        changed[offset] ^= 2;
        let (version, flags) = expected;
        let expected = SegmentError::UnknownVersion { version, flags };
        assert_eq!(error_of(&changed), expected);
    }
}

#[test]
fn every_damaged_byte_is_detected() {
    let object = sealed(&fixture::records(11)).object;
    for index in 0..object.len() {
        let mut damaged = object.to_vec();
        damaged[index] ^= 1;
        assert!(Segment::decode(&damaged).is_err(), "byte {index}");
        assert!(scanned(&damaged, 100).is_err(), "byte {index}");
    }
}

#[test]
fn segment_with_invalid_records_is_rejected() {
    let wrong = |records: &[Record]| error_of(&sealed(records).object);
    let order = |expected, found| SegmentError::WrongRevision { expected, found };
    assert_eq!(wrong(&[record(12)]), order(11, 12));
    assert_eq!(wrong(&[record(11), record(13)]), order(12, 13));
    assert_eq!(wrong(&[record(11), record(11)]), order(12, 11));
    for records in [
        vec![gap(10), record(11)],
        vec![record(11), gap(10)],
        vec![Record::Transaction(Transaction {
            changes: Vec::new(),
            ..transaction(11)
        })],
        vec![Record::Transaction(Transaction {
            changes: vec![fixture::put(b"", b"", 0)],
            ..transaction(11)
        })],
    ] {
        let error = wrong(&records);
        let is_damaged = matches!(error, SegmentError::RecordDamaged { .. });
        assert!(is_damaged, "{records:?}: {error}");
    }
    for message in [Vec::new(), vec![0x32, 0], vec![0x0a, 0xff]] {
        let error = error_of(&sealed_messages(&[(message, None)]).object);
        let is_damaged = matches!(error, SegmentError::RecordDamaged { index: 0, .. });
        assert!(is_damaged, "{error}");
    }
    let other_last = sealed_messages(&[(encoded(&record(11)), Some(12))]);
    assert_eq!(error_of(&other_last.object), order(11, 12));
}

/// A small forged object can have a huge body. The decoder must not decompress it into unlimited memory.
#[test]
fn size_after_decompression_is_limited() {
    let header = |object: &[u8], body: u64| {
        let header = Header {
            body,
            ..Header::decode(object).unwrap()
        };
        let mut changed = object.to_vec();
        changed[..HEADER].copy_from_slice(&header.encode());
        changed
    };
    let object = sealed(&[record(11)]).object;
    let too_large = header(&object, MAX_BODY as u64 + 1);
    let expected = SegmentError::TooLarge { limit: MAX_BODY };
    assert_eq!(error_of(&too_large), expected);
    let huge = header(&object, u64::MAX);
    assert_eq!(error_of(&huge), expected);
    let zeros = sealed_messages(&[(vec![0; 16 << 20], None)]).object;
    assert!(zeros.len() < 64 << 10);
    let small = header(&zeros, 100);
    assert!(matches!(error_of(&small), SegmentError::BodyDamaged(_)));
    for large in [too_large, huge] {
        assert_eq!(scanned(&large, 100), Err(expected.clone()));
    }
    let scanned = scanned(&small, 100);
    assert!(matches!(scanned, Err(SegmentError::BodyDamaged(_))));
}

/// Each transaction of a forged segment can have the maximum number of changes (invariant 15). If all changes were
/// decoded, one segment would need hundreds of MiB.
#[test]
fn invariant_15_scan_has_at_most_one_message_in_memory() {
    let changes = vec![fixture::deletion(b"k"); message::MAX_CHANGES];
    let mut records = Vec::new();
    for revision in [11, 12, 13] {
        let next = Transaction {
            changes: changes.clone(),
            ..transaction(revision)
        };
        records.push(Record::Transaction(next));
    }
    let object = sealed(&records).object;
    assert!(object.len() < 64 << 10, "{} bytes", object.len());
    let message = encoded(&records[0]).len();
    let mut scanner = Scanner::new();
    for piece in object.chunks(100) {
        scanner.push(piece).unwrap();
        assert!(scanner.capacity() <= FRAME + message);
    }
    let times = scanner.finish().unwrap();
    let found: Vec<i64> = times.transactions.iter().map(|at| at.revision).collect();
    assert_eq!(found, [11, 12, 13]);
}

/// A segment with one record and this body, in a zstd frame whose window has 2 to the power of `log` bytes.
fn in_frame(body: &[u8], log: u8) -> Vec<u8> {
    let mut stored = vec![0x28, 0xb5, 0x2f, 0xfd, 0, (log - 10) << 3];
    // The header of the only block of the frame. The block is not compressed.
    let block = (u32::try_from(body.len()).unwrap() << 3) | 1;
    stored.extend(&block.to_le_bytes()[..3]);
    stored.extend(body);
    let header = Header {
        cluster_id: 7,
        base_revision: BASE_REVISION,
        first: 11,
        last: 11,
        previous: base().digest,
        records: 1,
        body: body.len() as u64,
        stored: stored.len() as u64,
        sha256: Digest::of(&stored),
    };
    [header.encode(), stored].concat()
}

/// Invariant 15: a scan fails before it allocates memory for a large message or a large window.
#[test]
fn invariant_15_scan_rejects_large_message_and_window() {
    let message = encoded(&record(11));
    let frame = |length: usize| {
        let length = u32::try_from(length).unwrap();
        let checksum = crc32c::crc32c(&message);
        let parts = [length.to_be_bytes(), checksum.to_be_bytes()].concat();
        [parts.as_slice(), &message].concat()
    };
    let body = frame(message.len());
    assert!(scanned(&in_frame(&body, 23), 100).is_ok());
    let damaged = Err(SegmentError::BodyDamaged("it cannot be decompressed"));
    assert_eq!(scanned(&in_frame(&body, 24), 100), damaged);
    let too_large = Err(SegmentError::TooLarge { limit: MAX_MESSAGE });
    let body = frame(MAX_MESSAGE + 1);
    assert_eq!(scanned(&in_frame(&body, 23), 100), too_large);
}

/// A change without fields has only 2 bytes in a message, but takes far more memory.
#[test]
fn excess_changes_and_wrong_number_of_records_are_rejected() {
    let content = [0x1a, 0].repeat(message::MAX_CHANGES + 1);
    let mut message = vec![0x0a];
    prost::encoding::encode_varint(content.len() as u64, &mut message);
    message.extend(content);
    let error = error_of(&sealed_messages(&[(message, Some(11))]).object);
    let is_damaged = matches!(error, SegmentError::RecordDamaged { index: 0, .. });
    assert!(is_damaged, "{error}");
    let object = sealed(&[record(11)]).object;
    for records in [0, 2, MAX_RECORDS + 1] {
        let header = Header {
            records,
            ..Header::decode(&object).unwrap()
        };
        let mut altered = object.to_vec();
        altered[..HEADER].copy_from_slice(&header.encode());
        assert!(matches!(error_of(&altered), SegmentError::BodyDamaged(_)));
    }
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let key = proptest::collection::vec(any::<u8>(), 1..40);
    let content = proptest::option::of(proptest::collection::vec(any::<u8>(), 0..300));
    let change = (key, content, any::<(i64, i64, i64)>());
    let change = change.prop_map(|(key, content, (lease, version, create_revision))| Change {
        key: key.into(),
        value: content.map(|content| Value {
            content: content.into(),
            lease,
            version,
            create_revision,
        }),
    });
    proptest::collection::vec(change, 1..20)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_transactions_round_trip(
        all in proptest::collection::vec((changes(), any::<i64>()), 0..10),
    ) {
        let records: Vec<Record> = all
            .into_iter()
            .zip(BASE_REVISION + 1..)
            .map(|((changes, observed), revision)| {
                Record::Transaction(Transaction { revision, observed, changes })
            })
            .collect();
        let object = sealed(&records).object;
        let segment = Segment::decode(&object).unwrap();
        prop_assert_eq!(scanned(&object, 50).unwrap(), times_of(&segment));
        prop_assert_eq!(segment.records, records);
    }

    /// The checksums are valid, so that the decoder of the records gets the damaged messages.
    #[test]
    fn any_messages_are_decoded_without_panic(
        messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 0..5),
    ) {
        let messages: Vec<_> = messages.into_iter().map(|message| (message, None)).collect();
        let object = sealed_messages(&messages).object;
        if let Ok(segment) = Segment::decode(&object) {
            prop_assert_eq!(scanned(&object, 50).unwrap(), times_of(&segment));
        } else {
            let _ = scanned(&object, 50);
        }
    }

    #[test]
    fn damaged_records_are_decoded_without_panic(offset: prop::sample::Index, flip in 1_u8..) {
        let mut message = encoded(&record(11));
        let offset = offset.index(message.len());
        message[offset] ^= flip;
        let object = sealed_messages(&[(message, Some(11))]).object;
        if let Ok(segment) = Segment::decode(&object) {
            prop_assert_eq!(segment.records.len(), 1);
        }
    }
}

#[test]
fn sealed_segments_are_equal_only_if_records_are_equal() {
    let first = sealed(&[record(11)]);
    assert_eq!(first, sealed(&[record(11)]));
    assert_ne!(first.digest, sealed(&[record(11), record(12)]).digest);
}
