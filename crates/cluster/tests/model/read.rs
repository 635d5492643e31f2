//! How an operator reads the world, in the order in which the operator sends its reads.

use std::collections::{BTreeMap, BTreeSet};

use cluster::plan::State;
use cluster::snapshot::{Cause, Disk, Ending, Kept, Observed, Pod, Seen, Service, Shared, Trouble};
use etcd::{ClusterId, MemberId, Members, Status};
use jiff::Timestamp;
use member::OperatorImage;

use crate::etcd_model::Config;
use crate::others::is_elsewhere;
use crate::switch::url;
use crate::world::{End, World, WorldPod};

impl World {
    pub(crate) fn read_services(&self) -> BTreeMap<String, Service> {
        let services = self.services.iter().map(|(name, service)| {
            let seen = Service {
                uid: service.uid.to_string(),
                resource_version: service.version.to_string(),
                owned: service.owned,
                started: service.started,
                renewed: service.renewed,
                drifted: service.drifted,
                closed: service.closed,
                created: seconds(service.created),
            };
            (name.clone(), seen)
        });
        services.collect()
    }

    pub(crate) fn read_pods(&self) -> BTreeMap<String, Pod> {
        let pods = self.pods.iter().filter(|(name, _)| !is_elsewhere(name));
        let read = |name: &String, pod: &WorldPod| {
            let mut seen = read_pod(name, pod);
            self.show_image(pod, &mut seen);
            Self::show_old(pod, &mut seen);
            (name.clone(), seen)
        };
        pods.map(|(name, pod)| read(name, pod)).collect()
    }

    /// Completes an observation after the reads of Services and pods: reads the PVCs, the EtcdCluster, and finally
    /// etcd.
    pub(crate) fn observe(
        &self,
        services: BTreeMap<String, Service>,
        pods: BTreeMap<String, Pod>,
    ) -> Observed {
        self.observe_with(services, pods, self)
    }

    /// Like `observe`, but the answers of etcd come from the world `etcd`.
    pub(crate) fn observe_with(
        &self,
        services: BTreeMap<String, Service>,
        pods: BTreeMap<String, Pod>,
        etcd: &Self,
    ) -> Observed {
        let may_be_deleted = self.may_be_deleted();
        let disks = self.disks.iter().map(|(name, disk)| {
            let has_owner = !may_be_deleted || self.adopted.contains(&disk.uid);
            let seen = Disk {
                resource_version: disk.version.to_string(),
                removal: disk.removal,
                uid: disk.uid.to_string(),
                owned: disk.owned && has_owner,
                token: disk.marked.then(|| disk.token.clone()),
                cluster_id: disk.cluster_id,
                version: Some(self.setup.version.to_owned()),
                image: None,
                served: None,
                initial: disk.initial.clone(),
                retention: disk.retention.clone(),
                terminating: disk.terminating,
                lost: disk.lost,
                claim: disk.volume.claim(),
            };
            (name.clone(), seen)
        });
        let mut observed = Observed {
            cluster: "db".to_owned(),
            resource_version: self.object_version.to_string(),
            deleting: self.deleting,
            claimed_by: None,
            intent: self.intent.clone(),
            cluster_id: self.cluster_id,
            reported_voters: self.reported_voters.clone(),
            reported_version: None,
            disks: disks.collect(),
            pods,
            services,
            strangers: Vec::new(),
            shared: self.read_shared(),
            members: Seen::Unknown("no member runs".to_owned()),
            join: self.joins(),
            join_rule: runtime::endpoints::EndpointRule::default(),
            elsewhere: BTreeMap::new(),
            statuses: BTreeMap::new(),
            pulses: BTreeMap::new(),
            hashes: BTreeMap::new(),
            recovery: self.read_recovery(),
            before_change: self.read_before_change(),
            upkeep: cluster::upkeep::Upkeep::default(),
            tls: cluster::tls::Tls::default(),
            tls_rollout: None,
            certificates: cluster::certificates::Certificates::default(),
            access: cluster::access::Access::default(),
            clock: cluster::clock::ApiServerClock::default(),
            operator_image: Seen::Known(OperatorImage {
                image: "operator".to_owned(),
                pull_policy: None,
            }),
        };
        etcd.ask_etcd(&mut observed);
        self.see_versions(&mut observed);
        self.see_wishes(&mut observed);
        self.see_switch(&mut observed);
        self.see_authorities(&mut observed);
        observed
    }

    /// The shared objects as the operator observes them. A client Service that selects the pods of another cluster
    /// counts as drifted.
    fn read_shared(&self) -> Shared {
        let mut shared = self.shared.clone();
        let token = self.intent.as_ref().map(|intent| &intent.token);
        if shared.client != Kept::Missing && self.client_token.as_ref() != token {
            shared.client = Kept::Drifted;
        }
        shared
    }

    fn ask_etcd(&self, observed: &mut Observed) {
        if self.see_certificates(observed) {
            return;
        }
        let Some((token, elsewhere)) = self.asked_token(observed) else {
            return;
        };
        let intended = observed.intent.as_ref().map(|intent| &intent.token);
        let is_recorded = observed.cluster_id.is_some();
        let taken_over = |pod: &Pod| pod.owned && pod.token.is_none() && is_recorded;
        let ours = |pod: &Pod| pod.token.as_ref() == intended || taken_over(pod);
        let asked = observed.pods.iter();
        let asked = asked.filter(|(_, pod)| pod.addressed && pod.stays() && ours(pod));
        let names: Vec<String> = asked.map(|(name, _)| name.clone()).collect();
        let everybody = [names.as_slice(), &elsewhere].concat();
        if let Some(list) = self.read_list(&token, &everybody) {
            observed.members = Seen::Known(list);
        }
        for name in names {
            let answer = self.status(&token, &name);
            let seen = answer.map_or(Seen::Unknown("no answer".to_owned()), Seen::Known);
            observed.statuses.insert(name, seen);
        }
        self.ask_health(&token, observed);
        self.ask_elsewhere(&token, observed);
        if observed.cluster_id.is_some() && observed.members.known().is_none() {
            let answered = observed
                .statuses
                .iter()
                .filter(|(_, seen)| seen.known().is_some());
            let answered: Vec<String> = answered.map(|(name, _)| name.clone()).collect();
            self.ask_without_quorum(&token, &answered, &mut observed.recovery);
        }
    }

