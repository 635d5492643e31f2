//! Reads the inputs of a verification: the state of its pod, the images for the pod, and whether another EtcdBackup of
//! the namespace is being verified.

use api::cluster::EtcdClusterSpec;
use api::version::EtcdVersion;
use api::{EtcdBackup, EtcdCluster};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};

use super::ObserveContext;
use crate::plan::verification::{VerificationNeed, need, running};
use crate::snapshot::VerificationInputs;
use crate::verification::{PodState, state_of};

pub(crate) async fn inputs(
    context: &ObserveContext,
    backup: &EtcdBackup,
    now: Timestamp,
) -> VerificationInputs {
    match need(backup, now) {
        VerificationNeed::Nothing => {
            // No verification can start now, for example because its window has closed. If this EtcdBackup has the turn
            // of its namespace, its turn ends, because only one EtcdBackup of a namespace has the turn to verify.
            let namespace = backup.namespace().unwrap_or_default();
            let uid = backup.uid().unwrap_or_default();
            context.turns.end(&namespace, &uid);
            VerificationInputs::default()
        }
        VerificationNeed::Turn => VerificationInputs {
            has_turn: has_turn(context, backup),
            ..VerificationInputs::default()
        },
        VerificationNeed::Pod(name) => {
            let pod = pod(context, backup, &name).await;
            if pod != PodState::Missing {
                return VerificationInputs {
                    pod,
                    ..VerificationInputs::default()
                };
            }
            let cluster = cluster(context, backup).await;
            VerificationInputs {
                pod,
                has_turn: has_turn(context, backup),
                image: context.image.get().await.ok().cloned(),
                etcd_image: cluster.as_ref().and_then(|spec| pinned_image(spec, backup)),
                repository: cluster.map(|spec| spec.repository),
            }
        }
    }
}

async fn pod(context: &ObserveContext, backup: &EtcdBackup, name: &str) -> PodState {
    let namespace = backup.namespace().unwrap_or_default();
    let pods = Api::<Pod>::namespaced(context.client.clone(), &namespace);
    match pods.get_opt(name).await {
        Ok(Some(pod)) => state_of(&pod, &backup.uid().unwrap_or_default()),
        Ok(None) => PodState::Missing,
        Err(error) => PodState::Unknown(format!("pod {name} cannot be read: {error}")),
    }
}

/// The spec of the EtcdCluster. `None` if the EtcdCluster cannot be read. Without the spec, the pod uses the default
/// repository of etcd images.
async fn cluster(context: &ObserveContext, backup: &EtcdBackup) -> Option<EtcdClusterSpec> {
    let name = &backup.spec.etcd_cluster.as_ref()?.name;
    let namespace = backup.namespace().unwrap_or_default();
    let clusters = Api::<EtcdCluster>::namespaced(context.client.clone(), &namespace);
    let found = clusters.get_opt(name).await.ok().flatten();
    found.map(|cluster| cluster.spec)
}

/// `spec.image` of the EtcdCluster. `None` if the field is not set, or if the backup has another etcd version than the
/// EtcdCluster.
fn pinned_image(spec: &EtcdClusterSpec, backup: &EtcdBackup) -> Option<String> {
    spec.image.as_ref()?;
    let version = backup.status.as_ref()?.etcd_version.as_deref()?;
    spec.image_for(&EtcdVersion::parse(version).ok()?)
}

/// True if the verification may start now. By default, only one EtcdBackup of a namespace is verified at a time.
fn has_turn(context: &ObserveContext, backup: &EtcdBackup) -> bool {
    let namespace = backup.namespace().unwrap_or_default();
    let uid = backup.uid().unwrap_or_default();
    let settings = backup.spec.verification.as_ref();
    if settings.is_some_and(|settings| settings.allow_concurrent) {
        context.turns.join(&namespace, &uid);
        return true;
    }
    let all = context.objects.in_namespace(&namespace);
    let readable: Vec<&EtcdBackup> = all.iter().filter_map(|one| one.0.as_ref().ok()).collect();
    let mut started: Vec<(Timestamp, String)> = readable
        .iter()
        .filter_map(|backup| Some((running(backup)?.1, backup.uid()?)))
        .collect();
    started.sort();
    let started: Vec<String> = started.into_iter().map(|(_, uid)| uid).collect();
    let exists = |uid: &str| {
        readable
            .iter()
            .any(|backup| backup.uid().as_deref() == Some(uid))
    };
    context.turns.take(&namespace, &uid, &started, exists)
}
