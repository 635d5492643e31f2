//! The fate of each member: it stays, it is replaced while it serves, or it counts as lost.
//!
//! [`RULES`] is the only place where a fate is decided. Nothing is changed here, and nothing is allowed: every removal asks
//! the quorum guard first (invariant 3).

use std::time::Duration;

use api::version::EtcdVersion;
use etcd::MemberId;
use jiff::Timestamp;

use crate::plan::age::age;
use crate::plan::view::{Data, Fate, MemberState};
use crate::plan::{adoption, disks, roll, upkeep};
use crate::snapshot::{Cause, Changed, Desired, Disk, Ending, Observed, Pod};

/// What a rule says of a member: its fate, or `None` if the rule does not apply.
type Rule = fn(&Facts, &MemberState) -> Option<Fate>;

/// The rules, in this order: the first that applies decides. A member to which none applies stays.
const RULES: [Rule; 8] = [
    of_joined_cluster,        // Invariants 2 and 3.
    without_data_but_serving, // Invariant 5.
    without_data,             // Invariant 5.
    without_volume_soon,      // Invariants 5 and 8.
    out_of_service,           // Invariant 5, exception.
    outdated_in_its_pod,      // Invariant 18.
    on_unfit_volume,          // Invariants 2 and 3.
    corrupt,                  // Invariant 19.
];

/// The rules for members that have failed. As long as one applies to a member, no other member is replaced for its pod.
const FAILURES: [Rule; 4] = [
    without_data_but_serving,
    without_data,
    without_volume_soon,
    out_of_service,
];

/// After so many restarts etcd's own words about its data are believed: a third start would have read the same.
const DAMAGED_RESTARTS: i32 = 2;
/// After so many since the change to another minor release they are of what that one has read itself: until it has ended,
/// the end of the one before is told, which may have been started once more while its image was changed.
const REREAD_RESTARTS: i32 = 4;
/// After so many restarts a member that fails for no known reason may be replaced. The kubelet waits 10, 20, 40 and
/// 80 s in between.
const FAILED_RESTARTS: i32 = 5;

/// What is reported of a PVC in phase `Lost`.
const VOLUME_LOST: &str = "its volume is lost: its claim is there, and the PersistentVolume is not";

/// The fate of a member, and when it changes without an event.
pub(super) struct Decision {
    /// What is to become of it.
    pub(super) fate: Fate,
    /// When it will count as lost if nothing changes.
    pub(super) lost_at: Option<Timestamp>,
    /// It leaves, and another member comes first.
    pub(super) followed: bool,
}

/// What the rules are decided from.
struct Facts<'f, 'a> {
    members: &'f [MemberState<'a>],
    desired: &'f Desired,
    observed: &'f Observed,
    /// The time by the clock that is behind (invariant 5).
    now: Timestamp,
    /// The member that another one follows for its pod, and why.
    outdated: Option<(MemberId, String)>,
    /// The members whose data etcd distrusts.
    corrupt: Vec<MemberId>,
}

/// Decides the fate of all members. `leader`: the leader on which they agree.
pub(super) fn decide(
    members: &[MemberState],
    (desired, observed, now): (&Desired, &Observed, Timestamp),
    leader: Option<MemberId>,
) -> Vec<Decision> {
    let mut facts = Facts {
        members,
        desired,
        observed,
        now: observed.clock.earlier(now),
        outdated: None,
        corrupt: upkeep::corrupt_members(members, observed),
    };
    let failed = |member: &MemberState| FAILURES.iter().any(|rule| rule(&facts, member).is_some());
    if !members.iter().any(failed) {
        facts.outdated = roll::outdated((desired, observed), members, leader);
    }
    members.iter().map(|member| facts.decide(member)).collect()
}

impl Facts<'_, '_> {
    fn decide(&self, member: &MemberState) -> Decision {
        let of_pod = of_joined_cluster(self, member).or_else(|| outdated_in_its_pod(self, member));
        let fate = RULES.iter().find_map(|rule| rule(self, member));
        let fate = fate.unwrap_or(Fate::Stays);
        Decision {
            followed: of_pod.is_some_and(|of_pod| of_pod == fate),
            lost_at: self.lost_at(member),
            fate,
        }
    }

