//! Plans the changes and faults of a soak. The plan depends only on the seed, so a failed soak can be repeated.
//!
//! A step destroys at most one volume, and the next step begins when the cluster is healthy again. So a quorum of
//! members always keeps its data.

use std::fmt;
use std::time::Duration;

use super::dice::Dice;

/// Possible sizes of the cluster. With at least three members, the loss of one volume leaves a quorum.
const SIZES: [usize; 3] = [3, 4, 5];
/// Values of `spec.etcd.snapshotCount`. With a small value, a member that was down during a few writes needs a
/// snapshot from the leader.
const SNAPSHOT_COUNTS: [u32; 4] = [500, 2_000, 10_000, 50_000];
/// Percentage of steps that change the spec or make a backup.
const CHANGE_PERCENT: u64 = 60;
/// Percentage of changes during which a fault happens.
const FAULT_PERCENT: u64 = 70;
/// Percentage of stopped nodes that stay stopped until their members are replaced.
const LOST_NODE_PERCENT: u64 = 50;
/// The maximum number of pods that one fault affects.
const MOST_PODS: u64 = 2;

/// A change that a user makes. A fault can happen during the change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Sets `spec.size` to this value.
    Size(usize),
    /// Sets `spec.version` to this value.
    Version(String),
    /// Sets `spec.etcd.snapshotCount` to this value, which restarts the members.
    SnapshotCount(u32),
    /// Switches TLS on or off. Members always accept plaintext clients.
    Tls(bool),
    /// Runs an EtcdBackup.
    Backup {
        /// True if the step also restores the backup into a new cluster.
        restore: bool,
    },
}

/// A fault. `pick` selects the affected pods or nodes from those that exist at the time of the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Deletes pods of members at the same time.
    DeletePods {
        /// The number of pods.
        count: usize,
        /// Selects the first of these pods. The other pods follow it in the order of their names.
        pick: usize,
        /// True: the pods have their grace period to stop. False: they are killed.
        graceful: bool,
    },
    /// Kills the containers of members at the same time.
    KillContainers {
        /// The number of pods.
        count: usize,
        /// Selects the first of these pods. The other pods follow it in the order of their names.
        pick: usize,
    },
    /// Deletes the volume of one member together with its pod.
    LoseVolume {
        /// Selects the member whose volume is deleted.
        pick: usize,
    },
    /// Stops a node without a shutdown, as after a power failure. Its disks keep their data.
    StopNode {
        /// Selects the node to stop.
        pick: usize,
        /// Seconds until the node starts again.
        seconds: u64,
    },
    /// Stops a node with one member until the operator has replaced this member.
    LoseNode {
        /// Selects the node.
        pick: usize,
    },
    /// Kills the container of an operator: 0 is the cluster operator, 1 the backup operator, 2 the restore operator.
    KillOperator {
        /// The number of the operator.
        which: usize,
    },
    /// Stops the API server for some time.
    StopApiServer {
        /// Seconds until the API server starts again.
        seconds: u64,
    },
}

/// A step of a soak. The next step begins when the cluster is healthy again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The number of the step, from 1.
    pub number: usize,
    /// The change at the beginning of the step.
    pub change: Option<Change>,
    /// The time from the change to the fault.
    pub delay: Duration,
    /// The fault that happens during the step.
    pub fault: Option<Fault>,
}

/// The spec after all changes so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Desired {
    /// The number of members, `spec.size`.
    pub size: usize,
    /// The version of etcd, `spec.version`.
    pub version: String,
    /// True if TLS is switched on.
    pub tls: bool,
}

/// Chooses the steps of a soak with random numbers from a seed.
#[derive(Clone, Debug)]
pub struct Planner {
    dice: Dice,
    versions: Vec<String>,
    version: usize,
    snapshot_count: u32,
    desired: Desired,
    number: usize,
}

