//! Members that join together: while they start, they do not find each other.
//!
//! A member that joins asks every other one for its list, its version, and whether a downgrade is under way, one after
//! the other and with 10 s, 7 s and 7 s of patience for each (`bootstrapExistingClusterNoWAL` and
//! `isCompatibleWithCluster` in etcd's `server/etcdserver`). It listens from its first moment and answers when it has
//! asked: two that start together wait for each other, all of it. Where connections are refused nobody waits.

use std::time::Duration;

use jiff::Timestamp;

use crate::observed::Pod;
use crate::plan::objects;
use crate::plan::view::{Seat, View};

/// How long a member's Service stays without endpoints for the sake of others that have not started.
const CLOSED: Duration = Duration::from_secs(5);

/// Whether members to come begin behind Services without endpoints: several, beside one voter. There they need its
/// snapshot, as after a restore, and wait for their own entries longer than for the Service. A member that joins several
/// voters may get all it needs from the log over its own connections, and a Service that opens late would cost it that.
pub(super) fn begin_apart(view: &View, count: usize) -> bool {
    count > 1 && view.voters().count() == 1
}

/// Whether the member's Service gets its endpoints: all that begin behind closed ones run, so they have asked; and after
/// a moment in any case, so that nothing depends on another's pod.
pub(super) fn may_be_reached(view: &View, seat: &Seat, now: Timestamp) -> bool {
    let has_asked = |pod: &Pod| pod.running || pod.restarts > 0;
    let is_old = |pod: &Pod| objects::age(pod.created, now) >= CLOSED;
    let apart = |seat: &&Seat| seat.service.is_some_and(|service| service.closed);
    seat.joined() || seat.pod.is_none_or(is_old) || { view.seats.iter() }
        .filter(apart)
        .all(|seat| seat.pod.is_some_and(has_asked))
}
