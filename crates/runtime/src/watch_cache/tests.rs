//! Tests of the watch cache.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListMeta, TypeMeta};
use serde_json::json;

use super::*;

const DB: (&str, &str) = ("prod", "db");

fn json_of(name: &str, cluster: &str, version: u64) -> Value {
    let managed =
        json!([{ "manager": "kubectl", "operation": "Apply", "fieldsV1": { "f:spec": {} } }]);
    json!({
        "metadata": {
            "name": name, "namespace": "prod", "uid": name, "resourceVersion": version.to_string(),
            "labels": { "etcd_cluster": cluster }, "managedFields": managed,
        },
        "spec": { "containers": [{ "name": "etcd" }] },
    })
}

fn raw(name: &str, version: u64) -> Raw<Pod> {
    serde_json::from_value(json_of(name, "db", version)).unwrap()
}

fn pod(name: &str, version: u64) -> Pod {
    serde_json::from_value(json_of(name, "db", version)).unwrap()
}

fn list(version: &str, items: Vec<Pod>) -> ObjectList<Pod> {
    ObjectList {
        types: TypeMeta::list::<Pod>(),
        metadata: ListMeta {
            resource_version: Some(version.to_owned()),
            ..ListMeta::default()
        },
        items,
    }
}

/// A cache with one watch of all namespaces that has received its first list.
fn filled(objects: Vec<Raw<Pod>>) -> (WatchCache<Pod>, Feed<Pod>) {
    let cache = WatchCache::default();
    let feed = cache.feed(None);
    apply(&feed, Event::Init);
    for object in objects {
        apply(&feed, Event::InitApply(object));
    }
    apply(&feed, Event::InitDone);
    (cache, feed)
}

/// Applies an event. Returns the names of the changed objects.
fn apply(feed: &Feed<Pod>, event: Event<Raw<Pod>>) -> Vec<String> {
    let changed = feed.apply(Ok(event)).into_iter();
    changed.map(|child| child.unwrap().name.unwrap()).collect()
}

fn names(cache: &WatchCache<Pod>) -> Option<Vec<String>> {
    let objects = cache.get(DB)?;
    Some(objects.iter().map(ResourceExt::name_any).collect())
}

#[test]
fn cache_returns_objects_after_first_complete_list() {
    let cache = WatchCache::<Pod>::default();
    assert_eq!(names(&cache), None, "no watch fills the cache");
    let feed = cache.feed(None);
    assert!(apply(&feed, Event::Init).is_empty());
    assert!(apply(&feed, Event::InitApply(raw("db-b", 2))).is_empty());
    assert!(apply(&feed, Event::InitApply(raw("db-a", 1))).is_empty());
    assert_eq!(names(&cache), None, "the list is not complete");
    assert_eq!(apply(&feed, Event::InitDone), ["db-b", "db-a"]);
    assert_eq!(names(&cache).unwrap(), ["db-a", "db-b"]);
    let cached = cache.get(DB).unwrap();
    let expected = Pod {
        metadata: ObjectMeta {
            managed_fields: None,
            ..pod("db-a", 1).metadata
        },
        ..pod("db-a", 1)
    };
    assert_eq!(cached[0], expected);
    for other in [("prod", "another"), ("another", "db")] {
        assert_eq!(cache.get(other).map(|objects| objects.len()), Some(0));
    }
}

#[test]
fn watch_events_change_cached_objects() {
    let (cache, feed) = filled(vec![raw("db-a", 1)]);
    assert_eq!(apply(&feed, Event::Apply(raw("db-b", 2))), ["db-b"]);
    assert_eq!(names(&cache).unwrap(), ["db-a", "db-b"]);
    assert_eq!(apply(&feed, Event::Delete(raw("db-a", 3))), ["db-a"]);
    assert_eq!(names(&cache).unwrap(), ["db-b"]);
    // The label of `db-b` now names another cluster.
    let moved = serde_json::from_value(json_of("db-b", "another", 4)).unwrap();
    assert_eq!(apply(&feed, Event::Apply(moved)), ["db-b"]);
    assert_eq!(names(&cache).unwrap(), [""; 0]);
    assert_eq!(cache.get(("prod", "another")).unwrap().len(), 1);
}

#[test]
fn repeated_list_reports_changed_and_deleted_objects() {
    let (cache, feed) = filled(vec![raw("db-a", 1), raw("db-b", 2), raw("db-c", 3)]);
    apply(&feed, Event::Init);
    for object in [raw("db-a", 1), raw("db-b", 7)] {
        assert!(apply(&feed, Event::InitApply(object)).is_empty());
    }
    assert_eq!(names(&cache).unwrap(), ["db-a", "db-b", "db-c"]);
    assert_eq!(apply(&feed, Event::InitDone), ["db-b", "db-c"]);
    assert_eq!(names(&cache).unwrap(), ["db-a", "db-b"]);
}

