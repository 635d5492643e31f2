//! The order: the data that the operator passes to the agent in an argument of its pod.

use std::time::Duration;

use api::backup::Encryption;
use api::storage::StorageBlock;
use serde::{Deserialize, Serialize};

use crate::pvc::Reach;

/// Directory at which the pod mounts the Secret with the credentials of the store.
pub const STORE: &str = "/run/backup/store";
/// Directory at which the pod mounts the Secret with the CA certificate of the store.
pub const CA: &str = "/run/backup/ca";
/// Directory for segments (files with changes) that wait for their upload to the store.
pub const SPOOL: &str = "/var/spool/etcd";

/// The cluster that the agent records, the store, and the settings. The order contains names of Secrets, but no
/// credentials, because it is an argument of the pod (invariant 14).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordOrder {
    /// The storage block of the EtcdBackup.
    pub storage: StorageBlock,
    /// The UID of the EtcdBackup, which is part of the prefix of all objects.
    pub uid: String,
    /// Client URLs of the cluster.
    pub endpoints: Vec<String>,
    /// The Secrets for the access to etcd, which the pod mounts.
    pub reach: Reach,
    /// The Secret and its entry with the key for new bases and segments. The pod mounts the Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// Maximum time between a change and the end of the segment that contains it, in milliseconds.
    pub flush_millis: u64,
    /// The agent takes a new base (a snapshot of the cluster) after this time, in seconds.
    pub base_seconds: u64,
    /// The agent takes a new base after this number of bytes of segments.
    pub base_bytes: u64,
    /// The length of the retention window in seconds.
    pub window_seconds: u64,
    /// Maximum number of bytes of segments in [`SPOOL`].
    pub spool_bytes: u64,
    /// Maximum size of a snapshot in bytes.
    pub max_snapshot: u64,
}

/// The prefix of all objects in the store. `key` is the path in the store, without the bucket. The prefix contains the
/// UID, so two EtcdBackups with the same path never use the objects of each other (invariant 13).
pub fn prefix(key: &str, uid: &str) -> String {
    format!("{key}.continuous/{uid}/")
}

impl RecordOrder {
    /// Maximum time between a change and the end of the segment that contains it.
    pub(crate) fn flush_interval(&self) -> Duration {
        Duration::from_millis(self.flush_millis)
    }
}
