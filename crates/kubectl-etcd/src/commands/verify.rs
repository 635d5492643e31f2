//! `verify`: prints how the operator verified the backups of an EtcdBackup. `verify --rehearse` tests a backup with a
//! restore (docs/production.md).

use api::conditions::{ConditionType, find};
use api::restore::ClusterTemplate;
use api::{EtcdBackup, EtcdCluster, EtcdClusterSpec, EtcdRestore};
use jiff::Timestamp;
use kube::{Api, ResourceExt};

use super::backup::suffix;
use super::restore::{Chosen, choose, from_backup, look};
use crate::access::Access;
use crate::cli::VerifyArgs;
use crate::console::{confirm, note, paint, say, wait};
use crate::error::{Error, Result};
use crate::text::{Cell, Paint, Table, Tone, bytes, distance};

pub(super) async fn run(access: &Access, args: &VerifyArgs) -> Result<()> {
    let backup: EtcdBackup = access.get(&args.backup).await?;
    say(&known(&backup, Timestamp::now(), paint()))?;
    if args.rehearse {
        return Box::pin(rehearse(access, args, &backup)).await;
    }
    choose(&backup, None).map(|_| ())
}

/// Shows the conditions of the EtcdBackup, the checks of its newest backup, and its stored backups.
fn known(backup: &EtcdBackup, now: Timestamp, paint: Paint) -> String {
    let status = backup.status.clone().unwrap_or_default();
    let conditions = backup.conditions();
    let mut lines = Vec::new();
    for kind in [
        ConditionType::Complete,
        ConditionType::Failed,
        ConditionType::Progressing,
        ConditionType::RetentionApplied,
        ConditionType::Verified,
    ] {
        if let Some(one) = find(conditions, &kind) {
            lines.push(format!(
                "{}: {} {}: {}",
                one.type_, one.status, one.reason, one.message
            ));
        }
    }
    lines.push(if status.succeeded {
        "the newest backup is complete: its checksum matches the checksum from etcd, and the store returned the data and the manifest as written".to_owned()
    } else {
        paint.paint("the newest backup is not complete", Tone::Bad)
    });
    if let Some(key) = &status.encryption_key {
        lines.push(format!(
            "the newest backup is encrypted with the key {} (ID {})",
            key.name, key.id
        ));
    }
    let verified = status.last_verified.as_ref().map(|last| &last.location);
    if verified.is_none() || verified != status.location.as_ref() {
        lines.push("only a restore proves that a backup is usable: add --rehearse".to_owned());
    }
    let mut table = Table::new(&["COMPLETED", "REVISION", "SIZE", "SHA-256", "LOCATION"]);
    for stored in &status.backups {
        let completed = stored
            .completion_time
            .as_ref()
            .map(|time| distance(time.0, now));
        let size = stored
            .size
            .and_then(|size| u64::try_from(size).ok())
            .map(bytes);
        let digest: String = stored
            .sha256
            .iter()
            .flat_map(|text| text.chars().take(12))
            .collect();
        table.add(vec![
            Cell::from(completed.unwrap_or_default()),
            stored
                .etcd_revision
                .map(|it| it.to_string())
                .unwrap_or_default()
                .into(),
            size.unwrap_or_default().into(),
            digest.into(),
            stored.location.clone().into(),
        ]);
    }
    if !table.is_empty() {
        lines.push(String::new());
        lines.push(table.render(paint));
    }
    lines.join("\n")
}

