//! Members that follow the leader and do not serve clients yet.

use etcd::{MemberId, Pulse};

use crate::plan::tests::scene::{self, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Role, Seen};

impl Scene {
    /// Makes the member follow the leader without answering clients: only its health listener answers.
    pub(crate) fn follows(mut self, member: &str) -> Self {
        let pulse = Pulse {
            member_id: MemberId(u64::from(member.as_bytes()[0])),
            has_leader: true,
            raft_applied_index: 100,
            peers: [b'a', b'c'].map(|other| MemberId(other.into())).into(),
        };
        self.observed.pulses.insert(member.into(), pulse);
        self.observed.pods.get_mut(member).unwrap().ready = false;
        self.down(member)
    }

    fn pulse(mut self, member: &str, change: impl FnOnce(&mut Pulse)) -> Self {
        change(self.observed.pulses.get_mut(member).unwrap());
        self
    }

    /// Makes the member a voter that the operator promoted before it served clients.
    fn joining(self, member: &str) -> Self {
        self.follows(member).role(member, out())
    }
}

fn out() -> Role {
    Role::Busy {
        since: scene::at(990),
    }
}

fn promoted(scene: &Scene) -> Vec<String> {
    let changes = scene.changes().into_iter();
    let promoted = changes.filter_map(|write| match write {
        Write::Promote { member, .. } => Some(member),
        _ => None,
    });
    promoted.collect()
}

fn roles(scene: &Scene) -> Vec<(String, Option<Role>)> {
    let labels = scene.writes().into_iter().filter_map(|write| match write {
        Write::LabelPod(label) => Some((label.member, label.role)),
        _ => None,
    });
    labels.collect()
}

#[test]
fn invariant_24_learner_that_follows_leader_is_promoted_before_serving() {
    let one = Scene::formed(&["a"]).size(3).learner("d").follows("d");
    assert_eq!(promoted(&one), ["d"]);
    let three = Scene::formed(&["a", "b", "c"]).size(4).learner("d");
    assert_eq!(promoted(&three.follows("d")), ["d"]);
    // Of two learners, the learner that serves clients is promoted before the learner that only follows the leader.
    let both = Scene::formed(&["a"]).size(3).learner("d").learner("e");
    assert_eq!(promoted(&both.clone().follows("d")), ["e"]);
    assert_eq!(promoted(&both.follows("e")), ["d"]);
}

/// Invariants 4 and 24: a promotion requires a report of the learner itself, read in the same reconcile.
#[test]
fn invariant_24_learner_failing_any_promotion_check_is_not_promoted() {
    let scene = || Scene::formed(&["a"]).size(3).learner("d").follows("d");
    let other = |scene: Scene| scene.pulse("d", |pulse| pulse.member_id = MemberId(7));
    let alone = |scene: Scene| scene.pulse("d", |pulse| pulse.has_leader = false);
    let behind = |scene: Scene| scene.pulse("d", |pulse| pulse.raft_applied_index = 89);
    // Removes the connections of the learner. The learner still reports the last known leader.
    let cut_off = |scene: Scene| scene.pulse("d", |pulse| pulse.peers.clear());
    let silent = |mut scene: Scene| {
        scene.observed.pulses.clear();
        scene.observed.pods.get_mut("d").unwrap().ready = true;
        scene
    };
    let ends = |mut scene: Scene| {
        scene.observed.pods.get_mut("d").unwrap().terminating = true;
        scene
    };
    // Removes the client URLs of the learner: etcd has not committed the entry that publishes them.
    let unjoined = |mut scene: Scene| {
        if let Seen::Known(list) = &mut scene.observed.members {
            list.members[1].client_urls.clear();
        }
        scene
    };
    let lost = |mut scene: Scene| {
        scene.observed.pods.get_mut("d").unwrap().lost_since = Some(scene::at(0));
        scene
    };
    for (what, change) in [
        ("another member", &other as &dyn Fn(Scene) -> Scene),
        ("no leader", &alone),
        ("behind", &behind),
        ("cut off", &cut_off),
        ("silent", &silent),
        ("ends", &ends),
        ("not joined", &unjoined),
        ("its node is lost", &lost),
    ] {
        assert_eq!(promoted(&change(scene())), [] as [&str; 0], "{what}");
    }
    let serves = || Scene::formed(&["a"]).size(3).learner("d");
    assert_eq!(promoted(&serves()), ["d"]);
    assert_eq!(promoted(&unjoined(serves())), [] as [&str; 0]);
    // The operator does not promote a learner that answers clients if its status shows that the learner lags behind the
    // leader.
    let mut answers = Scene::formed(&["a"]).size(3).learner("d").behind("d");
    answers.observed.pulses = scene().observed.pulses;
    assert_eq!(promoted(&answers), [] as [&str; 0]);
}

