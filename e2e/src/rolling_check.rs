//! Checks that pods of members are terminated one at a time, and only while all members are ready. The order of
//! changes is the order in the API server's watch, so clocks do not matter.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use tokio::task::JoinHandle;

use crate::objects::is_ready;
use crate::wait::{Poll, until};
use crate::watch::watch_until;
use crate::{DEADLINE, Sandbox};

/// Records all changes of a cluster's pods from [`RollingCheck::start`] on.
pub struct RollingCheck {
    pods: Api<Pod>,
    selector: String,
    seen: Arc<Mutex<PodHistory>>,
    task: JoinHandle<Result<()>>,
}

/// The state of the cluster's pods after the changes that the watch has reported.
struct PodHistory {
    /// The number of members that must be ready before the next termination.
    size: usize,
    /// The existing pods, by UID.
    pods: BTreeMap<String, PodState>,
    /// The names of the terminated pods in the order of their termination.
    terminated: Vec<String>,
    /// True if all members were ready at some time after the last termination.
    all_ready: bool,
    /// Pairs of pod names. The second pod was terminated after the first pod, before all members were ready again.
    overlapping: Vec<(String, String)>,
}

#[derive(Clone, Copy, Default)]
struct PodState {
    ready: bool,
    terminating: bool,
}

impl RollingCheck {
    /// Starts the check of a cluster with `size` members, which all must be ready.
    ///
    /// # Errors
    /// Fails if a member is not ready.
    pub async fn start(sandbox: &Sandbox, cluster: &str, size: usize) -> Result<Self> {
        let pods = sandbox.api::<Pod>();
        let selector = format!("app=etcd,etcd_cluster={cluster}");
        let list = pods.list(&ListParams::default().labels(&selector)).await?;
        let since = list.metadata.resource_version.unwrap_or_default();
        let seen = PodHistory::of(size, list.items);
        ensure!(
            seen.all_ready,
            "{cluster} does not have {size} ready members"
        );
        let seen = Arc::new(Mutex::new(seen));
        let history = Arc::clone(&seen);
        let (watched, of) = (pods.clone(), WatchParams::default().labels(&selector));
        let task = tokio::spawn(async move {
            // [`Self::finish`] aborts this task long before the time limit of the watch.
            watch_until(&watched, &of, &since, DEADLINE * 12, |change| {
                history
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(change);
                None
            })
            .await
        });
        Ok(Self {
            pods,
            selector,
            seen,
            task,
        })
    }

    /// Ends the check, and returns the number of terminated members.
    ///
    /// # Errors
    /// Fails if a member was terminated before all members were ready, or if the watch missed changes.
    pub async fn finish(mut self) -> Result<usize> {
        // The watch may lag behind the API server. The loop waits until the watch has reported the pods that a list
        // returns.
        let of = ListParams::default().labels(&self.selector);
        until(
            "the watch has delivered all changes",
            DEADLINE,
            async || {
                let list = self.pods.list(&of).await?.items;
                let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(if seen.matches(&list) || self.task.is_finished() {
                    Poll::Done(())
                } else {
                    Poll::NotYet(format!("{:?}", seen.pods.keys()))
                })
            },
        )
        .await?;
        if self.task.is_finished() {
            (&mut self.task)
                .await?
                .context("the watch missed changes")?;
        }
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(
            seen.overlapping.is_empty(),
            "members were terminated before all were ready again: {:?}; all terminations: {:?}",
            seen.overlapping,
            seen.terminated
        );
        Ok(seen.terminated.len())
    }
}

impl Drop for RollingCheck {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PodHistory {
    fn of(size: usize, pods: Vec<Pod>) -> Self {
        let mut seen = Self {
            size,
            pods: BTreeMap::new(),
            terminated: Vec::new(),
            all_ready: true,
            overlapping: Vec::new(),
        };
        for pod in pods {
            seen.take(WatchEvent::Added(pod));
        }
        // The calls of `take` above only fill the history. Terminations before the start of the check do not count.
        (seen.terminated, seen.overlapping) = (Vec::new(), Vec::new());
        seen.all_ready = seen.are_all_ready();
        seen
    }

    fn take(&mut self, change: WatchEvent<Pod>) {
        let (pod, deleted) = match change {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => (pod, false),
            WatchEvent::Deleted(pod) => (pod, true),
            WatchEvent::Bookmark(_) | WatchEvent::Error(_) => return,
        };
        let uid = pod.uid().unwrap_or_default();
        let before = self.pods.get(&uid).copied().unwrap_or_default();
        let terminating = deleted || pod.metadata.deletion_timestamp.is_some();
        if terminating && !before.terminating {
            if let Some(last) = self.terminated.last().filter(|_| !self.all_ready) {
                self.overlapping.push((last.clone(), pod.name_any()));
            }
            self.terminated.push(pod.name_any());
            self.all_ready = false;
        }
        if deleted {
            self.pods.remove(&uid);
        } else {
            let ready = is_ready(&pod);
            self.pods.insert(uid, PodState { ready, terminating });
        }
        self.all_ready |= self.are_all_ready();
    }

