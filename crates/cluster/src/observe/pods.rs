//! A member's pod, as the planner sees it. Pure.

use std::collections::BTreeSet;

use api::names;
use k8s_openapi::api::core::v1::{Container, ContainerState, ContainerStatus, Pod as KubePod};
use kube::ResourceExt;
use runtime::member::ANNOTATION_SPEC_HASH;

use crate::observe::children::annotation;
use crate::observe::parse_cluster_id;
use crate::observed::{Pod, Role, Trouble};

pub(super) fn pod(pod: &KubePod, owned: bool) -> Pod {
    let etcd = container_status(pod);
    let container = pod
        .spec
        .iter()
        .flat_map(|spec| &spec.containers)
        .find(|one| one.name == names::CONTAINER_ETCD);
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default();
    let role = |label: &str| match label {
        names::ROLE_VOTER => Some(Role::Voter),
        names::ROLE_LEARNER => Some(Role::Learner),
        _ => None,
    };
    Pod {
        uid: pod.uid().unwrap_or_default(),
        owned,
        token: annotation(&pod.metadata, names::ANNOTATION_CLUSTER_TOKEN),
        cluster_id: annotation(&pod.metadata, names::ANNOTATION_CLUSTER_ID)
            .as_deref()
            .and_then(parse_cluster_id),
        version: annotation(&pod.metadata, names::ANNOTATION_VERSION),
        image: container
            .and_then(|one| one.image.clone())
            .unwrap_or_default(),
        spec_hash: annotation(&pod.metadata, ANNOTATION_SPEC_HASH),
        initial: container.map(initial_members).unwrap_or_default(),
        durable: is_durable(pod),
        terminating: pod.metadata.deletion_timestamp.is_some(),
        failed: phase == "Failed" || phase == "Succeeded",
        addressed: pod.status.iter().any(|status| status.pod_ip.is_some()),
        running: etcd
            .and_then(|status| status.state.as_ref())
            .is_some_and(|state| state.running.is_some()),
        running_since: etcd.and_then(running_since),
        ready: etcd.is_some_and(|status| status.ready),
        restarts: etcd.map_or(0, |status| status.restart_count),
        role: pod
            .labels()
            .get(names::LABEL_ROLE)
            .and_then(|label| role(label)),
        trouble: trouble(pod),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        created: pod
            .creation_timestamp()
            .map_or(jiff::Timestamp::UNIX_EPOCH, |time| time.0),
    }
}

fn container_status(pod: &KubePod) -> Option<&ContainerStatus> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses
        .iter()
        .find(|status| status.name == names::CONTAINER_ETCD)
}

fn running_since(status: &ContainerStatus) -> Option<jiff::Timestamp> {
    let running = status.state.as_ref()?.running.as_ref()?;
    running.started_at.as_ref().map(|time| time.0)
}

fn is_durable(pod: &KubePod) -> bool {
    let volumes = pod
        .spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten());
    volumes
        .into_iter()
        .any(|volume| volume.name == names::VOLUME_DATA && volume.persistent_volume_claim.is_some())
}

fn initial_members(container: &Container) -> BTreeSet<String> {
    let mut words = container.command.iter().chain(&container.args).flatten();
    let list = words
        .find_map(|word| word.strip_prefix("--initial-cluster="))
        .unwrap_or_default();
    list.split(',')
        .filter_map(|part| part.split_once('='))
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// Why a pod does not run, in the words of the scheduler or the kubelet.
fn trouble(pod: &KubePod) -> Option<Trouble> {
    let status = pod.status.as_ref()?;
    let scheduled = status
        .conditions
        .iter()
        .flatten()
        .find(|condition| condition.type_ == "PodScheduled");
    if let Some(condition) = scheduled.filter(|condition| condition.status == "False") {
        let why = condition
            .message
            .clone()
            .or(condition.reason.clone())
            .unwrap_or_default();
        return Some(Trouble::Unschedulable(why));
    }
    let mut containers = status
        .init_container_statuses
        .iter()
        .flatten()
        .chain(status.container_statuses.iter().flatten());
    containers.find_map(container_trouble)
}

fn container_trouble(container: &ContainerStatus) -> Option<Trouble> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().unwrap_or_default();
    let message = waiting.message.as_deref().unwrap_or_default();
    let text = if message.is_empty() {
        reason.to_owned()
    } else {
        format!("{reason}: {message}")
    };
    match reason {
        "ErrImagePull"
        | "ImagePullBackOff"
        | "ErrImageNeverPull"
        | "InvalidImageName"
        | "ImageInspectError"
        | "RegistryUnavailable" => Some(Trouble::Image(text)),
        "" | "ContainerCreating" | "PodInitializing" => None,
        _ => {
            let last = container
                .last_state
                .as_ref()
                .map(last_words)
                .unwrap_or_default();
            Some(Trouble::Failing(format!(
                "container {}: {text}{last}",
                container.name
            )))
        }
    }
}

fn last_words(last: &ContainerState) -> String {
    let Some(ended) = &last.terminated else {
        return String::new();
    };
    let said = ended
        .message
        .as_deref()
        .map(|message| format!(": {}", message.trim()))
        .unwrap_or_default();
    format!(" (ended with exit code {}{said})", ended.exit_code)
}
