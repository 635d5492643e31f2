//! Executes exactly the step that was planned: one write. Nothing is decided here.

use api::cluster::{BootstrapStatus, EtcdClusterStatus};
use api::conditions::Reason;
use api::names::{ANNOTATION_RESTORE, ANNOTATION_SCOPE, MANAGER_RESTORE};
use api::version::EtcdVersion;
use api::{EtcdCluster, EtcdRestore};
use kube::{Api, Client, Resource, ResourceExt};
use runtime::apply;
use runtime::member::{self, Members, OperatorImage};
use runtime::outcome::Failure;

use crate::observe::Seen;
use crate::observed::Trouble;
use crate::plan::Step;
use crate::{naming, pod as seed_pod};

/// Why a step was not made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused or could not be reached.
    #[error("the step was not made")]
    Write(#[from] apply::Error),
    /// Something the step needs is not there.
    #[error("{0}")]
    Missing(String),
}

impl Failure for Error {
    fn reason(&self) -> &'static str {
        match self {
            Self::Write(error) => error.reason(),
            Self::Missing(_) => "Missing",
        }
    }
}

/// With what steps are made.
pub struct Hands<'a> {
    /// Kubernetes.
    pub client: &'a Client,
    /// The image the seed fetches with; why it is not known.
    pub image: Result<&'a OperatorImage, String>,
}

/// Makes one step.
pub async fn act(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    seen: &Seen,
    step: &Step,
) -> Result<(), Error> {
    let namespace = restore.namespace().unwrap_or_default();
    match step {
        // Both are written with the status.
        Step::Nothing | Step::RecordIntent(_) | Step::RecordRestored { .. } => Ok(()),
        Step::CreateCluster(spec) => {
            let cluster = cluster_with_claim(restore, &namespace, spec.as_ref().clone());
            create(hands, &namespace, &cluster).await
        }
        Step::CreateService | Step::CreateClaim | Step::CreatePod => {
            let cluster = known_cluster(seen)?;
            create_child(hands, restore, seen, cluster, step).await
        }
        Step::RecordFormed { cluster_id } => {
            let cluster = known_cluster(seen)?;
            let first = naming::seed(restore);
            let formed = EtcdClusterStatus {
                cluster_id: Some(cluster_id.clone()),
                bootstrap: Some(BootstrapStatus {
                    token: first.token,
                    members: vec![first.member],
                }),
                ..EtcdClusterStatus::default()
            };
            let api: Api<EtcdCluster> = Api::namespaced(hands.client.clone(), &namespace);
            apply::status_if_unchanged(&api, MANAGER_RESTORE, cluster, None, &formed).await?;
            Ok(())
        }
        Step::ReleaseClaim => {
            let cluster = known_cluster(seen)?;
            let api: Api<EtcdCluster> = Api::namespaced(hands.client.clone(), &namespace);
            apply::annotate(&api, MANAGER_RESTORE, cluster, ANNOTATION_RESTORE, None).await?;
            Ok(())
        }
    }
}

fn known_cluster(seen: &Seen) -> Result<&EtcdCluster, Error> {
    seen.cluster
        .as_ref()
        .ok_or_else(|| Error::Missing("the EtcdCluster was not read".to_owned()))
}

/// The EtcdCluster with our claim on it: from its first moment it is this restore's.
fn cluster_with_claim(
    restore: &EtcdRestore,
    namespace: &str,
    spec: api::EtcdClusterSpec,
) -> EtcdCluster {
    let target = &restore.spec.etcd_cluster;
    let mut cluster = EtcdCluster::new(&target.name, spec);
    cluster.metadata.namespace = Some(namespace.to_owned());
    if let Some(metadata) = target
        .template
        .as_ref()
        .and_then(|template| template.metadata.clone())
    {
        cluster.metadata.labels = Some(metadata.labels);
        cluster.metadata.annotations = Some(metadata.annotations);
    }
    let annotations = cluster.annotations_mut();
    annotations.insert(
        ANNOTATION_RESTORE.to_owned(),
        naming::uid(restore).to_owned(),
    );
    // The cluster operator of the restore's scope takes it.
    match restore.annotations().get(ANNOTATION_SCOPE) {
        Some(scope) => annotations.insert(ANNOTATION_SCOPE.to_owned(), scope.clone()),
        None => annotations.remove(ANNOTATION_SCOPE),
    };
    cluster
}

