//! The tasks of all mirrors of this process. Each task belongs to one EtcdMirror, identified by its UID.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::EtcdMirror;
use futures::FutureExt;
use kube::runtime::reflector::ObjectRef;
use runtime::controller::Guarded;
use runtime::logs::in_background;
use runtime::slots::{Place, SlotLimits, Slots};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::checkpoint::Identity;
use crate::ends::Ends;
use crate::progress::Monitor;
use crate::task::Task;

/// Interval at which a task checks that its EtcdMirror still exists.
const EXISTENCE_POLL: Duration = Duration::from_secs(1);

/// The EtcdMirror to which a task belongs.
pub(crate) type Owner = ObjectRef<Guarded<EtcdMirror>>;

struct Entry {
    ends: watch::Sender<Ends>,
    monitor: Monitor,
    stop: CancellationToken,
    handle: JoinHandle<()>,
}

/// The tasks of all mirrors. The slots limit the number of tasks that run at the same time, because each task needs
/// memory.
pub(crate) struct Tasks {
    slots: Arc<Slots>,
    entries: Mutex<HashMap<String, Entry>>,
    shutdown: CancellationToken,
    /// Receives each EtcdMirror whose task has changed its state, so that the EtcdMirror is reconciled.
    changes: mpsc::UnboundedSender<Owner>,
}

impl Tasks {
    pub(crate) fn new(
        limits: SlotLimits,
        shutdown: CancellationToken,
        changes: mpsc::UnboundedSender<Owner>,
    ) -> Arc<Self> {
        Arc::new(Self {
            slots: Slots::new(limits),
            entries: Mutex::default(),
            shutdown,
            changes,
        })
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The progress of a mirror. `None` if it has no task.
    pub(crate) fn monitor(&self, uid: &str) -> Option<Monitor> {
        self.entries().get(uid).map(|entry| entry.monitor.clone())
    }

    /// Starts the task of a mirror, or passes new connections to its running task. The task ends when `exists` returns
    /// false.
    pub(crate) fn ensure(
        &self,
        owner: &Owner,
        identity: &Identity,
        ends: Ends,
        exists: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Monitor {
        let mut entries = self.entries();
        entries.retain(|_, entry| !entry.handle.is_finished());
        if let Some(entry) = entries.get(&identity.uid) {
            entry.ends.send_if_modified(|known| {
                let is_new = *known != ends;
                if is_new {
                    *known = ends;
                }
                is_new
            });
            return entry.monitor.clone();
        }
        let (sender, receiver) = watch::channel(ends);
        let (monitor, stop) = (Monitor::default(), self.shutdown.child_token());
        let (changes, of_task) = (self.changes.clone(), owner.clone());
        let task = Task {
            identity: identity.clone(),
            ends: receiver,
            monitor: monitor.clone(),
            stop: stop.clone(),
            changed: Box::new(move || {
                let _ = changes.send(of_task.clone());
            }),
        };
        let place = Place {
            namespace: owner.namespace.clone().unwrap_or_default(),
            store: String::new(),
            in_pod: false,
        };
        let (slots, stopped) = (self.slots.clone(), stop.clone());
        let mut slot = Box::pin(async move { slots.acquire(place).await });
        let at_once = slot.as_mut().now_or_never();
        if at_once.is_some() {
            monitor.start();
        }
        let work = async move {
            let run = async {
                let held = if let Some(held) = at_once {
                    held
                } else {
                    tokio::select! {
                        held = slot => held,
                        () = stopped.cancelled() => return,
                    }
                };
                task.run().await;
                drop(held);
            };
            let deleted = async {
                while exists() {
                    tokio::time::sleep(EXISTENCE_POLL).await;
                }
            };
            tokio::select! {
                () = run => {}
                () = deleted => {}
            }
        };
        let entry = Entry {
            ends: sender,
            monitor: monitor.clone(),
            stop,
            handle: tokio::spawn(in_background(Box::pin(work))),
        };
        entries.insert(identity.uid.clone(), entry);
        monitor
    }

    /// Stops the task of a mirror, and waits until it has ended.
    pub(crate) async fn stop(&self, uid: &str) {
        let entry = self.entries().remove(uid);
        if let Some(entry) = entry {
            entry.stop.cancel();
            // The result is ignored, because a task that has panicked has ended too.
            let _ = entry.handle.await;
        }
    }

    /// Stops all tasks, and waits until they have ended.
    pub(crate) async fn join(&self) {
        let uids: Vec<String> = self.entries().keys().cloned().collect();
        for uid in uids {
            self.stop(&uid).await;
        }
    }
}
