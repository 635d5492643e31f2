//! The world: an API server with its controllers, kubelets, disks, and etcd. It moves when told to.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use cluster::observed::{Desired, Intent, Kept, RecoveryRule, Role, Shared};
use cluster::write::{Draw, Start, State};
use etcd::ClusterId;

use crate::etcd_model::{Cluster, Data, Member};
use crate::invariants::Witness;

/// A pod with the kubelet's part of it.
#[derive(Clone, Debug)]
pub(crate) struct WorldPod {
    pub(crate) uid: u64,
    pub(crate) start: Start,
    pub(crate) role: Role,
    pub(crate) cluster_id: Option<ClusterId>,
    pub(crate) owned: bool,
    pub(crate) ends_in: Option<u8>,
    pub(crate) running: bool,
    pub(crate) running_since: Option<u64>,
    pub(crate) restarts: i32,
    /// What an `emptyDir` holds.
    pub(crate) data: Option<Data>,
    pub(crate) created: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct WorldDisk {
    pub(crate) uid: u64,
    pub(crate) initial: BTreeSet<String>,
    pub(crate) token: String,
    pub(crate) cluster_id: Option<ClusterId>,
    pub(crate) owned: bool,
    pub(crate) terminating: bool,
    pub(crate) data: Option<Data>,
}

#[derive(Clone, Debug)]
pub(crate) struct WorldService {
    pub(crate) uid: u64,
    pub(crate) version: u64,
    pub(crate) started: bool,
    pub(crate) drifted: bool,
    pub(crate) closed: bool,
    pub(crate) created: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) now: u64,
    pub(crate) size: usize,
    pub(crate) seed: bool,
    pub(crate) durable: bool,
    pub(crate) version: &'static str,
    pub(crate) object_version: u64,
    pub(crate) intent: Option<Intent>,
    pub(crate) cluster_id: Option<ClusterId>,
    pub(crate) reported_voters: BTreeSet<String>,
    pub(crate) pods: BTreeMap<String, WorldPod>,
    pub(crate) disks: BTreeMap<String, WorldDisk>,
    pub(crate) services: BTreeMap<String, WorldService>,
    pub(crate) shared: Shared,
    pub(crate) clusters: BTreeMap<String, Cluster>,
    /// Pods whose node is lost, and since when; a pod on their disk runs nowhere else.
    pub(crate) lost: BTreeMap<String, u64>,
    /// Members whose data cannot be read, and since when.
    pub(crate) damaged: BTreeMap<String, u64>,
    /// Members nobody reaches.
    pub(crate) isolated: BTreeSet<String>,
    /// Pods no node takes.
    pub(crate) held: BTreeSet<String>,
    /// etcd does not answer the operators.
    pub(crate) deaf: bool,
    pub(crate) counter: u64,
    pub(crate) witness: Witness,
}

impl Draw for World {
    fn member(&mut self) -> String {
        format!("db-{:010}", self.next())
    }

    fn token(&mut self) -> String {
        format!("token-{}", self.next())
    }
}

