//! The records of mirrors in a destination. Each mirror has a checkpoint, which the mirror writes in the same
//! transaction as the copied changes (invariant 42). The registry orders the creation of checkpoints. Performs no I/O.

use api::names::MIRROR_RECORDS;
use bytes::Bytes;
use etcd::{ClusterId, KeyRange};
use serde::{Deserialize, Serialize};

use crate::mapping::Mapping;

/// The identity of a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The UID of the EtcdMirror.
    pub uid: String,
    /// The namespace and the name of the EtcdMirror, for messages.
    pub name: String,
    /// The prefixes.
    pub mapping: Mapping,
}

/// The progress of a mirror: which keys and changes of the source the destination contains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    /// The UID of the EtcdMirror.
    pub mirror: String,
    /// The namespace and the name of the EtcdMirror, for messages.
    pub name: String,
    /// The prefix of the source.
    pub source_prefix: String,
    /// The prefix of the destination.
    pub destination_prefix: String,
    /// The cluster ID of the source, in hexadecimal.
    pub source: String,
    /// A revision of the source. Its meaning depends on the phase (see [`Phase`]).
    pub revision: i64,
    /// The number of transactions that the mirror has applied. Each transaction increments it, so no two states of a
    /// destination have equal checkpoints.
    pub transactions: u64,
    /// What the mirror does.
    pub phase: Phase,
}

/// What a mirror does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "type")]
pub enum Phase {
    /// The mirror copies all keys that the source has at `revision`.
    #[serde(rename_all = "camelCase")]
    Copying {
        /// Why all keys are copied.
        reason: CopyReason,
        /// The last copied key of the source, in hexadecimal. `None` before the first key.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after: Option<String>,
    },
    /// The destination contains all changes of the source up to `revision`. The mirror applies the later changes.
    #[serde(rename_all = "camelCase")]
    Following {
        /// The transaction of the source that is applied in part.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        split: Option<Split>,
    },
}

/// Why all keys are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CopyReason {
    /// The mirror is new.
    Initial,
    /// The source has compacted changes that the mirror has not applied.
    Compacted,
    /// A user has approved another source, or a source with an earlier revision.
    SourceReplaced,
    /// The source has sent changes out of order.
    OutOfOrder,
}

impl CopyReason {
    /// The text in the status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Initial => "Initial",
            Self::Compacted => "Compacted",
            Self::SourceReplaced => "SourceReplaced",
            Self::OutOfOrder => "OutOfOrder",
        }
    }
}

/// A transaction of the source that is too large for one transaction of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Split {
    /// The revision of the transaction.
    pub revision: i64,
    /// The number of events of this transaction that are applied.
    pub applied: u64,
}

/// A checkpoint with the value that the destination stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The value in the destination. Another release of the operator can encode the same checkpoint differently, so
    /// preconditions use this value.
    pub value: Bytes,
}

impl Stored {
    /// Encodes a checkpoint.
    pub fn new(checkpoint: Checkpoint) -> Self {
        // The serialization cannot fail, because a checkpoint contains only texts and numbers.
        let value = Bytes::from(serde_json::to_vec(&checkpoint).unwrap_or_default());
        Self { checkpoint, value }
    }

    /// Decodes a value.
    ///
    /// # Errors
    /// Fails if the value is not a checkpoint.
    pub fn parse(value: Bytes) -> Result<Self, serde_json::Error> {
        let checkpoint = serde_json::from_slice(&value)?;
        Ok(Self { checkpoint, value })
    }
}

impl Checkpoint {
    /// The checkpoint of a new mirror, which begins to copy all keys of a source at a revision.
    pub fn new(identity: &Identity, (source, revision): (ClusterId, i64)) -> Self {
        Self {
            mirror: identity.uid.clone(),
            name: identity.name.clone(),
            source_prefix: identity.mapping.source_prefix().to_owned(),
            destination_prefix: identity.mapping.destination_prefix().to_owned(),
            source: source.to_string(),
            revision,
            transactions: 0,
            phase: Phase::Copying {
                reason: CopyReason::Initial,
                after: None,
            },
        }
    }