    fn lost_at(&self, member: &MemberState) -> Option<Timestamp> {
        let pod = failing(member)?;
        if without_volume_soon(self, member).is_some() || out_of_service(self, member).is_some() {
            return None;
        }
        let after = self.desired.replace_after;
        let node = lost_node(pod, after, self.now).1;
        let data = unusable(member, pod, self.members, after, self.now).1;
        node.into_iter().chain(data).min()
    }
}

/// The pod of a member that does not serve, as far as its data is there.
fn failing<'b>(member: &MemberState<'b>) -> Option<&'b Pod> {
    member
        .pod
        .filter(|_| member.data == Data::There && !member.serves())
}

/// A member that another operator or person runs leaves when enough of ours vote: leadership is handed over before, as
/// for each removal.
fn of_joined_cluster(facts: &Facts, member: &MemberState) -> Option<Fate> {
    adoption::is_replaced(facts.observed, member).then(|| {
        let why = "it is run by somebody else, and this cluster takes its place";
        Fate::Leaves(why.to_owned())
    })
}

fn serves_in_its_pod(member: &MemberState) -> bool {
    member.serves() && member.pod.is_some_and(Pod::stays)
}

/// Someone deleted the PVC under a pod that has its volume open: the member goes on until it is restarted.
fn without_data_but_serving(_: &Facts, member: &MemberState) -> Option<Fate> {
    let on_volume = member.pod.is_some_and(|pod| pod.durable);
    let applies = member.data == Data::Gone && serves_in_its_pod(member) && on_volume;
    applies.then(|| Fate::Leaves("its volume claim is gone".to_owned()))
}

/// Nothing is left of the data of the member.
fn without_data(_: &Facts, member: &MemberState) -> Option<Fate> {
    let lost = member.disk.is_some_and(|disk| !disk.stays() && disk.lost);
    let why = if lost {
        VOLUME_LOST
    } else {
        "its disk is gone"
    };
    (member.data == Data::Gone).then(|| Fate::Lost(why.to_owned()))
}

/// A deleted PVC is held back as long as the pod exists. A pod that has its volume open goes on without the
/// PersistentVolume until it is restarted.
fn without_volume_soon(_: &Facts, member: &MemberState) -> Option<Fate> {
    let there = member.data == Data::There && member.pod.is_some();
    let disk: &Disk = member.disk.filter(|disk| there && !disk.stays())?;
    let why = if disk.terminating {
        "its volume claim is being deleted"
    } else {
        VOLUME_LOST
    };
    let fate = if serves_in_its_pod(member) {
        Fate::Leaves
    } else {
        Fate::Lost
    };
    Some(fate(why.to_owned()))
}

/// Its disk cannot be reached, or cannot be read.
fn out_of_service(facts: &Facts, member: &MemberState) -> Option<Fate> {
    let pod = failing(member)?;
    let after = facts.desired.replace_after;
    let node = lost_node(pod, after, facts.now).0;
    let data = || unusable(member, pod, facts.members, after, facts.now).0;
    Some(node)
        .filter(is_lost)
        .or_else(|| Some(data()).filter(is_lost))
}

fn is_lost(fate: &Fate) -> bool {
    matches!(fate, Fate::Lost(_))
}

/// Its pod must be created again and its data is in the pod: another member comes first.
fn outdated_in_its_pod(facts: &Facts, member: &MemberState) -> Option<Fate> {
    let (id, why) = facts.outdated.as_ref()?;
    (*id == member.id()).then(|| Fate::Leaves(why.clone()))
}

/// Its volume cannot become what the spec asks for.
fn on_unfit_volume(facts: &Facts, member: &MemberState) -> Option<Fate> {
    disks::unfit(facts.desired, member).map(Fate::Leaves)
}

/// Its data differs from that of the others, as etcd says.
fn corrupt(facts: &Facts, member: &MemberState) -> Option<Fate> {
    facts.corrupt.contains(&member.id()).then(|| {
        let why = "etcd has found its data to differ from the others' (alarm CORRUPT)";
        Fate::Leaves(why.to_owned())
    })
}

