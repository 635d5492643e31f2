//! Backups on a PersistentVolumeClaim. A claim is reached only by a pod that mounts it, in the claim's namespace: the
//! operator makes one for each piece of work, which runs this same program, takes the snapshot itself, writes it
//! through the port of directories, and reports in its termination message (docs/adr/0013-backups-on-a-claim.md).
//!
//! The pod has no token, no shell and no way to the API server. Its name follows from the work, so an operator that
//! comes after finds it and waits for the same one; when it is gone, the work is done again and finds on the claim
//! what was complete before.

mod order;
mod pod_state;
mod program;
mod worker;

pub(crate) use order::{AUTH, ROOT, TLS};
pub use order::{Order, Reach, Report, SnapshotTask, Task};
pub use program::{Volume, run};
pub(crate) use worker::PodWorker;
