//! The pod of a member, with one etcd container and one data volume. It conforms to the restricted pod security
//! standard.

pub(crate) mod tls;

use std::collections::BTreeMap;
use std::time::Duration;

use api::cluster::{PodPolicy, flag_of_env, is_flag, refused_variable};
use api::names;
use k8s_openapi::api::core::v1::{
    Affinity, Capabilities, Container, ContainerPort, EmptyDirVolumeSource, EnvVar,
    PersistentVolumeClaimVolumeSource, Pod, PodAffinityTerm, PodAntiAffinity, PodSecurityContext,
    PodSpec, SeccompProfile, SecurityContext, Toleration, TopologySpreadConstraint, Volume,
    VolumeMount, WeightedPodAffinityTerm,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::{
    MAX_LEARNERS, Member, Members, VARIABLE_MAX_LEARNERS, difference, etcd_arguments, probe,
};

/// User ID and group ID of the containers in a member's pod.
pub const USER: i64 = 65532;
const PROGRAM: &str = "/usr/local/bin/etcd";
const HOSTNAME_LABEL: &str = "kubernetes.io/hostname";
/// The time that a pod tolerates a lost node by default (admission plugin `DefaultTolerationSeconds`).
const DEFAULT_TOLERATION: Duration = Duration::from_mins(5);
/// Default time between SIGTERM and SIGKILL in seconds. etcd transfers its leadership in less than a second. Without
/// SIGKILL, a leader that transfers its leadership to an ended member would wait 7 s, or 14 s with connected clients
/// (ADR 37).
const GRACE_PERIOD_SECONDS: i64 = 2;
const TAINT_NOT_READY: &str = "node.kubernetes.io/not-ready";
const TAINT_UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// Builds the pod of a member.
pub fn pod(members: &Members<'_>, member: &Member<'_>) -> Pod {
    let none = PodPolicy::default();
    let policy = members.spec.pod.as_ref().unwrap_or(&none);
    let mut metadata = members.metadata(member.name.to_owned(), labels(members, member, policy));
    metadata.annotations = Some(annotations(members, member, policy));
    Pod {
        metadata,
        spec: Some(spec(members, member, policy)),
        status: None,
    }
}

fn labels(
    members: &Members<'_>,
    member: &Member<'_>,
    policy: &PodPolicy,
) -> BTreeMap<String, String> {
    // The operator's labels replace labels of the user with the same key, because Services and the PodDisruptionBudget
    // select pods by the operator's labels.
    let mut labels = policy.labels.clone();
    labels.extend(names::member_labels(members.cluster, member.name));
    labels.insert(names::LABEL_ROLE.to_owned(), member.role.label().to_owned());
    let token = names::token_label(members.token);
    labels.insert(names::LABEL_TOKEN.to_owned(), token.to_owned());
    labels
}

fn annotations(
    members: &Members<'_>,
    member: &Member<'_>,
    policy: &PodPolicy,
) -> BTreeMap<String, String> {
    let mut annotations = policy.annotations.clone();
    annotations.extend(members.identity_annotations());
    annotations.insert(
        names::ANNOTATION_VERSION.to_owned(),
        member.version.to_string(),
    );
    annotations.insert(
        names::ANNOTATION_IMAGE.to_owned(),
        members.spec.image_of(member.version),
    );
    annotations.extend(difference::record(members.spec));
    annotations
}

fn spec(members: &Members<'_>, member: &Member<'_>, policy: &PodPolicy) -> PodSpec {
    let mut containers = vec![etcd_container(members, member, policy)];
    containers.extend(policy.sidecars.iter().cloned());
    let mut volumes = vec![data_volume(member.name, policy)];
    volumes.extend(tls::volumes(members, member.name, policy));
    volumes.extend(policy.volumes.iter().cloned());
    PodSpec {
        hostname: Some(member.name.to_owned()),
        subdomain: Some(names::headless_service(members.cluster)),
        restart_policy: Some("Always".to_owned()),
        automount_service_account_token: Some(false),
        // Service links would add variables for each Service in the namespace. etcd would read the variables with the
        // prefix ETCD_ as flags.
        enable_service_links: Some(false),
        containers,
        init_containers: (!policy.init_containers.is_empty())
            .then(|| policy.init_containers.clone()),
        volumes: Some(volumes),
        affinity: Some(affinity(members.cluster, policy)),
        topology_spread_constraints: Some(spread(members.cluster, policy)),
        node_selector: (!policy.node_selector.is_empty()).then(|| policy.node_selector.clone()),
        tolerations: tolerations(members, policy),
        security_context: Some(policy.security_context.clone().unwrap_or_else(pod_security)),
        image_pull_secrets: (!policy.image_pull_secrets.is_empty())
            .then(|| policy.image_pull_secrets.clone()),
        priority_class_name: policy.priority_class_name.clone(),
        service_account_name: policy.service_account_name.clone(),
        termination_grace_period_seconds: grace_period_seconds(policy),
        scheduler_name: policy.scheduler_name.clone(),
        runtime_class_name: policy.runtime_class_name.clone(),
        ..PodSpec::default()
    }
}

/// The grace period in the spec. By default, it is [`GRACE_PERIOD_SECONDS`]. For pods with sidecars or init containers
/// of the user, which may need longer to stop, it is `None`, the default of Kubernetes.
fn grace_period_seconds(policy: &PodPolicy) -> Option<i64> {
    let only_etcd = policy.sidecars.is_empty() && policy.init_containers.is_empty();
    let default = only_etcd.then_some(GRACE_PERIOD_SECONDS);
    policy.termination_grace_period_seconds.or(default)
}

fn etcd_container(members: &Members<'_>, member: &Member<'_>, policy: &PodPolicy) -> Container {
    let mut mounts = vec![data_mount()];
    mounts.extend(tls::mounts(members, member.name));
    mounts.extend(policy.volume_mounts.iter().cloned());
    let arguments = etcd_arguments(members, member);
    let variables = environment(members, member, &arguments);
    Container {
        name: names::CONTAINER_ETCD.to_owned(),
        image: Some(members.spec.image_of(member.version)),
        image_pull_policy: policy.image_pull_policy.as_ref().map(ToString::to_string),
        command: Some(vec![PROGRAM.to_owned()]),
        args: Some(arguments),
        env: Some(variables),
        ports: Some(vec![
            port("server", names::PEER_PORT),
            port("client", names::CLIENT_PORT),
            port("metrics", names::METRICS_PORT),
        ]),
        readiness_probe: Some(probe::readiness(members, member.version)),
        // With this policy, the termination message contains the last log lines. The operator, which reads no logs,
        // distinguishes damaged data from an invalid setting by these lines.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        resources: policy.resources.clone(),
        security_context: Some(
            policy
                .container_security_context
                .clone()
                .unwrap_or_else(container_security),
        ),
        volume_mounts: Some(mounts),
        ..Container::default()
    }
}

/// The environment of the etcd container. Settings that some releases lack are variables, because the image of a
/// running pod may change to a release without the setting. etcd only logs an unknown variable, but does not start with
/// an unknown flag.
///
/// A variable of the operator is left out if the user sets the variable or its flag, because etcd does not start with a
/// variable and a flag of the same name (`verifyEnv` in `pkg/flags`).
fn environment(members: &Members<'_>, member: &Member<'_>, arguments: &[String]) -> Vec<EnvVar> {
    let none = PodPolicy::default();
    let policy = members.spec.pod.as_ref().unwrap_or(&none);
    let variable = |(name, value): (&str, String)| EnvVar {
        name: name.to_owned(),
        value: Some(value),
        ..EnvVar::default()
    };
    let users = policy.etcd_env.iter();
    let users = users.filter(|one| is_allowed_variable(&one.name, arguments));
    let by_user =
        |name: &str| users.clone().any(|one| one.name == name) || has_flag_of(name, arguments);
    let learners = (VARIABLE_MAX_LEARNERS, MAX_LEARNERS.to_string());
    let tls = tls::variables(members, member).into_iter();
    let tls = tls.map(|(name, value)| (name, value.to_owned()));
    let tls = tls.filter(|(name, _)| !by_user(name));
    let defragmentation = stop_grpc_on_defragmentation(member, policy);
    let owned = [learners].into_iter().chain(tls).chain(defragmentation);
    owned.map(variable).chain(users.clone().cloned()).collect()
}

/// True if a variable in `spec.pod.etcdEnv` is set in the pod. Two kinds of variables are left out:
/// - Variables of flags that the operator sets. Validation rejects them now, but older objects may contain them. For
///   example, `ETCD_FORCE_NEW_CLUSTER` can destroy a cluster.
/// - Variables whose flag is on the command line, because etcd does not start with a flag and its variable.
fn is_allowed_variable(variable: &str, arguments: &[String]) -> bool {
    refused_variable(variable).is_none() && !has_flag_of(variable, arguments)
}

/// True if the command line contains the flag of this variable.
fn has_flag_of(variable: &str, arguments: &[String]) -> bool {
    let given = |flag: String| arguments.iter().any(|argument| is_flag(argument, &flag));
    flag_of_env(variable).is_some_and(given)
}

/// The variable with which etcd reports `NOT_SERVING` in gRPC health checks during a defragmentation, so that clients
/// use another member. In etcd 3.6 and later, the setting is a feature gate. In etcd 3.5 (since 3.5.14), it is the flag
/// `--experimental-stop-grpc-service-on-defrag`.
///
/// The variable is left out if the user sets the flag or the gate, because etcd does not start with two of these
/// settings (`verifyEnv` in `pkg/flags`).
fn stop_grpc_on_defragmentation(
    member: &Member<'_>,
    policy: &PodPolicy,
) -> Option<(&'static str, String)> {
    let is_setting = |text: &str| {
        let text = text.to_lowercase().replace('_', "-");
        text.contains("feature-gates") || text.contains("stop-grpc-service-on-defrag")
    };
    let by_argument = policy
        .extra_args
        .iter()
        .any(|argument| is_setting(argument));
    if by_argument || policy.etcd_env.iter().any(|one| is_setting(&one.name)) {
        return None;
    }
    Some(if member.version.minor() >= (3, 6) {
        let gate = "StopGRPCServiceOnDefrag=true".to_owned();
        ("ETCD_FEATURE_GATES", gate)
    } else {
        let variable = "ETCD_EXPERIMENTAL_STOP_GRPC_SERVICE_ON_DEFRAG";
        (variable, "true".to_owned())
    })
}

fn port(name: &str, number: u16) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: number.into(),
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

/// The mount of the data volume, which is the same in all containers.
pub fn data_mount() -> VolumeMount {
    VolumeMount {
        name: names::VOLUME_DATA.to_owned(),
        mount_path: names::DATA_MOUNT.to_owned(),
        ..VolumeMount::default()
    }
}

fn data_volume(member: &str, policy: &PodPolicy) -> Volume {
    let claim =
        policy
            .persistent_volume_claim_spec
            .as_ref()
            .map(|_| PersistentVolumeClaimVolumeSource {
                claim_name: member.to_owned(),
                ..PersistentVolumeClaimVolumeSource::default()
            });
    Volume {
        name: names::VOLUME_DATA.to_owned(),
        empty_dir: claim.is_none().then(EmptyDirVolumeSource::default),
        persistent_volume_claim: claim,
        ..Volume::default()
    }
}

/// The default security context of the pod: the restricted profile, with a group that may write to the volume.
pub fn pod_security() -> PodSecurityContext {
    PodSecurityContext {
        run_as_non_root: Some(true),
        run_as_user: Some(USER),
        run_as_group: Some(USER),
        fs_group: Some(USER),
        fs_group_change_policy: Some("OnRootMismatch".to_owned()),
        seccomp_profile: Some(SeccompProfile {
            type_: "RuntimeDefault".to_owned(),
            ..SeccompProfile::default()
        }),
        ..PodSecurityContext::default()
    }
}

/// The default security context of a container.
pub fn container_security() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities {
            drop: Some(vec!["ALL".to_owned()]),
            ..Capabilities::default()
        }),
        read_only_root_filesystem: Some(true),
        ..SecurityContext::default()
    }
}

