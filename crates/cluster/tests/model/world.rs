//! The world: an API server with its controllers, kubelets, disks, and etcd. It moves when told to.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use cluster::observed::{Desired, Disk, Intent, Kept, Observed, Pod, Role, Seen, Service, Shared, Trouble};
use cluster::write::{Draw, Start, State, Write};
use etcd::{ClusterId, MemberId, Members, Status};
use jiff::Timestamp;

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
    pub(crate) created: u64,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Done(Option<u64>),
    /// A lost race, or etcd is not ready.
    Failed,
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
            shared: Shared { headless: Kept::Missing, client: Kept::Missing, budget: Kept::Missing },
            clusters: BTreeMap::new(),
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
        for pod in self.pods.values_mut() {
            pod.ends_in = pod.ends_in.map(|ticks| ticks.saturating_sub(1));
        }
        self.pods.retain(|_, pod| pod.ends_in != Some(0));
        let pods = &self.pods;
        self.disks.retain(|name, disk| !disk.terminating || pods.contains_key(name));
    }

    /// The scheduler, the kubelet, and what etcd does at its start.
    fn run_pod(&mut self, name: &str) {
        let Some(pod) = self.pods.get(name).cloned() else { return };
        if pod.start.durable && !self.disks.contains_key(name) || self.held.contains(name) && !pod.running {
            return;
        }
        if self.data(name).is_some() {
            self.set_running(name);
            return;
        }
        let member = match pod.start.state {
            State::New => Some(self.first_member(&pod.start)),
            State::Join => self.joining_member(&pod.start),
            State::OnDisk => None,
        };
        match member {
            Some(member) => {
                self.witness.starts_empty(name, &self.clone());
                let data = Data { token: pod.start.token.clone(), member, index: 0 };
                match self.disks.get_mut(name) {
                    Some(disk) if pod.start.durable => disk.data = Some(data),
                    _ => self.pods.get_mut(name).unwrap().data = Some(data),
                }
                self.set_running(name);
            }
            None => self.pods.get_mut(name).unwrap().restarts += 1,
        }
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
                let member = Member { name: name.clone(), learner: false, joined: false, up_since: None };
                (self.next(), member)
            });
            let members = members.collect();
            let cluster = Cluster { id, members, formed: false, leader: None, acknowledged: 0 };
            self.clusters.insert(start.token.clone(), cluster);
        }
        self.clusters[&start.token].by_name(&start.member).unwrap_or(u64::MAX)
    }

    /// A joining member compares its list with the cluster's, which a quorum has to give it.
    fn joining_member(&self, start: &Start) -> Option<u64> {
        let cluster = self.clusters.get(&start.token).filter(|cluster| cluster.serves())?;
        (cluster.names() == start.initial).then(|| cluster.by_name(&start.member)).flatten()
    }

    fn run_cluster(&mut self, token: &str) {
        let mut cluster = self.clusters[token].clone();
        for (id, member) in &mut cluster.members {
            let runs = self.pods.get(&member.name).is_some_and(|pod| pod.running);
            let has = self.data(&member.name).is_some_and(|data| data.member == *id && data.token == token);
            let is_up = runs && has && !self.isolated.contains(&member.name);
            member.up_since = if is_up { member.up_since.or(Some(self.now)) } else { None };
        }
        let quorum = cluster.up() >= cluster.quorum();
        cluster.formed |= quorum;
        let up = |id: &u64| cluster.members.get(id).is_some_and(|member| member.up_since.is_some() && !member.learner);
        match cluster.leader {
            Some(leader) if quorum && up(&leader) => {}
            Some(_) => cluster.leader = None,
            // An election: whoever has the longest log.
            None if quorum => {
                let voters = cluster.voters().filter(|(_, member)| member.up_since.is_some());
                let longest = voters.max_by_key(|(_, member)| self.data(&member.name).map_or(0, |data| data.index));
                cluster.leader = longest.map(|(id, _)| *id);
            }
            None => {}
        }
        if cluster.serves() {
            let writes = self.shared.client == Kept::AsMade(true);
            let lead = cluster.members[&cluster.leader.unwrap()].name.clone();
            let newest = self.data(&lead).map_or(0, |data| data.index) + u64::from(writes);
            for member in cluster.members.values_mut().filter(|member| member.up_since.is_some()) {
                member.joined = true;
                if let Some(data) = self.data_mut(&member.name) {
                    data.index = newest;
                }
            }
            cluster.acknowledged = cluster.acknowledged.max(newest);
        }
        self.clusters.insert(token.to_owned(), cluster);
    }

    // ---- reading ----

    pub(crate) fn read_services(&self) -> BTreeMap<String, Service> {
        let services = self.services.iter().map(|(name, service)| {
            let seen = Service {
                uid: service.uid.to_string(),
                resource_version: service.version.to_string(),
                owned: true,
                started: service.started,
                drifted: service.drifted,
                created: seconds(service.created),
            };
            (name.clone(), seen)
        });
        services.collect()
    }

    pub(crate) fn read_pods(&self) -> BTreeMap<String, Pod> {
        self.pods.iter().map(|(name, pod)| (name.clone(), self.read_pod(name, pod))).collect()
    }

    fn read_pod(&self, name: &str, pod: &WorldPod) -> Pod {
        let held = self.held.contains(name) && !pod.running;
        let initial = match pod.start.state {
            State::OnDisk => BTreeSet::from([name.to_owned()]),
            State::New | State::Join => pod.start.initial.clone(),
        };
        Pod {
            uid: pod.uid.to_string(),
            owned: pod.owned,
            token: Some(pod.start.token.clone()),
            cluster_id: pod.cluster_id,
            version: Some(pod.start.version.clone()),
            image: format!("etcd:v{}", pod.start.version),
            spec_hash: Some("hash".to_owned()),
            initial,
            durable: pod.start.durable,
            terminating: pod.ends_in.is_some(),
            failed: false,
            running: pod.running,
            running_since: pod.running_since.map(seconds),
            ready: pod.running,
            restarts: pod.restarts,
            role: Some(pod.role),
            trouble: held.then(|| Trouble::Unschedulable("no node".to_owned())),
            node: None,
            created: seconds(pod.created),
        }
    }

    /// The rest of an observation, in the order the operator reads: claims and object after Services and pods,
    /// etcd last.
    pub(crate) fn observe(&self, services: BTreeMap<String, Service>, pods: BTreeMap<String, Pod>) -> Observed {
        let disks = self.disks.iter().map(|(name, disk)| {
            let seen = Disk {
                uid: disk.uid.to_string(),
                owned: disk.owned,
                token: Some(disk.token.clone()),
                cluster_id: disk.cluster_id,
                version: Some(self.version.to_owned()),
                terminating: disk.terminating,
            };
            (name.clone(), seen)
        });
        let mut observed = Observed {
            cluster: "db".to_owned(),
            resource_version: self.object_version.to_string(),
            deleting: false,
            claimed_by: None,
            intent: self.intent.clone(),
            cluster_id: self.cluster_id,
            reported_voters: self.reported_voters.clone(),
            reported_version: None,
            disks: disks.collect(),
            pods,
            services,
            strangers: Vec::new(),
            shared: self.shared.clone(),
            members: Seen::Unknown("no member runs".to_owned()),
            statuses: BTreeMap::new(),
        };
        self.ask_etcd(&mut observed);
        observed
    }

    fn ask_etcd(&self, observed: &mut Observed) {
        let Some(token) = observed.intent.as_ref().map(|intent| intent.token.clone()) else { return };
        let Some(cluster) = self.clusters.get(&token) else { return };
        let asked = observed.pods.iter().filter(|(_, pod)| pod.running && pod.stays() && pod.token.as_ref() == Some(&token));
        for name in asked.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            let answer = self.status(cluster, &name).filter(|_| !self.deaf);
            if answer.as_ref().is_some_and(|status| !status.is_learner) && cluster.serves() {
                observed.members = Seen::Known(list(cluster));
            }
            let seen = answer.map_or(Seen::Unknown("no answer".to_owned()), Seen::Known);
            observed.statuses.insert(name, seen);
        }
    }

    fn status(&self, cluster: &Cluster, name: &str) -> Option<Status> {
        let id = cluster.by_name(name)?;
        let member = &cluster.members[&id];
        member.up_since?;
        let index = self.data(name)?.index;
        Some(Status {
            cluster_id: ClusterId(cluster.id),
            member_id: MemberId(id),
            version: self.version.to_owned(),
            leader: cluster.leader.map(MemberId),
            is_learner: member.learner,
            revision: i64::try_from(index).unwrap(),
            raft_term: 1,
            raft_index: index,
            raft_applied_index: index,
            db_size: 0,
            db_size_in_use: 0,
            errors: Vec::new(),
        })
    }

    // ---- writing ----

    /// Applies one write as the API server or etcd would.
    pub(crate) fn write(&mut self, write: &Write) -> Answer {
        match write {
            Write::RecordIntent { intent, cluster_id, over } => self.record(Some(intent), *cluster_id, over),
            Write::RecordClusterId { cluster_id, over } => self.record(None, Some(*cluster_id), over),
            Write::ApplyHeadless => {
                self.shared.headless = Kept::AsMade(());
                Answer::Done(None)
            }
            Write::ApplyClient { open } => {
                self.shared.client = Kept::AsMade(*open);
                Answer::Done(None)
            }
            Write::ApplyBudget { quorum } => {
                self.shared.budget = Kept::AsMade(*quorum);
                Answer::Done(None)
            }
            Write::DeleteBudget => {
                self.shared.budget = Kept::Missing;
                Answer::Done(None)
            }
            Write::CreateService { .. }
            | Write::RepairService { .. }
            | Write::MarkService { .. }
            | Write::DeleteService { .. } => self.write_service(write),
            Write::CreateDisk(start) => self.create_disk(start),
            Write::DeleteDisk { member, uid } => {
                if let Some(disk) = self.disks.get_mut(member).filter(|disk| disk.uid.to_string() == *uid) {
                    disk.terminating = true;
                    if !self.pods.contains_key(member) {
                        self.disks.remove(member);
                    }
                    return Answer::Done(None);
                }
                if self.disks.contains_key(member) { Answer::Failed } else { Answer::Done(None) }
            }
            Write::CreatePod(start) => self.create_pod(start),
            Write::DeletePod { member, uid } => {
                if let Some(pod) = self.pods.get_mut(member).filter(|pod| pod.uid.to_string() == *uid) {
                    pod.ends_in = pod.ends_in.or(Some(2));
                    return Answer::Done(None);
                }
                if self.pods.contains_key(member) { Answer::Failed } else { Answer::Done(None) }
            }
            Write::LabelPod(label) => {
                let pod = self.pods.get_mut(&label.member).filter(|pod| pod.uid.to_string() == label.uid);
                let Some(pod) = pod else { return Answer::Failed };
                pod.role = label.role.unwrap_or(pod.role);
                (pod.cluster_id, pod.owned) = (label.cluster_id, true);
                Answer::Done(None)
            }
            Write::LabelDisk(label) => {
                let disk = self.disks.get_mut(&label.member).filter(|disk| disk.uid.to_string() == label.uid);
                let Some(disk) = disk else { return Answer::Failed };
                (disk.cluster_id, disk.owned) = (label.cluster_id, true);
                Answer::Done(None)
            }
            Write::AddMember { .. } | Write::Promote { .. } | Write::Remove { .. } | Write::MoveLeader { .. } => {
                self.write_members(write)
            }
        }
    }

    fn record(&mut self, intent: Option<&Intent>, cluster_id: Option<ClusterId>, over: &str) -> Answer {
        if over != self.object_version.to_string() {
            return Answer::Failed;
        }
        self.object_version += 1;
        if let Some(intent) = intent {
            self.intent = Some(intent.clone());
            self.cluster_id = None;
        }
        self.cluster_id = cluster_id.or(self.cluster_id);
        Answer::Done(None)
    }

    fn write_service(&mut self, write: &Write) -> Answer {
        let version = self.next();
        match write {
            Write::CreateService { member, started } => {
                if self.services.contains_key(member) {
                    return Answer::Failed;
                }
                let created = self.now;
                let service = WorldService { uid: version, version, started: *started, drifted: false, created };
                self.services.insert(member.clone(), service);
                Answer::Done(Some(version))
            }
            Write::RepairService { member } => {
                let created = self.now;
                let service = WorldService { uid: version, version, started: false, drifted: false, created };
                let service = self.services.entry(member.clone()).or_insert(service);
                (service.version, service.drifted) = (version, false);
                Answer::Done(Some(version))
            }
            Write::MarkService { member, started, over } => {
                let Some(service) = self.services.get_mut(member) else { return Answer::Failed };
                if over.as_ref().is_some_and(|over| *over != service.version.to_string()) {
                    return Answer::Failed;
                }
                (service.version, service.started) = (version, *started);
                Answer::Done(Some(version))
            }
            Write::DeleteService { member, uid } => {
                if self.services.get(member).is_some_and(|service| service.uid.to_string() == *uid) {
                    self.services.remove(member);
                }
                Answer::Done(None)
            }
            _ => unreachable!(),
        }
    }

    fn create_disk(&mut self, start: &Start) -> Answer {
        if self.disks.contains_key(&start.member) {
            return Answer::Failed;
        }
        let disk = WorldDisk {
            uid: self.next(),
            token: start.token.clone(),
            cluster_id: start.cluster_id,
            owned: true,
            terminating: false,
            data: None,
        };
        self.disks.insert(start.member.clone(), disk);
        Answer::Done(None)
    }

    fn create_pod(&mut self, start: &Start) -> Answer {
        if self.pods.contains_key(&start.member) {
            return Answer::Failed;
        }
        Witness::pod_is_created(start, self);
        let pod = WorldPod {
            uid: self.next(),
            start: start.clone(),
            role: start.role,
            cluster_id: start.cluster_id,
            owned: true,
            ends_in: None,
            running: false,
            running_since: None,
            restarts: 0,
            data: None,
            created: self.now,
        };
        self.pods.insert(start.member.clone(), pod);
        Answer::Done(None)
    }

    fn write_members(&mut self, write: &Write) -> Answer {
        let now = self.now;
        let id = self.next();
        let Some(token) = self.intent.as_ref().map(|intent| intent.token.clone()) else { return Answer::Failed };
        let Some(cluster) = self.clusters.get_mut(&token) else { return Answer::Failed };
        let allowed = match write {
            Write::AddMember { .. } => cluster.takes_addition(now),
            Write::Remove { id, .. } => cluster.takes_removal(id.0),
            Write::Promote { id, .. } => {
                cluster.serves() && cluster.members.get(&id.0).is_some_and(|member| member.up_since.is_some() && member.joined)
            }
            Write::MoveLeader { id, .. } => {
                cluster.serves() && cluster.members.get(&id.0).is_some_and(|member| member.up_since.is_some())
            }
            _ => false,
        };
        if !allowed || self.deaf {
            return Answer::Failed;
        }
        match write {
            Write::AddMember { member, learner } if cluster.by_name(member).is_none() => {
                let member = Member { name: member.clone(), learner: *learner, joined: false, up_since: None };
                cluster.members.insert(id, member);
            }
            Write::Remove { id, .. } => {
                cluster.members.remove(&id.0);
                cluster.leader = cluster.leader.filter(|leader| *leader != id.0);
            }
            Write::Promote { id, .. } => {
                cluster.members.entry(id.0).and_modify(|member| member.learner = false);
            }
            Write::MoveLeader { id, .. } => cluster.leader = Some(id.0),
            _ => {}
        }
        Answer::Done(None)
    }
}