    /// The linearizable member list, from the first member that can answer: a voter that reaches the leader.
    pub(crate) fn read_list(&self, token: &str, via: &[String]) -> Option<Members> {
        let cluster = self.clusters.get(token)?;
        let open = via.iter().filter(|name| self.serves_clients(name));
        { open }.find_map(|name| {
            let (id, process) = cluster
                .running
                .iter()
                .find(|(_, process)| process.name == *name)?;
            let leader = cluster
                .leader(process.group)
                .filter(|_| self.operator_reaches(name))?;
            let known = &cluster.configs[self.data(&cluster.running[&leader].name)?.config];
            let votes = known.get(id).is_some_and(|member| !member.learner);
            votes.then(|| list(cluster.id, known))
        })
    }

    pub(crate) fn status(&self, token: &str, name: &str) -> Option<Status> {
        let cluster = self.clusters.get(token)?;
        let data = self.data(name).filter(|_| self.serves_clients(name))?;
        let process = cluster
            .running
            .get(&data.member)
            .filter(|process| process.name == name)?;
        let member = cluster.configs[data.config].get(&data.member);
        let learner = member.is_some_and(|member| member.learner);
        // The operator calls a learner at the address of its pod. Therefore, a learner without connections to other
        // members answers too, and reports its last known leader.
        let closed = self.services.get(name).is_some_and(|one| one.closed);
        let alone = learner && !closed && self.is_heard(name);
        if !self.operator_reaches(name) && !alone {
            return None;
        }
        let once = || cluster.serving().and_then(|group| cluster.leader(group));
        let leader = cluster.leader(process.group);
        let leader = leader.or_else(|| once().filter(|_| learner && data.last.index > 0));
        Some(Status {
            cluster_id: ClusterId(cluster.id),
            member_id: MemberId(data.member),
            version: self.setup.version.to_owned(),
            leader: leader.map(MemberId),
            is_learner: learner,
            revision: i64::try_from(data.last.index).unwrap(),
            raft_term: u64::try_from(data.term).unwrap(),
            raft_index: data.last.index,
            raft_applied_index: data.last.index,
            db_size: 0,
            db_size_in_use: 0,
            errors: Vec::new(),
            storage_version: None,
            downgrade: None,
        })
    }
}

/// A pod as the operator reads it from the API server.
fn read_pod(name: &str, pod: &WorldPod) -> Pod {
    let initial = match pod.start.state {
        State::OnDisk | State::FromSurvivor => BTreeSet::from([name.to_owned()]),
        State::New | State::Join => pod.start.initial.clone(),
    };
    let shown = pod.shown;
    let trouble = if pod.node.is_none() {
        Some(Trouble::Unschedulable("no node".to_owned()))
    } else {
        shown
            .failing
            .then(|| Trouble::Failing("exit code 1".to_owned()))
    };
    let ending = shown.ended.map(|(end, at)| Ending {
        at: seconds(at),
        cause: match end {
            End::Data => Cause::Data("checksum error".to_owned()),
            End::Failed => Cause::Failed("exit code 1".to_owned()),
            End::Ended => Cause::Ended,
        },
    });
    Pod {
        uid: pod.uid.to_string(),
        owned: pod.owned,
        token: Some(pod.start.token.clone()),
        cluster_id: pod.cluster_id,
        version: Some(pod.start.version.clone()),
        image: format!("etcd:v{}", pod.start.version),
        changed: None,
        flags: ["ETCD_MAX_LEARNERS".to_owned()].into(),
        snapshot_count: None,
        readyz: true,
        spec_hash: Some(format!("hash-{}", pod.settings)),
        difference: member::Difference::default(),
        initial,
        joins: pod.start.state != State::New,
        durable: pod.start.durable,
        terminating: pod.ends_in.is_some(),
        failed: pod.ended,
        addressed: shown.addressed,
        running: shown.running_since.is_some(),
        running_since: shown.running_since.map(seconds),
        ready: shown.ready,
        restarts: shown.restarts,
        role: Some(pod.role),
        trouble,
        unready_since: (!shown.ready).then(|| seconds(shown.unready_since)),
        lost_since: shown.lost_since.map(seconds),
        ending,
        node: pod.node.map(|node| format!("node-{node}")),
        created: seconds(pod.created),
    }
}

/// The time of a tick. A tick is three seconds, so two ticks cover the 5 s for which etcd requires connections.
pub(crate) fn seconds(ticks: u64) -> Timestamp {
    Timestamp::from_second(i64::try_from(ticks * 3).unwrap()).unwrap()
}

/// A configuration as etcd lists it: a member that has not started has no name and no client URL.
pub(crate) fn list(cluster_id: u64, config: &Config) -> Members {
    let members = config.iter().map(|(id, member)| etcd::Member {
        id: MemberId(*id),
        name: if member.joined {
            member.name.clone()
        } else {
            String::new()
        },
        peer_urls: vec![url(member)],
        client_urls: if member.joined {
            vec![format!("http://{}.ns.svc:2379", member.name)]
        } else {
            vec![]
        },
        is_learner: member.learner,
    });
    Members {
        cluster_id: ClusterId(cluster_id),
        members: members.collect(),
    }
}
