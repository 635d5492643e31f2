//! The fields of a recorded spec that are not accepted from a store (invariant 27). Performs no I/O.
//!
//! A restore can create a cluster from the spec in the manifest of the backup. Everyone who can write to the store can
//! change this spec. The operator therefore accepts no field that runs other programs, reaches a node, or gives the
//! pods volumes, identities or privileges. A user can set these fields in `spec.etcdCluster.template`.

use api::cluster::{EtcdClusterSpec, PodPolicy, flag_of_env};
use api::names::VOLUME_DATA;
use api::version::DEFAULT_REPOSITORY;
use k8s_openapi::api::core::v1::{
    EnvVar, PodSecurityContext, SeccompProfile, SecurityContext, Volume, VolumeMount,
};

/// Prefix of the annotations that select the AppArmor profile of a container.
const APPARMOR: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Flags of etcd that read or write files, or send data to an address, without the prefix `experimental-`. Flags that
/// end with `-file` are refused too.
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
        pod,
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
    let image = (repository != DEFAULT_REPOSITORY).then_some("spec.repository");
    let pod = pod.as_ref().map(refused_in_pod).unwrap_or_default();
    image.into_iter().chain(pod).collect()
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

/// True if the variable has a literal value, and sets a flag of etcd without files, or tunes the runtime of Go. Other
/// variables may be harmful, such as a proxy for the connections of etcd.
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

/// True if the mount is the data volume or a volume in the recorded spec. Other volumes of the pod contain the
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

/// True if the context grants no privileges and no capabilities.
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
mod tests {
    use api::EtcdRestore;
    use api::manifest::BackupManifest;
    use api::names::VOLUME_TOOLS;
    use api::storage::StorageBlock;
    use api::version::EtcdVersion;
    use serde_json::{Value, json};

    use super::*;
    use crate::plan::target::spec_to_restore;
    use crate::reason::Reason;

    fn pod(field: &str, value: &Value) -> Value {
        json!({ "pod": { field: value } })
    }

    /// Specs with one dangerous field each, and the name of this field.
    fn dangerous() -> Vec<(Value, &'static str)> {
        let rows = containers_and_volumes()
            .into_iter()
            .chain(security_contexts())
            .chain(arguments_and_variables());
        let in_pod = rows.map(|(field, value)| {
            let name: &'static str = format!("spec.pod.{field}").leak();
            (pod(field, &value), name)
        });
        let image = json!({ "repository": "registry.example/etcd" });
        in_pod.chain([(image, "spec.repository")]).collect()
    }

    fn containers_and_volumes() -> Vec<(&'static str, Value)> {
        let container = json!([{ "name": "more", "image": "registry.example/tool:1" }]);
        let volume = |kind: &str, content: Value| json!([{ "name": "more", kind: content }]);
        let token = json!({ "sources": [{ "serviceAccountToken": { "path": "token" } }] });
        vec![
            ("sidecars", container.clone()),
            ("initContainers", container),
            ("volumes", volume("hostPath", json!({ "path": "/" }))),
            ("volumes", volume("secret", json!({ "secretName": "s" }))),
            ("volumes", volume("projected", token)),
            (
                "volumes",
                volume("persistentVolumeClaim", json!({ "claimName": "c" })),
            ),
            ("volumes", volume("csi", json!({ "driver": "d" }))),
            (
                "volumeMounts",
                json!([{ "name": "restore-encryption", "mountPath": "/keys" }]),
            ),
            (
                "volumes",
                volume("nfs", json!({ "server": "s", "path": "/" })),
            ),
            ("serviceAccountName", json!("admin")),
        ]
    }

