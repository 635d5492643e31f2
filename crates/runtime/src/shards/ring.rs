//! The decisions about the Leases of the shards. Performs no I/O.
//!
//! The Lease of the operator belongs to all replicas with the same number of shards: its holder is the number of
//! shards, and an annotation lists the replicas. Each shard has a separate Lease, which belongs to one replica.
//!
//! A Lease is free if it has no holder, or if this process has not seen a change of it for [`DURATION`]. This rule
//! compares no clocks of different machines. A replica ends after [`RENEWAL_LIMIT`] without a complete renewal. The
//! replica has therefore ended before another process takes over one of its Leases (invariant 40).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use api::names::ANNOTATION_REPLICAS;
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use serde::{Deserialize, Serialize};

use super::assign::targets;
use super::{Slot, State};

/// A Lease without a change for this time is free.
pub(super) const DURATION: Duration = Duration::from_secs(20);
/// A replica ends if its last complete renewal began this long ago. The limit is shorter than [`DURATION`], so that a
/// request that the replica has sent ends in time too.
pub(super) const RENEWAL_LIMIT: Duration = Duration::from_secs(15);
/// A replica renews its Leases this long after the last renewal.
const RENEW: Duration = Duration::from_secs(5);

/// The content of a Lease that the decisions need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) holder: Option<String>,
    pub(super) replicas: Replicas,
}

/// The replicas of the operator, by the names of their pods.
pub(super) type Replicas = BTreeMap<String, Replica>;

/// The entry of a replica in the operator's Lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Replica {
    /// Changes with each renewal, and never repeats a value, because another replica would regard an entry with a
    /// repeated value as not renewed.
    pub(super) beat: u64,
    /// True if the replica shuts down and must get no shards.
    #[serde(default)]
    pub(super) leaving: bool,
}

impl From<&Lease> for Record {
    fn from(lease: &Lease) -> Self {
        let spec = lease.spec.as_ref();
        let holder = spec.and_then(|spec| spec.holder_identity.clone());
        let replicas = lease.annotations().get(ANNOTATION_REPLICAS);
        Self {
            name: lease.name_any(),
            version: lease.resource_version().unwrap_or_default(),
            holder: holder.filter(|holder| !holder.is_empty()),
            // If a person has damaged the annotation, the list is empty, and each replica adds itself again.
            replicas: replicas
                .and_then(|text| serde_json::from_str(text).ok())
                .unwrap_or_default(),
        }
    }
}

/// The inputs of all decisions of one beat.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Beat {
    /// True if this replica shuts down.
    pub(super) leaving: bool,
    /// True if the Leases must be renewed ([`Ring::must_renew`]).
    pub(super) renews: bool,
}

/// What to do with the Lease of the operator.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Join {
    /// Wait, because an operator with another number of shards holds the Lease. If this process holds shards, it has
    /// lost them.
    Wait,
    /// Nothing: the Lease belongs to the replicas with this number of shards, and this replica is listed.
    Rest,
    /// Make the Lease belong to the replicas with this number of shards, and list these replicas.
    List(Replicas),
}

/// What to do with the Lease of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Take the Lease, and then begin to reconcile.
    Take,
    /// Renew the Lease.
    Renew,
    /// Start no more reconciles, and release the Lease when the running reconciles have ended.
    Release,
    /// Mark the shard as free, because this replica does not hold its Lease.
    Forget,
}

/// The facts about the Leases that a replica has observed.
///
/// The parameter `now` of the methods is a time after the response with the Leases. With an earlier time, a Lease that
/// was renewed while the request was running could be taken too early.
pub(super) struct Ring {
    me: String,
    lease: String,
    count: u16,
    /// The version of each Lease, and the time at which this process saw this version first.
    leases: HashMap<String, (String, Instant)>,
    /// For each other listed replica, its entry, and the time at which this process first saw this entry.
    others: BTreeMap<String, (Replica, Instant)>,
    /// The start of the last complete renewal. `None` before the first renewal.
    renewed: Option<Instant>,
    /// The last beat of this replica in the operator's Lease. Its first value is random, because a restarted container
    /// has the same replica name.
    beat: u64,
}

impl Ring {
    /// A replica with the name `me`, whose operator has the Lease `lease` and `count` shards.
    pub(super) fn new(me: &str, lease: &str, count: u16) -> Self {
        Self {
            me: me.to_owned(),
            lease: lease.to_owned(),
            count,
            leases: HashMap::new(),
            others: BTreeMap::new(),
            renewed: None,
            beat: rand::random(),
        }
    }

    /// The name of the operator's Lease.
    pub(super) fn lease(&self) -> &str {
        &self.lease
    }

    /// The name of the Lease of a shard.
    pub(super) fn lease_of(&self, shard: u16) -> String {
        format!("{}-shard-{shard}", self.lease)
    }

    /// The holder of the operator's Lease while the Lease belongs to replicas with this number of shards. This holder
    /// differs from every pod name, because it contains a slash. A pod name is the holder if the operator is not
    /// divided.
    pub(super) fn group(&self) -> String {
        format!("shards/{}", self.count)
    }

    /// The name of this replica.
    pub(super) fn me(&self) -> &str {
        &self.me
    }

    /// Whether the Leases must be renewed now.
    pub(super) fn must_renew(&self, now: Instant) -> bool {
        let since = |renewed| now.saturating_duration_since(renewed);
        self.renewed.is_none_or(|renewed| since(renewed) >= RENEW)
    }

    /// Records a complete renewal: after `began`, the operator's Lease and the Leases of all held shards were written.
    pub(super) fn renewed(&mut self, began: Instant) {
        self.renewed = Some(began);
    }

