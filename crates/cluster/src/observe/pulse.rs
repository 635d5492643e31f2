//! Calls the health listener of members that may not serve clients yet: learners, and voters that are not endpoints of
//! the client Service.
//!
//! A joining member serves clients only after it has applied the entry with its own client URLs. That may take 7 s
//! longer than the rest of the start (docs/benchmarks.md), but the health listener is open from the start.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use api::names::METRICS_PORT;
use etcd::{Error, Etcd, Pulse, Status};
use futures::future::{self, Either};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod as PodObject;
use kube::ResourceExt;
use tokio::time::error::Elapsed;

use super::{IMPATIENCE, status as serving};
use crate::plan::is_late_to_serve;
use crate::snapshot::{Pod, Role};

/// etcd's flag for the health listener, which has no TLS. The operator calls only listeners of pods with this flag.
const LISTENER: &str = "--listen-metrics-urls";

/// How long the operator waits for the client listener after the health listener has answered. This short time is
/// enough, because a serving member answers on both listeners equally fast.
const BESIDE: Duration = Duration::from_millis(50);

/// The address of the health listener in each pod, by the pod's name.
pub(super) fn addresses(pods: &[PodObject]) -> BTreeMap<String, String> {
    let address = |pod: &PodObject| {
        let address: IpAddr = pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()?;
        let at = SocketAddr::new(address, METRICS_PORT).to_string();
        Some((pod.name_any(), at))
    };
    pods.iter().filter_map(address).collect()
}

fn heard(pulse: Result<Result<Pulse, Error>, Elapsed>) -> Option<Pulse> {
    pulse.ok().and_then(Result::ok)
}

/// Calls the client listener of one member. For a member that may be joining, also calls its health listener.
pub(super) async fn status(
    etcd: &dyn Etcd,
    url: &str,
    (pod, now): (&Pod, Timestamp),
    health: Option<&str>,
) -> (Result<Status, Error>, Option<Pulse>) {
    let Some(health) = health.filter(|_| may_be_joining(pod)) else {
        return (serving(etcd, url, pod.ready).await, None);
    };
    let deadline = tokio::time::Instant::now() + IMPATIENCE;
    let own = std::pin::pin!(etcd.status(url));
    let pulse = std::pin::pin!(tokio::time::timeout_at(deadline, etcd.pulse(health)));
    let (answer, own, pulse) = match future::select(own, pulse).await {
        Either::Left((answer, pulse)) => return (answer, heard(pulse.await)),
        Either::Right((pulse, mut own)) => {
            let pulse = heard(pulse);
            let until = match pulse {
                Some(_) if !has_served(pod) => deadline.min(tokio::time::Instant::now() + BESIDE),
                _ => deadline,
            };
            (tokio::time::timeout_at(until, &mut own).await, own, pulse)
        }
    };
    match answer {
        Ok(answer) => (answer, pulse),
        // The operator waits longer for a member with a ready pod in two cases: the health listener does not answer, or
        // the member is late to serve clients.
        Err(_) if pod.ready && (pulse.is_none() || is_late_to_serve(pod, now)) => {
            (own.await, pulse)
        }
        Err(_) => (Err(Error::Timeout(url.to_owned())), pulse),
    }
}

/// True for a learner or a voter outside of the client Service, if its pod has a health listener.
fn may_be_joining(pod: &Pod) -> bool {
    matches!(pod.role, Some(Role::Learner | Role::Busy { .. })) && pod.flags.contains(LISTENER)
}

/// True for a voter whose pod is ready. If such a voter answers late, its disk is probably slow.
fn has_served(pod: &Pod) -> bool {
    pod.ready && pod.role != Some(Role::Learner)
}

#[cfg(test)]
mod tests {
    use etcd::MemberId;
    use etcd::fake::FakeEtcd;

    use super::*;
    use crate::plan::tests::scene::{self, Scene};

    const HEALTH: &str = "10.0.0.7:2381";

    fn url(name: &str) -> String {
        format!("http://{name}:2379")
    }

    fn pod(role: Role) -> Pod {
        let mut pod = Scene::formed(&["a"]).observed.pods["a"].clone();
        pod.role = Some(role);
        pod.flags.insert(LISTENER.to_owned());
        pod
    }