async fn rehearse(access: &Access, args: &VerifyArgs, backup: &EtcdBackup) -> Result<()> {
    let chosen = choose(backup, None)?;
    let source = backup
        .spec
        .etcd_cluster
        .as_ref()
        .map(|target| target.name.clone());
    let original = match &source {
        Some(name) => {
            let api: Api<EtcdCluster> = access.api();
            api.get_opt(name).await.map_err(|source| Error::Request {
                verb: "get",
                object: access.named::<EtcdCluster>(name),
                source: Box::new(source),
            })?
        }
        None => None,
    };
    let version = backup
        .status
        .as_ref()
        .and_then(|status| status.etcd_version.clone());
    let copy = format!("verify-{}", suffix(Timestamp::now()));
    let restore = rehearsal(&copy, &args.backup, original.as_ref(), version.as_deref());
    say(&format!(
        "rehearsal: the backup {} is restored into a temporary cluster {copy} of one member. The revision of {copy} is compared with the revision of the backup, and then {copy} is deleted. The rehearsal does not change other clusters",
        chosen.location
    ))?;
    if !confirm("Start the rehearsal?", args.consent)? {
        return Ok(());
    }
    let begin = Timestamp::now();
    let restore = access.create(&restore).await?;
    let object = access.named::<EtcdRestore>(&copy);
    let looked = async || Ok(look(&access.get::<EtcdRestore>(&copy).await?));
    let outcome = wait(&object, "complete", args.timeout, looked).await;
    let outcome = match outcome {
        Ok(_) => compare(&access.get::<EtcdRestore>(&copy).await?, &chosen),
        Err(error) => Err(error),
    };
    if outcome.is_err() {
        note(&format!(
            "the rehearsal is kept, so that you can find the cause. Delete it with: kubectl -n {} delete etcdrestore/{copy} etcdcluster/{copy} --ignore-not-found",
            access.namespace
        ));
    } else {
        access.delete(&restore).await?;
        let copied: EtcdCluster = access.cluster(&copy).await?;
        access.delete(&copied).await?;
    }
    let took = Timestamp::now().as_second() - begin.as_second();
    say(&format!("{} in {took} s", outcome?))
}

/// Builds the EtcdRestore of a rehearsal. The temporary cluster has one member. It does not inherit the deletion
/// protection and the retained volumes of `original`, because the rehearsal deletes the temporary cluster. It does not
/// inherit the settings for backups, TLS, Services, gRPC proxies and NetworkPolicies, because these affect other
/// systems.
fn rehearsal(
    copy: &str,
    backup: &str,
    original: Option<&EtcdCluster>,
    version: Option<&str>,
) -> EtcdRestore {
    let mut spec = original.map_or_else(EtcdClusterSpec::default, |cluster| EtcdClusterSpec {
        backup: None,
        tls: None,
        services: None,
        network_policy: None,
        grpc_proxy: None,
        upkeep: None,
        recovery: None,
        hibernate: false,
        paused: false,
        protected: false,
        deletion_policy: None,
        ..cluster.spec.clone()
    });
    spec.size = 1;
    if let Some(version) = version.filter(|_| original.is_none()) {
        version.clone_into(&mut spec.version);
    }
    if let Some(auth) = &mut spec.auth {
        // `enabled` is unset, because the backup decides whether authentication is enabled. The backup contains the
        // users with their passwords. The operator needs the Secret only to log in.
        auth.enabled = None;
    }
    let mut restore = from_backup(copy, backup, None);
    restore.etcd_cluster.template = Some(ClusterTemplate {
        metadata: None,
        spec,
    });
    EtcdRestore::new(copy, restore)
}

