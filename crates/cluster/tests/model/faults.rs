//! Applies faults and requests of users to the world.

use std::collections::BTreeSet;

use cluster::snapshot::{Kept, RetentionNotes};
use etcd::ClusterId;

use crate::event::Event;
use crate::others::is_elsewhere;
use crate::world::{End, Power, World, WorldDisk, WorldNode, place, tell};

impl World {
    /// Applies an event to the world. The module `run` applies the events of the operators.
    pub(crate) fn strike(&mut self, event: Event) {
        match event {
            Event::Resize(size) => {
                self.size = size;
                tell!(self, "the user wants {size} members");
            }
            Event::Version(which) => self.want_version(which),
            Event::SwitchTls(which) => self.switch_tls(which),
            Event::LoseSecret(which) => self.lose_secret(which),
            Event::Heal => self.heal(),
            Event::ChangeSettings | Event::Hibernate | Event::Fill | Event::Mistrust(_) => {
                self.wish(event);
            }
            Event::Pause | Event::DeleteCluster | Event::Volumes(_) | Event::SpoilSecret(_) => {
                self.owner_does(event);
            }
            Event::StrikeJoining(how) => self.strike_joining(how),
            Event::AddByHand(which) => self.add_by_hand(which),
            Event::RemoveByHand(which) => self.remove_by_hand(which),
            Event::ForceNewCluster(which) => self.force_new_cluster(which),
            Event::Deafen => {
                self.faults.deaf = true;
                tell!(self, "etcd does not answer the operators");
            }
            Event::ForgetStatus => self.forget_status(),
            Event::ApiAway { ticks } => self.lose_api(ticks),
            Event::DeleteShared => {
                self.shared.headless = Kept::Missing;
                self.shared.client = Kept::Missing;
                self.shared.budget = Kept::Missing;
                tell!(
                    self,
                    "a user deletes the Services and the PodDisruptionBudget of the cluster"
                );
            }
            Event::Approve => self.approve(),
            Event::LoseVolume(which) => self.lose_volume(which),
            Event::Foreign => self.find_foreign(),
            Event::Partition(sides) => self.partition(sides),
            Event::DeletePods => {
                let ours = |name: &String| !is_elsewhere(name);
                for (_, pod) in self.pods.iter_mut().filter(|(name, _)| ours(name)) {
                    pod.ends_in = pod.ends_in.or(Some(1));
                }
                tell!(self, "a user deletes all pods");
            }
            Event::Reboot => {
                (0..self.nodes.len()).for_each(|node| self.node_off(node));
                (0..self.nodes.len()).for_each(|node| self.node_back(node));
                tell!(self, "all nodes are rebooted at once");
            }
            Event::NodeOff(_) | Event::NodeCut(_) | Event::NodeBack(_) | Event::NodeGone(_) => {
                self.strike_node(event);
            }
            Event::LoseDisk(_)
            | Event::DeleteClaim(_)
            | Event::DriftService(_)
            | Event::DeleteService(_) => self.strike_objects(event),
            _ => self.strike_pod(event),
        }
        // In the model, etcd notices the fault at once: after the loss of a quorum, etcd commits no further entry.
        self.run_clusters();
    }

    pub(crate) fn lose_api(&mut self, ticks: u8) {
        self.faults.api_away = self.now + u64::from(ticks);
        tell!(self, "the API server is unavailable for {ticks} ticks");
    }

    fn strike_pod(&mut self, event: Event) {
        let (Event::DeletePod(which)
        | Event::LosePod(which)
        | Event::Corrupt(which)
        | Event::CrashLoop(which)
        | Event::Isolate(which)
        | Event::Hide(which)
        | Event::Lag(which)
        | Event::Hold(which)
        | Event::EndPod(which)
        | Event::MoveLeader(which)) = event
        else {
            return;
        };
        // Only these four faults affect external members, because these faults lose no data.
        let anybody = matches!(
            event,
            Event::Isolate(_) | Event::Hide(_) | Event::Lag(_) | Event::MoveLeader(_)
        );
        let names = self.pods.keys();
        let names: Vec<&String> = names
            .filter(|name| anybody || !is_elsewhere(name))
            .collect();
        let Some(name) = pick(names.into_iter(), which) else {
            return;
        };
        match event {
            Event::DeletePod(_) => {
                let pod = self.pods.get_mut(&name).unwrap();
                pod.ends_in = pod.ends_in.or(Some(1 + which % 3));
                tell!(self, "a user deletes the pod of {name}");
            }
            Event::LosePod(_) => {
                self.lose_pod(&name);
            }
            Event::EndPod(_) => self.end_for_good(&name),
            Event::Corrupt(_) => {
                if let Some(data) = self.data_mut(&name) {
                    data.corrupt = true;
                    tell!(self, "etcd can no longer read the data of {name}");
                }
            }
            Event::CrashLoop(_) => {
                self.faults.crashing.insert(name.clone());
                tell!(self, "the container of {name} exits repeatedly");
            }
            Event::Isolate(_) => {
                let side = 10 + place(&name);
                self.faults.cut.insert(name.clone(), side);
                tell!(self, "no process reaches {name}");
            }
            Event::Hide(_) => {
                self.faults.hidden.insert(name.clone());
                tell!(self, "the operators do not reach {name}");
            }
            Event::Lag(_) => {
                self.faults.lagging.insert(name.clone());
                tell!(self, "{name} lags behind");
            }
            Event::Hold(_) => {
                self.faults.held.insert(name.clone());
                tell!(self, "no node accepts the pod of {name}");
            }
            _ => self.hand_leadership(&name),
        }
    }

