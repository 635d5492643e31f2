//! Functions for all commands that change objects: they detect GitOps tools, and describe the progress of a change.
//! They perform no I/O.

use api::EtcdCluster;
use api::conditions::{ConditionType, find, is_true};
use api::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::console::Look;
use crate::error::Error;

/// The name of the GitOps tool that manages the object and can revert changes by other clients. `None` if no known tool
/// manages the object.
pub fn gitops_tool(metadata: &ObjectMeta) -> Option<&'static str> {
    let has = |key: &str| {
        let maps = [&metadata.labels, &metadata.annotations];
        maps.into_iter().flatten().any(|map| map.contains_key(key))
    };
    if has("kustomize.toolkit.fluxcd.io/name") || has("helm.toolkit.fluxcd.io/name") {
        return Some("Flux");
    }
    if has("argocd.argoproj.io/tracking-id") || has("argocd.argoproj.io/instance") {
        return Some("Argo CD");
    }
    has("meta.helm.sh/release-name").then_some("Helm")
}

/// A warning if a GitOps tool could revert the change of a field. `None` if no known tool manages the cluster.
pub fn gitops_warning(cluster: &EtcdCluster, field: &str) -> Option<String> {
    let tool = gitops_tool(&cluster.metadata)?;
    Some(format!(
        "warning: {tool} manages this EtcdCluster and can revert {field}: change it in the source of {tool} too"
    ))
}

/// The error if the operator would not apply a change now, because the cluster is paused or a restore is running.
/// `None` if the operator would apply it.
pub fn blocked(cluster: &EtcdCluster) -> Option<Error> {
    let name = cluster.metadata.name.as_deref().unwrap_or_default();
    if cluster.spec.paused {
        return Some(Error::refused(
            format!(
                "cluster {name} is paused (spec.paused), so the operator would not apply this change"
            ),
            format!("run `kubectl etcd resume {name}` first"),
        ));
    }
    let annotations = cluster.metadata.annotations.as_ref();
    let is_locked = annotations.is_some_and(|all| all.contains_key(names::ANNOTATION_RESTORE));
    is_locked.then(|| {
        Error::refused(
            format!("a restore of cluster {name} is running, so the operator would not apply this change"),
            "wait for the EtcdRestore (`kubectl get etcdrestores -o wide`), or delete it",
        )
    })
}

/// Whether the status describes the current spec.
pub fn is_observed(cluster: &EtcdCluster) -> bool {
    let observed = cluster
        .status
        .as_ref()
        .and_then(|status| status.observed_generation);
    observed.is_some() && observed == cluster.metadata.generation
}

/// Describes the state of the cluster and the operator's next step in one line.
pub fn progress(cluster: &EtcdCluster) -> String {
    let Some(status) = &cluster.status else {
        return "no status yet".to_owned();
    };
    let mut text = status.state.clone().unwrap_or_else(|| "Unknown".to_owned());
    for (word, field) in [
        ("next", &status.next_step),
        ("waits for", &status.waiting_for),
    ] {
        if let Some(content) = field {
            text = format!("{text}; {word}: {content}");
        }
    }
    text
}

/// Returns `Done` if the cluster matches its spec and `also` returns true, `Failed` if a user must act, and `Waiting`
/// in all other cases.
pub fn look(cluster: &EtcdCluster, also: impl Fn(&EtcdCluster) -> bool) -> Look {
    let conditions = cluster.conditions();
    if !is_observed(cluster) {
        return Look::Waiting("the operator has not processed the change yet".to_owned());
    }
    if is_true(conditions, &ConditionType::Ready) && also(cluster) {
        return Look::Done(progress(cluster));
    }
    match find(conditions, &ConditionType::Stalled) {
        Some(stalled) if stalled.status == "True" => {
            Look::Failed(format!("{}: {}", stalled.reason, stalled.message))
        }
        _ => Look::Waiting(progress(cluster)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(json: &serde_json::Value) -> EtcdCluster {
        let mut all = serde_json::json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main", "generation": 2 }, "spec": {}
        });
        for (key, value) in json.as_object().unwrap() {
            for (field, value) in value.as_object().unwrap() {
                all[key][field] = value.clone();
            }
        }
        serde_json::from_value(all).unwrap()
    }

    fn condition(kind: &str, status: &str) -> serde_json::Value {
        serde_json::json!({ "type": kind, "status": status, "reason": "R", "message": "M",
            "lastTransitionTime": "2026-11-26T00:00:00Z" })
    }

    #[test]
    fn gitops_tools_are_recognized_by_annotations() {
        let of = |key: &str| {
            let found =
                cluster(&serde_json::json!({ "metadata": { "annotations": { key: "x" } } }));
            gitops_warning(&found, "spec.paused")
        };
        assert!(
            of("argocd.argoproj.io/tracking-id")
                .unwrap()
                .contains("Argo CD")
        );
        assert!(of("meta.helm.sh/release-name").unwrap().contains("Helm"));
        assert_eq!(of("team"), None);
    }

    #[test]
    fn pause_and_restore_block_changes() {
        let error = blocked(&cluster(&serde_json::json!({ "spec": { "paused": true } }))).unwrap();
        assert!(error.remedy().unwrap().contains("kubectl etcd resume main"));
        let locked = serde_json::json!({ "metadata": { "annotations": { names::ANNOTATION_RESTORE: "u" } } });
        assert!(
            blocked(&cluster(&locked))
                .unwrap()
                .to_string()
                .contains("restore")
        );
        assert!(blocked(&cluster(&serde_json::json!({}))).is_none());
    }

    #[test]
    fn wait_ends_if_current_spec_is_ready_or_stalled() {
        let with = |observed: i64, conditions: &[serde_json::Value]| {
            let json = serde_json::json!({ "status": { "observedGeneration": observed, "state": "Scaling",
                "nextStep": "add a member", "conditions": conditions } });
            look(&cluster(&json), |_| true)
        };
        let ready = [condition("Ready", "True")];
        assert!(matches!(with(1, &ready), Look::Waiting(_)));
        assert!(matches!(with(2, &ready), Look::Done(_)));
        let stalled = [condition("Ready", "False"), condition("Stalled", "True")];
        assert_eq!(with(2, &stalled), Look::Failed("R: M".into()));
        let busy = [condition("Ready", "False")];
        assert_eq!(
            with(2, &busy),
            Look::Waiting("Scaling; next: add a member".into())
        );
    }
}
