//! Builds the objects of the proxies. Performs no I/O.

use std::collections::BTreeMap;

use api::EtcdCluster;
use api::cluster::{NetworkAccess, PodPolicy};
use api::names::{self, CLIENT_PORT, METRICS_PORT};
use k8s_openapi::api::apps::v1::{
    Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment,
};
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, HTTPGetAction, HostAlias, KeyToPath, Lifecycle, LifecycleHandler,
    PodSpec, PodTemplateSpec, Probe, SecretVolumeSource, Service, ServicePort, ServiceSpec,
    SleepAction, TCPSocketAction, TopologySpreadConstraint, Volume, VolumeMount,
};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicySpec};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{Resource, ResourceExt};
use member::{container_security, ingress_rule, pod_security};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::certificates::{AUTHORITIES, CERTIFICATE, KEY, SecretNames};
use crate::flags::{CLIENT_TLS, SERVER_TLS, arguments, host};
use crate::plan::Run;

const PROGRAM: &str = "/usr/local/bin/etcd";
const CONTAINER: &str = "grpc-proxy";
/// File mode of mounted Secrets. The group of the pod, to which etcd belongs, can read the files.
const MODE: i32 = 0o440;
/// File mode if the security context in the spec has no `fsGroup`. All users can read the files.
const MODE_WITHOUT_GROUP: i32 = 0o444;
/// Time in seconds between the removal of a proxy from the endpoints and its end. A proxy ends at once when it gets
/// SIGTERM, but nodes need some time to learn that it is no longer an endpoint.
const DRAIN_SECONDS: i64 = 5;

/// All objects of the proxies of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Objects {
    pub(crate) deployment: Deployment,
    pub(crate) service: Service,
    pub(crate) budget: Option<PodDisruptionBudget>,
    pub(crate) policy: Option<NetworkPolicy>,
}

impl Objects {
    /// A digest of the objects.
    pub(crate) fn digest(&self) -> String {
        let all = json!([self.deployment, self.service, self.budget, self.policy]);
        hex::encode(Sha256::digest(all.to_string()))
    }
}

/// The Secrets of the proxies, and the digest of their certificates.
pub(crate) type Certificates<'a> = (&'a SecretNames, &'a str);

/// Builds the objects. Without `certificates`, the proxies use no TLS.
pub(crate) fn objects(
    cluster: &EtcdCluster,
    run: &Run<'_>,
    certificates: Option<Certificates<'_>>,
) -> Objects {
    let spec = &cluster.spec;
    let access = spec.network_policy.as_ref().filter(|it| it.enabled);
    Objects {
        deployment: deployment(cluster, run, certificates),
        service: service(cluster, run),
        budget: spec.has_disruption_budget().then(|| budget(cluster)),
        policy: access.map(|access| policy(cluster, access)),
    }
}

fn labels(cluster: &EtcdCluster) -> BTreeMap<String, String> {
    names::grpc_proxy_labels(&cluster.name_any())
}

/// Invariant 17: a proxy answers some reads from its cache. A restore or a recovery changes the token. The Service then
/// selects only new proxies, whose caches have no answers of the earlier etcd cluster.
fn labels_with_token(cluster: &EtcdCluster, run: &Run<'_>) -> BTreeMap<String, String> {
    let token = names::token_label(run.token).to_owned();
    let mut labels = labels(cluster);
    labels.insert(names::LABEL_TOKEN.to_owned(), token);
    labels
}

fn selector(cluster: &EtcdCluster) -> LabelSelector {
    LabelSelector {
        match_labels: Some(labels(cluster)),
        ..LabelSelector::default()
    }
}

fn metadata(cluster: &EtcdCluster, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: cluster.namespace(),
        labels: Some(labels(cluster)),
        owner_references: cluster.controller_owner_ref(&()).map(|owner| vec![owner]),
        ..ObjectMeta::default()
    }
}

