//! Executes exactly the step that was planned: one write. Nothing is decided here.

use std::time::Instant;

use api::cluster::{BootstrapStatus, EtcdClusterStatus, ReplacedStatus, TlsStatus};
use api::conditions::Reason;
use api::names::{
    self, ANNOTATION_CLUSTER_ID, ANNOTATION_RESTORE, ANNOTATION_SCOPE, FINALIZER_CLAIM,
    MANAGER_RESTORE,
};
use api::restore::ReplacesStatus;
use api::version::EtcdVersion;
use api::{EtcdCluster, EtcdRestore};
use futures::future::join_all;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::{Api, Client, Resource, ResourceExt};
use runtime::apply::{self, Deleted};
use runtime::member::{self, Members, OperatorImage};
use runtime::outcome::{Chain, Failure};
use serde_json::json;

use crate::observe::{self, Children, Seen};
use crate::observed::{FormerPod, Trouble};
use crate::plan::{Step, in_place, joining};
use crate::{choice, naming, pod as seed_pod};

mod late;
mod refusal;

/// How long members that are replaced may take to end, in seconds: nobody is served meanwhile, and what they hold is
/// no longer the cluster's.
const STOP_SECONDS: u32 = 1;

/// Why a step was not made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused or could not be reached.
    #[error("the step was not made")]
    Write(#[from] apply::Error),
    /// Something the step needs is not there.
    #[error("{0}")]
    Missing(String),
    /// The process stood still, or the API server took long: what the step was planned from is too old to act upon.
    #[error(
        "what the step was planned from took longer than {} seconds to read, and it is planned again: the API server or \
         etcd answers slowly, or the operator has too little CPU",
        late::LONGEST.as_secs()
    )]
    TooOld,
}

impl Failure for Error {
    fn reason(&self) -> &'static str {
        match self {
            Self::Write(error) => error.reason(),
            Self::Missing(_) => "Missing",
            Self::TooOld => "Conflict",
        }
    }
}

/// With what steps are made.
pub struct Hands<'a> {
    /// Kubernetes. It sends each request once: nobody repeats a write later than it was meant (invariant 11).
    pub client: &'a Client,
    /// The image the seed fetches with; why it is not known.
    pub image: Result<&'a OperatorImage, String>,
    /// When it was begun to read what the step is planned from.
    pub since: Instant,
}

/// Makes one step.
pub async fn act(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    seen: &Seen,
    step: &Step,
) -> Result<(), Error> {
    let point = point(step);
    tracing::debug!(point, "step");
    fail::fail_point!(point);
    let namespace = restore.namespace().unwrap_or_default();
    match step {
        // Written with the status.
        Step::Nothing
        | Step::RecordIntent { .. }
        | Step::RecordBackup(_)
        | Step::RecordRestored { .. }
        | Step::Abandon(_) => Ok(()),
        Step::Guard(set) => {
            let api: Api<EtcdRestore> = hands.api(&restore.namespace().unwrap_or_default());
            apply::set_finalizer(&api, MANAGER_RESTORE, restore, FINALIZER_CLAIM, *set).await?;
            Ok(())
        }
        Step::CreateCluster(spec) => {
            let cluster = cluster_with_claim(restore, &namespace, spec.as_ref().clone());
            late::create_cluster(hands, restore, &cluster, Instant::now()).await
        }
        Step::Claim => late::claim(hands, restore, known_cluster(seen)?).await,
        Step::CreateService | Step::CreateClaim | Step::CreatePod => {
            let cluster = known_cluster(seen)?;
            create_child(hands, restore, seen, cluster, step).await
        }
        Step::ClearPod(_) => {
            late::confirm(hands, restore).await?;
            clear(hands, &namespace, seen).await.map(drop)
        }
        Step::DiscardSeed => discard(hands, restore, seen).await,
        Step::RecordFormed { cluster_id } => {
            late::confirm_seed(hands, restore, seen).await?;
            record_formed(hands, restore, known_cluster(seen)?, cluster_id).await
        }
        Step::StopFormer(pods) => {
            late::confirm_seed(hands, restore, seen).await?;
            stop(hands, &namespace, pods).await
        }
        Step::Join => join(hands, restore, seen).await,
        Step::ReleaseClaim => release(hands, restore, known_cluster(seen)?).await,
        Step::Expire => delete(hands, &namespace, Some(restore)).await,
    }
}