    pub(crate) fn lose_pod(&mut self, name: &str) {
        self.pods.remove(name);
        tell!(self, "the pod of {name} is lost");
        self.run_clusters();
    }

    fn hand_leadership(&mut self, name: &str) {
        let Some(token) = self.intent.as_ref().map(|intent| intent.token.clone()) else {
            return;
        };
        let Some(mut cluster) = self.clusters.remove(&token) else {
            return;
        };
        let found = cluster
            .running
            .iter()
            .find(|(_, process)| process.name == name);
        let to = found.map(|(id, process)| (*id, cluster.leader(process.group)));
        if let Some((to, Some(leader))) = to.filter(|(to, leader)| *leader != Some(*to)) {
            let lagging = self.lagging(&cluster);
            cluster.hand_over(leader, to, &mut self.logs(&token), &lagging);
            tell!(self, "a user moves leadership to {name}");
        }
        self.clusters.insert(token, cluster);
    }

    fn strike_objects(&mut self, event: Event) {
        match event {
            Event::LoseDisk(which) => {
                let Some(name) = pick(self.disks.keys(), which) else {
                    return;
                };
                // The pod and the data are lost with the volume. The PVC remains in half of the cases.
                self.pods.remove(&name);
                if which < 128 {
                    self.disks.remove(&name);
                    tell!(self, "the volume of {name} is lost");
                } else if let Some(disk) = self.disks.get_mut(&name) {
                    (disk.lost, disk.data) = (true, None);
                    tell!(self, "the volume of {name} is lost, and its PVC remains");
                }
            }
            Event::DeleteClaim(which) => {
                let Some(name) = pick(self.disks.keys(), which) else {
                    return;
                };
                self.disks.get_mut(&name).unwrap().terminating = true;
                if !self.pods.contains_key(&name) {
                    self.disks.remove(&name);
                }
                tell!(self, "a user deletes the PVC of {name}");
            }
            Event::DriftService(which) => {
                let Some(name) = pick(self.services.keys(), which) else {
                    return;
                };
                let version = self.next();
                let service = self.services.get_mut(&name).unwrap();
                (service.drifted, service.version) = (true, version);
                tell!(self, "a user edits the Service of {name}");
            }
            // The model deletes a member's Service only while the client Service has endpoints. Without endpoints, no
            // client has written, and a member without Service and pod looks like a member that was never created.
            Event::DeleteService(_) if self.shared.client != Kept::AsMade(true) => {}
            Event::DeleteService(which) => {
                let Some(name) = pick(self.services.keys(), which) else {
                    return;
                };
                self.services.remove(&name);
                tell!(self, "a user deletes the Service of {name}");
            }
            _ => {}
        }
    }

    fn strike_node(&mut self, event: Event) {
        let (Event::NodeOff(which)
        | Event::NodeCut(which)
        | Event::NodeBack(which)
        | Event::NodeGone(which)) = event
        else {
            return;
        };
        let node = usize::from(which) % self.nodes.len();
        if self.nodes[node].power == Power::Gone {
            return;
        }
        match event {
            Event::NodeOff(_) => {
                self.node_off(node);
                tell!(self, "node-{node} is off");
            }
            Event::NodeCut(_) => {
                self.nodes[node].power = Power::Cut;
                tell!(self, "no process reaches node-{node}");
            }
            Event::NodeBack(_) => {
                self.node_back(node);
                tell!(self, "node-{node} is back");
            }
            _ => {
                self.node_off(node);
                self.nodes[node].power = Power::Gone;
                self.nodes.push(WorldNode {
                    power: Power::On,
                    silent_since: None,
                });
                tell!(
                    self,
                    "node-{node} is lost permanently, and node-{} replaces it",
                    self.nodes.len() - 1
                );
            }
        }
    }

