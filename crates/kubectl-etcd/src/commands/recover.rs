//! `recover`: approves the recovery of a cluster without a quorum. The approval is the annotation
//! `etcd.database.coreos.com/recover` (docs/recovery.md).

use std::time::Duration;

use api::EtcdCluster;
use api::cluster::RecoveryPhase;
use api::conditions::{ConditionType, find, is_true};
use api::names::{self, ANNOTATION_RECOVER};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::status;
use crate::access::Access;
use crate::changes::{blocked, progress};
use crate::cli::ChangeAndWaitArgs;
use crate::console::{Look, confirm, say, wait};
use crate::error::{Error, Result};
use crate::text::duration;
use crate::view::{ClusterView, Source};

/// Maximum time to wait until the operator has noticed that the annotation of an earlier approval was removed.
const WITHDRAWAL_LIMIT: Duration = Duration::from_mins(2);

pub(super) async fn run(access: &Access, args: &ChangeAndWaitArgs) -> Result<()> {
    let name = &args.cluster;
    let cluster = access.cluster(name).await?;
    let id = cluster_to_recover(&cluster)?;
    let view = status::one(access, name, false).await?;
    let claims: Vec<PersistentVolumeClaim> = access.list(&names::cluster_selector(name)).await?;
    say(&losses(&cluster, &view, &claims))?;
    let question = format!(
        "Start a new cluster from the surviving data of {name}, and lose all writes that this data does not contain?"
    );
    if !confirm(&question, args.consent)? {
        return Ok(());
    }
    let annotate =
        |value: Value| json!({ "metadata": { "annotations": { ANNOTATION_RECOVER: value } } });
    if cluster.annotations().contains_key(ANNOTATION_RECOVER) {
        // The annotation already exists. The command removes it and sets it again below, because the operator ignores
        // an approval that was set before the quorum was lost.
        let _: EtcdCluster = access.merge(name, &annotate(Value::Null)).await?;
        let looked = async || Ok(withdrawal(&access.cluster(name).await?));
        let object = access.named::<EtcdCluster>(name);
        wait(
            &object,
            "ready for a new approval",
            WITHDRAWAL_LIMIT,
            looked,
        )
        .await?;
    }
    let _: EtcdCluster = access.merge(name, &annotate(json!(id))).await?;
    say(&format!("the recovery of cluster {id} is approved"))?;
    if !args.waiting.wait {
        return say(&format!(
            "follow the recovery with `kubectl etcd plan {name}`"
        ));
    }
    let object = access.named::<EtcdCluster>(name);
    let looked = async || Ok(recovered(&access.cluster(name).await?, &id));
    let end = wait(&object, "recovered", args.waiting.timeout, looked).await?;
    say(&end)
}

/// The ID of the cluster to recover, which the approval must contain. Fails if no recovery can be approved now.
fn cluster_to_recover(cluster: &EtcdCluster) -> Result<String> {
    let name = cluster.name_any();
    let status = cluster.status.clone().unwrap_or_default();
    let Some(id) = status.cluster_id else {
        return Err(Error::refused(
            format!("cluster {name} has never formed, so there is nothing to recover"),
            format!("`kubectl etcd plan {name}` names the cause of the delay"),
        ));
    };
    if is_true(cluster.conditions(), &ConditionType::Available) {
        return Err(Error::refused(
            format!("a quorum of cluster {name} answers, so there is nothing to recover"),
            "to return to older data, use `kubectl etcd restore` with --overwrite",
        ));
    }
    if let Some(error) = blocked(cluster) {
        return Err(error);
    }
    let running = status
        .recovery
        .filter(|recovery| recovery.phase == RecoveryPhase::InProgress);
    if running.is_some() {
        return Err(Error::refused(
            format!("a recovery of cluster {name} is in progress"),
            format!("follow the recovery with `kubectl etcd plan {name}`"),
        ));
    }
    Ok(id)
}

