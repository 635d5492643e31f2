//! One tick of time for the nodes with their kubelets, the controllers of Kubernetes, and etcd.

use std::collections::BTreeMap;

use cluster::plan::{Start, State};
use cluster::snapshot::Kept;

use crate::etcd_model::{Cluster, Config, Data, Logs, Member, Moved, Process};
use crate::joining::serves_from;
use crate::others::is_elsewhere;
use crate::world::{End, Late, Power, World, WorldPod, tell};

impl World {
    pub(crate) fn tick(&mut self) {
        self.now += 1;
        self.move_nodes();
        self.collect_garbage();
        if !self.api_is_away() {
            self.end_pods();
        }
        self.close_lost_volumes();
        for name in self.pods.keys().cloned().collect::<Vec<_>>() {
            self.run_pod(&name);
        }
        self.run_clusters();
        self.deliver();
        self.remember();
    }

    /// Delivers writes whose sender no longer waits for their answers.
    fn deliver(&mut self) {
        let now = self.now;
        let all = std::mem::take(&mut self.late).into_iter();
        let (arrived, late): (Vec<Late>, Vec<Late>) = all.partition(|one| one.arrives <= now);
        self.late = late;
        for one in arrived {
            tell!(self, "arrives late: {}", one.write);
            self.memory.second = true;
            self.memory.seen = one.seen;
            self.switch.sender = one.sender;
            self.write(&one.write, &one.via);
        }
    }

    /// Kubernetes marks silent nodes as not ready and evicts their pods. No kubelet confirms the deletion of an evicted
    /// pod.
    fn move_nodes(&mut self) {
        let now = self.now;
        for node in &mut self.nodes {
            match node.power {
                Power::On => node.silent_since = None,
                Power::Off | Power::Cut | Power::Gone => {
                    node.silent_since = node.silent_since.or(Some(now));
                }
            }
        }
        if self.api_is_away() {
            return;
        }
        let evicts = self.setup.evicts;
        let silent: Vec<bool> = self
            .nodes
            .iter()
            .map(|node| node.silent_since.is_some_and(|since| now >= since + evicts))
            .collect();
        let ready: Vec<bool> = (0..self.nodes.len())
            .map(|node| self.is_ready(node))
            .collect();
        for (name, pod) in &mut self.pods {
            let own = self
                .disks
                .get(name)
                .and_then(|disk| disk.node)
                .filter(|_| pod.start.durable);
            let Some(node) = pod.node.or(own) else {
                continue;
            };
            if ready[node] {
                // A terminating pod keeps `lost_since` until a kubelet confirms the deletion of the pod, even if the
                // node is ready again.
                let stuck = pod.ends_in.is_some() && pod.shown.lost_since.is_some();
                pod.shown.lost_since = pod.shown.lost_since.filter(|_| stuck);
                continue;
            }
            pod.shown.lost_since = pod.shown.lost_since.or(Some(now));
            if std::mem::take(&mut pod.shown.ready) {
                pod.shown.unready_since = now;
            }
            if silent[node] && pod.node.is_some() && pod.ends_in.is_none() {
                pod.ends_in = Some(2);
            }
        }
    }

    fn end_pods(&mut self) {
        let nodes = &self.nodes;
        for pod in self.pods.values_mut() {
            let power = pod.node.map_or(Power::On, |node| nodes[node].power);
            match power {
                Power::On => pod.ends_in = pod.ends_in.map(|ticks| ticks.saturating_sub(1)),
                // Kubernetes deletes the pods of a node that has been removed.
                Power::Gone => pod.ends_in = Some(0),
                Power::Off | Power::Cut => {}
            }
        }
        self.pods.retain(|_, pod| pod.ends_in != Some(0));
        let pods = &self.pods;
        self.disks
            .retain(|name, disk| !disk.terminating || pods.contains_key(name));
    }