impl Planner {
    /// A planner with this seed. `versions` are successive minor releases of etcd. The first version is random, and
    /// each upgrade or downgrade moves by one minor release.
    #[must_use]
    pub fn new(seed: u64, versions: &[String]) -> Self {
        let mut dice = Dice::new(seed, 0);
        let version = usize::try_from(dice.below(versions.len() as u64)).unwrap_or(0);
        Self {
            dice,
            version,
            snapshot_count: 0,
            desired: Desired {
                size: SIZES[0],
                version: versions.get(version).cloned().unwrap_or_default(),
                tls: false,
            },
            versions: versions.to_vec(),
            number: 0,
        }
    }

    /// The spec after all steps so far.
    #[must_use]
    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    /// Chooses the next step.
    pub fn step(&mut self) -> Step {
        self.number += 1;
        let change = self
            .dice
            .percent(CHANGE_PERCENT)
            .then(|| self.change())
            .flatten();
        let fails = change.is_none() || self.dice.percent(FAULT_PERCENT);
        let fault = fails.then(|| self.fault());
        let delay = match (&change, &fault) {
            (Some(_), Some(_)) => Duration::from_millis(self.dice.below(8_000)),
            _ => Duration::ZERO,
        };
        Step {
            number: self.number,
            change,
            delay,
            fault,
        }
    }

    fn change(&mut self) -> Option<Change> {
        Some(match self.dice.below(10) {
            0..=2 => {
                let now = self.desired.size;
                let others: Vec<usize> = SIZES.into_iter().filter(|size| *size != now).collect();
                self.desired.size = self.dice.one_of(&others)?;
                Change::Size(self.desired.size)
            }
            3..=4 => {
                let last = self
                    .versions
                    .len()
                    .checked_sub(1)
                    .filter(|last| *last > 0)?;
                let up = self.version == 0 || (self.version < last && self.dice.percent(50));
                self.version = if up {
                    self.version + 1
                } else {
                    self.version - 1
                };
                self.desired
                    .version
                    .clone_from(self.versions.get(self.version)?);
                Change::Version(self.desired.version.clone())
            }
            5 => {
                let now = self.snapshot_count;
                let others = SNAPSHOT_COUNTS.into_iter().filter(|count| *count != now);
                self.snapshot_count = self.dice.one_of(&others.collect::<Vec<_>>())?;
                Change::SnapshotCount(self.snapshot_count)
            }
            6..=7 => {
                self.desired.tls = !self.desired.tls;
                Change::Tls(self.desired.tls)
            }
            _ => Change::Backup {
                restore: self.dice.percent(50),
            },
        })
    }

    fn fault(&mut self) -> Fault {
        let pick = self.small(60);
        match self.dice.below(12) {
            0..=2 => Fault::DeletePods {
                count: 1 + self.small(MOST_PODS),
                pick,
                graceful: self.dice.percent(50),
            },
            3..=5 => Fault::KillContainers {
                count: 1 + self.small(MOST_PODS),
                pick,
            },
            6..=7 => Fault::LoseVolume { pick },
            8 if self.dice.percent(LOST_NODE_PERCENT) => Fault::LoseNode { pick },
            8 => Fault::StopNode {
                pick,
                // If `seconds` exceeds `spec.memberReplacement.after`, the operator replaces the members on the node.
                seconds: 5 + self.dice.below(40),
            },
            9..=10 => Fault::KillOperator {
                which: self.small(3),
            },
            _ => Fault::StopApiServer {
                seconds: 3 + self.dice.below(12),
            },
        }
    }

