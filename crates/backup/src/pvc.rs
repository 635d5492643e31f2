//! Backups on a PersistentVolumeClaim (PVC).
//!
//! A PVC can be mounted only by pods in its own namespace. The operator therefore creates one pod for each transfer or
//! removal. The pod runs this program, takes the snapshot, writes it to a file, and reports the result in its
//! termination message (docs/adr/0013-backups-on-a-claim.md).
//!
//! The pod has no service account token, no shell, and no access to the API server. Its name is derived from the order,
//! so a new operator process finds the pod and waits for it. If the pod is lost, the operator creates another pod,
//! which first looks for a complete backup on the PVC.

mod order;
mod pod_state;
mod program;
mod worker;

pub(crate) use order::{AUTH, ENCRYPTION, ROOT, TLS};
pub use order::{Order, Reach, Report, SnapshotTask, Task};
pub use program::{Volume, run};
pub(crate) use worker::{PodWorker, StartTimes};