    /// One tick of a pod: the scheduler, the kubelet, and the start of etcd.
    fn run_pod(&mut self, name: &str) {
        let pod = &self.pods[name];
        let off = matches!(self.power(pod), Power::Off | Power::Gone);
        if off || pod.ended {
            self.pods.get_mut(name).unwrap().running = false;
            return;
        }
        if pod.node.is_none() && !is_elsewhere(name) && !self.schedule(name) {
            return;
        }
        if !self.pods[name].running && self.has_lost_its_volume(name) {
            return;
        }
        // A pod does not start while the Secret with its certificates is missing or invalid.
        if self.faults.member_secret && !self.pods[name].running && !is_elsewhere(name) {
            return;
        }
        if !self.mounts(name) {
            return;
        }
        let (api_is_away, power) = (self.api_is_away(), self.power(&self.pods[name]));
        let pod = self.pods.get_mut(name).unwrap();
        if !pod.running && pod.starts_in > 0 {
            pod.starts_in -= 1;
            return;
        }
        let was = pod.running;
        let hears = !api_is_away && power == Power::On;
        if hears && self.ends_for_its_image(name) || self.has_no_image(name, hears) {
            return;
        }
        let end = self.start_etcd(name);
        let (now, runs) = (self.now, end.is_none());
        let is_notified = !api_is_away && power == Power::On;
        if runs && !was {
            self.note_what_runs(name);
            self.loads(name);
            let from = serves_from(&self.pods[name], self.setup.silent, now);
            self.pods.get_mut(name).unwrap().serves_from = from;
        }
        if was && !runs && self.pods[name].old && !is_elsewhere(name) {
            self.end_for_good(name);
            return;
        }
        let ready = runs && self.has_leader(name);
        let pod = self.pods.get_mut(name).unwrap();
        pod.running = runs;
        pod.shown.restarts += i32::from(!runs);
        if is_notified {
            let shown = &mut pod.shown;
            shown.addressed = true;
            shown.running_since = runs.then(|| shown.running_since.unwrap_or(now));
            if shown.ready && !ready {
                shown.unready_since = now;
            }
            (shown.ready, shown.failing) = (ready, !runs);
            shown.ended = end.map(|end| (end, now)).or(shown.ended);
        }
        if was != runs {
            tell!(
                self,
                "the etcd of {name} {}",
                if runs { "runs" } else { "has ended" }
            );
        }
    }

    /// Assigns the pod to the node of its local volume, or to the node with the fewest pods. Returns false if no node
    /// accepts the pod.
    fn schedule(&mut self, name: &str) -> bool {
        let pod = &self.pods[name];
        let bound = self.disks.get(name);
        let unbound = pod.start.durable && bound.is_none_or(|disk| disk.lost);
        if unbound || self.faults.held.contains(name) || self.api_is_away() {
            return false;
        }
        let local = bound.and_then(|disk| disk.node);
        let load = |node: usize| {
            self.pods
                .values()
                .filter(|pod| pod.node == Some(node))
                .count()
        };
        let fits = |node: &usize| self.is_ready(*node) && local.is_none_or(|own| own == *node);
        let Some(node) = (0..self.nodes.len())
            .filter(fits)
            .min_by_key(|node| load(*node))
        else {
            return false;
        };
        if self.setup.local
            && let Some(disk) = self.disks.get_mut(name)
        {
            disk.node = Some(node);
        }
        self.pods.get_mut(name).unwrap().node = Some(node);
        true
    }

