//! Reads the EtcdCluster, the role or the user in etcd, and the Secret. Changes nothing and decides nothing.

mod cluster;

use std::sync::Arc;

use api::access::PasswordStatus;
use api::problem::Chain;
use api::{EtcdRole, EtcdUser};
use futures::FutureExt;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::controller::Cache;
use runtime::credentials::{SecretPassword, password_of};

use crate::object::AccessObject;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Cluster, Rival, RoleFacts, RoleSnapshot, RoleState, UserSnapshot};
use cluster::etcd_trouble;
pub(crate) use cluster::{Clusters, Members, ObservedCluster};

/// The sources of an observation.
pub(crate) struct ObserveContext {
    pub(crate) client: Client,
    pub(crate) clusters: Arc<Clusters>,
    pub(crate) roles: Cache<EtcdRole>,
    pub(crate) users: Cache<EtcdUser>,
}

/// The observation for an EtcdUser. Only `password` contains the password (invariant 14).
pub(crate) struct ObservedUser {
    pub(crate) cluster: Arc<ObservedCluster>,
    pub(crate) snapshot: UserSnapshot,
    pub(crate) password: Option<SecretPassword>,
}

impl ObserveContext {
    /// Observes an EtcdRole.
    pub(crate) async fn role(&self, role: &EtcdRole) -> (Arc<ObservedCluster>, RoleSnapshot) {
        let namespace = role.namespace().unwrap_or_default();
        let cluster = self.clusters.of(&namespace, role.target()).await;
        let found = match cluster.members() {
            Err(trouble) => Err(trouble),
            Ok(Members { client, urls }) => {
                let found = client.role_permissions(urls, role.entry()).boxed().await;
                found.map_err(|error| etcd_trouble(role.target(), &error))
            }
        };
        let snapshot = RoleSnapshot {
            cluster: cluster.cluster.clone(),
            rivals: rivals(&self.roles, role, &cluster.cluster),
            found,
        };
        (cluster, snapshot)
    }

    /// Observes an EtcdUser. Does not ask etcd whether it accepts the password.
    pub(crate) async fn user(&self, user: &EtcdUser) -> ObservedUser {
        let namespace = user.namespace().unwrap_or_default();
        let cluster = self.clusters.of(&namespace, user.target()).await;
        let found = match cluster.members() {
            Err(trouble) => Err(trouble),
            Ok(Members { client, urls }) => {
                let found = client.user_roles(urls, user.entry()).boxed().await;
                found.map_err(|error| etcd_trouble(user.target(), &error))
            }
        };
        let (version, password) = match self.password(&namespace, user).await {
            None => (None, None),
            Some(Err(trouble)) => (Some(Err(trouble)), None),
            Some(Ok((version, password))) => (Some(Ok(version)), Some(password)),
        };
        let roles = self.roles_of(&namespace, user, &cluster.cluster).await;
        let snapshot = UserSnapshot {
            cluster: cluster.cluster.clone(),
            rivals: rivals(&self.users, user, &cluster.cluster),
            found,
            roles,
            password: version,
            check: None,
        };
        ObservedUser {
            cluster,
            snapshot,
            password,
        }
    }

    async fn password(
        &self,
        namespace: &str,
        user: &EtcdUser,
    ) -> Option<Result<(PasswordStatus, SecretPassword), Trouble>> {
        let source = user.spec.password.as_ref()?;
        let key = (source.secret.as_str(), source.key.as_str());
        let found = password_of(&self.client, namespace, key, "spec.password").await;
        Some(match found {
            Err(why) => Err(Trouble::new(Reason::SecretMissing, why)),
            Ok(found) => Ok((
                PasswordStatus {
                    secret: source.secret.clone(),
                    key: source.key.clone(),
                    uid: found.uid.clone(),
                    resource_version: found.resource_version.clone(),
                },
                found,
            )),
        })
    }

