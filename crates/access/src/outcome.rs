//! The errors of a reconcile.

use std::error::Error as StdError;
use std::fmt;

use api::problem::Chain;
use runtime::outcome::Failure;
use runtime::{Notice, apply};

use crate::reason::{Reason, Trouble};

/// A failed reconcile, and the changes that it made before the failure.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: Error,
    pub(crate) changes: Vec<Notice>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl StdError for Failed {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.error.source()
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self {
            error,
            changes: Vec::new(),
        }
    }
}

impl Failure for Failed {
    fn reason(&self) -> &'static str {
        self.error.reason()
    }

    fn notices(&self) -> &[Notice] {
        &self.changes
    }
}

/// Why a reconcile failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The object could not be read.
    #[error("the object cannot be read")]
    Read(#[source] kube::Error),
    /// The finalizer could not be set or removed.
    #[error("the finalizer cannot be changed")]
    Finalizer(#[source] apply::Error),
    /// The status could not be written.
    #[error("the status cannot be written")]
    Status(#[source] apply::Error),
    /// etcd did not acknowledge a change.
    #[error("etcd has not acknowledged a change: {change}")]
    Etcd {
        /// The change, in the past tense.
        change: String,
        #[source]
        source: etcd::Error,
    },
    /// etcd did not answer whether it accepts the password.
    #[error("etcd does not answer whether it accepts the password")]
    Password(#[source] etcd::Error),
    /// Another program has created the role or the user since the observation.
    #[error("another program has created the {0} at the same time")]
    Exists(&'static str),
    /// The observation is older than ten seconds, because the process was suspended or a server was slow.
    #[error(
        "the observation took longer than {} seconds, so the operator repeats it",
        apply::FRESH.as_secs()
    )]
    TooOld,
}

impl Error {
    /// The reason of the Event, and the label of the metric.
    fn reason(&self) -> &'static str {
        match self {
            Self::Read(error) => apply::kube_reason(error),
            Self::Finalizer(error) | Self::Status(error) => error.reason(),
            Self::Etcd { .. } | Self::Password(_) => "EtcdUnreachable",
            Self::Exists(_) | Self::TooOld => "Conflict",
        }
    }

    /// True if the observation is outdated. The operator then reconciles the object again after a short delay.
    pub(crate) fn is_outdated(&self) -> bool {
        match self {
            Self::Finalizer(error) | Self::Status(error) => {
                error.is_conflict() || error.is_missing()
            }
            Self::Exists(_) | Self::TooOld => true,
            Self::Read(_) | Self::Etcd { .. } | Self::Password(_) => false,
        }
    }

    /// The problem that the status reports.
    pub(crate) fn trouble(&self) -> Trouble {
        Trouble::new(Reason::StepFailed, Chain(self).to_string())
    }
}
