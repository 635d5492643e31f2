//! The world of the model: an API server with its controllers, nodes with their kubelets, disks, and etcd.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crate::writes::Write;
use api::EtcdCluster;
use cluster::naming::Names;
use cluster::plan::Start;
use cluster::snapshot::{
    Desired, Intent, Kept, Observed, RecoveryRule, Removal, RetentionNotes, Role, Shared,
};
use etcd::ClusterId;
use member::Operators;
use serde_json::json;

use crate::authorities::Pki;
use crate::etcd_model::{Cluster, Data};
use crate::invariants::Memory;
use crate::owner::Volume;
use crate::recovery::Recorded;
use crate::run::Setup;
use crate::switch::{Sender, Switch};
use crate::versions::Versions;
use crate::wishes::{Wishes, rule};

/// Adds a line to the story, if the story is printed.
macro_rules! tell {
    ($world:expr, $($text:tt)*) => {
        if $world.telling {
            let line = format!($($text)*);
            $world.story.push(line);
        }
    };
}
pub(crate) use tell;

/// A pod: its object in the API server, and its state on the node.
#[expect(clippy::struct_excessive_bools)] // The flags are independent of each other.
#[derive(Clone, Debug)]
pub(crate) struct WorldPod {
    pub(crate) uid: u64,
    pub(crate) start: Start,
    pub(crate) role: Role,
    pub(crate) cluster_id: Option<ClusterId>,
    pub(crate) owned: bool,
    pub(crate) node: Option<usize>,
    /// The number of ticks until the kubelet confirms the deletion of the pod; `None` if the pod is not being deleted.
    pub(crate) ends_in: Option<u8>,
    /// True if the etcd in the pod runs.
    pub(crate) running: bool,
    /// The last status that the kubelet has reported. The kubelet of a lost node reports nothing.
    pub(crate) shown: Shown,
    /// The time from which the etcd in the pod serves clients.
    pub(crate) serves_from: u64,
    /// The content of the pod's `emptyDir`.
    pub(crate) data: Option<Data>,
    pub(crate) created: u64,
    /// Number of ticks until the image and the volume of the pod are ready.
    pub(crate) starts_in: u8,
    /// The settings from which the pod was built.
    pub(crate) settings: u8,
    /// True if the pod has the phase `Failed`, so that it never restarts.
    pub(crate) ended: bool,
    /// True if another operator created the pod, or if the pod represents an external machine.
    pub(crate) old: bool,
    /// True if the pod has the token of the cluster.
    pub(crate) marked: bool,
}

/// The status of a pod in the API server.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shown {
    pub(crate) addressed: bool,
    pub(crate) running_since: Option<u64>,
    pub(crate) ready: bool,
    pub(crate) unready_since: u64,
    /// Time since which the node of the pod, or the node of its volume, has been lost.
    pub(crate) lost_since: Option<u64>,
    pub(crate) restarts: i32,
    /// The last exit of the container, with its time.
    pub(crate) ended: Option<(End, u64)>,
    pub(crate) failing: bool,
}

/// The exit of a container as the kubelet reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// etcd exited because it cannot read its data.
    Data,
    /// etcd exited for any other reason.
    Failed,
    /// The container ended because its machine was switched off.
    Ended,
}

#[expect(clippy::struct_excessive_bools)] // Each flag has its own meaning.
#[derive(Clone, Debug)]
pub(crate) struct WorldDisk {
    pub(crate) uid: u64,
    pub(crate) initial: BTreeSet<String>,
    pub(crate) token: String,
    pub(crate) cluster_id: Option<ClusterId>,
    pub(crate) owned: bool,
    pub(crate) terminating: bool,
    /// True if the PVC exists, but its volume is lost.
    pub(crate) lost: bool,
    /// The only node of the volume, if volumes are local.
    pub(crate) node: Option<usize>,
    pub(crate) data: Option<Data>,
    /// True if the PVC has the token of the cluster.
    pub(crate) marked: bool,
    pub(crate) version: u64,
    /// The removal of the member, as recorded on the PVC.
    pub(crate) removal: Option<Removal>,
    pub(crate) retention: RetentionNotes,
    pub(crate) volume: Volume,
}

#[expect(clippy::struct_excessive_bools)] // Each flag has its own meaning.
#[derive(Clone, Debug)]
pub(crate) struct WorldService {
    pub(crate) uid: u64,
    pub(crate) version: u64,
    pub(crate) owned: bool,
    pub(crate) started: bool,
    pub(crate) renewed: bool,
    pub(crate) drifted: bool,
    pub(crate) closed: bool,
    pub(crate) created: u64,
}

/// The state of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Power {
    On,
    /// The machine of the node is switched off. Its disks keep their data.
    Off,
    /// The node is disconnected from the network, but its containers run.
    Cut,
    /// The machine and its Node object are lost permanently.
    Gone,
}