/// Describes the members, volumes and writes that the recovery loses, for the confirmation.
fn losses(cluster: &EtcdCluster, view: &ClusterView, claims: &[PersistentVolumeClaim]) -> String {
    let mut lines = vec![format!(
        "cluster {} ({}) has no quorum",
        view.name,
        view.cluster_id.as_deref().unwrap_or_default()
    )];
    let degraded = find(cluster.conditions(), &ConditionType::Degraded);
    let is_lost = degraded.is_some_and(|one| one.reason == "QuorumLost");
    if let Some(degraded) = degraded.filter(|one| one.status == "True") {
        lines.push(format!(
            "the operator reports {}: {}",
            degraded.reason, degraded.message
        ));
    }
    lines.push(String::new());
    lines.push("members:".to_owned());
    for member in &view.members {
        let claim = claims.iter().find(|claim| claim.name_any() == member.name);
        let phase = claim.and_then(|claim| claim.status.as_ref()?.phase.as_deref());
        let data = phase.map_or_else(|| "no volume".to_owned(), |phase| format!("volume {phase}"));
        let revision = member.revision.map_or_else(
            || "does not answer".to_owned(),
            |it| format!("answers, revision {it}"),
        );
        lines.push(format!(
            "  {}: {revision}; {data}; pod {}",
            member.name, member.pod
        ));
    }
    if view.source == Source::Status {
        lines.push("  no member answered, so their revisions are unknown".to_owned());
    }
    lines.push(String::new());
    let newest = view
        .members
        .iter()
        .filter_map(|member| member.revision)
        .max();
    lines.push(newest.map_or_else(
        || "lost: all writes that no surviving member has".to_owned(),
        |newest| {
            format!(
                "lost: writes after revision {newest} that only the lost members have acknowledged"
            )
        },
    ));
    lines.push(backup_advice(view, newest));
    let kept = cluster.spec.keep_recovered_volumes().as_secs();
    let kept = duration(i64::try_from(kept).unwrap_or(i64::MAX));
    lines.push(format!(
        "the volumes of the old members are deleted when the new cluster is complete, {kept} after the recovery at the earliest"
    ));
    if !is_lost {
        lines.push(
            "WARNING: the operator does not report that the data of a majority is lost. Approve only if the members that do not answer have stopped permanently: otherwise two clusters may serve clients"
                .to_owned(),
        );
    }
    lines.push("checklist: docs/recovery.md".to_owned());
    lines.join("\n")
}

/// Describes whether the newest backup or the surviving member has the newer revision.
fn backup_advice(view: &ClusterView, newest: Option<u64>) -> String {
    let Some(backup) = &view.last_backup else {
        return "no backup of the cluster is known".to_owned();
    };
    let revision = backup
        .revision
        .and_then(|revision| u64::try_from(revision).ok());
    match (revision, newest) {
        (Some(backup_revision), Some(newest)) if backup_revision > newest => format!(
            "WARNING: the backup of EtcdBackup {} has revision {backup_revision}, which is newer than the surviving \
             data: restore this backup instead (`kubectl etcd restore {} --from {} --overwrite`)",
            backup.name, view.name, backup.name
        ),
        (Some(backup_revision), _) => format!(
            "the newest backup (EtcdBackup {}) has revision {backup_revision}",
            backup.name
        ),
        (None, _) => format!(
            "the revision of the newest backup (EtcdBackup {}) is unknown",
            backup.name
        ),
    }
}

fn withdrawal(cluster: &EtcdCluster) -> Look {
    let stale = cluster
        .status
        .as_ref()
        .and_then(|status| status.stale_approval.as_ref());
    if stale.is_none() && !cluster.annotations().contains_key(ANNOTATION_RECOVER) {
        Look::Done(String::new())
    } else {
        Look::Waiting(
            "the operator has not noticed yet that the old approval was removed".to_owned(),
        )
    }
}

