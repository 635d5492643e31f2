//! Continuous backup: an agent in a pod records all changes of a cluster (docs/internals/continuous.md).
//!
//! The agent has no service account token and no access to the API server. It reports its progress over TCP, as the
//! pods that transfer a backup do, because this channel needs no rights in Kubernetes. The operator connects to the pod,
//! and writes the report to the status.

mod order;
pub(crate) mod pod_state;
mod program;
mod report;
mod state;

pub use order::{CA, RecordOrder, SPOOL, STORE, prefix};
pub use program::{Record, run};
pub use report::{AgentReport, read};
pub use state::{AgentState, AgentTarget, FoundAgent, RecordingInputs};