    /// Starts the container. Returns how the container exits; `None` if it continues to run.
    fn start_etcd(&mut self, name: &str) -> Option<End> {
        if self.faults.crashing.contains(name) {
            return Some(End::Failed);
        }
        if self.is_too_old(name) {
            return Some(End::Failed);
        }
        if let Some(data) = self.data(name) {
            return (data.removed || data.corrupt).then_some(if data.corrupt {
                End::Data
            } else {
                End::Failed
            });
        }
        let start = self.pods[name].start.clone();
        if start.state == State::FromSurvivor {
            let Some(data) = self.seed_member(&start) else {
                return Some(End::Failed);
            };
            self.starts_from_survivor(&start);
            self.keep_data(&start, data);
            return None;
        }
        if start.state == State::Join && self.rejects_new_members(&start.token) {
            return Some(End::Failed);
        }
        let found = match start.state {
            State::New => self.first_member(&start),
            State::Join => self.joining_member(&start),
            // The member finds no cluster to join: `--initial-cluster` contains only the member itself.
            State::OnDisk | State::FromSurvivor => None,
        };
        let Some((member, config)) = found else {
            return Some(if start.state == State::OnDisk {
                End::Data
            } else {
                End::Failed
            });
        };
        self.starts_empty(name);
        self.keep_data(&start, Data::empty(&start.token, member, config));
        None
    }

    fn keep_data(&mut self, start: &Start, data: Data) {
        match self.disks.get_mut(&start.member) {
            Some(disk) if start.durable => disk.data = Some(data),
            _ => self.pods.get_mut(&start.member).unwrap().data = Some(data),
        }
    }

    /// Starts a bootstrap member: the token and the bootstrap members define the cluster. etcd exits if another member
    /// knows that this member has started before (`isMemberBootstrapped`).
    fn first_member(&mut self, start: &Start) -> Option<(u64, usize)> {
        if !self.clusters.contains_key(&start.token) {
            let id = self.next() + 0xc000;
            let usual = self.usual_of(&start.member);
            let mut first = Config::new();
            for name in &start.initial {
                let member = Member {
                    name: name.clone(),
                    learner: false,
                    joined: false,
                    dialled: usual,
                };
                first.insert(self.next(), member);
            }
            self.clusters
                .insert(start.token.clone(), Cluster::new(id, first));
        }
        let known = self.remote_config(start).is_some_and(|config| {
            let cluster = &self.clusters[&start.token];
            cluster.configs[config]
                .values()
                .any(|member| member.name == start.member && member.joined)
        });
        let cluster = &self.clusters[&start.token];
        let own = cluster.configs[0]
            .iter()
            .find(|(_, member)| member.name == start.member);
        own.filter(|_| !known).map(|(id, _)| (*id, 0))
    }

    /// Starts a joining member. As in etcd, the first other member that answers returns its list, and etcd compares
    /// `--initial-cluster` with this list.
    fn joining_member(&self, start: &Start) -> Option<(u64, usize)> {
        let config = self.remote_config(start)?;
        let members = &self.clusters[&start.token].configs[config];
        let same = members.len() == start.initial.len()
            && members
                .values()
                .all(|member| start.initial.contains(&member.name));
        let own = members
            .iter()
            .find(|(_, member)| member.name == start.member);
        let same = same && self.has_listed_peer_urls(&start.member, members);
        own.filter(|_| same).map(|(id, _)| (*id, config))
    }

    /// The configuration of the first peer that answers. As in etcd, this read is not linearizable.
    fn remote_config(&self, start: &Start) -> Option<usize> {
        let cluster = self.clusters.get(&start.token)?;
        // The new member can reach the members of this group, even if they cannot reach the new member yet.
        let group = self.group_it_dials(&start.member);
        let answers = |name: &&String| {
            let found = cluster
                .running
                .values()
                .any(|process| process.name == **name && process.group == group);
            found
                && **name != start.member
                && self.pods.get(*name).is_some_and(|pod| pod.running)
                && self.finds(&start.member, name)
        };
        let peer = start.initial.iter().find(answers)?;
        self.data(peer).map(|data| data.config)
    }

    pub(crate) fn run_clusters(&mut self) {
        for token in self.clusters.keys().cloned().collect::<Vec<_>>() {
            self.run_cluster(&token);
        }
    }