/// Invariant 5's exception. A disk on a node that is lost exists and cannot be reached, maybe never again; after the
/// time the user has set the member counts as gone. It is safe to remove it because the quorum guard lets nobody go
/// unless the voters that are left, and answer, are a quorum: whatever was acknowledged is in the log of a majority
/// of the old voters, the removal itself is only committed by a majority of those left, and two majorities share a
/// member that hands the log on. Should the node come back, its etcd is no member any more and is told so; it can
/// neither vote nor be started again under its name, and its pod and disk are deleted as leftovers.
fn lost_node(pod: &Pod, after: Duration, now: Timestamp) -> (Fate, Option<Timestamp>) {
    let Some(since) = pod.lost_since else {
        return (Fate::Stays, None);
    };
    if age(since, now) >= after {
        let why = format!("its node has been lost since {since}");
        return (Fate::Lost(why), None);
    }
    (Fate::Stays, since.checked_add(after).ok())
}

/// A member that cannot start on its data. Removing it loses nothing: the guard demands that the other voters are a
/// quorum, so everything that was acknowledged is with them, and what this member alone had was never acknowledged.
///
/// etcd's own words about damaged data are believed soon. Any other failure may be the work of a setting, an image
/// or the machine, which would take member after member: it is put down to the data only when every other voter is
/// healthy, one of them with the very same image and settings, and when it has lasted as long as a lost node may.
fn unusable(
    seat: &MemberState,
    pod: &Pod,
    seats: &[MemberState],
    after: Duration,
    now: Timestamp,
) -> (Fate, Option<Timestamp>) {
    let Some(Ending { at, cause }) = &pod.ending else {
        return (Fate::Stays, None);
    };
    // It has not come back from another image: that is put right by setting the version back, not by a new member.
    // One that was set back already has nothing more to wait for.
    // Nor has one whose data etcd itself calls damaged, and goes on to: no release of the same minor reads it
    // otherwise. Nor one whose data neither minor release can read: no image mends that, and it may not be able to go
    // back (`repair`).
    let other = |changed: &Changed| pod.version.as_ref() != Some(&changed.from);
    let again = |changed: &Changed| {
        let begun = pod.restarts.saturating_sub(changed.restarts);
        let same = begun >= DAMAGED_RESTARTS && is_same_minor(pod, &changed.from);
        let neither = begun >= REREAD_RESTARTS && changed.unreadable;
        matches!(cause, Cause::Data(_)) && (same || neither)
    };
    // Nor a learner: it had failed before it was changed (`roll`), and the next one begins with what the others run.
    let to_blame = |changed: &Changed| seat.votes() && other(changed) && !again(changed);
    if pod.changed.as_ref().is_some_and(to_blame) {
        return (Fate::Stays, None);
    }
    // It has not been ready since before it ended, so this is not the end of a long and healthy life.
    let Some(since) = pod.unready_since.filter(|since| since < at && pod.stays()) else {
        return (Fate::Stays, None);
    };
    match cause {
        Cause::Data(words) if pod.restarts >= DAMAGED_RESTARTS => (
            Fate::Lost(format!("it cannot start on its data: {words}")),
            None,
        ),
        Cause::Failed(words)
            if pod.restarts >= FAILED_RESTARTS && is_alone_in_it(seat, pod, seats) =>
        {
            if age(since, now) >= after {
                let why = format!("it has failed {} times: {words}", pod.restarts);
                return (Fate::Lost(why), None);
            }
            (Fate::Stays, since.checked_add(after).ok())
        }
        _ => (Fate::Stays, None),
    }
}

fn is_same_minor(pod: &Pod, from: &str) -> bool {
    let minor = |version: &str| EtcdVersion::parse(version).ok().map(|it| it.minor());
    let runs = pod.version.as_deref().and_then(minor);
    runs.is_some() && runs == minor(from)
}

/// All other voters are healthy, and one of them runs with the same image and settings; a learner that was changed had
/// failed before with what it was made for.
fn is_alone_in_it(seat: &MemberState, pod: &Pod, seats: &[MemberState]) -> bool {
    let others = || {
        seats
            .iter()
            .filter(|other| other.id() != seat.id() && other.votes())
    };
    let changed = pod.changed.as_ref().filter(|_| !seat.votes());
    let failed_as = |twin: &Pod| changed.is_some_and(|it| twin.version.as_ref() == Some(&it.from));
    let is_twin = |other: &MemberState| {
        other.pod.is_some_and(|twin| {
            (twin.image == pod.image || failed_as(twin)) && twin.spec_hash == pod.spec_hash
        })
    };
    others().all(MemberState::serves) && others().any(is_twin)
}
