//! Executes one step: sends its writes, each chain in its order, the chains and the change beside each other.
//!
//! It decides nothing. A write that loses a race (the object changed, exists, is gone) ends its chain and is
//! planned again; nothing is retried here but what a chain cannot stop at without costing a member its name.

pub(crate) mod error;
mod send;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::EtcdCluster;
use etcd::Etcd;
use futures::future::join_all;
use kube::{Client, ResourceExt};
use member::Operators;
use runtime::credentials::ClusterAuth;
use runtime::image::OwnImage;

pub use self::error::Error;
use self::error::LONGEST;
use crate::refusals::Refusals;
use crate::snapshot::Observed;
use crate::upkeep::Calls;
use crate::write::{Chain, Change, Step, Write};

/// How long at first until a write is sent again that the API server could not take.
const PAUSE: Duration = Duration::from_millis(100);

/// How long until a mark is taken back again that the API server could not take back: nobody else does.
const PAUSES: [Duration; 4] = [
    PAUSE,
    Duration::from_millis(300),
    Duration::from_secs(1),
    Duration::from_secs(3),
];

/// What became of a step.
#[derive(Debug, Default)]
pub struct Acted {
    /// What was done.
    pub done: Vec<Write>,
    /// What was not, and why.
    pub failed: Vec<Error>,
}

impl Acted {
    /// The failure to report: one that will not pass by itself.
    pub fn failure(&self) -> Option<&Error> {
        self.failed.iter().find(|error| !error.is_passing())
    }

    /// What became of both.
    #[must_use]
    pub fn merge(mut self, other: Self) -> Self {
        self.done.extend(other.done);
        self.failed.extend(other.failed);
        self
    }
}

/// What a step is executed with.
pub struct Actor<'a> {
    /// Talks to the API server.
    pub client: &'a Client,
    /// Talks to the members.
    pub etcd: &'a Arc<dyn Etcd>,
    /// Which members' starts were refused.
    pub refusals: &'a Refusals,
    /// The calls to members that nobody waits for.
    pub calls: &'a Calls,
    /// What the operator logs in with. In memory only.
    pub auth: &'a ClusterAuth,
    /// Where the operators run.
    pub operators: &'a Operators,
    /// The object with the spec in effect.
    pub cluster: &'a EtcdCluster,
    /// What the step was planned from.
    pub observed: &'a Observed,
    /// Where the members are asked, by name.
    pub urls: &'a BTreeMap<String, String>,
    /// The image a seed member prepares its data with.
    pub image: &'a OwnImage,
    /// When that was read.
    pub since: Instant,
}

impl Actor<'_> {
    /// Executes the step.
    pub async fn act(&self, step: &Step) -> Acted {
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

    /// One write after the other; the first that fails ends the chain. A start that was refused is not tried again yet.
    async fn chain(&self, writes: &Chain) -> Acted {
        let starts = writes.iter().find_map(Write::starts).map(str::to_owned);
        let acted = self.begun(writes).await;
        if let Some(member) = starts {
            match acted.failed.last() {
                None => self.refusals.allowed(self.cluster, &member),
                Some(Error::Held { .. }) => {}
                Some(error) => {
                    let now = Instant::now();
                    self.refusals.refused(self.cluster, &member, error, now);
                }
            }
        }
        acted
    }

    async fn begun(&self, writes: &Chain) -> Acted {
        let mut acted = Acted::default();
        let mut marked = None;
        for write in writes {
            let now = Instant::now();
            let held = write.starts();
            let held = held.and_then(|member| self.refusals.holds(self.cluster, member, now));
            if let Some(held) = held {
                acted.failed.push(held);
                break;
            }
            interrupt(write);
            match self.send(write, marked.is_some()).await {
                Ok(version) => {
                    if write.marks().is_some() {
                        marked = version;
                    }
                    acted.done.push(write.clone());
                }
                Err((error, not_done)) => {
                    let undo = write.taken_back(not_done, |_| marked);
                    if let Some(undo) = undo {
                        acted.failed.extend(self.undo(&undo).await.err());
                    }
                    acted.failed.push(error);
                    break;
                }
            }
        }
        acted
    }

    /// One write of a chain; with an error comes whether it surely was not carried out. Once a Service is marked, what
    /// the API server cannot take is sent again for as long as the look is good: to stop there would give the member up.
    /// What was carried out all the same exists then.
    async fn send(&self, write: &Write, marked: bool) -> Result<Option<String>, (Error, bool)> {
        let (mut pause, mut doubtful) = (PAUSE, false);
        loop {
            let error = match self.write(write, &[]).await {
                Ok(version) => return Ok(version),
                Err(error) => error,
            };
            let in_time = self.since.elapsed() + pause < LONGEST;
            if !(marked && error.is_for_now() && in_time) {
                let not_done = !doubtful && error.says_not_done();
                return Err((error, not_done));
            }
            doubtful |= !error.says_not_done();
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// Takes back what a chain has marked; again where the API server cannot take that either.
    async fn undo(&self, undo: &Write) -> Result<(), Error> {
        for pause in PAUSES {
            match self.take_back(undo).await {
                Err(error) if error.is_for_now() => tokio::time::sleep(pause).await,
                taken => return taken,
            }
        }
        self.take_back(undo).await
    }

    /// Invariant 11: a change is made only to the list it was planned from.
    async fn change(&self, change: &Change) -> Acted {
        let mut acted = Acted::default();
        let via: Vec<String> = change
            .via
            .iter()
            .map(|name| self.client_url(name))
            .collect();
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
        for write in &change.writes {
            interrupt(write);
            match self.write(write, &via).await {
                Ok(_) => acted.done.push(write.clone()),
                Err(error) => {
                    acted.failed.push(error);
                    break;
                }
            }
        }
        acted
    }

    fn client_url(&self, member: &str) -> String {
        let known = self
            .urls
            .get(member)
            .or(self.observed.elsewhere.get(member));
        known
            .cloned()
            .unwrap_or_else(|| self.members().addresses().client_url(member))
    }
}

/// A crash before this write, where a test asks for one: `FAILPOINTS=before-create-pod=panic`. Every boundary
/// between two writes of a step is before one of them.
fn interrupt(write: &Write) {
    let point = write.point();
    tracing::debug!(point, ?write, "write");
    fail::fail_point!(point);
}
