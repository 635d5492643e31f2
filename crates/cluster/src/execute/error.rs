//! Why a step was not carried out.

use std::time::Duration;

use etcd::Error as EtcdError;

use crate::action::Rejection;
use crate::reason::Reason;

/// How old an observation may be when a write is sent. Shorter than the lease: a process that slept through its
/// lease does not finish what it began (invariant 11). What it has marked and not gone on with it takes back.
pub(super) const LONGEST: Duration = Duration::from_secs(10);

/// Why a write was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server refused, or could not be reached.
    #[error("the API server")]
    Api(#[from] runtime::apply::Error),
    /// An object of this name was there before.
    #[error("{what} exists already")]
    Exists {
        /// Kind and name.
        what: String,
    },
    /// The object was changed, or is another one by now.
    #[error("{what} has changed since it was read")]
    Changed {
        /// Kind and name.
        what: String,
    },
    /// The process slept: what the step was planned from is too old to act upon.
    #[error("the step is older than {} seconds and is planned again", LONGEST.as_secs())]
    TooOld,
    /// The member list is not the one the change was planned from.
    #[error("the member list has changed since it was read")]
    ListChanged,
    /// etcd refused, or did not answer.
    #[error("cannot {what}")]
    Etcd {
        /// What was asked of it.
        what: String,
        /// What it answered.
        #[source]
        source: EtcdError,
    },
    /// Something the write needs is not there.
    #[error("{0}")]
    Missing(String),
    /// The API server rejects the request because of the configuration of the Kubernetes cluster.
    #[error("{}: {why}; {}", rejection.what, rejection.remedy)]
    Rejected {
        /// What does not happen, and the remedy.
        rejection: Rejection,
        /// The message of the API server.
        why: String,
    },
    /// A certificate could not be made.
    #[error("cannot make Secret {what}")]
    Certificate {
        /// Its Secret.
        what: String,
        /// Why.
        #[source]
        source: crate::authority::Error,
    },
    /// It was refused a moment ago, and is tried again later.
    #[error("{said}")]
    Held {
        /// The kind of the refusal.
        reason: Reason,
        /// What was said then.
        said: String,
        /// How long it waits yet.
        left: Duration,
    },
}

impl Error {
    /// A race was lost or etcd is not ready: planned again shortly, and no failure.
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

    /// The API server, or who stands before it, could not take the write, or has given up waiting for it.
    pub(super) fn is_for_now(&self) -> bool {
        let Self::Api(runtime::apply::Error::Api { source, .. }) = self else {
            return false;
        };
        matches!(&**source, kube::Error::Api(status) if matches!(status.code, 429 | 503 | 504))
    }

    /// A webhook that has to be asked before anything is stored did not answer (`ErrCallingWebhook` in apiserver's
    /// `pkg/util/webhook`). The API server calls that an error of its own.
    fn is_before_it(&self) -> bool {
        let Self::Api(runtime::apply::Error::Api { source, .. }) = self else {
            return false;
        };
        matches!(&**source, kube::Error::Api(status)
            if status.code == 500 && status.message.contains("failed calling webhook"))
    }

    /// The write surely was not carried out: it was never sent, or the API server said no. Not so when it did not
    /// answer, or with an error of its own.
    pub(super) fn says_not_done(&self) -> bool {
        match self {
            Self::TooOld
            | Self::Missing(_)
            | Self::Certificate { .. }
            | Self::Held { .. }
            | Self::Rejected { .. } => true,
            // A conflict is somebody else's (a quota's): that the object exists already is told in another way.
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
    /// What kind of failure it is.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Api(error) => Reason::from(error),
            Self::Exists { .. } | Self::Changed { .. } | Self::ListChanged | Self::TooOld => {
                Reason::Conflict
            }
            Self::Etcd { source, .. } => match source {
                EtcdError::Unreachable(_) | EtcdError::Timeout(_) => Reason::EtcdUnreachable,
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
