//! Reads the inputs of the plan for the agent, which records all changes of an etcd cluster: the Deployment of the
//! agent, the report of its pod, the cluster, and the store for the recorded changes.

use api::EtcdBackup;
use api::names::LABEL_BACKUP;
use api::storage::{StorageBlock, StorageSource};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use runtime::apply::is_owned;
use store::Target;
use store::progress::PORT;
use tokio::time::timeout;

use super::{ObserveContext, READ_TIMEOUT, cluster, site};
use crate::plan::recording::{RecordingNeed, agent_name, need};
use crate::reason::{Reason, Trouble};
use crate::recording::pod_state::{address, creation_failure, newest, problem};
use crate::recording::{AgentState, AgentTarget, FoundAgent, RecordingInputs};
use crate::recording::{prefix, read};

const LATE: &str = "no answer from the API server about the agent";

/// Reads the inputs that the plan of the agent needs.
pub(crate) async fn inputs(
    context: &ObserveContext,
    backup: &EtcdBackup,
    now: Timestamp,
) -> RecordingInputs {
    match need(backup, now) {
        RecordingNeed::Nothing => RecordingInputs::default(),
        RecordingNeed::Agent => RecordingInputs {
            agent: agent_in_time(context, backup).await,
            target: None,
        },
        RecordingNeed::AgentAndTarget => {
            let target = timeout(READ_TIMEOUT, Box::pin(target(context, backup))).await;
            let late = || Err(Trouble::new(Reason::StepFailed, LATE));
            RecordingInputs {
                agent: agent_in_time(context, backup).await,
                target: Some(target.unwrap_or_else(|_| late())),
            }
        }
    }
}

async fn agent_in_time(context: &ObserveContext, backup: &EtcdBackup) -> AgentState {
    let agent = timeout(READ_TIMEOUT, Box::pin(agent(context, backup))).await;
    agent.unwrap_or_else(|_| AgentState::Unknown(LATE.to_owned()))
}

async fn agent(context: &ObserveContext, backup: &EtcdBackup) -> AgentState {
    let namespace = backup.namespace().unwrap_or_default();
    let uid = backup.uid().unwrap_or_default();
    let name = agent_name(backup);
    let deployments = Api::<Deployment>::namespaced(context.client.clone(), &namespace);
    let deployment = match deployments.get_opt(&name).await {
        Ok(deployment) => deployment,
        Err(error) => {
            return AgentState::Unknown(format!("Deployment {name} cannot be read: {error}"));
        }
    };
    let pods = Api::<Pod>::namespaced(context.client.clone(), &namespace);
    let own = ListParams::default().labels(&format!("{LABEL_BACKUP}={uid}"));
    let pods = match pods.list(&own).await {
        Ok(pods) => pods.items,
        Err(error) => {
            return AgentState::Unknown(format!("the pod of the agent cannot be read: {error}"));
        }
    };
    match deployment {
        None if pods.is_empty() => AgentState::Missing,
        None => AgentState::Stopping,
        Some(deployment) if !is_owned(&deployment.metadata, &uid) => AgentState::Foreign,
        Some(deployment) => AgentState::Found(Box::new(found(deployment, &pods).await)),
    }
}

async fn found(deployment: Deployment, pods: &[Pod]) -> FoundAgent {
    let failure = creation_failure(&deployment);
    let without_report = FoundAgent {
        deployment,
        report: None,
        problem: failure,
    };
    let Some(pod) = newest(pods) else {
        return without_report;
    };
    let Some(address) = address(pod) else {
        return FoundAgent {
            problem: problem(pod).or(without_report.problem),
            ..without_report
        };
    };
    let report = read(address).await;
    let problem = report.is_none().then(|| {
        let message = format!(
            "the agent runs, but the operator cannot read its report at {address} port {PORT}: if NetworkPolicies \
             select the pod, allow connections from the operator"
        );
        Trouble::new(Reason::PodNotStarting, message)
    });
    FoundAgent {
        report,
        problem,
        ..without_report
    }
}

/// The cluster that the agent records, and the store to which it writes. The operator opens the store and reads the
/// encryption key to report a missing Secret. The pod of the agent would only wait for this Secret.
async fn target(context: &ObserveContext, backup: &EtcdBackup) -> Result<AgentTarget, Trouble> {
    let source = site::source_of(backup)?;
    let uid = backup.uid().unwrap_or_default();
    let location = if let StorageSource::Pvc(pvc) = &source {
        site::volume(context, backup, pvc).await?;
        format!("pvc://{}/{}", pvc.claim_name, prefix(&pvc.path, &uid))
    } else {
        let Target { store, key } = site::open(context, backup, &source).await?;
        format!("{}/{}", store.location(), prefix(&key, &uid))
    };
    site::encryption_key(&context.client, backup).await?;
    let (endpoints, cluster) = Box::pin(cluster::of_agent(&context.client, backup)).await?;
    let image = context.image.get().await;
    Ok(AgentTarget {
        endpoints,
        cluster: cluster.map(Box::new),
        storage: StorageBlock::from(source),
        location,
        image: image
            .map_err(|why| Trouble::new(Reason::StepFailed, why))?
            .clone(),
        max_snapshot: context.max_snapshot,
    })
}
