//! Whether a seed's pod can still run. Pure; the time is an argument.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::reason::{Reason, Trouble};
use crate::snapshot::Life;

/// Shortest time between two pods of a seed. It limits the rate of pods on a node that rejects every pod.
const REST: SignedDuration = SignedDuration::from_secs(10);
/// Longest time between two pods of a seed. Nodes without free resources may evict other pods for a new one.
const LONGEST: SignedDuration = SignedDuration::from_mins(5);
/// Divisor of the time from the start of the seed to the creation of the pod, for the pause.
const PART: i32 = 4;

/// The life of a pod of a seed that was started at `began`.
pub(in crate::observe) fn life(pod: &Pod, began: Option<Timestamp>, now: Timestamp) -> Life {
    match (ended(pod), is_young(pod, began, now)) {
        (None, _) => Life::Lives,
        (Some(_), true) => Life::EndedAtOnce,
        (Some(_), false) => Life::Ended,
    }
}

/// Whether it is too early to replace the pod.
pub(in crate::observe) fn is_young(pod: &Pod, began: Option<Timestamp>, now: Timestamp) -> bool {
    let made = pod.metadata.creation_timestamp.as_ref().map(|made| made.0);
    made.is_some_and(|made| now.duration_since(made) < rest(began, made))
}

fn rest(began: Option<Timestamp>, made: Timestamp) -> SignedDuration {
    let until_made = began.map_or(SignedDuration::ZERO, |began| made.duration_since(began));
    (until_made / PART).clamp(REST, LONGEST)
}

/// The problem of a pod that has ended. A pod that was evicted or shut down with its node is not restarted.
pub(super) fn ended(pod: &Pod) -> Option<Trouble> {
    let status = pod.status.as_ref()?;
    if !matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")) {
        return None;
    }
    let words = [status.reason.as_deref(), status.message.as_deref()];
    let words: Vec<&str> = words.into_iter().flatten().collect();
    let why = if words.is_empty() {
        String::new()
    } else {
        format!(" ({})", words.join(": "))
    };
    let text = format!("the seed's pod has ended for good{why}");
    Some(Trouble::new(Reason::PodNotStarting, text))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn distinguishes_ended_pods_from_restarting_pods() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let pod = |phase: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": { "creationTimestamp": at(100).to_string() },
                "status": { "phase": phase },
            }))
            .unwrap()
        };
        let (recent, long_ago) = (Some(at(90)), Some(at(-3_500)));
        for phase in ["Pending", "Running", "Unknown"] {
            assert_eq!(life(&pod(phase), recent, at(999)), Life::Lives, "{phase}");
        }
        for phase in ["Failed", "Succeeded"] {
            for (began, rest) in [
                (None, 10),
                (recent, 10),
                (Some(at(-60)), 40),
                (long_ago, 300),
            ] {
                let life = |now| life(&pod(phase), began, at(now));
                assert_eq!(life(100 + rest - 1), Life::EndedAtOnce, "{phase} {rest}");
                assert_eq!(life(100 + rest), Life::Ended, "{phase} {rest}");
            }
        }
    }
}
