//! The operator's own CRD: created or brought up to date where RBAC allows it, otherwise waited for, saying
//! what is waited for. Nothing else of the cluster's API is touched.
//!
//! A CRD with the schemas of Kubernetes' own types in it takes megabytes as an object; so it is made where it is
//! compared or written, and nowhere kept.

use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use tracing::{info, warn};

use crate::admin::Readiness;
use crate::answer::is_not_found;
use crate::outcome::Chain;
use crate::scope::Scope;

const CHECK_EVERY: Duration = Duration::from_secs(2);
/// The release that wrote the CRD: an older operator does not take fields away from a newer one.
const RELEASE: &str = "etcd.database.coreos.com/release";

/// Returns when objects of this kind can be listed in the operator's scope. With `create` that makes the CRD, it is
/// installed.
pub async fn ready(
    client: &Client,
    kind: &ApiResource,
    create: Option<&(dyn Fn() -> CustomResourceDefinition + Sync)>,
    scope: &Scope,
    tell: &Readiness,
) {
    let mut told = String::new();
    loop {
        let refused = match create {
            Some(crd) => Box::pin(install(client, crd())).await.err(),
            None => None,
        };
        let Some(mut waiting) = missing(client, kind, scope).await else {
            if let Some(refused) = refused {
                warn!(
                    "the CRD is used as it is, because it cannot be written (--create-crd): {refused}"
                );
            }
            return;
        };
        if let Some(refused) = refused {
            waiting = format!("{waiting} (--create-crd: {refused})");
        }
        tell.waiting_for(&waiting);
        if waiting != told {
            warn!("waiting: {waiting}");
            told = waiting;
        }
        tokio::time::sleep(CHECK_EVERY).await;
    }
}

/// What is missing before objects can be listed. Asking for objects needs no right to read CRDs.
async fn missing(client: &Client, kind: &ApiResource, scope: &Scope) -> Option<String> {
    let api: Api<DynamicObject> = match scope {
        Scope::Namespace(namespace) => Api::namespaced_with(client.clone(), namespace, kind),
        Scope::Cluster => Api::all_with(client.clone(), kind),
    };
    let name = format!("{}.{}", kind.plural, kind.group);
    match api.list(&ListParams::default().limit(1)).await {
        Ok(_) => None,
        Err(error) if is_not_found(&error) => Some(format!(
            "the CRD {name} to be installed: install the chart, or apply its CRDs"
        )),
        Err(kube::Error::Api(status)) if status.code == 403 => {
            Some(format!("the right to list {name}: {}", status.message))
        }
        Err(error) => Some(format!("an answer about {name}: {}", Chain(&error))),
    }
}

/// Creates or updates the CRD; the error says why not, for people.
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
    // One that was made with `apiextensions.k8s.io/v1beta1`, as coreos/etcd-operator did, says the opposite; as long as it
    // does the API server refuses a schema with defaults.
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

/// A CRD that somebody else installs (the chart) carries no release of ours and is left to them.
fn should_write(found: &CustomResourceDefinition, wanted: &CustomResourceDefinition) -> bool {
    let Some(release) = found.annotations().get(RELEASE) else {
        // One from before `apiextensions.k8s.io/v1` has no schema that could be served; take it over.
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
    fn a_crd_of_this_or_an_older_release_is_brought_up_to_date() {
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
    fn a_newer_release_and_the_chart_keep_their_crd() {
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
    fn the_old_operators_crd_is_taken_over() {
        assert!(should_write(
            &crd(None, "v1beta2", false),
            &crd(None, "v1", true)
        ));
    }
}