    fn small(&mut self, end: u64) -> usize {
        usize::try_from(self.dice.below(end)).unwrap_or(0)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(size) => write!(to, "set spec.size to {size}"),
            Self::Version(version) => write!(to, "set spec.version to {version}"),
            Self::SnapshotCount(count) => write!(to, "set spec.etcd.snapshotCount to {count}"),
            Self::Tls(true) => write!(to, "switch TLS on"),
            Self::Tls(false) => write!(to, "switch TLS off"),
            Self::Backup { restore: true } => write!(to, "back up, and restore into a new cluster"),
            Self::Backup { restore: false } => write!(to, "back up"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DeletePods {
                count, graceful, ..
            } => {
                let how = if *graceful { "gracefully" } else { "now" };
                write!(to, "delete {count} pods {how}")
            }
            Self::KillContainers { count, .. } => write!(to, "kill the containers of {count} pods"),
            Self::LoseVolume { .. } => write!(to, "delete a volume and its pod"),
            Self::StopNode { seconds, .. } => write!(to, "stop a node for {seconds} s"),
            Self::LoseNode { .. } => write!(to, "stop a node until its member is replaced"),
            Self::KillOperator { which } => write!(
                to,
                "kill the container of operator {which} (0 cluster, 1 backup, 2 restore)"
            ),
            Self::StopApiServer { seconds } => write!(to, "stop the API server for {seconds} s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn versions() -> Vec<String> {
        ["3.5.35", "3.6.16", "3.7.3"].map(str::to_owned).to_vec()
    }

    fn plan(seed: u64, steps: usize) -> Vec<Step> {
        let mut planner = Planner::new(seed, &versions());
        (0..steps).map(|_| planner.step()).collect()
    }

    #[test]
    fn soak_plan_depends_only_on_seed() {
        assert_eq!(plan(7, 200), plan(7, 200));
        assert_ne!(plan(7, 200), plan(8, 200));
    }

    /// If the steps of a seed change, a failed soak of an earlier release cannot be repeated. Update
    /// [`STEPS_OF_SEED_1`] only if the planner has to change.
    #[test]
    fn soak_seed_gives_same_steps_in_every_release() {
        let steps: Vec<String> = plan(1, 3).iter().map(|step| format!("{step:?}")).collect();
        assert_eq!(steps.join("\n"), STEPS_OF_SEED_1);
    }

    const STEPS_OF_SEED_1: &str = "\
Step { number: 1, change: Some(Size(4)), delay: 0ns, fault: None }
Step { number: 2, change: None, delay: 0ns, fault: Some(DeletePods { count: 1, pick: 56, graceful: false }) }
Step { number: 3, change: Some(SnapshotCount(10000)), delay: 7.762s, fault: Some(LoseVolume { pick: 16 }) }";

    #[test]
    fn each_soak_change_is_possible_from_previous_spec() {
        for seed in 0..200 {
            let mut planner = Planner::new(seed, &versions());
            for _ in 0..50 {
                let before = planner.desired().clone();
                let step = planner.step();
                let index = |version: &str| versions().iter().position(|known| known == version);
                match &step.change {
                    Some(Change::Size(size)) => assert_ne!(*size, before.size),
                    Some(Change::Version(version)) => {
                        let (from, to) = (index(&before.version), index(version));
                        assert_eq!(from.unwrap().abs_diff(to.unwrap()), 1);
                    }
                    Some(Change::Tls(on)) => assert_ne!(*on, before.tls),
                    _ => {}
                }
                assert!(SIZES.contains(&planner.desired().size));
                assert!(step.change.is_some() || step.fault.is_some());
            }
        }
    }

    #[test]
    fn soak_faults_are_limited_to_two_pods_and_one_minute() {
        for step in (0..200).flat_map(|seed| plan(seed, 50)) {
            match step.fault {
                Some(Fault::DeletePods { count, .. } | Fault::KillContainers { count, .. }) => {
                    assert!((1..=2).contains(&count));
                }
                Some(Fault::StopNode { seconds, .. } | Fault::StopApiServer { seconds }) => {
                    assert!((1..60).contains(&seconds));
                }
                Some(Fault::KillOperator { which }) => assert!(which < 3),
                Some(Fault::LoseVolume { .. } | Fault::LoseNode { .. }) | None => {}
            }
        }
    }

    #[test]
    fn soak_plan_contains_every_kind_of_change_and_fault() {
        let kind = |text: String| text.split([' ', '(']).next().map(str::to_owned);
        let steps = plan(3, 400);
        let changes: BTreeSet<_> = steps
            .iter()
            .filter_map(|step| step.change.as_ref())
            .map(|change| kind(format!("{change:?}")))
            .collect();
        let faults: BTreeSet<_> = steps
            .iter()
            .filter_map(|step| step.fault.as_ref())
            .map(|fault| kind(format!("{fault:?}")))
            .collect();
        assert_eq!(changes.len(), 5, "{changes:?}");
        assert_eq!(faults.len(), 7, "{faults:?}");
    }
}
