//! Asks the kubelet to retry at once if the first start of an assigned pod has failed.
//!
//! A kubelet may request the PVC of a pod before the API server's node authorizer knows where the pod is; both watch
//! the same event. The request is refused: `no relationship found between node and this object`. The kubelet retries
//! only after `backOffPeriod` (10 s plus up to 50 %, `pkg/kubelet/kubelet.go`). Any change of the pod triggers an
//! immediate retry (`podWorkers.UpdatePod`), so one annotation saves ten seconds without a quorum. It is set once,
//! and has no effect on a pod that is slow for another reason, such as its image.

use std::collections::BTreeMap;
use std::time::Duration;

use api::names::ANNOTATION_NUDGED;
use jiff::Timestamp;
use member::MetadataPatch;

use crate::plan::age::age;
use crate::plan::{Draft, actions};
use crate::snapshot::{Observed, Pod};

/// Maximum time between assignment and address of a pod: a start takes less than one second, and the API server
/// reports creation times in whole seconds.
const PROMPT: Duration = Duration::from_secs(2);
/// After this time the cause is not transient.
const LATE: Duration = Duration::from_secs(20);

/// Triggers a kubelet retry for pods that have not begun to start.
pub(super) fn for_slow_starts(observed: &Observed, now: Timestamp, draft: &mut Draft) {
    let waits = |pod: &Pod| {
        let assigned = pod.node.is_some() && pod.lost_since.is_none() && pod.stays();
        assigned && pod.durable && pod.owned && !pod.addressed && !pod.retry_requested
    };
    for (name, pod) in observed.pods.iter().filter(|(_, pod)| waits(pod)) {
        let since = age(pod.created, now);
        if since < PROMPT {
            let left = PROMPT.saturating_sub(since);
            draft.requeue = draft.requeue.min(left);
        } else if since < LATE {
            let annotations = [(ANNOTATION_NUDGED.to_owned(), Some("true".to_owned()))];
            draft.say(format!("trigger a sync of the pod {name} by the kubelet"));
            let patch = MetadataPatch {
                labels: BTreeMap::new(),
                annotations: annotations.into(),
            };
            draft.add(actions::change_metadata(name, &pod.uid, &patch));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::scene::Scene;
    use crate::plan::tests::writes::Write;

    fn retry_requested(scene: &Scene) -> Vec<String> {
        let writes = scene.writes().into_iter();
        let retry_requested = writes.filter_map(|write| match write {
            Write::PatchMetadata { member, .. } => Some(member),
            _ => None,
        });
        retry_requested.collect()
    }

    #[test]
    fn triggers_kubelet_retry_once_for_stalled_pod() {
        let waiting = |seconds: i64, change: &dyn Fn(&mut Pod)| {
            let mut scene = Scene::formed(&["a", "b", "c"]).durable().not_running("b");
            let pod = scene.observed.pods.get_mut("b").unwrap();
            pod.node = Some("node-1".to_owned());
            pod.created = Timestamp::from_second(1000 - seconds).unwrap();
            change(pod);
            scene
        };
        assert_eq!(retry_requested(&waiting(2, &|_| ())), ["b"]);
        for (seconds, change) in [
            (1, &(|_: &mut Pod| ()) as &dyn Fn(&mut Pod)),
            (30, &|_| ()),
            (3, &|pod| pod.retry_requested = true),
            (3, &|pod| pod.addressed = true),
            (3, &|pod| pod.node = None),
            (3, &|pod| pod.terminating = true),
            (3, &|pod| pod.lost_since = Some(Timestamp::UNIX_EPOCH)),
        ] {
            assert_eq!(
                retry_requested(&waiting(seconds, change)),
                Vec::<String>::new()
            );
        }
        let young = waiting(1, &|_| ());
        assert!(young.plan().requeue <= Duration::from_secs(1));
    }
}
