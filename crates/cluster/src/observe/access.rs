//! Observes access control: reads the Secrets and the NetworkPolicy, and checks whether etcd accepts the credentials.

use api::names;
use etcd::Etcd;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::{Api, Client, ResourceExt};
use member::{Members, Operators, network_policy};
use runtime::credentials::ClusterAuth;

use super::{DEADLINE, Error, KubeSnapshot, seen};
use crate::plan::diff;
use crate::snapshot::Observed;

/// Reads the NetworkPolicy of this name, with any owner. The read runs concurrently with the reads of the other
/// objects.
pub async fn policy(
    client: &Client,
    namespace: &str,
    name: &str,
) -> Result<Option<NetworkPolicy>, Error> {
    let policies = Api::<NetworkPolicy>::namespaced(client.clone(), namespace);
    let name = names::network_policy(name);
    let policy = tokio::time::timeout(DEADLINE, policies.get_opt(&name)).await;
    let policy = policy.map_err(|_| Error::Deadline)?;
    policy.map_err(|source| Error::Read {
        what: "the network policy",
        source,
    })
}

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
