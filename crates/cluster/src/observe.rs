//! Observes a cluster: reads Kubernetes objects first, and then calls etcd. Changes nothing.
//!
//! The operator adds a member to etcd before it creates the member's pod, and reads the pods before the member list. If
//! the list lacks the member of an observed pod, that member was therefore removed. A list that the operator did not
//! get counts as unknown, not as empty (invariant 1).

pub mod access;
mod certificates;
mod children;
mod clock;
mod deadline;
mod elsewhere;
mod ending;
mod pods;
mod pulse;
mod recovery;
mod sidecars;
mod switch;
mod tls;
mod unlabelled;
mod unwatched;
pub mod watched;

pub use children::{disk, member_service};
pub use pods::pod;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use api::EtcdCluster;
use api::cluster::{MemberRole, MemberStatus};
use api::names;
use etcd::{Access, Alarm, Etcd, Status};
use futures::future::join_all;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use member::Members;
use member::tls::ClusterTls;
use runtime::credentials::ClusterAuth;
use runtime::endpoints::EndpointRule;
use runtime::image::OwnImage;
use runtime::watched::Watched;

use crate::certificates::Certificates;
use crate::objects::Objects;
use crate::plan::diff;
use crate::plan::effective::Effective;
use crate::snapshot::{BeforeChange, Intent, Observed, Role, Seen};
use crate::tls::Tls;
use crate::upkeep::Upkeep;

/// Deadline for reading all Kubernetes objects of a cluster.
const DEADLINE: Duration = Duration::from_secs(10);

/// If a linearizable read takes longer than this, the operator treats etcd as overloaded.
const SLOW: Duration = Duration::from_millis(500);

/// Text before the name of an alarm in a member's status, as in `memberID:1 alarm:NOSPACE`.
const ALARM: &str = "alarm:";

/// Deadline for calls to a member whose pod is not ready. For a ready member, the client's deadline applies.
const IMPATIENCE: Duration = Duration::from_millis(250);

/// Why an observation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server rejected the request or could not be reached.
    #[error("cannot read {what}")]
    Read {
        /// The kind of Kubernetes object whose read failed.
        what: &'static str,
        /// The error of the Kubernetes client.
        #[source]
        source: kube::Error,
    },
    /// The API server did not answer in time.
    #[error("the API server did not answer within {} seconds", DEADLINE.as_secs())]
    Deadline,
}

/// The parts of the Kubernetes objects that the plan and the calls to etcd need, small enough for a cache.
#[derive(Clone, Debug)]
pub struct KubeSnapshot {
    /// The EtcdCluster as the operator read it.
    pub cluster: EtcdCluster,
    /// The spec in effect: the user's spec, with the TLS settings that the members use at present.
    pub effective: Effective,
    /// The client URL of each member, by name.
    pub urls: BTreeMap<String, String>,
    /// The address of each member's health listener (`--listen-metrics-urls`), by the name of the member.
    health: BTreeMap<String, String>,
    /// The certificates of the cluster. They are kept in memory only.
    pub tls: ClusterTls,
    /// The operator's credentials for etcd. They are kept in memory only.
    pub auth: ClusterAuth,
    without_etcd: Observed,
}

impl Objects {
    /// Extracts the parts that the operator needs. `effective` contains the spec in effect.
    pub fn snapshot(self, effective: Effective) -> KubeSnapshot {
        KubeSnapshot {
            urls: switch::client_urls(&self.pods, effective.cluster()),
            health: pulse::addresses(&self.pods),
            without_etcd: without_etcd(&self, &effective),
            effective,
            cluster: self.cluster,
            tls: self.tls,
            auth: ClusterAuth::default(),
        }
    }
}

impl KubeSnapshot {
    /// The credentials and TLS settings for calls to the members. The error says why the operator cannot connect.
    pub fn access(&self) -> Result<Access, String> {
        // The operator needs no client certificate if all client URLs are plain, for example while TLS is being
        // enabled.
        let needed =
            self.urls.is_empty() || self.urls.values().any(|url| url.starts_with("https:"));
        let mut access = match self.tls.access() {
            Err(_) if !needed => Access::default(),
            access => access.map_err(|fault| fault.message)?,
        };
        let generated = self.without_etcd.certificates.rule.is_some();
        if let Some(tls) = access.tls.as_mut().filter(|_| generated) {
            // Invariant 21: the operator logs in with its certificate, and this log-in needs no quorum. etcd has the
            // user `OPERATOR_USER` since authentication was enabled.
            tls.user = Some(names::OPERATOR_USER.to_owned());
        }
        Ok(Access {
            credentials: self.auth.credentials(),
            ..access
        })
    }

