//! Reconciles the proxies after each reconcile of their EtcdCluster.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::EtcdCluster;
use api::cluster::TlsPolicy;
use api::names::{APP_GRPC_PROXY, LABEL_APP, LABEL_CLUSTER};
use api::problem::Chain;
use futures::FutureExt;
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
use crate::writes::{Identities, Writes, Written, identity, title, unreadable};

/// Interval of the checks of the Secrets and the objects. Of the objects, only the Deployment is watched.
const CHECK: Duration = Duration::from_mins(1);
/// Minimum pause before a failed update is retried.
const RETRY: Duration = Duration::from_secs(10);
/// The pause after a failed update is at least the duration of the update times this number. Even if each update times
/// out, updates of proxies therefore delay the reconciles of the members for less than a tenth of the time.
const PAUSE_RATIO: u32 = 10;
/// The record of a cluster may be dropped if the spec has had no proxies for this time.
const FORGOTTEN: Duration = Duration::from_mins(10);

/// The gRPC proxies of all clusters.
pub struct Proxies {
    /// A client without retries, so that no write is sent late.
    client: Client,
    manager: &'static str,
    deployments: WatchCache<Deployment>,
    /// The records of clusters with proxies, by the UID of the EtcdCluster.
    records: Mutex<HashMap<String, Record>>,
}

/// What this process knows about the proxies of one cluster.
struct Record {
    /// The last reconcile with `spec.grpcProxy`.
    seen: Instant,
    applied: Option<Applied>,
    failed: Option<Failed>,
}

/// The last successful update.
struct Applied {
    /// The digest of the applied objects.
    digest: String,
    /// The digest of the certificates; `None` without TLS.
    certificates: Option<String>,
    at: Instant,
    objects: Identities,
}

/// The last failed update.
struct Failed {
    notice: Notice,
    retry_at: Instant,
    /// The generation of the EtcdCluster at the failure. After a change of the spec, the update is retried at once.
    generation: Option<i64>,
}

/// The plan for the proxies of a cluster, with the objects that it needs.
enum Wanted {
    Keep,
    Remove,
    /// The objects, and the digest of the certificates.
    Run(Box<Objects>, Option<String>),
}

