//! `events`: prints the Events of a cluster and of its objects.

use api::names;
use api::{EtcdBackup, EtcdRestore};
use jiff::Timestamp;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt;

use crate::access::Access;
use crate::cli::EventsArgs;
use crate::console::{paint, say};
use crate::error::Result;
use crate::text::{Cell, Paint, Table, Tone, distance};

pub(super) async fn run(access: &Access, args: &EventsArgs) -> Result<()> {
    let mut events = of_cluster(access, &args.cluster).await?;
    if args.warnings {
        events.retain(|event| event.type_.as_deref() == Some("Warning"));
    }
    if events.is_empty() {
        return say(&format!(
            "no Events of cluster {} exist. Kubernetes deletes Events after an hour by default",
            args.cluster
        ));
    }
    say(&table(&events, Timestamp::now(), paint()))
}

/// The Events of a cluster and its objects, oldest first.
pub(super) async fn of_cluster(access: &Access, cluster: &str) -> Result<Vec<Event>> {
    let backups = access.backups().await.unwrap_or_default();
    let restores = access.restores().await.unwrap_or_default();
    let others = related(cluster, &backups, &restores);
    let mut events: Vec<Event> = access.list("").await?;
    events.retain(|event| concerns(event, cluster, &others));
    events.sort_by_key(time);
    Ok(events)
}

/// The kind and name of each EtcdBackup and EtcdRestore of the cluster.
fn related(
    cluster: &str,
    backups: &[EtcdBackup],
    restores: &[EtcdRestore],
) -> Vec<(&'static str, String)> {
    let backups = backups.iter().filter(|one| {
        let target = one.spec.etcd_cluster.as_ref();
        target.is_some_and(|target| target.name == cluster)
    });
    let restores = restores
        .iter()
        .filter(|one| one.spec.etcd_cluster.name == cluster);
    let backups = backups.map(|one| ("EtcdBackup", one.name_any()));
    backups
        .chain(restores.map(|one| ("EtcdRestore", one.name_any())))
        .collect()
}

/// Whether the Event is about the EtcdCluster, an object of the cluster or of one of its members, or an object in
/// `others`.
fn concerns(event: &Event, cluster: &str, others: &[(&'static str, String)]) -> bool {
    let Some(about) = &event.regarding else {
        return false;
    };
    let kind = about.kind.as_deref().unwrap_or_default();
    let name = about.name.as_deref().unwrap_or_default();
    let own = [
        cluster.to_owned(),
        names::client_service(cluster),
        names::network_policy(cluster),
    ];
    match kind {
        "EtcdCluster" => name == cluster,
        "EtcdBackup" | "EtcdRestore" => others
            .iter()
            .any(|other| *other == (kind_of(kind), name.to_owned())),
        "Pod" | "PersistentVolumeClaim" | "Service" | "PodDisruptionBudget" | "NetworkPolicy" => {
            own.iter().any(|own| own == name) || names::cluster_of_member(name) == Some(cluster)
        }
        _ => false,
    }
}

fn kind_of(kind: &str) -> &'static str {
    if kind == "EtcdBackup" {
        "EtcdBackup"
    } else {
        "EtcdRestore"
    }
}

/// The time of the Event's last occurrence.
fn time(event: &Event) -> Timestamp {
    let series = event
        .series
        .as_ref()
        .map(|series| series.last_observed_time.0);
    let last = event.deprecated_last_timestamp.as_ref().map(|time| time.0);
    let first = event.event_time.as_ref().map(|time| time.0);
    let created = event
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|time| time.0);
    series
        .or(last)
        .or(first)
        .or(created)
        .unwrap_or(Timestamp::UNIX_EPOCH)
}

/// Shows the Events as a table.
pub(super) fn table(events: &[Event], now: Timestamp, paint: Paint) -> String {
    let mut table = Table::new(&["AGE", "TYPE", "REASON", "COUNT", "OBJECT", "MESSAGE"]);
    for event in events {
        let kind = event.type_.clone().unwrap_or_default();
        let tone = if kind == "Warning" {
            Tone::Warning
        } else {
            Tone::Plain
        };
        let about = event.regarding.clone().unwrap_or_default();
        let count = event
            .series
            .as_ref()
            .map(|series| series.count)
            .or(event.deprecated_count);
        table.add(vec![
            distance(time(event), now).into(),
            Cell::new(kind, tone),
            event.reason.clone().unwrap_or_default().into(),
            count.unwrap_or(1).to_string().into(),
            format!(
                "{}/{}",
                about.kind.unwrap_or_default(),
                about.name.unwrap_or_default()
            )
            .into(),
            event.note.clone().unwrap_or_default().into(),
        ]);
    }
    table.render(paint)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(kind: &str, name: &str) -> Event {
        serde_json::from_value(json!({
            "metadata": { "name": "e" }, "eventTime": "2026-11-26T04:00:00.000000Z",
            "regarding": { "kind": kind, "name": name }, "type": "Warning", "reason": "MemberRemoved", "note": "gone"
        }))
        .unwrap()
    }

    #[test]
    fn events_of_cluster_and_its_objects_are_selected() {
        let others = [("EtcdBackup", "nightly".to_owned())];
        for (kind, name, expected) in [
            ("EtcdCluster", "main", true),
            ("EtcdCluster", "main2", false),
            ("Pod", "main-abcdefghij", true),
            ("Pod", "main-db-abcdefghij", false),
            ("Service", "main-client", true),
            ("EtcdBackup", "nightly", true),
            ("EtcdRestore", "nightly", false),
            ("Node", "main", false),
        ] {
            assert_eq!(
                concerns(&event(kind, name), "main", &others),
                expected,
                "{kind} {name}"
            );
        }
    }

    #[test]
    fn events_are_shown_with_age_and_object() {
        let text = table(
            &[event("Pod", "main-a")],
            "2026-11-26T05:00:00Z".parse().unwrap(),
            Paint(false),
        );
        assert!(
            text.contains("60m ago") && text.contains("Pod/main-a") && text.ends_with("gone\n"),
            "{text}"
        );
    }
}
