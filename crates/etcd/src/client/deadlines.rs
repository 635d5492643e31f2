//! Deadlines of the real client.

use std::time::Duration;

#[cfg(doc)]
use crate::port::Etcd;

/// Maximum duration of each part of a call.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// For a new connection, including TLS.
    pub connect: Duration,
    /// For [`Etcd::status`], including the connection.
    pub status: Duration,
    /// For every other call, including connections and all members that are tried.
    pub call: Duration,
    /// Time without an answer after which a read is also sent to the next member.
    pub hedge: Duration,
    /// For a defragmentation: etcd rewrites the whole database before it answers.
    pub defragment: Duration,
    /// For a snapshot stream: the maximum time between two chunks.
    pub progress: Duration,
    /// Idle time after which a connection is closed.
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
