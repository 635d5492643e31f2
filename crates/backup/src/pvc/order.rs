//! The order that a pod on a PersistentVolumeClaim receives, and its report: plain data.

use std::collections::BTreeSet;

use api::backup::name::{self, Numbered};
use api::manifest::ManifestCluster;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::reason::{Reason, Trouble};
use crate::retention::Rules;
use crate::snapshot::{Kept, Listed, Stored};

/// Where the pod mounts the volume.
pub(crate) const ROOT: &str = "/backups";
/// Where the pod mounts the Secret with the client certificate.
pub(crate) const TLS: &str = "/run/backup/tls";
/// Where the pod mounts the Secret with user and password.
pub(crate) const AUTH: &str = "/run/backup/auth";

/// How many of the kept backups are reported: as many as a status lists.
const LISTED: usize = 10;
/// What a termination message has room for beside the JSON around it.
const LONGEST: usize = 2048;

/// A piece of work. It holds no credentials: it stands in the pod's arguments (invariant 14).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Order {
    /// The claim's name.
    pub claim: String,
    /// The path of the spec, below the root of the volume.
    pub path: String,
    /// The EtcdBackup's UID.
    pub uid: String,
    /// What is to be done.
    pub task: Task,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "camelCase")]
pub enum Task {
    /// A snapshot is stored, unless that was done.
    Store(Box<SnapshotTask>),
    /// What the rules do not keep goes.
    Surplus {
        /// The rules.
        rules: Rules,
        /// Where the newest lies.
        newest: String,
        /// The UIDs of the other EtcdBackups that number theirs at the same path.
        others: BTreeSet<String>,
    },
    /// All that this EtcdBackup has stored goes.
    Everything,
}

/// The snapshot to take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotTask {
    /// Client URLs to begin with.
    pub endpoints: Vec<String>,
    /// When the backup began.
    pub begun: Timestamp,
    /// Whether it is one of many.
    pub numbered: bool,
    /// Whether it is compressed.
    pub compress: bool,
    /// For the manifest.
    pub cluster: Option<ManifestCluster>,
    /// The Secrets etcd is reached with.
    pub reach: Reach,
}

/// The names of the Secrets etcd is reached with; they are mounted into the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reach {
    /// With the client certificate.
    pub tls: Option<String>,
    /// Whether its keys are those of an EtcdCluster's operator Secret, and not of an EtcdBackup's own.
    pub operators: bool,
    /// With user and password.
    pub auth: Option<String>,
}

impl Order {
    /// What the same work has in common, and no other work of this EtcdBackup has.
    pub fn occasion(&self) -> String {
        match &self.task {
            Task::Store(snapshot) => format!("store {}", snapshot.begun),
            Task::Surplus { newest, .. } => format!("surplus {newest}"),
            Task::Everything => "everything".to_owned(),
        }
    }

    /// The backup a removal is done after.
    fn newest(&self) -> Option<Numbered> {
        let Task::Surplus { newest, .. } = &self.task else {
            return None;
        };
        let key = newest.strip_prefix(&self.store())?.strip_prefix('/')?;
        name::parse(&self.path, key)
    }

    /// The place, as locations begin.
    pub fn store(&self) -> String {
        format!("pvc://{}", self.claim)
    }
}

/// The termination message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "camelCase")]
pub enum Report {
    /// The backup is there.
    Stored(Stored),
    /// What was removed, and the newest of what is kept.
    #[serde(rename_all = "camelCase")]
    Removed {
        /// How many were deleted.
        deleted: usize,
        /// The newest, as their names tell.
        kept: Vec<Numbered>,
    },
    /// It did not work.
    Failed {
        /// The condition's reason.
        reason: String,
        /// What and how to put it right.
        message: String,
    },
}

impl Report {
    /// Of a removal.
    pub fn removed(kept: &Kept) -> Self {
        let newest = kept.backups.iter().take(LISTED);
        Self::Removed {
            deleted: kept.deleted,
            kept: newest.map(|listed| listed.parts).collect(),
        }
    }

    /// Of a failure.
    pub fn failed(trouble: Trouble) -> Self {
        let mut message = trouble.message;
        message.truncate(message.floor_char_boundary(LONGEST));
        Self::Failed {
            reason: trouble.reason.as_str().to_owned(),
            message,
        }
    }

