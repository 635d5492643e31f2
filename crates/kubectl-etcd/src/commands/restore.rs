//! `restore`: creates an EtcdRestore from an EtcdBackup.

use api::conditions::{ConditionType, find};
use api::duration::DurationText;
use api::restore::{BackupReference, RestorePhase, RestoreTarget};
use api::{EtcdBackup, EtcdCluster, EtcdRestore, EtcdRestoreSpec};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use super::{backup::suffix, status};
use crate::access::Access;
use crate::cli::RestoreArgs;
use crate::console::{Look, confirm, say};
use crate::error::{Error, Result};
use crate::text::{bytes, distance, time};
use crate::view::ClusterView;

pub(super) async fn run(access: &Access, args: &RestoreArgs) -> Result<()> {
    let now = Timestamp::now();
    let backup: EtcdBackup = access.get(&args.from).await?;
    let existing: Option<EtcdCluster> = access.find(&args.cluster).await?;
    let view = match existing {
        Some(_) => Some(status::one(access, &args.cluster, false).await?),
        None => None,
    };
    let chosen = choose(&backup, args.before)?;
    check(args, view.as_ref())?;
    say(&effect(args, view.as_ref(), &chosen, now))?;
    if !confirm(&format!("Restore cluster {}?", args.cluster), args.consent)? {
        return Ok(());
    }
    let restore = new_restore(args, &suffix(now));
    super::create(access, &restore, &args.waiting, look).await
}

/// The stored backup that the restore uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) location: String,
    pub(super) revision: Option<i64>,
    pub(super) time: Option<Timestamp>,
}

/// Chooses the stored backup like the restore operator: the newest backup. If `before` is set, the newest backup that
/// was complete at this time.
pub(super) fn choose(backup: &EtcdBackup, before: Option<Timestamp>) -> Result<Chosen> {
    let name = backup.name_any();
    let status = backup.status.clone().unwrap_or_default();
    if let Some(before) = before {
        let stored = status.backups.iter().filter_map(|one| {
            let time = one.completion_time.as_ref()?.0;
            (time <= before).then_some((time, one))
        });
        let newest = stored.max_by_key(|(time, _)| *time);
        let (at, stored) = newest.ok_or_else(|| {
            Error::refused(
                format!(
                    "EtcdBackup {name} lists no backup that was complete at {}",
                    time(before)
                ),
                format!("`kubectl etcd verify {name}` lists its backups"),
            )
        })?;
        return Ok(Chosen {
            location: stored.location.clone(),
            revision: stored.etcd_revision,
            time: Some(at),
        });
    }
    match status.location {
        Some(location) if status.last_success_date.is_some() => Ok(Chosen {
            location,
            revision: status.etcd_revision,
            time: status.last_success_date.map(|time| time.0),
        }),
        _ => Err(Error::refused(
            format!("EtcdBackup {name} has no complete backup"),
            format!("`kubectl etcd verify {name}` shows the cause"),
        )),
    }
}

/// Refuses a restore that the restore operator would reject.
fn check(args: &RestoreArgs, view: Option<&ClusterView>) -> Result<()> {
    if view.is_some() && !args.overwrite {
        return Err(Error::refused(
            format!("cluster {} exists", args.cluster),
            "choose another name for a copy, or add --overwrite to replace its data",
        ));
    }
    if view.is_some_and(|view| view.state == "Paused") {
        return Err(Error::refused(
            format!(
                "cluster {} is paused, and a restore of a paused cluster fails",
                args.cluster
            ),
            format!("run `kubectl etcd resume {}` first", args.cluster),
        ));
    }
    Ok(())
}