/// The affinity in the spec. By default, members prefer different nodes. With `antiAffinity: true` of v1beta2, they
/// require different nodes.
fn affinity(cluster: &str, policy: &PodPolicy) -> Affinity {
    if let Some(given) = &policy.affinity {
        return given.clone();
    }
    let other_members = PodAffinityTerm {
        label_selector: Some(own_members(cluster)),
        topology_key: HOSTNAME_LABEL.to_owned(),
        ..PodAffinityTerm::default()
    };
    let anti = if policy.anti_affinity == Some(true) {
        PodAntiAffinity {
            required_during_scheduling_ignored_during_execution: Some(vec![other_members]),
            ..PodAntiAffinity::default()
        }
    } else {
        let preferred = WeightedPodAffinityTerm {
            weight: 100,
            pod_affinity_term: other_members,
        };
        PodAntiAffinity {
            preferred_during_scheduling_ignored_during_execution: Some(vec![preferred]),
            ..PodAntiAffinity::default()
        }
    };
    Affinity {
        pod_anti_affinity: Some(anti),
        ..Affinity::default()
    }
}

fn spread(cluster: &str, policy: &PodPolicy) -> Vec<TopologySpreadConstraint> {
    if !policy.topology_spread_constraints.is_empty() {
        return policy.topology_spread_constraints.clone();
    }
    vec![TopologySpreadConstraint {
        max_skew: 1,
        topology_key: ZONE_LABEL.to_owned(),
        when_unsatisfiable: "ScheduleAnyway".to_owned(),
        label_selector: Some(own_members(cluster)),
        ..TopologySpreadConstraint::default()
    }]
}

