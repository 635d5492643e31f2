//! The failures of a mirror's task, and their conversion for the status. Performs no I/O.

use etcd::{ClusterId, Error, PageError};

use crate::decide::Refusal;
use crate::follow::FollowError;
use crate::reason::{Reason, Trouble};

/// One of the two clusters of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The cluster whose keys are copied.
    Source,
    /// The cluster to which the keys are copied.
    Destination,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// Why an attempt of a mirror has ended.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A call to a cluster has failed.
    #[error("{0:?}: {1}")]
    Etcd(Side, #[source] Error),
    /// The endpoints belong to another cluster than the EtcdCluster.
    #[error("{side:?}: found cluster {found}, expected {expected}")]
    OtherCluster {
        /// The side of the mirror to which the endpoints belong.
        side: Side,
        /// The cluster ID that an endpoint has reported.
        found: ClusterId,
        /// The cluster ID in the status of the EtcdCluster.
        expected: ClusterId,
    },
    /// One key with its value exceeds the limit of a response.
    #[error("{0:?}: a value is too large")]
    ValueTooLarge(Side),
    /// The mirror must not work until a user acts.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The checkpoint has changed, for example by an earlier attempt whose answer was lost. The next attempt reads the
    /// checkpoint again.
    #[error("the checkpoint has changed")]
    CheckpointChanged,
    /// The source was replaced during the attempt. The next attempt decides whether the mirror may continue.
    #[error("the source was replaced")]
    SourceChanged,
    /// The events of the source cannot be applied.
    #[error(transparent)]
    Follow(#[from] FollowError),
    /// The source sends no events, although it has newer revisions.
    #[error("the watch makes no progress")]
    WatchStalled,
}

impl Failure {
    /// Converts the error of a page. A caller that reads an older revision handles `Compacted` itself. Here, the error
    /// means that etcd has compacted the newest revision during the read.
    pub(crate) fn of_page(side: Side, error: PageError) -> Self {
        match error {
            PageError::Failed(error) => Self::Etcd(side, error),
            PageError::TooLarge => Self::ValueTooLarge(side),
            PageError::Compacted => {
                let text = "etcd has compacted the newest revision during the read".to_owned();
                Self::Etcd(side, Error::Unavailable(text))
            }
        }
    }

    /// The problem for the status.
    pub fn trouble(&self) -> Trouble {
        match self {
            Self::Etcd(side, error) => of_etcd(*side, error),
            Self::OtherCluster {
                side,
                found,
                expected,
            } => Trouble::new(
                unreachable(*side),
                format!(
                    "the endpoints of the {} belong to etcd cluster {found}, but its EtcdCluster has the cluster ID \
                     {expected}: the mirror waits until the EtcdCluster has formed",
                    side.name()
                ),
            ),
            Self::ValueTooLarge(side) => Trouble::new(
                Reason::StepFailed,
                format!(
                    "a value in the {} exceeds 16 MiB, which a mirror cannot copy: delete the key, or store a smaller \
                     value",
                    side.name()
                ),
            ),
            Self::Refused(refusal @ Refusal::SourceReplaced { .. }) => {
                Trouble::new(Reason::SourceReplaced, refusal.to_string())
            }
            Self::Refused(refusal) => Trouble::new(Reason::Conflict, refusal.to_string()),
            Self::CheckpointChanged => Trouble::new(
                Reason::Starting,
                "the checkpoint in the destination has changed, and is read again",
            ),
            Self::SourceChanged => Trouble::new(
                Reason::SourceUnreachable,
                "the source was replaced by another cluster or by an earlier state, and the mirror connects again",
            ),
            Self::Follow(error) => Trouble::new(
                Reason::SourceUnreachable,
                format!(
                    "the changes of the source cannot be applied, and the watch restarts: {error}"
                ),
            ),
            Self::WatchStalled => Trouble::new(
                Reason::SourceUnreachable,
                "the source sends no changes, although it has newer revisions, and the watch restarts: check the \
                 member of the source",
            ),
        }
    }

    /// True if only a user can end the failure. The mirror then retries with long pauses.
    pub(crate) fn needs_user(&self) -> bool {
        match self {
            Self::Refused(_) | Self::ValueTooLarge(_) => true,
            Self::Etcd(_, error) => matches!(error, Error::AccessDenied(_) | Error::Tls(_)),
            Self::OtherCluster { .. }
            | Self::CheckpointChanged
            | Self::SourceChanged
            | Self::Follow(_)
            | Self::WatchStalled => false,
        }
    }
}

fn unreachable(side: Side) -> Reason {
    match side {
        Side::Source => Reason::SourceUnreachable,
        Side::Destination => Reason::DestinationUnreachable,
    }
}

fn of_etcd(side: Side, error: &Error) -> Trouble {
    let name = side.name();
    match error {
        Error::AccessDenied(_) => Trouble::new(
            Reason::AccessDenied,
            format!(
                "the {name} denies access: {error}. Correct the Secret of its credentials, or grant the user of the \
                 mirror its keys"
            ),
        ),
        Error::Other(text)
            if side == Side::Destination
                && ["request is too large", "too many operations"]
                    .iter()
                    .any(|limit| text.contains(limit)) =>
        {
            Trouble::new(
                Reason::DestinationRejects,
                format!(
                    "the destination rejects a transaction: {error}. Set spec.etcd.maxRequestBytes and \
                     spec.etcd.maxTxnOps of its EtcdCluster to at least the values of the source, plus 8 KiB"
                ),
            )
        }
        _ => Trouble::new(
            unreachable(side),
            format!("a call to the {name} has failed, and is retried: {error}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_reported_with_its_side_and_reason() {
        let text = || "e: x".to_owned();
        for (failure, reason, needs_user) in [
            (
                Failure::Etcd(Side::Source, Error::Timeout(text())),
                Reason::SourceUnreachable,
                false,
            ),
            (
                Failure::Etcd(Side::Destination, Error::AnswerLost(text())),
                Reason::DestinationUnreachable,
                false,
            ),
            (
                Failure::Etcd(Side::Source, Error::AccessDenied(text())),
                Reason::AccessDenied,
                true,
            ),
            (
                Failure::Etcd(
                    Side::Destination,
                    Error::Other("e: request is too large".to_owned()),
                ),
                Reason::DestinationRejects,
                false,
            ),
            (
                Failure::Refused(Refusal::NotEmpty {
                    prefix: "/a/".to_owned(),
                }),
                Reason::Conflict,
                true,
            ),
            (
                Failure::of_page(Side::Source, PageError::TooLarge),
                Reason::StepFailed,
                true,
            ),
        ] {
            let trouble = failure.trouble();
            assert_eq!(trouble.reason, reason, "{trouble}");
            assert_eq!(failure.needs_user(), needs_user, "{trouble}");
            let side = matches!(failure, Failure::Refused(_))
                || trouble.message.contains("the source")
                || trouble.message.contains("the destination");
            assert!(side, "{trouble}");
        }
    }
}
