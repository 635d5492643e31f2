//! The fields of a recorded spec that are not accepted from a store (invariant 27). Performs no I/O.
//!
//! A restore can create a cluster from the spec in the manifest of the backup. Everyone who can write to the store can
//! change this spec. The operator therefore accepts no field that runs other programs, reaches a node, or gives the
//! pods volumes, identities or privileges. A user can set these fields in `spec.etcdCluster.template`.

use api::cluster::{EtcdClusterSpec, GrpcProxy, PodPolicy, flag_of_env};
use api::names::VOLUME_DATA;
use api::version::DEFAULT_REPOSITORY;
use k8s_openapi::api::core::v1::{
    EnvVar, PodSecurityContext, SeccompProfile, SecurityContext, Volume, VolumeMount,
};

/// Prefix of the annotations that select the AppArmor profile of a container.
const APPARMOR: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Flags of etcd that read or write files, or send data to an address. The list omits the prefix `experimental-` of the
/// flags. [`is_file_flag`] also refuses flags that end with `-file`.
const FILE_FLAGS: [&str; 4] = [
    "auth-token",
    "distributed-tracing-address",
    "log-output",
    "log-outputs",
];

/// Environment variables that only tune the runtime of Go.
const GO_RUNTIME: [&str; 3] = ["GOGC", "GOMAXPROCS", "GOMEMLIMIT"];

/// The fields of a recorded spec that the operator refuses. The patterns list every field, so a new field causes a
/// compiler error until it is added here.
pub(crate) fn refused_fields(spec: &EtcdClusterSpec) -> Vec<&'static str> {
    let EtcdClusterSpec {
        repository,
        image,
        pod,
        grpc_proxy,
        size: _,
        version: _,
        paused: _,
        bootstrap: _,
        member_address: _,
        hibernate: _,
        protected: _,
        deletion_policy: _,
        tls: _,
        services: _,
        pod_disruption_budget: _,
        member_replacement: _,
        recovery: _,
        etcd: _,
        upkeep: _,
        auth: _,
        network_policy: _,
        backup: _,
        silenced_advice: _,
    } = spec;
    let repository = (repository != DEFAULT_REPOSITORY).then_some("spec.repository");
    let is_default = |image: &String| is_in_default_repository(image);
    let image = (!image.iter().all(is_default)).then_some("spec.image");
    let pod = pod.as_ref().map(refused_in_pod).unwrap_or_default();
    let proxy = grpc_proxy.as_deref().and_then(refused_in_proxy);
    let fields = repository.into_iter().chain(image).chain(pod);
    fields.chain(proxy).collect()
}

/// True if the image is in the default repository. Its tag or digest then only selects a release of etcd.
fn is_in_default_repository(image: &str) -> bool {
    let rest = image.strip_prefix(DEFAULT_REPOSITORY);
    rest.is_some_and(|rest| rest.starts_with(['@', ':']) && !rest.contains('/'))
}

/// The field of `spec.grpcProxy` that is refused. `None` if all fields are accepted. The Secrets of the proxies are
/// accepted, like those of `spec.TLS`, because the proxies only use the certificates for their connections.
fn refused_in_proxy(proxy: &GrpcProxy) -> Option<&'static str> {
    let GrpcProxy {
        annotations,
        replicas: _,
        namespace_prefix: _,
        service_name: _,
        client_secret: _,
        server_secret: _,
        resources: _,
        labels: _,
        node_selector: _,
        tolerations: _,
        priority_class_name: _,
    } = proxy;
    let refused = annotations.keys().any(|key| key.starts_with(APPARMOR));
    refused.then_some("spec.grpcProxy.annotations")
}

fn refused_in_pod(policy: &PodPolicy) -> Vec<&'static str> {
    let PodPolicy {
        annotations,
        etcd_env,
        extra_args,
        security_context,
        container_security_context,
        service_account_name,
        volumes,
        init_containers,
        sidecars,
        volume_mounts,
        labels: _,
        node_selector: _,
        affinity: _,
        anti_affinity: _,
        topology_spread_constraints: _,
        tolerations: _,
        resources: _,
        persistent_volume_claim_spec: _,
        image_pull_secrets: _,
        image_pull_policy: _,
        priority_class_name: _,
        scheduler_name: _,
        runtime_class_name: _,
        termination_grace_period_seconds: _,
        cluster_domain: _,
        dns_timeout_in_second: _,
        busybox_image: _,
    } = policy;
    let pod_context = security_context.as_ref();
    let container_context = container_security_context.as_ref();
    let as_root = runs_as_root(pod_context, container_context);
    let fields = [
        (
            annotations.keys().any(|key| key.starts_with(APPARMOR)),
            "spec.pod.annotations",
        ),
        (
            !etcd_env.iter().all(is_harmless_variable),
            "spec.pod.etcdEnv",
        ),
        (
            extra_args.iter().any(|argument| is_file_argument(argument)),
            "spec.pod.extraArgs",
        ),
        (
            pod_context.is_some_and(|context| as_root || !is_restricted_pod(context)),
            "spec.pod.securityContext",
        ),
        (
            container_context.is_some_and(|context| as_root || !is_restricted(context)),
            "spec.pod.containerSecurityContext",
        ),
        (
            service_account_name.is_some(),
            "spec.pod.serviceAccountName",
        ),
        (!volumes.iter().all(is_harmless_volume), "spec.pod.volumes"),
        (
            !volume_mounts.iter().all(|mount| is_own(mount, volumes)),
            "spec.pod.volumeMounts",
        ),
        (!init_containers.is_empty(), "spec.pod.initContainers"),
        (!sidecars.is_empty(), "spec.pod.sidecars"),
    ];
    let refused = fields.into_iter().filter(|(refused, _)| *refused);
    refused.map(|(_, field)| field).collect()
}