    /// The checkpoint of a mirror that begins to copy all keys again.
    #[must_use]
    pub fn restarted(&self, (source, revision): (ClusterId, i64), reason: CopyReason) -> Self {
        Self {
            source: source.to_string(),
            revision,
            phase: Phase::Copying {
                reason,
                after: None,
            },
            ..self.clone()
        }
    }

    /// The checkpoint after all keys up to and including `key` are copied. `None`: all keys are copied.
    #[must_use]
    pub fn copied(&self, key: Option<&[u8]>) -> Self {
        let phase = match (&self.phase, key) {
            (Phase::Copying { reason, .. }, Some(key)) => Phase::Copying {
                reason: *reason,
                after: Some(hex::encode(key)),
            },
            _ => Phase::Following { split: None },
        };
        Self {
            phase,
            ..self.clone()
        }
    }

    /// The checkpoint after all changes up to and including `revision` are applied.
    #[must_use]
    pub fn applied(&self, revision: i64) -> Self {
        Self {
            revision,
            phase: Phase::Following { split: None },
            ..self.clone()
        }
    }

    /// The checkpoint after a part of a transaction is applied.
    #[must_use]
    pub fn applied_in_part(&self, split: Split) -> Self {
        Self {
            phase: Phase::Following { split: Some(split) },
            ..self.clone()
        }
    }

    /// The last revision of the source whose changes the destination contains, at least in part.
    pub fn reached(&self) -> i64 {
        self.split().map_or(self.revision, |split| split.revision)
    }

    /// The transaction that is applied in part.
    pub fn split(&self) -> Option<Split> {
        match self.phase {
            Phase::Following { split } => split,
            Phase::Copying { .. } => None,
        }
    }

    /// The last copied key. `None` before the first key, and after the copy.
    pub fn last_copied(&self) -> Option<Bytes> {
        match &self.phase {
            Phase::Copying {
                after: Some(after), ..
            } => hex::decode(after).ok().map(Bytes::from),
            _ => None,
        }
    }

    /// The keys of the destination that the mirror writes.
    pub fn destination_range(&self) -> KeyRange {
        KeyRange::prefix(self.destination_prefix.as_bytes())
    }
}

/// The key of the registry. Each creation of a checkpoint changes it, so that of two concurrent creations, one fails.
pub fn registry_key() -> Bytes {
    Bytes::from(format!("{MIRROR_RECORDS}registry"))
}

/// The key of a mirror's checkpoint.
pub fn checkpoint_key(uid: &str) -> Bytes {
    Bytes::from(format!("{}{uid}", checkpoint_prefix()))
}

/// The prefix of all checkpoints.
pub fn checkpoint_prefix() -> String {
    format!("{MIRROR_RECORDS}checkpoint/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            uid: "uid".to_owned(),
            name: "prod/copy".to_owned(),
            mapping: Mapping::new("/a/", "/b/"),
        }
    }

    #[test]
    fn checkpoint_is_unchanged_after_encoding() {
        let begun = Checkpoint::new(&identity(), (ClusterId(0xab), 7));
        let middle = begun.copied(Some(b"/a/\xff"));
        assert_eq!(middle.last_copied().as_deref(), Some(&b"/a/\xff"[..]));
        let copied = middle.copied(None);
        assert_eq!(copied.phase, Phase::Following { split: None });
        assert_eq!((copied.revision, copied.last_copied()), (7, None));
        let split = copied.applied_in_part(Split {
            revision: 9,
            applied: 127,
        });
        assert_eq!((split.revision, split.reached()), (7, 9));
        let applied = split.applied(9);
        assert_eq!((applied.revision, applied.split()), (9, None));
        let again = applied.restarted((ClusterId(0xab), 12), CopyReason::Compacted);
        assert_eq!((again.reached(), again.last_copied()), (12, None));
        for checkpoint in [begun, middle, copied, split, applied, again] {
            let stored = Stored::new(checkpoint.clone());
            let parsed = Stored::parse(stored.value.clone()).unwrap();
            assert_eq!(parsed, stored);
            assert_eq!(parsed.checkpoint, checkpoint);
        }
        assert!(Stored::parse(Bytes::from_static(b"{}")).is_err());
    }
}