    /// Sets the rule that decides which URLs of external members the operator may call.
    pub fn limit_join(&mut self, rule: EndpointRule) {
        self.without_etcd.join_rule = rule;
    }

    /// The token of the cluster that a recovery is creating; `None` if no recovery is in progress.
    pub fn seeds_token(&self) -> Option<&str> {
        let record = self.without_etcd.recovery.in_progress()?;
        Some(record.token.as_str())
    }
}

/// Reads the Kubernetes objects of a cluster; `None` if the EtcdCluster no longer exists. After this read, the caches
/// in `watched` return no older objects.
pub async fn objects(
    client: &Client,
    watched: &Watched,
    (namespace, name): (&str, &str),
) -> Result<Option<Objects>, Error> {
    let read = async {
        let of_cluster = ListParams::default().labels(&names::cluster_selector(name));
        let clusters = Api::<EtcdCluster>::namespaced(client.clone(), namespace);
        let pods = Api::<Pod>::namespaced(client.clone(), namespace);
        let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace);
        let services = Api::<Service>::namespaced(client.clone(), namespace);
        let budgets = Api::<PodDisruptionBudget>::namespaced(client.clone(), namespace);
        let budget_name = names::disruption_budget(name);
        let read = |what| move |source| Error::Read { what, source };
        // Another operator process may write at the same time, in this order: status, annotation on the Service, PVC,
        // pod. Services and pods are read first here, so the later reads return the PVC and the status that were
        // written before each pod.
        let services = services.list(&of_cluster).await;
        let services = services.map_err(read("services"))?;
        let pods = pods.list(&of_cluster).await.map_err(read("pods"))?;
        let (cluster, claims, budget) = tokio::join!(
            clusters.get_opt(name),
            claims.list(&of_cluster),
            budgets.get_opt(&budget_name)
        );
        let claims = claims.map_err(read("PersistentVolumeClaims"))?;
        let budget = budget.map_err(read("the PodDisruptionBudget"))?;
        let Some(mut cluster) = cluster.map_err(read("the EtcdCluster"))? else {
            return Ok(None);
        };
        watched.record(&cluster, (&services, &pods, &claims), budget.as_ref());
        let (mut services, mut pods, mut claims) = (services.items, pods.items, claims.items);
        // The operator never reads the managed fields, and the cache is smaller without them.
        cluster.metadata.managed_fields = None;
        let found = (&mut pods, &mut claims, &mut services);
        let found = unlabelled::complete(client, &cluster, found).await;
        found.map_err(read("objects that lost their labels"))?;
        let (objects, policy) = tokio::join!(
            unwatched::complete(client, &cluster, (pods, claims, services)),
            watched.read_policy(client, &cluster)
        );
        let policy = policy.map_err(read("the NetworkPolicy"))?;
        Ok(Some(Objects {
            budget,
            policy,
            ..objects?
        }))
    };
    tokio::time::timeout(DEADLINE, Box::pin(read))
        .await
        .map_err(|_| Error::Deadline)?
}

/// Observes the Kubernetes objects of a cluster, and the answers of its running members. The seed of a recovery has its
/// own client, because the seed would not answer calls with a login token of the old cluster.
pub async fn observe((etcd, seed): (&dyn Etcd, &dyn Etcd), snapshot: &KubeSnapshot) -> Observed {
    let mut observed = unanswered(snapshot);
    if let Err(why) = snapshot.access() {
        observed.members = Seen::Unknown(why);
        return observed;
    }
    let mut asked = asked(&observed);
    asked.retain(|name| snapshot.urls.contains_key(name));
    if !asked.is_empty() || !elsewhere::via(&observed).is_empty() {
        ask(etcd, snapshot, asked, &mut observed).await;
        elsewhere::ask(etcd, &mut observed).await;
    }
    recovery::ask((etcd, seed), snapshot, &mut observed).await;
    observed
}

/// The observation before any member has answered.
pub fn unanswered(snapshot: &KubeSnapshot) -> Observed {
    let mut observed = snapshot.without_etcd.clone();
    observed.tls = tls::seen(snapshot, jiff::Timestamp::now());
    certificates::expect(&mut observed);
    observed
}

/// Reads the image of the operator, which the planner needs for the seed of a recovery.
pub async fn operator_image(image: &OwnImage, observed: &mut Observed) {
    if observed.recovery.in_progress().is_some() {
        observed.operator_image = match image.get().await {
            Ok(image) => Seen::Known(image.clone()),
            Err(why) => Seen::Unknown(why),
        };
    }
}

