//! Undoes writes that arrived at the API server too late (invariant 11), because no reconcile would undo them. For
//! example, a request is in flight when its process loses the lease. Before it exits, the process waits for the tasks
//! that undo its writes.

use std::time::Duration;

use api::names::ANNOTATION_RESTORE;
use api::problem::Chain;
use api::{EtcdCluster, EtcdRestore};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use runtime::apply;
use runtime::logs::in_background;
use tokio_util::task::TaskTracker;

use super::{Error, ExecuteContext, STOP_SECONDS, checks};
use crate::observe::members;
use crate::plan::{in_place, released};
use crate::{naming, snapshot::OldMembers};

/// Maximum number of attempts per task.
const ATTEMPTS: u32 = 5;
/// Delay between two attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// The tasks that undo writes that arrived too late.
#[derive(Clone, Default)]
pub struct Undo {
    tasks: TaskTracker,
    #[cfg(test)]
    pub(super) failures: std::sync::Arc<std::sync::Mutex<Vec<Error>>>,
}

impl Undo {
    /// Waits until all tasks have ended.
    pub async fn join(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Repeats the task until it succeeds, at most [`ATTEMPTS`] times.
    fn spawn<T>(&self, object: &'static str, attempt: impl Fn() -> T + Send + 'static)
    where
        T: Future<Output = Result<(), Error>> + Send + 'static,
    {
        #[cfg(test)]
        let undo = self.clone();
        let task = async move {
            let mut attempts = 1;
            while let Err(error) = attempt().await {
                if attempts == ATTEMPTS {
                    tracing::warn!(error = %Chain(&error), object, "cannot undo a write that arrived too late at the API server");
                    #[cfg(test)]
                    undo.failures.lock().unwrap().push(error);
                    return;
                }
                attempts += 1;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        };
        self.tasks.spawn(in_background(task));
    }
}

/// Deletes the pod `created` if the cluster no longer needs a seed. After the handover (the removal of the restore
/// lock), this pod would start a member that exists already, with the old data of the backup.
pub(super) fn delayed_seed(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
    (created, after_cutover): (Pod, bool),
) {
    let work = (context.clone(), restore.clone(), cluster.clone(), created);
    context.undo.spawn("the seed's pod", move || {
        let (context, restore, cluster, created) = work.clone();
        async move {
            if needs_seed(&context, &restore, &cluster, after_cutover).await? {
                return Ok(());
            }
            tracing::warn!(
                pod = created.name_any(),
                "deleting the seed's pod, because it was created too late: the cluster no longer needs a seed"
            );
            let api: Api<Pod> = context.api(&restore.namespace().unwrap_or_default());
            apply::delete(&api, &created, Some(STOP_SECONDS)).await?;
            Ok(())
        }
    });
}

/// True if the cluster still needs the new pod. The restore must hold the lock. In addition, the data must be on a
/// volume, or no client can have written to the seed yet.
async fn needs_seed(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
    after_cutover: bool,
) -> Result<bool, Error> {
    let Some(cluster) = checks::in_place(context, restore, cluster).await? else {
        return Ok(false);
    };
    if cluster.spec.is_durable() || !after_cutover {
        return Ok(true);
    }
    // Without a volume, a new pod is needed only until the old members have stopped. Afterwards, clients may have
    // written to an earlier pod of the seed, and the new pod would not contain these writes.
    let namespace = restore.namespace().unwrap_or_default();
    match members::old_members(&context.client, restore, &namespace, &cluster).await {
        OldMembers::Unknown(why) => Err(Error::Missing(why)),
        old_members => Ok(!old_members.have_stopped()),
    }
}

/// Removes the restore lock if the EtcdRestore was deleted or has no finalizer, because no later reconcile would remove
/// the lock.
pub(super) fn delayed_lock(context: &ExecuteContext, restore: &EtcdRestore, cluster: &EtcdCluster) {
    let work = (context.clone(), restore.clone(), cluster.name_any());
    context.undo.spawn("the restore lock", move || {
        let (context, restore, cluster) = work.clone();
        async move { unlock(&context, &restore, &cluster).await }
    });
}

async fn unlock(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    cluster: &str,
) -> Result<(), Error> {
    let uid = naming::uid(restore);
    let now = checks::read_again(context, restore).await?;
    if now.is_some_and(|now| naming::uid(&now) == uid && in_place::has_finalizer(&now)) {
        return Ok(());
    }
    let namespace = restore.namespace().unwrap_or_default();
    let cluster: Option<EtcdCluster> = context.read(&namespace, cluster).await?;
    let locked = cluster.filter(|cluster| {
        let lock = cluster.annotations().get(ANNOTATION_RESTORE);
        lock.map(String::as_str) == Some(uid)
    });
    if let Some(cluster) = locked {
        let patch = released(restore, &cluster);
        context.patch(&namespace, &cluster, &patch).await?;
    }
    Ok(())
}