/// A crash before this step, where a test asks for one: `FAILPOINTS=restore-before-claim=panic`.
fn point(step: &Step) -> &'static str {
    match step {
        Step::Nothing => "restore-before-nothing",
        Step::RecordIntent { .. } => "restore-before-record-intent",
        Step::RecordBackup(_) => "restore-before-record-backup",
        Step::Guard(true) => "restore-before-guard",
        Step::Guard(false) => "restore-before-let-go",
        Step::CreateCluster(_) => "restore-before-create-cluster",
        Step::Claim => "restore-before-claim",
        Step::CreateService => "restore-before-create-service",
        Step::CreateClaim => "restore-before-create-volume-claim",
        Step::CreatePod => "restore-before-create-pod",
        Step::ClearPod(_) => "restore-before-clear-pod",
        Step::RecordRestored { .. } => "restore-before-record-restored",
        Step::Abandon(_) => "restore-before-abandon",
        Step::DiscardSeed => "restore-before-discard-seed",
        Step::RecordFormed { .. } => "restore-before-record-formed",
        Step::StopFormer(_) => "restore-before-stop-former",
        Step::Join => "restore-before-join",
        Step::ReleaseClaim => "restore-before-release-claim",
        Step::Expire => "restore-before-expire",
    }
}

impl Hands<'_> {
    fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// As it is by now.
    async fn read<K>(&self, namespace: &str, name: &str) -> Result<Option<K>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned,
    {
        let found = observe::read(self.client, namespace, name).await;
        found.map_err(Error::Missing)
    }
}

/// The seed's pod, as it was seen; one that has changed since is looked at again. Says whether it goes, and nothing is in its
/// place.
async fn clear(hands: &Hands<'_>, namespace: &str, seen: &Seen) -> Result<bool, Error> {
    let Some(pod) = &seen.children.pod else {
        return Ok(true);
    };
    late::in_time(hands.since)?;
    match apply::delete_if_unchanged(&hands.api::<Pod>(namespace), pod).await? {
        Deleted::Accepted => Ok(true),
        Deleted::Changed => Ok(false),
        // Invariant 11: another operator may have made the next one, on what is there.
        Deleted::Gone => {
            let next: Option<Pod> = hands.read(namespace, &pod.name_any()).await?;
            Ok(next.is_none())
        }
    }
}

/// All of the seed. Where the restore goes on, only of one that is as it was seen.
async fn discard(hands: &Hands<'_>, restore: &EtcdRestore, seen: &Seen) -> Result<(), Error> {
    let namespace = restore.namespace().unwrap_or_default();
    let Children {
        pod,
        claim,
        service,
    } = &seen.children;
    late::confirm_where_it_is(hands, restore, seen).await?;
    if in_place::gives_up(restore) {
        delete(hands, &namespace, pod.as_ref()).await?;
    } else {
        late::confirm(hands, restore).await?;
        if !clear(hands, &namespace, seen).await? {
            return Ok(());
        }
    }
    delete(hands, &namespace, claim.as_ref()).await?;
    delete(hands, &namespace, service.as_ref()).await
}

/// The turn, in one write (invariant 9): the new cluster's ID, token, first member and TLS, and what it replaces.
async fn record_formed(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
    cluster_id: &str,
) -> Result<(), Error> {
    let formed = formed(restore, cluster, cluster_id, Timestamp::now());
    let api: Api<EtcdCluster> = hands.api(&restore.namespace().unwrap_or_default());
    apply::status_if_unchanged(&api, MANAGER_RESTORE, cluster, None, &formed).await?;
    Ok(())
}

fn formed(
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
    cluster_id: &str,
    now: Timestamp,
) -> EtcdClusterStatus {
    let first = naming::seed(restore);
    EtcdClusterStatus {
        cluster_id: Some(cluster_id.to_owned()),
        // With what the seed was started; it is made again with that.
        tls: Some(TlsStatus::new(&first.token, cluster.spec.tls.as_ref())),
        bootstrap: Some(BootstrapStatus {
            token: first.token,
            members: vec![first.member],
        }),
        replaced: in_place::replaces(restore).map(|before| replaced(restore, before, cluster, now)),
        ..EtcdClusterStatus::default()
    }
}

/// What the cluster operator has to know of the cluster before: its members mean nothing to the new one, and until
/// when its volumes stay.
fn replaced(
    restore: &EtcdRestore,
    before: &ReplacesStatus,
    cluster: &EtcdCluster,
    now: Timestamp,
) -> ReplacedStatus {
    let keep = restore.spec.keep_old_data.as_ref();
    let keep = keep.and_then(|text| SignedDuration::try_from(text.parse()?).ok());
    let status = cluster.status.as_ref();
    let details = status.map(|status| status.member_details.as_slice());
    let members = details.unwrap_or_default().iter();
    let to_the_second = |time: Timestamp| Timestamp::from_second(time.as_second()).unwrap_or(time);
    ReplacedStatus {
        restore: restore.name_any(),
        from_cluster_id: before.cluster_id.clone(),
        members: members.map(|member| member.name.clone()).collect(),
        time: Some(Time(to_the_second(now))),
        keep_data_until: keep
            .map(|keep| now.checked_add(keep).unwrap_or(Timestamp::MAX))
            .map(|until| Time(to_the_second(until))),
    }
}

