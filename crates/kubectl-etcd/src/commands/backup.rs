//! `backup`: creates an EtcdBackup that makes one backup at once.

use api::backup::{BackupPolicy, ClusterReference, Compression, DeletionPolicy, Encryption};
use api::conditions::{ConditionType, find};
use api::storage::{PvcSource, S3Source, StorageType};
use api::{EtcdBackup, EtcdBackupSpec};
use jiff::Timestamp;
use kube::ResourceExt;

use crate::access::Access;
use crate::cli::BackupArgs;
use crate::console::{Look, confirm, say};
use crate::error::{Error, Result};
use crate::text::bytes;

pub(super) async fn run(access: &Access, args: &BackupArgs) -> Result<()> {
    let cluster = access.cluster(&args.cluster).await?;
    let existing = access.backups().await?;
    let suffix = suffix(Timestamp::now());
    let backup = new_backup(args, &existing, &suffix)?;
    let yaml = serde_yaml_ng::to_string(&backup.spec).map_err(|_| Error::Format("YAML"))?;
    say(&format!(
        "EtcdBackup {} for cluster {}:\n{yaml}",
        backup.name_any(),
        cluster.name_any()
    ))?;
    if !confirm("Make this backup?", args.consent)? {
        return Ok(());
    }
    super::create(access, &backup, &args.waiting, look).await
}

/// The time as a part of object names, such as `20261126-190503`.
pub(super) fn suffix(now: Timestamp) -> String {
    now.strftime("%Y%m%d-%H%M%S").to_string()
}

/// Builds the EtcdBackup that `backup` creates.
fn new_backup(args: &BackupArgs, existing: &[EtcdBackup], suffix: &str) -> Result<EtcdBackup> {
    let mut spec = if let Some(path) = &args.s3 {
        let s3 = S3Source {
            path: path.clone(),
            aws_secret: args.aws_secret.clone(),
            endpoint: args.endpoint.clone(),
            force_path_style: args.endpoint.is_some(),
            ..S3Source::default()
        };
        EtcdBackupSpec {
            s3: Some(s3),
            ..empty(StorageType::S3)
        }
    } else if let Some(place) = &args.pvc {
        let Some((claim, path)) = place.split_once('/') else {
            return Err(Error::refused(
                format!("--pvc {place} has no path"),
                "use CLAIM/PATH, such as backups/etcd/main",
            ));
        };
        let pvc = PvcSource {
            claim_name: claim.to_owned(),
            path: path.to_owned(),
        };
        EtcdBackupSpec {
            pvc: Some(pvc),
            ..empty(StorageType::Pvc)
        }
    } else {
        let template = template(&args.cluster, existing, args.from.as_deref())?;
        from_template(&template.spec, suffix)
    };
    spec.etcd_cluster = Some(ClusterReference {
        name: args.cluster.clone(),
    });
    if args.zstd {
        spec.compression = Some(Compression::Zstd);
    }
    if let Some(secret) = &args.encryption_secret {
        spec.encryption = Some(Encryption {
            secret: secret.clone(),
            key: args.encryption_key.clone(),
        });
    }
    let name = args.name.clone();
    let name = name.unwrap_or_else(|| format!("{}-manual-{suffix}", args.cluster));
    Ok(EtcdBackup::new(&name, spec))
}

/// An EtcdBackupSpec with this storage type and the deletion policy `Retain`. All other fields are empty.
fn empty(storage_type: StorageType) -> EtcdBackupSpec {
    EtcdBackupSpec {
        etcd_endpoints: Vec::new(),
        etcd_cluster: None,
        client_tls_secret: None,
        auth_secret: None,
        backup_policy: None,
        storage_type,
        s3: None,
        abs: None,
        gcs: None,
        oss: None,
        pvc: None,
        local: None,
        compression: None,
        encryption: None,
        verification: None,
        copy_to: Vec::new(),
        continuous: None,
        ttl_seconds_after_finished: None,
        deletion_policy: Some(DeletionPolicy::Retain),
    }
}

/// The EtcdBackup whose store the new backup uses. This is the EtcdBackup that the user named in `from`. If `from` is
/// `None`, it is the EtcdBackup of this cluster with the newest backup.
fn template<'a>(
    cluster: &str,
    existing: &'a [EtcdBackup],
    from: Option<&str>,
) -> Result<&'a EtcdBackup> {
    if let Some(name) = from {
        let found = existing.iter().find(|backup| backup.name_any() == name);
        return found.ok_or_else(|| Error::Missing {
            object: format!("etcdbackup/{name}"),
            remedy: "`kubectl get etcdbackups` lists the EtcdBackups of the namespace".to_owned(),
        });
    }
    let of_cluster = existing.iter().filter(|backup| {
        let target = backup.spec.etcd_cluster.as_ref();
        target.is_some_and(|target| target.name == cluster)
    });
    let newest = |backup: &&EtcdBackup| {
        let status = backup.status.as_ref();
        let time = status.and_then(|status| status.last_success_date.as_ref());
        (time.map(|time| time.0), backup.spec.is_periodic())
    };
    of_cluster.max_by_key(newest).ok_or_else(|| {
        Error::refused(
            format!("no EtcdBackup of cluster {cluster} exists, so the store is unknown"),
            "name the store with --s3 or --pvc, or an EtcdBackup with --from",
        )
    })
}