impl World {
    pub(crate) fn new(size: usize, seed: bool, durable: bool, version: &'static str) -> Self {
        Self {
            now: 0,
            size,
            seed,
            durable,
            version,
            object_version: 1,
            intent: None,
            cluster_id: None,
            reported_voters: BTreeSet::new(),
            pods: BTreeMap::new(),
            disks: BTreeMap::new(),
            services: BTreeMap::new(),
            shared: Shared {
                headless: Kept::Missing,
                client: Kept::Missing,
                budget: Kept::Missing,
            },
            clusters: BTreeMap::new(),
            lost: BTreeMap::new(),
            damaged: BTreeMap::new(),
            isolated: BTreeSet::new(),
            held: BTreeSet::new(),
            deaf: false,
            counter: 0,
            witness: Witness::default(),
        }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    pub(crate) fn desired(&self) -> Desired {
        Desired {
            size: self.size,
            first: if self.seed { 1 } else { self.size },
            durable: self.durable,
            version: self.version.to_owned(),
            image: format!("etcd:v{}", self.version),
            spec_hash: "hash".to_owned(),
            replace_after: std::time::Duration::from_secs(6),
            recovery: RecoveryRule {
                automatic: false,
                after: std::time::Duration::from_secs(6),
            },
            paused: false,
            budget: true,
            invalid: None,
            refused: None,
        }
    }

    /// The recorded cluster, if etcd has one under its token.
    pub(crate) fn recorded(&self) -> Option<&Cluster> {
        self.clusters.get(&self.intent.as_ref()?.token)
    }

    /// The disk of a member, wherever it is.
    pub(crate) fn data(&self, name: &str) -> Option<&Data> {
        let on_claim = self.disks.get(name).and_then(|disk| disk.data.as_ref());
        on_claim.or(self.pods.get(name).and_then(|pod| pod.data.as_ref()))
    }

    fn data_mut(&mut self, name: &str) -> Option<&mut Data> {
        if self.disks.get(name).is_some_and(|disk| disk.data.is_some()) {
            return self.disks.get_mut(name).and_then(|disk| disk.data.as_mut());
        }
        self.pods.get_mut(name).and_then(|pod| pod.data.as_mut())
    }

    // ---- time ----

    pub(crate) fn tick(&mut self) {
        self.now += 1;
        self.end_pods();
        for name in self.pods.keys().cloned().collect::<Vec<_>>() {
            self.run_pod(&name);
        }
        for token in self.clusters.keys().cloned().collect::<Vec<_>>() {
            self.run_cluster(&token);
        }
        self.witness.no_acknowledged_write_is_lost(&self.clone());
    }

    fn end_pods(&mut self) {
        for (name, pod) in &mut self.pods {
            // Nobody ends a pod on a lost node.
            if !self.lost.contains_key(name) {
                pod.ends_in = pod.ends_in.map(|ticks| ticks.saturating_sub(1));
            }
        }
        self.pods.retain(|_, pod| pod.ends_in != Some(0));
        let pods = &self.pods;
        self.disks
            .retain(|name, disk| !disk.terminating || pods.contains_key(name));
    }

    /// The scheduler, the kubelet, and what etcd does at its start.
    fn run_pod(&mut self, name: &str) {
        let Some(pod) = self.pods.get(name).cloned() else {
            return;
        };
        if pod.start.durable && !self.disks.contains_key(name)
            || self.held.contains(name) && !pod.running
            || self.lost.contains_key(name)
        {
            return;
        }
        if self.damaged.contains_key(name) {
            let pod = self.pods.get_mut(name).unwrap();
            (pod.running, pod.running_since) = (false, None);
            pod.restarts += 1;
            return;
        }
        if self.data(name).is_some() {
            self.set_running(name);
            return;
        }
        let member = match pod.start.state {
            State::New => Some(self.first_member(&pod.start)),
            State::Join => self.joining_member(&pod.start),
            State::OnDisk | State::FromSurvivor => None,
        };
        match member {
            Some(member) => {
                self.witness.starts_empty(name, &self.clone());
                let data = Data {
                    token: pod.start.token.clone(),
                    member,
                    index: 0,
                };
                match self.disks.get_mut(name) {
                    Some(disk) if pod.start.durable => disk.data = Some(data),
                    _ => self.pods.get_mut(name).unwrap().data = Some(data),
                }
                self.set_running(name);
            }
            None => self.pods.get_mut(name).unwrap().restarts += 1,
        }
    }

    /// Somebody deletes a claim: it is gone when no pod holds it.
    pub(crate) fn delete_claim(&mut self, name: &str) {
        if !self.pods.contains_key(name) {
            self.disks.remove(name);
        } else if let Some(disk) = self.disks.get_mut(name) {
            disk.terminating = true;
        }
    }

    pub(crate) fn damage(&mut self, name: &str) {
        self.damaged.entry(name.to_owned()).or_insert(self.now);
        if let Some(pod) = self.pods.get_mut(name) {
            (pod.running, pod.running_since) = (false, None);
        }
    }

    /// Lost nodes come back, and damaged disks with what was on them.
    pub(crate) fn mend(&mut self) {
        self.lost.clear();
        self.damaged.clear();
    }

    fn set_running(&mut self, name: &str) {
        let now = self.now;
        let pod = self.pods.get_mut(name).unwrap();
        pod.running = true;
        pod.running_since = pod.running_since.or(Some(now));
    }

    /// Static discovery: the cluster is made of the token and the first members.
    fn first_member(&mut self, start: &Start) -> u64 {
        if !self.clusters.contains_key(&start.token) {
            let id = self.next() + 0xc000;
            let members = start.initial.iter().map(|name| {
                let member = Member {
                    name: name.clone(),
                    learner: false,
                    joined: false,
                    up_since: None,
                };
                (self.next(), member)
            });
            let members = members.collect();
            let cluster = Cluster {
                id,
                members,
                formed: false,
                leader: None,
                acknowledged: 0,
            };
            self.clusters.insert(start.token.clone(), cluster);
        }
        self.clusters[&start.token]
            .by_name(&start.member)
            .unwrap_or(u64::MAX)
    }

    /// A joining member compares its list with the cluster's, which a quorum has to give it.
    fn joining_member(&self, start: &Start) -> Option<u64> {
        let cluster = self
            .clusters
            .get(&start.token)
            .filter(|cluster| cluster.serves())?;
        (cluster.names() == start.initial)
            .then(|| cluster.by_name(&start.member))
            .flatten()
    }

    fn run_cluster(&mut self, token: &str) {
        let mut cluster = self.clusters[token].clone();
        for (id, member) in &mut cluster.members {
            let runs = self.pods.get(&member.name).is_some_and(|pod| pod.running);
            let has = self
                .data(&member.name)
                .is_some_and(|data| data.member == *id && data.token == token);
            let closed = self
                .services
                .get(&member.name)
                .is_some_and(|service| service.closed);
            let away = self.lost.contains_key(&member.name) || self.isolated.contains(&member.name);
            let is_up = runs && has && !closed && !away;
            member.up_since = if is_up {
                member.up_since.or(Some(self.now))
            } else {
                None
            };
        }
        let quorum = cluster.up() >= cluster.quorum();
        cluster.formed |= quorum;
        let up = |id: &u64| {
            cluster
                .members
                .get(id)
                .is_some_and(|member| member.up_since.is_some() && !member.learner)
        };
        match cluster.leader {
            Some(leader) if quorum && up(&leader) => {}
            Some(_) => cluster.leader = None,
            // An election: whoever has the longest log.
            None if quorum => {
                let voters = cluster
                    .voters()
                    .filter(|(_, member)| member.up_since.is_some());
                let longest = voters
                    .max_by_key(|(_, member)| self.data(&member.name).map_or(0, |data| data.index));
                cluster.leader = longest.map(|(id, _)| *id);
            }
            None => {}
        }
        if cluster.serves() {
            let writes = self.shared.client == Kept::AsMade(true);
            let lead = cluster.members[&cluster.leader.unwrap()].name.clone();
            let newest = self.data(&lead).map_or(0, |data| data.index) + u64::from(writes);
            for member in cluster
                .members
                .values_mut()
                .filter(|member| member.up_since.is_some())
            {
                member.joined = true;
                if let Some(data) = self.data_mut(&member.name) {
                    data.index = newest;
                }
            }
            cluster.acknowledged = cluster.acknowledged.max(newest);
        }
        self.clusters.insert(token.to_owned(), cluster);
    }
}

impl fmt::Display for World {
    /// A world in a few lines, for the story of a failure.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            now,
            size,
            cluster_id,
            intent,
            ..
        } = self;
        writeln!(
            f,
            "at {now}: size {size}, cluster ID {cluster_id:?}, intent {intent:?}"
        )?;
        for (token, cluster) in &self.clusters {
            writeln!(
                f,
                "etcd {token}: formed {}, leader {:?}, written {}",
                cluster.formed, cluster.leader, cluster.acknowledged
            )?;
            for (id, member) in &cluster.members {
                writeln!(f, "  {id} {member:?}")?;
            }
        }
        for (name, pod) in &self.pods {
            let WorldPod {
                uid,
                start,
                ends_in,
                running,
                restarts,
                data,
                ..
            } = pod;
            let (state, token, durable) = (start.state, &start.token, start.durable);
            writeln!(
                f,
                "pod {name} {uid}: {state:?} {token} durable {durable} ends {ends_in:?} runs {running} restarts {restarts} {data:?}"
            )?;
        }
        for (name, disk) in &self.disks {
            writeln!(f, "disk {name}: ends {} {:?}", disk.terminating, disk.data)?;
        }
        for (name, service) in &self.services {
            writeln!(
                f,
                "service {name}: started {} drifted {} closed {}",
                service.started, service.drifted, service.closed
            )?;
        }
        writeln!(
            f,
            "{:?} isolated {:?} held {:?} lost {:?} damaged {:?}",
            self.shared, self.isolated, self.held, self.lost, self.damaged
        )
    }
}