    fn security_contexts() -> Vec<(&'static str, Value)> {
        vec![
            ("securityContext", json!({ "runAsUser": 0 })),
            ("securityContext", json!({ "runAsNonRoot": false })),
            // If the security context names no user, the image determines the user, which may be root.
            ("securityContext", json!({ "fsGroup": 2000 })),
            (
                "securityContext",
                json!({ "runAsUser": 9000, "sysctls": [{ "name": "kernel.shm_rmid_forced", "value": "0" }] }),
            ),
            (
                "securityContext",
                json!({ "runAsUser": 9000, "seccompProfile": { "type": "Unconfined" } }),
            ),
            (
                "securityContext",
                json!({ "runAsUser": 9000, "windowsOptions": { "hostProcess": true } }),
            ),
            ("containerSecurityContext", json!({ "privileged": true })),
            (
                "containerSecurityContext",
                json!({ "allowPrivilegeEscalation": true }),
            ),
            (
                "containerSecurityContext",
                json!({ "capabilities": { "add": ["SYS_ADMIN"] } }),
            ),
            ("containerSecurityContext", json!({ "runAsUser": 0 })),
            (
                "containerSecurityContext",
                json!({ "procMount": "Unmasked" }),
            ),
            (
                "containerSecurityContext",
                json!({ "appArmorProfile": { "type": "Unconfined" } }),
            ),
        ]
    }

    fn arguments_and_variables() -> Vec<(&'static str, Value)> {
        let env = |name: &str, value: Value| {
            let mut variable = json!({ "name": name });
            let key = if value.is_string() {
                "value"
            } else {
                "valueFrom"
            };
            variable[key] = value;
            json!([variable])
        };
        vec![
            (
                "annotations",
                json!({ "container.apparmor.security.beta.kubernetes.io/etcd": "unconfined" }),
            ),
            (
                "extraArgs",
                json!([
                    "--auth-token=jwt,pub-key=/keys/a.pem,priv-key=/keys/b.pem,sign-method=RS256"
                ]),
            ),
            ("extraArgs", json!(["--client-crl-file=/etc/crl"])),
            ("extraArgs", json!(["--log-outputs=/host/file"])),
            (
                "extraArgs",
                json!(["--experimental-distributed-tracing-address=example.com:4317"]),
            ),
            (
                "etcdEnv",
                env("ETCD_PEER_CLIENT_CERT_FILE", json!("/etc/shadow")),
            ),
            ("etcdEnv", env("ETCD_AUTH_TOKEN", json!("jwt,pub-key=a"))),
            (
                "etcdEnv",
                env(
                    "GOGC",
                    json!({ "secretKeyRef": { "name": "s", "key": "k" } }),
                ),
            ),
            (
                "etcdEnv",
                env("HTTPS_PROXY", json!("http://proxy.example:3128")),
            ),
            ("etcdEnv", env("LD_PRELOAD", json!("/data/library.so"))),
        ]
    }

