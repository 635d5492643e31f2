//! Reconciles the proxies after each reconcile of their EtcdCluster.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::EtcdCluster;
use api::names::{APP_GRPC_PROXY, LABEL_APP, LABEL_CLUSTER};
use api::problem::Chain;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Secret;
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::controller::Controllers;
use runtime::watch_cache::WatchCache;
use runtime::{Done, Notice, Operator, Reconcile, apply};

use crate::certificates::{SecretNames, digest};
use crate::error::{DEADLINE, Error};
use crate::flags::host;
use crate::objects::{Objects, objects};
use crate::plan::{Plan, Run, plan};
use crate::writes::{Writes, unreadable};

/// The objects are applied again after this time, because only the Deployment is watched.
const REAPPLY: Duration = Duration::from_mins(1);
/// Pause before a failed update is retried.
const RETRY: Duration = Duration::from_secs(10);
/// The record of a cluster that was not updated for this time is dropped.
const FORGOTTEN: Duration = Duration::from_mins(10);

/// The gRPC proxies of all clusters.
pub struct Proxies {
    /// A client without retries, so that no write is sent late.
    client: Client,
    manager: &'static str,
    deployments: WatchCache<Deployment>,
    /// The last update of each cluster, by the UID of the EtcdCluster.
    applied: Mutex<HashMap<String, Applied>>,
}

/// The last update of the proxies of one cluster.
struct Applied {
    /// The digest of the applied objects.
    digest: String,
    at: Instant,
    deployment: Identity,
}

/// The UID and the generation of a Deployment. The generation grows with each change of its spec.
type Identity = (Option<String>, Option<i64>);

/// What should happen to the proxies of a cluster.
enum Wanted {
    Keep,
    Remove,
    Run(Box<Objects>),
}

impl Proxies {
    /// The proxies of the clusters that this operator manages.
    pub fn new(operator: &Operator) -> Self {
        Self {
            client: operator.client_without_retry.clone(),
            manager: operator.name,
            deployments: WatchCache::default(),
            applied: Mutex::default(),
        }
    }

    /// Watches the Deployments of the proxies. A change of a Deployment requests a reconcile of its EtcdCluster.
    #[must_use]
    pub fn watch(&self, controllers: Controllers<EtcdCluster>) -> Controllers<EtcdCluster> {
        let labels = format!("{LABEL_APP}={APP_GRPC_PROXY},{LABEL_CLUSTER}");
        let config = watcher::Config::default().labels(&labels);
        controllers.children(&config, &self.deployments, |_, _| {})
    }

    /// Updates the proxies of a cluster. Returns the notices, and the maximum time until the next reconcile.
    pub async fn reconcile(&self, cluster: &EtcdCluster) -> (Vec<Notice>, Option<Duration>) {
        let updated = tokio::time::timeout(DEADLINE, Box::pin(self.update(cluster))).await;
        match updated.unwrap_or(Err(Error::TimedOut)) {
            Ok(notice) => {
                let has_proxies = cluster.spec.grpc_proxy.is_some();
                let again = has_proxies.then_some(REAPPLY);
                (notice.into_iter().collect(), again)
            }
            Err(error) => {
                let text = Chain(&error).to_string();
                let notice = Notice::warning(error.reason(), "UpdateGrpcProxy", text);
                (vec![notice], Some(RETRY))
            }
        }
    }

    async fn update(&self, cached: &EtcdCluster) -> Result<Option<Notice>, Error> {
        let running = self.running(cached);
        let is_without = cached.spec.grpc_proxy.is_none();
        if is_without && running.as_ref().is_none_or(Vec::is_empty) {
            return Ok(None);
        }
        let is_due = match self.wanted(cached).await? {
            Wanted::Keep => false,
            Wanted::Remove => true,
            Wanted::Run(objects) => self.is_due(cached, &objects.digest(), running.as_deref()),
        };
        if !is_due {
            return Ok(None);
        }
        // Invariant 33: the cached EtcdCluster only decides whether this read is needed.
        let since = Instant::now();
        let Some(cluster) = self.read(cached).await? else {
            return Ok(None);
        };
        let writes = Writes {
            client: &self.client,
            manager: self.manager,
            cluster: &cluster,
            since,
        };
        match self.wanted(&cluster).await? {
            Wanted::Keep => Ok(None),
            Wanted::Remove => {
                let text = "deleted the gRPC proxies, because the spec has no grpcProxy";
                let notice = Notice::change("GrpcProxyDeleted", "UpdateGrpcProxy", text);
                Ok(writes.delete_all().await?.then_some(notice))
            }
            Wanted::Run(objects) => {
                let written = writes.apply_all(&objects).await?;
                self.record(&cluster, objects.digest(), &written.deployment);
                let text = format!("applied {}", written.changed.join(", "));
                let notice = Notice::change("GrpcProxyApplied", "UpdateGrpcProxy", text);
                Ok((!written.changed.is_empty()).then_some(notice))
            }
        }
    }

