//! The fate of each member: it stays, is replaced while it serves, or counts as lost.
//!
//! Only [`RULES`] decides a fate. A fate alone permits no change: every removal of a voter also needs the consent of
//! the quorum guard (invariant 3).

use etcd::MemberId;
use jiff::Timestamp;

use crate::clock::age;
use crate::plan::versions::minor;
use crate::plan::view::{Data, Fate, MemberState};
use crate::plan::{adoption, disks, roll, upkeep};
use crate::snapshot::{Cause, Changed, Desired, Disk, Ending, Observed, Pod};

/// A rule returns the fate of a member, or `None` if the rule does not apply to the member.
type Rule = fn(&Facts, &MemberState) -> Option<Fate>;

/// Rules in order of precedence: the first rule that applies decides. A member to which no rule applies stays.
const RULES: [Rule; 8] = [
    // Invariants 2 and 3: an external member is replaced while it serves. The quorum guard decides when.
    of_joined_cluster,
    // Invariant 5: a serving member with a deleted PVC is replaced, because its data is lost when it stops.
    without_data_but_serving,
    // Invariant 5: a member that has lost its data is dead.
    without_data,
    // Invariants 5 and 8: a member whose volume is about to be lost is replaced.
    without_volume_soon,
    // Invariant 5, exception: a member whose volume exists counts as dead if the volume is unreachable or unreadable.
    out_of_service,
    // Invariant 18: if a rolling update must recreate the pod of a member without a volume, the member is replaced.
    outdated_in_its_pod,
    // Invariants 2 and 3: a member on an unsuitable volume is replaced while it serves. The quorum guard decides when.
    on_unfit_volume,
    // Invariant 19: a member with corrupt data is replaced.
    corrupt,
];

/// The rules for failed members. While one of them applies to any member, the operator does not replace other members
/// whose pods must be recreated.
const FAILURES: [Rule; 4] = [
    without_data_but_serving,
    without_data,
    without_volume_soon,
    out_of_service,
];

/// After this number of restarts, the operator accepts etcd's error about damaged data as final: another start would
/// read the same data.
const DAMAGED_RESTARTS: i32 = 2;
/// After a change to another minor release, the operator accepts etcd's error about damaged data only after this number
/// of restarts. Until then, Kubernetes may still report the exit of a container with the old release.
const REREAD_RESTARTS: i32 = 4;
/// After this number of restarts, a member that fails for an unknown reason may be replaced. The kubelet waits 10, 20,
/// 40 and 80 s between the restarts.
const FAILED_RESTARTS: i32 = 5;

const VOLUME_LOST: &str = "the volume of the member is lost: the PersistentVolumeClaim exists, but its \
                           PersistentVolume does not";

/// The fate of a member, and the time at which this fate changes even if no object changes.
pub(super) struct Decision {
    pub(super) fate: Fate,
    /// Time at which the member counts as lost if nothing changes; `None` if the fate does not depend on time.
    pub(super) lost_at: Option<Timestamp>,
    /// True if the replacement joins before this member is removed.
    pub(super) followed: bool,
}

/// Why a member that does not serve counts as lost, or the time from which it counts as lost.
enum Failure {
    Lost(String),
    LostAt(Timestamp),
}

/// The facts about the cluster from which the rules decide the fate of a member.
struct Facts<'f, 'a> {
    members: &'f [MemberState<'a>],
    desired: &'f Desired,
    observed: &'f Observed,
    /// The earlier of the operator's time and the API server's time (invariant 5).
    now: Timestamp,
    /// The member to replace because its pod must be recreated, and the reason.
    outdated: Option<(MemberId, String)>,
    /// IDs of the members that etcd reports as corrupt.
    corrupt: Vec<MemberId>,
}