/// True if the variable has a literal value, and either tunes the Go runtime or sets a flag of etcd that uses no files.
/// Other variables may be harmful, for example a variable that sends the connections of etcd through a proxy.
fn is_harmless_variable(variable: &EnvVar) -> bool {
    let name = variable.name.as_str();
    let harmless = match flag_of_env(name) {
        Some(flag) => !is_file_flag(&flag),
        None => GO_RUNTIME.contains(&name),
    };
    harmless && variable.value_from.is_none()
}

fn is_file_argument(argument: &str) -> bool {
    let flag = argument.trim_start_matches('-').split('=').next();
    flag.is_some_and(is_file_flag)
}

fn is_file_flag(flag: &str) -> bool {
    let flag = flag.strip_prefix("experimental-").unwrap_or(flag);
    flag.ends_with("-file") || FILE_FLAGS.contains(&flag)
}

/// True if the volume contains only data of this pod or of a ConfigMap. Other volumes give access to a node, a Secret,
/// a token or another volume.
fn is_harmless_volume(volume: &Volume) -> bool {
    let harmless = Volume {
        name: volume.name.clone(),
        empty_dir: volume.empty_dir.clone(),
        config_map: volume.config_map.clone(),
        downward_api: volume.downward_api.clone(),
        ..Volume::default()
    };
    *volume == harmless
}

/// True if the mount uses the data volume or a volume in the recorded spec. Other volumes of the pod contain the
/// credentials of the store and the keys of the backup (invariant 14).
fn is_own(mount: &VolumeMount, volumes: &[Volume]) -> bool {
    mount.name == VOLUME_DATA || volumes.iter().any(|volume| volume.name == mount.name)
}

/// True if etcd runs as root. Without a security context of the pod in the spec, the operator's default applies.
fn runs_as_root(pod: Option<&PodSecurityContext>, container: Option<&SecurityContext>) -> bool {
    let default = member::pod_security();
    let pod = pod.unwrap_or(&default);
    let user = container.and_then(|context| context.run_as_user);
    let non_root = container.and_then(|context| context.run_as_non_root);
    match user.or(pod.run_as_user) {
        Some(user) => user == 0,
        None => non_root.or(pod.run_as_non_root) != Some(true),
    }
}

/// True if the context sets only users, groups and the default seccomp profile.
fn is_restricted_pod(context: &PodSecurityContext) -> bool {
    let restricted = PodSecurityContext {
        fs_group: context.fs_group,
        fs_group_change_policy: context.fs_group_change_policy.clone(),
        run_as_group: context.run_as_group,
        run_as_non_root: context.run_as_non_root,
        run_as_user: context.run_as_user,
        seccomp_profile: default_seccomp(context.seccomp_profile.as_ref()),
        supplemental_groups: context.supplemental_groups.clone(),
        supplemental_groups_policy: context.supplemental_groups_policy.clone(),
        ..PodSecurityContext::default()
    };
    *context == restricted
}

/// True if the context only sets users, groups, a read-only root file system or the default seccomp profile, or takes
/// away privileges and capabilities.
fn is_restricted(context: &SecurityContext) -> bool {
    let capabilities = context.capabilities.clone().map(|mut capabilities| {
        capabilities.add = capabilities.add.filter(Vec::is_empty);
        capabilities
    });
    let restricted = SecurityContext {
        allow_privilege_escalation: context
            .allow_privilege_escalation
            .filter(|allowed| !allowed),
        capabilities,
        privileged: context.privileged.filter(|privileged| !privileged),
        read_only_root_filesystem: context.read_only_root_filesystem,
        run_as_group: context.run_as_group,
        run_as_non_root: context.run_as_non_root,
        run_as_user: context.run_as_user,
        seccomp_profile: default_seccomp(context.seccomp_profile.as_ref()),
        ..SecurityContext::default()
    };
    *context == restricted
}

fn default_seccomp(profile: Option<&SeccompProfile>) -> Option<SeccompProfile> {
    profile
        .filter(|profile| profile.type_ == "RuntimeDefault")
        .cloned()
}

#[cfg(test)]
mod tests;
