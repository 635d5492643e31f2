//! The Protocol Buffers messages of the records, as specified in docs/internals/continuous-format.md. Performs no I/O.

use bytes::Bytes;
use etcd::{Change, KeyHash, Value};
use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use crate::record::{Gap, GapReason, Hash, Lease, LeaseEnd, Moment, Outline, Record, Transaction};

#[derive(Clone, PartialEq, Message)]
struct RecordMessage {
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5")]
    kind: Option<Kind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Kind {
    #[prost(message, tag = "1")]
    Transaction(TransactionMessage),
    #[prost(message, tag = "2")]
    Lease(LeaseMessage),
    #[prost(message, tag = "3")]
    LeaseEnd(LeaseEndMessage),
    #[prost(message, tag = "4")]
    Hash(HashMessage),
    #[prost(message, tag = "5")]
    Gap(GapMessage),
}

#[derive(Clone, PartialEq, Message)]
struct TransactionMessage {
    #[prost(int64, tag = "1")]
    revision: i64,
    #[prost(int64, tag = "2")]
    observed_unix_micros: i64,
    #[prost(message, repeated, tag = "3")]
    changes: Vec<ChangeMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct ChangeMessage {
    #[prost(bytes = "bytes", tag = "1")]
    key: Bytes,
    #[prost(message, optional, tag = "2")]
    value: Option<ValueMessage>,
}

#[derive(Clone, PartialEq, Message)]
struct ValueMessage {
    #[prost(bytes = "bytes", tag = "1")]
    content: Bytes,
    #[prost(int64, tag = "2")]
    lease: i64,
    #[prost(int64, tag = "3")]
    version: i64,
    #[prost(int64, tag = "4")]
    create_revision: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct LeaseMessage {
    #[prost(int64, tag = "1")]
    id: i64,
    #[prost(int64, tag = "2")]
    ttl_seconds: i64,
    #[prost(int64, tag = "3")]
    seen_revision: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct LeaseEndMessage {
    #[prost(int64, tag = "1")]
    id: i64,
    #[prost(int64, tag = "2")]
    seen_revision: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct HashMessage {
    #[prost(int64, tag = "1")]
    revision: i64,
    #[prost(uint32, tag = "2")]
    hash: u32,
    #[prost(int64, tag = "3")]
    compact_revision: i64,
    #[prost(int64, tag = "4")]
    observed_unix_micros: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct GapMessage {
    #[prost(int64, tag = "1")]
    after_revision: i64,
    #[prost(int32, tag = "2")]
    reason: i32,
    #[prost(int64, tag = "3")]
    observed_unix_micros: i64,
}

/// A record without the changes of a transaction. The decoder skips fields that a message type does not have, and
/// allocates no memory for them.
#[derive(Clone, PartialEq, Message)]
struct OutlineMessage {
    #[prost(oneof = "OutlineKind", tags = "1, 2, 3, 4, 5")]
    kind: Option<OutlineKind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum OutlineKind {
    #[prost(message, tag = "1")]
    Transaction(TimeMessage),
    #[prost(message, tag = "2")]
    Lease(LeaseMessage),
    #[prost(message, tag = "3")]
    LeaseEnd(LeaseEndMessage),
    #[prost(message, tag = "4")]
    Hash(HashMessage),
    #[prost(message, tag = "5")]
    Gap(GapMessage),
}

#[derive(Clone, Copy, PartialEq, Message)]
struct TimeMessage {
    #[prost(int64, tag = "1")]
    revision: i64,
    #[prost(int64, tag = "2")]
    observed_unix_micros: i64,
}

/// The reasons for a gap, with their numbers in the format. The number 5 is reserved.
const REASONS: [(i32, GapReason); 6] = [
    (0, GapReason::Unknown),
    (1, GapReason::Compacted),
    (2, GapReason::ClusterChanged),
    (3, GapReason::RevisionMissing),
    (4, GapReason::TransactionTooLarge),
    (6, GapReason::RevisionReset),
];

/// Encodes a record.
pub(crate) fn encode(record: &Record) -> Vec<u8> {
    let kind = match record {
        Record::Transaction(it) => Kind::Transaction(TransactionMessage {
            revision: it.revision,
            observed_unix_micros: it.observed,
            changes: it.changes.iter().map(change_message).collect(),
        }),
        Record::Lease(it) => Kind::Lease(LeaseMessage {
            id: it.id,
            ttl_seconds: it.ttl.unwrap_or(0),
            seen_revision: it.seen,
        }),
        Record::LeaseEnd(it) => Kind::LeaseEnd(LeaseEndMessage {
            id: it.id,
            seen_revision: it.seen,
        }),
        Record::Hash(it) => Kind::Hash(HashMessage {
            revision: it.revision,
            hash: it.hash.hash,
            compact_revision: it.hash.compacted,
            observed_unix_micros: it.observed,
        }),
        Record::Gap(it) => {
            let known = REASONS.iter().find(|(_, reason)| *reason == it.reason);
            Kind::Gap(GapMessage {
                after_revision: it.after,
                reason: known.map_or(0, |(number, _)| *number),
                observed_unix_micros: it.observed,
            })
        }
    };
    RecordMessage { kind: Some(kind) }.encode_to_vec()
}

fn change_message(change: &Change) -> ChangeMessage {
    ChangeMessage {
        key: change.key.clone(),
        value: change.value.as_ref().map(|value| ValueMessage {
            content: value.content.clone(),
            lease: value.lease,
            version: value.version,
            create_revision: value.create_revision,
        }),
    }
}

/// Maximum number of changes in a transaction. It limits the memory of a decoded message, because a change of 2 bytes
/// in a message can take more than 100 bytes in memory.
pub(crate) const MAX_CHANGES: usize = 1 << 18;

/// Number of changes in a message. `None` if the message is damaged.
fn count_changes(mut record: &[u8]) -> Option<usize> {
    let mut count = 0;
    while !record.is_empty() {
        let (tag, wire_type) = decode_key(&mut record).ok()?;
        if (tag, wire_type) != (1, WireType::LengthDelimited) {
            skip_field(wire_type, tag, &mut record, DecodeContext::default()).ok()?;
            continue;
        }
        let length = usize::try_from(decode_varint(&mut record).ok()?).ok()?;
        let (mut transaction, rest) = record.split_at_checked(length)?;
        record = rest;
        while !transaction.is_empty() {
            let (tag, wire_type) = decode_key(&mut transaction).ok()?;
            count += usize::from(tag == 3);
            skip_field(wire_type, tag, &mut transaction, DecodeContext::default()).ok()?;
        }
    }
    Some(count)
}

/// Decodes a record. `None` if the message is damaged, of an unknown kind, or breaks a rule of the format.
pub(crate) fn decode(message: Bytes) -> Option<Record> {
    count_changes(&message).filter(|count| *count <= MAX_CHANGES)?;
    let record = match RecordMessage::decode(message).ok()?.kind? {
        Kind::Transaction(it) => {
            let changes: Vec<Change> = it.changes.into_iter().map(change).collect();
            let has_empty_key = changes.iter().any(|change| change.key.is_empty());
            if changes.is_empty() || has_empty_key {
                return None;
            }
            Record::Transaction(Transaction {
                revision: it.revision,
                observed: it.observed_unix_micros,
                changes,
            })
        }
        Kind::Lease(it) => Record::Lease(Lease {
            id: it.id,
            ttl: Some(it.ttl_seconds).filter(|ttl| *ttl > 0),
            seen: it.seen_revision,
        }),
        Kind::LeaseEnd(it) => Record::LeaseEnd(LeaseEnd {
            id: it.id,
            seen: it.seen_revision,
        }),
        Kind::Hash(it) => Record::Hash(Hash {
            revision: it.revision,
            hash: KeyHash {
                hash: it.hash,
                compacted: it.compact_revision,
            },
            observed: it.observed_unix_micros,
        }),
        Kind::Gap(it) => Record::Gap(gap(it)),
    };
    Some(record)
}

/// Decodes a record without its changes. `None` if the message is damaged, of an unknown kind, or breaks a rule of the
/// format. Does not decode the changes, and therefore does not check their content.
pub(crate) fn outline(message: &[u8]) -> Option<Outline> {
    let count = count_changes(message).filter(|count| *count <= MAX_CHANGES)?;
    match OutlineMessage::decode(message).ok()?.kind? {
        OutlineKind::Transaction(it) => (count > 0).then_some(Outline::Transaction(Moment {
            revision: it.revision,
            time: it.observed_unix_micros,
        })),
        OutlineKind::Gap(it) => Some(Outline::Gap(gap(it))),
        OutlineKind::Lease(_) | OutlineKind::LeaseEnd(_) | OutlineKind::Hash(_) => {
            Some(Outline::Other)
        }
    }
}

fn gap(message: GapMessage) -> Gap {
    let known = REASONS.iter().find(|(number, _)| *number == message.reason);
    Gap {
        after: message.after_revision,
        reason: known.map_or(GapReason::Unknown, |(_, reason)| *reason),
        observed: message.observed_unix_micros,
    }
}

fn change(message: ChangeMessage) -> Change {
    Change {
        key: message.key,
        value: message.value.map(|value| Value {
            content: value.content,
            lease: value.lease,
            version: value.version,
            create_revision: value.create_revision,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_with_reserved_or_future_reason_is_decoded_as_unknown() {
        for reason in [5, 7] {
            let gap = GapMessage {
                after_revision: 17,
                reason,
                observed_unix_micros: 3,
            };
            let message = RecordMessage {
                kind: Some(Kind::Gap(gap)),
            };
            let expected = Gap {
                after: 17,
                reason: GapReason::Unknown,
                observed: 3,
            };
            let decoded = decode(message.encode_to_vec().into());
            assert_eq!(decoded, Some(Record::Gap(expected)));
        }
    }
}