async fn create_child(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    observed: &Seen,
    cluster: &EtcdCluster,
    step: &Step,
) -> Result<(), Error> {
    let namespace = restore.namespace().unwrap_or_default();
    let seed = naming::seed(restore);
    let members = Members::of(cluster, &namespace, &seed.token, None);
    match step {
        Step::CreateService => {
            create(
                hands,
                &namespace,
                &member::member_service(&members, &seed.member),
            )
            .await
        }
        Step::CreateClaim => match member::volume_claim(&members, &seed.member) {
            Some(claim) => create(hands, &namespace, &claim).await,
            None => Ok(()),
        },
        _ => {
            let place = observed
                .place
                .as_ref()
                .map_err(|trouble| Error::Missing(trouble.message.clone()))?;
            let image = hands
                .image
                .as_ref()
                .map_err(|why| Error::Missing(why.clone()))?;
            let version = EtcdVersion::parse(&cluster.spec.version).map_err(|error| {
                Error::Missing(format!("the EtcdCluster's spec.version: {error}"))
            })?;
            let pod = seed_pod::build(
                &members,
                &seed,
                &version,
                naming::uid(restore),
                place,
                image,
            );
            create(hands, &namespace, &pod).await
        }
    }
}

/// Creation under a fixed name: that it exists already is for the next look to judge (invariant 11).
async fn create<K>(hands: &Hands<'_>, namespace: &str, object: &K) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + serde::Serialize
        + serde::de::DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(hands.client.clone(), namespace);
    apply::create(&api, MANAGER_RESTORE, object).await?;
    Ok(())
}

/// What a failed step means for the status.
pub fn trouble(error: &Error) -> Trouble {
    Trouble::new(
        Reason::StepFailed,
        runtime::outcome::Chain(error).to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn restore(scope: Option<&str>) -> EtcdRestore {
        let spec = r#"{"backup":{"name":"b"},"etcdCluster":{"name":"main","template":{
            "metadata":{"labels":{"team":"a"},"annotations":{"note":"n","etcd.database.coreos.com/scope":"x"}},
            "spec":{"size":3}}}}"#;
        let mut restore = EtcdRestore::new("again", serde_json::from_str(spec).unwrap());
        restore.metadata.uid = Some("restore-uid".into());
        if let Some(scope) = scope {
            restore
                .annotations_mut()
                .insert(ANNOTATION_SCOPE.into(), scope.into());
        }
        restore
    }

    #[test]
    fn the_cluster_is_created_with_the_claim_and_the_templates_metadata() {
        let cluster = cluster_with_claim(&restore(None), "prod", api::EtcdClusterSpec::default());
        assert_eq!(
            cluster.annotations()["etcd.database.coreos.com/restore"],
            "restore-uid"
        );
        assert_eq!(cluster.annotations()["note"], "n");
        assert_eq!(cluster.labels()["team"], "a");
        assert_eq!(cluster.metadata.namespace.as_deref(), Some("prod"));
    }

    #[test]
    fn the_cluster_is_handed_to_the_operator_of_the_restores_scope() {
        let scope = |scope| {
            let cluster =
                cluster_with_claim(&restore(scope), "prod", api::EtcdClusterSpec::default());
            cluster.annotations().get(ANNOTATION_SCOPE).cloned()
        };
        assert_eq!(scope(Some("clusterwide")).as_deref(), Some("clusterwide"));
        assert_eq!(scope(None), None);
    }
}
