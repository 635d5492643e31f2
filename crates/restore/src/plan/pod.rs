//! Builds the seed's pod, whose init container fetches the backup. Performs no I/O.

use api::names::{ANNOTATION_RESTORE, LABEL_APP, LABEL_CLUSTER};
use api::restore::{ChosenPoint, SeedStatus};
use api::storage::StorageBlock;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{Pod, PodAffinityTerm};
use member::{self, Members, OperatorImage, Replay, Seed, Source};

/// The settings of a seed's pod that are not in its EtcdCluster.
pub struct From<'a> {
    /// The name of the seed member, and the cluster token of the restored cluster.
    pub seed: &'a SeedStatus,
    /// The etcd version of the seed.
    pub version: &'a EtcdVersion,
    /// The UID of the EtcdRestore.
    pub restore: &'a str,
    /// The storage block of the backup.
    pub source: &'a StorageBlock,
    /// The SHA-256 of the snapshot, if known.
    pub sha256: Option<&'a str>,
    /// The Secret with the keys of an encrypted backup. `None` if the backup must not be encrypted.
    pub encryption_secret: Option<&'a str>,
    /// The number by which the restore raises the revision; `None` without `bumpRevision`.
    pub bump_revision: Option<u64>,
    /// The point up to which recorded changes are replayed; `None` if no changes are replayed.
    pub continuous: Option<&'a ChosenPoint>,
    /// True for a restore in place, in which old members serve while the seed starts.
    pub in_place: bool,
}

/// Builds the pod of the seed.
pub fn build(members: &Members<'_>, from: &From<'_>, operator: &OperatorImage) -> Pod {
    let mut source = Source::store(from.source, from.version, from.sha256);
    if let Some(secret) = from.encryption_secret {
        source = source.encrypted(secret);
    }
    if let Some(point) = from.continuous {
        let replay = Replay {
            base: point.base.clone(),
            revision: point.revision,
        };
        source = source.replaying(&point.prefix, replay);
    }
    let seed = Seed {
        member: &from.seed.member,
        version: from.version,
        // Invariant 14: only the container that fetches the backup mounts the Secrets of `source`.
        source,
        bump_revision: from.bump_revision,
    };
    let mut pod = member::seed_pod(members, seed, operator);
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(ANNOTATION_RESTORE.to_owned(), from.restore.to_owned());
    if from.in_place {
        // Invariant 17: while the old members serve, no Service may select the seed.
        labels.remove(LABEL_APP);
        labels.remove(LABEL_CLUSTER);
        remove_member_anti_affinity(&mut pod);
    }
    pod
}

/// Removes the required anti-affinity to members, so that the seed can run on a node with an old member. Members that
/// are added later avoid the node of the seed.
fn remove_member_anti_affinity(pod: &mut Pod) {
    let terms = pod
        .spec
        .as_mut()
        .and_then(|spec| spec.affinity.as_mut())
        .and_then(|affinity| affinity.pod_anti_affinity.as_mut())
        .and_then(|anti_affinity| {
            anti_affinity
                .required_during_scheduling_ignored_during_execution
                .as_mut()
        });
    let from_members = |term: &PodAffinityTerm| {
        let selector = term.label_selector.as_ref();
        let labels = selector.and_then(|selector| selector.match_labels.as_ref());
        labels.is_some_and(|labels| labels.contains_key(LABEL_CLUSTER))
    };
    if let Some(terms) = terms {
        terms.retain(|term| !from_members(term));
    }
}

#[cfg(test)]
mod tests;
