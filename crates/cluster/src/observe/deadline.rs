//! Decides how long an observation waits for the member list.
//!
//! etcd returns the member list only with a quorum. Without a quorum, work that does not need the list must not wait
//! for it, for example recreating pods on their volumes. During an election, the request for the list gets its full
//! deadline.

use std::collections::BTreeMap;
use std::time::Duration;

use etcd::{MemberId, Status};

use crate::plan::quorum_of;
use crate::snapshot::{Observed, Pod};

/// How long the operator waits for the member list after [`too_few`] has returned true.
const LEFT: Duration = Duration::from_millis(250);

/// Requests the member list and the members' own statuses concurrently. The list is `None` if it does not arrive
/// shortly after `too_few` has returned true for the statuses.
pub(super) async fn both<L, S>(
    list: impl Future<Output = L>,
    own: impl Future<Output = S>,
    too_few: impl FnOnce(&S) -> bool,
) -> (Option<L>, S) {
    let (mut list, mut own) = (std::pin::pin!(list), std::pin::pin!(own));
    let own = tokio::select! {
        biased;
        list = &mut list => return (Some(list), own.await),
        own = &mut own => own,
    };
    if too_few(&own) {
        return (tokio::time::timeout(LEFT, list).await.ok(), own);
    }
    (Some(list.await), own)
}

/// True if fewer than a quorum of the last reported voters can take part. A voter cannot take part if its pod is
/// missing or terminating, or if the pod is not ready and the member does not answer.
///
/// False if a running member reports a leader that answers, because the cluster then has a quorum. After a recovery or
/// a restore, the last status report still names the old voters.
pub(super) fn too_few<E>(observed: &Observed, asked: &[String], own: &[Result<Status, E>]) -> bool {
    let voters = &observed.reported_voters;
    let stays = |name: &String| observed.pods.get(name).filter(|pod| pod.stays());
    let answers: BTreeMap<&String, &Status> = asked
        .iter()
        .zip(own)
        .filter_map(|(name, own)| stays(name).and(own.as_ref().ok()).map(|own| (name, own)))
        .collect();
    let leads = |leader: MemberId| answers.values().any(|own| own.member_id == leader);
    let led = answers.values().any(|own| own.leader.is_some_and(leads));
    let takes_part = |name: &&String| {
        stays(name).is_some_and(|pod: &Pod| pod.ready || answers.contains_key(*name))
    };
    let enough = voters.iter().filter(takes_part).count() >= quorum_of(voters.len());
    !voters.is_empty() && !led && !enough
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;
    use crate::plan::tests::scene::Scene;
    use crate::snapshot::Seen;

    fn few(scene: &Scene) -> bool {
        let statuses = scene.observed.statuses.iter();
        let (asked, own): (Vec<String>, Vec<_>) = statuses
            .map(|(name, seen)| match seen {
                Seen::Known(status) => (name.clone(), Ok(status.clone())),
                Seen::Unknown(why) => (name.clone(), Err(why.clone())),
            })
            .unzip();
        too_few(&scene.observed, &asked, &own)
    }

    /// Invariant 1: during an election, the operator waits for the member list.
    #[test]
    fn invariant_1_member_list_is_awaited_unless_quorum_is_impossible() {
        let three = || Scene::formed(&["a", "b", "c"]).durable();
        let unready = |mut scene: Scene, member: &str| {
            scene.observed.pods.get_mut(member).unwrap().ready = false;
            scene
        };
        for scene in [
            &three as &dyn Fn() -> Scene,
            &|| {
                three()
                    .silent_voter("a")
                    .silent_voter("b")
                    .silent_voter("c")
            },
            &|| three().terminating("a"),
            &|| three().without_pod("a").silent_voter("b"),
            // `down`: the pods of `a` and `b` became ready a moment ago, and these members answer slowly. `unready`:
            // the two pods are not ready because of a sidecar, but their members answer.
            &|| three().down("a").down("b"),
            &|| unready(unready(three(), "a"), "b"),
        ] {
            assert!(!few(&scene()), "{:?}", scene().observed.pods);
        }
        for scene in [
            &(|| three().terminating("a").terminating("b")) as &dyn Fn() -> Scene,
            &|| three().terminating("a").without_pod("b"),
            &|| unready(three().without_pod("a").down("b"), "b"),
            &|| three().without_pod("a").not_running("b"),
        ] {
            assert!(few(&scene()), "{:?}", scene().observed.pods);
        }
        // After a restore, `reported_voters` may still name the voters of the replaced cluster. The seed `s` answers as
        // the leader of the new cluster, so the operator waits for the member list.
        let mut seed = Scene::formed(&["s"]);
        seed.observed.reported_voters = ["a", "b", "c"].map(String::from).into();
        assert!(!few(&seed));
        assert!(few(&seed.silent_voter("s")));
        let mut unreported = three().terminating("a").terminating("b");
        unreported.observed.reported_voters.clear();
        assert!(!few(&unreported));
    }

    #[tokio::test]
    async fn member_list_request_has_short_deadline_without_quorum() {
        assert_eq!(both(pending::<()>(), ready(1), |_| true).await, (None, 1));
        assert_eq!(both(ready(2), ready(1), |_| true).await, (Some(2), 1));
        let slow = async {
            tokio::time::sleep(LEFT * 2).await;
            2
        };
        assert_eq!(both(slow, ready(1), |_| false).await, (Some(2), 1));
    }
}
