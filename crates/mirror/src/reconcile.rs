//! The reconcile of one EtcdMirror: reads its connections, starts or stops its task, and reports its progress.

use std::sync::Arc;
use std::time::Duration;

use api::EtcdMirror;
use api::names::{FINALIZER_MIRROR, MANAGER_BACKUP};
use etcd::ClusterId;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::controller::Cache;
use runtime::endpoints::EndpointGrants;
use runtime::logs::in_stage;
use runtime::{Done, Notice, Reconcile, Scope, apply};
use tokio::time::timeout;

use crate::checkpoint::{Checkpoint, Identity, Phase};
use crate::ends;
use crate::mapping::Mapping;
use crate::reason::{Reason, Trouble};
use crate::status::{Verdict, compute, is_due};
use crate::task::release;
use crate::tasks::{Owner, Tasks};

/// Interval between two reconciles. It is short, because a change of a pod's address, of a Secret or of the lag
/// triggers no reconcile.
const REQUEUE: Duration = Duration::from_secs(10);

/// Delay after a conflict, and after the finalizer is set.
const CONFLICT_RETRY: Duration = Duration::from_millis(300);

/// Time limit for the reads of one reconcile, and for the deletion of a checkpoint.
const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) struct ReconcileContext {
    pub(crate) client: Client,
    /// The etcd endpoints that each namespace may use in `spec.source.etcdEndpoints`.
    pub(crate) endpoints: EndpointGrants,
    pub(crate) tasks: Arc<Tasks>,
    /// All EtcdMirrors, from the watch.
    pub(crate) objects: Cache<EtcdMirror>,
    /// The objects that this operator manages.
    pub(crate) scope: Scope,
    /// The maximum number of tasks, for messages.
    pub(crate) max_mirrors: usize,
}

impl Reconcile for ReconcileContext {
    type Object = EtcdMirror;
    type Error = apply::Error;

    async fn reconcile(&self, object: Arc<EtcdMirror>) -> Result<Done, apply::Error> {
        let namespace = object.namespace().unwrap_or_default();
        let api = Api::<EtcdMirror>::namespaced(self.client.clone(), &namespace);
        // The EtcdMirror is read again, because the cached object may not contain the last status yet.
        let name = object.name_any();
        let live = api.get_opt(&name).await;
        let Some(mirror) = live.map_err(|source| unread(&name, source))? else {
            self.tasks.stop(&object.uid().unwrap_or_default()).await;
            return Ok(Done::default());
        };
        let done = if mirror.metadata.deletion_timestamp.is_some() {
            Box::pin(self.end(&api, &mirror)).await
        } else {
            Box::pin(self.work(&api, &mirror)).await
        };
        match done {
            // The object has changed since the read, so the next reconcile reads it again.
            Err(error) if error.is_conflict() => Ok(Done {
                requeue: Some(CONFLICT_RETRY),
                notices: Vec::new(),
            }),
            Err(error) if error.is_missing() => Ok(Done::default()),
            done => done,
        }
    }
}

impl ReconcileContext {
    async fn work(&self, api: &Api<EtcdMirror>, mirror: &EtcdMirror) -> Result<Done, apply::Error> {
        let uid = mirror.uid().unwrap_or_default();
        if let Some(trouble) = ends::refusal(mirror) {
            self.tasks.stop(&uid).await;
            return self
                .report(api, mirror, Verdict::Troubled(trouble, None))
                .await;
        }
        // Invariant 10: the finalizer is set before the task can create a checkpoint.
        let finalizers = mirror.finalizers();
        if !finalizers.iter().any(|name| name == FINALIZER_MIRROR) {
            apply::set_finalizers(api, MANAGER_BACKUP, mirror, &[FINALIZER_MIRROR], true).await?;
            return Ok(Done {
                requeue: Some(CONFLICT_RETRY),
                notices: Vec::new(),
            });
        }
        let read = timeout(DEADLINE, ends::read(&self.client, &self.endpoints, mirror));
        let read = in_stage("observe", Box::pin(read)).await;
        let read = read.unwrap_or_else(|_| {
            let message = format!("no answer from the API server within {DEADLINE:?}");
            Err(Trouble::new(Reason::StepFailed, message))
        });
        let verdict = match read {
            Ok(ends) => {
                let owner = owner_of(mirror);
                let exists = self.exists(&owner, &uid);
                let identity = identity(mirror);
                let monitor = self.tasks.ensure(&owner, &identity, ends, exists);
                Verdict::Running(Box::new(monitor.read()))
            }
            // Invariant 28: without a grant, the task stops. After every other failure, a running task continues with
            // its known connections, for example while a Secret is replaced.
            Err(trouble) if trouble.reason == Reason::EndpointNotGranted => {
                self.tasks.stop(&uid).await;
                Verdict::Troubled(trouble, None)
            }
            Err(trouble) => {
                let monitor = self.tasks.monitor(&uid);
                Verdict::Troubled(trouble, monitor.map(|monitor| Box::new(monitor.read())))
            }
        };
        self.report(api, mirror, verdict).await
    }