/// Describes what the restore changes and which data it loses, for the confirmation.
fn effect(
    args: &RestoreArgs,
    view: Option<&ClusterView>,
    chosen: &Chosen,
    now: Timestamp,
) -> String {
    let age = chosen
        .time
        .map_or_else(|| "unknown age".to_owned(), |at| distance(at, now));
    let revision = chosen.revision.map_or_else(
        || "unknown revision".to_owned(),
        |it| format!("revision {it}"),
    );
    let mut lines = vec![format!("backup: {}, {revision}, {age}", chosen.location)];
    let Some(view) = view else {
        lines.push(format!(
            "cluster {} does not exist: the new cluster gets the spec in the manifest of the backup",
            args.cluster
        ));
        return lines.join("\n");
    };
    let newest = view
        .members
        .iter()
        .filter_map(|member| member.revision)
        .max();
    let newest = newest.and_then(|newest| i64::try_from(newest).ok());
    lines.push(match (newest, chosen.revision) {
        (Some(newest), Some(revision)) if newest >= revision => format!(
            "lost: {} revisions of cluster {} (now at revision {newest})",
            newest - revision,
            view.name
        ),
        (Some(newest), _) => format!(
            "lost: all writes to cluster {} since the backup (now at revision {newest})",
            view.name
        ),
        (None, _) => format!("lost: all writes to cluster {} since the backup", view.name),
    });
    lines.push(match &args.keep_old_data {
        Some(duration) => format!("the old volumes are kept for {duration}"),
        None => "the old volumes are deleted when the new cluster is complete (--keep-old-data keeps them)".to_owned(),
    });
    if args.bump_revision.is_none() {
        lines.push(
            "the revision of the cluster decreases: if clients cache or watch keys, as API servers of Kubernetes do, \
             add --bump-revision 1000000000"
                .to_owned(),
        );
    }
    lines.join("\n")
}

/// Builds the EtcdRestore that `restore` creates.
fn new_restore(args: &RestoreArgs, suffix: &str) -> EtcdRestore {
    let name = args.name.clone();
    let name = name.unwrap_or_else(|| format!("{}-restore-{suffix}", args.cluster));
    let spec = EtcdRestoreSpec {
        overwrite: args.overwrite,
        keep_old_data: args.keep_old_data.clone().map(DurationText),
        bump_revision: args.bump_revision,
        mark_compacted: args.bump_revision.is_some_and(|revisions| revisions > 0),
        ..from_backup(&args.cluster, &args.from, args.before)
    };
    EtcdRestore::new(&name, spec)
}

/// Builds the spec of an EtcdRestore that restores from an EtcdBackup.
pub(super) fn from_backup(
    cluster: &str,
    backup: &str,
    before: Option<Timestamp>,
) -> EtcdRestoreSpec {
    EtcdRestoreSpec {
        etcd_cluster: RestoreTarget {
            name: cluster.to_owned(),
            template: None,
        },
        backup: Some(BackupReference {
            name: backup.to_owned(),
            before: before.map(Time),
        }),
        backup_storage_type: None,
        s3: None,
        abs: None,
        gcs: None,
        oss: None,
        pvc: None,
        local: None,
        continuous: None,
        encryption: None,
        overwrite: false,
        keep_old_data: None,
        bump_revision: None,
        mark_compacted: false,
        ttl_seconds_after_finished: None,
    }
}

