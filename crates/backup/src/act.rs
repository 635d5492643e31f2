//! Does one step. Recording the intent is the status write itself and is done there.

use std::sync::Arc;

use api::EtcdBackup;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt};
use runtime::controller::Guarded;

use crate::plan::Step;
use crate::transfer::Transfer;
use crate::workers::Workers;

/// Does the step.
pub(crate) fn act(
    workers: &Arc<Workers>,
    objects: &Store<Guarded<EtcdBackup>>,
    backup: &EtcdBackup,
    step: Step,
    transfer: Option<Transfer>,
) {
    let uid = backup.uid().unwrap_or_default();
    match (step, transfer) {
        (Step::Begin, Some(transfer)) => {
            let reference = ObjectRef::<Guarded<EtcdBackup>>::new(&backup.name_any())
                .within(&backup.namespace().unwrap_or_default());
            let (objects, whose) = (objects.clone(), uid.clone());
            workers.begin(
                &uid,
                transfer,
                // A namesake that was created since is another backup.
                move || {
                    objects.get(&reference).is_some_and(|object| {
                        object.uid().as_deref() == Some(whose.as_str())
                            && object.meta().deletion_timestamp.is_none()
                    })
                },
            );
        }
        (Step::Abandon, _) => workers.abandon(&uid),
        // What an earlier spec's transfer came to is no concern of this one's.
        (Step::RecordIntent, _) => workers.forget(&uid),
        (Step::Begin | Step::Nothing, _) => {}
    }
}
