//! Deliberate mistakes about what the user wishes and what etcd complains of.

use cluster::observed::{Desired, Observed, Pod, Seen};
use cluster::plan::{Plan, View};
use cluster::write::{Order, Write};
use etcd::AlarmKind;
use jiff::Timestamp;

use crate::mutation::Mutation;

impl Mutation {
    /// Plans more than the planner did.
    pub(crate) fn mistakes_a_wish(
        self,
        (desired, observed, now): (&Desired, &Observed, Timestamp),
        planned: &mut Plan,
    ) {
        if self == Self::HibernatesWithoutDisks && desired.hibernate {
            let stays = observed.pods.iter().filter(|(_, pod)| pod.stays());
            planned.step.orders.extend(stays.map(delete));
            return;
        }
        let (Seen::Known(list), false) = (&observed.members, desired.hibernate) else {
            return;
        };
        let view = View::new(list, (desired, observed, now));
        let differs = |name: &String| {
            let pod = observed
                .pods
                .get(name)
                .filter(|pod| pod.durable && pod.stays());
            pod.filter(|pod| pod.difference.pod.is_some())
        };
        let down = view.voters().any(|seat| !seat.serves());
        let leader = view.voters().find(|seat| Some(seat.id()) == view.leader);
        let pods = || {
            let all = view.voters().filter(|seat| seat.serves());
            all.filter_map(|seat| Some((&seat.name, differs(&seat.name)?)))
        };
        let via = || view.via(None);
        let disarm = |kind: AlarmKind| {
            let alarms = observed.upkeep.alarms.known().into_iter().flatten();
            let alarms = alarms.filter(move |alarm| alarm.kind == kind);
            alarms.map(|alarm| Write::Disarm {
                alarm: *alarm,
                via: via(),
            })
        };
        let defragment = |member: &str| Write::Defragment {
            member: member.to_owned(),
            recorded: now,
        };
        let full = || disarm(AlarmKind::NoSpace).next().is_some();
        let more: Vec<Order> = match self {
            Self::RollsAllAtOnce => pods().map(delete).collect(),
            Self::RollsTheLeaderFirst => pods()
                .filter(|(name, _)| leader.is_some_and(|leader| leader.name == **name))
                .map(delete)
                .collect(),
            Self::RollsWhileAnotherIsDown if down => pods().take(1).map(delete).collect(),
            Self::DisarmsFullDatabases => writes(disarm(AlarmKind::NoSpace)),
            Self::DisarmsMembers => writes(disarm(AlarmKind::Corrupt)),
            Self::DefragmentsWhileAnotherIsDown if down && full() => {
                let next = view.voters().find(|seat| seat.serves());
                writes(next.map(|seat| defragment(&seat.name)))
            }
            Self::DefragmentsTheLeader if full() => {
                writes(leader.map(|seat| defragment(&seat.name)))
            }
            _ => Vec::new(),
        };
        planned.step.orders.extend(more);
    }
}

fn delete((name, pod): (&String, &Pod)) -> Order {
    Order::Writes(vec![Write::DeletePod {
        member: name.clone(),
        uid: pod.uid.clone(),
    }])
}

fn writes(all: impl IntoIterator<Item = Write>) -> Vec<Order> {
    all.into_iter()
        .map(|write| Order::Writes(vec![write]))
        .collect()
}