/// Returns `Done` if the restored cluster serves, `Failed` if the phase is `Failed`, and `Waiting` in all other cases.
pub(super) fn look(restore: &EtcdRestore) -> Look {
    let status = restore.status.clone().unwrap_or_default();
    let complete = find(restore.conditions(), &ConditionType::Complete);
    let failed = find(restore.conditions(), &ConditionType::Failed);
    let reason = complete.map_or("Pending", |one| one.reason.as_str());
    if status.succeeded {
        let revision = status.restored_revision.unwrap_or_default();
        return Look::Done(format!("the restored cluster serves revision {revision}"));
    }
    let message = complete.map(|one| one.message.clone()).unwrap_or_default();
    if status.phase == Some(RestorePhase::Failed) {
        let cause = failed.map_or(message, |one| format!("{}: {}", one.reason, one.message));
        return Look::Failed(cause);
    }
    let phase = status
        .phase
        .map_or_else(|| "Pending".to_owned(), |phase| phase.to_string());
    let copied = status
        .progress
        .and_then(|progress| u64::try_from(progress.bytes).ok());
    Look::Waiting(match copied {
        Some(copied) => format!("{phase}, {reason}: {}", bytes(copied)),
        None => format!("{phase}, {reason}: {message}"),
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::view::{Inputs, LiveAnswer, view};

    fn args(line: &str) -> RestoreArgs {
        let words = ["kubectl-etcd", "restore", "main", "--from", "nightly"].into_iter();
        let words = words.chain(line.split(' ').filter(|word| !word.is_empty()));
        match Cli::parse_from(words).command {
            Command::Restore(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn nightly() -> EtcdBackup {
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": "nightly" },
            "spec": { "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": { "path": "b/k" } },
            "status": { "lastSuccessDate": "2026-11-26T02:00:00Z", "location": "s3://b/k2", "etcdRevision": 200,
                "backups": [
                    { "location": "s3://b/k2", "etcdRevision": 200, "completionTime": "2026-11-26T02:00:00Z" },
                    { "location": "s3://b/k1", "etcdRevision": 100, "completionTime": "2026-11-25T02:00:00Z" }] }
        }))
        .unwrap()
    }

    fn running(revision: u64, state: &str) -> ClusterView {
        let cluster: EtcdCluster = serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main" }, "spec": {},
            "status": { "state": state, "memberDetails": [{ "name": "main-a", "healthy": true }] }
        }))
        .unwrap();
        let mut view = view(Inputs {
            cluster: &cluster,
            pods: &[],
            backups: &[],
            live: &LiveAnswer::NotAsked,
        });
        view.members[0].revision = Some(revision);
        view
    }

    #[test]
    fn restore_chooses_newest_backup_before_given_time() {
        let at = |text: &str| Some(text.parse().unwrap());
        assert_eq!(choose(&nightly(), None).unwrap().location, "s3://b/k2");
        let old = choose(&nightly(), at("2026-11-25T12:00:00Z")).unwrap();
        assert_eq!(
            (old.location.as_str(), old.revision),
            ("s3://b/k1", Some(100))
        );
        let error = choose(&nightly(), at("2026-11-01T00:00:00Z")).unwrap_err();
        assert!(error.remedy().unwrap().contains("verify nightly"));
        let mut none = nightly();
        none.status = None;
        assert!(choose(&none, None).is_err());
    }

    #[test]
    fn restore_of_existing_cluster_requires_overwrite_option_and_no_pause() {
        let view = running(300, "Ready");
        assert!(check(&args(""), None).is_ok());
        assert!(
            check(&args(""), Some(&view))
                .unwrap_err()
                .remedy()
                .unwrap()
                .contains("--overwrite")
        );
        assert!(check(&args("--overwrite"), Some(&view)).is_ok());
        let paused = running(300, "Paused");
        assert!(check(&args("--overwrite"), Some(&paused)).is_err());
    }

    #[test]
    fn restore_preview_shows_lost_revisions() {
        let now = "2026-11-26T05:00:00Z".parse().unwrap();
        let chosen = choose(&nightly(), None).unwrap();
        let text = effect(
            &args("--overwrite"),
            Some(&running(300, "Ready")),
            &chosen,
            now,
        );
        for part in [
            "s3://b/k2, revision 200, 3h ago",
            "lost: 100 revisions",
            "--keep-old-data",
            "--bump-revision",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = effect(&args(""), None, &chosen, now);
        assert!(text.contains("does not exist"), "{text}");
    }

    #[test]
    fn new_etcdrestore_has_requested_options() {
        let line =
            "--overwrite --keep-old-data 24h --bump-revision 1000 --before 2026-11-25T12:00:00Z";
        let restore = new_restore(&args(line), "x");
        assert_eq!(restore.name_any(), "main-restore-x");
        assert!(restore.spec.overwrite && restore.spec.mark_compacted);
        assert_eq!(restore.spec.backup.as_ref().unwrap().name, "nightly");
        assert!(restore.spec.backup.as_ref().unwrap().before.is_some());
        assert_eq!(api::restore::validate(&restore).len(), 0);
        let plain = new_restore(&args("--name now"), "x");
        assert_eq!(
            (plain.name_any().as_str(), plain.spec.mark_compacted),
            ("now", false)
        );
    }

    #[test]
    fn wait_for_restore_ends_with_success_or_phase_failed() {
        let with = |status: serde_json::Value| {
            let mut restore = new_restore(&args(""), "x");
            restore.status = Some(serde_json::from_value(status).unwrap());
            look(&restore)
        };
        assert!(matches!(
            with(json!({ "succeeded": true, "restoredRevision": 7 })),
            Look::Done(_)
        ));
        let failed = json!([{ "type": "Failed", "status": "True", "reason": "BackupMissing", "message": "M",
            "lastTransitionTime": "2026-11-26T00:00:00Z" }]);
        let ended = with(json!({ "phase": "Failed", "conditions": failed.clone() }));
        assert_eq!(ended, Look::Failed("BackupMissing: M".into()));
        // Only the phase `Failed` is final. In another phase, the command waits, because the restore continues when a
        // user has corrected the cause.
        assert!(matches!(
            with(json!({ "phase": "Preparing", "conditions": failed })),
            Look::Waiting(_)
        ));
    }
}
