//! Reads and writes the Leases of the shards, as [`super::ring`] decides.

use std::time::{Duration, Instant};

use api::names::{ANNOTATION_REPLICAS, LABEL_SHARD_OF};
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::time::{sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::ring::{Beat, DURATION, Join, Record, Replicas, Ring, Step};
use super::{Shards, State};
use crate::lease::{Candidate, Error};

/// How often a replica reads the Leases, so that it takes a released Lease soon.
const BEAT: Duration = Duration::from_secs(2);
/// Time limit for the release of all Leases.
const RELEASE: Duration = Duration::from_secs(8);
/// Maximum number of attempts to release the Leases. An attempt fails if another replica writes a Lease at the same
/// time, or if a renewal that this replica sent before the shutdown arrives late.
const ATTEMPTS: usize = 3;

/// The metrics of the leader election.
#[derive(Clone, Debug, Default)]
pub struct Gauges {
    /// 1 if this process is the leader, or holds at least one shard.
    pub leader: Gauge,
    /// The number of shards that this process holds.
    pub held: Gauge,
}

impl Gauges {
    /// Registers the metrics of an operator with this number of shards.
    pub fn register(registry: &mut Registry, shards: u16) -> Self {
        let gauges = Self::default();
        registry.register(
            "etcd_operator_leader",
            "1 if this process is the leader or holds a shard, 0 on standby",
            gauges.leader.clone(),
        );
        registry.register(
            "etcd_operator_shards_held",
            "Shards whose objects this process reconciles",
            gauges.held.clone(),
        );
        let count = Gauge::<i64>::default();
        count.set(shards.into());
        registry.register(
            "etcd_operator_shards",
            "Shards into which the operator is divided (--shards)",
            count,
        );
        gauges
    }
}

/// Why a beat ([`Keeper::beat`]) was not complete.
#[derive(Debug)]
enum Missed {
    /// This process has lost the Lease with this name.
    Lost(String),
    /// The API server could not be reached, or has refused a request.
    Request(kube::Error),
}

impl From<kube::Error> for Missed {
    fn from(error: kube::Error) -> Self {
        Self::Request(error)
    }
}

/// Holds the Leases of this process's share of the shards.
pub struct Keeper {
    api: Api<Lease>,
    ring: Ring,
    shards: Shards,
    gauges: Gauges,
    shutdown: CancellationToken,
    /// Whether this process has logged that it waits for the operator's Lease.
    waits: bool,
}

impl Keeper {
    /// Creates a keeper, which sends no request before [`Self::hold`]. `client` must not retry requests. During the
    /// shutdown, the keeper lets other replicas take over the shards.
    pub fn new(
        client: Client,
        candidate: &Candidate,
        shards: Shards,
        gauges: Gauges,
        shutdown: CancellationToken,
    ) -> Self {
        Self {
            api: Api::namespaced(client, &candidate.namespace),
            ring: Ring::new(&candidate.identity, &candidate.name, shards.count()),
            shards,
            gauges,
            shutdown,
            waits: false,
        }
    }

    /// Takes, renews and releases the Leases of shards. Returns only if this process has lost a Lease that it needs, or
    /// could not renew its Leases in time. After this function has returned, the process must end at once.
    pub async fn hold(&mut self) -> Error {
        loop {
            let began = Instant::now();
            let deadline = self.ring.deadline(&self.shards.all());
            let limit = deadline.unwrap_or(began + DURATION);
            let mut pause = BEAT;
            match timeout_at(limit.into(), self.beat(began)).await {
                Ok(Ok(())) | Err(_) => {}
                Ok(Err(Missed::Lost(name))) => return Error::Taken { name },
                // Another replica has written the operator's Lease at the same time. A random pause prevents that both
                // write at the same time again.
                Ok(Err(Missed::Request(kube::Error::Api(status)))) if status.is_conflict() => {
                    pause = Duration::from_millis(rand::random_range(100..500));
                }
                Ok(Err(Missed::Request(error))) => self.warn("read or renew leases", &error),
            }
            self.count();
            // Invariant 40: without renewals, this process ends before another process may take one of its Leases.
            let deadline = self.ring.deadline(&self.shards.all());
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                let name = self.ring.lease().to_owned();
                return Error::ShardsNotRenewed { name };
            }
            let next = Instant::now() + pause;
            let next = deadline.map_or(next, |deadline| deadline.min(next));
            let leaving = self.shutdown.is_cancelled();
            tokio::select! {
                () = sleep_until(next.into()) => {}
                () = self.shards.idle() => {}
                () = self.shutdown.cancelled(), if !leaving => {}
            }
        }
    }

    /// Releases all Leases of this process. Call this after all reconciles have ended. If no other replica runs, this
    /// function also releases the operator's Lease, so that an operator with another number of shards can start.
    pub async fn release(mut self) {
        if timeout(RELEASE, self.release_all()).await.is_err() {
            let lease = self.ring.lease();
            warn!(
                lease,
                "cannot release the leases in time; the leases will expire"
            );
        }
    }

    /// Reads the Leases once, and sends the requests that are due.
    async fn beat(&mut self, began: Instant) -> Result<(), Missed> {
        let beat = Beat {
            leaving: self.shutdown.is_cancelled(),
            renews: self.ring.must_renew(began),
        };
        let lease = Record::from(&self.read().await?);
        let (slots, now) = (self.shards.all(), Instant::now());
        match self.ring.join(&lease, &slots, beat, now) {
            Join::Wait if self.ring.deadline(&slots).is_some() => {
                return Err(Missed::Lost(lease.name));
            }
            Join::Wait => {
                self.log_wait(&lease);
                return Ok(());
            }
            Join::Rest => {}
            Join::List(replicas) => {
                let is_new = lease.holder.as_ref() != Some(&self.ring.group());
                let change = listing(&lease.version, &self.ring.group(), &replicas, is_new);
                self.patch(&lease.name, &change).await?;
            }
        }
        self.waits = false;
        let leases = self.list().await?;
        let (slots, now) = (self.shards.all(), Instant::now());
        let steps = self.ring.steps(&leases, &slots, beat, now);
        let steps = steps.map_err(Missed::Lost)?;
        let sent = steps.iter().map(|(shard, step)| {
            let lease = self.ring.lease_of(*shard);
            let lease = leases.iter().find(|one| one.name == lease);
            self.step(*shard, *step, lease, beat.renews)
        });
        let sent = join_all(sent).await;
        let mut complete = true;
        for ((shard, _), result) in steps.iter().zip(&sent) {
            if let Err(error) = result {
                self.warn(&format!("write the lease of shard {shard}"), error);
                // A failed write makes the renewal incomplete, unless this process did not hold the shard.
                let slot = slots.get(usize::from(*shard));
                complete &= slot.is_none_or(|slot| slot.state == State::Free);
            }
        }
        if beat.renews && complete {
            self.ring.renewed(began);
        }
        // If this beat was slow, other replicas may regard its new Leases as free. This process then does not hold the
        // shards of these Leases yet, and the next beat takes the Leases again.
        if !self.ring.may_hold(Instant::now()) {
            return Ok(());
        }
        // The shards are marked as held only after `renewed`, because `deadline` counts from the last renewal.
        for ((shard, step), result) in steps.iter().zip(&sent) {
            if (*step, result.is_ok()) == (Step::Take, true) {
                info!(shard, "reconciling the objects of this shard");
                self.shards.hold(*shard);
            }
        }
        Ok(())
    }

    /// Carries out one step. Returns the error of the API server.
    async fn step(
        &self,
        shard: u16,
        step: Step,
        lease: Option<&Record>,
        renews: bool,
    ) -> Result<(), kube::Error> {
        let Some(lease) = lease else {
            if step == Step::Take {
                self.create(shard).await?;
            } else {
                self.shards.free(shard);
            }
            return Ok(());
        };
        let me = self.ring.me();
        match step {
            Step::Take => {
                let is_new = lease.holder.as_deref() != Some(me);
                let change = holding(&lease.version, me, is_new);
                self.patch(&lease.name, &change).await
            }
            Step::Renew => {
                let change = holding(&lease.version, me, false);
                self.patch(&lease.name, &change).await
            }
            Step::Release if self.shards.leave(shard) => {
                self.give_back(lease).await?;
                info!(shard, "shard released");
                self.shards.free(shard);
                Ok(())
            }
            Step::Release if renews => {
                let change = holding(&lease.version, me, false);
                self.patch(&lease.name, &change).await
            }
            Step::Release => Ok(()),
            Step::Forget => {
                self.shards.free(shard);
                Ok(())
            }
        }
    }

    async fn release_all(&mut self) {
        for _ in 0..ATTEMPTS {
            match self.release_shards().await {
                Ok(()) => {
                    info!(lease = self.ring.lease(), "leases of all shards released");
                    break;
                }
                Err(error) => self.warn("release the leases of shards", &error),
            }
        }
        for _ in 0..ATTEMPTS {
            match self.leave_group().await {
                Err(kube::Error::Api(status)) if status.is_conflict() => {}
                Err(error) => {
                    self.warn("release the lease", &error);
                    return;
                }
                Ok(()) => return,
            }
        }
    }

    async fn release_shards(&self) -> Result<(), kube::Error> {
        let leases = self.list().await?;
        let me = Some(self.ring.me());
        let own = leases.iter().filter(|one| one.holder.as_deref() == me);
        let sent = join_all(own.map(|one| self.give_back(one))).await;
        sent.into_iter().collect()
    }

    async fn give_back(&self, lease: &Record) -> Result<(), kube::Error> {
        self.patch(&lease.name, &released(&lease.version)).await
    }

    /// Removes this replica from the operator's Lease.
    async fn leave_group(&mut self) -> Result<(), kube::Error> {
        let lease = Record::from(&self.read().await?);
        let Some(others) = self.ring.without_me(&lease, Instant::now()) else {
            return Ok(());
        };
        let change = if others.is_empty() {
            released(&lease.version)
        } else {
            listing(&lease.version, &self.ring.group(), &others, false)
        };
        self.patch(&lease.name, &change).await
    }

    /// The operator's Lease. Creates it if it does not exist.
    async fn read(&self) -> Result<Lease, kube::Error> {
        let name = self.ring.lease();
        if let Some(lease) = self.api.get_opt(name).await? {
            return Ok(lease);
        }
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec::default()),
        };
        self.api.create(&PostParams::default(), &lease).await
    }

    /// The Leases of the shards.
    async fn list(&self) -> Result<Vec<Record>, kube::Error> {
        let params =
            ListParams::default().labels(&format!("{LABEL_SHARD_OF}={}", self.ring.lease()));
        let leases = self.api.list(&params).await?;
        Ok(leases.items.iter().map(Record::from).collect())
    }

    async fn create(&self, shard: u16) -> Result<(), kube::Error> {
        let (name, now) = (self.ring.lease_of(shard), MicroTime(Timestamp::now()));
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                labels: Some([(LABEL_SHARD_OF.to_owned(), self.ring.lease().to_owned())].into()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.ring.me().to_owned()),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
                lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
                ..LeaseSpec::default()
            }),
        };
        let created = self.api.create(&PostParams::default(), &lease).await;
        // The Lease exists, but the list by label did not contain it, because a person has removed its label. The label
        // is added again for the next beat.
        if matches!(&created, Err(kube::Error::Api(status)) if status.is_already_exists()) {
            let label = json!({ LABEL_SHARD_OF: self.ring.lease() });
            let change = json!({ "metadata": { "labels": label } });
            self.patch(&name, &change).await?;
        }
        created.map(drop)
    }

    async fn patch(&self, lease: &str, change: &Value) -> Result<(), kube::Error> {
        let params = PatchParams {
            field_manager: Some(format!("lease-{}", self.ring.me())),
            ..PatchParams::default()
        };
        let patched = self.api.patch(lease, &params, &Patch::Merge(change)).await;
        patched.map(drop)
    }

    fn count(&self) {
        let slots = self.shards.all();
        let held = slots.iter().filter(|slot| slot.state == State::Held);
        let held = held.count();
        self.gauges
            .held
            .set(i64::try_from(held).unwrap_or(i64::MAX));
        self.gauges.leader.set(i64::from(held > 0));
    }

    fn log_wait(&mut self, lease: &Record) {
        if !self.waits {
            info!(
                lease = lease.name,
                holder = lease.holder,
                "standby: an operator with another number of shards holds the lease"
            );
        }
        self.waits = true;
    }

    fn warn(&self, action: &str, error: &kube::Error) {
        let cause = api::problem::Chain(error).to_string();
        let lease = self.ring.lease();
        warn!(lease, error = cause, "cannot {action}; retrying");
    }
}

/// The change that gives the operator's Lease to `group`, the replicas with the same number of shards, and lists these
/// replicas.
fn listing(version: &str, group: &str, replicas: &Replicas, is_new: bool) -> Value {
    let mut change = holding(version, group, is_new);
    let list = serde_json::to_string(replicas).unwrap_or_default();
    change["metadata"]["annotations"] = json!({ ANNOTATION_REPLICAS: list });
    change
}

/// The change that takes or renews a Lease. Invariant 40: the resourceVersion is the precondition.
fn holding(version: &str, holder: &str, is_new: bool) -> Value {
    let now = MicroTime(Timestamp::now());
    let mut spec = json!({
        "holderIdentity": holder,
        "renewTime": now,
        "leaseDurationSeconds": DURATION.as_secs(),
    });
    if is_new {
        spec["acquireTime"] = json!(now);
    }
    json!({ "metadata": { "resourceVersion": version }, "spec": spec })
}

/// The change that releases a Lease.
fn released(version: &str) -> Value {
    json!({
        "metadata": { "resourceVersion": version },
        "spec": {
            "holderIdentity": null,
            "acquireTime": null,
            "renewTime": null,
            "leaseDurationSeconds": null,
        },
    })
}
