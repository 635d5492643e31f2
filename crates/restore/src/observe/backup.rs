//! Finds and checks the backup before the restore creates anything.

use api::backup::{StoredBackup, name};
use api::cluster::EtcdClusterSpec;
use api::restore::{ChosenBackup, RestoreEncryption};
use api::storage::{PvcSource, StorageBlock, StorageSource, StorageType};
use api::{EtcdBackup, EtcdRestore};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use runtime::slots::Place;
use store::encryption::Keys;
use tokio::time::timeout;

use super::bucket::{open, secret};
use super::stored::{newest, newest_by};
use super::{ObserveContext, STORE_TIMEOUT, copies, point, read, search};
use crate::encryption;
use crate::plan::choice;
use crate::plan::target::spec_to_restore;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Missing, Source};
use crate::source;

/// Returns the recorded backup if it is valid, or else the backup in the spec. While the restore holds the lock
/// (`locked`), the record is always valid, because a seed may use this backup.
pub(super) async fn choose(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    locked: bool,
) -> Result<ChosenBackup, Missing> {
    if let Some(chosen) = choice::valid_record(restore, locked) {
        return Ok(chosen.clone());
    }
    named(context, restore, namespace).await
}

/// The backup in the storage block of the EtcdRestore, or the newest backup of the EtcdBackup in `spec.backup`.
async fn named(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    namespace: &str,
) -> Result<ChosenBackup, Missing> {
    let spec = &restore.spec;
    let Some(reference) = &spec.backup else {
        let kind = spec.backup_storage_type.as_ref();
        // Validation rejects an EtcdRestore with neither `spec.backup` nor `spec.backupStorageType`. If this code sees
        // such an EtcdRestore nevertheless, it uses S3.
        let kind = kind.unwrap_or(&StorageType::S3);
        let selected = spec.blocks().select(kind, "spec", "backupStorageType");
        let source = selected
            .map(StorageBlock::from)
            .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))?;
        return match &spec.continuous {
            Some(_) => {
                let keys = spec.encryption.clone();
                point(context, restore, namespace, (source, None), keys).await
            }
            None => Ok(choice::chosen_from(restore, source)),
        };
    };
    let name = &reference.name;
    let backup = read::<EtcdBackup>(context.client, namespace, name)
        .await
        .map_err(|why| Trouble::new(Reason::StepFailed, why))?
        .ok_or_else(|| {
            let message = format!(
                "spec.backup.name: there is no EtcdBackup {name} in {namespace}: correct the name"
            );
            Trouble::new(Reason::BackupMissing, message)
        })?;
    if spec.continuous.is_some() {
        let recorded = point::recorded_by(&backup)?;
        let keys = encryption::of_changes(restore, &backup);
        let found = point(context, restore, namespace, recorded, keys).await;
        return found.map(|chosen| ChosenBackup {
            etcd_backup: Some(name.clone()),
            ..chosen
        });
    }
    let (source, stored) = newest_of(&backup, reference.before.as_ref())?;
    let encryption = encryption::by_name(restore, &backup, &stored)?;
    Ok(choice::chosen_by_name(restore, source, &stored, encryption))
}

/// Finds the point in `spec.continuous.at`. Only a pod can read recorded changes on a PersistentVolumeClaim.
async fn point(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    (directory, complete): (StorageBlock, Option<i64>),
    encryption: Option<RestoreEncryption>,
) -> Result<ChosenBackup, Missing> {
    if let StorageSource::Pvc(pvc) = directory.source() {
        require_pvc(context, namespace, pvc).await?;
        let place = (&directory, complete);
        return Box::pin(search::find(context, restore, pvc, place, encryption)).await;
    }
    let place = (directory, complete);
    let found = point::find(context, restore, namespace, place, encryption);
    Box::pin(found).await.map_err(Missing::from)
}