    /// The EtcdRoles that the user names.
    async fn roles_of(
        &self,
        namespace: &str,
        user: &EtcdUser,
        cluster: &Cluster,
    ) -> Vec<RoleFacts> {
        let mut facts = Vec::new();
        for name in &user.spec.roles {
            let state = match self.role_named(namespace, name).await {
                Ok(Some(role)) => role_state(&role, user, cluster),
                Ok(None) => RoleState::Missing,
                Err(why) => RoleState::Unreadable(why),
            };
            let name = name.clone();
            facts.push(RoleFacts { name, state });
        }
        facts
    }

    /// The EtcdRole with this name. Invariant 1: an EtcdRole that is not in the cache may exist, so the operator reads
    /// it from the API server.
    async fn role_named(&self, namespace: &str, name: &str) -> Result<Option<EtcdRole>, String> {
        let reference = ObjectRef::new(name).within(namespace);
        if let Some(found) = self.roles.get(&reference) {
            let readable = found.0.as_ref();
            let readable = readable.map(|role| Some(role.clone()));
            return readable.map_err(|invalid| invalid.error.clone());
        }
        let roles = Api::<EtcdRole>::namespaced(self.client.clone(), namespace);
        let found = roles.get_opt(name).await;
        found.map_err(|error| Chain(&error).to_string())
    }
}

fn role_state(role: &EtcdRole, user: &EtcdUser, cluster: &Cluster) -> RoleState {
    if role.metadata.deletion_timestamp.is_some() {
        return RoleState::Missing;
    }
    if role.cluster() != user.cluster() {
        return RoleState::OtherCluster(role.cluster().to_owned());
    }
    let name = role.etcd_name().to_owned();
    let is_confirmed = role.owned().is_some_and(|owned| owned.created);
    if is_confirmed && owns(role, user.cluster(), &name, cluster) {
        RoleState::Ready(name)
    } else {
        RoleState::NotReady(name)
    }
}

/// Whether the status of the object has recorded this role or user of this EtcdCluster.
fn owns<K: AccessObject>(object: &K, target: &str, entry: &str, cluster: &Cluster) -> bool {
    let Some(owned) = object.owned() else {
        return false;
    };
    let is_current = match cluster {
        Cluster::Present(facts) => facts.matches(owned),
        Cluster::Missing | Cluster::Unknown(_) => true,
    };
    is_current && owned.cluster == target && owned.name == entry
}

/// The other objects that name the same role or user in etcd, and are not being deleted.
fn rivals<K: AccessObject>(cache: &Cache<K>, object: &K, cluster: &Cluster) -> Vec<Rival> {
    let (namespace, uid) = (&object.meta().namespace, &object.meta().uid);
    let (target, entry) = (object.target(), object.entry());
    let names = |other: &K| {
        other.meta().deletion_timestamp.is_none()
            && other.meta().uid != *uid
            && other.cluster() == target
            && (other.etcd_name() == entry || owns(other, target, entry, cluster))
    };
    let found = cache
        .select(|other| other.meta().namespace == *namespace && other.0.as_ref().is_ok_and(&names));
    let readable = found.iter().filter_map(|other| other.0.as_ref().ok());
    let rivals = readable.map(|other| Rival {
        name: other.name_any(),
        created: other.meta().creation_timestamp.as_ref().map(|time| time.0),
        owns: owns(other, target, entry, cluster),
    });
    rivals.collect()
}

impl ObservedUser {
    /// Asks etcd whether it accepts the password, and adds the answer to the snapshot. If `password` is `None`, sends
    /// an empty password: for a user without a password, etcd answers `NoPassword` to every password.
    ///
    /// # Errors
    /// Fails if etcd does not answer.
    pub(crate) async fn check_password(&mut self, user: &EtcdUser) -> Result<(), etcd::Error> {
        let password = self.password.as_ref();
        let password = password.map_or("", |found| found.password.as_str());
        if let Ok(Members { client, urls }) = self.cluster.members() {
            let check = client.check_password(urls, user.entry(), password).boxed();
            self.snapshot.check = Some(check.await?);
        }
        Ok(())
    }
}
