//! The messages between the operator and the pod that mounts the PersistentVolumeClaim. The operator sends an `Order`,
//! the task of the pod, as an argument. The pod answers with a report in its termination message.

use std::collections::BTreeSet;

use api::backup::Encryption;
use api::backup::name::{self, Numbered};
use api::manifest::ManifestCluster;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::reason::{Reason, Trouble};
use crate::retention::Rules;
use crate::snapshot::{Listed, RemovalResult, Stored};

/// Directory at which the pod mounts the volume.
pub(crate) const ROOT: &str = "/backups";
/// Directory at which the pod mounts the Secret with the client certificate.
pub(crate) const TLS: &str = "/run/backup/tls";
/// Directory at which the pod mounts the Secret with user and password.
pub(crate) const AUTH: &str = "/run/backup/auth";
/// Directory at which the pod mounts the Secret with the encryption keys.
pub(crate) const ENCRYPTION: &str = "/run/backup/encryption";

/// Maximum number of backups in a report, the same as in `status.backups`.
const LISTED: usize = 10;
/// Maximum length of a message in bytes. With this limit, a report fits into a termination message of 4096 bytes.
const MAX_MESSAGE: usize = 2048;

/// The transfer or removal that a pod carries out. The order contains no credentials, because it is an argument of the
/// pod (invariant 14).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Order {
    /// The name of the PersistentVolumeClaim.
    pub claim: String,
    /// The path in the spec, relative to the root of the volume.
    pub path: String,
    /// The UID of the EtcdBackup. The names of its unfinished files on the PVC contain a hash of this UID.
    pub uid: String,
    /// The task of the pod.
    pub task: Task,
}

/// The task of a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "camelCase")]
pub enum Task {
    /// Store a snapshot, unless an earlier pod has stored it.
    Store(Box<SnapshotTask>),
    /// Remove the backups that the retention rules do not keep.
    Surplus {
        /// The retention rules in the spec.
        rules: Rules,
        /// The location of the newest backup.
        newest: String,
        /// The UIDs of all other periodic EtcdBackups with the same path. The backups of these EtcdBackups are kept.
        others: BTreeSet<String>,
        /// The time from which the pod computes the ages of backups. The clock of the pod's node may be wrong
        /// (invariant 9).
        now: Timestamp,
    },
    /// Remove all stored backups of this EtcdBackup.
    Everything,
}

/// The source and the destination of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotTask {
    /// Client URLs to which the transfer connects first.
    pub endpoints: Vec<String>,
    /// The start time of the backup.
    pub begun: Timestamp,
    /// True for a periodic backup: the name of its object contains a revision and a time.
    pub numbered: bool,
    /// True if the object is compressed.
    pub compress: bool,
    /// The Secret and its entry with the encryption key. The pod mounts the Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// The EtcdCluster, as the manifest records it.
    pub cluster: Option<ManifestCluster>,
    /// The Secrets with the certificate and the password for etcd.
    pub reach: Reach,
}

/// The names of the Secrets with which the pod connects to etcd. The pod mounts them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reach {
    /// The Secret with the client certificate.
    pub tls: Option<String>,
    /// True if `tls` is the operator Secret of an EtcdCluster, false if it is the Secret in `spec.clientTLSSecret`.
    /// The entries of the two Secrets have different names.
    pub operators: bool,
    /// The Secret with user and password.
    pub auth: Option<String>,
}

impl Order {
    /// A text that identifies the order among the orders of this EtcdBackup. A retry of the same task has the same
    /// text.
    pub fn work_id(&self) -> String {
        match &self.task {
            Task::Store(snapshot) => Self::store_id(snapshot.begun),
            Task::Surplus { newest, .. } => format!("surplus {newest}"),
            Task::Everything => "everything".to_owned(),
        }
    }

    /// The ID of the order for the backup with this start time.
    pub(crate) fn store_id(begun: Timestamp) -> String {
        format!("store {begun}")
    }

    /// The name of the newest backup, if the order applies the retention rules.
    fn newest(&self) -> Option<Numbered> {
        let Task::Surplus { newest, .. } = &self.task else {
            return None;
        };
        let key = newest.strip_prefix(&self.store())?.strip_prefix('/')?;
        name::parse(&self.path, key)
    }

    /// The common prefix of the locations of all backups on this PersistentVolumeClaim.
    pub fn store(&self) -> String {
        format!("pvc://{}", self.claim)
    }
}

/// The report of the pod, which is its termination message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "camelCase")]
pub enum Report {
    /// The backup is complete on the PVC.
    Stored(Stored),
    /// The removal is complete.
    #[serde(rename_all = "camelCase")]
    Removed {
        /// Number of deleted backups.
        deleted: usize,
        /// The newest kept backups. The pod reads their times and revisions from their names.
        kept: Vec<Numbered>,
    },
    /// The task failed.
    Failed {
        /// The reason for the condition of the EtcdBackup.
        reason: String,
        /// The message for users, with the cause and the remedy.
        message: String,
    },
}

impl Report {
    /// Builds the report of a completed removal.
    pub fn removed(result: &RemovalResult) -> Self {
        let newest = result.backups.iter().take(LISTED);
        Self::Removed {
            deleted: result.deleted,
            kept: newest.map(|listed| listed.parts).collect(),
        }
    }

    /// Builds the report of a failure. A long message is truncated.
    pub fn failed(trouble: Trouble) -> Self {
        let mut message = trouble.message;
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        Self::Failed {
            reason: trouble.reason.as_str().to_owned(),
            message,
        }
    }

