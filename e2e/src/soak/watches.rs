//! Compares the events of the watchers with each other and with the operations of the clients.

use std::collections::{BTreeMap, BTreeSet};

use super::history::{Event, Operation, Pair, Snapshot};
use super::watchers::WatchRecord;

/// The maximum number of violations that the report lists for one check of one watcher.
const MOST_REPORTED: usize = 5;

/// Checks the events of the watchers, and returns the violations:
///
/// - Each watcher received events in the order of revisions and without duplicates, also after it reconnected.
/// - No event is missing: the versions of each key have no gap, and all watchers received the same events.
/// - Every acknowledged write has an event at its revision, and so has every value that a client read.
/// - Every event is the write of exactly one operation. The event of a swap replaces the value that the swap expected.
#[must_use]
pub fn check_watches(operations: &[Operation], watchers: &[WatchRecord]) -> Vec<String> {
    let mut found = Vec::new();
    for (number, watcher) in watchers.iter().enumerate() {
        if let Some(why) = &watcher.failure {
            found.push(format!("watcher {number} cannot continue: {why}"));
        }
        report(
            &mut found,
            &format!("watcher {number}"),
            order(&watcher.events),
        );
        report(
            &mut found,
            &format!("watcher {number}"),
            gaps(&watcher.events),
        );
    }
    let Some(longest) = watchers.iter().max_by_key(|watcher| watcher.events.len()) else {
        found.push("there is no watcher".to_owned());
        return found;
    };
    for (number, watcher) in watchers.iter().enumerate() {
        let what = format!("watcher {number}");
        report(
            &mut found,
            &what,
            differences(&watcher.events, &longest.events),
        );
    }
    report(&mut found, "clients", unseen(operations, &longest.events));
    report(&mut found, "events", unwritten(operations, &longest.events));
    found
}

/// Compares the keys of a restored cluster with the keys of the original cluster at the same revision. Returns the
/// differences.
#[must_use]
pub fn check_snapshot(snapshot: &Snapshot, events: &[Event]) -> Vec<String> {
    let mut expected: BTreeMap<&str, Pair> = BTreeMap::new();
    for event in events {
        if event.revision <= snapshot.revision {
            let pair = Pair {
                key: event.key.clone(),
                value: event.value.clone(),
                revision: event.revision,
            };
            expected.insert(&event.key, pair);
        }
    }
    let expected: BTreeSet<&Pair> = expected.values().collect();
    let restored: BTreeSet<&Pair> = snapshot.pairs.iter().collect();
    let different = expected.symmetric_difference(&restored).map(|pair| {
        let whose = if restored.contains(pair) {
            "only restored"
        } else {
            "not restored"
        };
        format!("{whose}: {pair:?}")
    });
    let different: Vec<String> = different.collect();
    let mut found = Vec::new();
    let what = format!(
        "restored cluster {} at {}",
        snapshot.name, snapshot.revision
    );
    report(&mut found, &what, different);
    found
}

fn report(found: &mut Vec<String>, what: &str, violations: Vec<String>) {
    let more = violations.len().saturating_sub(MOST_REPORTED);
    let listed = violations.into_iter().take(MOST_REPORTED);
    found.extend(listed.map(|violation| format!("{what}: {violation}")));
    if more > 0 {
        found.push(format!("{what}: {more} more violations"));
    }
}

fn order(events: &[Event]) -> Vec<String> {
    let pairs = events.iter().zip(events.iter().skip(1));
    pairs
        .filter(|(one, next)| next.revision <= one.revision)
        .map(|(one, next)| format!("{next:?} after {one:?}"))
        .collect()
}

fn gaps(events: &[Event]) -> Vec<String> {
    let mut versions: BTreeMap<&str, i64> = BTreeMap::new();
    let mut found = Vec::new();
    for event in events {
        let before = versions.insert(&event.key, event.version).unwrap_or(0);
        if event.version != before + 1 {
            found.push(format!("{event:?} after version {before} of its key"));
        }
    }
    found
}

fn differences(events: &[Event], longest: &[Event]) -> Vec<String> {
    if events == longest {
        return Vec::new();
    }
    let differ = longest
        .iter()
        .enumerate()
        .find(|(index, event)| events.get(*index) != Some(*event));
    let first = differ.map(|(index, event)| {
        let own = events.get(index);
        format!("event {index} is {own:?}, another watcher received {event:?}")
    });
    first.into_iter().collect()
}

/// Finds acknowledged writes and read values without an event.
fn unseen(operations: &[Operation], events: &[Event]) -> Vec<String> {
    let events: BTreeMap<i64, &Event> =
        events.iter().map(|event| (event.revision, event)).collect();
    let is_event = |operation: &Operation, value: &str| {
        let event = events.get(&operation.revision);
        event.is_some_and(|event| event.key == operation.key && event.value == value)
    };
    let mut found = Vec::new();
    for operation in operations.iter().filter(|one| one.end.is_some()) {
        if operation.has_written() {
            if !is_event(operation, &operation.value) {
                found.push(format!("no event for the write {operation:?}"));
            }
        } else if !operation.found.is_empty() && !is_event(operation, &operation.found) {
            found.push(format!("no event for the value read by {operation:?}"));
        }
    }
    found
}

/// Finds events that no client wrote, and writes with two events.
fn unwritten(operations: &[Operation], events: &[Event]) -> Vec<String> {
    let writes: BTreeMap<&str, &Operation> = operations
        .iter()
        .filter(|operation| operation.may_have_written())
        .map(|operation| (operation.value.as_str(), operation))
        .collect();
    let mut current: BTreeMap<&str, &str> = BTreeMap::new();
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut found = Vec::new();
    for event in events {
        let before = current.insert(&event.key, &event.value).unwrap_or("");
        if !seen.insert(&event.value) {
            found.push(format!("the write of {event:?} was carried out twice"));
        }
        match writes.get(event.value.as_str()) {
            Some(write) if write.key == event.key => {
                if write.kind == "swap" && write.expect != before {
                    found.push(format!(
                        "{event:?} replaced {before:?}, not what {write:?} expected"
                    ));
                }
            }
            _ => found.push(format!("no client wrote {event:?}")),
        }
    }
    found
}

#[cfg(test)]
mod tests;