/// Invariants 4 and 24: a learner reports the last known leader even without a connection, so its answers to clients do
/// not prove a connection.
#[test]
fn invariant_24_disconnected_learner_is_not_promoted() {
    let reports = |change: &dyn Fn(&mut Pulse)| {
        let mut scene = Scene::formed(&["a"]).size(3).learner("d");
        let says = scene.clone().follows("d").pulse("d", change);
        scene.observed.pulses = says.observed.pulses;
        scene
    };
    assert_eq!(promoted(&reports(&|_| {})), ["d"]);
    let cut_off = reports(&|pulse| pulse.peers = [MemberId(7)].into());
    assert_eq!(promoted(&cut_off), [] as [&str; 0]);
    assert!(cut_off.waits().contains(&Reason::LearnerCutOff));
    // A health report with the ID of another member is ignored. It does not prove that the learner has lost its
    // connection.
    let other = reports(&|pulse| (pulse.member_id, pulse.peers) = (MemberId(7), [].into()));
    assert_eq!(promoted(&other), ["d"]);
    // While learner `d` is disconnected, the operator promotes learner `e`.
    assert_eq!(promoted(&cut_off.learner("e")), ["e"]);
}

#[test]
fn learner_without_client_urls_is_not_reported_as_down() {
    let mut scene = Scene::formed(&["a"]).size(3).learner("d");
    if let Seen::Known(list) = &mut scene.observed.members {
        list.members[1].client_urls.clear();
    }
    let said = |scene: &Scene| {
        let waits = scene.plan().waiting_for.into_iter();
        let mut starting = waits.filter(|waiting| waiting.reason == Reason::LearnerStarting);
        starting.next().unwrap().message
    };
    assert!(said(&scene).contains("has not published its client URLs"));
    assert!(said(&scene.down("d")).contains("is not running yet"));
}

/// Invariants 2 and 24: a promotion needs only a quorum in Raft, in which the joining voter already takes part.
#[test]
fn invariant_24_joining_voter_counts_for_next_promotion() {
    let scene = || Scene::formed(&["a", "b"]).size(3).learner("d");
    assert_eq!(promoted(&scene().joining("b").follows("d")), ["d"]);
    assert_eq!(promoted(&scene().joining("b")), ["d"]);
    let behind = scene()
        .joining("b")
        .pulse("b", |pulse| pulse.raft_applied_index = 50);
    assert_eq!(promoted(&behind), [] as [&str; 0]);
    // Voter `b` was promoted 30 s ago and still does not serve, so `b` no longer counts as healthy.
    let late = Role::Busy {
        since: scene::at(970),
    };
    let late = scene().joining("b").role("b", late).follows("d");
    assert_eq!(promoted(&late), [] as [&str; 0]);
    assert!(late.waits().contains(&Reason::MemberUnhealthy));
    // Invariant 19: a voter that is being defragmented does not count as healthy.
    let defragmenting = scene().joining("b").defragmented("b").follows("d");
    assert_eq!(promoted(&defragmenting), [] as [&str; 0]);
    // Voter `b` has served before and no longer answers, so `b` is down, whatever its health listener reports.
    let down = scene().follows("b");
    assert_eq!(promoted(&down), [] as [&str; 0]);
    assert!(down.waits().contains(&Reason::VoterNotHealthy));
}