    /// The result of a transfer.
    ///
    /// # Errors
    /// Fails if the task failed, or if this is not the report of a transfer. Also fails if the order requires
    /// encryption, but an older program in the pod has ignored it.
    pub fn into_stored(self, order: &Order) -> Result<Stored, Trouble> {
        let encrypts = matches!(&order.task, Task::Store(task) if task.encryption.is_some());
        match self {
            Self::Stored(stored) if encrypts && stored.encryption_key.is_none() => {
                Err(Trouble::new(
                    Reason::StepFailed,
                    format!(
                        "the backup pod has stored {} without encryption, because its image is older than the operator: \
                         set the operator's image with --operator-image, and delete this backup",
                        stored.location
                    ),
                ))
            }
            Self::Stored(stored) => Ok(stored),
            other => Err(other.into_trouble()),
        }
    }

    /// The result of a removal.
    ///
    /// # Errors
    ///
    /// Fails if the task failed, or if this is not the report of a removal.
    pub fn into_removal_result(self, order: &Order) -> Result<RemovalResult, Trouble> {
        match self {
            Self::Removed { deleted, mut kept } => {
                // The list `kept` may lack the newest backup, because the pod truncates the list. This function adds
                // the newest backup to the list, because a removal always keeps that backup.
                if let Some(newest) = order.newest().filter(|newest| !kept.contains(newest))
                    && !kept.is_empty()
                {
                    kept.push(newest);
                }
                let listed = kept.into_iter().map(|parts| Listed {
                    location: format!("{}/{}", order.store(), name::name(&order.path, parts)),
                    parts,
                });
                Ok(RemovalResult {
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
                "the report of the backup pod does not match the task that the operator gave to the pod: delete the pod",
            ),
        }
    }
}

#[cfg(test)]
impl Order {
    /// An order that removes all backups of an EtcdBackup.
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
    use api::backup::EncryptionKey;

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
    fn removal_report_fits_into_termination_message() {
        let order = order(Task::Everything);
        let result = RemovalResult {
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
        let text = serde_json::to_string(&Report::removed(&result)).unwrap();
        assert!(text.len() < 4096, "{}", text.len());
        let report: Report = serde_json::from_str(&text).unwrap();
        let reported = report.into_removal_result(&order).unwrap();
        assert_eq!((reported.deleted, reported.everything), (3, true));
        assert_eq!(reported.backups, result.backups[..LISTED]);
    }

    #[test]
    fn long_failure_report_is_shortened_and_keeps_reason() {
        let trouble = Trouble::new(Reason::StoreUnreachable, "é".repeat(5000));
        let text = serde_json::to_string(&Report::failed(trouble)).unwrap();
        assert!(text.len() < 4096);
        let read: Report = serde_json::from_str(&text).unwrap();
        let trouble = read.into_stored(&order(Task::Everything)).unwrap_err();
        assert_eq!(trouble.reason, Reason::StoreUnreachable);
    }

    #[test]
    fn unencrypted_backup_is_rejected_if_order_requires_encryption() {
        let mut task = SnapshotTask {
            endpoints: Vec::new(),
            begun: Timestamp::UNIX_EPOCH,
            numbered: true,
            compress: false,
            encryption: None,
            cluster: None,
            reach: Reach::default(),
        };
        let stored = Stored {
            location: "pvc://backups/a".to_owned(),
            etcd_version: "3.6.16".to_owned(),
            cluster_id: "c0ffee".to_owned(),
            revision: 7,
            size: 1,
            sha256: "00".to_owned(),
            keys: Some(3),
            encryption_key: None,
            created_at: Timestamp::UNIX_EPOCH,
        };
        let result = |task: &SnapshotTask, stored: &Stored| {
            let order = order(Task::Store(Box::new(task.clone())));
            Report::Stored(stored.clone()).into_stored(&order)
        };
        assert_eq!(result(&task, &stored).unwrap(), stored);
        task.encryption = Some(Encryption {
            secret: "keys".to_owned(),
            key: None,
        });
        let trouble = result(&task, &stored).unwrap_err();
        assert!(trouble.message.contains("pvc://backups/a"), "{trouble:?}");
        let encrypted = Stored {
            encryption_key: Some(EncryptionKey {
                name: "2026-11".to_owned(),
                id: "0123".to_owned(),
            }),
            ..stored
        };
        assert_eq!(result(&task, &encrypted).unwrap(), encrypted);
    }

    #[test]
    fn different_pod_tasks_have_different_ids() {
        let store = |second| {
            order(Task::Store(Box::new(SnapshotTask {
                endpoints: Vec::new(),
                begun: Timestamp::from_second(second).unwrap(),
                numbered: true,
                compress: false,
                encryption: None,
                cluster: None,
                reach: Reach::default(),
            })))
        };
        let surplus = order(Task::Surplus {
            rules: Rules::default(),
            newest: "pvc://backups/a".to_owned(),
            others: BTreeSet::new(),
            now: Timestamp::UNIX_EPOCH,
        });
        let all = [store(1), store(2), surplus, order(Task::Everything)];
        for (index, one) in all.iter().enumerate() {
            assert!(
                all[..index]
                    .iter()
                    .all(|other| other.work_id() != one.work_id())
            );
            let text = serde_json::to_string(one).unwrap();
            assert_eq!(&serde_json::from_str::<Order>(&text).unwrap(), one);
        }
    }
}