/// Builds the spec of one backup, with the store of the template and a new path.
fn from_template(template: &EtcdBackupSpec, suffix: &str) -> EtcdBackupSpec {
    let mut spec = template.clone();
    // The new EtcdBackup names the EtcdCluster, so it needs no etcd endpoints and no Secrets for them.
    spec.etcd_endpoints = Vec::new();
    spec.client_tls_secret = None;
    spec.auth_secret = None;
    spec.ttl_seconds_after_finished = None;
    // The new EtcdBackup does not record changes, because the agent of the template already records the cluster.
    spec.continuous = None;
    // The new EtcdBackup verifies its only backup as soon as the backup is complete, so the verification needs no
    // schedule.
    if let Some(verification) = &mut spec.verification {
        (verification.schedule, verification.time_zone) = (None, None);
        verification.window = None;
    }
    // `Retain` keeps the stored backup after the new EtcdBackup was deleted. The backup policy gets only the timeout
    // of the template, because the new EtcdBackup is not periodic.
    spec.deletion_policy = Some(DeletionPolicy::Retain);
    let limit = template
        .backup_policy
        .as_ref()
        .and_then(|policy| policy.timeout_in_second);
    spec.backup_policy = limit.map(|limit| BackupPolicy {
        timeout_in_second: Some(limit),
        ..BackupPolicy::default()
    });
    for copy in &mut spec.copy_to {
        (copy.max_backups, copy.max_age, copy.retention) = (None, None, None);
    }
    let copies = spec.copy_to.iter_mut().flat_map(|copy| {
        [
            copy.s3.as_mut().map(|store| &mut store.path),
            copy.abs.as_mut().map(|store| &mut store.path),
            copy.gcs.as_mut().map(|store| &mut store.path),
            copy.oss.as_mut().map(|store| &mut store.path),
        ]
    });
    let paths = [
        spec.s3.as_mut().map(|store| &mut store.path),
        spec.abs.as_mut().map(|store| &mut store.path),
        spec.gcs.as_mut().map(|store| &mut store.path),
        spec.oss.as_mut().map(|store| &mut store.path),
        spec.pvc.as_mut().map(|store| &mut store.path),
        spec.local.as_mut().map(|store| &mut store.path),
    ];
    for path in paths.into_iter().chain(copies).flatten() {
        path.push_str("-manual-");
        path.push_str(suffix);
    }
    spec
}