/// Exactly the pods that were seen. Their volumes are not touched.
async fn stop(hands: &Hands<'_>, namespace: &str, pods: &[FormerPod]) -> Result<(), Error> {
    let api: Api<Pod> = hands.api(namespace);
    let stopped = pods.iter().map(async |pod| {
        let mut seen = Pod::default();
        seen.metadata.name = Some(pod.name.clone());
        seen.metadata.uid = Some(pod.uid.clone());
        apply::delete(&api, &seen, Some(STOP_SECONDS)).await
    });
    join_all(stopped)
        .await
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    Ok(())
}

async fn delete<K>(hands: &Hands<'_>, namespace: &str, object: Option<&K>) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
{
    if let Some(object) = object {
        late::in_time(hands.since)?;
        apply::delete(&hands.api::<K>(namespace), object, None).await?;
    }
    Ok(())
}

async fn join(hands: &Hands<'_>, restore: &EtcdRestore, seen: &Seen) -> Result<(), Error> {
    let pod = seen.children.pod.as_ref();
    let pod = pod.ok_or_else(|| Error::Missing("the seed's pod was not read".to_owned()))?;
    let id = restore
        .status
        .as_ref()
        .and_then(|status| status.cluster_id.as_ref());
    let labels = names::cluster_labels(naming::target(restore));
    let joined = json!({ "labels": labels, "annotations": { ANNOTATION_CLUSTER_ID: id } });
    let api: Api<Pod> = hands.api(&restore.namespace().unwrap_or_default());
    apply::merge_metadata(&api, MANAGER_RESTORE, pod, joined).await?;
    Ok(())
}

/// From here on it is an ordinary cluster, and no part of the restore.
async fn release(
    hands: &Hands<'_>,
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
) -> Result<(), Error> {
    let owners = cluster.owner_references().iter();
    let others: Vec<_> = owners
        .filter(|owner| owner.uid != naming::uid(restore))
        .collect();
    let released = json!({
        "annotations": { ANNOTATION_RESTORE: null },
        "ownerReferences": others,
    });
    let api: Api<EtcdCluster> = hands.api(&restore.namespace().unwrap_or_default());
    apply::merge_metadata(&api, MANAGER_RESTORE, cluster, released).await?;
    Ok(())
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
    let mut cluster = EtcdCluster::new(naming::target(restore), spec);
    cluster.metadata.namespace = Some(namespace.to_owned());
    if let Some(metadata) = target
        .template
        .as_ref()
        .and_then(|template| template.metadata.clone())
    {
        cluster.metadata.labels = Some(metadata.labels);
        cluster.metadata.annotations = Some(metadata.annotations);
    }
    // Until it is handed over it goes with the restore.
    cluster.metadata.owner_references = Some(vec![OwnerReference {
        api_version: EtcdRestore::api_version(&()).into_owned(),
        kind: EtcdRestore::kind(&()).into_owned(),
        name: restore.name_any(),
        uid: naming::uid(restore).to_owned(),
        ..OwnerReference::default()
    }]);
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
    late::in_time(hands.since)?;
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
            // Invariant 10: what was recorded, whatever is newest by now.
            let missing = |why: &str| Error::Missing(joining::told(&observed.observed, why));
            let backup = observed.backup.as_ref();
            let backup = backup.map_err(|trouble| missing(&trouble.message))?;
            let image = hands.image.as_ref().map_err(|why| missing(why))?;
            let version = EtcdVersion::parse(&cluster.spec.version)
                .map_err(|error| missing(&format!("the EtcdCluster's spec.version: {error}")))?;
            let from = seed_pod::From {
                seed: &seed,
                version: &version,
                restore: naming::uid(restore),
                source: &backup.source,
                sha256: backup.sha256.as_deref(),
                bump_revision: choice::bump_revision(restore),
                apart: in_place::replaces(restore).is_some(),
            };
            let pod = seed_pod::build(&members, &from, image);
            late::create_pod(hands, restore, observed, &pod).await
        }
    }
}

/// Creation under a fixed name: that it exists already is for the next look to judge (invariant 11).
async fn create<K>(hands: &Hands<'_>, namespace: &str, object: &K) -> Result<(), Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + serde::Serialize
        + serde::de::DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(hands.client.clone(), namespace);
    apply::create(&api, MANAGER_RESTORE, object).await?;
    Ok(())
}

/// What a step that was not made means for the status.
pub fn trouble(error: &Error) -> Trouble {
    if let Error::Write(error) = error
        && let Some(trouble) = refusal::no_storage(error)
    {
        return trouble;
    }
    let reason = match error {
        Error::TooOld => Reason::InProgress,
        Error::Write(_) | Error::Missing(_) => Reason::StepFailed,
    };
    Trouble::new(reason, Chain(error).to_string())
}

#[cfg(test)]
mod tests;
