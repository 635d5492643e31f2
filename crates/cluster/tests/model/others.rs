//! Clusters that this operator did not start (ADR 15): pods of coreos/etcd-operator that it adopts, and members outside
//! of Kubernetes that an EtcdCluster joins and then replaces. Also contains manual changes with etcdctl.

use std::collections::BTreeSet;

use cluster::plan::{Start, State};
use cluster::reason::Reason;
use cluster::snapshot::{Kept, Observed, Pod, Role, Seen};
use etcd::ClusterId;

use crate::etcd_model::{Cluster, Config, Data, Member};
use crate::switch::PLAIN;
use crate::world::{Shown, World, WorldDisk, WorldPod, tell};
use crate::writes::Plan;

/// The software that started the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// This operator started the cluster.
    Here,
    /// coreos/etcd-operator started the cluster. Its pods never restart, and have neither annotations nor a Service.
    Old,
    /// A person started the cluster on external machines.
    Elsewhere,
}

/// Name prefix of external members.
const ELSEWHERE: &str = "vm-";

pub(crate) fn is_elsewhere(name: &str) -> bool {
    name.starts_with(ELSEWHERE)
}

impl World {
    /// Creates the cluster that exists before the operator starts.
    pub(crate) fn begin_elsewhere(&mut self) {
        let begun = self.setup.begun;
        if begun == Begun::Here {
            return;
        }
        let id = self.next() + 0xc000;
        let token = format!("db-{}", ClusterId(id));
        let mut config = Config::new();
        for _ in 0..self.setup.size {
            let name = self.member();
            let name = match begun {
                Begun::Elsewhere => name.replace("db-", ELSEWHERE),
                _ => name,
            };
            let member = Member {
                name,
                learner: false,
                joined: true,
                dialled: PLAIN,
            };
            config.insert(self.next(), member);
        }
        for (member, one) in &config {
            let data = Data::empty(&token, *member, 0);
            self.settle_member(&one.name, &token, data);
        }
        self.clusters
            .insert(token.clone(), Cluster::new(id, config));
        self.others = Some(token.clone());
        self.memory.know(&token, self.pods.keys());
        let old = self.pods.keys().filter(|name| !is_elsewhere(name));
        self.named_before = old.cloned().collect();
        if begun == Begun::Old {
            // The client Service counts as drifted, because the client Service of coreos/etcd-operator selects every
            // pod of the cluster, and the client Service of this operator does not.
            self.shared.client = Kept::Drifted;
            self.client_token = Some(token);
        }
        self.run_clusters();
        tell!(self, "other software started the cluster: {begun:?}");
    }

    fn settle_member(&mut self, name: &str, token: &str, data: Data) {
        let uid = self.next();
        let ours = !is_elsewhere(name);
        let durable = self.setup.durable && ours;
        let start = Start {
            member: name.to_owned(),
            state: State::New,
            initial: BTreeSet::new(),
            role: Role::Voter,
            durable,
            version: self.setup.version.to_owned(),
            token: token.to_owned(),
            cluster_id: None,
        };
        let node = ours.then(|| usize::try_from(uid).unwrap() % self.nodes.len());
        let mut pod = WorldPod {
            old: true,
            marked: false,
            node,
            running: true,
            starts_in: 0,
            shown: Shown {
                addressed: true,
                running_since: Some(0),
                ready: true,
                ..Shown::default()
            },
            ..self.new_pod(uid, &start)
        };
        if durable {
            let disk = WorldDisk {
                marked: false,
                node: node.filter(|_| self.setup.local),
                data: Some(data),
                ..self.new_disk(&start)
            };
            self.disks.insert(name.to_owned(), disk);
            self.note_disk(name, self.setup.version);
        } else {
            pod.data = Some(data);
        }
        self.pods.insert(name.to_owned(), pod);
        self.note_what_runs(name);
    }

    /// Shows the pods of coreos/etcd-operator as the API server returns them.
    pub(crate) fn show_old(pod: &WorldPod, seen: &mut Pod) {
        if !pod.marked {
            seen.token = None;
        }
        if pod.old {
            seen.role = pod.marked.then_some(pod.role);
            seen.flags.clear();
            (seen.readyz, seen.spec_hash) = (false, None);
        }
    }

    /// The token of the cluster that the operator queries, and the external members to query.
    pub(crate) fn asked_token(&self, observed: &Observed) -> Option<(String, Vec<String>)> {
        let intent = observed.intent.as_ref();
        let token = intent.map(|intent| intent.token.clone());
        let token = token.or_else(|| self.others.clone())?;
        let joined = intent.is_none_or(|intent| intent.members.is_empty());
        let elsewhere = self.pods.keys().filter(|name| is_elsewhere(name));
        let elsewhere: Vec<String> = elsewhere.filter(|_| joined).cloned().collect();
        Some((token, elsewhere))
    }

    /// Reads the status of each external member in the member list.
    pub(crate) fn ask_elsewhere(&self, token: &str, observed: &mut Observed) {
        let Seen::Known(list) = &observed.members else {
            return;
        };
        let names = list.members.iter().map(|one| one.name.clone());
        let names: Vec<String> = names.filter(|name| is_elsewhere(name)).collect();
        for name in names {
            let answer = self.status(token, &name);
            let seen = answer.map_or(Seen::Unknown("no answer".to_owned()), Seen::Known);
            observed.statuses.insert(name.clone(), seen);
            let url = format!("http://{name}.ns.svc:2379");
            observed.elsewhere.insert(name, url);
        }
    }