    /// Promotes the destination of a deleted EtcdMirror: stops the task, deletes the checkpoint, and removes the
    /// finalizer. The copied keys stay.
    async fn end(&self, api: &Api<EtcdMirror>, mirror: &EtcdMirror) -> Result<Done, apply::Error> {
        let uid = mirror.uid().unwrap_or_default();
        self.tasks.stop(&uid).await;
        let finalizers = mirror.finalizers();
        if !finalizers.iter().any(|name| name == FINALIZER_MIRROR) {
            return Ok(Done::default());
        }
        let released = timeout(DEADLINE, self.release(mirror, &uid));
        let released = in_stage("execute", Box::pin(released)).await;
        let released = released.unwrap_or_else(|_| {
            let message = format!("no answer within {DEADLINE:?}");
            Err(Trouble::new(Reason::DestinationUnreachable, message))
        });
        match released {
            Ok(last) => {
                apply::set_finalizers(api, MANAGER_BACKUP, mirror, &[FINALIZER_MIRROR], false)
                    .await?;
                Ok(Done {
                    requeue: None,
                    notices: last.iter().map(promoted).collect(),
                })
            }
            Err(trouble) => {
                let message = format!(
                    "the checkpoint of the mirror in the destination cannot be deleted, and the deletion is retried: \
                     {}. If the destination is lost, remove the finalizer {FINALIZER_MIRROR}",
                    trouble.message
                );
                let trouble = Trouble::new(Reason::ReleaseFailed, message);
                self.report(api, mirror, Verdict::Troubled(trouble, None))
                    .await
            }
        }
    }

    /// Deletes the checkpoint. Returns the last checkpoint, or `None` if there is none.
    async fn release(&self, mirror: &EtcdMirror, uid: &str) -> Result<Option<Checkpoint>, Trouble> {
        let Some(destination) = ends::released(&self.client, mirror).await? else {
            return Ok(None);
        };
        let released = release(&destination, uid).await;
        released.map_err(|failure| failure.trouble())
    }

    async fn report(
        &self,
        api: &Api<EtcdMirror>,
        mirror: &EtcdMirror,
        verdict: Verdict,
    ) -> Result<Done, apply::Error> {
        let now = Timestamp::now();
        let desired = compute(mirror, &verdict, self.max_mirrors, now);
        let current = mirror.status.as_ref();
        if is_due(current, &desired, now) {
            let written =
                apply::status_if_unchanged(api, MANAGER_BACKUP, mirror, current, &desired);
            in_stage("status", written).await?;
        }
        let monitor = self.tasks.monitor(&mirror.uid().unwrap_or_default());
        let taken = monitor.map(|monitor| monitor.take_notices());
        let mut notices = taken.unwrap_or_default();
        let trouble = match verdict {
            Verdict::Troubled(trouble, _) => Some(trouble),
            Verdict::Running(progress) => progress.trouble,
        };
        notices
            .extend(trouble.map(|trouble| {
                Notice::warning(trouble.reason.as_str(), "Mirror", trouble.message)
            }));
        Ok(Done {
            requeue: Some(REQUEUE),
            notices,
        })
    }

    /// Returns a function that checks whether the EtcdMirror with this UID exists, is not being deleted, and is in the
    /// scope of this operator. Until the watch has listed all objects, every EtcdMirror counts as existing (invariant
    /// 1).
    fn exists(&self, owner: &Owner, uid: &str) -> impl Fn() -> bool + Send + Sync + use<> {
        let (objects, scope) = (self.objects.clone(), self.scope.clone());
        let (owner, uid) = (owner.clone(), uid.to_owned());
        move || {
            let found = objects.get(&owner);
            found.map_or(!objects.is_complete(), |object| {
                let meta = object.meta();
                meta.uid.as_ref() == Some(&uid)
                    && meta.deletion_timestamp.is_none()
                    && scope.takes(&*object)
            })
        }
    }
}

fn owner_of(mirror: &EtcdMirror) -> Owner {
    ObjectRef::new(&mirror.name_any()).within(&mirror.namespace().unwrap_or_default())
}

fn identity(mirror: &EtcdMirror) -> Identity {
    let (namespace, name) = (mirror.namespace().unwrap_or_default(), mirror.name_any());
    Identity {
        uid: mirror.uid().unwrap_or_default(),
        name: format!("{namespace}/{name}"),
        mapping: Mapping::new(
            mirror.spec.source_prefix(),
            mirror.spec.destination_prefix(),
        ),
    }
}

/// The notice about a promotion.
fn promoted(last: &Checkpoint) -> Notice {
    let source = last.source.parse().unwrap_or(ClusterId(0));
    let revision = last.revision;
    let complete = last.phase == (Phase::Following { split: None });
    if complete {
        let note = format!(
            "the destination is promoted: it contains etcd cluster {source} at revision {revision}"
        );
        return Notice::change(Reason::Promoted.as_str(), "Promote", note);
    }
    let note = format!(
        "the destination is promoted, but it does not contain a single revision of the source: not all changes up to \
         revision {revision} of etcd cluster {source} were applied"
    );
    Notice {
        warning: true,
        ..Notice::change(Reason::PromotedIncomplete.as_str(), "Promote", note)
    }
}

fn unread(name: &str, source: kube::Error) -> apply::Error {
    apply::Error::Api {
        verb: "read",
        kind: EtcdMirror::kind(&()).into_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    }
}

#[cfg(test)]
mod tests;
