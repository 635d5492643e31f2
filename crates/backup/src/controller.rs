//! The driver: observe, plan, act, status.

use std::sync::Arc;
use std::time::Duration;

use api::{EtcdBackup, names};
use jiff::Timestamp;
use kube::runtime::reflector::Store;
use kube::{Api, ResourceExt};
use runtime::controller::Guarded;
use runtime::{Done, Failure, Reconcile, apply};

use crate::act::act;
use crate::observe::{Means, observe};
use crate::plan::{Verdict, plan};
use crate::status::{notices, status};
use crate::workers::Workers;

/// The shortest pause before another look.
const SOON: Duration = Duration::from_millis(300);

/// What a reconcile works with.
pub(crate) struct BackupOperator {
    pub(crate) means: Means,
    pub(crate) workers: Arc<Workers>,
    pub(crate) objects: Store<Guarded<EtcdBackup>>,
}

impl Reconcile for BackupOperator {
    type Object = EtcdBackup;
    type Error = apply::Error;

    async fn reconcile(&self, backup: Arc<EtcdBackup>) -> Result<Done, apply::Error> {
        let (now, uid) = (Timestamp::now(), backup.uid().unwrap_or_default());
        let running = self.workers.observe(&uid);
        let (observed, transfer) = observe(&self.means, &backup, running, now).await;
        let plan = plan(&backup, &observed, now);
        act(&self.workers, &self.objects, &backup, plan.step, transfer);
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
        match written {
            Err(error) if error.reason() == "Conflict" => {
                return Ok(Done {
                    requeue: Some(SOON),
                    notices: Vec::new(),
                });
            }
            written => written?,
        };
        if matches!(
            plan.verdict,
            Verdict::Settled | Verdict::Succeeded(_) | Verdict::Failed(_)
        ) {
            self.workers.forget(&uid);
        }
        // A status that was just written comes back as an event of the object itself.
        let requeue = plan.requeue.map(|after| after.max(SOON));
        Ok(Done {
            requeue,
            notices: notices(&backup, &plan),
        })
    }
}
