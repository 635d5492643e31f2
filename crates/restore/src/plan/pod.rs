//! Builds the seed's pod, whose init container fetches the backup from a store. Performs no I/O.

use api::names::{ANNOTATION_RESTORE, LABEL_APP, LABEL_CLUSTER};
use api::restore::SeedStatus;
use api::storage::{StorageBlock, StorageSource};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaimVolumeSource, Pod, PodAffinityTerm, SecretVolumeSource, Volume,
    VolumeMount,
};
use member::{self, Members, OperatorImage, Seed, Source};

use super::choice::{SHA256, SOURCE};

const SECRET: &str = "/run/restore/secret";
const CA: &str = "/run/restore/ca";
const CLAIM: &str = "/run/restore/claim";
const CLAIM_VOLUME: &str = "restore-claim";
/// File mode of mounted Secrets: readable for the user and the group of the pod.
const SECRET_MODE: i32 = 0o440;

/// The properties of a seed's pod that do not follow from its EtcdCluster.
pub struct From<'a> {
    /// The name of the member and the token of the new cluster.
    pub seed: &'a SeedStatus,
    /// The etcd version that the seed runs.
    pub version: &'a EtcdVersion,
    /// The UID of the EtcdRestore.
    pub restore: &'a str,
    /// The storage block of the backup.
    pub source: &'a StorageBlock,
    /// The SHA-256 of the snapshot, if known.
    pub sha256: Option<&'a str>,
    /// The number by which the revision is increased; `None` for no increase.
    pub bump_revision: Option<u64>,
    /// Whether the seed runs next to old members that serve.
    pub in_place: bool,
}

/// The pod of the seed member.
pub fn build(members: &Members<'_>, from: &From<'_>, operator: &OperatorImage) -> Pod {
    let seed = Seed {
        member: &from.seed.member,
        version: from.version,
        source: from_store(from),
        bump_revision: from.bump_revision,
    };
    let mut pod = member::seed_pod(members, seed, operator);
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(ANNOTATION_RESTORE.to_owned(), from.restore.to_owned());
    if from.in_place {
        // Invariant 17: while the old members serve, no Service of the cluster or of a user may select the seed.
        labels.remove(LABEL_APP);
        labels.remove(LABEL_CLUSTER);
        remove_member_anti_affinity(&mut pod);
    }
    pod
}

/// Removes the required anti-affinity to members. Otherwise the seed would need a node without an old member. Members
/// that are added later still avoid the node of the seed.
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

/// The container that fetches the backup. Only this container mounts the Secrets (invariant 14).
fn from_store(from: &From<'_>) -> Source {
    let (block, version) = (from.source, from.version);
    let sha256 = from.sha256.map(|sha256| format!("{SHA256}{sha256}"));
    let mut from = Source {
        // The arguments contain names of Secrets, not their content (invariant 14).
        arguments: vec![
            format!(
                "{SOURCE}{}",
                serde_json::to_string(block).unwrap_or_default()
            ),
            format!("--etcd-version={version}"),
        ],
        ..Source::default()
    };
    from.arguments.extend(sha256);
    let source = block.source();
    if let StorageSource::Pvc(pvc) = &source {
        from.arguments.push(format!("--claim={CLAIM}"));
        from.mounts.push(VolumeMount {
            name: CLAIM_VOLUME.to_owned(),
            mount_path: CLAIM.to_owned(),
            read_only: Some(true),
            ..VolumeMount::default()
        });
        from.volumes.push(Volume {
            name: CLAIM_VOLUME.to_owned(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: pvc.claim_name.clone(),
                ..PersistentVolumeClaimVolumeSource::default()
            }),
            ..Volume::default()
        });
    }
    let named = store::secrets_of(&source);
    let secrets = [
        ("restore-secret", "secret", SECRET, named.credentials),
        ("restore-ca", "ca", CA, named.ca),
    ];
    for (volume, argument, path, secret) in secrets {
        let Some(store::SecretName { name: secret, .. }) = secret else {
            continue;
        };
        from.arguments.push(format!("--{argument}={path}"));
        from.mounts.push(VolumeMount {
            name: volume.to_owned(),
            mount_path: path.to_owned(),
            read_only: Some(true),
            ..VolumeMount::default()
        });
        from.volumes.push(Volume {
            name: volume.to_owned(),
            secret: Some(SecretVolumeSource {
                secret_name: Some(secret.to_owned()),
                default_mode: Some(SECRET_MODE),
                // A pod that is created again must start even if the Secret was deleted meanwhile.
                optional: Some(true),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        });
    }
    from
}

#[cfg(test)]
mod tests;
