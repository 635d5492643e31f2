//! Backups on a PersistentVolumeClaim (PVC).
//!
//! Only pods in the namespace of a PVC can mount it, so the operator creates a pod for each transfer and removal. The
//! pod runs the program of the operator, and reports the result in its termination message
//! (docs/adr/0013-backups-on-a-claim.md).
//!
//! The pod has no service account token, no shell, and no access to the API server. Its name depends on its order (the
//! task in its arguments), so a new operator process finds the pod and waits for it. If the pod is lost, the operator
//! creates another pod.

mod order;
mod pod_state;
mod program;
mod worker;

pub(crate) use order::{AUTH, ENCRYPTION, ROOT, TLS};
pub use order::{Order, Reach, Report, SnapshotTask, Task};
pub(crate) use program::access;
pub use program::{Volume, run};
pub(crate) use worker::{PodWorker, StartTimes};
