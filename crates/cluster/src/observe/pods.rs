//! Converts a member's pod to the planner's type. Performs no I/O.

use std::collections::BTreeSet;

use api::cluster::EtcdClusterSpec;
use api::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, Pod as KubePod, PodCondition, Volume,
};
use kube::ResourceExt;
use member::{Notes, Report, difference, is_image_failure, recorded_hash};

use crate::observe::children::annotation;
use crate::observe::{ending, sidecars};
use crate::snapshot::{Changed, Pod, Role, Trouble};

/// Converts a member's pod. `owned`: the pod has the owner and the labels that the EtcdCluster requires.
pub fn pod(pod: &KubePod, spec: &EtcdClusterSpec, owned: bool) -> Pod {
    let etcd = container_status(pod);
    let container = etcd_container(pod);
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default();
    let role = |label: &str| match label {
        names::ROLE_VOTER => Some(Role::Voter),
        names::ROLE_BUSY => {
            let since = annotation(&pod.metadata, names::ANNOTATION_BUSY_SINCE);
            let since = since.and_then(|text| text.parse().ok());
            let since = since.unwrap_or(Timestamp::UNIX_EPOCH);
            Some(Role::Busy { since })
        }
        names::ROLE_LEARNER => Some(Role::Learner),
        _ => None,
    };
    let initial = container.map(initial_members).unwrap_or_default();
    let alone = initial.iter().all(|name| *name == pod.name_any());
    let notes = Notes::of(pod);
    let unready = condition(pod, "Ready").filter(|ready| ready.status == "False");
    Pod {
        uid: pod.uid().unwrap_or_default(),
        owned,
        token: annotation(&pod.metadata, names::ANNOTATION_CLUSTER_TOKEN),
        cluster_id: annotation(&pod.metadata, names::ANNOTATION_CLUSTER_ID)
            .and_then(|id| id.parse().ok()),
        version: notes.version,
        image: notes.image,
        changed: annotation(&pod.metadata, names::ANNOTATION_CHANGED)
            .and_then(|note| Changed::read(&note)),
        flags: container.map(flags).unwrap_or_default(),
        snapshot_count: container.and_then(member::snapshot_count),
        readyz: container.is_some_and(probes_readyz),
        spec_hash: recorded_hash(pod),
        difference: difference(spec, pod),
        initial,
        joins: container.is_some_and(|one| has_word(one, "--initial-cluster-state=existing")),
        durable: is_durable(pod),
        terminating: pod.metadata.deletion_timestamp.is_some(),
        failed: phase == "Failed" || phase == "Succeeded",
        addressed: pod.status.iter().any(|status| status.pod_ip.is_some()),
        running: etcd
            .and_then(|status| status.state.as_ref())
            .is_some_and(|state| state.running.is_some()),
        running_since: etcd.and_then(running_since),
        // The container status alone is not enough: on a lost node it is outdated, and the node controller sets only
        // the pod's condition `Ready` to false.
        ready: etcd.is_some_and(|status| status.ready) && unready.is_none(),
        restarts: etcd.map_or(0, |status| status.restart_count),
        role: pod
            .labels()
            .get(names::LABEL_ROLE)
            .and_then(|label| role(label)),
        trouble: trouble(pod),
        unready_since: unready
            .and_then(since)
            .map(|since| sidecars::unready_since(pod, etcd, since)),
        lost_since: lost_since(pod, phase),
        ending: etcd.and_then(|status| ending::ending(status, alone)),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        created: pod
            .creation_timestamp()
            .map_or(jiff::Timestamp::UNIX_EPOCH, |time| time.0),
    }
}

/// True if the pod shows since when its node has been lost or its container has been failing. The operator compares
/// this time with a clock before it replaces the member.
pub(super) fn tells_a_time(pod: &KubePod) -> bool {
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
    let fails = |etcd: &ContainerStatus| !etcd.ready && etcd.restart_count > 1;
    let lost = lost_since(pod, phase.unwrap_or_default()).is_some();
    lost || container_status(pod).is_some_and(fails)
}