    pub(crate) fn node_off(&mut self, node: usize) {
        if self.nodes[node].power == Power::Gone {
            return;
        }
        self.nodes[node].power = Power::Off;
        for pod in self.pods.values_mut().filter(|pod| pod.node == Some(node)) {
            pod.running = false;
            pod.ended |= pod.old;
        }
    }

    fn node_back(&mut self, node: usize) {
        if self.nodes[node].power == Power::Gone {
            return;
        }
        let was_off = self.nodes[node].power == Power::Off;
        self.nodes[node] = WorldNode {
            power: Power::On,
            silent_since: None,
        };
        let now = self.now;
        for pod in self.pods.values_mut().filter(|pod| pod.node == Some(node)) {
            pod.shown.lost_since = None;
            if was_off {
                // The kubelet restarts the pod's containers, which find their data on the `emptyDir` or the volume.
                pod.shown.restarts += 1;
                pod.shown.running_since = None;
                pod.shown.ended = Some((End::Ended, now));
            }
        }
    }

    fn partition(&mut self, sides: u8) {
        let names: BTreeSet<String> = self
            .services
            .keys()
            .chain(self.pods.keys())
            .cloned()
            .collect();
        for (at, name) in names.into_iter().enumerate() {
            if sides >> (at % 8) & 1 == 1 {
                self.faults.cut.insert(name, 1);
            } else {
                self.faults.cut.remove(&name);
            }
        }
        tell!(
            self,
            "the members are partitioned; in the second group are {:?}",
            self.faults.cut.keys()
        );
    }

    pub(crate) fn heal(&mut self) {
        self.faults = crate::world::Faults::default();
        for node in 0..self.nodes.len() {
            self.node_back(node);
        }
        tell!(self, "all reversible faults end");
    }

    fn find_foreign(&mut self) {
        if self.cluster_id.is_none() || self.deleting {
            return;
        }
        let name = self.member();
        let disk = WorldDisk {
            marked: true,
            version: 0,
            removal: None,
            retention: RetentionNotes::default(),
            volume: self.wishes.volume,
            uid: self.next(),
            initial: BTreeSet::new(),
            token: "another".to_owned(),
            cluster_id: Some(ClusterId(0xf00)),
            owned: false,
            terminating: false,
            lost: false,
            node: None,
            data: None,
        };
        tell!(
            self,
            "the PVC {name} remains from another cluster with this name"
        );
        self.disks.insert(name, disk);
    }

    /// Deletes the status, but only if the remaining objects identify the cluster: they all have one token, or only one
    /// of the tokens has the cluster ID. In a run with a second operator, which may have read the world earlier, every
    /// object must have the cluster ID.
    fn forget_status(&mut self) {
        let pods = self.pods.iter().filter(|(name, _)| !is_elsewhere(name));
        let pods = pods.map(|(_, pod)| (&pod.start.token, pod.cluster_id));
        let disks = self
            .disks
            .values()
            .map(|disk| (&disk.token, disk.cluster_id));
        let mut tokens: Vec<_> = pods.chain(disks).collect();
        tokens.sort();
        let unmarked = tokens.iter().any(|(_, cluster_id)| cluster_id.is_none());
        if self.setup.two && unmarked {
            return;
        }
        tokens.dedup_by_key(|(token, _)| (*token).clone());
        let current = self.intent.as_ref().map(|intent| &intent.token);
        if tokens.len() > 1
            || tokens
                .first()
                .is_some_and(|(token, _)| Some(*token) != current)
        {
            return;
        }
        if self.deleting || !self.tls_can_be_told() {
            return;
        }
        self.forget(unmarked && self.others.is_none());
        // The children lose their owner, because the EtcdCluster was deleted without its children.
        self.pods.values_mut().for_each(|pod| pod.owned = false);
        self.disks.values_mut().for_each(|disk| disk.owned = false);
        for service in self.services.values_mut() {
            service.owned = false;
        }
        self.intent = None;
        self.cluster_id = None;
        self.wishes.record = None;
        self.lose_tls_record();
        self.reported_voters.clear();
        self.named_before.clear();
        self.recovery = crate::recovery::Recorded {
            approval: self.recovery.approval.take(),
            ..Default::default()
        };
        self.object_version += 1;
        tell!(self, "the EtcdCluster is created again without its status");
    }
}

fn pick<'a>(names: impl ExactSizeIterator<Item = &'a String>, which: u8) -> Option<String> {
    let at = usize::from(which).checked_rem(names.len())?;
    names.into_iter().nth(at).cloned()
}