    pub(crate) fn joins(&self) -> Vec<String> {
        let there = self.setup.begun == Begun::Elsewhere;
        there
            .then(|| "http://vm:2379".to_owned())
            .into_iter()
            .collect()
    }

    /// True if clients can write to an external member, at the address of its machine.
    pub(crate) fn clients_elsewhere(&self, token: &str) -> bool {
        let members = self.clusters.get(token).map(Cluster::members);
        self.pods.iter().any(|(name, pod)| {
            let listed = || members.is_some_and(|all| all.values().any(|one| one.name == *name));
            is_elsewhere(name) && pod.running && pod.start.token == token && listed()
        })
    }

    /// True if the EtcdCluster has as many voters of its own as the spec requests.
    pub(crate) fn ours_are_enough(&self) -> bool {
        let voters = self.recorded().into_iter().flat_map(Cluster::voters);
        voters.filter(|(_, one)| !is_elsewhere(&one.name)).count() >= self.size
    }

    /// True if every member has a pod that this operator created.
    pub(crate) fn is_all_ours(&self) -> bool {
        let members = self
            .recorded()
            .into_iter()
            .flat_map(|all| all.members().values());
        let mut names = members.map(|member| &member.name);
        names.all(|name| {
            self.pods
                .get(name)
                .is_some_and(|pod| !pod.old && pod.marked)
        })
    }

    /// True if the operator only reports a lost quorum: the cluster is not recorded yet, or needs external members.
    pub(crate) fn is_given_up_by_others(&self, plan: &Plan) -> bool {
        let serves = |token: &String| self.clusters[token].serving().is_some();
        let all = || plan.waiting_for.iter().chain(&plan.problems);
        let says = |reasons: &[Reason]| all().any(|one| reasons.contains(&one.reason));
        // If the quorum cannot come back, `JoinWaits` lasts forever, because the operator never selects an external
        // member as the survivor of a recovery.
        let lost = !self.can_come_back() && says(&[Reason::JoinWaits]);
        let before = self.intent.is_none()
            && says(&[
                Reason::AdoptionWaits,
                Reason::JoinWaits,
                Reason::IdentityUnknown,
            ]);
        let silent = self.others.as_ref().is_some_and(|token| !serves(token));
        silent && (lost || before)
    }

    // ---- changes with etcdctl ----

    /// A person adds a member with etcdctl and never starts it.
    pub(crate) fn add_by_hand(&mut self, which: u8) {
        // The person adds no member to a cluster with one voter: a second voter that never starts would stop the
        // cluster, and the operator need not handle this mistake.
        if self.recorded().is_none_or(|all| all.voters().count() < 2) {
            return;
        }
        let name = self.member().replace("db-", "by-hand-");
        let learner = which.is_multiple_of(2) && self.knows_learners();
        let most = self.most_learners();
        tell!(self, "a person adds {name} to etcd");
        self.by_hand(|cluster, config, (group, now, new)| {
            let refused = cluster.refuses_addition(config, group, (learner, most), now);
            let member = Member {
                name,
                learner,
                joined: false,
                dialled: PLAIN,
            };
            config.insert(new, member);
            refused
        });
    }

    /// A person removes a member with etcdctl.
    pub(crate) fn remove_by_hand(&mut self, which: u8) {
        tell!(self, "a person removes a member from etcd");
        let mut removed = None;
        self.by_hand(|cluster, config, (group, now, _)| {
            let at = usize::from(which) % config.len();
            let id = *config.keys().nth(at)?;
            let refused = cluster.refuses_removal(config, (id, 0), group, now);
            let member = config.remove(&id);
            removed = member.filter(|_| refused.is_none());
            refused
        });
        if let Some(member) = removed {
            let left = self.recorded().map_or(0, |all| all.voters().count());
            self.note_vanished(&[member.name], left);
        }
    }

    /// The person who added members with etcdctl removes them again.
    pub(crate) fn tidy_by_hand(&mut self) {
        let foreign = |config: &Config| {
            let mut all = config.iter();
            let found = all.find(|(_, one)| one.name.starts_with("by-hand-"));
            found.map(|(id, _)| *id)
        };
        if self
            .recorded()
            .is_none_or(|all| foreign(all.members()).is_none())
        {
            return;
        }
        self.by_hand(|cluster, config, (group, now, _)| {
            let Some(id) = foreign(config) else {
                return Some("not found");
            };
            let refused = cluster.refuses_removal(config, (id, 0), group, now);
            config.remove(&id);
            refused
        });
    }

    fn by_hand(
        &mut self,
        change: impl FnOnce(&Cluster, &mut Config, (usize, u64, u64)) -> Option<&'static str>,
    ) {
        let recorded = self.intent.as_ref().filter(|_| self.cluster_id.is_some());
        let Some(token) = recorded.map(|intent| intent.token.clone()) else {
            return;
        };
        let Some(mut cluster) = self.clusters.remove(&token) else {
            return;
        };
        let (now, new) = (self.now, self.next());
        if let Some(leader) = cluster.leader(0) {
            let lagging = self.lagging(&cluster);
            let mut logs = self.logs(&token);
            let mut config = cluster.configs[logs[&leader].config].clone();
            if change(&cluster, &mut config, (0, now, new)).is_none() {
                cluster.append(leader, &mut logs, &lagging, Some(config));
            }
        }
        self.clusters.insert(token, cluster);
    }
}