    fn run_cluster(&mut self, token: &str) {
        let mut cluster = self.clusters.remove(token).unwrap();
        self.connect(token, &mut cluster);
        let mut groups: Vec<usize> = cluster
            .running
            .values()
            .map(|process| process.group)
            .collect();
        groups.sort_unstable();
        groups.dedup();
        for group in groups {
            let writes = group == 0 && self.client_reaches(token) && !self.is_alarmed(token);
            let lagging = self.lagging(&cluster);
            let moved = cluster.step((group, self.now), &mut self.logs(token), &lagging, writes);
            self.tell_move(&cluster, &moved);
            self.judge_move(token, &moved);
        }
        self.agree_on_a_version(token, &cluster);
        self.clusters.insert(token.to_owned(), cluster);
    }

    /// Computes which processes run, and which processes reach each other.
    fn connect(&mut self, token: &str, cluster: &mut Cluster) {
        let mut before = std::mem::take(&mut cluster.running);
        let apart = self.groups(token, cluster);
        for (name, pod) in &self.pods {
            let data = self
                .data(name)
                .filter(|data| pod.running && data.token == token);
            let Some(data) = data.filter(|data| !data.removed && !data.corrupt) else {
                continue;
            };
            let group = apart.get(&data.member).copied();
            let group = group.unwrap_or_else(|| self.group(name));
            let process = match before
                .remove(&data.member)
                .filter(|process| process.group == group)
            {
                Some(process) => process,
                None => Process {
                    name: name.clone(),
                    group,
                    since: self.now,
                    leads: None,
                },
            };
            cluster.running.insert(data.member, process);
        }
    }

    /// Computes the groups from the members' TLS settings and certificates. Returns an empty map in runs without TLS
    /// changes and without lost certificates.
    fn groups(&mut self, token: &str, cluster: &Cluster) -> BTreeMap<u64, usize> {
        if !self.plays_tls() && !self.plays_authorities() {
            return BTreeMap::new();
        }
        let runs = |(name, pod): (&String, &WorldPod)| {
            let data = self.data(name);
            let data = data.filter(|data| pod.running && data.token == token)?;
            let talks = !data.removed && !data.corrupt;
            talks.then(|| (data.member, name.clone(), self.group(name), data.config))
        };
        let all: Vec<_> = self.pods.iter().filter_map(runs).collect();
        self.take_apart(cluster, &all)
    }

    /// The data of each running member of this cluster.
    pub(crate) fn logs(&mut self, token: &str) -> Logs<'_> {
        let mut logs = Logs::new();
        let mut disks = self.disks.iter_mut().peekable();
        for (name, pod) in self.pods.iter_mut().filter(|(_, pod)| pod.running) {
            while disks.next_if(|(other, _)| *other < name).is_some() {}
            let disk = disks
                .next_if(|(other, _)| *other == name)
                .and_then(|(_, disk)| disk.data.as_mut());
            if let Some(data) = disk
                .or(pod.data.as_mut())
                .filter(|data| data.token == token)
            {
                logs.insert(data.member, data);
            }
        }
        logs
    }

    pub(crate) fn lagging(&self, cluster: &Cluster) -> Vec<u64> {
        let slow = cluster
            .running
            .iter()
            .filter(|(_, process)| self.faults.lagging.contains(&process.name));
        slow.map(|(id, _)| *id).collect()
    }

    /// True if clients reach this cluster, at an endpoint of the client Service or at an external member.
    fn client_reaches(&self, token: &str) -> bool {
        let serves = |pod: &WorldPod| {
            let open = self.now >= pod.serves_from;
            open && pod.shown.ready && pod.ends_in.is_none() && pod.start.token == token
        };
        let selected = self.client_token.as_deref() == Some(token);
        // A `Drifted` client Service was created by coreos/etcd-operator, and selects every pod.
        let open = matches!(self.shared.client, Kept::AsMade(true) | Kept::Drifted);
        selected && open && self.pods.values().any(serves) || self.clients_elsewhere(token)
    }

    fn tell_move(&mut self, cluster: &Cluster, moved: &Moved) {
        if let Some(elected) = moved.elected {
            let name = &cluster.running[&elected].name;
            tell!(
                self,
                "{name} is elected in group {}",
                cluster.running[&elected].group
            );
        }
    }
}
