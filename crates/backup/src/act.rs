//! Does one step. Recording an intent or attempts is the status write itself and is done there.

use std::sync::Arc;

use api::EtcdBackup;
use api::names::{FINALIZER_STORED, MANAGER_BACKUP};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, Client, Resource, ResourceExt};
use runtime::apply;
use runtime::controller::Guarded;

use crate::observe::Ready;
use crate::observed::{Kept, Observed, Stored};
use crate::plan::Step;
use crate::workers::Workers;

/// What runs beside the reconciles.
pub(crate) struct Beside {
    /// Transfers.
    pub(crate) transfers: Arc<Workers<Stored>>,
    /// Removals.
    pub(crate) removals: Arc<Workers<Kept>>,
    /// All EtcdBackups, as the watch has them.
    pub(crate) objects: Store<Guarded<EtcdBackup>>,
}

impl Beside {
    /// What runs for an EtcdBackup, or ended.
    pub(crate) fn observe(&self, uid: &str) -> Observed {
        Observed {
            transfer: self.transfers.observe(uid),
            removal: self.removals.observe(uid),
            ..Observed::default()
        }
    }

    /// Lets the transfer run whose turn it is: its attempt is counted.
    pub(crate) fn start(&self, uid: &str, count: i32) {
        self.transfers.start(uid, count);
    }

    /// Forgets what ended and was told.
    pub(crate) fn forget(&self, uid: &str) {
        self.transfers.forget(uid);
        self.removals.forget(uid);
    }

    /// Waits for the end, which the shutdown brings about.
    pub(crate) async fn ended(&self) {
        tokio::join!(self.transfers.ended(), self.removals.ended());
    }
}

/// Does the step.
pub(crate) async fn act(
    client: &Client,
    beside: &Beside,
    backup: &EtcdBackup,
    step: Step,
    ready: Ready,
) -> Result<(), apply::Error> {
    let uid = backup.uid().unwrap_or_default();
    let api = || {
        let namespace = backup.namespace().unwrap_or_default();
        Api::<EtcdBackup>::namespaced(client.clone(), &namespace)
    };
    let there = |ends_too: bool| {
        let reference = ObjectRef::<Guarded<EtcdBackup>>::new(&backup.name_any())
            .within(&backup.namespace().unwrap_or_default());
        let (objects, whose) = (beside.objects.clone(), uid.clone());
        // A namesake that was created since is another backup.
        move || {
            objects.get(&reference).is_some_and(|object| {
                object.uid().as_deref() == Some(whose.as_str())
                    && (ends_too || object.meta().deletion_timestamp.is_none())
            })
        }
    };
    match (step, ready) {
        (Step::Begin, Ready::Transfer(transfer)) => {
            beside.transfers.begin(&uid, *transfer, there(false));
        }
        (Step::Tidy, Ready::Removal(removal)) => {
            beside.removals.begin(&uid, *removal, there(false));
        }
        (Step::Begin, Ready::TransferInPod(job)) => {
            beside.transfers.begin(&uid, *job, there(false));
        }
        (Step::Tidy, Ready::RemovalInPod(job)) => {
            beside.removals.begin(&uid, *job, there(false));
        }
        (Step::Purge, Ready::RemovalInPod(job)) => {
            beside.removals.begin(&uid, *job, there(true));
        }
        (Step::Purge, Ready::Removal(removal)) => {
            beside.removals.begin(&uid, *removal, there(true));
        }
        (Step::Abandon, _) => beside.transfers.abandon(&uid),
        // What an earlier spec's transfer came to is no concern of this one's.
        (Step::RecordIntent, _) => beside.forget(&uid),
        (Step::Guard(set), _) => {
            apply::set_finalizer(&api(), MANAGER_BACKUP, backup, FINALIZER_STORED, set).await?;
            if !set {
                beside.forget(&uid);
            }
        }
        (Step::Expire, _) => {
            apply::delete(&api(), backup, None).await?;
        }
        (Step::Begin | Step::Tidy | Step::Purge | Step::RecordAttempts(_) | Step::Nothing, _) => {}
    }
    Ok(())
}