    /// True if the watch has reported exactly these pods, with the same terminating pods.
    fn matches(&self, pods: &[Pod]) -> bool {
        pods.len() == self.pods.len()
            && pods.iter().all(|pod| {
                let one = self.pods.get(&pod.uid().unwrap_or_default());
                one.is_some_and(|one| one.terminating == pod.metadata.deletion_timestamp.is_some())
            })
    }

    fn are_all_ready(&self) -> bool {
        let ready = self
            .pods
            .values()
            .filter(|one| one.ready && !one.terminating);
        ready.count() >= self.size
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, uid: &str, ready: bool, terminating: bool) -> Pod {
        let mut pod = json!({
            "metadata": { "name": name, "uid": uid },
            "status": { "conditions": [
                { "type": "Ready", "status": if ready { "True" } else { "False" } }
            ] },
        });
        if terminating {
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        serde_json::from_value(pod).unwrap()
    }

    fn three() -> PodHistory {
        let all = ["a", "b", "c"].map(|name| pod(name, name, true, false));
        PodHistory::of(3, all.to_vec())
    }

    /// Replaces a pod by a new pod with the same name. If `back` is true, the new pod becomes ready.
    fn again(seen: &mut PodHistory, name: &str, back: bool) {
        let next = format!("{name}+");
        seen.take(WatchEvent::Modified(pod(name, name, true, true)));
        seen.take(WatchEvent::Modified(pod(name, name, false, true)));
        seen.take(WatchEvent::Deleted(pod(name, name, false, true)));
        seen.take(WatchEvent::Added(pod(name, &next, false, false)));
        if back {
            seen.take(WatchEvent::Modified(pod(name, &next, true, false)));
        }
    }

    #[test]
    fn rolling_check_accepts_restarts_one_at_a_time() {
        let mut seen = three();
        for name in ["a", "b", "c"] {
            again(&mut seen, name, true);
        }
        assert!(seen.overlapping.is_empty(), "{:?}", seen.overlapping);
        assert_eq!(seen.terminated, ["a", "b", "c"]);
    }

    #[test]
    fn rolling_check_detects_overlapping_terminations() {
        let mut seen = three();
        again(&mut seen, "a", false);
        again(&mut seen, "b", true);
        assert_eq!(seen.overlapping, [("a".to_owned(), "b".to_owned())]);

        // Pod a was deleted without a grace period. Pod b terminates before the replacement of pod a exists.
        let mut seen = three();
        seen.take(WatchEvent::Deleted(pod("a", "a", true, false)));
        seen.take(WatchEvent::Modified(pod("b", "b", true, true)));
        assert_eq!(seen.overlapping, [("a".to_owned(), "b".to_owned())]);
    }

    #[test]
    fn rolling_check_matches_pods_only_after_it_received_all_changes() {
        let mut seen = three();
        let now = |terminating| {
            let (a, b) = (
                pod("a", "a+", true, false),
                pod("b", "b", true, terminating),
            );
            [a, b, pod("c", "c", true, false)]
        };
        assert!(!seen.matches(&now(false)));
        again(&mut seen, "a", true);
        assert!(seen.matches(&now(false)));
        assert!(!seen.matches(&now(true)) && !seen.matches(&now(false)[..2]));
    }

    #[test]
    fn rolling_check_ignores_short_readiness_loss() {
        let mut seen = three();
        seen.take(WatchEvent::Modified(pod("b", "b", false, false)));
        again(&mut seen, "a", false);
        seen.take(WatchEvent::Modified(pod("b", "b", true, false)));
        seen.take(WatchEvent::Modified(pod("a", "a+", true, false)));
        seen.take(WatchEvent::Modified(pod("a", "a+", false, false)));
        again(&mut seen, "c", true);
        assert!(seen.overlapping.is_empty(), "{:?}", seen.overlapping);
    }

    #[test]
    fn rolling_check_accepts_replacement_added_before_removal() {
        let mut seen = three();
        for (old, new) in [("a", "d"), ("b", "e"), ("c", "f")] {
            seen.take(WatchEvent::Added(pod(new, new, false, false)));
            seen.take(WatchEvent::Modified(pod(new, new, true, false)));
            seen.take(WatchEvent::Modified(pod(old, old, true, true)));
            seen.take(WatchEvent::Deleted(pod(old, old, false, true)));
        }
        assert!(seen.overlapping.is_empty(), "{:?}", seen.overlapping);
        assert_eq!(seen.terminated.len(), 3);
    }
}