fn deployment(
    cluster: &EtcdCluster,
    run: &Run<'_>,
    certificates: Option<Certificates<'_>>,
) -> Deployment {
    let proxy = run.proxy;
    // The operator's labels and annotations replace labels and annotations of the spec with the same key.
    let mut labels = proxy.labels.clone();
    labels.extend(labels_with_token(cluster, run));
    let mut annotations = proxy.annotations.clone();
    let digest = certificates.map(|(_, digest)| digest.to_owned());
    annotations.extend(digest.map(|digest| (names::ANNOTATION_CERTIFICATES.to_owned(), digest)));
    let replicas = if cluster.spec.hibernate {
        0
    } else {
        proxy.replicas()
    };
    Deployment {
        metadata: metadata(cluster, names::grpc_proxy(&cluster.name_any())),
        spec: Some(DeploymentSpec {
            replicas: Some(replicas),
            revision_history_limit: Some(2),
            selector: selector(cluster),
            strategy: Some(DeploymentStrategy {
                type_: Some("RollingUpdate".to_owned()),
                rolling_update: Some(RollingUpdateDeployment {
                    // A proxy ends only after its replacement serves.
                    max_surge: Some(IntOrString::Int(1)),
                    max_unavailable: Some(IntOrString::Int(0)),
                }),
            }),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(labels),
                    annotations: (!annotations.is_empty()).then_some(annotations),
                    ..ObjectMeta::default()
                }),
                spec: Some(pod(cluster, run, certificates.map(|(names, _)| names))),
            },
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

fn pod(cluster: &EtcdCluster, run: &Run<'_>, secrets: Option<&SecretNames>) -> PodSpec {
    let none = PodPolicy::default();
    let policy = cluster.spec.pod.as_ref().unwrap_or(&none);
    let proxy = run.proxy;
    // When it starts, a proxy connects to its own URL, which names the Service, and ends after 5 s without a connection
    // (`newProxyHealthClient` in etcd's `grpc_proxy.go`). The Service has no endpoint before a proxy is ready. In the
    // pod, the host name therefore resolves to the pod itself.
    let host = host(cluster, proxy);
    let local = |ip: &str| HostAlias {
        hostnames: Some(vec![host.clone()]),
        ip: ip.to_owned(),
    };
    let spread = |key: &str| TopologySpreadConstraint {
        max_skew: 1,
        topology_key: key.to_owned(),
        when_unsatisfiable: "ScheduleAnyway".to_owned(),
        label_selector: Some(selector(cluster)),
        ..TopologySpreadConstraint::default()
    };
    let keys = ["kubernetes.io/hostname", "topology.kubernetes.io/zone"];
    let security = policy.security_context.clone();
    let security = security.unwrap_or_else(pod_security);
    let is_grouped = security.fs_group.is_some();
    let pull_secrets = &policy.image_pull_secrets;
    PodSpec {
        containers: vec![container(cluster, policy, run, secrets)],
        volumes: secrets.map(|secrets| volumes(secrets, is_grouped)),
        host_aliases: Some(vec![local("127.0.0.1"), local("::1")]),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        security_context: Some(security),
        image_pull_secrets: (!pull_secrets.is_empty()).then(|| pull_secrets.clone()),
        node_selector: (!proxy.node_selector.is_empty()).then(|| proxy.node_selector.clone()),
        tolerations: (!proxy.tolerations.is_empty()).then(|| proxy.tolerations.clone()),
        priority_class_name: proxy.priority_class_name.clone(),
        topology_spread_constraints: Some(keys.map(spread).into()),
        ..PodSpec::default()
    }
}

fn container(
    cluster: &EtcdCluster,
    policy: &PodPolicy,
    run: &Run<'_>,
    secrets: Option<&SecretNames>,
) -> Container {
    let port = |name: &str, number: u16| ContainerPort {
        name: Some(name.to_owned()),
        container_port: number.into(),
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    };
    let mount = |(name, path): (&str, &str)| VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: Some(true),
        ..VolumeMount::default()
    };
    let mounts = [("client-tls", CLIENT_TLS), ("server-tls", SERVER_TLS)].map(mount);
    let security = policy.container_security_context.clone();
    Container {
        name: CONTAINER.to_owned(),
        image: Some(cluster.spec.image_of(&run.version)),
        image_pull_policy: policy.image_pull_policy.as_ref().map(ToString::to_string),
        command: Some(vec![PROGRAM.to_owned()]),
        args: Some(arguments(cluster, run.proxy, &run.version)),
        ports: Some(vec![
            port("client", CLIENT_PORT),
            port("metrics", METRICS_PORT),
        ]),
        readiness_probe: Some(readiness(cluster)),
        lifecycle: Some(Lifecycle {
            pre_stop: Some(LifecycleHandler {
                sleep: Some(SleepAction {
                    seconds: DRAIN_SECONDS,
                }),
                ..LifecycleHandler::default()
            }),
            ..Lifecycle::default()
        }),
        resources: run.proxy.resources.clone(),
        security_context: Some(security.unwrap_or_else(container_security)),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: secrets.map(|_| mounts.into()),
        ..Container::default()
    }
}

