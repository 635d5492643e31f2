//! Reads the state that the operator does not watch: the Secrets and Certificates of a cluster, and the API server's
//! clock.

use api::EtcdCluster;
use futures::FutureExt;
use futures::future::OptionFuture;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::{Client, ResourceExt};

use super::{Error, certificates, clock, switch, tls};
use crate::clock::ApiServerClock;
use crate::objects::Objects;
use crate::switch::TlsRollout;

/// Adds the Secrets of certificates and the clock to the objects of a cluster. The result lacks the PodDisruptionBudget
/// and the NetworkPolicy. Without TLS, sends a request only if `pods::tells_a_time` is true for a pod.
pub(super) async fn complete(
    client: &Client,
    cluster: &EtcdCluster,
    (pods, claims, services): (Vec<Pod>, Vec<PersistentVolumeClaim>, Vec<Service>),
) -> Result<Objects, Error> {
    let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
    let of_cluster = (namespace.as_str(), name.as_str());
    let started = switch::started(cluster, &pods, &claims);
    // The progress of a TLS change (`rollout`) determines which TLS Secrets the operator reads.
    let rollout = TlsRollout::of(&started, cluster.spec.tls.as_ref());
    let (at, next) = (rollout.at.as_ref(), rollout.next.as_ref());
    let next = next.and_then(|next| next.to.as_ref());
    let generates = at.is_some_and(|tls| tls.generated().is_some());
    let settings = member::issued::settings(at, next);
    let issuance = settings.as_ref();
    let issuance = issuance.map(|it| runtime::issued::read(client, cluster, it).boxed());
    let (mut tls, mut next_tls, issuance, secrets, clock) = tokio::join!(
        runtime::reach::cluster_tls(client, of_cluster, at),
        runtime::reach::cluster_tls(client, of_cluster, next),
        OptionFuture::from(issuance),
        certificates::read(client, (cluster, at), (&*pods, &*claims, &*services)),
        clock::read(client, &pods, generates)
    );
    let read = |what| move |source| Error::Read { what, source };
    let issuance = issuance.transpose();
    let issuance = issuance.map_err(read("the Certificates of cert-manager"))?;
    if let Some(issuance) = &issuance {
        issuance.explain(&mut tls);
        issuance.explain(&mut next_tls);
    }
    Ok(Objects {
        form: tls::running_form(cluster, &pods),
        cluster: cluster.clone(),
        pods,
        claims,
        services,
        budget: None,
        policy: None,
        secrets: secrets.map_err(read("the certificates' Secrets"))?,
        tls,
        next_tls,
        issuance,
        started,
        clock: ApiServerClock(clock.map_err(read("the time of the API server"))?),
    })
}
