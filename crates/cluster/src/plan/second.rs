//! The second member of a cluster before etcd 3.4. It joins as a voter, so from its addition until it runs, the cluster
//! has no quorum. The operator then finds the second member only in the member list on the first member's disk.

use std::collections::BTreeSet;

use etcd::{ClusterId, Members};
use jiff::Timestamp;

use crate::plan::actions::{self, Builder};
use crate::plan::versions::{self, current_version};
use crate::plan::view::{self, Data, MemberState, View};
use crate::plan::{Draft, Start, State, member_objects};
use crate::reason::Reason;
use crate::snapshot::{Intent, Observed, Pod, Role, Service};

/// Starts members that were added to etcd and do not run, and returns their names, so that no other phase handles them.
/// If the list on the first member's disk is stale, the started etcd exits.
pub(super) fn start_added<'a>(
    build: Builder<'a>,
    (intent, cluster_id): (&Intent, ClusterId),
) -> (Draft<'a>, BTreeSet<String>) {
    let (desired, observed, _) = build.inputs();
    let mut draft = Draft::new(build);
    let mut lists = observed.recovery.local.iter();
    let Some(list) = lists.rfind(|list| list.cluster_id == cluster_id) else {
        return (draft, BTreeSet::new());
    };
    let view = View::new(list, (desired, observed, Timestamp::UNIX_EPOCH));
    let mut started = BTreeSet::new();
    for member in view.voters().filter(|member| !member.joined()) {
        // A member with a lost volume cannot start: a pod cannot mount the volume, and the PVC has the name that a new
        // PVC would need.
        let taken = member.disk.is_some_and(|disk| disk.lost);
        let Some(service) = member.service.filter(|_| member.pod.is_none() && !taken) else {
            continue;
        };
        let disk = member.disk.filter(|disk| disk.stays());
        let start = Start {
            member: member.name.clone(),
            state: State::Join,
            initial: view.names(),
            role: Role::Voter,
            durable: disk.is_some() || desired.durable,
            version: disk.map_or_else(
                || current_version(desired, observed),
                |_| versions::noted(desired, observed, disk),
            ),
            token: intent.token.clone(),
            cluster_id: Some(cluster_id),
        };
        if member.data == Data::NeverMade {
            let mark = actions::mark_service(&member.name, service);
            member_objects::start([mark], &start, &mut draft);
        } else if !is_second(observed, intent, list, member) {
            continue;
        } else if disk.is_some() {
            member_objects::start_on_disk(None, &start, &mut draft);
        } else {
            // Invariant 6: another operator process may have set the annotation `started`. `mark_again` renews the
            // annotation, so that the other process cannot remove it later.
            let mark = member_objects::mark_again(&member.name, service, &draft);
            member_objects::start(mark, &start, &mut draft);
        }
        draft.say(format!("start new member {}", member.name));
        started.insert(member.name.clone());
    }
    (draft, started)
}

/// Reports what to do about an added member with a PVC that has lost its volume. Without that member, the cluster has
/// no quorum, and no pod can start on that PVC.
pub(super) fn without_volume<'a>(
    build: Builder<'a>,
    (intent, cluster_id): (&Intent, ClusterId),
) -> Draft<'a> {
    let (desired, observed, _) = build.inputs();
    let mut draft = Draft::new(build);
    let mut lists = observed.recovery.local.iter();
    let Some(list) = lists.rfind(|list| list.cluster_id == cluster_id) else {
        return draft;
    };
    let view = View::new(list, (desired, observed, Timestamp::UNIX_EPOCH));
    for member in view.voters().filter(|member| !member.joined()) {
        // A pod without an address never mounted its lost volume, because Kubernetes mounts the volumes before it
        // assigns the address.
        let bare = member.disk.is_some_and(|disk| disk.lost)
            && member.pod.is_none_or(|pod| !pod.addressed);
        // True if the operator can start the member without data after a person has deleted the PVC.
        let again = |service: &Service| {
            let fresh = view::data(None, None, Some(service), false) == Data::NeverMade;
            fresh && !intent.members.contains(&member.name)
                || is_second(observed, intent, list, member)
        };
        if bare && member.service.is_some_and(again) {
            let text = format!(
                "{name} was added to etcd but has not started, and its volume is lost: restore its PersistentVolume. \
                 Or delete the PersistentVolumeClaim {name} and, if it exists, the pod {name}: the operator then \
                 starts the member on a new volume",
                name = member.name
            );
            draft.problem(Reason::VolumeLost, text);
        }
    }
    draft
}