#[derive(Clone, Debug)]
pub(crate) struct WorldNode {
    pub(crate) power: Power,
    /// Time since which the node has not reported.
    pub(crate) silent_since: Option<u64>,
}

/// A write that was sent but has not arrived yet.
#[derive(Clone, Debug)]
pub(crate) struct Late {
    pub(crate) arrives: u64,
    pub(crate) write: Write,
    pub(crate) via: Vec<String>,
    /// The highest UID that existed when the write was planned.
    pub(crate) seen: u64,
    pub(crate) sender: Sender,
}

/// The active reversible faults.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// The partitioned members, with the numbers of their groups.
    pub(crate) cut: BTreeMap<String, usize>,
    /// Members that the operators cannot reach, although other members can.
    pub(crate) hidden: BTreeSet<String>,
    /// Names of the pods that no node accepts.
    pub(crate) held: BTreeSet<String>,
    /// Members that get new log entries only if a quorum needs them.
    pub(crate) lagging: BTreeSet<String>,
    /// Members whose container exits repeatedly, for a reason outside their data.
    pub(crate) crashing: BTreeSet<String>,
    /// True if etcd does not answer the operators.
    pub(crate) deaf: bool,
    /// True if the Secrets with the members' certificates are missing or invalid, so a starting member has no valid
    /// certificates.
    pub(crate) member_secret: bool,
    /// True if the operators' certificate is invalid.
    pub(crate) operator_secret: bool,
    /// The time until which the API server is unavailable.
    pub(crate) api_away: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) now: u64,
    pub(crate) setup: Setup,
    /// The EtcdCluster, from which the operator builds objects.
    pub(crate) object: EtcdCluster,
    pub(crate) size: usize,
    pub(crate) object_version: u64,
    pub(crate) intent: Option<Intent>,
    pub(crate) cluster_id: Option<ClusterId>,
    pub(crate) recovery: Recorded,
    pub(crate) reported_voters: BTreeSet<String>,
    pub(crate) pods: BTreeMap<String, WorldPod>,
    pub(crate) disks: BTreeMap<String, WorldDisk>,
    pub(crate) services: BTreeMap<String, WorldService>,
    pub(crate) shared: Shared,
    /// The token in the selector of the client Service.
    pub(crate) client_token: Option<String>,
    pub(crate) nodes: Vec<WorldNode>,
    pub(crate) clusters: BTreeMap<String, Cluster>,
    pub(crate) faults: Faults,
    pub(crate) wishes: Wishes,
    pub(crate) versions: Versions,
    pub(crate) switch: Switch,
    pub(crate) pki: Pki,
    /// The token of a cluster that this operator did not start; `None` if this operator started the cluster.
    pub(crate) others: Option<String>,
    /// The members in the status that coreos/etcd-operator wrote.
    pub(crate) named_before: BTreeSet<String>,
    pub(crate) deleting: bool,
    /// The time of the request to delete the EtcdCluster.
    pub(crate) deleted_at: u64,
    /// True if the EtcdCluster has the finalizer that holds its deletion.
    pub(crate) guarded: bool,
    /// The UIDs of the PVCs that got an owner after the backup before the deletion.
    pub(crate) adopted: BTreeSet<u64>,
    /// How many EtcdClusters of this name were deleted.
    pub(crate) lives: u64,
    pub(crate) late: Vec<Late>,
    pub(crate) counter: u64,
    pub(crate) drawn: u64,
    pub(crate) memory: Memory,
    pub(crate) telling: bool,
    pub(crate) story: Vec<String>,
}

/// The unused names for the next plan, which takes them in order.
pub(crate) struct UnusedNames {
    member: u64,
    token: u64,
    members_used: Cell<u64>,
    tokens_used: Cell<u64>,
}

impl Names for UnusedNames {
    fn member(&self, index: u64) -> String {
        self.members_used
            .set(self.members_used.get().max(index + 1));
        member_name(self.member + index)
    }

    fn token(&self, index: u64) -> String {
        self.tokens_used.set(self.tokens_used.get().max(index + 1));
        format!("token-{}", self.token + index)
    }
}

/// The name of the member with this number: `db-a000000000`, `db-b000000000` and so on.
pub(crate) fn member_name(at: u64) -> String {
    let letter = char::from(b'a' + u8::try_from(at % 26).unwrap());
    format!("db-{letter}{:09}", at / 26)
}

/// The number of the member with this name, the inverse of `member_name`.
pub(crate) fn place(name: &str) -> usize {
    let drawn = name.trim_start_matches("db-").trim_start_matches("vm-");
    let (letter, round) = drawn.split_at(1);
    usize::from(letter.as_bytes()[0] - b'a') + 26 * round.parse::<usize>().unwrap()
}

