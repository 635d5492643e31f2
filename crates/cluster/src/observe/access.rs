//! Observes access control. The Secrets and the NetworkPolicy are read with the other objects, and etcd is asked
//! whether it accepts the credentials.

use api::names;
use etcd::Etcd;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::{Api, Client, ResourceExt};
use member::{Members, Operators, network_policy};
use runtime::credentials::ClusterAuth;

use super::{DEADLINE, Error, KubeSnapshot, children, seen};
use crate::diff;
use crate::snapshot::Observed;

/// The NetworkPolicy of this name, whoever created it. It is read concurrently with the other objects.
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

/// Completes the read objects of a cluster with the Secrets that its spec names.
pub async fn complete(
    client: &Client,
    (operators, policy): (&Operators, Option<NetworkPolicy>),
    snapshot: &mut KubeSnapshot,
) {
    let cluster = snapshot.effective.cluster();
    let namespace = cluster.namespace().unwrap_or_default();
    let auth = ClusterAuth::read(client, cluster).await;
    let uid = cluster.uid().unwrap_or_default();
    // A NetworkPolicy of the same name with another owner is left alone.
    let policy = policy.filter(|policy| children::belongs(&policy.metadata, &uid) == Some(true));
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

/// Asks etcd whether it accepts the credentials. Usually the previous calls have already answered this.
pub(super) async fn ask(etcd: &dyn Etcd, via: &[String], observed: &mut Observed) {
    if observed.members.known().is_some() {
        observed.access.login = seen(etcd.login(via).await);
    }
}