/// Compares the restored revision with the revision of the backup. Fails if the restored revision is lower.
fn compare(restore: &EtcdRestore, chosen: &Chosen) -> Result<String> {
    let status = restore.status.clone().unwrap_or_default();
    let restored = status.restored_revision.unwrap_or_default();
    // The status of the EtcdRestore takes precedence over `chosen`, because the EtcdRestore may have restored a
    // backup that was completed after `chosen`.
    let expected = status
        .backup
        .and_then(|backup| backup.etcd_revision)
        .or(chosen.revision);
    match expected {
        Some(expected) if restored < expected => Err(Error::EndedBadly {
            object: format!("etcdrestore/{}", restore.name_any()),
            message: format!(
                "the restored cluster has revision {restored}, and the backup has revision {expected}"
            ),
        }),
        _ => Ok(format!(
            "the backup is usable: the restored cluster served revision {restored}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rehearsal_cluster_has_no_tls_services_backups_or_protection() {
        let original: EtcdCluster = serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main" },
            "spec": { "size": 5, "version": "3.6.16", "paused": true, "protected": true,
                "deletionPolicy": "RetainVolumes", "grpcProxy": {},
                "auth": { "secret": "root", "enabled": true }, "TLS": { "generated": {} }, "services": { "client": { "type": "LoadBalancer" } },
                "pod": { "persistentVolumeClaimSpec": { "resources": { "requests": { "storage": "1Gi" } } } } }
        }))
        .unwrap();
        let restore = rehearsal("verify-x", "nightly", Some(&original), Some("3.5.35"));
        let problems = api::restore::validate(&restore);
        assert!(problems.is_empty(), "{problems:?}");
        let spec = restore.spec.etcd_cluster.template.unwrap().spec;
        assert_eq!((spec.size, spec.version.as_str()), (1, "3.6.16"));
        assert!(
            spec.tls.is_none() && spec.services.is_none() && spec.backup.is_none() && !spec.paused
        );
        assert_eq!(spec.grpc_proxy, None);
        assert!(!spec.protected && !spec.retains_volumes() && spec.is_durable());
        assert_eq!(spec.auth.unwrap().enabled, None);
        let alone = rehearsal("verify-x", "nightly", None, Some("3.5.35"));
        assert_eq!(
            alone.spec.etcd_cluster.template.unwrap().spec.version,
            "3.5.35"
        );
    }

    #[test]
    fn rehearsal_fails_if_restored_revision_is_lower() {
        let with = |restored: i64| {
            let mut restore = rehearsal("verify-x", "nightly", None, None);
            restore.status =
                Some(serde_json::from_value(json!({ "restoredRevision": restored })).unwrap());
            let chosen = Chosen {
                revision: Some(200),
                ..Chosen::default()
            };
            compare(&restore, &chosen)
        };
        assert!(with(200).unwrap().contains("revision 200"));
        assert_eq!(
            with(199).unwrap_err().exit_code(),
            crate::error::CODE_ENDED_BADLY
        );
    }

    #[test]
    fn verify_lists_stored_backups() {
        let backup: EtcdBackup = serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup", "metadata": { "name": "n" },
            "spec": { "storageType": "S3" },
            "status": { "succeeded": true, "encryptionKey": { "name": "2026", "id": "a62e0f7753a4df18" }, "backups": [{ "location": "s3://b/k", "etcdRevision": 7, "size": 2048,
                "sha256": "0123456789abcdef", "completionTime": "2026-11-26T02:00:00Z" }] }
        }))
        .unwrap();
        let text = known(
            &backup,
            "2026-11-26T05:00:00Z".parse().unwrap(),
            Paint(false),
        );
        assert!(text.contains("--rehearse"), "{text}");
        for part in [
            "checksum matches",
            "key 2026 (ID a62e0f7753a4df18)",
            "3h ago",
            "2.0 KiB",
            "0123456789ab ",
            "s3://b/k",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn verify_advises_rehearsal_unless_newest_backup_is_verified() {
        let of = |location: &str| {
            let backup = json!({
                "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup", "metadata": { "name": "n" },
                "spec": { "storageType": "S3", "verification": {} },
                "status": { "succeeded": true, "location": "s3://b/new", "lastVerified": { "location": location },
                    "conditions": [{ "type": "Verified", "status": "True", "reason": "BackupVerified",
                        "message": "a test restore succeeded", "lastTransitionTime": "2026-11-26T02:00:00Z" }] }
            });
            let backup: EtcdBackup = serde_json::from_value(backup).unwrap();
            known(&backup, Timestamp::UNIX_EPOCH, Paint(false))
        };
        for (location, advised) in [("s3://b/new", false), ("s3://b/old", true)] {
            let text = of(location);
            let reported = "Verified: True BackupVerified: a test restore succeeded";
            assert!(text.contains(reported), "{text}");
            assert_eq!(text.contains("--rehearse"), advised, "{text}");
        }
    }
}
