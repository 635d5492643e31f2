//! Builds the requests of an action in the order in which they are sent. Performs no I/O.

use api::cluster::{
    BootstrapStatus, EtcdClusterSpec, EtcdClusterStatus, ReplacedStatus, TlsStatus,
};
use api::names::{self, ANNOTATION_CLUSTER_ID, ANNOTATION_RESTORE, ANNOTATION_SCOPE};
use api::restore::ReplacesStatus;
use api::version::EtcdVersion;
use api::{EtcdCluster, EtcdRestore};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::{Resource, ResourceExt};
use member::{self, Members};
use serde_json::{Value, json};

use super::action::Action;
use super::{choice, in_place, joining, pod};
use crate::naming;
use crate::snapshot::{Objects, Observation, OldMembers, OldPod};

/// A precondition that is checked directly before a request, because the observation may be outdated (invariant 11).
#[derive(Clone, Debug, PartialEq)]
pub enum Check {
    /// The EtcdRestore is unchanged since the observation. The next requests may be sent only within ten seconds after
    /// the start of this check.
    RestoreUnchanged,
    /// The recorded backup in the EtcdRestore is unchanged since the observation.
    SameBackup,
    /// This restore holds the lock of the EtcdCluster, and the cluster ID is unchanged.
    ClusterInPlace(Box<EtcdCluster>),
    /// The seed's pod is unchanged since the observation. `None` means that the pod did not exist at the observation.
    SeedUnchanged(Option<Box<Pod>>),
}

/// An object that a request creates, changes or deletes.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// The EtcdCluster that a restore creates.
    Cluster(Box<EtcdCluster>),
    /// The Service of the seed.
    Service(Box<Service>),
    /// The PVC of the seed.
    Pvc(Box<PersistentVolumeClaim>),
    /// The pod of the seed, or the pod that searches recorded changes.
    Pod(Box<Pod>),
}

/// One request to the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// Check a precondition. If it is not met, no further request is sent.
    Confirm(Check),
    /// Add the finalizer of the EtcdRestore if true, remove it if false.
    SetFinalizer(bool),
    /// Create an object. Its name is fixed, so it is created at most once.
    Create(Object),
    /// Create the seed's pod, and delete it if the cluster no longer needs a seed.
    CreateSeed {
        /// The pod of the seed.
        pod: Box<Pod>,
        /// The observed EtcdCluster.
        cluster: Box<EtcdCluster>,
        /// True after the cutover, when clients may have written to an earlier pod of the seed.
        after_cutover: bool,
    },
    /// Set the restore lock, and remove it if the EtcdRestore has no finalizer.
    Lock(Box<EtcdCluster>),
    /// Merge metadata into the object, with the observed UID and resourceVersion as preconditions.
    Patch(Object, Value),
    /// Write the status of the EtcdCluster with the observed resourceVersion as precondition.
    Record(Box<EtcdCluster>, Box<EtcdClusterStatus>),
    /// Delete the object with the observed UID as precondition.
    Delete(Object),
    /// Delete the pod if its resourceVersion is unchanged. The next requests are sent only if this deletion was
    /// accepted, or if no pod of this name exists.
    DeleteUnchanged(Box<Pod>),
    /// Delete these pods with a short grace period.
    DeletePods(Vec<Pod>),
    /// Delete the EtcdRestore.
    DeleteRestore,
}

