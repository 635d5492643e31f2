//! The errors of actions.

use std::time::Duration;

use etcd::Error as EtcdError;
use runtime::apply::FRESH;

use crate::action::Rejection;
use crate::reason::Reason;

/// The reason why an action failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server rejected the write, or could not be reached.
    #[error("a request to the API server failed")]
    Api(#[from] runtime::apply::Error),
    /// An object of this name already exists.
    #[error("{what} already exists")]
    Exists {
        /// Kind and name of the existing object.
        what: String,
    },
    /// The object was changed or replaced since the observation.
    #[error("{what} has changed since it was read")]
    Changed {
        /// Kind and name of the changed object.
        what: String,
    },
    /// The observation is too old for writes, for example because the process was suspended. If the chain has set the
    /// annotation `started` on a Service, the executor removes this annotation.
    #[error("the operator's observation of the cluster is older than {} seconds: the operator reads the cluster again", FRESH.as_secs())]
    TooOld,
    /// The member list differs from the list from which the change was planned.
    #[error("the member list has changed since it was read")]
    ListChanged,
    /// etcd rejected the call, or did not answer.
    #[error("cannot {what}")]
    Etcd {
        /// The call, as an imperative phrase.
        what: String,
        /// The answer of etcd.
        #[source]
        source: EtcdError,
    },
    /// An object that the write needs is missing.
    #[error("{0}")]
    Missing(String),
    /// The API server rejects the request because of the configuration of the Kubernetes cluster.
    #[error("{}: {why}; {}", rejection.what, rejection.remedy)]
    Rejected {
        /// The failed action and the remedy.
        rejection: Rejection,
        /// The message of the API server.
        why: String,
    },
    /// A certificate could not be created.
    #[error("cannot create the certificate in Secret {what}")]
    Certificate {
        /// Name of the certificate's Secret.
        what: String,
        /// Why the certificate could not be created.
        #[source]
        source: crate::authority::Error,
    },
    /// An earlier start of this member was rejected, and its back-off has not ended.
    #[error("{said}")]
    Held {
        /// The reason that was reported when the API server rejected the earlier start.
        reason: Reason,
        /// The message that was reported when the API server rejected the earlier start.
        said: String,
        /// The remaining time of the back-off.
        left: Duration,
    },
}

impl Error {
    /// True if planning again resolves the error: the object changed since the observation, or etcd is not ready yet.
    /// The operator then plans again shortly and reports no failure.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Exists { .. } | Self::Changed { .. } | Self::ListChanged | Self::TooOld => true,
            Self::Etcd { source, .. } => {
                !matches!(source, EtcdError::AccessDenied(_) | EtcdError::Tls(_))
            }
            Self::Api(error) => Reason::from(error) == Reason::Conflict,
            Self::Certificate { .. }
            | Self::Missing(_)
            | Self::Held { .. }
            | Self::Rejected { .. } => false,
        }
    }

    /// True if the API server, or a proxy in front of it, could not serve the write at the moment, or timed out.
    pub(super) fn is_for_now(&self) -> bool {
        let Self::Api(runtime::apply::Error::Api { source, .. }) = self else {
            return false;
        };
        matches!(&**source, kube::Error::Api(status) if matches!(status.code, 429 | 503 | 504))
    }

    /// True if an admission webhook did not answer (`ErrCallingWebhook` in apiserver's `pkg/util/webhook`). The API
    /// server reports this as an internal error, and has stored nothing, because admission runs before the object is
    /// stored.
    fn is_before_it(&self) -> bool {
        let Self::Api(runtime::apply::Error::Api { source, .. }) = self else {
            return false;
        };
        matches!(&**source, kube::Error::Api(status)
            if status.code == 500 && status.message.contains("failed calling webhook"))
    }

    /// True if the write certainly had no effect: it was never sent, or the API server rejected it. After a missing
    /// answer or an internal error, the effect is unknown.
    pub(super) fn says_not_done(&self) -> bool {
        match self {
            Self::TooOld
            | Self::Missing(_)
            | Self::Certificate { .. }
            | Self::Held { .. }
            | Self::Rejected { .. } => true,
            // A `Conflict` (409) is a rejection by admission here, such as a quota, because `Exists` and `Changed` are
            // separate errors.
            Self::Api(error) => {
                let said = matches!(
                    Reason::from(error),
                    Reason::Forbidden | Reason::Refused | Reason::Throttled | Reason::Conflict
                );
                said || self.is_before_it()
            }
            Self::Exists { .. } | Self::Changed { .. } | Self::ListChanged | Self::Etcd { .. } => {
                false
            }
        }
    }
}

impl Error {
    /// The reason of the error, for logs, Events and metrics.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Api(error) => Reason::from(error),
            Self::Exists { .. } | Self::Changed { .. } | Self::ListChanged | Self::TooOld => {
                Reason::Conflict
            }
            Self::Etcd { source, .. } => match source {
                EtcdError::Unreachable(_) | EtcdError::Timeout(_) | EtcdError::AnswerLost(_) => {
                    Reason::EtcdUnreachable
                }
                EtcdError::Unavailable(_) => Reason::EtcdRefused,
                EtcdError::AccessDenied(_) => Reason::EtcdAccessDenied,
                EtcdError::Tls(_) => Reason::EtcdTls,
                EtcdError::MemberNotFound | EtcdError::PeerUrlExists | EtcdError::Other(_) => {
                    Reason::EtcdError
                }
            },
            Self::Missing(_) => Reason::Missing,
            Self::Certificate { .. } => Reason::CertificateNotMade,
            Self::Rejected { rejection, .. } => rejection.reason,
            Self::Held { reason, .. } => *reason,
        }
    }
}
