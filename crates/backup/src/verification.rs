//! Verifications: each proves that a backup can be restored (docs/adr/0032-proof-of-restore.md).
//!
//! A pod fetches the newest backup, restores it and starts etcd. The operator reads the result from the termination
//! message of the pod. The state of a verification is only in the status and in the pod, so a new operator process can
//! continue it.

mod pod_state;
mod program;
mod turns;

pub(crate) use pod_state::state_of;
pub use pod_state::{Failure, PodState, Proof};
pub use program::{Verify, run};
pub(crate) use turns::Turns;