/// The tolerations in the spec. If `spec.memberReplacement.after` is longer than five minutes, the pods tolerate a lost
/// node for this time. Without these tolerations, Kubernetes would evict the pods after five minutes, and the data in
/// an `emptyDir` would be lost.
fn tolerations(members: &Members<'_>, policy: &PodPolicy) -> Option<Vec<Toleration>> {
    let mut all = policy.tolerations.clone();
    let after = members.spec.replace_after();
    if after > DEFAULT_TOLERATION {
        for taint in [TAINT_NOT_READY, TAINT_UNREACHABLE] {
            let known = |one: &Toleration| one.key.as_deref().is_none_or(|key| key == taint);
            if !policy.tolerations.iter().any(known) {
                all.push(Toleration {
                    key: Some(taint.to_owned()),
                    operator: Some("Exists".to_owned()),
                    effect: Some("NoExecute".to_owned()),
                    toleration_seconds: i64::try_from(after.as_secs()).ok(),
                    ..Toleration::default()
                });
            }
        }
    }
    (!all.is_empty()).then_some(all)
}

fn own_members(cluster: &str) -> LabelSelector {
    LabelSelector {
        match_labels: Some(names::cluster_labels(cluster)),
        ..LabelSelector::default()
    }
}

/// True if `reason`, from the state `waiting` of a container, means that the kubelet cannot pull its image.
pub fn is_image_failure(reason: &str) -> bool {
    matches!(
        reason,
        "ErrImagePull"
            | "ImagePullBackOff"
            | "ErrImageNeverPull"
            | "InvalidImageName"
            | "ImageInspectError"
            | "RegistryUnavailable"
    )
}

#[cfg(test)]
mod tests;
