//! The events of the model, generated from a seed, and their texts.

use std::fmt;

use crate::others::Begun;

/// The initial state of a run.
#[allow(clippy::struct_excessive_bools)] // Each flag is a separate property of the run.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) size: usize,
    /// True if the spec has `bootstrap: Seed`.
    pub(crate) seed: bool,
    pub(crate) durable: bool,
    /// True if each volume can be used on one node only.
    pub(crate) local: bool,
    pub(crate) version: &'static str,
    pub(crate) nodes: usize,
    /// Number of ticks after which the pods of a silent node are evicted.
    pub(crate) evicts: u64,
    /// `memberReplacement.after` in the spec, in ticks.
    pub(crate) patience: u64,
    /// Maximum number of ticks until a pod starts.
    pub(crate) slow: u8,
    /// True if the spec has `recovery.policy: Automatic`.
    pub(crate) automatic: bool,
    pub(crate) two: bool,
    pub(crate) begun: Begun,
    /// True if joining members follow the leader for some time before they serve clients.
    pub(crate) silent: bool,
    /// The number of the first TLS policy; `None` in runs without TLS changes.
    pub(crate) tls: Option<u8>,
    /// True if certificates are generated and their Secrets may be lost. Only the module `authorities` sets this field.
    pub(crate) authorities: bool,
    /// True if the volumes stay when the EtcdCluster is deleted. Only the module `retained` sets this field.
    pub(crate) retains: bool,
    /// True if the deletion of the EtcdCluster waits for a backup. Only the module `deletion` sets this field.
    pub(crate) backs_up: bool,
}

/// An event. A number without a name chooses, for example, one of the members that exist when the event happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A round: the operator observes, plans, and executes the whole step.
    Round,
    /// The watch caches of the operator receive the current objects of some kinds. Only the module `stale` generates
    /// this event.
    WatchEvents(u8),
    /// A round that plans from the watch caches first. Only the module `stale` generates this event.
    CachedRound,
    /// One tick of time passes for nodes, kubelets and members.
    Tick,
    /// A round in which the operator process crashes after this number of writes.
    Crash { after: u8 },
    /// The machine of the operator fails during a round, and the newest pod is lost with the machine.
    DieTogether { after: u8, ticks: u8 },
    /// A round in which the answer to one write is lost.
    LoseReply { after: u8 },
    /// A round in which one write arrives this number of ticks late, and the operator gets no answer to it.
    Delay { after: u8, ticks: u8 },
    /// A round in which the API server rejects one write permanently.
    Refuse { after: u8 },
    /// A round during which the API server becomes unavailable.
    ApiFails { after: u8, ticks: u8 },
    /// The API server is unavailable.
    ApiAway { ticks: u8 },
    /// A round with late writes: ticks pass between the plan and its first write.
    ActLate { ticks: u8, after: u8 },
    /// A round with slow reads: ticks pass between two reads.
    LookSlowly { ticks: u8 },
    /// A user deletes a pod gracefully.
    DeletePod(u8),
    /// A user deletes all pods.
    DeletePods,
    /// A pod is lost together with its data.
    LosePod(u8),
    /// A PVC and its data are lost.
    LoseDisk(u8),
    /// A volume is lost, and the pod that has mounted it continues to run. Only the module `volumes` generates this
    /// event.
    LoseVolume(u8),
    /// A user deletes a PVC. Kubernetes keeps the PVC until its pod is deleted.
    DeleteClaim(u8),
    /// A fault affects a member that does not serve clients yet. Only the module `joining` generates this event.
    StrikeJoining(u8),
    /// A member's data becomes unreadable for etcd.
    Corrupt(u8),
    /// A member's container exits repeatedly.
    CrashLoop(u8),
    /// A member is isolated from all other members.
    Isolate(u8),
    /// The members are partitioned into two groups.
    Partition(u8),
    /// The operators cannot reach a member, but the other members can.
    Hide(u8),
    /// A member gets new log entries only if a quorum needs them.
    Lag(u8),
    /// No node accepts a pod.
    Hold(u8),
    /// The machine of a node is switched off.
    NodeOff(u8),
    /// A node is disconnected, and its containers continue to run.
    NodeCut(u8),
    /// All nodes are switched off at once, and on again.
    Reboot,
    /// A node that is switched off or disconnected returns.
    NodeBack(u8),
    /// A node is lost permanently and replaced by another node.
    NodeGone(u8),
    /// All reversible faults end.
    Heal,
    /// The user sets another size.
    Resize(usize),
    /// The user sets another version.
    Version(u8),
    /// The user enables, disables or changes TLS, or reverts a change.
    SwitchTls(u8),
    /// A Secret with generated certificates is deleted, emptied or replaced.
    LoseSecret(u8),
    /// A user changes a member's Service.
    DriftService(u8),
    /// A user deletes a member's Service.
    DeleteService(u8),
    /// A user deletes the Services and the PodDisruptionBudget of the cluster.
    DeleteShared,
    /// A user moves leadership to another member.
    MoveLeader(u8),
    /// A PVC without an owner remains from another cluster with the same name.
    Foreign,
    /// A person approves a recovery, or withdraws the approval.
    Approve,
    /// etcd stops answering the operators.
    Deafen,
    /// The EtcdCluster is created again without its status.
    ForgetStatus,
    /// The user changes the settings of the pods.
    ChangeSettings,
    /// The user hibernates the cluster, or ends the hibernation.
    Hibernate,
    /// The databases are full: etcd raises NOSPACE.
    Fill,
    /// etcd raises CORRUPT: the data of a member differs from the data of the other members.
    Mistrust(u8),
    /// A pod reaches the phase `Failed`, and its object remains.
    EndPod(u8),
    /// The user pauses the operator, or resumes it.
    Pause,
    /// A user deletes the EtcdCluster. After all children are deleted, the user creates a new EtcdCluster with the same
    /// name. Retained volumes stay.
    DeleteCluster,
    /// The user sets another StorageClass or size for the volumes.
    Volumes(u8),
    /// A Secret with certificates is missing, expired or replaced.
    SpoilSecret(u8),
    /// A person adds a member with etcdctl, and never starts it.
    AddByHand(u8),
    /// A person removes a member with etcdctl.
    RemoveByHand(u8),
    /// A person starts a member with `--force-new-cluster`. Only the module `removed` generates this event.
    ForceNewCluster(u8),
    /// The second operator reads one part of the world. After its third read, the second operator plans.
    SecondLooks,
    /// The second operator sends one write of its step.
    SecondWrites(u8),
}

