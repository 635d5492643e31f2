//! Backups on a PersistentVolumeClaim (PVC).
//!
//! Only a pod in the namespace of the PVC can mount it. The operator therefore creates a pod for each transfer or
//! removal. The pod runs this program, takes the snapshot, writes it as a file, and reports in its termination message
//! (docs/adr/0013-backups-on-a-claim.md).
//!
//! The pod has no token, no shell and no access to the API server. Its name is derived from the order, so the next
//! operator process finds the pod and waits for it. If the pod is lost, the order is carried out again, and a complete
//! backup on the PVC is found.

mod order;
mod pod_state;
mod program;
mod worker;

pub(crate) use order::{AUTH, ROOT, TLS};
pub use order::{Order, Reach, Report, SnapshotTask, Task};
pub use program::{Volume, run};
pub(crate) use worker::{PodWorker, StartTimes};
