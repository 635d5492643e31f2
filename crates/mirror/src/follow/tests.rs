//! Tests of the follower with single batches. The model in `crate::tests` runs the follower with random histories and
//! faults.

use bytes::Bytes;
use etcd::{Change, ClusterId, Value};

use super::*;
use crate::checkpoint::Identity;

const SOURCE: ClusterId = ClusterId(7);

/// A follower of the keys below `a/`, after revision 10. A transaction has at most three operations.
fn follower(split: Option<Split>) -> Follower {
    let mapping = Mapping::new("a/", "b/");
    let identity = Identity {
        uid: "m".to_owned(),
        name: "prod/m".to_owned(),
        mapping: mapping.clone(),
    };
    let copied = Checkpoint::new(&identity, (SOURCE, 10)).copied(None);
    let checkpoint = match split {
        Some(split) => copied.applied_in_part(split),
        None => copied,
    };
    let limits = Limits {
        operations: 3,
        bytes: 1_000,
    };
    Follower::new(checkpoint, mapping, limits, true)
}

/// A batch with these events. A key that ends with `-` is deleted.
fn batch(events: &[(i64, &'static str)], is_fragment: bool) -> WatchBatch {
    let events = events.iter().map(|(revision, key)| WatchEvent {
        revision: *revision,
        change: Change {
            value: (!key.ends_with('-')).then(Value::default),
            key: Bytes::from_static(key.trim_end_matches('-').as_bytes()),
        },
    });
    WatchBatch {
        cluster_id: SOURCE,
        revision: 100,
        events: events.collect(),
        is_fragment,
    }
}

/// A step as text: the changed keys, the next revision, and the split transaction if there is one.
fn text(step: &Step) -> String {
    let mut words: Vec<String> = Vec::new();
    for operation in &step.operations {
        let key = String::from_utf8_lossy(operation.key()).into_owned();
        let mark = match operation {
            Operation::Put { .. } => "",
            Operation::Delete { .. } => "-",
        };
        words.push(format!("{key}{mark}"));
    }
    words.push(format!("@{}", step.next.revision));
    if let Some(split) = step.next.split() {
        words.push(format!("{} of {}", split.applied, split.revision));
    }
    words.join(" ")
}

/// Applies all steps that are possible.
fn apply(follower: &mut Follower) -> Vec<String> {
    let mut found = Vec::new();
    while let Some(step) = follower.next_step() {
        found.push(text(&step));
        follower.applied(&step);
    }
    found
}

#[test]
fn transactions_are_combined_up_to_limit_unless_they_change_same_key() {
    let mut follower = follower(None);
    let events = [
        (10, "a/0"),
        (11, "a/1"),
        (11, "a/2-"),
        (13, "a/3"),
        (14, "a/4"),
    ];
    follower.push(batch(&events, false)).unwrap();
    // `follower` allows three operations in a transaction.
    assert_eq!(apply(&mut follower), ["b/1 b/2- b/3 @13", "b/4 @14"]);
    // Two changes of the same key stay two transactions, so that clients of the destination receive both changes.
    let events = [(15, "a/1"), (16, "a/1-"), (17, "a/2")];
    follower.push(batch(&events, false)).unwrap();
    assert_eq!(apply(&mut follower), ["b/1 @15", "b/1- b/2 @17"]);
    assert_eq!(follower.position(), 17);
}

#[test]
fn transaction_is_applied_only_after_its_last_fragment() {
    let mut follower = follower(None);
    follower
        .push(batch(&[(11, "a/1"), (12, "a/2")], true))
        .unwrap();
    assert_eq!(apply(&mut follower), ["b/1 @11"]);
    follower.push(batch(&[(12, "a/3")], true)).unwrap();
    assert_eq!(apply(&mut follower), [""; 0]);
    assert_eq!(follower.position(), 11);
    follower.push(batch(&[(13, "a/4")], false)).unwrap();
    assert_eq!(apply(&mut follower), ["b/2 b/3 b/4 @13"]);
}

#[test]
fn large_transaction_is_split_and_resumed_at_its_next_event() {
    let events = [
        (11, "a/0"),
        (12, "a/1"),
        (12, "a/2"),
        (12, "a/3"),
        (12, "a/4"),
        (12, "a/5-"),
        (13, "a/6"),
    ];
    let mut whole = follower(None);
    whole.push(batch(&events, false)).unwrap();
    let first = whole.next_step().unwrap();
    assert!(!first.begins_split);
    whole.applied(&first);
    let part = whole.next_step().unwrap();
    assert!(part.begins_split);
    assert_eq!(text(&part), "b/1 b/2 b/3 @11 3 of 12");
    whole.applied(&part);
    let rest = whole.next_step().unwrap();
    assert!(!rest.begins_split);
    assert_eq!(text(&rest), "b/4 b/5- b/6 @13");
    // After a restart, the watch sends the events of the split transaction again.
    let split = Split {
        revision: 12,
        applied: 4,
    };
    let mut resumed = follower(Some(split));
    resumed.push(batch(&events[1..], false)).unwrap();
    assert_eq!(apply(&mut resumed), ["b/5- b/6 @13"]);
    // A large transaction is applied in part before its last fragment arrives, so that the memory is bounded.
    let mut early = follower(None);
    early.push(batch(&events[1..5], true)).unwrap();
    assert_eq!(apply(&mut early), ["b/1 b/2 b/3 @10 3 of 12"]);
    early.push(batch(&events[5..], false)).unwrap();
    assert_eq!(apply(&mut early), ["b/4 b/5- b/6 @13"]);
}

#[test]
fn event_of_other_cluster_or_out_of_order_is_rejected() {
    let mut other = batch(&[(11, "a/1")], false);
    other.cluster_id = ClusterId(8);
    assert_eq!(follower(None).push(other), Err(FollowError::OtherCluster));
    let mut late = follower(None);
    late.push(batch(&[(12, "a/1")], false)).unwrap();
    assert_eq!(apply(&mut late), ["b/1 @12"]);
    for revision in [11, 12] {
        let pushed = late.push(batch(&[(revision, "a/2")], false));
        assert!(matches!(pushed, Err(FollowError::OutOfOrder { .. })));
    }
    let split = Split {
        revision: 12,
        applied: 1,
    };
    let mut lost = follower(Some(split));
    let pushed = lost.push(batch(&[(13, "a/1")], false));
    let expected = FollowError::OutOfOrder {
        found: 13,
        seen: 12,
    };
    assert_eq!(pushed, Err(expected));
}

#[test]
fn progress_of_idle_source_is_recorded_only_if_trusted() {
    let mut follower = follower(None);
    assert_eq!(follower.idle(), None);
    follower.push(batch(&[], false)).unwrap();
    assert_eq!(follower.position(), 100);
    let idle = follower.idle().unwrap();
    assert_eq!(text(&idle), "@100");
    follower.applied(&idle);
    assert_eq!((follower.idle(), follower.position()), (None, 100));
    // The recorded progress covers revision 60, so an event of this revision is out of order.
    let pushed = follower.push(batch(&[(60, "a/1")], false));
    assert!(matches!(pushed, Err(FollowError::OutOfOrder { .. })));
    let mut doubtful = super::Follower {
        trusts_progress: false,
        ..self::follower(None)
    };
    // Without `trusts_progress`, events of earlier revisions can follow the first progress notification.
    doubtful.push(batch(&[], false)).unwrap();
    assert_eq!((doubtful.idle(), doubtful.position()), (None, 10));
    doubtful.push(batch(&[(60, "a/1")], false)).unwrap();
    assert_eq!(apply(&mut doubtful), ["b/1 @60"]);
    doubtful.push(batch(&[], false)).unwrap();
    assert_eq!(doubtful.position(), 60);
    doubtful.push(batch(&[], false)).unwrap();
    assert_eq!((doubtful.idle(), doubtful.position()), (None, 100));
}

#[test]
fn keys_that_are_not_copied_only_advance_the_checkpoint() {
    let mut follower = follower(None);
    follower
        .push(batch(&[(11, "c/1"), (12, "a/1")], false))
        .unwrap();
    assert_eq!(apply(&mut follower), ["b/1 @12"]);
    follower.push(batch(&[(13, "c/1")], false)).unwrap();
    assert_eq!(apply(&mut follower), ["@13"]);
}

#[test]
fn progress_notifications_are_trusted_since_3_4_25_and_3_5_8() {
    for version in ["3.4.25", "3.5.8", "v3.5.35", "3.6.0", "3.7.3", "4.0.0"] {
        assert!(trusts_progress(version), "{version}");
    }
    for version in ["3.4.24", "3.5.7", "3.3.27", "3.6", "", "x"] {
        assert!(!trusts_progress(version), "{version}");
    }
}
