//! Checks for changes of the TLS settings that invariants forbid.

use api::cluster::TlsStatus;
use cluster::snapshot::{Kept, Role};
use cluster::switch::{Clients, TlsMode};

use super::takes;
use crate::etcd_model::{Cluster, quorum, voters};
use crate::invariants::demand;
use crate::others::is_elsewhere;
use crate::world::{World, WorldPod};

impl World {
    /// Checks invariants 20 and 23: the TLS settings of the members partition no quorum.
    pub(super) fn judge_parts(
        &mut self,
        cluster: &Cluster,
        all: &[(u64, String, usize, usize)],
        parts: &[(usize, Vec<usize>)],
    ) {
        if self.switch.untold || self.is_torn() {
            return;
        }
        let config = cluster.members();
        let needed = quorum(config);
        let count = |ids: &mut dyn Iterator<Item = u64>| {
            ids.filter(|id| voters(config).any(|(voter, _)| voter == id))
                .count()
        };
        let mut torn = None;
        for group in all.iter().map(|one| one.2) {
            let whole = count(&mut all.iter().filter(|one| one.2 == group).map(|one| one.0));
            let serves = parts
                .iter()
                .filter(|part| part.0 == group)
                .any(|part| count(&mut part.1.iter().map(|at| all[*at].0)) >= needed);
            if whole >= needed && !serves {
                let modes = all.iter().map(|one| (&one.1, self.mode(&one.1)));
                torn = Some(format!("{:?}", modes.collect::<Vec<_>>()));
            }
        }
        demand!(
            self,
            torn.is_none(),
            "invariants 20 and 23: the TLS settings of the members partition a quorum: {torn:?}"
        );
    }

    /// Checks invariant 23: the next stage is adjacent to the current stage, all members serve with the current stage,
    /// and their peer URLs stay valid.
    pub(super) fn judge_record(&mut self, record: &TlsStatus) {
        let Some(cluster) = self.recorded().cloned() else {
            return;
        };
        let to = TlsMode::of(record.policy().as_ref());
        let before = self.switch.record.as_ref();
        let before = before.filter(|before| before.token == record.token);
        let before = before.map(|before| TlsMode::of(before.policy().as_ref()));
        let Some(from) = before.filter(|from| *from != to) else {
            return;
        };
        demand!(
            self,
            from.peers.towards(to.peers) == to.peers,
            "invariant 23: a stage between {from:?} and {to:?} is skipped"
        );
        let leaps = matches!(
            (from.clients, to.clients),
            (Clients::Plain, Clients::Tls) | (Clients::Tls, Clients::Plain)
        );
        demand!(
            self,
            !leaps,
            "invariant 20: the protocol of clients changes from {from:?} to {to:?} in one step"
        );
        let (moves, fresh) = (from.peers != to.peers, self.memory.fresh);
        for (id, member) in cluster.members() {
            let name = &member.name;
            let mode = self.mode(name);
            demand!(
                self,
                !fresh || cluster.is_up(*id) && [Some(from), Some(to)].contains(&mode),
                "invariant 23: the TLS stage changes from {from:?} to {to:?}, but {name} is down or runs with neither stage: {mode:?}"
            );
            demand!(
                self,
                !moves || to.peers.listeners().contains(&member.dialled),
                "invariant 23: the peer URL of {name} names {:?}, but members that {} do not listen there",
                member.dialled,
                to.words()
            );
        }
    }

    /// Checks invariant 23: every member has a peer URL at which it listens, and to which every other member can
    /// connect. Checks invariant 20: no member rejects the protocol of a client that follows the documented order.
    pub(crate) fn judge_switch(&mut self) {
        if !self.plays_tls() {
            return;
        }
        self.notice_silence();
        if self.switch.untold || self.cluster_id.is_none() {
            return;
        }
        let Some(cluster) = self.recorded() else {
            return;
        };
        let running = || {
            cluster
                .members()
                .iter()
                .filter(|(id, one)| cluster.running.contains_key(id) && !is_elsewhere(&one.name))
        };
        let mut deaf = None;
        for (_, one) in running() {
            for (_, other) in running().filter(|(_, other)| other.name != one.name) {
                let mode = self.mode(&one.name);
                if !mode.is_some_and(|mode| self.dials(mode, &other.name, other.dialled)) {
                    let pair = [(&one.name, mode), (&other.name, self.mode(&other.name))];
                    deaf = Some(format!("{pair:?} at {:?}", other.dialled));
                }
            }
        }
        demand!(
            self,
            deaf.is_none(),
            "invariant 23: the first member cannot connect to the second: {deaf:?}"
        );
        self.judge_clients();
    }

    pub(super) fn judge_clients(&mut self) {
        let token = self.client_token.as_ref();
        let intended = self.intent.as_ref().map(|intent| &intent.token);
        if self.shared.client != Kept::AsMade(true) || token != intended {
            return;
        }
        let leads_to = |pod: &WorldPod| {
            let there = pod.shown.ready && pod.running && pod.ends_in.is_none();
            there && pod.role == Role::Voter && Some(&pod.start.token) == token
        };
        let clients = self.switch.clients;
        let shut = self.pods.iter().find(|(name, pod)| {
            leads_to(pod) && !is_elsewhere(name) && !takes(self.made_with(pod.uid), clients)
        });
        let shut = shut.map(|(name, pod)| (name.clone(), self.made_with(pod.uid)));
        demand!(
            self,
            shut.is_none(),
            "invariant 20: clients use {clients:?}, which {shut:?} does not accept"
        );
    }
}
