//! How long the real client waits for what.

use std::time::Duration;

#[cfg(doc)]
use crate::port::Etcd;

/// How long the parts of a call may take.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// For a connection to be made, TLS included.
    pub connect: Duration,
    /// For [`Etcd::status`], connecting included.
    pub status: Duration,
    /// For every other call, connecting and all members tried included.
    pub call: Duration,
    /// After this long without an answer a read is also sent to the next member.
    pub hedge: Duration,
    /// For a defragmentation: etcd writes the whole database anew before it answers.
    pub defragment: Duration,
    /// For a snapshot stream: the longest silence between two chunks.
    pub progress: Duration,
    /// A connection that was not used for this long is closed.
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