pub(super) fn condition<'a>(pod: &'a KubePod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

fn since(condition: &PodCondition) -> Option<Timestamp> {
    condition.last_transition_time.as_ref().map(|time| time.0)
}

/// The time since which the pod's node, or the only node that reaches its disk, has been lost; `None` if it is not
/// lost. The operator has no permission to read nodes, but the pod shows the loss in one of these ways:
///
/// - `Ready` is false, `ContainersReady` is true, and no readiness gate is the reason. A kubelet always sets both
///   together, so the node lifecycle controller has set `Ready` (`MarkPodsNotReady` in `pkg/controller/util/node`).
/// - The pod still exists after its grace period (`deletionTimestamp`), because no kubelet has confirmed the deletion.
/// - The phase is `Unknown`, which old control planes set.
/// - No node reaches the volume: its only node no longer exists, or is marked as unreachable.
///
/// If a pod was not ready when its node failed, the pod shows the loss only after its eviction: it then still exists
/// after its grace period. The member counts as lost from the end of the grace period.
///
/// The condition `DisruptionTarget` of an eviction (`DeletionByTaintManager` in `pkg/controller/tainteviction`) alone
/// proves no loss, because Kubernetes also sets it if a person taints a live node.
fn lost_since(pod: &KubePod, phase: &str) -> Option<Timestamp> {
    let ready = condition(pod, "Ready");
    let by_node_controller = ready
        .filter(|ready| {
            ready.status == "False" && ready.reason.as_deref() != Some("ReadinessGatesNotReady")
        })
        .filter(|_| condition(pod, "ContainersReady").is_some_and(|all| all.status == "True"))
        .and_then(since);
    let stuck = pod.metadata.deletion_timestamp.as_ref().map(|time| time.0);
    let unknown = (phase == "Unknown")
        .then(|| ready.and_then(since))
        .flatten();
    let out_of_reach = condition(pod, "PodScheduled")
        .filter(|scheduled| scheduled.status == "False")
        .filter(|scheduled| no_node_reaches_the_volume(scheduled.message.as_deref()))
        .and_then(since);
    let known = [by_node_controller, stuck, unknown, out_of_reach];
    known.into_iter().flatten().min()
}

/// True if the scheduler's message says of each node that it cannot reach the volume, or that it is lost. A full node,
/// or a node that a person has cordoned or tainted, does not count as lost, because it may accept the pod later.
fn no_node_reaches_the_volume(message: Option<&str>) -> bool {
    let Some((_, reasons)) = message.and_then(|text| text.split_once("nodes are available: "))
    else {
        return false;
    };
    let reasons = reasons
        .split(". ")
        .next()
        .unwrap_or_default()
        .trim_end_matches('.');
    let lacks = |reason: &str| {
        reason.ends_with("volume node affinity conflict")
            || reason.ends_with("didn't match PersistentVolume's node affinity")
            || reason.ends_with("no available volume zone")
    };
    // `untolerated taint(s)`, without a name, counts as the taint of a lost node, although a person may have set the
    // taint. A control-plane taint counts too, because no member has its volume on a control-plane node.
    let taints = [
        "taint {node.kubernetes.io/",
        "taint {node-role.kubernetes.io/",
        "untolerated taint(s)",
    ];
    let lost = |reason: &str| taints.iter().any(|taint| reason.contains(taint));
    let all: Vec<&str> = reasons.split(", ").collect();
    all.iter().any(|reason| lacks(reason)) && all.iter().all(|reason| lacks(reason) || lost(reason))
}

fn etcd_container(pod: &KubePod) -> Option<&Container> {
    let mut containers = pod.spec.as_ref()?.containers.iter();
    containers.find(|one| one.name == names::CONTAINER_ETCD)
}

/// The arguments of the etcd container.
pub(super) fn arguments(pod: &KubePod) -> impl Iterator<Item = &String> {
    let container = etcd_container(pod).into_iter();
    container.flat_map(|container| container.args.iter().flatten())
}

