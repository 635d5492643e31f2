//! How long an observation waits for the member list.
//!
//! The list needs a quorum, so it comes late or never while too few voters can take part. Work that needs no list, such
//! as recreating pods on their disks, must not wait for it. During an election each member still answers for itself.
//! Then the list has its full time: an election is no outage.

use std::collections::BTreeMap;
use std::time::Duration;

use etcd::{MemberId, Status};

use crate::plan::quorum_of;
use crate::snapshot::{Observed, Pod};

/// Time for the list after too few members have answered for themselves.
const LEFT: Duration = Duration::from_millis(250);

/// Both answers, requested concurrently. No list if `too_few` of the members' own answers arrive and the list does not
/// follow soon.
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

/// Whether fewer voters than a quorum can take part, by the last report: their pods end, are missing, or are not ready
/// and do not answer. External members are unknown here. The report does not count if a stable member has a stable
/// leader: after a recovery or a restore this member is the whole quorum, and with authentication its list needs a
/// login first.
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

    /// The called members and their answers in the scene.
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

    /// Invariant 1: an election is no outage.
    #[test]
    fn invariant_1_waits_for_list_unless_quorum_is_impossible() {
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
            // Ready a moment ago and slow, or not ready because of a sidecar.
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
        // A serving seed, while the report names the previous members.
        let mut seed = Scene::formed(&["s"]);
        seed.observed.reported_voters = ["a", "b", "c"].map(String::from).into();
        assert!(!few(&seed));
        assert!(few(&seed.silent_voter("s")));
        let mut unreported = three().terminating("a").terminating("b");
        unreported.observed.reported_voters.clear();
        assert!(!few(&unreported));
    }

    #[tokio::test]
    async fn impossible_list_is_not_awaited() {
        assert_eq!(both(pending::<()>(), ready(1), |_| true).await, (None, 1));
        assert_eq!(both(ready(2), ready(1), |_| true).await, (Some(2), 1));
        let slow = async {
            tokio::time::sleep(LEFT * 2).await;
            2
        };
        assert_eq!(both(slow, ready(1), |_| false).await, (Some(2), 1));
    }
}
