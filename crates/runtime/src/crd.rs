//! The operator's own CRD. The operator creates or updates the CRD if RBAC allows it. If not, the operator waits for
//! the CRD, and reports a missing or outdated CRD.
//!
//! A CRD with the schemas of Kubernetes types takes megabytes of memory, so the operator builds its CRD only for a
//! comparison or a write, and then drops it.

use std::time::Duration;

use api::problem::Chain;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use tracing::{info, warn};

use crate::admin::Readiness;
use crate::answer::is_not_found;
use crate::scope::Scope;

const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Longest interval of the checks for a kind that the operator does not need. The kind may be missing for the whole life
/// of the process.
const OPTIONAL_INTERVAL: Duration = Duration::from_mins(1);
/// Annotation with the release that wrote the CRD. An operator does not overwrite the CRD of a later release.
const RELEASE: &str = "etcd.database.coreos.com/release";

/// Waits until objects of this kind can be listed. If the scope lists namespaces, one readable namespace is enough,
/// because a deleted namespace must not stop the work in other namespaces (invariant 15). If `create` is given, this
/// function first creates or updates the CRD that `create` builds.
pub async fn ready(
    client: &Client,
    kind: &ApiResource,
    create: Option<&(dyn Fn() -> CustomResourceDefinition + Sync)>,
    scope: &Scope,
    readiness: &Readiness,
) {
    await_kind((client, CHECK_INTERVAL), kind, create, scope, |waiting| {
        readiness.waiting_for(waiting);
    })
    .await;
}

/// Like [`ready`], for a kind that the operator does not need for its other kinds. The operator stays ready while it
/// waits. The pause between two checks doubles up to [`OPTIONAL_INTERVAL`].
pub async fn available(
    client: &Client,
    kind: &ApiResource,
    create: Option<&(dyn Fn() -> CustomResourceDefinition + Sync)>,
    scope: &Scope,
) {
    await_kind((client, OPTIONAL_INTERVAL), kind, create, scope, |_| {}).await;
}

async fn await_kind(
    (client, longest): (&Client, Duration),
    kind: &ApiResource,
    create: Option<&(dyn Fn() -> CustomResourceDefinition + Sync)>,
    scope: &Scope,
    report: impl Fn(&str),
) {
    let (mut logged, mut pause) = (String::new(), CHECK_INTERVAL);
    loop {
        let rejected = match create {
            Some(crd) => Box::pin(install(client, crd())).await.err(),
            None => None,
        };
        let Some(mut waiting) = missing(client, kind, scope).await else {
            if let Some(rejected) = rejected {
                warn!("using the installed CRD, because --create-crd failed: {rejected}");
            }
            return;
        };
        if let Some(rejected) = rejected {
            waiting = format!("{waiting} (--create-crd failed: {rejected})");
        }
        report(&waiting);
        if waiting != logged {
            warn!("waiting for {waiting}");
            logged = waiting;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

/// Why objects cannot be listed yet. `None` if they can be listed. Does not read the CRD, because the operator may lack
/// the permission.
async fn missing(client: &Client, kind: &ApiResource, scope: &Scope) -> Option<String> {
    let one = |name: &String| Api::namespaced_with(client.clone(), name, kind);
    let apis: Vec<Api<DynamicObject>> = match scope.namespaces() {
        Some(names) => names.iter().map(one).collect(),
        None => vec![Api::all_with(client.clone(), kind)],
    };
    let name = format!("{}.{}", kind.plural, kind.group);
    let mut problem = None;
    for api in apis {
        let text = match api.list(&ListParams::default().limit(1)).await {
            Ok(_) => return None,
            Err(error) if is_not_found(&error) => {
                format!("the CRD {name}: install the chart, or apply its CRDs")
            }
            Err(kube::Error::Api(status)) if status.code == 403 => {
                format!("permission to list {name}: {}", status.message)
            }
            Err(error) => format!("the API server to list {name}: {}", Chain(&error)),
        };
        problem.get_or_insert(text);
    }
    problem
}

/// Creates or updates the CRD. The error is shown to users.
async fn install(client: &Client, mut wanted: CustomResourceDefinition) -> Result<(), String> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = wanted.name_any();
    let found = api
        .get_opt(&name)
        .await
        .map_err(|e| Chain(&e).to_string())?;
    if found
        .as_ref()
        .is_some_and(|found| !should_write(found, &wanted))
    {
        return Ok(());
    }
    wanted
        .annotations_mut()
        .insert(RELEASE.to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    // The field is reset, because coreos/etcd-operator set it to `true` in its CRDs. With `true`, the API server
    // rejects a schema with defaults.
    wanted.spec.preserve_unknown_fields = Some(false);
    let params = PatchParams::apply("etcd-operator-crd").force();
    api.patch(&name, &params, &Patch::Apply(&wanted))
        .await
        .map_err(|e| Chain(&e).to_string())?;
    info!(
        crd = name,
        "CRD {}",
        if found.is_some() {
            "updated"
        } else {
            "created"
        }
    );
    Ok(())
}

/// True if the operator overwrites the installed CRD `found` with `wanted`. The operator keeps a CRD without the
/// release annotation, because the chart or a person has installed it.
fn should_write(found: &CustomResourceDefinition, wanted: &CustomResourceDefinition) -> bool {
    let Some(release) = found.annotations().get(RELEASE) else {
        // Exception: the operator overwrites a CRD without subresources, because only coreos/etcd-operator created
        // such CRDs.
        return found.spec.versions.iter().all(|v| v.subresources.is_none());
    };
    let same = serde_json::to_value(&found.spec.versions).ok()
        == serde_json::to_value(&wanted.spec.versions).ok();
    !same && parts(release) <= parts(env!("CARGO_PKG_VERSION"))
}

fn parts(release: &str) -> Vec<u64> {
    release
        .split(['.', '-'])
        .map_while(|part| part.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
        CustomResourceDefinitionVersion, CustomResourceSubresources,
    };

    use super::*;

    fn crd(release: Option<&str>, version: &str, status: bool) -> CustomResourceDefinition {
        let mut crd = CustomResourceDefinition::default();
        crd.spec.versions = vec![CustomResourceDefinitionVersion {
            name: version.into(),
            subresources: status.then(CustomResourceSubresources::default),
            ..CustomResourceDefinitionVersion::default()
        }];
        if let Some(release) = release {
            crd.annotations_mut().insert(RELEASE.into(), release.into());
        }
        crd
    }

    #[test]
    fn operator_updates_crd_of_older_release_only_if_changed() {
        assert!(should_write(
            &crd(Some("0.0.9"), "v1beta2", true),
            &crd(None, "v1", true)
        ));
        assert!(!should_write(
            &crd(Some("0.0.9"), "v1", true),
            &crd(None, "v1", true)
        ));
    }

    #[test]
    fn operator_keeps_crd_of_newer_release_or_chart() {
        assert!(!should_write(
            &crd(Some("99.0.0"), "v1beta2", true),
            &crd(None, "v1", true)
        ));
        assert!(!should_write(
            &crd(None, "v1beta2", true),
            &crd(None, "v1", true)
        ));
    }

    #[test]
    fn operator_updates_crd_of_coreos_operator() {
        assert!(should_write(
            &crd(None, "v1beta2", false),
            &crd(None, "v1", true)
        ));
    }
}
