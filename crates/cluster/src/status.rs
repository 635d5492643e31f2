//! The status, computed from the observation, the plan and the executed step. Pure and deterministic: the same input
//! gives the same bytes. An unchanged status is not written, so status writes do not trigger reconciles in a loop.
//!
//! This report never contains the fields that actions of the plan write: `bootstrap`, `clusterID`, `recovery`,
//! `staleApproval`, `defragmentation`, `raftLog`, `beforeChange` and `TLS`. It also lacks `replaced` of the restore
//! operator and `lastBackup`, `backupForChanges` and `backupRequest` of the backup operator. If a person deletes any
//! other field, the operator computes it again.

mod advice;
mod conditions;
mod history;
mod members;
mod readiness;
mod version;

#[cfg(test)]
mod tests;

use api::EtcdCluster;
use api::cluster::{ClusterPhase, EtcdClusterStatus, MembersStatus};
use api::conditions::{ConditionStatus, ConditionType, Finding};
use api::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use crate::expiry;
use crate::plan::{Plan, View, current_version};
use crate::reason::Reason;
use crate::snapshot::{Desired, Observed};

/// The inputs from which the status of an EtcdCluster is computed.
pub struct Report<'a> {
    /// The observed EtcdCluster.
    pub cluster: &'a EtcdCluster,
    /// The spec in effect.
    pub desired: &'a Desired,
    /// The observation that the status describes.
    pub observed: &'a Observed,
    /// The plan of this reconcile.
    pub plan: &'a Plan,
    /// The failure of the step as text; `None` if the step succeeded or was postponed.
    pub failure: Option<String>,
}

impl Report<'_> {
    fn view(&self, now: &Time) -> Option<View<'_>> {
        let list = self.observed.members.known()?;
        let ours = self
            .observed
            .cluster_id
            .is_none_or(|id| id == list.cluster_id);
        ours.then(|| View::new(list, (self.desired, self.observed, now.0)))
    }

    /// The reason and the text of the hibernation; `None` if the cluster neither hibernates nor is being stopped for
    /// hibernation.
    fn hibernation(&self) -> Option<(Reason, String)> {
        let mut waiting = self.plan.waiting_for.iter();
        let found = waiting.find(|waiting| waiting.reason.is_hibernation())?;
        Some((found.reason, found.message.clone()))
    }

    /// The current status of the object, without the fields that this report never contains.
    pub fn current(&self) -> EtcdClusterStatus {
        let mut current = self.cluster.status.clone().unwrap_or_default();
        current.conditions.retain(conditions::is_ours);
        EtcdClusterStatus {
            bootstrap: None,
            cluster_id: None,
            recovery: None,
            stale_approval: None,
            replaced: None,
            defragmentation: None,
            raft_log: None,
            before_change: None,
            tls: None,
            last_backup: None,
            backup_for_changes: None,
            backup_request: None,
            ..current
        }
    }

    /// Computes the new status, without the fields that this report never contains.
    pub fn status(&self, now: &Time) -> EtcdClusterStatus {
        let Self {
            cluster,
            desired,
            observed,
            plan,
            ..
        } = self;
        let before = self.current();
        let view = self.view(now);
        let formed = observed.cluster_id.is_some();
        let phase = match self.hibernation() {
            _ if desired.invalid.is_some() => ClusterPhase::Failed,
            Some((Reason::Hibernated, _)) => ClusterPhase::Hibernated,
            Some(_) => ClusterPhase::Hibernating,
            None if formed => ClusterPhase::Running,
            None => ClusterPhase::Creating,
        };
        let listed = view.as_ref().map(View::names);
        let (ready, unready): (Vec<_>, Vec<_>) = observed
            .pods
            .iter()
            .filter(|(name, _)| listed.as_ref().is_none_or(|names| names.contains(*name)))
            .partition(|(_, pod)| pod.ready && pod.stays());
        let names =
            |pods: Vec<(&String, _)>| pods.into_iter().map(|(name, _)| name.clone()).collect();
        let leader = view.as_ref().and_then(members::leader);
        let running = formed.then(|| current_version(desired, observed));
        let member_details = members::details(view.as_ref(), observed, &before);
        let healthy = member_details.iter().filter(|member| member.healthy);
        let (conditions, state, last_errors) =
            conditions::conditions(self, (view.as_ref(), &member_details), &before, now);
        EtcdClusterStatus {
            observed_generation: cluster.metadata.generation,
            state: Some(state.text(self)),
            phase: Some(phase),
            reason: desired.invalid.clone(),
            control_paused: desired.paused,
            size: members::count(view.as_ref(), &before),
            replicas: i32::try_from(observed.pods.len()).ok(),
            selector: Some(names::cluster_selector(&cluster.name_any())),
            members: Some(MembersStatus {
                ready: names(ready),
                unready: names(unready),
            }),
            healthy_members: i32::try_from(healthy.count()).ok(),
            member_details,
            leader,
            alarms: members::alarms(view.as_ref(), observed, &before),
            certificates: expiry::report(&observed.certificates.expiries, now.0),
            current_version: running,
            target_version: version::target(self),
            service_name: Some(names::client_service(&cluster.name_any())),
            client_port: Some(names::CLIENT_PORT.into()),
            next_step: plan.next.clone(),
            waiting_for: waits(plan),
            last_errors,
            conditions,
            ..EtcdClusterStatus::default()
        }
    }
}

/// The reasons for waiting, as one text. If only problems remain, the text names the problems.
fn waits(plan: &Plan) -> Option<String> {
    let waiting = plan.waiting_for.iter();
    let waiting: Vec<&str> = waiting.map(|wait| wait.message.as_str()).collect();
    match &waiting[..] {
        [] if readiness::needs_user(plan) => {
            let all: Vec<_> = plan.problems.iter().map(ToString::to_string).collect();
            Some(format!("manual action required: {}", all.join("; ")))
        }
        [] => None,
        _ => Some(waiting.join("; ")),
    }
}

fn finding(
    kind: ConditionType,
    status: impl Into<ConditionStatus>,
    reason: Reason,
    message: impl Into<String>,
) -> Finding {
    Finding::new(kind, status, reason.into(), message)
}
