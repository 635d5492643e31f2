//! The deadlines of [`EtcdClient`](crate::EtcdClient).

use std::time::Duration;

#[cfg(doc)]
use crate::port::Etcd;

/// Time limits for the parts of a call.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// Time limit for a new connection, including TLS.
    pub connect: Duration,
    /// Time limit for [`Etcd::status`], including the connection.
    pub status: Duration,
    /// Time limit for each call that no other field limits, including the connections and all members that are tried.
    pub call: Duration,
    /// If a member has not responded to a read after this time, the read is also sent to the next member.
    pub hedge: Duration,
    /// Time limit for a defragmentation. etcd rewrites the whole database before it responds.
    pub defragment: Duration,
    /// Maximum time between two chunks of a snapshot stream, and time limit for [`Etcd::hash`] and [`Etcd::key_count`].
    pub progress: Duration,
    /// A connection that was not used for this time is closed.
    pub idle: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            status: Duration::from_secs(2),
            call: Duration::from_secs(5),
            hedge: Duration::from_secs(1),
            defragment: Duration::from_mins(10),
            progress: Duration::from_secs(30),
            idle: Duration::from_mins(2),
        }
    }
}
