//! Backups on a PersistentVolumeClaim. A claim is reached only by a pod that mounts it, in the claim's namespace: the
//! operator makes one for each piece of work, which runs this same program, takes the snapshot itself, writes it
//! through the port of directories, and reports in its termination message (docs/adr/0013-backups-on-a-claim.md).
//!
//! The pod has no token, no shell and no way to the API server. Its name follows from the work, so an operator that
//! comes after finds it and waits for the same one; when it is gone, the work is done again and finds on the claim
//! what was complete before.

mod job;
mod order;
mod pod;
mod work;

pub(crate) use job::InPod;
pub(crate) use order::{Order, Reach, Report, Snapshot, Task};
pub use work::{Volume, run};
