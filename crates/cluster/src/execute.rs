//! Sends the actions of one step. The actions of a chain follow each other; chains and the change of the members are
//! sent concurrently.
//!
//! Nothing is decided here. An action that loses a race (the object has changed, exists or is deleted) ends its chain
//! and is planned again. An action is only repeated here if the end of its chain would cost a member its name.

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

/// The first pause before an action is retried that the API server could not serve.
const PAUSE: Duration = Duration::from_millis(100);

/// The pauses before the removal of a mark is retried: no other process removes the mark.
const PAUSES: [Duration; 4] = [
    PAUSE,
    Duration::from_millis(300),
    Duration::from_secs(1),
    Duration::from_secs(3),
];

/// The result of a step.
#[derive(Debug, Default)]
pub struct Acted {
    /// The completed actions.
    pub done: Vec<Action>,
    /// The failures.
    pub failed: Vec<Error>,
}

impl Acted {
    /// The failure to report: one that does not resolve itself.
    pub fn failure(&self) -> Option<&Error> {
        self.failed.iter().find(|error| !error.is_passing())
    }

    /// The combined result.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.done.extend(other.done);
        self.failed.extend(other.failed);
        self
    }
}

/// The inputs of an execution.
pub struct ExecuteContext<'a> {
    /// The API server. The client sends each request once (invariant 11).
    pub client: &'a Client,
    /// The members.
    pub etcd: &'a Arc<dyn Etcd>,
    /// The starts of members that were rejected.
    pub refusals: &'a Refusals,
    /// The calls to members for which no reconcile waits.
    pub calls: &'a Calls,
    /// The credentials of the operator. In memory only.
    pub auth: &'a ClusterAuth,
    /// The object with the spec in effect.
    pub cluster: &'a EtcdCluster,
    /// The observation from which the step was planned.
    pub observed: &'a Observed,
    /// The client URLs of members, by name.
    pub urls: &'a BTreeMap<String, String>,
    /// When the observation began.
    pub since: Instant,
}

impl ExecuteContext<'_> {
    /// Executes the step.
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

    /// Sends a chain. The start of a member that was rejected is not repeated before its back-off has passed.
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

    /// Sends an action of a chain; with an error comes whether it was certainly not carried out. After a Service is
    /// marked, a request that the API server cannot serve now is repeated as long as the observation is fresh: the end
    /// of the chain would cost the member its name. If an earlier attempt was carried out, the object exists then.
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

    /// Removes the mark that a chain has set, however old the observation is by now. The precondition is the version
    /// that the same chain wrote. While a Service is marked and nothing else of its member exists, no other process
    /// starts that member without marking the Service again. So an unmarked Service still means that its member never
    /// started (invariant 6).
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

    /// Invariant 11: a change is sent only if the member list equals the list from which it was planned.
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
                    what: "read the member list again".to_owned(),
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

/// A crash before this action, if a test asks for one: `FAILPOINTS=before-create-pod=panic`. Every boundary between two
/// requests of a step is before one of them.
fn interrupt(action: &Action) {
    let (point, text) = (action.point, action.text.as_str());
    tracing::debug!(point, text, "action");
    fail::fail_point!(point);
}
