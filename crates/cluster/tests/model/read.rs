//! What an operator reads of the world, in the order it reads it.

use std::collections::{BTreeMap, BTreeSet};

use cluster::observed::{Cause, Disk, Ending, Observed, Pod, Recovery, Seen, Service, Trouble};
use cluster::write::State;
use etcd::{ClusterId, MemberId, Members, Status};
use jiff::Timestamp;

use crate::etcd_model::Cluster;
use crate::world::{World, WorldPod};

impl World {
    pub(crate) fn read_services(&self) -> BTreeMap<String, Service> {
        let services = self.services.iter().map(|(name, service)| {
            let seen = Service {
                uid: service.uid.to_string(),
                resource_version: service.version.to_string(),
                owned: true,
                started: service.started,
                drifted: service.drifted,
                closed: service.closed,
                created: seconds(service.created),
            };
            (name.clone(), seen)
        });
        services.collect()
    }

    pub(crate) fn read_pods(&self) -> BTreeMap<String, Pod> {
        self.pods
            .iter()
            .map(|(name, pod)| (name.clone(), self.read_pod(name, pod)))
            .collect()
    }

    fn read_pod(&self, name: &str, pod: &WorldPod) -> Pod {
        let held = self.held.contains(name) && !pod.running;
        let initial = match pod.start.state {
            State::OnDisk | State::FromSurvivor => BTreeSet::from([name.to_owned()]),
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
            joins: pod.start.state != State::New,
            durable: pod.start.durable,
            terminating: pod.ends_in.is_some(),
            grace: pod
                .ends_in
                .map(|ticks| std::time::Duration::from_secs(u64::from(ticks))),
            failed: false,
            addressed: pod.running,
            running: pod.running,
            running_since: pod.running_since.map(seconds),
            ready: pod.running && !self.lost.contains_key(name),
            restarts: pod.restarts,
            role: Some(pod.role),
            trouble: held.then(|| Trouble::Unschedulable("no node".to_owned())),
            unready_since: self
                .damaged
                .get(name)
                .map(|since| seconds(*since.max(&pod.created))),
            lost_since: self.lost.get(name).map(|since| seconds(*since)),
            ending: self.damaged.contains_key(name).then(|| Ending {
                at: seconds(self.now),
                cause: Cause::Data("walpb: crc mismatch".to_owned()),
            }),
            node: None,
            created: seconds(pod.created),
        }
    }

    /// The rest of an observation, in the order the operator reads: claims and object after Services and pods,
    /// etcd last.
    pub(crate) fn observe(
        &self,
        services: BTreeMap<String, Service>,
        pods: BTreeMap<String, Pod>,
    ) -> Observed {
        let disks = self.disks.iter().map(|(name, disk)| {
            let seen = Disk {
                uid: disk.uid.to_string(),
                owned: disk.owned,
                token: Some(disk.token.clone()),
                cluster_id: disk.cluster_id,
                version: Some(self.version.to_owned()),
                initial: disk.initial.clone(),
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
            recovery: Recovery::default(),
        };
        self.ask_etcd(&mut observed);
        observed
    }

    fn ask_etcd(&self, observed: &mut Observed) {
        let Some(token) = observed.intent.as_ref().map(|intent| intent.token.clone()) else {
            return;
        };
        let Some(cluster) = self.clusters.get(&token) else {
            return;
        };
        let asked = observed
            .pods
            .iter()
            .filter(|(_, pod)| pod.running && pod.stays() && pod.token.as_ref() == Some(&token));
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
}

/// A tick is three seconds: two of them are etcd's rule of five.
pub(crate) fn seconds(ticks: u64) -> Timestamp {
    Timestamp::from_second(i64::try_from(ticks * 3).unwrap()).unwrap()
}

/// The linearizable list.
pub(crate) fn list(cluster: &Cluster) -> Members {
    let members = cluster.members.iter().map(|(id, member)| etcd::Member {
        id: MemberId(*id),
        name: if member.joined {
            member.name.clone()
        } else {
            String::new()
        },
        peer_urls: vec![format!("http://{}.ns.svc:2380", member.name)],
        client_urls: if member.joined {
            vec![format!("http://{}.ns.svc:2379", member.name)]
        } else {
            vec![]
        },
        is_learner: member.learner,
    });
    Members {
        cluster_id: ClusterId(cluster.id),
        members: members.collect(),
    }
}