    /// The Deployments of the cluster in the cache. `None` if the cache may be outdated.
    fn running(&self, cluster: &EtcdCluster) -> Option<Vec<Deployment>> {
        let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
        let uid = cluster.uid().unwrap_or_default();
        let mut found = self.deployments.get((namespace.as_str(), name.as_str()))?;
        found.retain(|one| apply::is_owned(one.meta(), &uid));
        Some(found)
    }

    async fn wanted(&self, cluster: &EtcdCluster) -> Result<Wanted, Error> {
        let run = match plan(cluster) {
            Plan::Keep => return Ok(Wanted::Keep),
            Plan::Remove => return Ok(Wanted::Remove),
            Plan::Run(run) => run,
        };
        let secrets = SecretNames::of(cluster, run.proxy);
        let digest = match &secrets {
            Some(names) => Some(self.digest(cluster, &run, names).await?),
            None => None,
        };
        let certificates = secrets.as_ref().zip(digest.as_deref());
        Ok(Wanted::Run(Box::new(objects(cluster, &run, certificates))))
    }

    /// Reads the Secrets, and computes the digest of their certificates.
    async fn digest(
        &self,
        cluster: &EtcdCluster,
        run: &Run<'_>,
        names: &SecretNames,
    ) -> Result<String, Error> {
        let client = self.secret(cluster, &names.client).await?;
        let server = if names.server == names.client {
            client.clone()
        } else {
            self.secret(cluster, &names.server).await?
        };
        let host = host(cluster, run.proxy);
        digest((&host, &run.version), &client, &server).map_err(Error::Certificates)
    }

    async fn secret(&self, cluster: &EtcdCluster, name: &str) -> Result<Secret, Error> {
        let namespace = cluster.namespace().unwrap_or_default();
        let secrets = Api::<Secret>::namespaced(self.client.clone(), &namespace);
        let found = secrets.get_opt(name).await;
        let found = found.map_err(|source| unreadable(&format!("Secret {name}"), source))?;
        found.ok_or_else(|| {
            let text = format!("Secret {name} does not exist: create it or correct the name");
            Error::Certificates(text)
        })
    }

    /// The EtcdCluster in the API server. `None` if it was deleted.
    async fn read(&self, cached: &EtcdCluster) -> Result<Option<EtcdCluster>, Error> {
        let namespace = cached.namespace().unwrap_or_default();
        let clusters = Api::<EtcdCluster>::namespaced(self.client.clone(), &namespace);
        let name = cached.name_any();
        let found = clusters.get_opt(&name).await;
        let found = found.map_err(|source| unreadable(&format!("EtcdCluster {name}"), source))?;
        Ok(found.filter(|found| found.metadata.uid == cached.metadata.uid))
    }

    /// True if the objects must be applied: they differ from the last update, the Deployment was changed or deleted, or
    /// the last update is too old.
    fn is_due(&self, cluster: &EtcdCluster, digest: &str, running: Option<&[Deployment]>) -> bool {
        let uid = cluster.uid().unwrap_or_default();
        let applied = self.applied.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(last) = applied.get(&uid) else {
            return true;
        };
        let is_as_applied =
            |all: &[Deployment]| all.iter().any(|one| identity(one) == last.deployment);
        last.digest != digest
            || last.at.elapsed() >= REAPPLY
            || running.is_some_and(|all| !is_as_applied(all))
    }

    fn record(&self, cluster: &EtcdCluster, digest: String, deployment: &Deployment) {
        let uid = cluster.uid().unwrap_or_default();
        let mut applied = self.applied.lock().unwrap_or_else(PoisonError::into_inner);
        applied.retain(|_, one| one.at.elapsed() < FORGOTTEN);
        let now = Applied {
            digest,
            at: Instant::now(),
            deployment: identity(deployment),
        };
        applied.insert(uid, now);
    }
}

fn identity(deployment: &Deployment) -> Identity {
    let metadata = &deployment.metadata;
    (metadata.uid.clone(), metadata.generation)
}

/// Runs the reconciler of EtcdClusters, and then updates the proxies of the same EtcdCluster. A failure of one part
/// does not stop the other part.
pub struct WithProxies<R> {
    clusters: Arc<R>,
    proxies: Proxies,
}

impl<R> WithProxies<R> {
    /// Combines the reconciler of EtcdClusters with the proxies.
    pub fn new(clusters: Arc<R>, proxies: Proxies) -> Self {
        Self { clusters, proxies }
    }
}

impl<R: Reconcile<Object = EtcdCluster>> Reconcile for WithProxies<R> {
    type Object = EtcdCluster;
    type Error = R::Error;
    const MANAGES: bool = R::MANAGES;

    async fn reconcile(&self, cluster: Arc<EtcdCluster>) -> Result<Done, R::Error> {
        let done = self.clusters.reconcile(Arc::clone(&cluster)).await;
        let (notices, again) = self.proxies.reconcile(&cluster).await;
        let mut done = done?;
        done.notices.extend(notices);
        done.requeue = done.requeue.into_iter().chain(again).min();
        Ok(done)
    }
}
