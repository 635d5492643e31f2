//! The proof that a backup restores (docs/adr/0032-proof-of-restore.md).
//!
//! A pod fetches the newest backup, restores it and starts etcd, as a restore does. The operator reads the result from
//! the termination message of the pod. All state between two reconciles is in the status of the EtcdBackup and in the
//! pod, so a new operator process continues a verification.

mod pod_state;
mod program;
mod turns;

pub(crate) use pod_state::state_of;
pub use pod_state::{Failure, PodState, Proof};
pub use program::{Verify, run};
pub(crate) use turns::Turns;