    /// What it says of a backup, in the terms of the order.
    pub fn into_stored(self, _: &Order) -> Result<Stored, Trouble> {
        match self {
            Self::Stored(stored) => Ok(stored),
            other => Err(other.into_trouble()),
        }
    }

    /// What it says of a removal.
    pub fn into_kept(self, order: &Order) -> Result<Kept, Trouble> {
        match self {
            Self::Removed { deleted, mut kept } => {
                // The one it was done after is always kept.
                if let Some(newest) = order.newest().filter(|newest| !kept.contains(newest))
                    && !kept.is_empty()
                {
                    kept.push(newest);
                }
                let listed = kept.into_iter().map(|parts| Listed {
                    location: format!("{}/{}", order.store(), name::name(&order.path, parts)),
                    parts,
                });
                Ok(Kept {
                    backups: listed.collect(),
                    deleted,
                    everything: order.task == Task::Everything,
                })
            }
            other => Err(other.into_trouble()),
        }
    }

    fn into_trouble(self) -> Trouble {
        match self {
            Self::Failed { reason, message } => Trouble::new(
                Reason::parse(&reason).unwrap_or(Reason::StepFailed),
                message,
            ),
            _ => Trouble::new(
                Reason::StepFailed,
                "the pod beside the claim reported other work than it was given",
            ),
        }
    }
}

#[cfg(test)]
impl Order {
    /// The order to remove all backups of an EtcdBackup.
    pub(crate) fn example() -> Self {
        Self {
            claim: "backups".to_owned(),
            path: "etcd/main".to_owned(),
            uid: "backup-uid".to_owned(),
            task: Task::Everything,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(task: Task) -> Order {
        Order {
            claim: "backups".to_owned(),
            path: "etcd/main".to_owned(),
            uid: "uid".to_owned(),
            task,
        }
    }

    fn numbered(second: i64) -> Numbered {
        Numbered {
            time: Timestamp::from_second(second).unwrap(),
            revision: 7,
        }
    }

    #[test]
    fn a_removal_is_reported_in_a_termination_message_however_much_is_kept() {
        let order = order(Task::Everything);
        let kept = Kept {
            backups: (0..1000)
                .rev()
                .map(|second| Listed {
                    location: format!(
                        "pvc://backups/{}",
                        name::name("etcd/main", numbered(second))
                    ),
                    parts: numbered(second),
                })
                .collect(),
            deleted: 3,
            everything: true,
        };
        let text = serde_json::to_string(&Report::removed(&kept)).unwrap();
        assert!(text.len() < 4096, "{}", text.len());
        let read: Report = serde_json::from_str(&text).unwrap();
        let told = read.into_kept(&order).unwrap();
        assert_eq!((told.deleted, told.everything), (3, true));
        assert_eq!(told.backups, kept.backups[..LISTED]);
    }

    #[test]
    fn a_failure_keeps_its_reason_and_fits() {
        let trouble = Trouble::new(Reason::StoreUnreachable, "é".repeat(5000));
        let text = serde_json::to_string(&Report::failed(trouble)).unwrap();
        assert!(text.len() < 4096);
        let read: Report = serde_json::from_str(&text).unwrap();
        let trouble = read.into_stored(&order(Task::Everything)).unwrap_err();
        assert_eq!(trouble.reason, Reason::StoreUnreachable);
    }

    #[test]
    fn each_run_and_each_removal_is_an_occasion_of_its_own() {
        let store = |second| {
            order(Task::Store(Box::new(SnapshotTask {
                endpoints: Vec::new(),
                begun: Timestamp::from_second(second).unwrap(),
                numbered: true,
                compress: false,
                cluster: None,
                reach: Reach::default(),
            })))
        };
        let surplus = order(Task::Surplus {
            rules: Rules::default(),
            newest: "pvc://backups/a".to_owned(),
            others: BTreeSet::new(),
        });
        let all = [store(1), store(2), surplus, order(Task::Everything)];
        for (index, one) in all.iter().enumerate() {
            assert!(
                all[..index]
                    .iter()
                    .all(|other| other.occasion() != one.occasion())
            );
            let text = serde_json::to_string(one).unwrap();
            assert_eq!(&serde_json::from_str::<Order>(&text).unwrap(), one);
        }
    }
}
