//! All simulated etcd clusters. Answers calls to members, which are identified by the IP address of their pod.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use prost::{DecodeError, Message};
use tokio::sync::Notify;

use super::cluster::{Cluster, Refusal, Start};
use super::wire::{self, Header};

/// Size of each database in bytes: the size of an empty database.
const DB_SIZE: i64 = 20_480;
/// The name under which requests to the health listener are counted.
const HEALTH: &str = "health listener";

/// The answer to a call.
#[derive(Debug, PartialEq)]
pub(super) enum Answer {
    /// An encoded response.
    Message(Vec<u8>),
    /// The error with which etcd refuses the call.
    Refused(Refusal),
    /// The cluster has no quorum, so the member answers only after etcd's own timeout.
    NoQuorum,
}

#[derive(Default)]
struct State {
    /// The clusters by their tokens.
    clusters: HashMap<String, Cluster>,
    /// For each running etcd, by the IP address of its pod: the cluster token and the member ID.
    processes: HashMap<IpAddr, (String, u64)>,
    /// IP addresses of pods that may have become ready or unready.
    changed: Vec<IpAddr>,
    /// Number of calls, by method.
    calls: BTreeMap<String, u64>,
}

/// The simulated clusters.
#[derive(Default)]
pub(super) struct Fleet {
    state: Mutex<State>,
    /// Notified after each change of a cluster.
    pub(super) changed: Notify,
}

impl State {
    /// Adds the pods of a cluster to `changed`, and removes processes whose members are no longer in the cluster.
    fn touch(&mut self, token: &str) {
        let Some(cluster) = self.clusters.get(token) else {
            return;
        };
        let changed = &mut self.changed;
        self.processes.retain(|address, (of, id)| {
            let is_touched = of.as_str() == token;
            if is_touched {
                changed.push(*address);
            }
            !is_touched || cluster.member(*id).is_some()
        });
    }
}

