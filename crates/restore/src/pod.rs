//! The seed's pod: a seed member whose data comes from a backup in a store; and what its status tells.
//!
//! Pure: built from values, read from values.

use api::conditions::Reason;
use api::names::{ANNOTATION_RESTORE, CONTAINER_ETCD, LABEL_APP, LABEL_CLUSTER};
use api::restore::SeedStatus;
use api::storage::{StorageBlock, StorageSource};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{
    ContainerStatus, PersistentVolumeClaimVolumeSource, Pod, PodAffinityTerm, SecretVolumeSource,
    Volume, VolumeMount,
};
use kube::ResourceExt;
use runtime::member::{self, Contents, FETCH, Members, OperatorImage, Report, Seed, Source};

use runtime::progress::Moved;

use crate::choice::SOURCE;
use crate::made_of::SHA256;
use crate::observed::{Life, PodFacts, Trouble};

mod life;
mod storage;

pub use life::{is_young, life};
pub use storage::no_storage;

const SECRET: &str = "/run/restore/secret";
const CA: &str = "/run/restore/ca";
const CLAIM: &str = "/run/restore/claim";
const CLAIM_VOLUME: &str = "restore-claim";
/// Read-only for the pod's group.
const SECRET_MODE: i32 = 0o440;

/// What the pod of a seed is made from, beside its cluster.
pub struct From<'a> {
    /// The member and the new cluster's token.
    pub seed: &'a SeedStatus,
    /// The version of etcd.
    pub version: &'a EtcdVersion,
    /// UID of the EtcdRestore.
    pub restore: &'a str,
    /// Where the backup lies.
    pub source: &'a StorageBlock,
    /// SHA-256 of the snapshot, where it is known.
    pub sha256: Option<&'a str>,
    /// By how much the revision is raised.
    pub bump_revision: Option<u64>,
    /// It is made beside a cluster that serves.
    pub apart: bool,
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
    if from.apart {
        // Invariant 17: no Service of the cluster, ours or a user's, finds it beside the members that serve.
        labels.remove(LABEL_APP);
        labels.remove(LABEL_CLUSTER);
        find_place(&mut pod);
    }
    pod
}

/// The members that are replaced leave their nodes only when the seed serves: it does not insist on a node without
/// them. Those that come later keep away from it.
fn find_place(pod: &mut Pod) {
    let terms = pod
        .spec
        .as_mut()
        .and_then(|spec| spec.affinity.as_mut())
        .and_then(|affinity| affinity.pod_anti_affinity.as_mut())
        .and_then(|apart| {
            apart
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

/// The container that fetches sees the Secrets, and no other container does (invariant 14).
fn from_store(from: &From<'_>) -> Source {
    let (block, version) = (from.source, from.version);
    let sha256 = from.sha256.map(|sha256| format!("{SHA256}{sha256}"));
    let mut from = Source {
        // Names of Secrets and places only (invariant 14).
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
                // The member must be able to start again long after the Secret was deleted.
                optional: Some(true),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        });
    }
    from
}

/// What the pod reports, but for its [`life`], which a clock is needed for, and what it is [made of](crate::made_of).
pub fn facts(pod: &Pod) -> PodFacts {
    let status = pod.status.clone().unwrap_or_default();
    let ended = life::ended(pod);
    let prepare = status.init_container_statuses.unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let trouble = prepare
        .iter()
        .chain(&containers)
        .find_map(container_trouble);
    let unscheduled = status
        .conditions
        .unwrap_or_default()
        .into_iter()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    let unscheduled = unscheduled.map(|condition| {
        let why = condition.message.unwrap_or_default();
        Trouble::new(
            Reason::PodNotStarting,
            format!("the seed's pod finds no node: {why}"),
        )
    });
    let teller = prepare.iter().find(|status| status.name == FETCH);
    let told = teller.and_then(reported);
    let serves = containers
        .iter()
        .any(|status| status.name == CONTAINER_ETCD && status.ready);
    PodFacts {
        life: Life::default(),
        young: false,
        silent: told.is_none() && teller.is_some_and(ended_well),
        another: None,
        vouched: false,
        joined: pod.labels().contains_key(LABEL_CLUSTER),
        trouble: ended.or(trouble).or(unscheduled),
        fetching: prepare.iter().any(|status| {
            status.name == FETCH
                && status
                    .state
                    .as_ref()
                    .is_some_and(|state| state.running.is_some())
        }),
        moved: fetched(&prepare),
        restored: told.as_ref().map(|contents| contents.revision),
        verified: told.is_some() && serves,
        hash: told.as_ref().and_then(|contents| contents.hash),
        of: told.as_ref().and_then(|contents| contents.of.clone()),
        sha256: told.map(|contents| contents.sha256),
    }
}

/// All of it, once it was fetched.
fn fetched(prepare: &[ContainerStatus]) -> Option<Moved> {
    let fetch = prepare.iter().find(|status| status.name == FETCH)?;
    let bytes = reported(fetch)?.size;
    Some(Moved {
        bytes,
        total: Some(bytes),
    })
}

/// What a container said when it ended well.
fn reported(status: &ContainerStatus) -> Option<Contents> {
    let ended = status.state.as_ref()?.terminated.as_ref()?;
    match Report::read(ended.message.as_deref()?)? {
        Report::Done(contents) if ended.exit_code == 0 => Some(contents),
        _ => None,
    }
}

/// It is not started again, and so says nothing more.
fn ended_well(status: &ContainerStatus) -> bool {
    let ended = status.state.as_ref();
    let ended = ended.and_then(|state| state.terminated.as_ref());
    ended.is_some_and(|ended| ended.exit_code == 0)
}

/// Whether etcd's own container runs: before that nobody answers.
pub fn etcd_runs(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    containers.into_iter().flatten().any(|status| {
        let state = status.state.as_ref();
        status.name == CONTAINER_ETCD && state.is_some_and(|state| state.running.is_some())
    })
}

/// What keeps a container from starting or made it end; `None` while it runs or is through.
fn container_trouble(status: &ContainerStatus) -> Option<Trouble> {
    let state = status.state.clone().unwrap_or_default();
    if let Some(waiting) = &state.waiting {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        let message = waiting.message.as_deref().unwrap_or_default();
        if matches!(
            reason,
            "ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull"
        ) {
            let text = format!(
                "the image {} of the seed's pod cannot be had: {message}",
                status.image
            );
            return Some(Trouble::new(Reason::ImageNotFound, text));
        }
        if matches!(
            reason,
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError"
        ) {
            let text = format!(
                "container {} of the seed's pod cannot start: {message}",
                status.name
            );
            return Some(Trouble::new(Reason::PodNotStarting, text));
        }
    }
    let ended = match (
        state.terminated,
        status.last_state.clone().and_then(|last| last.terminated),
    ) {
        (Some(ended), _) => ended,
        // Between two attempts.
        (None, Some(last)) if state.running.is_none() => last,
        _ => return None,
    };
    if ended.exit_code == 0 {
        return None;
    }
    Some(match ended.message.as_deref().and_then(Report::read) {
        Some(Report::Failed { reason, message }) => {
            Trouble::new(Reason::from(reason.as_str()), message)
        }
        // It was ended from outside, or could not start: the kubelet tries again.
        _ => Trouble::new(
            Reason::PodNotStarting,
            format!(
                "container {} of the seed's pod ended with {} ({}): see its log",
                status.name,
                ended.exit_code,
                ended.reason.unwrap_or_default()
            ),
        ),
    })
}

#[cfg(test)]
mod tests;
