//! The reconcile of one EtcdBackup: observe, plan, execute, status.

use std::sync::Arc;
use std::time::Duration;

use api::EtcdBackup;
use jiff::Timestamp;
use runtime::logs::in_stage;
use runtime::{Done, Reconcile, apply};

use crate::execute::{ExecuteContext, execute, report, start_copies, step_recording};
use crate::observe::{ObserveContext, copies, observe, recording, verification};
use crate::plan::{Plan, RecordingVerdict, need, plan};
use crate::snapshot::Snapshot;
use crate::status::{notices, status};

/// Minimum time until the next reconcile.
const MIN_REQUEUE: Duration = Duration::from_millis(300);

pub(crate) struct ReconcileContext {
    pub(crate) observe: ObserveContext,
    pub(crate) execute: ExecuteContext,
}

impl Reconcile for ReconcileContext {
    type Object = EtcdBackup;
    type Error = apply::Error;

    async fn reconcile(&self, backup: Arc<EtcdBackup>) -> Result<Done, apply::Error> {
        let now = Timestamp::now();
        let mut running = self.execute.running(&backup);
        let need = need(&backup, &running, now);
        let copies = std::mem::take(&mut running.copies);
        let observed = observe(&self.observe, &backup, running, need);
        let (snapshot, connections) = in_stage("observe", observed).await;
        let copies = Box::pin(copies::inputs(&self.observe, &backup, copies, now));
        let (copies, stores) = in_stage("observe", copies).await;
        let snapshot = Snapshot {
            verification: verification::inputs(&self.observe, &backup, now).await,
            copies,
            recording: Box::pin(recording::inputs(&self.observe, &backup, now)).await,
            ..snapshot
        };
        let mut plan = plan(&backup, &snapshot, now);
        let stepped = step_recording(&self.execute, &backup, &plan.recording.step);
        let stepped = in_stage("execute", Box::pin(stepped)).await;
        if let Err(trouble) = stepped {
            plan.recording.verdict = RecordingVerdict::Waiting(trouble);
        }
        let executed = execute(&self.execute, &backup, &plan, connections);
        let mut done = in_stage("execute", executed).await;
        if done.is_ok() && !plan.action.changes_object() {
            let written = report(&self.execute, &backup, &plan, status(&backup, &plan, now));
            done = in_stage("status", written).await;
            if done.is_ok() {
                // Invariant 10: the copies start only after the status is written, because the status counts their
                // attempts.
                start_copies(&self.execute, &backup, &plan, stores);
            }
        }
        outcome(done, &backup, &plan)
    }
}

/// Converts the result of a reconcile. A conflict is no failure: the object has changed since the operator read it,
/// and the change triggers another reconcile.
fn outcome(
    done: Result<(), apply::Error>,
    backup: &EtcdBackup,
    plan: &Plan,
) -> Result<Done, apply::Error> {
    match done {
        Err(error) if error.is_conflict() => Ok(Done {
            requeue: Some(MIN_REQUEUE),
            notices: Vec::new(),
        }),
        done => done.map(|()| Done {
            requeue: plan.requeue.map(|after| after.max(MIN_REQUEUE)),
            notices: notices(backup, plan),
        }),
    }
}