impl Fleet {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts etcd in a pod. Creates the cluster if the pod is the first of a new cluster.
    pub(super) fn start(&self, start: &Start, address: IpAddr) {
        let mut state = self.state();
        if !start.joins && !state.clusters.contains_key(&start.token) {
            let cluster = Cluster::bootstrap(start);
            state.clusters.insert(start.token.clone(), cluster);
        }
        let cluster = state.clusters.get_mut(&start.token);
        let id = cluster.and_then(|cluster| cluster.start(start, Instant::now()));
        if let Some(id) = id {
            state.processes.insert(address, (start.token.clone(), id));
            state.touch(&start.token);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Stops the etcd of a pod, if it runs.
    pub(super) fn stop(&self, address: IpAddr) {
        let mut state = self.state();
        if let Some((token, id)) = state.processes.remove(&address) {
            if let Some(cluster) = state.clusters.get_mut(&token) {
                cluster.stop(id);
            }
            state.touch(&token);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// True if an etcd runs at this address.
    pub(super) fn runs(&self, address: IpAddr) -> bool {
        self.state().processes.contains_key(&address)
    }

    /// The IP addresses of pods that may have changed since the last call. The flag is true if the pod is ready: its
    /// etcd runs, and its cluster has a quorum.
    pub(super) fn take_changes(&self) -> Vec<(IpAddr, bool)> {
        let mut state = self.state();
        let changed = std::mem::take(&mut state.changed);
        let ready = |address: IpAddr| {
            let process = state.processes.get(&address);
            let cluster = process.and_then(|(token, _)| state.clusters.get(token));
            (address, cluster.is_some_and(Cluster::has_quorum))
        };
        changed.into_iter().map(ready).collect()
    }

    /// Number of clusters with exactly `size` members that are all voters and run this version.
    pub(super) fn complete(&self, size: usize, version: &str) -> usize {
        let state = self.state();
        let complete = |cluster: &&Cluster| cluster.is_complete(size, version);
        state.clusters.values().filter(complete).count()
    }

    /// Deletes all clusters.
    pub(super) fn clear(&self) {
        let mut state = self.state();
        state.clusters.clear();
        state.processes.clear();
    }

    /// Number of calls since the start, by method.
    pub(super) fn calls(&self) -> BTreeMap<String, u64> {
        self.state().calls.clone()
    }

    /// The metrics that the health listener of a member serves. `None` if no etcd runs at this address.
    pub(super) fn health(&self, address: IpAddr) -> Option<String> {
        let mut state = self.state();
        count(&mut state.calls, HEALTH);
        let (token, own) = state.processes.get(&address)?;
        let cluster = state.clusters.get(token)?;
        let mut page = String::new();
        let others = cluster.members.iter();
        for other in others.filter(|other| other.id != *own && other.process.is_some()) {
            let id = other.id;
            let _ = writeln!(
                page,
                "etcd_network_active_peers{{Local=\"{own:x}\",Remote=\"{id:x}\"}} 1"
            );
        }
        let (leads, index) = (u8::from(cluster.leader.is_some()), cluster.index);
        let _ = writeln!(
            page,
            "etcd_server_has_leader {leads}\netcd_server_id{{server_id=\"{own:x}\"}} 1\n\
             etcd_server_proposals_applied_total {index}"
        );
        Some(page)
    }

    /// Answers a gRPC call, such as `Cluster/MemberList`. `None` if no etcd runs at this address.
    ///
    /// # Errors
    /// Fails if the request cannot be decoded.
    pub(super) fn call(
        &self,
        address: IpAddr,
        method: &str,
        request: &[u8],
    ) -> Result<Option<Answer>, DecodeError> {
        let mut state = self.state();
        count(&mut state.calls, method);
        let Some((token, own)) = state.processes.get(&address).cloned() else {
            return Ok(None);
        };
        let Some(cluster) = state.clusters.get_mut(&token) else {
            return Ok(None);
        };
        let before = cluster.index;
        let answer = answer(cluster, own, method, request)?;
        if cluster.index != before {
            state.touch(&token);
            drop(state);
            self.changed.notify_one();
        }
        Ok(Some(answer))
    }
}

fn count(calls: &mut BTreeMap<String, u64>, method: &str) {
    match calls.get_mut(method) {
        Some(count) => *count += 1,
        None => drop(calls.insert(method.to_owned(), 1)),
    }
}

fn answer(
    cluster: &mut Cluster,
    own: u64,
    method: &str,
    request: &[u8],
) -> Result<Answer, DecodeError> {
    let is_learner = cluster.member(own).is_some_and(|member| member.is_learner);
    if is_learner && method != "Maintenance/Status" {
        return Ok(Answer::Refused(Refusal::NotForLearner));
    }
    // A member answers these calls without a quorum. All other calls need a quorum.
    let local = [
        "Maintenance/Status",
        "Maintenance/HashKV",
        "Maintenance/Defragment",
        "Cluster/MemberList",
    ];
    if !local.contains(&method) && !cluster.has_quorum() {
        return Ok(Answer::NoQuorum);
    }
    let done = match method {
        "Maintenance/Status" => Ok(status(cluster, own).encode_to_vec()),
        "Maintenance/HashKV" => {
            let revision = match wire::AtRevision::decode(request)?.revision {
                0 => cluster.revision,
                revision => revision,
            };
            let hash = wire::KeyHash {
                header: Some(header(cluster, own)),
                // The hash is the same for all members, because they have the same data.
                hash: u32::try_from(cluster.id >> 32).unwrap_or_default(),
                compact_revision: cluster.compacted,
                hash_revision: revision,
            };
            Ok(hash.encode_to_vec())
        }
        "Maintenance/Defragment" | "KV/Range" => Ok(empty(cluster, own)),
        // etcd adds an entry to the Raft log for every request of this method, even if the request only lists the
        // alarms.
        "Maintenance/Alarm" => {
            cluster.index += 1;
            Ok(empty(cluster, own))
        }
        "KV/Compact" => {
            let revision = wire::AtRevision::decode(request)?.revision;
            cluster.compacted = cluster.compacted.max(revision);
            cluster.index += 1;
            Ok(empty(cluster, own))
        }
        "Maintenance/MoveLeader" => {
            let to = wire::OneMember::decode(request)?.id;
            let moved = cluster.move_leader(own, to);
            moved.map(|()| empty(cluster, own))
        }
        _ => return membership(cluster, own, method, request),
    };
    Ok(done.map_or_else(Answer::Refused, Answer::Message))
}

/// Answers a call that lists or changes the members.
fn membership(
    cluster: &mut Cluster,
    own: u64,
    method: &str,
    request: &[u8],
) -> Result<Answer, DecodeError> {
    let now = Instant::now();
    let done = match method {
        "Cluster/MemberAdd" => {
            let add = wire::Add::decode(request)?;
            return Ok(
                match cluster.add(own, &add.peer_urls, add.is_learner, now) {
                    Ok(id) => {
                        let added = wire::Added {
                            header: Some(header(cluster, own)),
                            member: list(cluster).into_iter().find(|one| one.id == id),
                            members: list(cluster),
                        };
                        Answer::Message(added.encode_to_vec())
                    }
                    Err(refusal) => Answer::Refused(refusal),
                },
            );
        }
        "Cluster/MemberList" => Ok(()),
        "Cluster/MemberRemove" => cluster.remove(own, wire::OneMember::decode(request)?.id, now),
        "Cluster/MemberPromote" => cluster.promote(wire::OneMember::decode(request)?.id),
        "Cluster/MemberUpdate" => {
            let update = wire::Update::decode(request)?;
            cluster.update(update.id, &update.peer_urls)
        }
        _ => Err(Refusal::Unimplemented),
    };
    Ok(match done {
        Ok(()) => Answer::Message(
            wire::Members {
                header: Some(header(cluster, own)),
                members: list(cluster),
            }
            .encode_to_vec(),
        ),
        Err(refusal) => Answer::Refused(refusal),
    })
}

fn header(cluster: &Cluster, own: u64) -> Header {
    Header {
        cluster_id: cluster.id,
        member_id: own,
        revision: cluster.revision,
        raft_term: cluster.term,
    }
}

fn empty(cluster: &Cluster, own: u64) -> Vec<u8> {
    let header = Some(header(cluster, own));
    wire::Empty { header }.encode_to_vec()
}

fn list(cluster: &Cluster) -> Vec<wire::Member> {
    let entry = |member: &super::cluster::Member| wire::Member {
        id: member.id,
        name: member.name.clone(),
        peer_urls: member.peer_urls.clone(),
        client_urls: member.client_urls.clone(),
        is_learner: member.is_learner,
    };
    cluster.members.iter().map(entry).collect()
}

fn status(cluster: &Cluster, own: u64) -> wire::Status {
    let member = cluster.member(own);
    let process = member.and_then(|member| member.process.as_ref());
    let version = process.map_or_else(String::new, |process| process.version.clone());
    let minor: Vec<&str> = version.split('.').take(2).collect();
    wire::Status {
        header: Some(header(cluster, own)),
        storage_version: format!("{}.0", minor.join(".")),
        version,
        db_size: DB_SIZE,
        leader: cluster.leader.unwrap_or(0),
        raft_index: cluster.index,
        raft_term: cluster.term,
        raft_applied_index: cluster.index,
        errors: Vec::new(),
        db_size_in_use: DB_SIZE,
        is_learner: member.is_some_and(|member| member.is_learner),
    }
}