impl Proxies {
    /// The proxies of the clusters that this operator manages.
    pub fn new(operator: &Operator) -> Self {
        Self {
            client: operator.client_without_retry.clone(),
            manager: operator.name,
            deployments: WatchCache::default(),
            records: Mutex::default(),
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
        let begun = Instant::now();
        let has_proxies = cluster.spec.grpc_proxy.is_some();
        if has_proxies {
            self.edit(cluster, |record| record.seen = begun);
        }
        if let Some((notice, pause)) = self.pausing(cluster, begun) {
            return (vec![notice], Some(pause));
        }
        let updated = tokio::time::timeout(DEADLINE, self.update(cluster).boxed()).await;
        match updated.unwrap_or(Err(Error::TimedOut)) {
            Ok(notice) => (notice.into_iter().collect(), has_proxies.then_some(CHECK)),
            Err(error) => {
                let text = Chain(&error).to_string();
                let notice = Notice::warning(error.reason(), "UpdateGrpcProxy", text);
                let pause = pause(begun.elapsed());
                self.edit(cluster, |record| {
                    // The failed update may have changed some objects, so the next update applies all objects.
                    record.applied = None;
                    record.failed = Some(Failed {
                        notice: notice.clone(),
                        retry_at: Instant::now() + pause,
                        generation: cluster.metadata.generation,
                    });
                });
                (vec![notice], Some(pause))
            }
        }
    }

    /// The notice of the last failed update, and the time until its retry. `None` if the update may be tried.
    fn pausing(&self, cluster: &EtcdCluster, now: Instant) -> Option<(Notice, Duration)> {
        let records = self.records();
        let failed = records.get(&uid(cluster))?.failed.as_ref()?;
        let is_same = failed.generation == cluster.metadata.generation;
        let pause = failed.retry_at.checked_duration_since(now)?;
        is_same.then(|| (failed.notice.clone(), pause))
    }

    async fn update(&self, cached: &EtcdCluster) -> Result<Option<Notice>, Error> {
        let running = self.running(cached);
        let is_without = cached.spec.grpc_proxy.is_none();
        // If no Deployment exists, a record means that other objects were created before the API server rejected the
        // Deployment. The operator must delete these objects.
        if is_without && running.as_ref().is_none_or(Vec::is_empty) && !self.has_record(cached) {
            return Ok(None);
        }
        let is_due = match plan(cached) {
            Plan::Keep => false,
            Plan::Remove => true,
            Plan::Run(run) => self.is_due(cached, &run, running.as_deref()),
        };
        if !is_due {
            return Ok(None);
        }
        // Invariant 33: the cached EtcdCluster decides only whether this read from the API server is needed.
        let since = Instant::now();
        let Some(cluster) = self.read(cached).await? else {
            return Ok(None);
        };
        let wanted = self.wanted(&cluster).await?;
        let last = match &wanted {
            Wanted::Run(objects, _) => self.last(&cluster, &objects.digest()),
            Wanted::Keep | Wanted::Remove => Identities::new(),
        };
        let writes = Writes {
            client: &self.client,
            manager: self.manager,
            cluster: &cluster,
            since,
            last,
        };
        match wanted {
            Wanted::Keep => Ok(None),
            Wanted::Remove => {
                let text = "deleted the gRPC proxies, because the spec has no grpcProxy";
                let notice = Notice::change("GrpcProxyDeleted", "UpdateGrpcProxy", text);
                let is_deleted = writes.delete_all().await?;
                self.records().remove(&uid(&cluster));
                Ok(is_deleted.then_some(notice))
            }
            Wanted::Run(objects, certificates) => {
                let Written {
                    objects: found,
                    changed,
                } = writes.apply_all(&objects).await?;
                let applied = Applied {
                    digest: objects.digest(),
                    certificates,
                    at: Instant::now(),
                    objects: found,
                };
                self.edit(&cluster, |record| record.applied = Some(applied));
                let text = format!("applied {}", changed.join(", "));
                let notice = Notice::change("GrpcProxyApplied", "UpdateGrpcProxy", text);
                Ok((!changed.is_empty()).then_some(notice))
            }
        }
    }

    /// The Deployments of the cluster in the cache. `None` if the cache may be outdated.
    fn running(&self, cluster: &EtcdCluster) -> Option<Vec<Deployment>> {
        let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
        let uid = uid(cluster);
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
        let objects = objects(cluster, &run, certificates);
        Ok(Wanted::Run(Box::new(objects), digest))
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
            let tls = cluster.spec.tls.as_ref();
            let remedy = if tls.is_some_and(TlsPolicy::is_written_by_operator) {
                "wait until the operator creates it, or correct the cause that Degraded reports"
            } else {
                "create it or correct the name"
            };
            Error::Certificates(format!("Secret {name} does not exist: {remedy}"))
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

    /// True if the objects must be checked: the spec or the status needs other objects than the last update, the
    /// Deployment was changed or deleted, or the last update is older than `CHECK`. Reads no Secrets, so a changed
    /// certificate takes effect only after `CHECK`.
    fn is_due(&self, cluster: &EtcdCluster, run: &Run<'_>, running: Option<&[Deployment]>) -> bool {
        let records = self.records();
        let last = records.get(&uid(cluster));
        let Some(last) = last.and_then(|record| record.applied.as_ref()) else {
            return true;
        };
        let secrets = SecretNames::of(cluster, run.proxy);
        let certificates = secrets.as_ref().zip(last.certificates.as_deref());
        let is_as_applied =
            |one: &Deployment| last.objects.get(&title(one)) == Some(&identity(one));
        last.at.elapsed() >= CHECK
            || last.digest != objects(cluster, run, certificates).digest()
            || running.is_some_and(|all| !all.iter().any(is_as_applied))
    }

    /// The identities of the objects after the last update. Empty if that update had another digest.
    fn last(&self, cluster: &EtcdCluster, digest: &str) -> Identities {
        let records = self.records();
        let last = records.get(&uid(cluster));
        let last = last.and_then(|record| record.applied.as_ref());
        let last = last.filter(|last| last.digest == digest);
        last.map(|last| last.objects.clone()).unwrap_or_default()
    }

    fn has_record(&self, cluster: &EtcdCluster) -> bool {
        self.records().contains_key(&uid(cluster))
    }

    fn records(&self) -> MutexGuard<'_, HashMap<String, Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the record of a cluster. Drops old records before it adds a record.
    fn edit(&self, cluster: &EtcdCluster, change: impl FnOnce(&mut Record)) {
        let (uid, now) = (uid(cluster), Instant::now());
        let mut records = self.records();
        if !records.contains_key(&uid) {
            records.retain(|_, one| now.duration_since(one.seen) < FORGOTTEN);
        }
        change(records.entry(uid).or_insert(Record {
            seen: now,
            applied: None,
            failed: None,
        }));
    }
}

fn uid(cluster: &EtcdCluster) -> String {
    cluster.uid().unwrap_or_default()
}

/// The pause after a failed update that took this time.
fn pause(took: Duration) -> Duration {
    RETRY.max(took.saturating_mul(PAUSE_RATIO))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_after_failure_is_ten_times_as_long_as_attempt() {
        assert_eq!(pause(Duration::ZERO), RETRY);
        assert_eq!(pause(Duration::from_secs(1)), Duration::from_secs(10));
        assert_eq!(pause(DEADLINE), Duration::from_secs(100));
    }
}