/// A tick is three seconds: two of them are etcd's rule of five.
pub(crate) fn seconds(ticks: u64) -> Timestamp {
    Timestamp::from_second(i64::try_from(ticks * 3).unwrap()).unwrap()
}

/// The linearizable list.
pub(crate) fn list(cluster: &Cluster) -> Members {
    let members = cluster.members.iter().map(|(id, member)| etcd::Member {
        id: MemberId(*id),
        name: if member.joined { member.name.clone() } else { String::new() },
        peer_urls: vec![format!("http://{}.ns.svc:2380", member.name)],
        client_urls: if member.joined { vec![format!("http://{}.ns.svc:2379", member.name)] } else { vec![] },
        is_learner: member.learner,
    });
    Members { cluster_id: ClusterId(cluster.id), members: members.collect() }
}

impl fmt::Display for World {
    /// A world in a few lines, for the story of a failure.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { now, size, cluster_id, intent, .. } = self;
        writeln!(f, "at {now}: size {size}, cluster ID {cluster_id:?}, intent {intent:?}")?;
        for (token, cluster) in &self.clusters {
            writeln!(f, "etcd {token}: formed {}, leader {:?}, written {}", cluster.formed, cluster.leader, cluster.acknowledged)?;
            for (id, member) in &cluster.members {
                writeln!(f, "  {id} {member:?}")?;
            }
        }
        for (name, pod) in &self.pods {
            let WorldPod { uid, start, ends_in, running, restarts, data, .. } = pod;
            let (state, token, durable) = (start.state, &start.token, start.durable);
            writeln!(f, "pod {name} {uid}: {state:?} {token} durable {durable} ends {ends_in:?} runs {running} restarts {restarts} {data:?}")?;
        }
        for (name, disk) in &self.disks {
            writeln!(f, "disk {name}: ends {} {:?}", disk.terminating, disk.data)?;
        }
        for (name, service) in &self.services {
            writeln!(f, "service {name}: started {} drifted {}", service.started, service.drifted)?;
        }
        writeln!(f, "{:?} isolated {:?} held {:?}", self.shared, self.isolated, self.held)
    }
}