/// Returns the storage block of the newest complete backup of an EtcdBackup, and its entry in the status. With
/// `before`, ignores backups that were completed later.
pub(super) fn newest_of(
    backup: &EtcdBackup,
    before: Option<&Time>,
) -> Result<(StorageBlock, StoredBackup), Trouble> {
    let name = backup.name_any();
    let selected = backup
        .spec
        .blocks()
        .select(&backup.spec.storage_type, "spec", "storageType");
    let block = selected
        .map(StorageBlock::from)
        .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))?;
    if let Some(problem) = api::restore::unreachable(&backup.spec.storage_type) {
        let message = format!("the EtcdBackup {name}: {problem}");
        return Err(Trouble::new(Reason::NotSupported, message));
    }
    let stored = match before {
        None => newest(backup),
        Some(before) => Some(newest_by(backup, before)?.clone()),
    };
    let none = || {
        let message = format!(
            "the EtcdBackup {name} has no complete backup yet: wait for one, or name another EtcdBackup in \
             spec.backup.name"
        );
        Trouble::new(Reason::BackupMissing, message)
    };
    let stored = stored.ok_or_else(none)?;
    let source = block.source();
    let current = source.path();
    // `path` is `None` if this backup is not at the path (or on the PVC) in the current spec of the EtcdBackup, because
    // the spec has changed since the backup.
    let path = { block.path_in(&stored.location) }
        .filter(|path| *path == current || name::parse(current, path).is_some());
    let Some(path) = path else {
        let message = format!(
            "the newest backup of the EtcdBackup {name} is not at the path in its current spec: wait for its next backup, \
             or set the storage block in the EtcdRestore itself"
        );
        return Err(Trouble::new(Reason::BackupMissing, message));
    };
    let path = path.to_owned();
    Ok((block.at(path), stored))
}

/// Checks the backup, and adds its metadata to `backup`. Returns the spec of the `existing` cluster, or the spec of
/// the cluster to create. If the backup cannot be read in the first store of its EtcdBackup, the first copy that can be
/// read replaces `backup`.
pub(super) async fn check(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    existing: Option<&EtcdClusterSpec>,
    backup: &mut Result<ChosenBackup, Trouble>,
) -> Source {
    let first = check_one(context, restore, namespace, existing, backup);
    let mut trouble = match Box::pin(first).await {
        Ok(spec) => return Source::Ready(Box::new(spec)),
        Err(trouble) => trouble,
    };
    // If the status of the EtcdRestore already records a backup, no copy replaces it, because a seed with the recorded
    // backup may exist.
    if choice::valid_record(restore, false).is_some() {
        return Source::Unavailable(choice::name_missing_backup(restore, trouble));
    }
    // A restore with `spec.continuous` needs recorded changes. The stores of copies contain only backups.
    if restore.spec.continuous.is_some() {
        return Source::Unavailable(trouble);
    }
    let mut problems = String::new();
    for copy in copies::find(context, restore, namespace, &trouble).await {
        let mut chosen = Ok(copy.chosen);
        let checked = check_one(context, restore, namespace, existing, &mut chosen);
        match Box::pin(checked).await {
            Ok(spec) => {
                *backup = chosen;
                return Source::Ready(Box::new(spec));
            }
            Err(problem) => {
                let (name, message) = (&copy.name, &problem.message);
                problems = format!("{problems}; copy {name}: {message}{}", copy.remedy);
            }
        }
    }
    trouble.message.push_str(&problems);
    Source::Unavailable(trouble)
}

