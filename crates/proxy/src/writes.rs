//! The requests to the API server. Each object is read before it is changed, so that objects of other owners stay
//! unchanged, and objects that are up to date cause no writes.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Instant;

use api::EtcdCluster;
use api::names;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::apply;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::certificates::generated_secret;
use crate::error::Error;
use crate::objects::Objects;

/// The UID of an object, and a text that changes with its content: the generation, or the resourceVersion if the kind
/// has no generation. A change of the status does not change the generation.
pub(crate) type Identity = (Option<String>, Option<String>);
/// The identities of objects, by kind and name.
pub(crate) type Identities = BTreeMap<String, Identity>;

/// Writes the objects of the proxies of one cluster.
pub(crate) struct Writes<'a> {
    pub(crate) client: &'a Client,
    /// The field manager.
    pub(crate) manager: &'static str,
    /// The cluster, as it was read from the API server for these writes.
    pub(crate) cluster: &'a EtcdCluster,
    /// The start of the read of `cluster`.
    pub(crate) since: Instant,
    /// The identities of the objects after the last update with the same content. Empty without such an update.
    pub(crate) last: Identities,
}

/// The result of the writes.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// The objects after the writes.
    pub(crate) objects: Identities,
    /// The kinds and names of the objects that were changed.
    pub(crate) changed: Vec<String>,
}

impl Writes<'_> {
    /// Applies the objects that have changed since the last update. Deletes the objects that the spec no longer needs.
    pub(crate) async fn apply_all(&self, objects: &Objects) -> Result<Written, Error> {
        let mut written = Written::default();
        // The Service exists before the proxies, so that clients can resolve its name.
        self.apply(&objects.service, &mut written).await?;
        if let Some(policy) = &objects.policy {
            self.apply(policy, &mut written).await?;
        }
        if let Some(budget) = &objects.budget {
            self.apply(budget, &mut written).await?;
        }
        self.apply(&objects.deployment, &mut written).await?;
        if self.last.is_empty() {
            // `last` is empty after a change of the desired objects. Objects from before the change may exist, for
            // example the Service with the former `serviceName`.
            self.delete_except(Some(&objects.service)).await?;
            self.delete_except(objects.policy.as_ref()).await?;
            self.delete_except(objects.budget.as_ref()).await?;
        }
        Ok(written)
    }

    /// Deletes all objects of the proxies. The Deployment is deleted last: while it exists, the next reconcile knows
    /// that objects must be deleted. Returns true if the Deployment existed.
    pub(crate) async fn delete_all(&self) -> Result<bool, Error> {
        self.delete_except::<Service>(None).await?;
        self.delete_except::<NetworkPolicy>(None).await?;
        self.delete_except::<PodDisruptionBudget>(None).await?;
        self.delete_secret().await?;
        Ok(self.delete_except::<Deployment>(None).await? > 0)
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        let namespace = self.cluster.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
    }

    fn uid(&self) -> &str {
        self.cluster.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Invariant 11: the writes are based on recent reads.
    fn check_fresh(&self) -> Result<(), Error> {
        if apply::is_fresh(self.since) {
            Ok(())
        } else {
            Err(Error::Outdated)
        }
    }

    async fn apply<K>(&self, object: &K, written: &mut Written) -> Result<(), Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Serialize
            + DeserializeOwned
            + Clone
            + Debug,
    {
        let (api, name, title) = (self.api::<K>(), object.name_any(), title(object));
        let found = api.get_opt(&name).await;
        let found = found.map_err(|source| unreadable(&title, source))?;
        if let Some(found) = &found {
            if !apply::is_owned(found.meta(), self.uid()) {
                return Err(Error::Taken {
                    kind: K::kind(&()).into_owned(),
                    name,
                });
            }
            let identity = identity(found);
            if self.last.get(&title) == Some(&identity) {
                written.objects.insert(title, identity);
                return Ok(());
            }
        }
        self.check_fresh()?;
        let applied = identity(&apply::apply(&api, self.manager, object).await?);
        if found.is_none_or(|found| identity(&found) != applied) {
            written.changed.push(title.clone());
        }
        written.objects.insert(title, applied);
        Ok(())
    }

    /// Deletes the proxies' objects of this kind except `keep`. Returns the number of deleted objects.
    async fn delete_except<K>(&self, keep: Option<&K>) -> Result<usize, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + DeserializeOwned
            + Clone
            + Debug,
    {
        let api = self.api::<K>();
        let labels = names::grpc_proxy_labels(&self.cluster.name_any());
        let labels = labels.iter().map(|(key, value)| format!("{key}={value}"));
        let params = ListParams::default().labels(&labels.collect::<Vec<_>>().join(","));
        let found = api.list(&params).await;
        let what = format!("the {} of the gRPC proxies", K::plural(&()));
        let found = found.map_err(|source| unreadable(&what, source))?;
        let keep = keep.map(ResourceExt::name_any);
        let mut deleted = 0;
        for object in found.items {
            let is_own = apply::is_owned(object.meta(), self.uid());
            if is_own && Some(object.name_any()) != keep {
                self.check_fresh()?;
                apply::delete(&api, &object, None).await?;
                deleted += 1;
            }
        }
        Ok(deleted)
    }

    /// Deletes the Secret with the generated certificate.
    async fn delete_secret(&self) -> Result<(), Error> {
        let (api, name) = (self.api::<Secret>(), generated_secret(self.cluster));
        let found = api.get_opt(&name).await;
        let what = format!("Secret {name}");
        let found = found.map_err(|source| unreadable(&what, source))?;
        let found = found.filter(|secret| apply::is_owned(secret.meta(), self.uid()));
        if let Some(secret) = found {
            self.check_fresh()?;
            apply::delete(&api, &secret, None).await?;
        }
        Ok(())
    }
}

/// The kind and the name of an object.
pub(crate) fn title<K: Resource<DynamicType = ()>>(object: &K) -> String {
    format!("{} {}", K::kind(&()), object.name_any())
}

/// The identity of an object that was read from the API server.
pub(crate) fn identity<K: Resource>(object: &K) -> Identity {
    let metadata = object.meta();
    let generation = metadata.generation.map(|number| number.to_string());
    let content = generation.or_else(|| metadata.resource_version.clone());
    (metadata.uid.clone(), content)
}

pub(crate) fn unreadable(what: &str, source: kube::Error) -> Error {
    Error::Read {
        what: what.to_owned(),
        source: Box::new(source),
    }
}