/// Reads the members' data hashes at one revision, as requested by the plan.
pub async fn hashes(
    etcd: &dyn Etcd,
    snapshot: &KubeSnapshot,
    observed: &mut Observed,
    revision: i64,
) {
    let answering = observed.answers().filter(|(_, it)| !it.is_learner);
    let asked = answering.filter_map(|(name, _)| Some((name.clone(), snapshot.urls.get(name)?)));
    let answers = asked.map(async |(name, url)| (name, seen(etcd.hash(url, revision).await)));
    observed.hashes = join_all(answers).await.into_iter().collect();
}

async fn ask(
    etcd: &dyn Etcd,
    snapshot: &KubeSnapshot,
    asked: Vec<String>,
    observed: &mut Observed,
) {
    let url = |name: &String| snapshot.urls[name].clone();
    let via: Vec<String> = asked.iter().map(url).collect();
    let now = jiff::Timestamp::now();
    let own = asked.iter().zip(&via).map(|(name, url)| {
        let health = snapshot.health.get(name).map(String::as_str);
        pulse::status(etcd, url, (&observed.pods[name], now), health)
    });
    let own = async {
        join_all(own)
            .await
            .into_iter()
            .unzip::<_, _, Vec<_>, Vec<_>>()
    };
    let everybody = [via.as_slice(), elsewhere::via(observed)].concat();
    let list = etcd.members(&everybody);
    let list = timed(tokio::time::timeout(recovery::patience(observed), list));
    let joined = !elsewhere::via(observed).is_empty();
    let too_few = |own: &(Vec<_>, Vec<_>)| !joined && deadline::too_few(observed, &asked, &own.0);
    let (list, (statuses, pulses)) = deadline::both(list, own, too_few).await;
    let (members, took) = list.map_or((None, Duration::MAX), |(members, took)| {
        (members.ok(), took)
    });
    let members = members.unwrap_or_else(|| Err(etcd::Error::Timeout(via.join(", "))));
    if let Err(etcd::Error::AccessDenied(why)) = &members {
        observed.access.refused = Some(why.clone());
    }
    observed.members = seen(members);
    let pulses = asked.iter().cloned().zip(pulses);
    observed.pulses = pulses
        .filter_map(|(name, pulse)| Some((name, pulse?)))
        .collect();
    observed.statuses = asked
        .into_iter()
        .zip(statuses.into_iter().map(seen))
        .collect();
    observed.upkeep.slow = took > SLOW;
    access::ask(etcd, &via, observed).await;
    observed.upkeep.alarms = alarms(etcd, &via, observed).await;
}

/// Reads the alarms only if a member's status reports an alarm. A healthy cluster therefore needs no additional call.
async fn alarms(etcd: &dyn Etcd, via: &[String], observed: &Observed) -> Seen<Vec<Alarm>> {
    let mut told = observed.answers();
    if !told.any(|(_, status)| status.errors.iter().any(|error| error.contains(ALARM))) {
        return Seen::Known(Vec::new());
    }
    seen(etcd.alarms(via).await.map(|mut alarms| {
        alarms.sort();
        alarms
    }))
}

async fn timed<T>(call: impl Future<Output = T>) -> (T, Duration) {
    let since = Instant::now();
    (call.await, since.elapsed())
}

/// Reads the status of one member. If the member's pod is not ready, the deadline is short, because etcd may not listen
/// at this address yet.
async fn status(etcd: &dyn Etcd, url: &str, ready: bool) -> Result<Status, etcd::Error> {
    if ready {
        return etcd.status(url).await;
    }
    let answer = tokio::time::timeout(IMPATIENCE, etcd.status(url)).await;
    answer.unwrap_or_else(|_| Err(etcd::Error::Timeout(url.to_owned())))
}

fn seen<T>(answer: Result<T, etcd::Error>) -> Seen<T> {
    match answer {
        Ok(value) => Seen::Known(value),
        Err(error) => Seen::Unknown(error.to_string()),
    }
}

/// The names of the members to call, ready members first. Their pods have an address and the token of this cluster, and
/// are not terminating.
///
/// A member whose Service is closed (has no endpoints) is called only if it is a learner: an answer shows that the
/// learner's requests to other members are done. A bootstrap member with a closed Service cannot answer, and waiting
/// for its answer would delay its endpoints.
fn asked(observed: &Observed) -> Vec<String> {
    let token = observed.intent.as_ref().map(|intent| &intent.token);
    let is_closed = |name: &String| {
        let service = observed.services.get(name);
        service.is_some_and(|service| service.closed)
    };
    // True for a pod of a cluster that is being adopted, until the operator has set the pod's annotations.
    let is_taken_over = |pod: &crate::snapshot::Pod| {
        pod.owned && pod.token.is_none() && observed.cluster_id.is_some()
    };
    let worth = observed.pods.iter().filter(|(name, pod)| {
        pod.addressed
            && pod.stays()
            && (pod.token.as_ref() == token || is_taken_over(pod))
            && (!is_closed(name) || pod.role == Some(Role::Learner))
    });
    let mut names: Vec<(bool, String)> = worth
        .map(|(name, pod)| (!pod.ready, name.clone()))
        .collect();
    names.sort();
    names.into_iter().map(|(_, name)| name).collect()
}