    fn harmless() -> Value {
        json!({
            "size": 5, "version": "3.6.16", "repository": "quay.io/coreos/etcd", "memberAddress": "Pod",
            "TLS": { "generated": {} }, "auth": { "secret": "root" }, "services": { "client": { "type": "NodePort" } },
            "etcd": { "quotaBackendBytes": 1_073_741_824_i64 },
            "backup": { "storageType": "S3", "s3": { "path": "b/k", "awsSecret": "aws" },
                        "backupPolicy": { "backupIntervalInSecond": 600 } },
            "pod": {
                "labels": { "team": "a" },
                "annotations": { "prometheus.io/scrape": "true" },
                "nodeSelector": { "disk": "fast" },
                "antiAffinity": true,
                "tolerations": [{ "key": "etcd", "operator": "Exists" }],
                "resources": { "requests": { "cpu": "1" } },
                "etcdEnv": [{ "name": "ETCD_LOG_LEVEL", "value": "debug" }, { "name": "GOMEMLIMIT", "value": "1GiB" }],
                "extraArgs": ["--log-level=debug", "--pre-vote=true"],
                "persistentVolumeClaimSpec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "fast",
                    "resources": { "requests": { "storage": "1Gi" } },
                },
                "securityContext": { "runAsUser": 9000, "runAsNonRoot": true, "fsGroup": 9000,
                                     "seccompProfile": { "type": "RuntimeDefault" } },
                "containerSecurityContext": { "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] },
                                              "privileged": false },
                "imagePullSecrets": [{ "name": "registry" }],
                "priorityClassName": "high",
                "terminationGracePeriodSeconds": 60,
                "volumes": [{ "name": "scratch", "emptyDir": {} }, { "name": "more", "configMap": { "name": "c" } }],
                "volumeMounts": [{ "name": "scratch", "mountPath": "/scratch" }],
                "ClusterDomain": ".cluster.local",
            },
        })
    }

    fn spec(value: &Value) -> EtcdClusterSpec {
        serde_json::from_value(value.clone()).unwrap()
    }

    fn manifest(recorded: &Value) -> BackupManifest {
        serde_json::from_value(json!({
            "formatVersion": 1, "etcdVersion": "3.5.0", "clusterID": "ab", "revision": 7, "size": 1, "sha256": "",
            "compression": "none", "createdAt": "2026-01-01T00:00:00Z",
            "cluster": { "name": "old", "namespace": "prod", "spec": recorded },
        }))
        .unwrap()
    }

    fn restore(template: Option<&Value>) -> EtcdRestore {
        let template = template.map(|spec| json!({ "spec": spec }));
        let target = json!({ "name": "main", "template": template });
        let spec = json!({ "etcdCluster": target, "backup": { "name": "b" } });
        EtcdRestore::new("again", serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn invariant_27_each_dangerous_part_of_recorded_spec_is_refused() {
        for (recorded, field) in dangerous() {
            assert_eq!(refused_fields(&spec(&recorded)), [field], "{recorded}");
            let refused = spec_to_restore(&restore(None), None, Some(&manifest(&recorded)));
            let trouble = refused.unwrap_err();
            assert_eq!(trouble.reason, Reason::RecordedSpecRefused, "{recorded}");
            for part in [field, "spec.etcdCluster.template"] {
                assert!(trouble.message.contains(part), "{}", trouble.message);
            }
        }
    }

    #[test]
    fn invariant_27_harmless_recorded_spec_is_accepted() {
        for recorded in [json!({}), harmless()] {
            assert_eq!(refused_fields(&spec(&recorded)), Vec::<&str>::new());
            let accepted = spec_to_restore(&restore(None), None, Some(&manifest(&recorded)));
            assert_eq!(accepted, Ok(spec(&recorded)));
        }
        // The recorded spec contains no security context of the pod, so the default of the operator applies.
        let container = pod(
            "containerSecurityContext",
            &json!({ "readOnlyRootFilesystem": true }),
        );
        assert_eq!(refused_fields(&spec(&container)), Vec::<&str>::new());
    }

    /// The pod of a seed has volumes with the credentials of the store and the keys of the backup.
    #[test]
    fn invariant_27_recorded_spec_mounts_only_its_own_volumes() {
        let block = json!({ "s3": { "path": "b/k", "awsSecret": "aws", "caSecret": "ca" } });
        let block: StorageBlock = serde_json::from_value(block).unwrap();
        let version = EtcdVersion::parse("3.6.16").unwrap();
        let source = member::Source::store(&block, &version, None).encrypted("keys");
        assert_eq!(source.volumes.len(), 3);
        let names = source.volumes.into_iter().map(|volume| volume.name);
        let mounting = |name: &str, volumes: Value| {
            let mounts = json!([{ "name": name, "mountPath": "/more" }]);
            let recorded = json!({ "pod": { "volumeMounts": mounts, "volumes": volumes } });
            refused_fields(&spec(&recorded))
        };
        for name in names.chain([VOLUME_TOOLS.to_owned()]) {
            assert_eq!(
                mounting(&name, json!([])),
                ["spec.pod.volumeMounts"],
                "{name}"
            );
        }
        let own = json!([{ "name": "more", "emptyDir": {} }]);
        for (name, volumes) in [("more", own), (VOLUME_DATA, json!([]))] {
            assert_eq!(mounting(name, volumes), Vec::<&str>::new());
        }
    }

    /// A user has written the template and the spec of the existing cluster, so all fields are accepted.
    #[test]
    fn invariant_27_template_and_spec_of_existing_cluster_are_accepted() {
        for (recorded, _) in dangerous() {
            let manifest = manifest(&recorded);
            let repeated = restore(Some(&recorded));
            let created = spec_to_restore(&repeated, None, Some(&manifest));
            let validated = api::restore::validate(&repeated);
            assert_eq!(validated, [], "{recorded}");
            assert_eq!(created, Ok(spec(&recorded)));
            let existing = spec(&recorded);
            let in_place = spec_to_restore(&restore(None), Some(&existing), Some(&manifest));
            assert_eq!(in_place, Ok(existing));
        }
    }
}
