//! The seed's pod: a member's pod with two containers that run before etcd; and what its status tells.
//!
//! Pure: built from values, read from values.

use api::conditions::Reason;
use api::names::{self, ANNOTATION_RESTORE};
use api::restore::SeedStatus;
use api::storage::S3Source;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, EmptyDirVolumeSource, Pod, PodSpec, SecretVolumeSource, Volume,
    VolumeMount,
};
use runtime::member::{self, Member, Members, Role, Start};

use crate::observed::{PodFacts, Trouble};
use crate::seed::Report;

/// Name of the container that fetches.
pub const FETCH: &str = "fetch";
/// Name of the container that makes the data directory.
pub const RESTORE: &str = "restore";

const TOOLS: &str = "/tools";
const PROGRAM: &str = "/tools/etcd-restore-operator";
const SECRET: &str = "/run/restore/secret";
const CA: &str = "/run/restore/ca";
/// Read-only for the pod's group.
const SECRET_MODE: i32 = 0o440;

/// The image the operator itself runs from; its program fetches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorImage {
    /// The image.
    pub image: String,
    /// When it is pulled.
    pub pull_policy: Option<String>,
}

/// The pod of the seed member.
pub fn build(
    members: &Members<'_>,
    seed: &SeedStatus,
    version: &EtcdVersion,
    restore_uid: &str,
    source: &S3Source,
    operator: &OperatorImage,
) -> Pod {
    let member = Member {
        name: &seed.member,
        version,
        role: Role::Voter,
        // Never `new`: without the restored data etcd must not come up as an empty cluster (invariant 6).
        start: Start::OnDisk,
    };
    let mut pod = member::pod(members, &member);
    pod.metadata
        .labels
        .get_or_insert_default()
        .insert(ANNOTATION_RESTORE.to_owned(), restore_uid.to_owned());
    if let Some(spec) = pod.spec.as_mut() {
        let mut first = vec![
            fetch_container(spec, source, operator),
            restore_container(members, seed, version, spec),
        ];
        first.extend(spec.init_containers.take().unwrap_or_default());
        spec.init_containers = Some(first);
        spec.volumes.get_or_insert_default().extend(volumes(source));
    }
    pod
}

fn fetch_container(pod: &PodSpec, source: &S3Source, operator: &OperatorImage) -> Container {
    let mut args = vec![
        "seed".to_owned(),
        "fetch".to_owned(),
        format!("--copy-to={PROGRAM}"),
        // Names of Secrets and places only (invariant 14).
        format!(
            "--source={}",
            serde_json::to_string(source).unwrap_or_default()
        ),
    ];
    let mut mounts = vec![
        member::data_mount(),
        mount(names::VOLUME_TOOLS, TOOLS, false),
    ];
    if source.aws_secret().is_some() {
        args.push(format!("--secret={SECRET}"));
        mounts.push(mount("restore-secret", SECRET, true));
    }
    if source.ca_secret.is_some() {
        args.push(format!("--ca={CA}"));
        mounts.push(mount("restore-ca", CA, true));
    }
    Container {
        name: FETCH.to_owned(),
        image: Some(operator.image.clone()),
        image_pull_policy: operator.pull_policy.clone(),
        command: Some(vec!["/usr/local/bin/etcd-restore-operator".to_owned()]),
        args: Some(args),
        volume_mounts: Some(mounts),
        ..prepared(pod)
    }
}

fn restore_container(
    members: &Members<'_>,
    seed: &SeedStatus,
    version: &EtcdVersion,
    pod: &PodSpec,
) -> Container {
    let tool = if version.has_etcdutl() {
        "/usr/local/bin/etcdutl"
    } else {
        "/usr/local/bin/etcdctl"
    };
    let etcd = pod.containers.first().cloned().unwrap_or_default();
    Container {
        name: RESTORE.to_owned(),
        // The same image as the server: the same minor version's tool makes its data directory.
        image: etcd.image,
        image_pull_policy: etcd.image_pull_policy,
        command: Some(vec![PROGRAM.to_owned()]),
        args: Some(vec![
            "seed".to_owned(),
            "restore".to_owned(),
            format!("--tool={tool}"),
            format!("--name={}", seed.member),
            format!("--peer-url={}", members.addresses().peer_url(&seed.member)),
            format!("--token={}", seed.token),
        ]),
        volume_mounts: Some(vec![
            member::data_mount(),
            mount(names::VOLUME_TOOLS, TOOLS, true),
        ]),
        ..prepared(pod)
    }
}

/// What both containers take from the etcd container: its limits and its security.
fn prepared(pod: &PodSpec) -> Container {
    let etcd = pod.containers.first().cloned().unwrap_or_default();
    Container {
        resources: etcd.resources,
        security_context: etcd.security_context,
        termination_message_policy: Some("File".to_owned()),
        ..Container::default()
    }
}

fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

fn volumes(source: &S3Source) -> Vec<Volume> {
    let mut volumes = vec![Volume {
        name: names::VOLUME_TOOLS.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource::default()),
        ..Volume::default()
    }];
    let secrets = [
        ("restore-secret", source.aws_secret()),
        ("restore-ca", source.ca_secret.as_deref()),
    ];
    for (volume, secret) in secrets {
        let Some(secret) = secret else { continue };
        volumes.push(Volume {
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
    volumes
}

/// What the pod reports.
pub fn facts(pod: &Pod) -> PodFacts {
    let status = pod.status.clone().unwrap_or_default();
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
    PodFacts {
        trouble: trouble.or(unscheduled),
        restored: prepare
            .iter()
            .find(|status| status.name == RESTORE)
            .and_then(restored),
    }
}

/// The revision of a data directory that the restore container made, or found made.
fn restored(status: &ContainerStatus) -> Option<i64> {
    let ended = status.state.as_ref()?.terminated.as_ref()?;
    match report(ended.message.as_deref())? {
        Report::Done(contents) if ended.exit_code == 0 => Some(contents.revision),
        _ => None,
    }
}

fn report(message: Option<&str>) -> Option<Report> {
    serde_json::from_str(message?).ok()
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
    Some(match report(ended.message.as_deref()) {
        Some(Report::Failed { reason, message }) => {
            Trouble::new(Reason::from(reason.as_str()), message)
        }
        _ => Trouble::new(
            Reason::SeedFailed,
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
