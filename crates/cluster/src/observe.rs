//! Reads only: Kubernetes objects first, then etcd, each call with a deadline, into one [`Observed`].
//!
//! The order matters. A pod is made after its member was added; so a pod that was seen and whose member is not
//! in the list read afterwards belongs to a member that was removed. What etcd does not answer is unknown
//! (invariant 1); without the Kubernetes objects there is no observation at all.

pub mod access;
mod certificates;
mod children;
mod clock;
mod company;
mod elsewhere;
mod ending;
mod patience;
mod pods;
mod pulse;
mod recovery;
mod switch;
mod tls;
mod unlabelled;

pub(crate) use children::is_of_others;
pub use children::{disk, member_service};
pub use pods::pod;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use api::EtcdCluster;
use api::cluster::{MemberRole, RecoveryPhase};
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
use runtime::image::OwnImage;

use crate::certificates::Certificates;
use crate::clock::ApiServerClock;
use crate::objects::Objects;
use crate::plan::effective::Effective;
use crate::snapshot::{Intent, Observed, Role, Seen};
use crate::switch::TlsRollout;
use crate::tls::Tls;
use crate::upkeep::Upkeep;

/// How long reading the Kubernetes objects may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// A read that a quorum confirms and that takes longer than this says that etcd has no time to spare.
const SLOW: Duration = Duration::from_millis(500);

/// What an alarm is told with in a member's status: `memberID:1 alarm:NOSPACE`.
const ALARM: &str = "alarm:";

/// How long a member may take that is not ready; one that is has the client's own deadline.
const IMPATIENCE: Duration = Duration::from_millis(250);

/// Why there is no observation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused or could not be reached.
    #[error("cannot read {what}")]
    Read {
        /// What was asked for.
        what: &'static str,
        /// The answer.
        #[source]
        source: kube::Error,
    },
    /// The API server did not answer in time.
    #[error("the API server did not answer within {} seconds", DEADLINE.as_secs())]
    Deadline,
}

/// What of the objects is needed to ask etcd and to plan; small enough to be kept.
#[derive(Clone, Debug)]
pub struct Look {
    /// The object as it was read.
    pub cluster: EtcdCluster,
    /// The spec in effect.
    pub effective: Effective,
    /// Where each member's etcd is asked, by name.
    pub urls: BTreeMap<String, String>,
    /// Where each member's health is asked for, by name.
    health: BTreeMap<String, String>,
    /// The cluster's certificates. In memory only.
    pub tls: ClusterTls,
    /// What the operator logs in with. In memory only.
    pub auth: ClusterAuth,
    without_etcd: Observed,
}

impl Objects {
    /// Keeps what is needed of them, with the spec in effect.
    pub fn look(self, effective: Effective) -> Look {
        Look {
            urls: client_urls(&self.pods, effective.cluster()),
            health: pulse::addresses(&self.pods),
            without_etcd: without_etcd(&self, &effective),
            effective,
            cluster: self.cluster,
            tls: self.tls,
            auth: ClusterAuth::default(),
        }
    }
}

impl Look {
    /// How the members are reached; the reason when they cannot be.
    pub fn access(&self) -> Result<Access, String> {
        // While TLS is being switched on nobody needs it yet.
        let needed =
            self.urls.is_empty() || self.urls.values().any(|url| url.starts_with("https:"));
        let mut access = match self.tls.access() {
            Err(_) if !needed => Access::default(),
            access => access.map_err(|fault| fault.message)?,
        };
        let generated = self.without_etcd.certificates.rule.is_some();
        if let Some(tls) = access.tls.as_mut().filter(|_| generated) {
            // Invariant 21: made when authentication is turned on, so that the loss of a quorum locks nobody out.
            tls.user = Some(names::OPERATOR_USER.to_owned());
        }
        Ok(Access {
            credentials: self.auth.credentials(),
            ..access
        })
    }

    /// The token of the cluster that a recovery under way begins.
    pub fn seeds_token(&self) -> Option<&str> {
        let record = self.without_etcd.recovery.record.as_ref()?;
        (record.phase == RecoveryPhase::InProgress).then_some(record.token.as_str())
    }
}

