//! The data that the operator reads about the agent. Plain data without clients.

use api::manifest::ManifestCluster;
use api::storage::StorageBlock;
use k8s_openapi::api::apps::v1::Deployment;
use member::OperatorImage;

use super::report::AgentReport;
use crate::reason::Trouble;

/// The agent of an EtcdBackup.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum AgentState {
    /// The plan does not need the agent.
    #[default]
    NotRead,
    /// The operator cannot read the agent. Contains the cause.
    Unknown(String),
    /// There is neither a Deployment nor a pod.
    Missing,
    /// The Deployment no longer exists, but its pod has not ended.
    Stopping,
    /// The Deployment has another owner.
    Foreign,
    /// The Deployment exists.
    Found(Box<FoundAgent>),
}

/// The Deployment of an agent, and the report of its pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FoundAgent {
    /// The Deployment.
    pub deployment: Deployment,
    /// The report. `None` if the pod does not run, or if the operator cannot read the report.
    pub report: Option<AgentReport>,
    /// Why there is no report. `None` while the pod starts.
    pub problem: Option<Trouble>,
}

/// The cluster that the agent records, and the store to which it writes.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentTarget {
    /// Client URLs of the cluster.
    pub endpoints: Vec<String>,
    /// The EtcdCluster. `None` if the spec names endpoints.
    pub cluster: Option<Box<ManifestCluster>>,
    /// The storage block of the EtcdBackup.
    pub storage: StorageBlock,
    /// The location of the objects that the agent writes.
    pub location: String,
    /// The image of the operators.
    pub image: OperatorImage,
    /// Maximum size of a snapshot in bytes.
    pub max_snapshot: u64,
}

/// The inputs of the plan for the agent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordingInputs {
    /// The agent.
    pub agent: AgentState,
    /// The cluster that the agent records and its store, or why the operator cannot read them. `None` if the plan does
    /// not need them.
    pub target: Option<Result<AgentTarget, Trouble>>,
}