    fn alive() -> Pulse {
        Pulse {
            member_id: MemberId(1),
            has_leader: true,
            raft_applied_index: 7,
            peers: [].into(),
        }
    }

    async fn asked(up: bool, pod: &Pod) -> (bool, bool) {
        asked_slowly((up, Duration::ZERO), pod).await
    }

    async fn asked_slowly((up, slow): (bool, Duration), pod: &Pod) -> (bool, bool) {
        let etcd = FakeEtcd::formed(1, &["a"], url);
        etcd.with(|state| {
            (state.members[0].up, state.slow) = (up, slow);
            state.pulses.insert(HEALTH.to_owned(), alive());
        });
        let asked = (pod, scene::at(1000));
        let (answer, pulse) = status(&etcd, &url("a"), asked, Some(HEALTH)).await;
        (answer.is_ok(), pulse.is_some())
    }

    #[tokio::test]
    async fn invariant_24_only_learners_and_drained_members_get_health_calls() {
        let busy = Role::Busy {
            since: scene::at(0),
        };
        for role in [Role::Learner, busy] {
            assert_eq!(asked(false, &pod(role)).await, (false, true));
            // Even if the client listener answers, the health listener is called too, because a learner without a
            // connection to the leader still answers at its client listener.
            assert_eq!(asked(true, &pod(role)).await, (true, true));
        }
        for up in [false, true] {
            assert_eq!(asked(up, &pod(Role::Voter)).await, (up, false));
        }
        // The health listener is etcd's metrics listener. A pod of coreos/etcd-operator may have no such listener, or
        // one with TLS, so the operator does not call it.
        let mut old = pod(Role::Learner);
        old.flags.clear();
        assert_eq!(asked(false, &old).await, (false, false));
    }

    /// If the short deadline applied to every voter, a slow voter would never become an endpoint of the client Service.
    #[tokio::test]
    async fn only_new_or_unready_member_gets_shorter_client_deadline() {
        let busy = |seconds: i64| {
            pod(Role::Busy {
                since: scene::at(seconds),
            })
        };
        let mut learner = pod(Role::Learner);
        learner.running_since = Some(scene::at(940));
        for late in [busy(940), learner] {
            let slow = Duration::from_millis(400);
            assert_eq!(asked_slowly((true, slow), &late).await, (true, true));
        }
        let mut unready = busy(940);
        unready.ready = false;
        for new in [busy(990), unready] {
            let slow = Duration::from_secs(10);
            assert_eq!(asked_slowly((true, slow), &new).await, (false, true));
        }
    }

    /// The answer of the health listener is enough for a promotion, so the operator does not wait for the client
    /// listener until the deadline.
    #[tokio::test]
    async fn answer_of_health_listener_shortens_client_deadline() {
        let asked = async |tells: bool| {
            let etcd = FakeEtcd::formed(1, &["a"], url);
            etcd.with(|state| {
                state.slow = Duration::from_hours(1);
                let told = tells.then(|| (HEALTH.to_owned(), alive()));
                state.pulses.extend(told);
            });
            let mut learner = pod(Role::Learner);
            learner.ready = false;
            let asked = (&learner, scene::at(1000));
            let (answer, pulse) = status(&etcd, &url("a"), asked, Some(HEALTH)).await;
            assert!(answer.is_err() && pulse.is_some() == tells);
        };
        let (tells, does_not) = (std::pin::pin!(asked(true)), std::pin::pin!(asked(false)));
        let first = future::select(tells, does_not).await;
        let Either::Left(((), does_not)) = first else {
            panic!("the answer of the health listener did not shorten the deadline");
        };
        does_not.await;
    }

    #[test]
    fn health_listener_is_called_at_pod_ip() {
        let at = |address: &str| {
            let status = serde_json::json!({ "podIP": address });
            let pod = serde_json::json!({ "metadata": { "name": "a" }, "status": status });
            addresses(&[serde_json::from_value(pod).unwrap()]).remove("a")
        };
        assert_eq!(at("10.0.0.7").as_deref(), Some(HEALTH));
        assert_eq!(at("fd00::7").as_deref(), Some("[fd00::7]:2381"));
        assert_eq!(at("somewhere"), None);
    }
}
