//! Starts the workers that copy stored backups to further stores, and the workers that remove copies.

use api::EtcdBackup;
use api::backup::BackupCopy;
use kube::{Resource, ResourceExt};

use super::{ExecuteContext, owner_of};
use crate::copies::{CopyJob, Copying};
use crate::observe::copies::CopyStores;
use crate::plan::{CopyStep, CopyVerdict, Plan};
use crate::removal::{Removal, RemovalScope};
use crate::snapshot::CopyInputs;

/// Identifies the workers of one copy.
fn key(backup: &EtcdBackup, copy: &BackupCopy) -> String {
    format!("{}/{}", backup.uid().unwrap_or_default(), copy.name)
}

/// The state of the workers of all copies in this process.
pub(super) fn running(context: &ExecuteContext, backup: &EtcdBackup) -> Vec<CopyInputs> {
    let copies = backup.spec.copy_to.iter().map(|copy| {
        let key = key(backup, copy);
        CopyInputs {
            work: context.copies.observe(&key),
            removal: context.removals.observe(&key),
            ..CopyInputs::default()
        }
    });
    copies.collect()
}

/// Deletes the results of the ended workers of all copies from memory.
pub(super) fn forget(context: &ExecuteContext, backup: &EtcdBackup) {
    for copy in &backup.spec.copy_to {
        let key = key(backup, copy);
        context.copies.forget(&key);
        context.removals.forget(&key);
    }
}

/// Deletes the results that the status reports from memory, and starts the planned workers. `stores` has one item for
/// each entry of `spec.copyTo`.
pub(crate) fn start_copies(
    context: &ExecuteContext,
    backup: &EtcdBackup,
    plan: &Plan,
    stores: Vec<Option<CopyStores>>,
) {
    let planned = backup.spec.copy_to.iter().zip(&plan.copies.copies);
    for ((copy, planned), stores) in planned.zip(stores) {
        if matches!(
            planned.verdict,
            CopyVerdict::Copied(_) | CopyVerdict::Failed(_)
        ) {
            context.copies.forget(&key(backup, copy));
        }
        match (&planned.step, stores) {
            (CopyStep::Copy(job), Some(stores)) => start(context, backup, copy, job, stores),
            (CopyStep::Remove, Some(stores)) => remove(context, backup, copy, stores),
            (CopyStep::Nothing | CopyStep::Copy(_) | CopyStep::Remove, _) => {}
        }
    }
}

/// Starts to copy. The worker is canceled when the EtcdBackup is deleted, or no longer contains the copy.
fn start(
    context: &ExecuteContext,
    backup: &EtcdBackup,
    copy: &BackupCopy,
    job: &CopyJob,
    stores: CopyStores,
) {
    let CopyStores {
        from: Some(from),
        to,
    } = stores
    else {
        return;
    };
    fail::fail_point!("backup-before-copy");
    let copying = Copying {
        from,
        to,
        job: job.clone(),
        uid: backup.uid().unwrap_or_default(),
        since: context.since,
    };
    let (objects, uid) = (context.objects.clone(), backup.uid());
    let (owner, name) = (owner_of(backup), copy.name.clone());
    let exists = move || {
        objects.get(&owner).is_some_and(|object| {
            let live = object.uid() == uid && object.meta().deletion_timestamp.is_none();
            let named = object.0.as_ref().is_ok_and(|backup| {
                let mut copies = backup.spec.copy_to.iter();
                copies.any(|copy| copy.name == name)
            });
            live && named
        })
    };
    let key = key(backup, copy);
    let worker = (owner_of(backup), key.as_str());
    context.copies.enqueue(worker, copying, exists);
}

/// Starts to remove all copies of an EtcdBackup that is being deleted. Copies of other EtcdBackups stay (invariant 13).
fn remove(context: &ExecuteContext, backup: &EtcdBackup, copy: &BackupCopy, stores: CopyStores) {
    let removal = Removal {
        store: stores.to.store,
        path: stores.to.key,
        uid: backup.uid().unwrap_or_default(),
        scope: RemovalScope::Everything,
    };
    let key = key(backup, copy);
    let worker = (owner_of(backup), key.as_str());
    let exists = context.exists(backup, true);
    context.removals.enqueue(worker, removal, exists);
}
