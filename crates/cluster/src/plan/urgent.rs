//! Urgent actions that do not wait for etcd: they recreate missing pods on their volumes (invariants 5 and 8).
//!
//! During an election, or without a quorum, etcd's answer takes seconds. If the answer is late, the operator plans as
//! if no quorum had answered, and executes only this part of the plan (invariant 1).

use jiff::Timestamp;

use crate::action::{Action, StartPart, Step};
use crate::naming::Names;
use crate::plan::plan;
use crate::snapshot::{Desired, Observed};

/// Plans the pods that must be recreated on their volumes. `observed` must contain no answer of etcd.
pub fn urgent(desired: &Desired, observed: &Observed, names: &dyn Names, now: Timestamp) -> Step {
    let mut step = plan(desired, observed, names, now).step;
    step.change = None;
    step.chains.retain(|chain| {
        let member = put_back(chain);
        member.is_some_and(|member| observed.reported_voters.contains(member))
    });
    step
}

/// Returns the member of the pod that this chain creates on an existing volume. `None` for a member that has not joined
/// yet, because it may need the current member list.
fn put_back(chain: &[Action]) -> Option<&String> {
    let (last, before) = chain.split_last()?;
    let Some(StartPart::Return(member)) = &last.start else {
        return None;
    };
    let marks = |action: &Action| matches!(action.start, Some(StartPart::Mark(_)));
    before.iter().all(marks).then_some(member)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::scene::{self, Letters, Scene};

    fn step(scene: Scene) -> Step {
        let scene = scene.silent();
        urgent(&scene.desired, &scene.observed, &Letters, scene::at(1000))
    }

    #[test]
    fn invariant_1_urgent_plan_only_recreates_pods_on_volumes() {
        let three = || Scene::formed(&["a", "b", "c"]).durable();
        let gone = step(three().terminating("a").without_pod("b").size(5));
        let [writes] = &gone.chains[..] else {
            panic!("{gone:?}");
        };
        assert!(writes.iter().any(|action| scene::creates_pod(action, "b")));
        assert_eq!(gone.change, None);
        for nothing in [
            &three as &dyn Fn() -> Scene,
            &|| three().terminating("b"),
            &|| three().without_pod("b").without_claim("b"),
            &|| three().without_pod("b").claim_deleted("b"),
            &|| three().with_disk("d").reserved("d").marked("d"),
            &|| Scene::formed(&["a", "b", "c"]).without_pod("b"),
            &|| Scene::begun(&["a", "b", "c"]),
        ] {
            assert!(step(nothing()).is_empty());
        }
        for stop in [
            &(|scene: &mut Scene| scene.desired.paused = true) as &dyn Fn(&mut Scene),
            &|scene| scene.desired.hibernate = true,
            &|scene| scene.observed.deleting = true,
            &|scene| scene.observed.claimed_by = Some("uid".into()),
        ] {
            let mut scene = three().without_pod("b");
            stop(&mut scene);
            assert!(step(scene).is_empty());
        }
    }
}