/// The readiness probe. `/health` of a proxy sends a read to a member. With authentication, members reject this read,
/// because the proxy itself has no user. The probe then only checks that the port is open.
fn readiness(cluster: &EtcdCluster) -> Probe {
    let auth = cluster.spec.auth.as_ref();
    let is_open = auth.is_none_or(|auth| auth.enabled == Some(false));
    let health = HTTPGetAction {
        path: Some("/health".to_owned()),
        port: IntOrString::Int(METRICS_PORT.into()),
        ..HTTPGetAction::default()
    };
    let socket = TCPSocketAction {
        port: IntOrString::Int(CLIENT_PORT.into()),
        host: None,
    };
    Probe {
        http_get: is_open.then_some(health),
        tcp_socket: (!is_open).then_some(socket),
        period_seconds: Some(2),
        timeout_seconds: Some(3),
        failure_threshold: Some(3),
        success_threshold: Some(1),
        ..Probe::default()
    }
}

fn volumes(secrets: &SecretNames, is_grouped: bool) -> Vec<Volume> {
    let item = |key: &str| KeyToPath {
        key: key.to_owned(),
        path: key.to_owned(),
        mode: None,
    };
    let volume = |(name, secret): (&str, &String)| Volume {
        name: name.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret.clone()),
            default_mode: Some(if is_grouped { MODE } else { MODE_WITHOUT_GROUP }),
            // Only these keys are mounted, because proxies must not read other keys of the Secret.
            items: Some([CERTIFICATE, KEY, AUTHORITIES].map(item).into()),
            optional: None,
        }),
        ..Volume::default()
    };
    [
        ("client-tls", &secrets.client),
        ("server-tls", &secrets.server),
    ]
    .map(volume)
    .into()
}

fn service(cluster: &EtcdCluster, run: &Run<'_>) -> Service {
    let port = |name: &str, number: u16| ServicePort {
        name: Some(name.to_owned()),
        port: number.into(),
        target_port: Some(IntOrString::Int(number.into())),
        protocol: Some("TCP".to_owned()),
        ..ServicePort::default()
    };
    Service {
        metadata: metadata(cluster, run.proxy.service_name(&cluster.name_any())),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".to_owned()),
            ip_family_policy: Some("PreferDualStack".to_owned()),
            selector: Some(labels_with_token(cluster, run)),
            ports: Some(vec![
                port("client", CLIENT_PORT),
                port("metrics", METRICS_PORT),
            ]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// The PodDisruptionBudget: evictions stop one proxy at a time.
fn budget(cluster: &EtcdCluster) -> PodDisruptionBudget {
    PodDisruptionBudget {
        metadata: metadata(cluster, names::grpc_proxy(&cluster.name_any())),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::Int(1)),
            selector: Some(selector(cluster)),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}

/// The NetworkPolicy: the clients that may connect to the members may also connect to the proxies.
fn policy(cluster: &EtcdCluster, access: &NetworkAccess) -> NetworkPolicy {
    let all = NetworkPolicyPeer {
        pod_selector: Some(LabelSelector::default()),
        ..NetworkPolicyPeer::default()
    };
    let clients = if access.clients.is_empty() {
        vec![all]
    } else {
        access.clients.clone()
    };
    let metrics = (!access.metrics.is_empty()).then(|| access.metrics.clone());
    NetworkPolicy {
        metadata: metadata(cluster, names::grpc_proxy(&cluster.name_any())),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(selector(cluster)),
            ingress: Some(vec![
                ingress_rule(CLIENT_PORT, Some(clients)),
                ingress_rule(METRICS_PORT, metrics),
            ]),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ..NetworkPolicySpec::default()
        }),
    }
}

#[cfg(test)]
mod tests;
