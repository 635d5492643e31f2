//! The transactions that a mirror sends to its destination. Performs no I/O.

use etcd::{Operation, Precondition};

use crate::checkpoint::{Checkpoint, Stored, checkpoint_key};

/// Estimated size in bytes of an operation in a request, in addition to its key and value.
const OVERHEAD: usize = 32;

/// Size in bytes that is reserved for the checkpoint in each request.
const CHECKPOINT: usize = 8 << 10;

/// etcd's default of `--max-txn-ops`.
const DEFAULT_OPERATIONS: i64 = 128;

/// etcd's default of `--max-request-bytes`.
const DEFAULT_BYTES: i64 = 1_536 << 10;

/// The limits of a transaction, without the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of operations.
    pub operations: usize,
    /// Maximum size of all operations in bytes.
    pub bytes: usize,
}

impl Limits {
    /// The limits of a destination with these values of `--max-txn-ops` and `--max-request-bytes`. `None` means etcd's
    /// default.
    pub fn of_destination(max_txn_ops: Option<i64>, max_request_bytes: Option<i64>) -> Self {
        let number = |value: i64| usize::try_from(value).unwrap_or_default();
        // The checkpoint is one of the operations of each transaction.
        let operations = number(max_txn_ops.unwrap_or(DEFAULT_OPERATIONS)).saturating_sub(1);
        let bytes = number(max_request_bytes.unwrap_or(DEFAULT_BYTES)).saturating_sub(CHECKPOINT);
        Self {
            operations: operations.max(1),
            bytes: bytes.max(1),
        }
    }
}

/// Counts operations until they exceed the limits.
pub(crate) struct Room {
    limits: Limits,
    operations: usize,
    bytes: usize,
}

impl Room {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            operations: 0,
            bytes: 0,
        }
    }

    /// Adds an operation. `None` needs no room. Returns false if the operation exceeds a limit. The first operation
    /// always fits, because a smaller transaction does not exist.
    pub(crate) fn add(&mut self, operation: Option<&Operation>) -> bool {
        let Some(operation) = operation else {
            return true;
        };
        let bytes = self.bytes + operation.size() + OVERHEAD;
        let fits = self.operations < self.limits.operations && bytes <= self.limits.bytes;
        if !fits && self.operations > 0 {
            return false;
        }
        self.operations += 1;
        self.bytes = bytes;
        true
    }
}

/// One transaction of a mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The changes of the copied keys.
    pub operations: Vec<Operation>,
    /// The checkpoint after the changes.
    pub next: Checkpoint,
    /// The number of events of the source that the step applies.
    pub events: usize,
    /// True for the first part of a transaction that is too large for one transaction of the destination.
    pub begins_split: bool,
}

impl Step {
    /// The precondition and all operations of the transaction, and the stored checkpoint after it.
    ///
    /// Invariant 42: the precondition is the stored checkpoint from which the step was computed, and the new checkpoint
    /// is a part of the same transaction.
    pub fn request(self, stored: &Stored) -> (Precondition, Vec<Operation>, Stored) {
        let key = checkpoint_key(&stored.checkpoint.mirror);
        let precondition = Precondition::Value {
            key: key.clone(),
            value: stored.value.clone(),
        };
        let next = Stored::new(Checkpoint {
            transactions: stored.checkpoint.transactions + 1,
            ..self.next
        });
        let mut operations = self.operations;
        operations.push(Operation::Put {
            key,
            value: next.value.clone(),
        });
        (precondition, operations, next)
    }
}

/// Divides operations into groups within the limits. There is at least one group.
pub(crate) fn divided(operations: Vec<Operation>, limits: Limits) -> Vec<Vec<Operation>> {
    let mut groups = vec![Vec::new()];
    let mut room = Room::new(limits);
    for operation in operations {
        if !room.add(Some(&operation)) {
            room = Room::new(limits);
            room.add(Some(&operation));
            groups.push(Vec::new());
        }
        if let Some(last) = groups.last_mut() {
            last.push(operation);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn put(key: &'static str, size: usize) -> Operation {
        Operation::Put {
            key: Bytes::from_static(key.as_bytes()),
            value: Bytes::from(vec![0; size]),
        }
    }

    #[test]
    fn transaction_limits_leave_room_for_checkpoint() {
        let default = Limits::of_destination(None, None);
        assert_eq!(default.operations, 127);
        assert!(default.bytes < 1_572_864 && default.bytes > 1_500_000);
        let small = Limits::of_destination(Some(1), Some(1));
        let expected = Limits {
            operations: 1,
            bytes: 1,
        };
        assert_eq!(small, expected);
    }

    #[test]
    fn operations_are_divided_into_transactions_within_limits() {
        let limits = Limits {
            operations: 2,
            bytes: 200,
        };
        let sizes = |operations: Vec<Operation>| -> Vec<usize> {
            divided(operations, limits).iter().map(Vec::len).collect()
        };
        assert_eq!(sizes(vec![]), [0]);
        assert_eq!(sizes(vec![put("a", 1), put("b", 1), put("c", 1)]), [2, 1]);
        assert_eq!(sizes(vec![put("a", 100), put("b", 100)]), [1, 1]);
        assert_eq!(sizes(vec![put("a", 900), put("b", 1), put("c", 1)]), [1, 2]);
    }
}
