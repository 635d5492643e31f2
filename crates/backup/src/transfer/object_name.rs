//! The name of a backup in the store. Pure.

use api::backup::name::{self, Numbered};
use jiff::Timestamp;

/// What the object is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// Exactly so: one backup, which replaces the last.
    Exact(String),
    /// `<path>_v<revision>_<time>`: one of many.
    Numbered {
        /// The path of the spec.
        path: String,
        /// When this backup began, to the second. By it the operator that comes after knows it again.
        time: Timestamp,
        /// What an earlier attempt left under its name: the next attempt replaces it.
        left: Option<String>,
    },
}

impl Name {
    /// The name below a path: numbered by the time at which the backup began, or exactly the path.
    pub fn of(path: String, numbered: Option<Timestamp>) -> Self {
        match numbered {
            Some(time) => Self::Numbered {
                path,
                time,
                left: None,
            },
            None => Self::Exact(path),
        }
    }

    /// What an earlier attempt has left under its name.
    pub fn left(self) -> Option<String> {
        match self {
            Self::Numbered { left, .. } => left,
            Self::Exact(_) => None,
        }
    }

    /// The same name, which replaces what an earlier attempt has left.
    #[must_use]
    pub fn replacing(self, key: Option<String>) -> Self {
        match self {
            Self::Numbered { path, time, .. } => Self::Numbered {
                path,
                time,
                left: key,
            },
            exact @ Self::Exact(_) => exact,
        }
    }

    pub(super) fn key(&self, revision: i64) -> String {
        match self {
            Self::Exact(key)
            | Self::Numbered {
                left: Some(key), ..
            } => key.clone(),
            Self::Numbered { path, time, .. } => {
                let revision = u64::try_from(revision).unwrap_or_default();
                let time = *time;
                name::name(path, Numbered { time, revision })
            }
        }
    }
}