/// Reads the Kubernetes objects; `None` when the cluster does not exist any more.
pub async fn objects(
    client: &Client,
    namespace: &str,
    name: &str,
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
        // In this order a second operator's work in between is never mistaken for a loss: the mark on a Service
        // is set before its pod is made, the claim is made before the pod, the intent is recorded before all.
        let mut services = services
            .list(&of_cluster)
            .await
            .map_err(read("services"))?
            .items;
        let mut pods = pods.list(&of_cluster).await.map_err(read("pods"))?.items;
        let (cluster, claims, budget) = tokio::join!(
            clusters.get_opt(name),
            claims.list(&of_cluster),
            budgets.get_opt(&budget_name)
        );
        let mut claims = claims.map_err(read("volume claims"))?.items;
        let budget = budget.map_err(read("the disruption budget"))?;
        let cluster = cluster.map_err(read("the EtcdCluster"))?;
        let Some(mut cluster) = cluster else {
            return Ok(None);
        };
        // It is kept, and nobody reads who manages which field.
        cluster.metadata.managed_fields = None;
        let found = (&mut pods, &mut claims, &mut services);
        let found = unlabelled::complete(client, &cluster, found).await;
        found.map_err(read("objects without labels"))?;
        let clock = clock::beside(client, &pods).await;
        let clock = clock.map_err(read("the time"))?;
        let started = switch::started(&cluster, &pods);
        // Which Secrets are read depends on how far a change of TLS is.
        let rollout = TlsRollout::of(&started, cluster.spec.tls.as_ref());
        let (at, next) = (rollout.at.as_ref(), rollout.next.as_ref());
        let next = next.and_then(|next| next.to.as_ref());
        let found = (&*pods, &*claims, &*services);
        let (tls, next_tls, generated) = tokio::join!(
            runtime::reach::cluster_tls(client, (namespace, name), at),
            runtime::reach::cluster_tls(client, (namespace, name), next),
            certificates::read(client, (&cluster, at), found)
        );
        let generated = generated.map_err(read("the certificates' Secrets"))?;
        Ok(Some(Objects {
            form: tls::running_form(&cluster, &pods),
            cluster,
            pods,
            claims,
            services,
            budget,
            secrets: generated.secrets,
            tls,
            next_tls,
            started,
            clock: ApiServerClock(generated.clock.or(clock)),
        }))
    };
    tokio::time::timeout(DEADLINE, Box::pin(read))
        .await
        .map_err(|_| Error::Deadline)?
}

/// The whole observation: what Kubernetes showed, and what the members that run answer. The seed of a recovery is asked
/// by its own client: it is another cluster, and keeps calls with a login of the one before.
pub async fn observe((etcd, seed): (&dyn Etcd, &dyn Etcd), look: &Look) -> Observed {
    let mut observed = unanswered(look);
    if let Err(why) = look.access() {
        observed.members = Seen::Unknown(why);
        return observed;
    }
    let mut asked = asked(&observed);
    asked.retain(|name| look.urls.contains_key(name));
    if !asked.is_empty() || !elsewhere::via(&observed).is_empty() {
        ask(etcd, look, asked, &mut observed).await;
        elsewhere::ask(etcd, &mut observed).await;
    }
    recovery::ask((etcd, seed), look, &mut observed).await;
    observed
}

/// The observation as long as no member has answered.
pub fn unanswered(look: &Look) -> Observed {
    let mut observed = look.without_etcd.clone();
    observed.tls = tls::seen(look, jiff::Timestamp::now());
    certificates::expect(&mut observed);
    observed
}

/// Reads the image of the operator, which the seed of a recovery needs.
pub async fn operator_image(image: &OwnImage, observed: &mut Observed) {
    let record = observed.recovery.record.as_ref();
    if record.is_some_and(|record| record.phase == RecoveryPhase::InProgress) {
        observed.operator_image = match image.get().await {
            Ok(image) => Seen::Known(image.clone()),
            Err(why) => Seen::Unknown(why),
        };
    }
}

/// The members' hashes of their data at one revision, for a plan that asked for them.
pub async fn hashes(etcd: &dyn Etcd, look: &Look, observed: &mut Observed, revision: i64) {
    let answering = observed.statuses.iter();
    let answering = answering.filter(|(_, seen)| seen.known().is_some_and(|it| !it.is_learner));
    let asked = answering.filter_map(|(name, _)| Some((name.clone(), look.urls.get(name)?)));
    let answers = asked.map(async |(name, url)| (name, seen(etcd.hash(url, revision).await)));
    observed.hashes = join_all(answers).await.into_iter().collect();
}

