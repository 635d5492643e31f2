//! Observes access control: reads the Secrets, and checks the NetworkPolicy and whether etcd accepts the credentials.

use etcd::Etcd;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::{Client, ResourceExt};
use member::{Members, Operators, network_policy};
use runtime::credentials::ClusterAuth;

use super::{KubeSnapshot, seen};
use crate::plan::diff;
use crate::snapshot::Observed;

/// Reads the Secrets of `spec.auth`, and adds their state and the state of the NetworkPolicy to the snapshot.
pub async fn complete(
    client: &Client,
    (operators, policy): (&Operators, Option<NetworkPolicy>),
    snapshot: &mut KubeSnapshot,
) {
    let cluster = snapshot.effective.cluster();
    let namespace = cluster.namespace().unwrap_or_default();
    let auth = ClusterAuth::read(client, cluster).await;
    let uid = cluster.uid().unwrap_or_default();
    let members = Members::of(cluster, &namespace, "", None);
    let wanted = cluster.spec.network_policy.clone().unwrap_or_default();
    let made = network_policy(&members, &wanted, operators);
    let network_uid = policy.as_ref().and_then(ResourceExt::uid);
    let network = diff::network(&members, policy.as_ref(), made, &uid);
    let access = &mut snapshot.without_etcd.access;
    (access.network, access.network_uid) = (network, network_uid);
    access.fault = auth.fault().map(str::to_owned);
    access.is_root = auth.is_root();
    access.record = auth.record();
    snapshot.auth = auth;
}

/// Checks whether etcd accepts the credentials. Most reconciles need no additional call, because earlier answers
/// already show the result.
pub(super) async fn ask(etcd: &dyn Etcd, via: &[String], observed: &mut Observed) {
    if observed.members.known().is_some() {
        observed.access.login = seen(etcd.login(via).await);
    }
}