#[test]
fn invariant_24_joining_voter_counts_only_for_promotions() {
    // Member `c` is dead and `b` is joining. The joining voter does not count as healthy, so the operator does not
    // remove `c`.
    let dead = Scene::formed(&["a", "b", "c"])
        .durable()
        .joining("b")
        .without_pod("c")
        .without_claim("c");
    assert_eq!(dead.changes(), []);
    assert!(dead.waits().contains(&Reason::QuorumAtRisk));
    // The operator sends its requests only to `a`, not to the joining voter `b`.
    let grows = Scene::formed(&["a", "b"]).size(3).learner("d").joining("b");
    let via = grows.plan().step.change.unwrap().via;
    assert_eq!(via, ["a"]);
    // The operator transfers leadership to a serving voter, not to the joining voter.
    let to = |scene: Scene| match scene.node_lost("c", 100).changes().as_slice() {
        [Write::MoveLeader { to, .. }] => to.clone(),
        other => panic!("{other:?}"),
    };
    let five = || Scene::formed(&["a", "b", "c", "d", "e"]).leader("c");
    assert_eq!(to(five()), "a");
    assert_eq!(to(five().joining("a")), "b");
    // The operator adds no member while a voter is joining.
    let more = Scene::formed(&["a", "b"])
        .size(3)
        .joining("b")
        .reserved("d");
    assert_eq!(more.changes(), []);
}

/// Invariants 18 and 24: without the joining voter, the cluster might have no quorum. The operator therefore does not
/// change the voter's pod.
#[test]
fn invariant_24_pod_of_joining_voter_is_not_changed() {
    let resized = |scene: Scene, name: &str| {
        let scene = scene.resized(name);
        let resizes =
            |write: &Write| matches!(write, Write::ResizePod { member, .. } if member == name);
        scene.writes().iter().any(resizes)
    };
    let three = || Scene::formed(&["a", "b", "c"]);
    assert!(!resized(three().joining("b"), "b"));
    assert!(resized(three().down("b"), "b"));
    assert!(resized(three(), "b"));
    // The operator may change the pod of a joining learner, even while a voter is down. The pod stays unchanged if the
    // same plan promotes the learner.
    let learner = |scene: Scene| resized(scene.learner("d").follows("d"), "d");
    assert!(learner(three().size(4).down("b")));
    assert!(!learner(three().size(4)));
}

/// Invariant 24: `/readyz` is on the health listener, so the pod may be ready before its etcd serves clients.
#[test]
fn invariant_24_new_voter_becomes_endpoint_when_it_serves() {
    let ready = |mut scene: Scene| {
        scene.observed.pods.get_mut("b").unwrap().ready = true;
        scene
    };
    let busy = Some(Role::Busy {
        since: scene::at(1000),
    });
    let new = ready(Scene::formed(&["a", "b"]).follows("b")).role("b", Role::Learner);
    assert_eq!(roles(&new), [("b".to_owned(), busy)]);
    // The voter also gets the role `Busy` if the operator has no health report about it.
    let mut silent = new.clone();
    silent.observed.pulses.clear();
    assert_eq!(roles(&silent), [("b".to_owned(), busy)]);
    let waits = ready(Scene::formed(&["a", "b"]).joining("b"));
    assert_eq!(roles(&waits), []);
    assert!(waits.waits().contains(&Reason::VoterStarting));
    let serves = Scene::formed(&["a", "b"]).role("b", out());
    assert_eq!(roles(&serves), [("b".to_owned(), Some(Role::Voter))]);
    let at_once = Scene::formed(&["a", "b"]).role("b", Role::Learner);
    assert_eq!(roles(&at_once), [("b".to_owned(), Some(Role::Voter))]);
}

/// Invariant 22: the operator writes the labels of one plan concurrently, so another member must already be an
/// endpoint.
#[test]
fn invariant_22_member_is_not_drained_before_another_is_endpoint() {
    let defragmenting = |scene: Scene| scene.defragmented("a");
    let new = defragmenting(Scene::formed(&["a", "b"])).role("b", Role::Learner);
    assert_eq!(roles(&new), [("b".to_owned(), Some(Role::Voter))]);
    let back = defragmenting(Scene::formed(&["a", "b"])).role("b", out());
    assert_eq!(roles(&back), [("b".to_owned(), Some(Role::Voter))]);
}