async fn ask(etcd: &dyn Etcd, look: &Look, asked: Vec<String>, observed: &mut Observed) {
    let via: Vec<String> = asked.iter().map(|name| look.urls[name].clone()).collect();
    let now = jiff::Timestamp::now();
    let own = asked.iter().zip(&via).map(|(name, url)| {
        let health = look.health.get(name).map(String::as_str);
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
    let too_few = |own: &(Vec<_>, Vec<_>)| !joined && patience::too_few(observed, &asked, &own.0);
    let (list, (statuses, pulses)) = patience::both(list, own, too_few).await;
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

/// The alarms: asked for when a member tells of one in its status, so that a cluster at rest costs nothing more.
async fn alarms(etcd: &dyn Etcd, via: &[String], observed: &Observed) -> Seen<Vec<Alarm>> {
    let mut told = observed.statuses.values().filter_map(Seen::known);
    if !told.any(|status| status.errors.iter().any(|error| error.contains(ALARM))) {
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

/// Where each pod's etcd is asked: at the pod's own address, which the API server tells. So the operator needs
/// neither DNS nor a Service's rules, and goes on while either is down or slow. That the right member answers is
/// seen by its ID, never by its address.
fn client_urls(pods: &[Pod], cluster: &EtcdCluster) -> BTreeMap<String, String> {
    let namespace = cluster.namespace().unwrap_or_default();
    let addresses = Members::of(cluster, &namespace, "", None).addresses();
    let url = |pod: &Pod| {
        let text = pod.status.as_ref()?.pod_ip.as_ref()?;
        let name = pod.name_any();
        let mut addresses = addresses.clone();
        if let Some(insists) = switch::insists_on_tls(pod) {
            addresses.client_tls = insists;
        }
        Some(match text.parse() {
            Ok(address) => addresses.client_url_at(address, &name),
            Err(_) => addresses.client_url(&name),
        })
    };
    let pods = pods.iter();
    pods.filter_map(|pod| Some((pod.name_any(), url(pod)?)))
        .collect()
}

/// One member's answer. Who is not ready is not waited for: it may have an address and not listen there yet.
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

/// The members worth asking: their pod has an address, nobody is ending it, and they belong to this cluster and
/// not to a bootstrap that was given up. Ready ones first. First members that cannot reach each other yet have
/// nothing to say, and waiting for them would delay what opens their Services. Learners that nobody finds yet say that
/// they have asked the others.
fn asked(observed: &Observed) -> Vec<String> {
    let token = observed.intent.as_ref().map(|intent| &intent.token);
    let is_closed = |name: &String| {
        let service = observed.services.get(name);
        service.is_some_and(|service| service.closed)
    };
    // Of a cluster that was recorded and is yet to be marked. What it answers is compared with what was recorded.
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

/// Translates the Kubernetes objects. Pure.
pub fn without_etcd(objects: &Objects, effective: &Effective) -> Observed {
    let cluster = effective.cluster();
    let Objects {
        pods,
        claims,
        services,
        budget,
        ..
    } = objects;
    let certificates = Certificates::new(cluster, &objects.secrets, pods);
    let name = cluster.name_any();
    let status = cluster.status.clone().unwrap_or_default();
    let recovery = recovery::recorded(cluster, &status);
    let intent = status.bootstrap.map(|bootstrap| Intent {
        token: bootstrap.token,
        members: bootstrap.members.into_iter().collect(),
    });
    let namespace = cluster.namespace().unwrap_or_default();
    let token = intent
        .as_ref()
        .map(|intent| intent.token.clone())
        .unwrap_or_default();
    let builder = Members::of(cluster, &namespace, &token, status.cluster_id.as_deref());
    let uid = cluster.uid().unwrap_or_default();
    let mut observed = Observed {
        cluster: name,
        resource_version: cluster.resource_version().unwrap_or_default(),
        deleting: cluster.metadata.deletion_timestamp.is_some(),
        claimed_by: cluster
            .annotations()
            .get(names::ANNOTATION_RESTORE)
            .cloned(),
        intent,
        cluster_id: status.cluster_id.as_ref().and_then(|id| id.parse().ok()),
        reported_voters: status
            .member_details
            .iter()
            .filter(|member| !matches!(member.role, None | Some(MemberRole::Learner)))
            .map(|member| member.name.clone())
            .collect::<BTreeSet<_>>(),
        reported_version: status.current_version,
        pods: BTreeMap::new(),
        disks: BTreeMap::new(),
        services: BTreeMap::new(),
        strangers: Vec::new(),
        shared: children::shared(&builder, services, budget.as_ref(), &uid),
        members: Seen::Unknown("no member runs".to_owned()),
        join: elsewhere::endpoints(cluster),
        elsewhere: BTreeMap::new(),
        statuses: BTreeMap::new(),
        pulses: BTreeMap::new(),
        hashes: BTreeMap::new(),
        recovery,
        upkeep: Upkeep {
            record: status.defragmentation,
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
        match children::belongs(&claim.metadata, &uid) {
            Some(owned) => {
                let labelled = is_labelled(&claim.metadata);
                let seen = children::disk(claim, owned && labelled);
                observed.disks.insert(claim.name_any(), seen);
            }
            None => observed
                .strangers
                .push(format!("volume claim {}", claim.name_any())),
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