/// Decides the fate of all members. `leader`: the leader that the members report.
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
        if without_volume_soon(self, member).is_some() || out_of_service(self, member).is_some() {
            return None;
        }
        let times = self.failures(member).filter_map(|failure| match failure {
            Failure::LostAt(at) => Some(at),
            Failure::Lost(_) => None,
        });
        times.min()
    }

    /// The failures of a member that does not serve, but has its data.
    fn failures(&self, member: &MemberState) -> impl Iterator<Item = Failure> {
        let pod = member.pod;
        let pod = pod.filter(|_| member.data == Data::There && !member.serves());
        let failures = pod.map(|pod| [lost_node(self, pod), unusable(self, member, pod)]);
        failures.into_iter().flatten().flatten()
    }
}

/// Applies to an external member, which another operator or a person runs: a member of this EtcdCluster replaces it.
fn of_joined_cluster(facts: &Facts, member: &MemberState) -> Option<Fate> {
    adoption::is_replaced(facts.observed, member).then(|| {
        let why = "the member is external, and a member of this cluster replaces it";
        Fate::Leaves(why.to_owned())
    })
}

fn serves_in_its_pod(member: &MemberState) -> bool {
    member.serves() && member.pod.is_some_and(Pod::stays)
}

/// Applies if the PVC was deleted while the pod had the volume mounted. The member runs until its next restart.
fn without_data_but_serving(_: &Facts, member: &MemberState) -> Option<Fate> {
    let on_volume = member.pod.is_some_and(|pod| pod.durable);
    let applies = member.data == Data::Gone && serves_in_its_pod(member) && on_volume;
    applies.then(|| Fate::Leaves("the PersistentVolumeClaim of the member was deleted".to_owned()))
}

/// Applies if the data of the member is lost.
fn without_data(_: &Facts, member: &MemberState) -> Option<Fate> {
    let lost = member.disk.is_some_and(|disk| !disk.stays() && disk.lost);
    let why = if lost {
        VOLUME_LOST
    } else {
        "the volume of the member was deleted"
    };
    (member.data == Data::Gone).then(|| Fate::Lost(why.to_owned()))
}

