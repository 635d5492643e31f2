//! Determines whether the pod of a seed has ended and may be replaced. Performs no I/O.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::reason::{Reason, Trouble};
use crate::snapshot::Life;

/// Minimum delay between the creations of two pods of a seed. A node may reject each new pod at once, so the delay
/// limits the number of pods.
const MIN_PAUSE: SignedDuration = SignedDuration::from_secs(10);
/// Maximum delay between the creations of two pods of a seed. The delay grows to this maximum, because a node without
/// free resources may evict other pods for each new pod.
const MAX_PAUSE: SignedDuration = SignedDuration::from_mins(5);
/// The delay is the age of the seed at the creation of the pod, divided by this number.
const PAUSE_DIVISOR: i32 = 4;

/// Returns whether the pod has ended, and if so, whether it may be replaced now ([`Life::Ended`]) or later
/// ([`Life::EndedRecently`]). `began` is the start of the seed.
pub(in crate::observe) fn life(pod: &Pod, began: Option<Timestamp>, now: Timestamp) -> Life {
    match (ended(pod), is_recent(pod, began, now)) {
        (None, _) => Life::Active,
        (Some(_), true) => Life::EndedRecently,
        (Some(_), false) => Life::Ended,
    }
}

/// True if the pod was created so recently that it must not be replaced yet.
pub(in crate::observe) fn is_recent(pod: &Pod, began: Option<Timestamp>, now: Timestamp) -> bool {
    let created = pod.metadata.creation_timestamp.as_ref();
    created.is_some_and(|created| now.duration_since(created.0) < pause(began, created.0))
}

fn pause(began: Option<Timestamp>, created: Timestamp) -> SignedDuration {
    let elapsed = began.map_or(SignedDuration::ZERO, |began| created.duration_since(began));
    (elapsed / PAUSE_DIVISOR).clamp(MIN_PAUSE, MAX_PAUSE)
}

/// The problem of a pod that has ended, for example because it was evicted or its node was shut down. Kubernetes does
/// not restart it.
pub(super) fn ended(pod: &Pod) -> Option<Trouble> {
    let status = pod.status.as_ref()?;
    if !matches!(status.phase.as_deref(), Some("Failed" | "Succeeded")) {
        return None;
    }
    let parts = [status.reason.as_deref(), status.message.as_deref()];
    let parts: Vec<&str> = parts.into_iter().flatten().collect();
    let why = if parts.is_empty() {
        String::new()
    } else {
        format!(" ({})", parts.join(": "))
    };
    let text = format!("the seed's pod has ended and is not restarted{why}");
    Some(Trouble::new(Reason::PodNotStarting, text))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_failed_or_succeeded_pod_is_ended_after_pause() {
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
            assert_eq!(life(&pod(phase), recent, at(999)), Life::Active, "{phase}");
        }
        for phase in ["Failed", "Succeeded"] {
            for (began, pause) in [
                (None, 10),
                (recent, 10),
                (Some(at(-60)), 40),
                (long_ago, 300),
            ] {
                let life = |now| life(&pod(phase), began, at(now));
                assert_eq!(
                    life(100 + pause - 1),
                    Life::EndedRecently,
                    "{phase} {pause}"
                );
                assert_eq!(life(100 + pause), Life::Ended, "{phase} {pause}");
            }
        }
    }
}
