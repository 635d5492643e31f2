//! The driver: observe, plan, act, status.

use std::sync::Arc;
use std::time::Duration;

use api::{EtcdBackup, names};
use jiff::Timestamp;
use kube::{Api, ResourceExt};
use runtime::{Done, Failure, Reconcile, apply};

use crate::act::{Beside, act};
use crate::named::named;
use crate::observe::{Means, observe};
use crate::observed::Observed;
use crate::plan::{Plan, Step, Verdict, plan};
use crate::status::{notices, status};

/// The shortest pause before another look.
const SOON: Duration = Duration::from_millis(300);

/// What a reconcile works with.
pub(crate) struct BackupOperator {
    pub(crate) means: Means,
    pub(crate) beside: Beside,
}

impl Reconcile for BackupOperator {
    type Object = EtcdBackup;
    type Error = apply::Error;

    async fn reconcile(&self, backup: Arc<EtcdBackup>) -> Result<Done, apply::Error> {
        let (now, uid) = (Timestamp::now(), backup.uid().unwrap_or_default());
        let running = Observed {
            since: Some(self.means.since),
            ..self.beside.observe(&uid)
        };
        let (observed, ready) = observe(&self.means, &backup, running, now).await;
        let observed = named(&backup, observed);
        let plan = plan(&backup, &observed, now);
        let done = act(&self.means.client, &self.beside, &backup, plan.step, ready).await;
        // A finalizer that was set is seen, with a new version of the object, in another round.
        if matches!(plan.step, Step::Guard(_) | Step::Expire) || done.is_err() {
            return again(done, &backup, &plan);
        }
        let (desired, current) = (status(&backup, &plan, now), backup.status.as_ref());
        fail::fail_point!("backup-before-status");
        let api = Api::<EtcdBackup>::namespaced(
            self.means.client.clone(),
            &backup.namespace().unwrap_or_default(),
        );
        // A status is written only over the one it was made from: what is read here may be out of date, and must
        // not take back what was said since (invariant 11).
        let written =
            apply::status_if_unchanged(&api, names::MANAGER_BACKUP, &*backup, current, &desired)
                .await;
        if written.is_err() {
            return again(written.map(drop), &backup, &plan);
        }
        if is_told(&plan.verdict) {
            self.beside.forget(&uid);
        }
        // A status that was just written comes back as an event of the object itself.
        let requeue = plan.requeue.map(|after| after.max(SOON));
        Ok(Done {
            requeue,
            notices: notices(&backup, &plan),
        })
    }
}

/// Ends a round without a status; a conflict is only another look.
fn again(
    done: Result<(), apply::Error>,
    backup: &EtcdBackup,
    plan: &Plan,
) -> Result<Done, apply::Error> {
    match done {
        Err(error) if error.reason() == "Conflict" => Ok(Done {
            requeue: Some(SOON),
            notices: Vec::new(),
        }),
        done => done.map(|()| Done {
            requeue: plan.requeue.map(|after| after.max(SOON)),
            notices: notices(backup, plan),
        }),
    }
}

/// What ended is forgotten once it is in the status.
fn is_told(verdict: &Verdict) -> bool {
    matches!(
        verdict,
        Verdict::Settled | Verdict::Succeeded(_) | Verdict::Failed(_) | Verdict::Tidied(_)
    )
}