/// Applies if the volume will be lost soon: the PVC is being deleted, or has lost its PersistentVolume. A pod with a
/// mounted volume serves until its next restart.
fn without_volume_soon(_: &Facts, member: &MemberState) -> Option<Fate> {
    let there = member.data == Data::There && member.pod.is_some();
    let disk: &Disk = member.disk.filter(|disk| there && !disk.stays())?;
    let why = if disk.terminating {
        "the PersistentVolumeClaim of the member is being deleted"
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

/// Applies if the volume of the member is unreachable or unreadable.
fn out_of_service(facts: &Facts, member: &MemberState) -> Option<Fate> {
    facts.failures(member).find_map(|failure| match failure {
        Failure::Lost(why) => Some(Fate::Lost(why)),
        Failure::LostAt(_) => None,
    })
}

/// Applies if the member's data is only in its pod, and the pod must be recreated. The replacement joins before the
/// member is removed.
fn outdated_in_its_pod(facts: &Facts, member: &MemberState) -> Option<Fate> {
    let (id, why) = facts.outdated.as_ref()?;
    (*id == member.id()).then(|| Fate::Leaves(why.clone()))
}

/// Applies if the volume does not match the spec, and Kubernetes cannot make this change to a volume.
fn on_unfit_volume(facts: &Facts, member: &MemberState) -> Option<Fate> {
    disks::unfit(facts.desired, member).map(Fate::Leaves)
}

/// Applies if etcd reports that the data of this member differs from the data of the other members.
fn corrupt(facts: &Facts, member: &MemberState) -> Option<Fate> {
    facts.corrupt.contains(&member.id()).then(|| {
        let why =
            "etcd reports that the data of this member differs from the data of the other members (alarm CORRUPT)";
        Fate::Leaves(why.to_owned())
    })
}

/// Exception to invariant 5: a volume on a lost node exists, but may be unreachable forever. The member counts as lost
/// after `spec.memberReplacement.after`.
///
/// The removal is safe, because the quorum guard requires a quorum among the remaining voters. Every acknowledged write
/// is in the logs of a majority of the old voters. Each majority of the remaining voters contains a voter with the
/// write, and that voter elects only a leader with the write.
///
/// If the node returns, the member's etcd learns from the other members that the member was removed. The operator
/// deletes its pod and its volume.
fn lost_node(facts: &Facts, pod: &Pod) -> Option<Failure> {
    let since = pod.lost_since?;
    let why = format!("the node of the member has been lost since {since}");
    lasting(facts, since, why)
}

/// A failure that counts only if it lasts for `spec.memberReplacement.after`.
fn lasting(facts: &Facts, since: Timestamp, why: String) -> Option<Failure> {
    let after = facts.desired.replace_after;
    if age(since, facts.now) >= after {
        return Some(Failure::Lost(why));
    }
    since.checked_add(after).ok().map(Failure::LostAt)
}

/// Applies if the etcd of the member cannot start on its data. The removal loses no acknowledged write: the quorum
/// guard requires that the other voters form a quorum, and a quorum has every acknowledged write.
///
/// etcd's own error about damaged data is accepted after [`DAMAGED_RESTARTS`] restarts. Any other failure may come from
/// a setting, an image or the machine, and could then affect one member after another. Such a failure counts only if it
/// has lasted for `spec.memberReplacement.after`, and if every other voter is healthy, including a voter with the same
/// image and settings.
fn unusable(facts: &Facts, member: &MemberState, pod: &Pod) -> Option<Failure> {
    let Ending { at, cause } = pod.ending.as_ref()?;
    // A voter that failed after a change of its image is not replaced, but rolled back to its former version.
    // Exceptions: it already has its former version again; both versions belong to one minor release, and etcd reports
    // damaged data repeatedly; or neither minor release can read the data.
    let other = |changed: &Changed| pod.version.as_ref() != Some(&changed.from);
    let again = |changed: &Changed| {
        let begun = pod.restarts.saturating_sub(changed.restarts);
        let same = begun >= DAMAGED_RESTARTS && is_same_minor(pod, &changed.from);
        let neither = begun >= REREAD_RESTARTS && changed.unreadable;
        matches!(cause, Cause::Data(_)) && (same || neither)
    };
    // This exception does not apply to a learner, because a learner had already failed before its image was changed.
    // Its replacement starts with the version of the voters.
    let to_blame = |changed: &Changed| member.votes() && other(changed) && !again(changed);
    if pod.changed.as_ref().is_some_and(to_blame) {
        return None;
    }
    // If the pod was ready until its container ended, etcd had started successfully, so the end of this container does
    // not count as a failed start.
    let since = pod
        .unready_since
        .filter(|since| since < at && pod.stays())?;
    match cause {
        Cause::Data(words) if pod.restarts >= DAMAGED_RESTARTS => {
            let why = format!("etcd cannot start on the data of the member: {words}");
            Some(Failure::Lost(why))
        }
        Cause::Failed(words)
            if pod.restarts >= FAILED_RESTARTS && is_alone_in_it(member, pod, facts.members) =>
        {
            let why = format!("etcd has failed {} times: {words}", pod.restarts);
            lasting(facts, since, why)
        }
        _ => None,
    }
}

fn is_same_minor(pod: &Pod, from: &str) -> bool {
    let runs = pod.version.as_deref().and_then(minor);
    runs.is_some() && runs == minor(from)
}

/// True if all other voters are healthy, and a voter among them runs with the same image and settings. A learner whose
/// image was changed had failed with its former version before, so a voter with that version is accepted too.
fn is_alone_in_it(member: &MemberState, pod: &Pod, members: &[MemberState]) -> bool {
    let others = || {
        members
            .iter()
            .filter(|other| other.id() != member.id() && other.votes())
    };
    let changed = pod.changed.as_ref().filter(|_| !member.votes());
    let failed_as = |twin: &Pod| changed.is_some_and(|it| twin.version.as_ref() == Some(&it.from));
    let is_twin = |other: &MemberState| {
        other.pod.is_some_and(|twin| {
            (twin.image == pod.image || failed_as(twin)) && twin.spec_hash == pod.spec_hash
        })
    };
    others().all(MemberState::serves) && others().any(is_twin)
}