fn object(setup: &Setup) -> EtcdCluster {
    let claim = json!({ "accessModes": ["ReadWriteOnce"],
        "resources": { "requests": { "storage": "1Gi" } } });
    let pod = if setup.durable {
        json!({ "persistentVolumeClaimSpec": claim })
    } else {
        json!({})
    };
    let backup = json!({ "storageType": "S3", "s3": { "path": "b/k" }, "backupPolicy": { "schedule": "@daily" },
        "beforeChanges": ["Upgrade", "Shrink"] });
    let policy = match (setup.retains, setup.backs_up) {
        (true, _) => "RetainVolumes",
        (_, true) => "BackupThenDelete",
        _ => "Delete",
    };
    let spec = json!({ "size": setup.size, "deletionPolicy": policy, "version": setup.version,
        "repository": "etcd", "pod": pod,
        "backup": backup });
    let mut object = EtcdCluster::new("db", serde_json::from_value(spec).unwrap());
    object.metadata.namespace = Some("ns".to_owned());
    object.metadata.uid = Some("uid".to_owned());
    object
}

impl World {
    pub(crate) fn new(setup: &Setup) -> Self {
        let node = WorldNode {
            power: Power::On,
            silent_since: None,
        };
        Self {
            now: 0,
            setup: setup.clone(),
            object: object(setup),
            size: setup.size,
            object_version: 1,
            intent: None,
            cluster_id: None,
            recovery: Recorded::default(),
            reported_voters: BTreeSet::new(),
            pods: BTreeMap::new(),
            disks: BTreeMap::new(),
            services: BTreeMap::new(),
            shared: Shared {
                headless: Kept::Missing,
                client: Kept::Missing,
                budget: Kept::Missing,
                budget_uid: Some("budget".to_owned()),
            },
            client_token: None,
            nodes: vec![node; setup.nodes],
            clusters: BTreeMap::new(),
            faults: Faults::default(),
            wishes: Wishes::default(),
            versions: Versions::default(),
            switch: Switch::new(setup.tls),
            pki: Pki::default(),
            others: None,
            named_before: BTreeSet::new(),
            deleting: false,
            deleted_at: 0,
            guarded: false,
            adopted: BTreeSet::new(),
            lives: 0,
            late: Vec::new(),
            counter: 0,
            drawn: 0,
            memory: Memory::default(),
            telling: false,
            story: Vec::new(),
        }
    }

    /// Generates a name that no member has had.
    pub(crate) fn member(&mut self) -> String {
        self.drawn += 1;
        member_name(self.drawn - 1)
    }

    pub(crate) fn unused_names(&self) -> UnusedNames {
        UnusedNames {
            member: self.drawn,
            token: self.counter + 1,
            members_used: Cell::new(0),
            tokens_used: Cell::new(0),
        }
    }

    /// Marks the names of a plan as used, so that no other plan gets them (invariant 6).
    pub(crate) fn use_names(&mut self, names: &UnusedNames) {
        self.drawn += names.members_used.get();
        self.counter += names.tokens_used.get();
    }

