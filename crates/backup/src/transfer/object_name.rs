//! The name of a backup in the store. Performs no I/O.

use api::backup::name::{self, Numbered};
use jiff::Timestamp;

/// The name of a backup in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectName {
    /// The key in the spec. A new backup replaces the previous backup.
    Exact(String),
    /// `<path>_v<revision>_<time>`, for a periodic backup.
    Numbered {
        /// The path in the spec of the EtcdBackup.
        path: String,
        /// The start time of the backup in whole seconds, by which a later operator process finds the backup.
        time: Timestamp,
        /// The key of an incomplete object from an earlier attempt. The next attempt overwrites it.
        leftover: Option<String>,
    },
}

impl ObjectName {
    /// The numbered name with this start time. Without a start time, the exact name.
    pub fn of(path: String, numbered: Option<Timestamp>) -> Self {
        match numbered {
            Some(time) => Self::Numbered {
                path,
                time,
                leftover: None,
            },
            None => Self::Exact(path),
        }
    }

    /// The key of the incomplete object of an earlier attempt, if any.
    pub fn leftover(self) -> Option<String> {
        match self {
            Self::Numbered { leftover, .. } => leftover,
            Self::Exact(_) => None,
        }
    }

    /// The name for an attempt that overwrites the incomplete object `leftover`. An exact name stays the same.
    #[must_use]
    pub fn replacing(self, leftover: Option<String>) -> Self {
        match self {
            Self::Numbered { path, time, .. } => Self::Numbered {
                path,
                time,
                leftover,
            },
            exact @ Self::Exact(_) => exact,
        }
    }

    pub(super) fn key(&self, revision: i64) -> String {
        match self {
            Self::Exact(key)
            | Self::Numbered {
                leftover: Some(key),
                ..
            } => key.clone(),
            Self::Numbered { path, time, .. } => {
                let revision = u64::try_from(revision).unwrap_or_default();
                let time = *time;
                name::name(path, Numbered { time, revision })
            }
        }
    }
}