/// The value of an argument of the etcd container. `flag` must end with `=`.
pub(super) fn argument<'a>(pod: &'a KubePod, flag: &str) -> Option<&'a str> {
    arguments(pod).find_map(|argument| argument.strip_prefix(flag))
}

fn container_status(pod: &KubePod) -> Option<&ContainerStatus> {
    let mut statuses = pod.status.as_ref()?.container_statuses.iter().flatten();
    statuses.find(|status| status.name == names::CONTAINER_ETCD)
}

fn running_since(status: &ContainerStatus) -> Option<jiff::Timestamp> {
    let running = status.state.as_ref()?.running.as_ref()?;
    running.started_at.as_ref().map(|time| time.0)
}

pub(super) fn volumes(pod: &KubePod) -> impl Iterator<Item = &Volume> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| spec.volumes.iter().flatten())
}

fn is_durable(pod: &KubePod) -> bool {
    volumes(pod)
        .any(|volume| volume.name == names::VOLUME_DATA && volume.persistent_volume_claim.is_some())
}

fn has_word(container: &Container, word: &str) -> bool {
    let mut words = container.command.iter().chain(&container.args).flatten();
    words.any(|one| one == word)
}

fn flags(container: &Container) -> BTreeSet<String> {
    let words = container.command.iter().chain(&container.args).flatten();
    let flags = words.filter(|word| word.starts_with("--"));
    let flags = flags.map(|word| word.split('=').next().unwrap_or_default().to_owned());
    let variables = container.env.iter().flatten().map(|one| one.name.clone());
    flags.chain(variables).collect()
}

fn probes_readyz(container: &Container) -> bool {
    let probe = container.readiness_probe.as_ref();
    let get = probe.and_then(|probe| probe.http_get.as_ref());
    get.is_some_and(|get| get.path.as_deref() == Some("/readyz"))
}

fn initial_members(container: &Container) -> BTreeSet<String> {
    let list = member::etcd_option(container, "initial-cluster").unwrap_or_default();
    list.split(',')
        .filter_map(|part| part.split_once('='))
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// Why a pod does not run. The text is the message of the scheduler or the kubelet.
fn trouble(pod: &KubePod) -> Option<Trouble> {
    let status = pod.status.as_ref()?;
    let scheduled = condition(pod, "PodScheduled");
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
    let images = pod.spec.iter().flat_map(|spec| {
        let all = spec.init_containers.iter().flatten();
        all.chain(&spec.containers)
    });
    let images: Vec<&Container> = images.collect();
    containers.find_map(|status| {
        let container = images.iter().find(|one| one.name == status.name);
        container_trouble(status, container.and_then(|one| one.image.as_deref()))
    })
}

/// True if the kubelet's message is about another image than `image`. After an image change, the status contains the
/// error of the previous image until the kubelet has tried the new image.
fn is_of_another_image(message: &str, image: &str) -> bool {
    let named = message.split("image \"").skip(1);
    let mut named = named.filter_map(|rest| rest.split_once('"').map(|(name, _)| name));
    named.next().is_some_and(|name| name != image)
}

/// The kubelet's message without the back-off and the ports of the connection. These parts differ in each attempt, and
/// would change the condition of the EtcdCluster each time.
fn stable(message: &str) -> String {
    let (_, cause) = message
        .rsplit_once("ErrImagePull: ")
        .unwrap_or(("", message));
    let words: Vec<&str> = cause
        .split(' ')
        .filter(|word| !word.contains("->"))
        .collect();
    words.join(" ")
}

fn container_trouble(container: &ContainerStatus, image: Option<&str>) -> Option<Trouble> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().unwrap_or_default();
    let message = waiting.message.as_deref().unwrap_or_default();
    if is_image_failure(reason) && image.is_some_and(|image| is_of_another_image(message, image)) {
        return None;
    }
    let message = stable(message);
    let text = if message.is_empty() {
        reason.to_owned()
    } else {
        format!("{reason}: {message}")
    };
    match reason {
        // For an image that cannot be pulled, the kubelet alternates between these two reasons. The operator reports
        // one problem for both, so that the condition does not change with each retry.
        "ErrImagePull" | "ImagePullBackOff" if !message.is_empty() => Some(Trouble::Image(message)),
        _ if is_image_failure(reason) => Some(Trouble::Image(text)),
        "" | "ContainerCreating" | "PodInitializing" => None,
        _ => {
            let last = last_words(container).unwrap_or_default();
            Some(Trouble::Failing(format!(
                "container {}: {text}{last}",
                container.name
            )))
        }
    }
}