/// True if the second member of a cluster of two can safely start without data. The annotation `started` on its Service
/// does not prove that its pod ran: the operator can crash between setting the annotation and creating the pod.
///
/// The first member's list has two voters, and no Kubernetes object indicates a third member. A commit needs both
/// voters, so the log of the first member contains every acknowledged write.
///
/// Even if the second member has run before, no acknowledged data is lost. With an empty log, it is never elected,
/// because the first member does not vote for it. This argument does not hold in a larger cluster (invariant 6).
fn is_second(observed: &Observed, intent: &Intent, list: &Members, second: &MemberState) -> bool {
    let [one, other] = &list.members[..] else {
        return false;
    };
    let first = if one.id == second.id() { other } else { one };
    let answers = |name: &String| {
        let status = observed.answer(name);
        let itself = status.is_some_and(|status| {
            status.member_id == first.id && status.cluster_id == list.cluster_id
        });
        itself && observed.pods.get(name).is_some_and(Pod::stays)
    };
    let first_name = crate::plan::name_of(first);
    let all = BTreeSet::from([first_name.clone(), second.name.clone()]);
    !first.is_learner
        && !intent.members.contains(&second.name)
        && answers(&first_name)
        && member_objects::all_names(observed) == all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::scene::{self, Scene};
    use crate::plan::tests::writes::Write;
    use crate::snapshot::Seen;

    /// Member `d` was added to the single member `a`. Only `a` answers, and it reports no leader.
    fn added(durable: bool) -> Scene {
        let mut scene = Scene::formed(&["a"]);
        if durable {
            scene = scene.durable();
        }
        let scene = scene.size(2).version("3.3.27").silent_voter("a");
        let mut scene = scene.reserved("d").added_with_vote("d");
        if let Seen::Known(list) = scene.observed.members.clone() {
            scene.observed.recovery.local = vec![list];
        }
        scene.observed.members = Seen::Unknown("no leader".into());
        scene
    }

    fn starts(scene: &Scene) -> Vec<Write> {
        let writes = scene.writes().into_iter();
        let starts = |write: &Write| scene::makes_pod(write, "d");
        writes.filter(starts).collect()
    }

    #[test]
    fn second_voter_starts_after_any_operator_crash() {
        for durable in [false, true] {
            let unmarked = added(durable);
            let marked = added(durable).marked("d");
            let claimed = added(durable).marked("d").with_disk("d");
            for scene in [&unmarked, &marked, &claimed] {
                let [Write::CreatePod(start)] = &starts(scene)[..] else {
                    panic!("{:?}", scene.writes());
                };
                assert_eq!((start.state, start.initial.len()), (State::Join, 2));
                assert_eq!(scene.changes(), []);
                assert_eq!(scene.plan().problems, []);
            }
        }
    }

    /// Another operator process has set the annotation `started`. That process was suspended for longer than its lease,
    /// and may still remove the annotation.
    #[test]
    fn invariant_6_started_annotation_is_renewed_before_pod_of_second_voter() {
        let again =
            |write: &Write| matches!(write, Write::RenewMark { member, .. } if member == "d");
        for durable in [false, true] {
            let writes = added(durable).marked("d").writes();
            let at = writes.iter().position(again);
            let pod = writes.iter().position(|write| scene::makes_pod(write, "d"));
            assert!(at.is_some() && at < pod, "{writes:?}");
            // Another process set the annotation, so the plan must contain no write that this process may later undo.
            let marks = |write: &Write| {
                matches!(
                    write,
                    Write::CreateService { started: true, .. }
                        | Write::MarkService { started: true, .. }
                )
            };
            assert!(!writes.iter().any(marks), "{writes:?}");
            assert!(!added(durable).writes().iter().any(again));
            // The annotation `started` is renewed at most once. Without this limit, each PVC that the API server
            // rejects would cause a renewal, and each renewal would trigger the next reconcile at once.
            let mut renewed = added(durable).marked("d");
            renewed.observed.services.get_mut("d").unwrap().renewed = true;
            let writes = renewed.writes();
            assert!(writes.iter().any(|write| scene::makes_pod(write, "d")));
            assert!(!writes.iter().any(again), "{writes:?}");
        }
    }

    #[test]
    fn second_voter_with_lost_volume_starts_after_pvc_is_deleted() {
        for scene in [added(true), added(true).marked("d")] {
            let lost = scene.clone().with_disk("d").volume_lost("d");
            assert_eq!(starts(&lost), []);
            let plan = lost.plan();
            let [problem] = &plan.problems[..] else {
                panic!("{:?}", plan.problems);
            };
            assert_eq!(problem.reason, Reason::VolumeLost);
            assert!(
                problem
                    .message
                    .contains("delete the PersistentVolumeClaim d")
            );
            assert!(
                plan.waiting_for
                    .iter()
                    .any(|one| one.reason == Reason::NoQuorum)
            );
            // In this scene, the person has applied the reported remedy and deleted the PVC.
            assert_eq!(starts(&scene).len(), 1);
            assert_eq!(scene.plan().problems, []);
        }
    }

    #[test]
    fn invariant_6_only_second_of_two_voters_starts_again_without_data() {
        let joined = {
            let mut scene = added(true).marked("d");
            let list = &mut scene.observed.recovery.local[0].members;
            let d = list.iter_mut().find(|one| one.client_urls.is_empty());
            d.unwrap().client_urls = vec!["http://d:2379".into()];
            scene
        };
        let third = {
            let scene = Scene::formed(&["a", "b"]).size(3).version("3.3.27");
            let mut scene = scene.reserved("d").marked("d").added_with_vote("d");
            if let Seen::Known(list) = scene.observed.members.clone() {
                scene.observed.recovery.local = vec![list];
            }
            scene.observed.members = Seen::Unknown("no leader".into());
            scene
        };
        let third_is_reserved = added(true).marked("d").reserved("e");
        let first_is_silent = added(true).marked("d").down("a");
        let first_ends = added(true).marked("d").terminating("a");
        let first_member = {
            let mut scene = added(true).marked("d");
            let intent = scene.observed.intent.as_mut().unwrap();
            intent.members.insert("d".into());
            scene
        };
        for scene in [
            &joined,
            &third,
            &third_is_reserved,
            &first_is_silent,
            &first_ends,
            &first_member,
        ] {
            assert_eq!(starts(scene), [], "{:?}", scene.observed.services);
        }
    }
}
