//! What is to become of a member: it stays, it is to be replaced while it serves, or it counts as gone.
//!
//! Nothing is changed here, and nothing is allowed: whoever removes a member asks the quorum guard first.

use std::time::Duration;

use api::version::EtcdVersion;
use jiff::Timestamp;

use crate::plan::age::age;
use crate::plan::view::Fate;
use crate::plan::view::{Data, Seat};
use crate::snapshot::{Cause, Changed, Desired, Ending, Pod};

/// After so many restarts etcd's own words about its data are believed: a third start would have read the same.
const DAMAGED_RESTARTS: i32 = 2;
/// After so many since the change to another minor release they are of what that one has read itself: until it has ended,
/// the end of the one before is told, which may have been started once more while its image was changed.
const REREAD_RESTARTS: i32 = 4;
/// After so many restarts a member that fails for no known reason may be replaced. The kubelet waits 10, 20, 40 and
/// 80 s in between.
const FAILED_RESTARTS: i32 = 5;

/// What Kubernetes says of a claim with `Lost`.
const VOLUME_LOST: &str = "its volume is lost: its claim is there, and the PersistentVolume is not";

/// The fate of one member among all. The second value: when it will count as gone if nothing changes.
pub(super) fn fate(
    seat: &Seat,
    seats: &[Seat],
    (desired, now): (&Desired, Timestamp),
) -> (Fate, Option<Timestamp>) {
    let serves = seat.serves() && seat.pod.is_some_and(Pod::stays);
    let claim = seat.disk.filter(|disk| !disk.stays());
    match seat.data {
        Data::Elsewhere | Data::NeverMade => return (Fate::Stays, None),
        // Somebody removed the claim under a pod that has its volume open: it goes on until it is restarted.
        Data::Gone if serves && seat.pod.is_some_and(|pod| pod.durable) => {
            return (Fate::Leaves("its volume claim is gone".to_owned()), None);
        }
        Data::Gone => {
            let lost = claim.filter(|claim| claim.lost);
            let why = lost.map_or("its disk is gone", |_| VOLUME_LOST);
            return (Fate::Lost(why.to_owned()), None);
        }
        // Whoever deletes a claim wants the member on another one. It is held back as long as the pod lives. A pod that
        // has its volume open goes on without the PersistentVolume, until it is restarted.
        Data::There => {
            if let Some(claim) = claim.filter(|_| seat.pod.is_some()) {
                let why = if claim.terminating {
                    "its volume claim is being deleted"
                } else {
                    VOLUME_LOST
                };
                let fate = if serves { Fate::Leaves } else { Fate::Lost };
                return (fate(why.to_owned()), None);
            }
        }
    }
    match seat.pod {
        Some(pod) if !seat.serves() => {
            let node = lost_node(pod, desired.replace_after, now);
            if matches!(node.0, Fate::Lost(_)) {
                return node;
            }
            let data = unusable(seat, pod, seats, desired.replace_after, now);
            if matches!(data.0, Fate::Lost(_)) {
                return data;
            }
            (Fate::Stays, node.1.into_iter().chain(data.1).min())
        }
        _ => (Fate::Stays, None),
    }
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
    seat: &Seat,
    pod: &Pod,
    seats: &[Seat],
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
fn is_alone_in_it(seat: &Seat, pod: &Pod, seats: &[Seat]) -> bool {
    let others = || {
        seats
            .iter()
            .filter(|other| other.id() != seat.id() && other.votes())
    };
    let changed = pod.changed.as_ref().filter(|_| !seat.votes());
    let failed_as = |twin: &Pod| changed.is_some_and(|it| twin.version.as_ref() == Some(&it.from));
    let is_twin = |other: &Seat| {
        other.pod.is_some_and(|twin| {
            (twin.image == pod.image || failed_as(twin)) && twin.spec_hash == pod.spec_hash
        })
    };
    others().all(Seat::serves) && others().any(is_twin)
}
