//! Undoes delayed writes that no later reconcile would find (invariant 11). A request may be in flight for longer than
//! its operator process holds the lease. The tasks run concurrently with the reconciles, and the process waits for
//! them.

use std::time::Duration;

use api::names::ANNOTATION_RESTORE;
use api::{EtcdCluster, EtcdRestore};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use runtime::apply;
use runtime::outcome::Chain;
use tokio_util::task::TaskTracker;

use super::{Error, ExecuteContext, STOP_SECONDS, checks};
use crate::observe::members;
use crate::plan::{in_place, released};
use crate::{naming, snapshot::Former};

/// Number of attempts of a task.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// The tasks of a process.
#[derive(Clone, Default)]
pub struct Undo {
    tasks: TaskTracker,
    #[cfg(test)]
    pub(super) failures: std::sync::Arc<std::sync::Mutex<Vec<Error>>>,
}

impl Undo {
    /// Waits until all tasks have ended.
    pub async fn ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Retries until the task succeeds or the attempts are used up.
    fn spawn<T>(&self, what: &'static str, attempt: impl Fn() -> T + Send + 'static)
    where
        T: Future<Output = Result<(), Error>> + Send + 'static,
    {
        #[cfg(test)]
        let undo = self.clone();
        self.tasks.spawn(async move {
            let mut tries = 1;
            while let Err(error) = attempt().await {
                if tries == TRIES {
                    tracing::warn!(error = %Chain(&error), what, "a late write is not taken back");
                    #[cfg(test)]
                    undo.failures.lock().unwrap().push(error);
                    return;
                }
                tries += 1;
                tokio::time::sleep(PAUSE).await;
            }
        });
    }
}

/// Deletes the pod of the seed that was created (`made`) if the cluster no longer needs a seed. After the handover, a
/// delayed seed would replace a member by the state of the backup, under the same IDs.
pub(super) fn late_seed(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    cluster: &EtcdCluster,
    (made, after_cutover): (Pod, bool),
) {
    let work = (context.clone(), restore.clone(), cluster.clone(), made);
    context.undo.spawn("the seed's pod", move || {
        let (context, restore, cluster, made) = work.clone();
        async move {
            if is_wanted(&context, &restore, &cluster, after_cutover).await? {
                return Ok(());
            }
            tracing::warn!(
                pod = made.name_any(),
                "the seed's pod was created late and is deleted: the cluster has gone on without it"
            );
            let api: Api<Pod> = context.api(&restore.namespace().unwrap_or_default());
            apply::delete(&api, &made, Some(STOP_SECONDS)).await?;
            Ok(())
        }
    });
}

/// Whether no client can have written to the seed, or the seed's data is on its volume.
async fn is_wanted(
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
    // After the cutover, a seed is created only while old members run. If they have stopped, another seed serves.
    let namespace = restore.namespace().unwrap_or_default();
    match members::former(&context.client, restore, &namespace, &cluster).await {
        Former::Unknown(why) => Err(Error::Missing(why)),
        former => Ok(!former.have_stopped()),
    }
}

/// Removes the restore lock if the EtcdRestore has no finalizer, because then no later reconcile would remove the lock.
pub(super) fn late_claim(context: &ExecuteContext, restore: &EtcdRestore, cluster: &EtcdCluster) {
    let work = (context.clone(), restore.clone(), cluster.name_any());
    context.undo.spawn("the claim", move || {
        let (context, restore, cluster) = work.clone();
        async move { unclaim(&context, &restore, &cluster).await }
    });
}

async fn unclaim(
    context: &ExecuteContext,
    restore: &EtcdRestore,
    cluster: &str,
) -> Result<(), Error> {
    let uid = naming::uid(restore);
    let now = checks::read_again(context, restore).await?;
    if now.is_some_and(|now| naming::uid(&now) == uid && in_place::is_held(&now)) {
        return Ok(());
    }
    let namespace = restore.namespace().unwrap_or_default();
    let claimed: Option<EtcdCluster> = context.read(&namespace, cluster).await?;
    let claimed = claimed.filter(|cluster| {
        let claim = cluster.annotations().get(ANNOTATION_RESTORE);
        claim.map(String::as_str) == Some(uid)
    });
    if let Some(cluster) = claimed {
        let patch = released(restore, &cluster);
        context.patch(&namespace, &cluster, &patch).await?;
    }
    Ok(())
}
