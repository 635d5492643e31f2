//! Whether a seed's pod will ever run again. Pure; the clock is passed in.

use api::conditions::Reason;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::observed::{Life, Trouble};

/// No pod is made in the place of one that ended sooner than this after it was made: a node that refuses every pod
/// would be asked again and again.
const REST: SignedDuration = SignedDuration::from_secs(10);

/// Whether a kubelet still has to do with it.
pub fn life(pod: &Pod, now: Timestamp) -> Life {
    let made = pod.metadata.creation_timestamp.as_ref();
    match ended(pod) {
        None => Life::Lives,
        Some(_) if made.is_some_and(|made| now.duration_since(made.0) < REST) => Life::EndedAtOnce,
        Some(_) => Life::Ended,
    }
}

/// A pod that was evicted, or went with its node in order, is not started again by anybody.
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
    fn a_pod_that_ended_for_good_is_told_from_one_that_is_started_again() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let pod = |phase: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": { "creationTimestamp": at(100).to_string() },
                "status": { "phase": phase },
            }))
            .unwrap()
        };
        for phase in ["Pending", "Running", "Unknown"] {
            assert_eq!(life(&pod(phase), at(999)), Life::Lives, "{phase}");
        }
        for phase in ["Failed", "Succeeded"] {
            assert_eq!(life(&pod(phase), at(109)), Life::EndedAtOnce, "{phase}");
            assert_eq!(life(&pod(phase), at(110)), Life::Ended, "{phase}");
        }
    }
}