/// Converts the Kubernetes objects to an observation without answers of etcd.
pub fn without_etcd(objects: &Objects, effective: &Effective) -> Observed {
    let cluster = effective.cluster();
    let Objects {
        pods,
        claims,
        services,
        budget,
        ..
    } = objects;
    let mut certificates = Certificates::new(cluster, &objects.secrets, pods);
    certificates.issued.clone_from(&objects.issuance);
    let name = cluster.name_any();
    let status = cluster.status.clone().unwrap_or_default();
    let recovery = recovery::recorded(cluster, &status);
    let intent = status.bootstrap.map(|bootstrap| Intent {
        token: bootstrap.token,
        members: bootstrap.members.into_iter().collect(),
    });
    let namespace = cluster.namespace().unwrap_or_default();
    let token = intent.as_ref().map(|intent| intent.token.clone());
    let token = token.unwrap_or_default();
    let builder = Members::of(cluster, &namespace, &token, status.cluster_id.as_deref());
    let uid = cluster.uid().unwrap_or_default();
    let annotation = |key: &str| cluster.annotations().get(key).cloned();
    let mut observed = Observed {
        cluster: name,
        resource_version: cluster.resource_version().unwrap_or_default(),
        deleting: cluster.metadata.deletion_timestamp.is_some(),
        claimed_by: annotation(names::ANNOTATION_RESTORE),
        intent,
        cluster_id: status.cluster_id.as_ref().and_then(|id| id.parse().ok()),
        reported_voters: voters(&status.member_details),
        reported_version: status.current_version,
        pods: BTreeMap::new(),
        disks: BTreeMap::new(),
        services: BTreeMap::new(),
        strangers: Vec::new(),
        shared: diff::shared(&builder, services, budget.as_ref(), &uid),
        members: Seen::Unknown("no member runs".to_owned()),
        join: elsewhere::endpoints(cluster),
        join_rule: EndpointRule::default(),
        elsewhere: BTreeMap::new(),
        statuses: BTreeMap::new(),
        pulses: BTreeMap::new(),
        hashes: BTreeMap::new(),
        recovery,
        before_change: BeforeChange {
            record: status.before_change,
            backup: status.backup_for_changes,
            request: status.backup_request,
            waiver: annotation(names::ANNOTATION_SKIP_BACKUP),
        },
        upkeep: Upkeep {
            record: status.defragmentation,
            raft_log: status.raft_log,
            ..Upkeep::default()
        },
        tls: Tls::default(),
        access: crate::access::Access::default(),
        tls_rollout: Some(effective.tls_rollout().clone()),
        certificates: certificates.and_of_others(&objects.tls),
        clock: objects.clock,
        operator_image: Seen::Unknown("the image of the operator was not read".to_owned()),
    };
    let is_labelled = |metadata: &ObjectMeta| {
        let member = metadata.name.as_deref().unwrap_or_default();
        unlabelled::is_labelled(metadata, &cluster.name_any(), member)
    };
    for pod in pods {
        match children::belongs(&pod.metadata, &uid) {
            Some(owned) => {
                let labelled = is_labelled(&pod.metadata) && unlabelled::is_led_to(&pod.metadata);
                let seen = pods::pod(pod, &cluster.spec, owned && labelled);
                observed.pods.insert(pod.name_any(), seen);
            }
            None => observed.strangers.push(format!("pod {}", pod.name_any())),
        }
    }
    for claim in claims {
        match children::claim_belongs(&claim.metadata, cluster) {
            Some(owned) => {
                let labelled = is_labelled(&claim.metadata);
                // Invariant 35: a retained PVC has no owner, so `owned` is inverted if the spec retains volumes.
                let owned = owned != cluster.spec.retains_volumes();
                let seen = children::disk(claim, owned && labelled);
                observed.disks.insert(claim.name_any(), seen);
            }
            None => observed
                .strangers
                .push(format!("PersistentVolumeClaim {}", claim.name_any())),
        }
    }
    for service in services {
        if let Some(service_of) = children::member_service(&builder, service, &uid) {
            observed.services.insert(service.name_any(), service_of);
        }
    }
    certificates::differ(&mut observed);
    observed
}

fn voters(members: &[MemberStatus]) -> BTreeSet<String> {
    let vote = |member: &&MemberStatus| !matches!(member.role, None | Some(MemberRole::Learner));
    let voters = members.iter().filter(vote);
    voters.map(|member| member.name.clone()).collect()
}