/// A deterministic source of numbers (SplitMix64).
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x9e37_79b9_7f4a_7c15)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap()
    }

    pub(crate) fn small(&mut self, end: u8) -> u8 {
        self.byte() % end
    }

    fn size(&mut self) -> usize {
        usize::try_from(1 + self.below(7)).unwrap()
    }
}

pub(crate) fn draw(seed: u64, two: bool) -> (Setup, Vec<Event>) {
    let mut dice = Dice::new(seed);
    let setup = Setup {
        silent: seed % 2 == 1,
        ..setup(&mut dice, two)
    };
    // Each run leaves out most kinds of faults, so that the remaining kinds are frequent.
    let mut weights = [0; KINDS.len()];
    for (weight, (often, _)) in weights.iter_mut().zip(KINDS) {
        *weight = if dice.below(3) == 0 {
            u64::from(often) * (1 + dice.below(3))
        } else {
            0
        };
    }
    let faults: u64 = weights.iter().sum();
    let total = 30 + 8 * u64::from(two) + faults;
    let length = 10 + dice.below(70);
    let events = (0..length).map(|_| {
        let mut at = dice.below(total);
        for (weight, (_, make)) in weights.iter().zip(KINDS) {
            if at < *weight {
                return make(&mut dice);
            }
            at -= weight;
        }
        match at {
            0..16 => Event::Round,
            16..30 => Event::Tick,
            30..34 => Event::SecondLooks,
            _ => Event::SecondWrites(dice.byte()),
        }
    });
    (setup, events.collect())
}

fn setup(dice: &mut Dice, two: bool) -> Setup {
    let version = match dice.below(8) {
        0..4 => "3.6.16",
        4..6 => "3.5.35",
        6 => "3.4.40",
        _ => "3.3.27",
    };
    // Half of the runs start with three members, and the other half with one to seven members.
    let size = match dice.below(4) {
        0 | 1 => 3,
        _ => dice.size(),
    };
    let durable = dice.below(2) == 0;
    Setup {
        size,
        seed: dice.below(5) == 0,
        durable,
        local: durable && dice.below(3) == 0,
        version,
        nodes: 3 + usize::try_from(dice.below(5)).unwrap(),
        evicts: 4 + dice.below(12),
        patience: 1 + dice.below(8),
        slow: dice.small(4),
        automatic: dice.below(3) == 0,
        two,
        begun: match dice.below(8) {
            0 => Begun::Old,
            1 => Begun::Elsewhere,
            _ => Begun::Here,
        },
        silent: false,
        tls: None,
        authorities: false,
        retains: false,
        backs_up: false,
    }
}