    /// The write that starts a bootstrap, even in a state in which a bootstrap is forbidden.
    pub(crate) fn begin(&mut self, desired: &Desired, observed: &Observed) -> Write {
        let token = format!("token-{}", self.next());
        let members = (0..desired.first).map(|_| self.member()).collect();
        Write::RecordIntent {
            intent: Intent { token, members },
            cluster_id: None,
            over: observed.resource_version.clone(),
        }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    pub(crate) fn desired(&self) -> Desired {
        Desired {
            size: self.size,
            first: if self.setup.seed { 1 } else { self.size },
            durable: self.setup.durable,
            claim: self.setup.durable.then(|| self.wishes.volume.claim()),
            hibernate: self.wishes.hibernate,
            upkeep: rule(),
            version: self.wanted_version().to_owned(),
            image: format!("etcd:v{}", self.wanted_version()),
            spec_hash: format!("hash-{}", self.wishes.settings),
            replace_after: Duration::from_secs(self.setup.patience * 3),
            keep_volumes: Duration::from_secs(self.setup.patience * 3),
            recovery: RecoveryRule {
                automatic: self.setup.automatic,
                after: Duration::from_secs(self.setup.patience * 3),
                keep_volumes: Duration::from_secs(self.setup.patience * 3),
            },
            paused: self.wishes.paused,
            budget: true,
            access: cluster::access::AccessRule::default(),
            invalid: None,
            refused: None,
            object: self.object_in_effect(),
            operators: Operators::default(),
        }
    }

    /// The etcd cluster with the token of `intent`, if it exists.
    pub(crate) fn recorded(&self) -> Option<&Cluster> {
        self.clusters.get(&self.intent.as_ref()?.token)
    }

    /// The data of a member, from its disk or else from its pod.
    pub(crate) fn data(&self, name: &str) -> Option<&Data> {
        let on_claim = self.disks.get(name).and_then(|disk| disk.data.as_ref());
        on_claim.or_else(|| self.pods.get(name).and_then(|pod| pod.data.as_ref()))
    }

    pub(crate) fn data_mut(&mut self, name: &str) -> Option<&mut Data> {
        if self.disks.get(name).is_some_and(|disk| disk.data.is_some()) {
            return self.disks.get_mut(name).and_then(|disk| disk.data.as_mut());
        }
        self.pods.get_mut(name).and_then(|pod| pod.data.as_mut())
    }

    pub(crate) fn api_is_away(&self) -> bool {
        self.now < self.faults.api_away
    }

    /// True if the Kubernetes API reports the node as ready.
    pub(crate) fn is_ready(&self, node: usize) -> bool {
        self.nodes[node].power != Power::Gone
            && self.nodes[node]
                .silent_since
                .is_none_or(|since| self.now < since + NOTICED)
    }

    pub(crate) fn power(&self, pod: &WorldPod) -> Power {
        pod.node.map_or(Power::On, |node| self.nodes[node].power)
    }

    /// The number of the member's network group, whose members reach each other. Operators and clients are in group 0.
    pub(crate) fn group(&self, name: &str) -> usize {
        let pod = self.pods.get(name);
        let node = pod.and_then(|pod| pod.node).unwrap_or_default();
        let is_cut = self.nodes[node].power == Power::Cut;
        let has_address = pod.is_some_and(|pod| pod.old);
        match self.services.get(name) {
            // The member is alone in its group, because other members reach a member only through its Service.
            None if !is_cut && !has_address => 1000 + place(name),
            Some(service) if !is_cut && service.closed => 1000 + place(name),
            _ => self.group_it_dials(name),
        }
    }

    /// The network group that the member can connect to. Only connections to the member depend on its own Service.
    pub(crate) fn group_it_dials(&self, name: &str) -> usize {
        let pod = self.pods.get(name);
        let node = pod.and_then(|pod| pod.node).unwrap_or_default();
        match self.nodes[node].power {
            Power::Cut => 100 + node,
            _ => self.faults.cut.get(name).copied().unwrap_or_default(),
        }
    }

    /// True if the operators can connect to this member.
    pub(crate) fn operator_reaches(&self, name: &str) -> bool {
        let heard = !self.faults.deaf && !self.faults.operator_secret;
        let heard = heard && self.lets_operator_in(name);
        heard && !self.faults.hidden.contains(name) && self.group(name) == 0
    }
}

/// Kubernetes marks a node as not ready this number of ticks after the last report of the node.
pub(crate) const NOTICED: u64 = 3;

impl fmt::Display for World {
    /// The state of the world in a few lines, for the message of a failed test.
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
            "tick {now}: size {size}, cluster ID {cluster_id:?}, intent {intent:?}"
        )?;
        for (token, cluster) in &self.clusters {
            let (serving, acknowledged) = (cluster.serving(), cluster.acknowledged);
            writeln!(
                f,
                "etcd {token}: serves in group {serving:?}, acknowledged {acknowledged:?}"
            )?;
            for (id, member) in cluster.members() {
                let process = cluster.running.get(id);
                let role = if member.learner { "learner" } else { "voter" };
                writeln!(
                    f,
                    "  {} ({id:x}): {role}, joined {}, {process:?}",
                    member.name, member.joined
                )?;
            }
        }
        for (name, pod) in &self.pods {
            let WorldPod {
                uid,
                start,
                node,
                ends_in,
                running,
                data,
                ..
            } = pod;
            let (state, token, durable) = (start.state, &start.token, start.durable);
            write!(
                f,
                "pod {name} {uid}: {state:?} {token} durable {durable} node {node:?} "
            )?;
            writeln!(
                f,
                "ends {ends_in:?} runs {running} {:?} {data:?}",
                pod.shown
            )?;
        }
        for (name, disk) in &self.disks {
            writeln!(
                f,
                "disk {name}: ends {} lost {} node {:?} {:?}",
                disk.terminating, disk.lost, disk.node, disk.data
            )?;
        }
        for (name, service) in &self.services {
            let WorldService {
                started,
                drifted,
                closed,
                ..
            } = service;
            writeln!(
                f,
                "service {name}: started {started} drifted {drifted} closed {closed}"
            )?;
        }
        writeln!(f, "{:?}\n{:?}", self.shared, self.faults)?;
        writeln!(f, "nodes {:?}", self.nodes)
    }
}