    /// Invariant 40: the time at which this process must have ended if it renews no more. `None` if it needs no Lease
    /// of a shard.
    pub(super) fn deadline(&self, slots: &[Slot]) -> Option<Instant> {
        let holds = slots.iter().any(|slot| slot.needs_lease());
        let renewed = self.renewed.filter(|_| holds);
        renewed.map(|renewed| renewed + RENEWAL_LIMIT)
    }

    /// Invariant 40: whether this replica may begin to hold a shard whose Lease it has taken. After a slow beat, the
    /// other replicas may regard its entry in the operator's Lease as too old.
    pub(super) fn may_hold(&self, now: Instant) -> bool {
        let limit = self.renewed.map(|renewed| renewed + RENEWAL_LIMIT);
        limit.is_some_and(|limit| now < limit)
    }

    /// Decides about the operator's Lease.
    pub(super) fn join(
        &mut self,
        lease: &Record,
        slots: &[Slot],
        beat: Beat,
        now: Instant,
    ) -> Join {
        let is_free = self.is_free(lease, now);
        let is_own = lease.holder.as_ref() == Some(&self.group());
        let holds = slots.iter().any(|slot| slot.needs_lease());
        if !is_own && (holds || !is_free) {
            return Join::Wait;
        }
        if is_own {
            self.see(&lease.replicas, now);
        } else {
            // The Lease is free. The entries in `others` belong to an earlier group of replicas.
            self.others.clear();
        }
        let own = lease.replicas.get(&self.me).filter(|_| is_own);
        let is_listed = own.is_some_and(|own| own.leaving == beat.leaving);
        if is_listed && !beat.renews {
            return Join::Rest;
        }
        self.beat = self.beat.wrapping_add(1);
        let own = Replica {
            beat: self.beat,
            leaving: beat.leaving,
        };
        let mut replicas = self.alive(now);
        replicas.insert(self.me.clone(), own);
        Join::List(replicas)
    }

    /// The replicas that stay listed when this replica ends. If no replica stays listed, the operator's Lease must be
    /// released. `None` if the Lease does not belong to this group.
    pub(super) fn without_me(&mut self, lease: &Record, now: Instant) -> Option<Replicas> {
        let is_own = lease.holder.as_ref() == Some(&self.group());
        is_own.then(|| {
            self.see(&lease.replicas, now);
            self.alive(now)
        })
    }

    /// Decides about the Leases of all shards. Do not call this after [`Self::join`] has returned [`Join::Wait`].
    ///
    /// # Errors
    /// The name of a Lease that this process needs and has lost.
    pub(super) fn steps(
        &mut self,
        leases: &[Record],
        slots: &[Slot],
        beat: Beat,
        now: Instant,
    ) -> Result<Vec<(u16, Step)>, String> {
        let by_name: HashMap<&str, &Record> =
            leases.iter().map(|one| (one.name.as_str(), one)).collect();
        let mut holders = Vec::new();
        for shard in 0..self.count {
            let lease = by_name.get(self.lease_of(shard).as_str()).copied();
            let holder = lease.and_then(|lease| Some((lease, lease.holder.as_deref()?)));
            // A Lease of this replica never counts as free, because this replica holds it until `deadline`.
            let holder = holder.filter(|(lease, holder)| {
                let is_free = self.is_free(lease, now);
                *holder == self.me || !is_free
            });
            holders.push(holder.map(|(_, holder)| holder));
        }
        let alive = self.alive(now);
        let others = alive.iter().filter(|(_, replica)| !replica.leaving);
        let mut replicas: BTreeSet<&str> = others.map(|(name, _)| name.as_str()).collect();
        if !beat.leaving {
            replicas.insert(&self.me);
        }
        let targets = targets(&holders, &replicas);
        let mut steps = Vec::new();
        for (shard, slot) in (0..self.count).zip(slots) {
            let (holder, target) = (holders[usize::from(shard)], targets[usize::from(shard)]);
            let me = Some(self.me.as_str());
            let (is_held, is_target) = (holder == me, target == me);
            let step = match (is_held, slot.state) {
                (false, _) if slot.needs_lease() => return Err(self.lease_of(shard)),
                (false, State::Leaving) => Some(Step::Forget),
                (false, _) => (is_target && holder.is_none()).then_some(Step::Take),
                (true, _) if !is_target => Some(Step::Release),
                (true, State::Held) => beat.renews.then_some(Step::Renew),
                (true, _) => Some(Step::Take),
            };
            steps.extend(step.map(|step| (shard, step)));
        }
        Ok(steps)
    }

    /// Whether the Lease has no holder, or its holder renews it no more.
    fn is_free(&mut self, lease: &Record, now: Instant) -> bool {
        let seen = self.leases.entry(lease.name.clone());
        let seen = seen.or_insert_with(|| (lease.version.clone(), now));
        if seen.0 != lease.version {
            *seen = (lease.version.clone(), now);
        }
        lease.holder.is_none() || now.saturating_duration_since(seen.1) >= DURATION
    }

    /// Records the entries of the other replicas.
    fn see(&mut self, replicas: &Replicas, now: Instant) {
        self.others.retain(|name, _| replicas.contains_key(name));
        for (name, replica) in replicas.iter().filter(|(name, _)| **name != self.me) {
            let seen = self.others.entry(name.clone()).or_insert((*replica, now));
            if seen.0 != *replica {
                *seen = (*replica, now);
            }
        }
    }

    /// The other replicas that renew their entries.
    fn alive(&self, now: Instant) -> Replicas {
        let renews = |since: Instant| now.saturating_duration_since(since) < DURATION;
        let others = self.others.iter();
        let alive = others.filter(|(_, (_, since))| renews(*since));
        alive
            .map(|(name, (replica, _))| (name.clone(), *replica))
            .collect()
    }
}