/// Returns `Done` if the backup is complete, `Failed` if it failed or its spec was rejected, and `Waiting` in all other
/// cases.
pub(super) fn look(backup: &EtcdBackup) -> Look {
    let status = backup.status.clone().unwrap_or_default();
    let complete = find(backup.conditions(), &ConditionType::Complete);
    let reason = complete.map_or("Pending", |one| one.reason.as_str());
    let message = complete.map(|one| one.message.clone()).unwrap_or_default();
    if status.succeeded {
        let size = status.size.and_then(|size| u64::try_from(size).ok());
        return Look::Done(format!(
            "complete and verified: revision {}, {}, {}",
            status.etcd_revision.unwrap_or_default(),
            bytes(size.unwrap_or_default()),
            status.location.unwrap_or_default()
        ));
    }
    let is_rejected = ["InvalidSpec", "NotSupported"].contains(&reason);
    if status.completion_time.is_some() || is_rejected {
        return Look::Failed(format!("{reason}: {message}"));
    }
    let copied = status.progress.map(|progress| {
        let copied = bytes(u64::try_from(progress.bytes).unwrap_or_default());
        let total = progress
            .total_bytes
            .and_then(|total| u64::try_from(total).ok());
        total.map_or_else(
            || copied.clone(),
            |total| format!("{copied} of {}", bytes(total)),
        )
    });
    Look::Waiting(copied.map_or_else(
        || format!("{reason}: {message}"),
        |it| format!("{reason}: {it}"),
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::cli::{Cli, Command};

    fn args(line: &str) -> BackupArgs {
        let words = ["kubectl-etcd", "backup", "main"].into_iter();
        let words = words.chain(line.split(' ').filter(|word| !word.is_empty()));
        match Cli::parse_from(words).command {
            Command::Backup(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn series(name: &str, cluster: &str, success: Option<&str>) -> EtcdBackup {
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": name },
            "spec": { "etcdCluster": { "name": cluster }, "storageType": "S3", "deletionPolicy": "Delete",
                "s3": { "path": "bucket/etcd/main", "awsSecret": "aws", "endpoint": "https://minio" },
                "copyTo": [{ "name": "second", "storageType": "GCS", "gcs": { "path": "other/main" },
                             "maxBackups": 3 }],
                "backupPolicy": { "schedule": "@hourly", "maxBackups": 24, "timeoutInSecond": 600 } },
            "status": { "lastSuccessDate": success }
        }))
        .unwrap()
    }

    #[test]
    fn manual_backup_has_own_path_and_no_schedule() {
        let existing = [
            series("other", "other", Some("2026-11-26T03:00:00Z")),
            series("old", "main", None),
            series("main", "main", Some("2026-11-26T02:00:00Z")),
        ];
        let backup = new_backup(&args(""), &existing, "20261126-190503").unwrap();
        assert_eq!(backup.name_any(), "main-manual-20261126-190503");
        let s3 = backup.spec.s3.as_ref().unwrap();
        assert_eq!(s3.path, "bucket/etcd/main-manual-20261126-190503");
        assert_eq!(s3.aws_secret.as_deref(), Some("aws"));
        let copy = &backup.spec.copy_to[0];
        let path = &copy.gcs.as_ref().unwrap().path;
        assert_eq!(path, "other/main-manual-20261126-190503");
        assert_eq!(copy.max_backups, None);
        assert!(!backup.spec.is_periodic());
        assert_eq!(
            backup.spec.backup_policy.unwrap().timeout_in_second,
            Some(600)
        );
        assert_eq!(backup.spec.deletion_policy, Some(DeletionPolicy::Retain));
        let name = |from| template("main", &existing, from).unwrap().name_any();
        assert_eq!(
            (name(None), name(Some("old"))),
            ("main".into(), "old".into())
        );
    }

    #[test]
    fn backup_store_is_built_from_options() {
        let s3 =
            args("--s3 bucket/key --aws-secret aws --endpoint http://minio:9000 --zstd --name now");
        let backup = new_backup(&s3, &[], "x").unwrap();
        assert_eq!(backup.name_any(), "now");
        assert_eq!(api::backup::validate(&backup).len(), 0);
        assert!(backup.spec.s3.unwrap().force_path_style);
        let pvc = new_backup(&args("--pvc claim/etcd/main"), &[], "x").unwrap();
        assert_eq!(pvc.spec.pvc.unwrap().path, "etcd/main");
        assert!(new_backup(&args("--pvc claim"), &[], "x").is_err());
    }

    #[test]
    fn manual_backup_encryption_comes_from_template_or_options() {
        let mut template = series("main", "main", None);
        let keys = |key: Option<&str>| {
            let secret = "keys".to_owned();
            let key = key.map(str::to_owned);
            Some(Encryption { secret, key })
        };
        template.spec.encryption = keys(Some("2026"));
        let existing = [template];
        let encryption = |line: &str| {
            let backup = new_backup(&args(line), &existing, "x").unwrap();
            backup.spec.encryption
        };
        assert_eq!(encryption(""), keys(Some("2026")));
        assert_eq!(encryption("--encryption-secret keys"), keys(None));
        let other = "--s3 bucket/key --encryption-secret keys --encryption-key 2027";
        assert_eq!(encryption(other), keys(Some("2027")));
        assert_eq!(encryption("--s3 bucket/key"), None);
    }

    #[test]
    fn backup_without_known_store_is_refused_with_remedy() {
        let error = new_backup(&args(""), &[], "x").unwrap_err();
        assert!(error.remedy().unwrap().contains("--s3"));
        let error = new_backup(&args("--from nothing"), &[], "x").unwrap_err();
        assert!(error.to_string().contains("etcdbackup/nothing"));
    }

    #[test]
    fn wait_for_backup_ends_after_success_or_failure() {
        let with = |status: serde_json::Value| {
            let mut backup = series("a", "main", None);
            backup.status = Some(serde_json::from_value(status).unwrap());
            look(&backup)
        };
        let complete = |reason: &str| {
            json!([{ "type": "Complete", "status": "False", "reason": reason, "message": "M",
            "lastTransitionTime": "2026-11-26T00:00:00Z" }])
        };
        let done = with(
            json!({ "succeeded": true, "etcdRevision": 7, "size": 2048, "location": "s3://b/k" }),
        );
        assert_eq!(
            done,
            Look::Done("complete and verified: revision 7, 2.0 KiB, s3://b/k".into())
        );
        let running = json!({ "conditions": complete("InProgress"), "progress": { "bytes": 1024, "totalBytes": 4096 } });
        assert_eq!(
            with(running),
            Look::Waiting("InProgress: 1.0 KiB of 4.0 KiB".into())
        );
        let failed = json!({ "conditions": complete("AccessDenied"), "completionTime": "2026-11-26T00:00:00Z" });
        assert_eq!(with(failed), Look::Failed("AccessDenied: M".into()));
        assert!(matches!(
            with(json!({ "conditions": complete("InvalidSpec") })),
            Look::Failed(_)
        ));
    }
}
