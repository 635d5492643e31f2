//! Tests: the generated CRDs and the generated reference page are up to date.

use std::fs;

use api::crd;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::files::{expect_generated, root};
use crate::reference;

/// The maximum size of all annotations of an object in bytes. `kubectl apply` stores the whole object in an
/// annotation.
const ANNOTATION_LIMIT: usize = 262_144;

fn definitions() -> Vec<(String, Value)> {
    let definitions = crd::all().into_iter();
    definitions
        .map(|definition| {
            (
                definition.name_any(),
                serde_json::to_value(definition).unwrap(),
            )
        })
        .collect()
}

#[test]
fn crd_yaml_is_up_to_date() {
    for (name, mut definition) in definitions() {
        // Helm keeps a CRD with this annotation when the chart is uninstalled, because the deletion of a CRD deletes
        // all its objects.
        definition["metadata"]["annotations"] = json!({ "helm.sh/resource-policy": "keep" });
        // The chart replaces a CRD of another release, or of an operator with `--create-crd`, only if the label
        // `app.kubernetes.io/version` of this CRD is older than the version of the chart.
        definition["metadata"]["labels"] = json!({
            "app.kubernetes.io/name": "etcd-operator",
            "app.kubernetes.io/version": env!("CARGO_PKG_VERSION"),
        });
        let yaml = serde_yaml_ng::to_string(&definition).unwrap();
        let text = format!(
            "# Generated from the crate `api` by `UPDATE=1 cargo test -p api`. Do not edit.\n{yaml}"
        );
        expect_generated(
            &format!("charts/etcd-operator/crds-generated/{name}.yaml"),
            &text,
        );
    }
}

#[test]
fn api_reference_is_up_to_date() {
    let definitions: Vec<Value> = definitions()
        .into_iter()
        .map(|(_, definition)| definition)
        .collect();
    expect_generated("docs/api.md", &reference::page(&definitions));
}

#[test]
fn crds_fit_into_last_applied_annotation_of_kubectl() {
    for (name, definition) in definitions() {
        let size = definition.to_string().len();
        // A quarter stays free for annotations that users add.
        assert!(size < ANNOTATION_LIMIT / 4 * 3, "{name} has {size} bytes");
    }
}

#[test]
fn crds_have_expected_names_and_subresources() {
    let found: Vec<Value> = definitions()
        .into_iter()
        .map(|(_, definition)| definition)
        .collect();
    let names: Vec<&str> = found
        .iter()
        .map(|crd| crd["metadata"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "etcdclusters.etcd.database.coreos.com",
            "etcdbackups.etcd.database.coreos.com",
            "etcdrestores.etcd.database.coreos.com",
            "etcdmirrors.etcd.database.coreos.com",
            "etcdroles.etcd.database.coreos.com",
            "etcdusers.etcd.database.coreos.com"
        ]
    );
    assert_eq!(found[0]["spec"]["names"]["shortNames"], json!(["etcd"]));
    for crd in &found {
        assert_eq!(crd["spec"]["scope"], "Namespaced");
        assert_eq!(crd["spec"]["versions"][0]["name"], "v1beta2");
        assert!(crd["spec"]["versions"][0]["subresources"]["status"].is_object());
    }
    assert_eq!(
        found[0]["spec"]["versions"][0]["subresources"]["scale"],
        json!({
            "specReplicasPath": ".spec.size",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector"
        })
    );
}

#[test]
fn chart_version_matches_workspace() {
    let chart = fs::read_to_string(root().join("charts/etcd-operator/Chart.yaml")).unwrap();
    let chart: Value = serde_yaml_ng::from_str(&chart).unwrap();
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

/// Tools that use kstatus must not consider a new object ready.
#[test]
fn new_object_has_observed_generation_minus_one() {
    for (name, crd) in definitions() {
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let default = &schema["properties"]["status"]["default"];
        assert_eq!(*default, json!({ "observedGeneration": -1 }), "{name}");
    }
}

#[test]
fn crds_merge_conditions_by_type() {
    for (name, crd) in definitions() {
        let status =
            &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"];
        let conditions = &status["properties"]["conditions"];
        assert_eq!(conditions["x-kubernetes-list-type"], "map", "{name}");
        assert_eq!(
            conditions["x-kubernetes-list-map-keys"],
            json!(["type"]),
            "{name}"
        );
    }
}

/// Two operators write `status.TLS`, and no field of an earlier write may remain.
#[test]
fn crd_replaces_status_tls_as_a_whole() {
    let mut all = definitions().into_iter();
    let (_, crd) = all
        .find(|(name, _)| name.starts_with("etcdclusters."))
        .unwrap();
    let status = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"];
    assert_eq!(
        status["properties"]["TLS"]["x-kubernetes-map-type"],
        "atomic"
    );
}
