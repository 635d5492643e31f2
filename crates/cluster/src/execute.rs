//! Sends the actions of one step. The actions of a chain are sent one after another. The chains and the change of the
//! members are sent concurrently.
//!
//! This module decides nothing. If an action fails, its chain ends, and the next reconcile plans again.

mod calls;
mod certificates;
pub(crate) mod error;
mod passwords;
mod send;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::EtcdCluster;
use etcd::Etcd;
use futures::future::join_all;
use kube::Client;
use runtime::apply::FRESH;
use runtime::credentials::ClusterAuth;

pub use self::error::Error;
use crate::action::{Action, Change, StartPart, Step};
use crate::plan::actions::unmark;
use crate::refusals::Refusals;
use crate::snapshot::Observed;
use crate::upkeep::Calls;

/// The first pause before a retry of an action that the API server could not serve.
const PAUSE: Duration = Duration::from_millis(100);

/// The pauses between attempts to remove the annotation `started` from a member's Service. The operator must retry the
/// removal, because no other process removes this annotation.
const PAUSES: [Duration; 4] = [
    PAUSE,
    Duration::from_millis(300),
    Duration::from_secs(1),
    Duration::from_secs(3),
];

/// The successful actions of a step, and the errors of the failed actions.
#[derive(Debug, Default)]
pub struct Acted {
    /// The actions that succeeded.
    pub done: Vec<Action>,
    /// The errors of the actions that failed.
    pub failed: Vec<Error>,
}

impl Acted {
    /// The error to report: the first error that a retry does not resolve.
    pub fn failure(&self) -> Option<&Error> {
        self.failed.iter().find(|error| !error.is_passing())
    }

    /// Combines the outcomes of two chains or steps.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.done.extend(other.done);
        self.failed.extend(other.failed);
        self
    }
}

/// The inputs of [`ExecuteContext::execute`].
pub struct ExecuteContext<'a> {
    /// The client of the API server. It sends each request once (invariant 11).
    pub client: &'a Client,
    /// The etcd client that calls the members.
    pub etcd: &'a Arc<dyn Etcd>,
    /// The back-off of members whose start the API server rejected.
    pub refusals: &'a Refusals,
    /// Long calls to members, such as defragmentations, that run outside the reconcile.
    pub calls: &'a Calls,
    /// The operator's credentials for etcd. They are kept in memory only.
    pub auth: &'a ClusterAuth,
    /// The EtcdCluster with the spec in effect.
    pub cluster: &'a EtcdCluster,
    /// The observation from which the step was planned.
    pub observed: &'a Observed,
    /// The client URLs of members, by name.
    pub urls: &'a BTreeMap<String, String>,
    /// The time at which the observation began.
    pub since: Instant,
}

impl ExecuteContext<'_> {
    /// Sends all actions of the step.
    pub async fn execute(&self, step: &Step) -> Acted {
        let chains = join_all(step.chains.iter().map(|chain| self.chain(chain)));
        let change = async {
            match &step.change {
                Some(change) => self.change(change).await,
                None => Acted::default(),
            }
        };
        let (chains, change) = tokio::join!(chains, change);
        chains.into_iter().fold(change, Acted::merge)
    }

    /// Sends a chain. While a member is in back-off after a rejected start, no action of its next start is sent.
    async fn chain(&self, chain: &[Action]) -> Acted {
        let mut parts = chain.iter().filter_map(|action| action.start.as_ref());
        let starts = parts.find_map(StartPart::announces);
        let acted = self.begun(chain).await;
        if let Some(member) = starts {
            match acted.failed.last() {
                None => self.refusals.allowed(self.cluster, member),
                Some(Error::Held { .. }) => {}
                Some(error) => {
                    let now = Instant::now();
                    self.refusals.refused(self.cluster, member, error, now);
                }
            }
        }
        acted
    }

    async fn begun(&self, chain: &[Action]) -> Acted {
        let mut acted = Acted::default();
        let mut marked: Option<(String, String)> = None;
        for action in chain {
            let part = action.start.as_ref();
            let held = part
                .and_then(StartPart::announces)
                .and_then(|member| self.refusals.holds(self.cluster, member, Instant::now()));
            if let Some(held) = held {
                acted.failed.push(held);
                break;
            }
            interrupt(action);
            match self.repeat(action, marked.is_some()).await {
                Ok(version) => {
                    let member = part.and_then(StartPart::marks);
                    if let (Some(member), Some(version)) = (member, version) {
                        marked = Some((member.to_owned(), version));
                    }
                    acted.done.push(action.clone());
                }
                Err((error, not_done)) => {
                    let undone = part.is_some_and(|part| part.is_undone(not_done));
                    if let Some((member, version)) = marked.filter(|_| undone) {
                        acted
                            .failed
                            .extend(self.undo(&member, &version).await.err());
                    }
                    acted.failed.push(error);
                    break;
                }
            }
        }
        acted
    }

    /// Sends an action of a chain. The flag in the error is true if the request certainly had no effect.
    ///
    /// `marked`: the chain has set the annotation `started` on a Service, and a failure could make the member's name
    /// unusable. The executor then retries requests that the API server cannot serve at the moment.
    async fn repeat(&self, action: &Action, marked: bool) -> Result<Option<String>, (Error, bool)> {
        let (mut pause, mut doubtful) = (PAUSE, false);
        loop {
            let error = match self.send(action, &[]).await {
                Ok(version) => return Ok(version),
                Err(error) => error,
            };
            let in_time = self.since.elapsed() + pause < FRESH;
            if !(marked && error.is_for_now() && in_time) {
                let not_done = !doubtful && error.says_not_done();
                return Err((error, not_done));
            }
            doubtful |= !error.says_not_done();
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// Removes the annotation `started` that the chain has set, even if the observation is too old by now. The
    /// precondition is the resourceVersion that the chain wrote. Another process that starts the member changes this
    /// resourceVersion, so the removal never affects a started member (invariant 6).
    async fn undo(&self, member: &str, version: &str) -> Result<(), Error> {
        let patch = unmark(member, version);
        for pause in PAUSES {
            match self.patch(&patch).await {
                Err(error) if error.is_for_now() => tokio::time::sleep(pause).await,
                undone => return undone.map(drop),
            }
        }
        self.patch(&patch).await.map(drop)
    }

    /// Invariant 11: sends the change only if etcd's member list equals the list from which the change was planned.
    async fn change(&self, change: &Change) -> Acted {
        let mut acted = Acted::default();
        let via = self.client_urls(&change.via);
        match self.etcd.members(&via).await {
            Ok(list) if list == change.planned_from => {}
            Ok(_) => {
                acted.failed.push(Error::ListChanged);
                return acted;
            }
            Err(source) => {
                acted.failed.push(Error::Etcd {
                    what: "read the member list before a change".to_owned(),
                    source,
                });
                return acted;
            }
        }
        for action in &change.chain {
            interrupt(action);
            match self.send(action, &via).await {
                Ok(_) => acted.done.push(action.clone()),
                Err(error) => {
                    acted.failed.push(error);
                    break;
                }
            }
        }
        acted
    }
}

/// Runs the failpoint of an action, such as `FAILPOINTS=before-create-pod=panic`. Tests use failpoints to crash the
/// operator before a request.
fn interrupt(action: &Action) {
    let (point, text) = (action.point, action.text.as_str());
    tracing::debug!(point, text, "action");
    fail::fail_point!(point);
}
