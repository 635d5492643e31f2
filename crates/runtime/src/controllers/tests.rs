//! Tests of the watches: the gate, the pauses after errors, and the cache.

use std::cell::Cell;
use std::pin::pin;

use k8s_openapi::api::core::v1::ConfigMap;

use super::*;

fn object(namespace: &str) -> Guarded<ConfigMap> {
    let mut object = ConfigMap::default();
    object.metadata.name = Some("same".to_owned());
    object.metadata.namespace = Some(namespace.to_owned());
    Guarded(Ok(object))
}

#[tokio::test]
async fn first_reconciles_wait_for_caches_of_children_until_time_limit() {
    let gate = |patience| {
        let gate = Arc::new(Gate::new(patience));
        gate.missing.send_replace(1);
        gate
    };
    let error = watcher::Error::NoResourceVersion;
    let patient = gate(Duration::from_hours(1));
    let requests = stream::iter([Err(error), Ok("a"), Ok("b")]);
    let mut requests = pin!(after(Arc::clone(&patient), requests));
    assert!(requests.next().now_or_never().unwrap().unwrap().is_err());
    assert!(requests.next().now_or_never().is_none());
    patient.missing.send_replace(0);
    for expected in ["a", "b"] {
        let next = requests.next().now_or_never().unwrap();
        assert_eq!(next.unwrap().unwrap(), expected);
    }
    // If a watch of child objects never delivers its first list, the gate opens after its time limit, here 10 ms.
    let hurried = gate(Duration::from_millis(10));
    let mut requests = pin!(after(hurried, stream::iter([Ok("a")])));
    assert_eq!(requests.next().await.unwrap().unwrap(), "a");
}

#[test]
fn controllers_share_the_concurrency_limit() {
    assert_eq!([1, 2, 10, 64].map(concurrency), [64, 32, 7, 1]);
    // Each controller may run at least one reconcile at a time, because a limit of 0 would mean no limit.
    assert_eq!(concurrency(1000), 1);
}

#[tokio::test]
async fn failing_watch_does_not_delay_requests_of_other_watches() {
    let request = |name: &str| ReconcileRequest {
        obj_ref: ObjectRef::<Guarded<ConfigMap>>::new(name),
        reason: ReconcileReason::ObjectUpdated,
    };
    let failing = stream::repeat_with(|| Err(watcher::Error::NoResourceVersion));
    let working = stream::iter(["a", "b", "c", "d"].map(|name| Ok(request(name))));
    let mut all = SelectAll::new();
    all.push(with_pauses(failing));
    all.push(with_pauses(working));
    let (mut errors, mut requests) = (0, 0);
    // `now_or_never` does not wait, so the failing watch stays in its pause after the first error.
    while let Some(Some(next)) = all.next().now_or_never() {
        match next {
            Ok(_) => requests += 1,
            Err(_) => errors += 1,
        }
    }
    assert_eq!((errors, requests), (1, 4));
}

#[test]
fn cache_has_objects_of_all_namespaces() {
    let mut writers = [Writer::<Guarded<ConfigMap>>::new(()), Writer::new(())];
    let cache = Cache(writers.iter().map(Writer::as_reader).collect());
    assert!(!cache.is_complete());
    for (writer, namespace) in writers.iter_mut().zip(["a", "b"]) {
        assert!(!cache.is_complete(), "{namespace} is not listed yet");
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitApply(object(namespace)));
        writer.apply_watcher_event(&Event::InitDone);
    }
    assert!(cache.is_complete());
    assert_eq!(cache.state().len(), 2);
    let of = |namespace: &str| ObjectRef::new("same").within(namespace);
    let found = cache.get(&of("b")).and_then(|found| found.namespace());
    assert_eq!(found.as_deref(), Some("b"));
    assert!(cache.get(&of("c")).is_none());
    let own = cache.in_namespace("b");
    let own: Vec<_> = own.iter().map(|object| object.namespace()).collect();
    assert_eq!(own, [Some("b".to_owned())]);
}

/// A watch delivers a list in pages. A reconcile of an object from the first page must not read the object of the
/// previous list.
#[tokio::test]
async fn cache_contains_each_change_before_its_reconcile() {
    let version = |name: &str, version: &str| {
        let mut object = object("n");
        let metadata = &mut object.0.as_mut().unwrap().metadata;
        metadata.name = Some(name.to_owned());
        metadata.resource_version = Some(version.to_owned());
        object
    };
    let (sender, events) = mpsc::unbounded_channel::<Event<Guarded<ConfigMap>>>();
    let events = stream::unfold(events, async |mut events| {
        Some((Ok(events.recv().await?), events))
    });
    let writer = Writer::new(());
    let cache = writer.as_reader();
    let (notified, mut notifications) = mpsc::unbounded_channel();
    let in_cache = cache.clone();
    let notify = move |changed: &Guarded<ConfigMap>| {
        let found = in_cache.get(&ObjectRef::from_obj(changed));
        let found = found.and_then(|found| found.resource_version());
        notified.send((changed.name_any(), found)).unwrap();
    };
    let mut requests = pin!(own_requests(writer, events, notify));
    let mut deliver = |events: Vec<Event<Guarded<ConfigMap>>>| {
        for event in events {
            sender.send(event).unwrap();
        }
        let mut requested = Vec::new();
        while let Some(Some(request)) = requests.next().now_or_never() {
            requested.push(request.unwrap().obj_ref.name);
        }
        let mut seen = Vec::new();
        while let Ok((name, version)) = notifications.try_recv() {
            assert_eq!(requested.get(seen.len()), Some(&name));
            seen.push(version);
        }
        assert_eq!(requested.len(), seen.len());
        seen
    };
    let listed = |version: Option<&str>| vec![version.map(str::to_owned)];
    let page = vec![Event::Init, Event::InitApply(version("a", "1"))];
    assert!(deliver(page).is_empty());
    assert_eq!(deliver(vec![Event::InitDone]), listed(Some("1")));
    assert_eq!(
        deliver(vec![Event::Apply(version("a", "2"))]),
        listed(Some("2"))
    );
    let page = vec![Event::Init, Event::InitApply(version("a", "3"))];
    assert!(deliver(page).is_empty());
    assert_eq!(deliver(vec![Event::InitDone]), listed(Some("3")));
    assert_eq!(
        deliver(vec![Event::Delete(version("a", "4"))]),
        listed(None)
    );
}

/// While the predicate runs, only the cache and this test refer to the objects, so no copy exists.
#[test]
fn objects_are_copied_from_cache_only_after_selection() {
    let mut writer = Writer::<Guarded<ConfigMap>>::new(());
    let cache = Cache(vec![writer.as_reader()]);
    let namespaces = ["a", "b", "c"];
    writer.apply_watcher_event(&Event::Init);
    for namespace in namespaces {
        writer.apply_watcher_event(&Event::InitApply(object(namespace)));
    }
    writer.apply_watcher_event(&Event::InitDone);
    let foreign = ["a", "c"].map(|namespace| {
        let reference = ObjectRef::new("same").within(namespace);
        cache.get(&reference).unwrap()
    });
    let visited = Cell::new(0);
    let selected = cache.select(|object| {
        visited.set(visited.get() + 1);
        for one in &foreign {
            assert_eq!(Arc::strong_count(one), 2, "{:?}", one.namespace());
        }
        object.namespace().as_deref() == Some("b")
    });
    assert_eq!((selected.len(), visited.get()), (1, 3));
}