/// Returns `Done` if the recovery of the cluster with the ID `id` is complete and the cluster is available, `Failed` if
/// the operator refused or cancelled the recovery, and `Waiting` in all other cases.
fn recovered(cluster: &EtcdCluster, id: &str) -> Look {
    let status = cluster.status.as_ref();
    let recovery = status.and_then(|status| status.recovery.as_ref());
    let Some(recovery) = recovery.filter(|recovery| recovery.from_cluster_id == id) else {
        let degraded = find(cluster.conditions(), &ConditionType::Degraded);
        return match degraded.filter(|one| one.reason == "RecoveryRefused") {
            Some(refused) => Look::Failed(refused.message.clone()),
            None => Look::Waiting(progress(cluster)),
        };
    };
    let message = recovery.message.clone().unwrap_or_default();
    match recovery.phase {
        RecoveryPhase::Complete if is_true(cluster.conditions(), &ConditionType::Available) => {
            Look::Done(message)
        }
        RecoveryPhase::Cancelled => Look::Failed(message),
        _ => Look::Waiting(progress(cluster)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Inputs, LiveAnswer, view};

    fn cluster(status: Value) -> EtcdCluster {
        let mut all = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main", "namespace": "prod" }, "spec": {}
        });
        all["status"] = status;
        serde_json::from_value(all).unwrap()
    }

    fn condition(kind: &str, status: &str, reason: &str) -> Value {
        json!({ "type": kind, "status": status, "reason": reason, "message": "1 of 3 voters",
            "lastTransitionTime": "2026-11-26T00:00:00Z" })
    }

    #[test]
    fn only_formed_cluster_without_quorum_can_be_recovered() {
        let lost = json!({ "clusterID": "7f", "conditions": [condition("Available", "False", "QuorumLost")] });
        assert_eq!(cluster_to_recover(&cluster(lost.clone())).unwrap(), "7f");
        let mut running = lost.clone();
        running["recovery"] = json!({ "phase": "InProgress", "approvedBy": "Annotation", "fromClusterID": "7f",
            "fromToken": "t", "survivor": "a", "revision": 1, "member": "b", "token": "u" });
        let healthy = json!({ "clusterID": "7f", "conditions": [condition("Available", "True", "QuorumHealthy")] });
        for (status, part) in [
            (json!({}), "never formed"),
            (healthy, "a quorum of cluster main answers"),
            (running, "in progress"),
        ] {
            let error = cluster_to_recover(&cluster(status)).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    fn shown(reason: &str, backup_revision: i64) -> String {
        let cluster = cluster(json!({ "clusterID": "7f",
            "memberDetails": [{ "name": "main-a", "healthy": false, "id": "a" }, { "name": "main-b", "healthy": false }],
            "lastBackup": { "name": "nightly", "revision": backup_revision },
            "conditions": [condition("Degraded", "True", reason)] }));
        let mut view = view(Inputs {
            cluster: &cluster,
            pods: &[],
            backups: &[],
            live: &LiveAnswer::NotAsked,
        });
        view.members[0].revision = Some(8123);
        view.source = Source::Members;
        let claim = serde_json::from_value(
            json!({ "metadata": { "name": "main-a" }, "status": { "phase": "Bound" } }),
        );
        losses(&cluster, &view, &[claim.unwrap()])
    }

    #[test]
    fn recovery_shows_losses_before_approval() {
        let text = shown("QuorumLost", 8000);
        for part in [
            "reports QuorumLost: 1 of 3 voters",
            "main-a: answers, revision 8123; volume Bound",
            "main-b: does not answer; no volume",
            "lost: writes after revision 8123",
            "60m after the recovery at the earliest",
            "(EtcdBackup nightly) has revision 8000",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("WARNING"), "{text}");
    }

    #[test]
    fn recovery_warns_about_newer_backup_and_possible_second_cluster() {
        let text = shown("QuorumLost", 9000);
        assert!(
            text.contains("kubectl etcd restore main --from nightly --overwrite"),
            "{text}"
        );
        assert!(shown("MemberDown", 8000).contains("two clusters may serve clients"));
    }

    #[test]
    fn wait_for_recovery_ends_on_completion_cancellation_or_refusal() {
        let with = |phase: &str, available: &str| {
            let status = json!({ "conditions": [condition("Available", available, "R")],
                "recovery": { "phase": phase, "approvedBy": "Annotation", "fromClusterID": "7f",
                "fromToken": "t", "survivor": "a", "revision": 1, "member": "b", "token": "u", "message": "m" } });
            recovered(&cluster(status), "7f")
        };
        assert_eq!(with("Complete", "True"), Look::Done("m".into()));
        assert!(matches!(with("Complete", "False"), Look::Waiting(_)));
        assert_eq!(with("Cancelled", "False"), Look::Failed("m".into()));
        let refused = json!({ "conditions": [condition("Degraded", "True", "RecoveryRefused")] });
        assert!(matches!(
            recovered(&cluster(refused), "7f"),
            Look::Failed(_)
        ));
    }
}