/// How often a kind of fault occurs compared with other kinds, and the constructor of the fault.
type Kind = (u8, fn(&mut Dice) -> Event);

const KINDS: [Kind; 48] = [
    (4, |dice| Event::Crash {
        after: dice.small(12),
    }),
    (2, |dice| Event::DieTogether {
        after: dice.small(12),
        ticks: 1 + dice.small(3),
    }),
    (3, |dice| Event::LoseReply {
        after: dice.small(12),
    }),
    (3, |dice| Event::Delay {
        after: dice.small(12),
        ticks: 1 + dice.small(6),
    }),
    (2, |dice| Event::Refuse {
        after: dice.small(12),
    }),
    (2, |dice| Event::ApiFails {
        after: dice.small(12),
        ticks: 1 + dice.small(4),
    }),
    (1, |dice| Event::ApiAway {
        ticks: 1 + dice.small(8),
    }),
    (3, |dice| Event::ActLate {
        ticks: dice.small(4),
        after: dice.byte(),
    }),
    (2, |dice| Event::LookSlowly {
        ticks: 1 + dice.small(2),
    }),
    (3, |dice| Event::DeletePod(dice.byte())),
    (1, |_| Event::DeletePods),
    (2, |dice| Event::LosePod(dice.byte())),
    (2, |dice| Event::LoseDisk(dice.byte())),
    (2, |dice| Event::DeleteClaim(dice.byte())),
    (2, |dice| Event::Corrupt(dice.byte())),
    (2, |dice| Event::CrashLoop(dice.byte())),
    (2, |dice| Event::Isolate(dice.byte())),
    (2, |dice| Event::Partition(dice.byte())),
    (2, |dice| Event::Hide(dice.byte())),
    (3, |dice| Event::Lag(dice.byte())),
    (2, |dice| Event::Hold(dice.byte())),
    (2, |dice| Event::NodeOff(dice.byte())),
    (2, |dice| Event::NodeCut(dice.byte())),
    (1, |_| Event::Reboot),
    (3, |dice| Event::NodeBack(dice.byte())),
    (1, |dice| Event::NodeGone(dice.byte())),
    (4, |_| Event::Heal),
    (4, |dice| Event::Resize(dice.size())),
    (4, |dice| Event::Version(dice.byte())),
    (2, |dice| Event::DriftService(dice.byte())),
    (2, |dice| Event::DeleteService(dice.byte())),
    (1, |_| Event::DeleteShared),
    (2, |dice| Event::MoveLeader(dice.byte())),
    (1, |_| Event::Foreign),
    (2, |_| Event::Approve),
    (2, |_| Event::Deafen),
    (1, |_| Event::ForgetStatus),
    (3, |_| Event::ChangeSettings),
    (2, |_| Event::Hibernate),
    (2, |_| Event::Fill),
    (1, |dice| Event::Mistrust(dice.byte())),
    (2, |dice| Event::EndPod(dice.byte())),
    (2, |_| Event::Pause),
    (1, |_| Event::DeleteCluster),
    (2, |dice| Event::Volumes(dice.byte())),
    (2, |dice| Event::SpoilSecret(dice.byte())),
    (2, |dice| Event::AddByHand(dice.byte())),
    (2, |dice| Event::RemoveByHand(dice.byte())),
];

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            size,
            version,
            nodes,
            evicts,
            patience,
            ..
        } = self;
        let joins = if self.silent {
            ", and joining members serve clients with a delay"
        } else {
            ""
        };
        let volumes = match (self.durable, self.local) {
            (false, _) => "without volumes",
            (true, false) => "on volumes",
            (true, true) => "on local volumes",
        };
        let begins = match (self.begun, self.seed) {
            (Begun::Old, _) => "by coreos/etcd-operator",
            (Begun::Elsewhere, _) => "by other software, on external machines",
            (Begun::Here, true) => "from a seed",
            (Begun::Here, false) => "all at once",
        };
        let recovers = if self.automatic {
            "Automatic"
        } else {
            "Manual"
        };
        let operators = if self.two {
            "two operators"
        } else {
            "one operator"
        };
        let tls = if self.tls.is_some() {
            ", and TLS is switched"
        } else {
            ""
        };
        write!(
            f,
            "etcd {version}, {size} members, {volumes}, started {begins}, on {nodes} nodes, {operators}{tls}; pods are \
             evicted after {evicts} ticks, members replaced after {patience} ticks{joins}, recovery is {recovers}"
        )
    }
}