/// Invariant 33: after a read from the API server, a reconcile never uses older objects.
#[test]
fn cache_that_is_older_than_last_read_returns_nothing() {
    let (cache, feed) = filled(vec![raw("db-a", 4)]);
    cache.record_list(DB, &list("4", vec![pod("db-a", 4)]));
    assert_eq!(names(&cache).unwrap(), ["db-a"]);

    cache.record_list(DB, &list("9", vec![pod("db-a", 5)]));
    assert_eq!(names(&cache), None, "the cache misses a change");
    apply(&feed, Event::Apply(raw("db-a", 5)));
    assert_eq!(names(&cache).unwrap(), ["db-a"]);

    cache.record_list(DB, &list("9", vec![pod("db-a", 5), pod("db-b", 8)]));
    assert_eq!(names(&cache), None, "the cache misses an object");
    apply(&feed, Event::Apply(raw("db-b", 8)));
    assert_eq!(names(&cache).unwrap(), ["db-a", "db-b"]);

    cache.record_list(DB, &list("12", vec![pod("db-a", 5)]));
    assert_eq!(names(&cache), None, "the cache misses a deletion");
    apply(&feed, Event::Delete(raw("db-b", 11)));
    assert_eq!(names(&cache).unwrap(), ["db-a"]);

    // `db-c` is created after the recorded list, so the cache returns it.
    apply(&feed, Event::Apply(raw("db-c", 13)));
    assert_eq!(names(&cache).unwrap(), ["db-a", "db-c"]);
    // The read of another cluster has no effect on this cluster.
    cache.record_list(("prod", "another"), &list("20", vec![pod("x", 19)]));
    assert_eq!(names(&cache).unwrap(), ["db-a", "db-c"]);
}

#[test]
fn cache_returns_nothing_after_read_without_comparable_version() {
    let (cache, feed) = filled(vec![raw("db-a", 4)]);
    cache.record_object(DB, None);
    assert_eq!(names(&cache), None, "the object may have been deleted");
    cache.record_object(DB, Some(&pod("db-a", 4)));
    assert_eq!(names(&cache).unwrap(), ["db-a"]);
    cache.record_list(DB, &list("not a number", vec![pod("db-a", 4)]));
    apply(&feed, Event::Apply(raw("db-b", 8)));
    assert_eq!(names(&cache), None);
}

#[test]
fn cache_returns_nothing_until_failed_watch_delivers_again() {
    let (cache, feed) = filled(vec![raw("db-a", 1)]);
    let failed = feed.apply(Err(Error::NoResourceVersion));
    assert!(matches!(failed[..], [Err(Error::NoResourceVersion)]));
    assert_eq!(names(&cache), None);
    apply(&feed, Event::Init);
    apply(&feed, Event::InitApply(raw("db-b", 2)));
    assert_eq!(names(&cache), None, "the list is not complete");
    apply(&feed, Event::InitDone);
    assert_eq!(names(&cache).unwrap(), ["db-b"]);
    drop(feed.apply(Err(Error::NoResourceVersion)));
    apply(&feed, Event::Apply(raw("db-b", 3)));
    assert_eq!(names(&cache).unwrap(), ["db-b"]);
}

/// Invariant 15: a namespace that cannot be watched does not affect other namespaces.
#[test]
fn failed_watch_of_other_namespace_has_no_effect() {
    let cache = WatchCache::<Pod>::default();
    let (prod, other) = (cache.feed(Some("prod")), cache.feed(Some("other")));
    for event in [
        Event::Init,
        Event::InitApply(raw("db-a", 1)),
        Event::InitDone,
    ] {
        apply(&prod, event);
    }
    drop(other.apply(Err(Error::NoResourceVersion)));
    assert_eq!(names(&cache).unwrap(), ["db-a"]);
    assert!(cache.get(("other", "db")).is_none());
    assert!(cache.get(("unwatched", "db")).is_none());
}

/// Invariant 15: an object that cannot be parsed does not end the watch, and affects only its own cluster.
#[test]
fn cluster_with_invalid_object_is_not_read_from_cache() {
    let mut invalid = json_of("x", "another", 2);
    invalid["spec"]["containers"] = json!(3);
    let invalid = serde_json::from_value(invalid).unwrap();
    let (cache, _) = filled(vec![raw("db-a", 1), invalid]);
    assert_eq!(names(&cache).unwrap(), ["db-a"]);
    assert!(cache.get(("prod", "another")).is_none());
    assert!(serde_json::from_value::<Raw<Pod>>(json!({ "spec": {} })).is_err());
}

#[test]
fn object_that_is_older_than_its_last_read_is_outdated() {
    let cache = WatchCache::<Pod>::default();
    assert!(!cache.is_outdated(DB, &pod("db", 4)));
    cache.record_object(DB, Some(&pod("db", 5)));
    let outdated = [4, 5, 6].map(|version| cache.is_outdated(DB, &pod("db", version)));
    assert_eq!(outdated, [true, false, false]);
}

#[test]
fn records_of_old_reads_are_dropped() {
    let (cache, _) = filled(vec![raw("db-a", 4)]);
    cache.record_list(DB, &list("9", vec![pod("db-a", 5)]));
    assert_eq!(names(&cache), None);
    let old = Instant::now().checked_sub(CAUGHT_UP * 2).unwrap();
    for read in cache.state_mut().reads.values_mut() {
        read.at = old;
    }
    assert_eq!(names(&cache).unwrap(), ["db-a"]);
    assert!(!cache.is_outdated(DB, &pod("db-a", 4)));
    let read_another = || {
        cache.record_list(("prod", "another"), &list("9", Vec::new()));
        cache.state().reads.len()
    };
    assert_eq!(
        read_another(),
        2,
        "old records are dropped only once per interval"
    );
    cache.state_mut().swept = Some(old);
    assert_eq!(read_another(), 1);
}