/// The requests of an action. A record in the status of the EtcdRestore needs no request here, because the record is
/// written together with the status.
///
/// # Errors
///
/// Fails if an object that the action needs was not read, or if the seed's pod cannot be built.
pub fn write(
    restore: &EtcdRestore,
    observation: &Observation,
    action: &Action,
    now: Timestamp,
) -> Result<Vec<Request>, String> {
    let objects = &observation.objects;
    Ok(match action {
        Action::Nothing
        | Action::RecordIntent { .. }
        | Action::RecordBackup(_)
        | Action::RecordRestored { .. }
        | Action::Abandon(_) => Vec::new(),
        Action::SetFinalizer(set) => vec![Request::SetFinalizer(*set)],
        Action::CreateCluster(spec) => vec![
            Request::Confirm(Check::RestoreUnchanged),
            Request::Create(Object::Cluster(Box::new(locked_cluster(
                restore,
                spec.as_ref().clone(),
            )))),
        ],
        Action::Lock => vec![Request::Lock(Box::new(known_cluster(objects)?.clone()))],
        Action::CreateService => {
            let cluster = effective(objects)?;
            let seed = naming::seed(restore);
            let namespace = restore.namespace().unwrap_or_default();
            let members = Members::of(&cluster, &namespace, &seed.token, None);
            let service = member::member_service(&members, &seed.member);
            vec![Request::Create(Object::Service(Box::new(service)))]
        }
        Action::CreatePvc => {
            let cluster = effective(objects)?;
            let seed = naming::seed(restore);
            let namespace = restore.namespace().unwrap_or_default();
            let members = Members::of(&cluster, &namespace, &seed.token, None);
            let pvc = member::volume_claim(&members, &seed.member);
            let create = |pvc| Request::Create(Object::Pvc(Box::new(pvc)));
            pvc.into_iter().map(create).collect()
        }
        Action::CreatePod => vec![Request::CreateSeed {
            pod: Box::new(seed_pod(restore, observation)?),
            cluster: Box::new(known_cluster(objects)?.clone()),
            after_cutover: observation.snapshot.old_members != OldMembers::NotRead,
        }],
        Action::ReplacePod(_) => {
            let pod = objects.seed.pod.clone();
            let deletion = pod.map(|pod| Request::DeleteUnchanged(Box::new(pod)));
            let check = Request::Confirm(Check::SameBackup);
            [check].into_iter().chain(deletion).collect()
        }
        Action::DiscardSeed => discard(restore, objects)?,
        Action::RecordFormed { cluster_id } => {
            let cluster = known_cluster(objects)?;
            let formed = formed(restore, &effective(objects)?, cluster_id, now);
            vec![
                seed_unchanged(objects),
                Request::Record(Box::new(cluster.clone()), Box::new(formed)),
            ]
        }
        Action::StopOldMembers(pods) => vec![
            seed_unchanged(objects),
            Request::DeletePods(pods.iter().map(named).collect()),
        ],
        Action::Join => vec![join(restore, objects)?],
        Action::ReleaseLock => {
            let cluster = known_cluster(objects)?;
            let patch = released(restore, cluster);
            vec![Request::Patch(
                Object::Cluster(Box::new(cluster.clone())),
                patch,
            )]
        }
        Action::StartSearch(pod) => vec![
            Request::Confirm(Check::RestoreUnchanged),
            Request::Create(Object::Pod(pod.clone())),
        ],
        Action::EndSearch(pod) => vec![Request::Delete(Object::Pod(pod.clone()))],
        Action::Expire => vec![Request::DeleteRestore],
    })
}

fn known_cluster(objects: &Objects) -> Result<&EtcdCluster, String> {
    let cluster = objects.cluster.as_ref();
    cluster.ok_or_else(|| "the EtcdCluster was not read".to_owned())
}

/// The EtcdCluster with the TLS settings and the address format in effect.
fn effective(objects: &Objects) -> Result<EtcdCluster, String> {
    let cluster = known_cluster(objects)?;
    let spec = objects.effective.as_ref().unwrap_or(&cluster.spec);
    Ok(EtcdCluster {
        spec: spec.clone(),
        ..cluster.clone()
    })
}

fn seed_unchanged(objects: &Objects) -> Request {
    let pod = objects.seed.pod.clone().map(Box::new);
    Request::Confirm(Check::SeedUnchanged(pod))
}

/// A pod with only the name and the UID, which a deletion needs.
fn named(old_pod: &OldPod) -> Pod {
    let mut pod = Pod::default();
    pod.metadata.name = Some(old_pod.name.clone());
    pod.metadata.uid = Some(old_pod.uid.clone());
    pod
}

fn seed_pod(restore: &EtcdRestore, observation: &Observation) -> Result<Pod, String> {
    let missing = |why: &str| joining::with_remedy_if_stopped(&observation.snapshot, why);
    let objects = &observation.objects;
    let cluster = effective(objects)?;
    // Invariant 10: the pod gets the recorded backup, even if a newer backup exists.
    let backup = objects.backup.as_ref();
    let backup = backup.map_err(|trouble| missing(&trouble.message))?;
    let image = objects.image.as_ref().map_err(|why| missing(why))?;
    let version = EtcdVersion::parse(&cluster.spec.version)
        .map_err(|error| missing(&format!("the EtcdCluster's spec.version: {error}")))?;
    let seed = naming::seed(restore);
    let namespace = restore.namespace().unwrap_or_default();
    let members = Members::of(&cluster, &namespace, &seed.token, None);
    let from = pod::From {
        seed: &seed,
        version: &version,
        restore: naming::uid(restore),
        source: &backup.source,
        sha256: backup.sha256.as_deref(),
        encryption_secret: choice::encryption_secret(backup),
        bump_revision: choice::bump_revision(restore),
        continuous: backup.continuous.as_ref(),
        in_place: in_place::replaces(restore).is_some(),
    };
    Ok(pod::build(&members, &from, image))
}