fn last_words(container: &ContainerStatus) -> Option<String> {
    let ended = container.last_state.as_ref()?.terminated.as_ref()?;
    // A container of a seed pod writes its termination message as JSON (`Report`).
    let said = ended
        .message
        .as_deref()
        .map(|message| match Report::read(message) {
            Some(Report::Failed { message, .. }) => message,
            _ => ending::sentence(message),
        });
    let said = said.filter(|text| !text.is_empty());
    let said = said.map(|text| format!(": {text}")).unwrap_or_default();
    let code = ended.exit_code;
    Some(format!(" (ended with exit code {code}{said})"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn seen(metadata: &Value, status: &Value) -> Pod {
        let mut object = json!({ "metadata": { "name": "db-aaaaaaaaaa" }, "status": status });
        for (key, value) in metadata.as_object().unwrap() {
            object["metadata"][key] = value.clone();
        }
        let spec = EtcdClusterSpec::default();
        pod(&serde_json::from_value(object).unwrap(), &spec, true)
    }

    fn conditions(ready: &str, reason: Option<&str>, containers_ready: &str) -> Value {
        json!({
            "phase": "Running",
            "containerStatuses": [{ "name": "etcd", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "state": { "running": { "startedAt": "2026-11-21T00:00:00Z" } } }],
            "conditions": [
                { "type": "Ready", "status": ready, "reason": reason, "lastTransitionTime": "2026-11-21T00:10:00Z" },
                { "type": "ContainersReady", "status": containers_ready, "lastTransitionTime": "2026-11-21T00:01:00Z" },
            ],
        })
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn image_pull_error_message_omits_addresses() {
        let waiting = |reason: &str, message: &str| {
            let status = json!({ "phase": "Pending", "containerStatuses": [{ "name": "etcd", "image": "", "imageID": "",
                "ready": false, "restartCount": 0, "state": { "waiting": { "reason": reason, "message": message } } }] });
            seen(&json!({}), &status).trouble
        };
        let first = waiting(
            "ErrImagePull",
            "failed: read udp 10.0.0.2:5969->10.0.0.1:53: i/o timeout",
        );
        assert_eq!(
            first,
            Some(Trouble::Image("failed: read udp i/o timeout".into()))
        );
        let backing_off = "Back-off pulling image \"a\": ErrImagePull: failed: read udp 10.0.0.2:6001->10.0.0.1:53: \
            i/o timeout";
        assert_eq!(waiting("ImagePullBackOff", backing_off), first);
    }

    #[test]
    fn pull_error_of_previous_image_is_ignored() {
        let pulled = |image: &str| {
            let message =
                "Back-off pulling image \"quay.io/coreos/etcd:v3.6.99\": ErrImagePull: not found";
            let status = json!({ "phase": "Pending", "containerStatuses": [{ "name": "etcd", "image": "", "imageID": "",
                "ready": false, "restartCount": 0,
                "state": { "waiting": { "reason": "ImagePullBackOff", "message": message } } }] });
            let object: KubePod = serde_json::from_value(json!({
                "metadata": { "name": "m", "namespace": "prod" },
                "spec": { "containers": [{ "name": "etcd", "image": image }] }, "status": status,
            }))
            .unwrap();
            trouble(&object)
        };
        assert_eq!(
            pulled("quay.io/coreos/etcd:v3.6.99"),
            Some(Trouble::Image("not found".to_owned()))
        );
        assert_eq!(pulled("quay.io/coreos/etcd:v3.5.35"), None);
    }

    #[test]
    fn ready_condition_of_node_controller_shows_lost_node() {
        let none = json!({});
        let lost = seen(&none, &conditions("False", None, "True"));
        assert_eq!(lost.lost_since, Some(at("2026-11-21T00:10:00Z")));
        assert!(
            !lost.ready && lost.running,
            "the pod of a lost node must count as running and not ready, because the kubelet no longer updates its status"
        );
        // The kubelet of a live node writes these conditions. None of them shows a lost node.
        for (ready, reason, containers) in [
            ("True", None, "True"),
            ("False", Some("ContainersNotReady"), "False"),
            ("False", Some("ReadinessGatesNotReady"), "True"),
        ] {
            let pod = seen(&none, &conditions(ready, reason, containers));
            assert_eq!(pod.lost_since, None, "{reason:?}");
            assert_eq!(pod.unready_since.is_some(), ready == "False");
        }
    }

    /// Neither `Ready: False` from the kubelet nor the condition of an eviction proves that a node is lost.
    #[test]
    fn evicted_unready_pod_counts_as_lost_only_after_grace_period() {
        let mut unready = conditions("False", Some("ContainersNotReady"), "False");
        let none = json!({});
        assert_eq!(seen(&none, &unready).lost_since, None);
        let evicted = json!({ "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
            "lastTransitionTime": "2026-11-21T00:15:00Z" });
        unready["conditions"].as_array_mut().unwrap().push(evicted);
        assert_eq!(seen(&none, &unready).lost_since, None);
        let ends = json!({ "deletionTimestamp": "2026-11-21T00:15:30Z", "deletionGracePeriodSeconds": 30 });
        assert_eq!(
            seen(&ends, &unready).lost_since,
            Some(at("2026-11-21T00:15:30Z"))
        );
    }

    #[test]
    fn deleted_pod_counts_as_lost_after_grace_period() {
        // The API server sets `deletionTimestamp` to the end of the grace period, not to the time of the deletion
        // request.
        let ends = json!({ "deletionTimestamp": "2026-11-21T00:20:30Z", "deletionGracePeriodSeconds": 30 });
        let pod = seen(&ends, &conditions("True", None, "True"));
        assert_eq!(
            (pod.terminating, pod.lost_since),
            (true, Some(at("2026-11-21T00:20:30Z")))
        );
        let lost = seen(&ends, &conditions("False", None, "True"));
        assert_eq!(
            lost.lost_since,
            Some(at("2026-11-21T00:10:00Z")),
            "the pod counts as lost since the loss of its node, which was before the deletion"
        );
    }

    #[test]
    fn pending_pod_counts_as_lost_if_no_node_reaches_its_volume() {
        let pending = |message: &str| {
            let status = json!({ "phase": "Pending", "conditions": [{ "type": "PodScheduled", "status": "False",
                "reason": "Unschedulable", "message": message, "lastTransitionTime": "2026-11-21T00:10:00Z" }] });
            seen(&json!({}), &status).lost_since.is_some()
        };
        for lost in [
            "0/2 nodes are available: 2 node(s) had volume node affinity conflict. preemption: 0/2 nodes are available: \
             2 Preemption is not helpful for scheduling.",
            "0/3 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }, 2 node(s) \
             didn't match PersistentVolume's node affinity.",
            "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) had volume node affinity conflict.",
        ] {
            assert!(pending(lost), "{lost}");
        }
        for elsewhere in [
            // These messages do not prove a lost node: a node may be full, or a person may have cordoned or tainted it.
            "0/3 nodes are available: 1 node(s) were unschedulable, 2 node(s) had volume node affinity conflict.",
            "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had volume node affinity conflict.",
            "0/3 nodes are available: 1 node(s) had untolerated taint {maintenance: }, 2 node(s) had volume node affinity \
             conflict.",
            "0/3 nodes are available: 3 Insufficient memory.",
            "0/3 nodes are available: 3 node(s) had untolerated taint(s).",
            "no nodes available to schedule pods",
        ] {
            assert!(!pending(elsewhere), "{elsewhere}");
        }
    }
}
