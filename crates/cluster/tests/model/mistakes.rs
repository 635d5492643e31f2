//! Deliberate mistakes about user requests and etcd's alarms.

use crate::writes::{Chain, Write};
use cluster::plan::Label;
use cluster::plan::View;
use cluster::reason::Reason;
use cluster::snapshot::{Changed, Desired, Observed, Pod, Role, Seen};
use etcd::AlarmKind;
use jiff::Timestamp;

use crate::mutation::Mutation;
use crate::run::taken_back;
use crate::writes::Plan;

impl Mutation {
    /// Adds the writes of this deliberate mistake to the plan.
    pub(crate) fn mistakes_a_wish(
        self,
        (desired, observed, now): (&Desired, &Observed, Timestamp),
        planned: &mut Plan,
    ) {
        if self == Self::HibernatesWithoutDisks && desired.hibernate {
            let stays = observed.pods.iter().filter(|(_, pod)| pod.stays());
            planned.step.chains.extend(stays.map(delete));
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
        let down = view.voters().any(|member| !member.serves());
        let leader = view
            .voters()
            .find(|member| Some(member.id()) == view.leader);
        let pods = || {
            let all = view.voters().filter(|member| member.serves());
            all.filter_map(|member| Some((&member.name, differs(&member.name)?)))
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
        let out = labels_out(planned);
        let like = |label: &Label, (name, pod): (&String, &Pod)| {
            let (member, uid) = (name.clone(), pod.uid.clone());
            let label = label.clone();
            Write::LabelPod(Label {
                member,
                uid,
                ..label
            })
        };
        let more: Vec<Chain> = match self {
            Self::RollsAllAtOnce => pods().map(delete).collect(),
            Self::RollsTheLeaderFirst => pods()
                .filter(|(name, _)| leader.is_some_and(|leader| leader.name == **name))
                .map(delete)
                .collect(),
            Self::RollsWhileAnotherIsDown if down => pods().take(1).map(delete).collect(),
            Self::TakesAllOut => {
                let all = out.iter().flat_map(|label| {
                    let others = observed.pods.iter();
                    let others = others.filter(|(name, pod)| **name != label.member && pod.stays());
                    others.map(|other| like(label, other))
                });
                writes(all)
            }
            Self::DisarmsFullDatabases => writes(disarm(AlarmKind::NoSpace)),
            Self::DisarmsMembers => writes(disarm(AlarmKind::Corrupt)),
            Self::DefragmentsWhileAnotherIsDown if down && full() => {
                let next = view.voters().find(|member| member.serves());
                writes(next.map(|member| defragment(&member.name)))
            }
            Self::DefragmentsTheLeader if full() => {
                writes(leader.map(|member| defragment(&member.name)))
            }
            _ => Vec::new(),
        };
        planned.step.chains.extend(more);
    }
}

impl Mutation {
    /// Adds the image changes of this deliberate mistake to the plan.
    pub(crate) fn mistakes_a_version(
        self,
        desired: &Desired,
        observed: &Observed,
        planned: &mut Plan,
    ) {
        let others = observed.pods.iter().filter(|(name, pod)| {
            let answers = observed
                .statuses
                .get(*name)
                .is_some_and(|it| it.known().is_some());
            pod.image != desired.image && pod.ready && pod.stays() && answers
        });
        let patch = |(name, pod): (&String, &Pod)| Write::PatchImage {
            member: name.clone(),
            uid: pod.uid.clone(),
            version: desired.version.clone(),
            changed: Changed {
                from: pod.version.clone().unwrap_or_default(),
                restarts: pod.restarts,
                unreadable: false,
                image: None,
            },
        };
        let is_patch = |write: &Write| matches!(write, Write::PatchImage { .. });
        let changes = planned.step.chains.iter().flatten().any(is_patch);
        let moves = planned.step.change.iter().flat_map(|change| &change.chain);
        let moves = moves.filter_map(|write| match write {
            Write::MoveLeader { from, .. } => Some(from.clone()),
            _ => None,
        });
        let refused = planned
            .problems
            .iter()
            .any(|one| one.reason == Reason::VersionRefused);
        let more = match self {
            Self::ChangesAllImages if changes => writes(others.map(patch)),
            Self::ChangesTheLeadersImage => {
                let from: Vec<String> = moves.collect();
                writes(others.filter(|(name, _)| from.contains(name)).map(patch))
            }
            Self::SkipsAMinor if refused => writes(others.take(1).map(patch)),
            _ => Vec::new(),
        };
        planned.step.chains.extend(more);
    }
}

impl Mutation {
    /// A deliberate mistake: an annotation `started` is removed that the operator would keep.
    pub(crate) fn takes_back(
        self,
        write: &Write,
        version: impl FnOnce(&str) -> Option<String>,
    ) -> Option<Write> {
        match write {
            Write::CreateDisk(start) | Write::CreatePod(start)
                if self == Self::TakesMarksBackBlindly =>
            {
                Some(Write::MarkService {
                    member: start.member.clone(),
                    started: false,
                    over: None,
                })
            }
            _ => taken_back(write, version),
        }
    }
}

/// The labels by which the plan drains members from the client Service.
fn labels_out(planned: &Plan) -> Vec<Label> {
    let all = planned.step.chains.iter().flatten();
    let out = all.filter_map(|write| match write {
        Write::LabelPod(label) if matches!(label.role, Some(Role::Busy { .. })) => Some(label),
        _ => None,
    });
    out.cloned().collect()
}

fn delete((name, pod): (&String, &Pod)) -> Chain {
    vec![Write::DeletePod {
        member: name.clone(),
        uid: pod.uid.clone(),
    }]
}

fn writes(all: impl IntoIterator<Item = Write>) -> Vec<Chain> {
    all.into_iter().map(|write| vec![write]).collect()
}
