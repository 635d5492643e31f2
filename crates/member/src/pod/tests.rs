//! Tests of the fields of built pods.

use serde_json::{Value, json};

use crate::fixture::Fixture;
use crate::{ANNOTATION_SPEC_HASH, Role};
use restricted::violations;

mod restricted;

fn built(fixture: &Fixture) -> Value {
    serde_json::to_value(fixture.pod()).unwrap()
}

fn built_with(pod_policy: &Value) -> Value {
    built(&Fixture::with(&json!({ "pod": pod_policy }).to_string()))
}

#[test]
fn default_pod_conforms_to_restricted_profile() {
    for fixture in [Fixture::default(), Fixture::durable()] {
        assert_eq!(violations(&fixture.pod()), Vec::<String>::new());
    }
}

#[test]
fn restricted_profile_check_detects_root_container() {
    let root = Fixture::with(
        r#"{"pod":{"securityContext":{"runAsUser":0},"containerSecurityContext":{}}}"#,
    );
    let found = violations(&root.pod());
    assert!(
        found.contains(&"runAsNonRoot".to_owned())
            && found.contains(&"etcd: capabilities.drop".to_owned())
    );
}

#[test]
fn pod_has_one_etcd_container_with_restart_policy_always() {
    let pod = built(&Fixture::default());
    let spec = &pod["spec"];
    assert_eq!(spec["restartPolicy"], "Always");
    assert_eq!(spec["containers"].as_array().unwrap().len(), 1);
    assert_eq!(spec["initContainers"], Value::Null);
    let etcd = &spec["containers"][0];
    assert_eq!(etcd["image"], "quay.io/coreos/etcd:v3.6.16");
    assert_eq!(etcd["command"], json!(["/usr/local/bin/etcd"]));
    assert_eq!(
        etcd["volumeMounts"],
        json!([{ "name": "etcd-data", "mountPath": "/var/etcd" }])
    );
    assert_eq!(etcd["livenessProbe"], Value::Null);
    assert_eq!(etcd["terminationMessagePolicy"], "FallbackToLogsOnError");
}

/// Invariant 14: a member's pod contains no credentials of the operator.
#[test]
fn pod_has_no_service_account_token_or_service_variables() {
    let pod = built(&Fixture::default());
    assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
    assert_eq!(pod["spec"]["enableServiceLinks"], false);
    assert_eq!(
        pod["spec"]["containers"][0]["env"],
        json!([
            { "name": "ETCD_MAX_LEARNERS", "value": "7" },
            { "name": "ETCD_FEATURE_GATES", "value": "StopGRPCServiceOnDefrag=true" },
        ])
    );
}

