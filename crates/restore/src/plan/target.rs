//! Determines the spec of the restored cluster, and checks its etcd version. Performs no I/O.

use api::cluster::{self, EtcdClusterSpec};
use api::manifest::BackupManifest;
use api::problem;
use api::version::EtcdVersion;
use api::{EtcdCluster, EtcdRestore};

use super::recorded_spec::refused_fields;
use crate::reason::{Reason, Trouble};

/// The first minor release whose etcdutl supports `--bump-revision`.
const FIRST_BUMP_VERSION: (u64, u64) = (3, 6);

/// The spec of the `existing` cluster, or else the spec of the cluster to create.
pub(crate) fn spec_to_restore(
    restore: &EtcdRestore,
    existing: Option<&EtcdClusterSpec>,
    manifest: Option<&BackupManifest>,
) -> Result<EtcdClusterSpec, Trouble> {
    match existing {
        Some(existing) => check_version(restore, existing, manifest).map(|()| existing.clone()),
        None => cluster_to_create(restore, manifest),
    }
}

/// The spec of the cluster to create: the template, or else the spec in the manifest of the backup.
pub(crate) fn cluster_to_create(
    restore: &EtcdRestore,
    manifest: Option<&BackupManifest>,
) -> Result<EtcdClusterSpec, Trouble> {
    let target = &restore.spec.etcd_cluster;
    let recorded = manifest.and_then(|manifest| manifest.cluster.as_ref());
    let spec = match (&target.template, recorded) {
        (Some(template), _) => template.spec.clone(),
        (None, Some(recorded)) => accepted(&recorded.spec)?,
        (None, None) => {
            let message = "spec.etcdCluster.template is missing, and the backup has no manifest with the spec of its \
                           cluster: set the spec of the cluster to create";
            return Err(Trouble::new(Reason::InvalidSpec, message));
        }
    };
    let cluster = EtcdCluster::new(&target.name, spec);
    let problems = cluster::validate(&cluster);
    if !problems.is_empty() {
        // A user cannot correct an invalid spec in a manifest, but can set a template instead.
        let remedy = match target.template {
            Some(_) => "",
            None => "; or set spec.etcdCluster.template",
        };
        let message = format!(
            "the spec of the cluster to create is invalid: {}{remedy}",
            problem::summary(&problems)
        );
        return Err(Trouble::new(Reason::InvalidSpec, message));
    }
    let dangerous = cluster::unsafe_to_ignore(&cluster.spec);
    if !dangerous.is_empty() {
        let message = format!(
            "the spec of the cluster to create is not supported: {}; or set spec.etcdCluster.template",
            problem::summary(&dangerous)
        );
        return Err(Trouble::new(Reason::NotSupported, message));
    }
    check_version(restore, &cluster.spec, manifest)?;
    Ok(cluster.spec)
}

/// The recorded spec. Fails if it sets a field that is not accepted from a store (invariant 27).
fn accepted(recorded: &EtcdClusterSpec) -> Result<EtcdClusterSpec, Trouble> {
    let refused = refused_fields(recorded);
    if refused.is_empty() {
        return Ok(recorded.clone());
    }
    let message = format!(
        "spec.etcdCluster.template is missing, and the backup's manifest sets {}: the operator does not accept such \
         settings from a store, because they can run other programs, or reach the node or Secrets. Write the spec of \
         the cluster in spec.etcdCluster.template, and repeat these settings there if you trust them",
        refused.join(", ")
    );
    Err(Trouble::new(Reason::RecordedSpecRefused, message))
}

/// Fails if the cluster has an older minor release of etcd than the backup, because the older etcd cannot read the
/// database of the backup. Also fails if the etcdutl of the cluster does not support `--bump-revision`.
pub(crate) fn check_version(
    restore: &EtcdRestore,
    spec: &EtcdClusterSpec,
    manifest: Option<&BackupManifest>,
) -> Result<(), Trouble> {
    let Ok(version) = EtcdVersion::parse(&spec.version) else {
        return Ok(());
    };
    let bumps = restore.spec.bump_revision.is_some_and(|by| by > 0);
    if bumps && version.minor() < FIRST_BUMP_VERSION {
        let message = format!(
            "spec.bumpRevision: the cluster runs etcd {version}, but etcdutl supports --bump-revision and \
             --mark-compacted only from 3.6. Restore into a cluster with etcd 3.6 or later. Or restore without spec.bumpRevision and \
             spec.markCompacted, and restart every client that caches keys"
        );
        return Err(Trouble::new(Reason::NotSupported, message));
    }
    let backup = manifest.and_then(|manifest| EtcdVersion::parse(&manifest.etcd_version).ok());
    match backup {
        Some(backup) if version.minor() < backup.minor() => {
            let message = format!(
                "the backup is from etcd {backup}, but the cluster's version is {version}: set the minor version of \
                 the backup or a later one in the EtcdCluster's spec.version, or in \
                 spec.etcdCluster.template.spec.version"
            );
            Err(Trouble::new(Reason::InvalidSpec, message))
        }
        _ => Ok(()),
    }
}