/// Deletes all objects of the seed, the pod first. If the restore is not aborted, the pod must be unchanged.
fn discard(restore: &EtcdRestore, objects: &Objects) -> Result<Vec<Request>, String> {
    let seed = &objects.seed;
    let check = Check::ClusterInPlace(Box::new(known_cluster(objects)?.clone()));
    let mut requests = vec![Request::Confirm(check)];
    let pod = seed.pod.clone().map(Box::new);
    if in_place::is_aborted(restore) {
        requests.extend(pod.map(|pod| Request::Delete(Object::Pod(pod))));
    } else {
        requests.push(Request::Confirm(Check::SameBackup));
        requests.extend(pod.map(Request::DeleteUnchanged));
    }
    let pvc = seed.pvc.clone().map(Box::new);
    let service = seed.service.clone().map(Box::new);
    requests.extend(pvc.map(|pvc| Request::Delete(Object::Pvc(pvc))));
    requests.extend(service.map(|service| Request::Delete(Object::Service(service))));
    Ok(requests)
}

/// The status for the cutover, which is one write (invariant 9). It contains the ID, the token, the first member and
/// the TLS settings of the new cluster, and a description of the old cluster.
pub(crate) fn formed(
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
    cluster_id: &str,
    now: Timestamp,
) -> EtcdClusterStatus {
    let first = naming::seed(restore);
    EtcdClusterStatus {
        cluster_id: Some(cluster_id.to_owned()),
        // The status records the TLS settings with which the seed was started.
        tls: Some(TlsStatus::new(&first.token, cluster.spec.tls.as_ref())),
        bootstrap: Some(BootstrapStatus {
            token: first.token,
            members: vec![first.member],
        }),
        replaced: in_place::replaces(restore).map(|before| replaced(restore, before, cluster, now)),
        ..EtcdClusterStatus::default()
    }
}

/// The description of the old cluster for the cluster operator: its members, and the time until which their volumes
/// are kept.
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

fn join(restore: &EtcdRestore, objects: &Objects) -> Result<Request, String> {
    let pod = objects.seed.pod.clone();
    let pod = pod.ok_or_else(|| "the seed's pod was not read".to_owned())?;
    let id = restore
        .status
        .as_ref()
        .and_then(|status| status.cluster_id.as_ref());
    let labels = names::cluster_labels(naming::target(restore));
    let joined = json!({ "labels": labels, "annotations": { ANNOTATION_CLUSTER_ID: id } });
    Ok(Request::Patch(Object::Pod(Box::new(pod)), joined))
}

/// The patch that removes the restore lock and the owner reference to the EtcdRestore.
pub(crate) fn released(restore: &EtcdRestore, cluster: &EtcdCluster) -> Value {
    let owners = cluster.owner_references().iter();
    let others: Vec<_> = owners
        .filter(|owner| owner.uid != naming::uid(restore))
        .collect();
    json!({
        "annotations": { ANNOTATION_RESTORE: null },
        "ownerReferences": others,
    })
}

/// The EtcdCluster that the restore creates, with the restore lock.
fn locked_cluster(restore: &EtcdRestore, spec: EtcdClusterSpec) -> EtcdCluster {
    let target = &restore.spec.etcd_cluster;
    let mut cluster = EtcdCluster::new(naming::target(restore), spec);
    cluster.metadata.namespace = Some(restore.namespace().unwrap_or_default());
    if let Some(metadata) = target
        .template
        .as_ref()
        .and_then(|template| template.metadata.clone())
    {
        cluster.metadata.labels = Some(metadata.labels);
        cluster.metadata.annotations = Some(metadata.annotations);
    }
    // Until the handover removes this owner reference, Kubernetes deletes the EtcdCluster together with the EtcdRestore
    // that owns it.
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
    // The EtcdCluster gets the scope annotation of the EtcdRestore, so that a cluster operator with this scope manages
    // it.
    match restore.annotations().get(ANNOTATION_SCOPE) {
        Some(scope) => annotations.insert(ANNOTATION_SCOPE.to_owned(), scope.clone()),
        None => annotations.remove(ANNOTATION_SCOPE),
    };
    cluster
}

#[cfg(test)]
mod tests;