#[test]
fn tls_minimum_version_of_user_replaces_default() {
    let minimum = |pod: &str| {
        let tls = r#""TLS":{"generated":{}}"#;
        let fixture = Fixture::with(&format!("{{{tls},\"pod\":{pod}}}"));
        let all = variables_of(&fixture).into_iter();
        let values = all.filter(|(name, _)| name == "ETCD_TLS_MIN_VERSION");
        values.map(|(_, value)| value).collect::<Vec<_>>()
    };
    assert_eq!(minimum("{}"), ["TLS1.2"]);
    let variable = r#"{"etcdEnv":[{"name":"ETCD_TLS_MIN_VERSION","value":"TLS1.3"}]}"#;
    assert_eq!(minimum(variable), ["TLS1.3"]);
    // The variable is left out, because etcd does not start with a variable and a flag of the same name.
    let none: [&str; 0] = [];
    assert_eq!(
        minimum(r#"{"extraArgs":["--tls-min-version=TLS1.3"]}"#),
        none
    );
}

#[test]
fn stop_grpc_on_defrag_is_enabled_unless_user_configures_it() {
    let variables = |version: &str, json: &str| -> Vec<String> {
        let fixture = Fixture::with(json).version(version);
        let pod = built(&fixture);
        let all = pod["spec"]["containers"][0]["env"].as_array().unwrap();
        let names = all.iter().map(|one| one["name"].as_str().unwrap());
        names.map(str::to_owned).collect()
    };
    let gates = "ETCD_FEATURE_GATES";
    let flag = "ETCD_EXPERIMENTAL_STOP_GRPC_SERVICE_ON_DEFRAG";
    let learners = "ETCD_MAX_LEARNERS";
    for (version, expected) in [("3.5.35", flag), ("3.6.16", gates), ("3.7.3", gates)] {
        assert_eq!(variables(version, "{}"), [learners, expected], "{version}");
    }
    // The operator adds no variable if the user sets the gate or the flag: etcd 3.6 does not start with the gate and
    // the flag, and no release starts with a variable and the flag of the same name.
    for spec in [
        r#"{"pod":{"extraArgs":["--feature-gates=StopGRPCServiceOnDefrag=true"]}}"#,
        r#"{"pod":{"extraArgs":["--experimental-stop-grpc-service-on-defrag"]}}"#,
    ] {
        for version in ["3.5.35", "3.6.16"] {
            assert_eq!(variables(version, spec), [learners], "{version} {spec}");
        }
    }
    let own =
        r#"{"pod":{"etcdEnv":[{"name":"ETCD_FEATURE_GATES","value":"InitialCorruptCheck=true"}]}}"#;
    assert_eq!(
        variables("3.6.16", own),
        [learners, gates],
        "a variable is duplicated"
    );
}

fn variables_of(fixture: &Fixture) -> Vec<(String, Value)> {
    let pod = built(fixture);
    let all = pod["spec"]["containers"][0]["env"].as_array().unwrap();
    let pairs = all.iter();
    pairs
        .map(|one| {
            (
                one["name"].as_str().unwrap().to_owned(),
                one["value"].clone(),
            )
        })
        .collect()
}

/// Validation rejects these variables, but older objects may contain them.
#[test]
fn pod_omits_variables_for_flags_that_operator_sets() {
    for version in ["3.4.37", "3.5.35", "3.7.3"] {
        let untouched = variables_of(&Fixture::default().version(version));
        for owned in api::cluster::OWNED_FLAGS {
            let flag = owned.replace('*', "x").to_uppercase().replace('-', "_");
            for name in [format!("ETCD_{flag}"), format!("ETCD_EXPERIMENTAL_{flag}")] {
                let env = json!([
                    { "name": name, "value": "true" },
                    { "name": name, "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } },
                ]);
                let fixture = Fixture::with(&json!({ "pod": { "etcdEnv": env } }).to_string());
                let found = variables_of(&fixture.version(version));
                assert_eq!(found, untouched, "{version} {name}");
            }
        }
    }
}

#[test]
fn pod_keeps_variables_of_sidecars() {
    let env = json!([{ "name": "ETCD_NAME", "value": "x" }]);
    let pod = built_with(&json!({
        "sidecars": [{ "name": "sidecar", "image": "b", "env": env }],
        "initContainers": [{ "name": "before", "image": "a", "env": env }],
    }));
    assert_eq!(pod["spec"]["containers"][1]["env"], env);
    assert_eq!(pod["spec"]["initContainers"][0]["env"], env);
}

/// etcd does not start with both a flag and its variable.
#[test]
fn pod_omits_user_variable_if_its_flag_is_set() {
    let users = |spec: Value| -> Vec<String> {
        let variables = variables_of(&Fixture::with(&spec.to_string()));
        let names = variables.into_iter().map(|(name, _)| name);
        names.skip(2).collect()
    };
    let env = json!([
        { "name": "ETCD_LOG_LEVEL", "value": "debug" },
        { "name": "ETCD_SNAPSHOT_COUNT", "value": "5" },
        { "name": "ETCDCTL_API", "value": "3" },
    ]);
    let all = ["ETCD_LOG_LEVEL", "ETCD_SNAPSHOT_COUNT", "ETCDCTL_API"];
    assert_eq!(users(json!({ "pod": { "etcdEnv": env } })), all);
    let flag = json!({ "pod": { "etcdEnv": env, "extraArgs": ["--log-level=info"] } });
    assert_eq!(users(flag), all[1..]);
    let typed = json!({ "pod": { "etcdEnv": env }, "etcd": { "snapshotCount": 9 } });
    assert_eq!(users(typed), [all[0], all[2]]);
}

#[test]
fn pod_has_labels_of_v1beta2_and_identity_annotations() {
    let pod = built(&Fixture {
        role: Role::Learner,
        ..Fixture::default()
    });
    let labels = json!({
        "app": "etcd",
        "etcd_cluster": "db",
        "etcd_node": "db-aaaaaaaaaa",
        "etcd.database.coreos.com/role": "learner",
        "etcd.database.coreos.com/token": "token",
    });
    assert_eq!(pod["metadata"]["labels"], labels);
    let annotations = &pod["metadata"]["annotations"];
    assert_eq!(annotations["etcd.version"], "3.6.16");
    assert_eq!(
        annotations["etcd.database.coreos.com/cluster-token"],
        "token"
    );
    assert_eq!(annotations["etcd.database.coreos.com/cluster-id"], "abc");
    assert_eq!(
        annotations[ANNOTATION_SPEC_HASH].as_str().unwrap().len(),
        18
    );
    assert_eq!(pod["metadata"]["ownerReferences"][0]["uid"], "cluster-uid");
}

#[test]
fn users_cannot_override_labels_and_annotations_of_operator() {
    let pod = built_with(&json!({
        "labels": { "team": "a", "app": "other", "etcd_cluster": "other" },
        "annotations": { "note": "b", "etcd.version": "9" },
    }));
    let (labels, annotations) = (&pod["metadata"]["labels"], &pod["metadata"]["annotations"]);
    assert_eq!(
        (&labels["team"], &labels["app"], &labels["etcd_cluster"]),
        (&json!("a"), &json!("etcd"), &json!("db"))
    );
    assert_eq!(
        (&annotations["note"], &annotations["etcd.version"]),
        (&json!("b"), &json!("3.6.16"))
    );
}

#[test]
fn pod_with_only_etcd_has_short_grace_period() {
    let grace =
        |policy: &Value| built_with(policy)["spec"]["terminationGracePeriodSeconds"].clone();
    let others = json!([{ "name": "other", "image": "b" }]);
    assert_eq!(grace(&json!({})), 2);
    assert_eq!(grace(&json!({ "terminationGracePeriodSeconds": 30 })), 30);
    for field in ["sidecars", "initContainers"] {
        assert!(grace(&json!({ field: others })).is_null(), "{field}");
    }
}

#[test]
fn pod_has_settings_of_spec_pod() {
    let pod = built_with(&json!({
        "nodeSelector": { "disk": "ssd" },
        "tolerations": [{ "key": "db", "operator": "Exists" }],
        "imagePullSecrets": [{ "name": "registry" }],
        "priorityClassName": "high",
        "serviceAccountName": "members",
        "terminationGracePeriodSeconds": 5,
        "schedulerName": "other",
        "runtimeClassName": "gvisor",
        "securityContext": { "runAsUser": 1000 },
        "topologySpreadConstraints": [{ "maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule" }],
        "volumes": [{ "name": "extra", "emptyDir": {} }],
        "initContainers": [{ "name": "before", "image": "a" }],
        "sidecars": [{ "name": "sidecar", "image": "b" }],
    }));
    let spec = &pod["spec"];
    assert_eq!(spec["nodeSelector"], json!({ "disk": "ssd" }));
    assert_eq!(spec["tolerations"][0]["key"], "db");
    assert_eq!(spec["imagePullSecrets"][0]["name"], "registry");
    assert_eq!(spec["priorityClassName"], "high");
    assert_eq!(spec["serviceAccountName"], "members");
    assert_eq!(spec["terminationGracePeriodSeconds"], 5);
    assert_eq!(spec["schedulerName"], "other");
    assert_eq!(spec["runtimeClassName"], "gvisor");
    assert_eq!(spec["securityContext"], json!({ "runAsUser": 1000 }));
    assert_eq!(
        spec["topologySpreadConstraints"].as_array().unwrap().len(),
        1
    );
    assert_eq!(spec["topologySpreadConstraints"][0]["topologyKey"], "rack");
    assert_eq!(spec["volumes"][1]["name"], "extra");
    assert_eq!(spec["initContainers"][0]["name"], "before");
    assert_eq!(spec["containers"][1]["name"], "sidecar");
}

#[test]
fn etcd_container_has_settings_of_spec_pod() {
    let pod = built_with(&json!({
        "resources": { "limits": { "memory": "1Gi" } },
        "etcdEnv": [{ "name": "GOGC", "value": "50" }],
        "imagePullPolicy": "Never",
        "containerSecurityContext": { "readOnlyRootFilesystem": false },
        "volumeMounts": [{ "name": "extra", "mountPath": "/extra" }],
        "extraArgs": ["--log-level=debug"],
    }));
    let etcd = &pod["spec"]["containers"][0];
    assert_eq!(etcd["resources"]["limits"]["memory"], "1Gi");
    assert_eq!(etcd["env"][2], json!({ "name": "GOGC", "value": "50" }));
    assert_eq!(etcd["imagePullPolicy"], "Never");
    assert_eq!(
        etcd["securityContext"],
        json!({ "readOnlyRootFilesystem": false })
    );
    assert_eq!(etcd["volumeMounts"][1]["mountPath"], "/extra");
    assert!(
        etcd["args"]
            .as_array()
            .unwrap()
            .contains(&json!("--log-level=debug"))
    );
}

#[test]
fn node_anti_affinity_is_preferred_by_default_and_required_on_request() {
    let anti = |pod: &Value| pod["spec"]["affinity"]["podAntiAffinity"].clone();
    let soft = anti(&built(&Fixture::default()));
    let term = &soft["preferredDuringSchedulingIgnoredDuringExecution"][0]["podAffinityTerm"];
    assert_eq!(term["topologyKey"], "kubernetes.io/hostname");
    assert_eq!(term["labelSelector"]["matchLabels"]["etcd_cluster"], "db");
    let strict = anti(&built_with(&json!({ "antiAffinity": true })));
    assert_eq!(
        strict["requiredDuringSchedulingIgnoredDuringExecution"][0]["topologyKey"],
        "kubernetes.io/hostname"
    );
    let given = built_with(&json!({ "antiAffinity": true, "affinity": { "nodeAffinity": {} } }));
    assert_eq!(given["spec"]["affinity"], json!({ "nodeAffinity": {} }));
}

#[test]
fn members_prefer_to_spread_over_zones() {
    let spread = &built(&Fixture::default())["spec"]["topologySpreadConstraints"][0];
    assert_eq!(spread["topologyKey"], "topology.kubernetes.io/zone");
    assert_eq!(spread["whenUnsatisfiable"], "ScheduleAnyway");
}

#[test]
fn data_volume_is_pvc_or_emptydir() {
    let volume = |fixture: &Fixture| built(fixture)["spec"]["volumes"][0].clone();
    assert_eq!(
        volume(&Fixture::default()),
        json!({ "name": "etcd-data", "emptyDir": {} })
    );
    let durable = volume(&Fixture::durable());
    assert_eq!(
        durable,
        json!({ "name": "etcd-data", "persistentVolumeClaim": { "claimName": "db-aaaaaaaaaa" } })
    );
}

#[test]
fn readiness_probe_depends_on_version() {
    for (version, path, port) in [
        ("3.2.13", "/version", 2379),
        ("3.4.28", "/version", 2379),
        ("3.5.10", "/health?exclude=NOSPACE", 2381),
        ("3.4.29", "/readyz", 2381),
        ("3.5.35", "/readyz", 2381),
        ("3.7.3", "/readyz", 2381),
    ] {
        let pod = built(&Fixture::default().version(version));
        let probe = &pod["spec"]["containers"][0]["readinessProbe"];
        assert_eq!(
            probe["httpGet"],
            json!({ "path": path, "port": port }),
            "{version}"
        );
        assert_eq!(probe["periodSeconds"], 1);
    }
}

#[test]
fn pod_has_host_name_in_headless_service() {
    let pod = built(&Fixture::default());
    assert_eq!(
        (&pod["spec"]["hostname"], &pod["spec"]["subdomain"]),
        (&json!("db-aaaaaaaaaa"), &json!("db"))
    );
}

#[test]
fn etcd_image_is_from_repository_of_spec() {
    let pod = built(&Fixture::with(
        r#"{"repository":"registry.local:5000/etcd"}"#,
    ));
    assert_eq!(
        pod["spec"]["containers"][0]["image"],
        "registry.local:5000/etcd:v3.6.16"
    );
}

#[test]
fn etcd_image_and_annotation_have_digest_of_spec() {
    let image = "registry.local/etcd:v3.6.16@sha256:ab";
    let spec = json!({ "version": "3.6.16", "image": image }).to_string();
    let pod = built(&Fixture::with(&spec));
    assert_eq!(pod["spec"]["containers"][0]["image"], image);
    let annotations = &pod["metadata"]["annotations"];
    assert_eq!(annotations["etcd.database.coreos.com/image"], image);
    let other = built(&Fixture::with(&spec).version("3.5.35"));
    let image = &other["spec"]["containers"][0]["image"];
    assert_eq!(image, "quay.io/coreos/etcd:v3.5.35");
}

#[test]
fn pod_tolerates_lost_node_until_replacement() {
    let tolerations = |spec: Value| {
        let pod = built(&Fixture::with(&spec.to_string()));
        let all = pod["spec"]["tolerations"].as_array().cloned();
        all.unwrap_or_default()
    };
    // No toleration is added, because `memberReplacement.after` is not longer than the default toleration of five
    // minutes.
    assert_eq!(tolerations(json!({})).len(), 0);
    assert_eq!(
        tolerations(json!({ "memberReplacement": { "after": "5m" } })).len(),
        0
    );
    let longer = tolerations(json!({ "memberReplacement": { "after": "30m" } }));
    assert_eq!(longer.len(), 2);
    assert!(
        longer
            .iter()
            .all(|one| one["tolerationSeconds"] == 1800 && one["effect"] == "NoExecute")
    );
    // The operator adds no second toleration for a taint that the user's toleration names.
    let own = json!({ "key": "node.kubernetes.io/unreachable", "operator": "Exists" });
    let both = json!({ "memberReplacement": { "after": "30m" }, "pod": { "tolerations": [own] } });
    assert_eq!(tolerations(both).len(), 2);
}