/// Checks the backup in one store, and adds the metadata of the backup to `backup`.
async fn check_one(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    existing: Option<&EtcdClusterSpec>,
    backup: &mut Result<ChosenBackup, Trouble>,
) -> Result<EtcdClusterSpec, Trouble> {
    let check = async {
        let backup = backup.as_mut().map_err(|trouble| trouble.clone())?;
        let block = &backup.source;
        let source = block.source();
        let data = secret(context, namespace, encryption::secret_of(backup)).await?;
        let keys = data.as_ref().map(Keys::of);
        encryption::check_recorded_key(backup, keys.as_ref())?;
        if let StorageSource::Pvc(pvc) = &source {
            let spec = check_pvc(context, restore, namespace, existing, pvc).await?;
            return without_auth(backup, spec);
        }
        let opened = open(context, namespace, block).await?;
        let reads = context.reads.acquire(Place {
            namespace: namespace.to_owned(),
            store: backup.location.clone(),
            in_pod: false,
        });
        let _slot = reads.await;
        // The manifest is read first: a store explains a failed GET in the body of its response. The response to a
        // failed HEAD, which `check` sends, has no body.
        let manifest = opened.manifest().await?;
        if manifest.is_none() && backup.copy.is_some() {
            // The backup operator writes the manifest of a copy last, so a copy without a manifest is incomplete.
            let message = format!("there is no complete copy at {}", backup.location);
            return Err(Trouble::new(Reason::BackupMissing, message));
        }
        let stored = opened.check().await?;
        source::fits(manifest.as_ref(), stored)?;
        // A replaced backup is reported before a wrong encryption key, because the replacement may be the cause of the
        // wrong key.
        choice::is_unchanged(backup, manifest.as_ref(), stored)?;
        if let Some(manifest) = &manifest {
            encryption::check(backup, manifest, keys.as_ref())?;
        }
        choice::add_metadata(backup, manifest.as_ref(), stored);
        let spec = spec_to_restore(restore, existing, manifest.as_ref())?;
        without_auth(backup, spec)
    };
    timeout(STORE_TIMEOUT, check).await.unwrap_or_else(|_| {
        let message = format!(
            "the store did not answer within {STORE_TIMEOUT:?}: check the endpoint and the network"
        );
        Err(Trouble::new(Reason::StoreUnreachable, message))
    })
}

/// Fails if recorded changes would be replayed into a cluster with authentication.
fn without_auth(backup: &ChosenBackup, spec: EtcdClusterSpec) -> Result<EtcdClusterSpec, Trouble> {
    if backup.continuous.is_some() && spec.auth.is_some() {
        let message = "spec.continuous: the cluster uses authentication, and the operator cannot replay changes into \
                       such a cluster yet: restore a backup";
        return Err(Trouble::new(Reason::NotSupported, message));
    }
    Ok(spec)
}

/// Checks that the PersistentVolumeClaim exists. Only a pod can read and check the backup on it.
async fn check_pvc(
    context: &ObserveContext<'_>,
    restore: &EtcdRestore,
    namespace: &str,
    existing: Option<&EtcdClusterSpec>,
    pvc: &PvcSource,
) -> Result<EtcdClusterSpec, Trouble> {
    require_pvc(context, namespace, pvc).await?;
    match (existing, &restore.spec.etcd_cluster.template) {
        (Some(_), _) | (None, Some(_)) => spec_to_restore(restore, existing, None),
        (None, None) => {
            let message = "spec.etcdCluster.template: the operator cannot read the manifest of a backup on a \
                           PersistentVolumeClaim: set the spec of the cluster to create";
            Err(Trouble::new(Reason::InvalidSpec, message))
        }
    }
}

/// Fails if the PersistentVolumeClaim does not exist.
async fn require_pvc(
    context: &ObserveContext<'_>,
    namespace: &str,
    pvc: &PvcSource,
) -> Result<(), Trouble> {
    let name = &pvc.claim_name;
    let found = read::<PersistentVolumeClaim>(context.client, namespace, name).await;
    if found
        .map_err(|why| Trouble::new(Reason::StepFailed, format!("spec.pvc.claimName: {why}")))?
        .is_none()
    {
        let message = format!(
            "spec.pvc.claimName: there is no PersistentVolumeClaim {name} in {namespace}: correct the name"
        );
        return Err(Trouble::new(Reason::BackupMissing, message));
    }
    Ok(())
}
