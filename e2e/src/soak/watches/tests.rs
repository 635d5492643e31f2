//! Tests: the checks accept a correct history, and find each violation.

use super::*;

fn event(revision: i64, key: &str, value: &str, version: i64) -> Event {
    Event {
        revision,
        key: key.to_owned(),
        value: value.to_owned(),
        version,
    }
}

fn put(key: &str, value: &str, revision: i64) -> Operation {
    Operation {
        key: key.to_owned(),
        kind: "put",
        value: value.to_owned(),
        end: Some(1),
        revision,
        ..Operation::default()
    }
}

fn swap(key: &str, expect: &str, value: &str, revision: i64) -> Operation {
    Operation {
        kind: "swap",
        expect: expect.to_owned(),
        swapped: true,
        ..put(key, value, revision)
    }
}

fn get(key: &str, found: &str, revision: i64) -> Operation {
    Operation {
        key: key.to_owned(),
        kind: "get",
        end: Some(1),
        found: found.to_owned(),
        revision,
        ..Operation::default()
    }
}

/// A history of two keys. The write of `a3` has no response.
fn history() -> (Vec<Operation>, Vec<Event>) {
    let unanswered = Operation {
        end: None,
        revision: 0,
        ..put("a", "a3", 0)
    };
    let operations = vec![
        put("a", "a1", 10),
        put("b", "b1", 11),
        swap("a", "a1", "a2", 12),
        unanswered,
        get("a", "a3", 13),
        put("b", "b2", 14),
    ];
    let events = vec![
        event(10, "a", "a1", 1),
        event(11, "b", "b1", 1),
        event(12, "a", "a2", 2),
        event(13, "a", "a3", 3),
        event(14, "b", "b2", 2),
    ];
    (operations, events)
}

fn record(events: Vec<Event>) -> WatchRecord {
    WatchRecord {
        events,
        connections: 1,
        failure: None,
    }
}

/// The violations if `change` modifies the events of one of two watchers.
fn violations(change: impl FnOnce(&mut Vec<Event>)) -> String {
    let (operations, events) = history();
    let mut changed = events.clone();
    change(&mut changed);
    check_watches(&operations, &[record(events), record(changed)]).join("\n")
}

/// The violations if `change` modifies the operations of the clients.
fn violations_of_clients(change: impl FnOnce(&mut Vec<Operation>)) -> String {
    let (mut operations, events) = history();
    change(&mut operations);
    check_watches(&operations, &[record(events)]).join("\n")
}

#[test]
fn watch_check_accepts_complete_ordered_watches() {
    assert_eq!(violations(|_| {}), "");
}

#[test]
fn watch_check_finds_skipped_event() {
    let found = violations(|events| drop(events.remove(2)));
    assert!(found.contains("after version 1 of its key"), "{found}");
    assert!(found.contains("watcher 1: event 2 is"), "{found}");
}

#[test]
fn watch_check_finds_missing_last_event() {
    let found = violations(|events| drop(events.pop()));
    assert!(found.contains("watcher 1: event 4 is None"), "{found}");
}

#[test]
fn watch_check_finds_event_that_all_watchers_missed() {
    let (operations, mut events) = history();
    events.pop();
    let found = check_watches(&operations, &[record(events.clone()), record(events)]).join("\n");
    assert!(found.contains("no event for the write"), "{found}");
}

#[test]
fn watch_check_finds_repeated_event_after_resumption() {
    let found = violations(|events| events.insert(3, events[2].clone()));
    assert!(found.contains("watcher 1: Event { revision: 12"), "{found}");
}

#[test]
fn watch_check_finds_events_out_of_order() {
    let found = violations(|events| events.swap(1, 2));
    assert!(found.contains("revision: 11"), "{found}");
}

#[test]
fn watch_check_finds_watch_that_cannot_resume() {
    let (operations, events) = history();
    let failed = WatchRecord {
        failure: Some("revision 12 is compacted up to 13".to_owned()),
        ..record(events)
    };
    let found = check_watches(&operations, &[failed]).join("\n");
    assert!(found.contains("watcher 0 cannot continue"), "{found}");
}

#[test]
fn watch_check_finds_acknowledged_write_without_event() {
    let found = violations_of_clients(|all| all.push(put("b", "b3", 15)));
    assert!(found.contains("no event for the write"), "{found}");
}

#[test]
fn watch_check_finds_read_of_value_without_event() {
    let found = violations_of_clients(|all| all.push(get("b", "b9", 14)));
    assert!(found.contains("no event for the value read"), "{found}");
}

#[test]
fn watch_check_finds_event_without_write() {
    let found = violations_of_clients(|all| drop(all.remove(3)));
    assert!(found.contains("no client wrote"), "{found}");
}

#[test]
fn watch_check_finds_write_with_two_events() {
    let (operations, mut events) = history();
    events.push(event(15, "a", "a3", 4));
    let found = check_watches(&operations, &[record(events)]).join("\n");
    assert!(found.contains("was carried out twice"), "{found}");
}

#[test]
fn watch_check_finds_swap_of_unexpected_value() {
    let found = violations_of_clients(|all| all[2].expect = "a0".to_owned());
    assert!(found.contains("replaced \"a1\""), "{found}");
}

#[test]
fn watch_check_finds_rejected_swap_with_event() {
    let found = violations_of_clients(|all| {
        all[2].swapped = false;
        all[2].found = "a1".to_owned();
        all[2].revision = 10;
    });
    assert!(found.contains("no client wrote"), "{found}");
}

#[test]
fn watch_check_reports_missing_watchers() {
    assert!(!check_watches(&history().0, &[]).is_empty());
}

#[test]
fn watch_check_finds_restored_keys_that_differ_from_events() {
    let pair = |key: &str, value: &str, revision| Pair {
        key: key.to_owned(),
        value: value.to_owned(),
        revision,
    };
    let restored = Snapshot {
        name: "r".to_owned(),
        revision: 12,
        pairs: vec![pair("a", "a2", 12), pair("b", "b1", 11)],
    };
    let events = history().1;
    assert_eq!(check_snapshot(&restored, &events), [""; 0]);
    let mut stale = restored.clone();
    stale.pairs[0] = pair("a", "a1", 10);
    assert_eq!(check_snapshot(&stale, &events).len(), 2);
    let mut incomplete = restored.clone();
    incomplete.pairs.pop();
    assert_eq!(check_snapshot(&incomplete, &events).len(), 1);
    let mut newer = restored;
    newer.pairs[0] = pair("a", "a3", 13);
    assert_eq!(check_snapshot(&newer, &events).len(), 2);
}
