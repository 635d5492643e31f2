//! Locks that protect stored objects from deletion. Performs no I/O.
//!
//! S3, Google Cloud Storage and Azure have the same two lock modes, governance and compliance, with different names.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::storage::{ObjectLock, ObjectLockMode as Mode};
use jiff::Timestamp;

use crate::port::Error;

/// The name of the field of the spec that configures the lock, for errors.
pub(crate) const FIELD: &str = "objectLock";

/// A store may round the end of a lock: the end that it reports may be up to this number of seconds earlier than the
/// requested end.
const ROUNDING: i64 = 60;

/// The end of the lock of an object that is uploaded now. Fails if `days` is less than 1.
pub(crate) fn until(lock: &ObjectLock) -> Result<SystemTime, Error> {
    let days = u64::try_from(lock.days).ok().filter(|days| *days > 0);
    let days = days.ok_or_else(|| Error::Invalid {
        field: format!("{FIELD}.days"),
        problem: format!("is {}: use 1 or more", lock.days),
    })?;
    Ok(SystemTime::now() + Duration::from_secs(days * 24 * 60 * 60))
}

/// The result of [`until`], without fractions of a second.
fn until_second(lock: &ObjectLock) -> Result<Timestamp, Error> {
    let since = until(lock)?.duration_since(UNIX_EPOCH).unwrap_or_default();
    let second = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    Timestamp::from_second(second).map_err(|error| Error::Invalid {
        field: format!("{FIELD}.days"),
        problem: format!(
            "is {}, and the end of the lock is no valid time: {error}",
            lock.days
        ),
    })
}

/// The lock of a new object in Google Cloud Storage or Azure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Retention {
    /// The store's name of the lock mode.
    pub(crate) mode: String,
    /// The end of the lock, in whole seconds.
    pub(crate) until: Timestamp,
}

impl Retention {
    /// The retention of an object in Google Cloud Storage
    /// (<https://cloud.google.com/storage/docs/object-lock>).
    pub(crate) fn google(lock: &ObjectLock) -> Result<Self, Error> {
        Ok(Self {
            mode: google_mode(lock).to_owned(),
            until: until_second(lock)?,
        })
    }

    /// The immutability policy of a blob in Azure
    /// (<https://learn.microsoft.com/azure/storage/blobs/immutable-storage-overview>).
    pub(crate) fn azure(lock: &ObjectLock) -> Result<Self, Error> {
        Ok(Self {
            mode: azure_mode(lock).to_owned(),
            until: until_second(lock)?,
        })
    }

    /// The end of the lock in the format of an HTTP header.
    pub(crate) fn http_date(&self) -> String {
        let text = self.until.strftime("%a, %d %b %Y %H:%M:%S GMT");
        text.to_string()
    }

    /// Whether the lock that the store reports has the mode of this lock, and ends at most [`ROUNDING`] seconds before
    /// [`Self::until`].
    pub(crate) fn is_confirmed_by(&self, mode: &str, until: Option<Timestamp>) -> bool {
        let is_long = |until: Timestamp| until.as_second() >= self.until.as_second() - ROUNDING;
        mode.eq_ignore_ascii_case(&self.mode) && until.is_some_and(is_long)
    }
}

/// The name of the lock mode in Google Cloud Storage.
fn google_mode(lock: &ObjectLock) -> &str {
    match &lock.mode {
        Mode::Governance => "Unlocked",
        Mode::Compliance => "Locked",
        Mode::Unknown(other) => other,
    }
}

/// The name of the lock mode in Azure.
fn azure_mode(lock: &ObjectLock) -> &str {
    match &lock.mode {
        Mode::Governance => "unlocked",
        Mode::Compliance => "locked",
        Mode::Unknown(other) => other,
    }
}

/// The error for a store that does not confirm the lock. Some servers accept a request with a lock, but do not lock the
/// object.
pub(crate) fn not_confirmed() -> Error {
    Error::Invalid {
        field: FIELD.to_owned(),
        problem: "the store does not confirm the lock: turn on locks of objects in the bucket or container, or remove \
                  the field"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(mode: Mode, days: i32) -> ObjectLock {
        ObjectLock { mode, days }
    }

    #[test]
    fn lock_modes_have_names_of_each_store() {
        let governance = lock(Mode::Governance, 1);
        let compliance = lock(Mode::Compliance, 1);
        assert_eq!(
            (google_mode(&governance), google_mode(&compliance)),
            ("Unlocked", "Locked")
        );
        assert_eq!(
            (azure_mode(&governance), azure_mode(&compliance)),
            ("unlocked", "locked")
        );
    }

    #[test]
    fn end_of_lock_has_format_of_each_store() {
        let two_days = lock(Mode::Governance, 2);
        let google = Retention::google(&two_days).unwrap().until;
        let seconds = google.as_second() - Timestamp::now().as_second();
        assert!((172_790..=172_800).contains(&seconds), "{google}");
        let text = google.to_string();
        assert!(text.ends_with('Z') && !text.contains('.'), "{text}");
        let azure = Retention {
            until: "2026-11-24T01:02:03Z".parse().unwrap(),
            ..Retention::azure(&two_days).unwrap()
        };
        assert_eq!(azure.http_date(), "Tue, 24 Nov 2026 01:02:03 GMT");
    }

    #[test]
    fn object_lock_with_other_mode_or_earlier_end_is_not_confirmed() {
        let wanted = Retention::azure(&lock(Mode::Compliance, 2)).unwrap();
        let after = |seconds: i64| Timestamp::from_second(wanted.until.as_second() + seconds).ok();
        assert!(wanted.is_confirmed_by("Locked", after(0)));
        assert!(wanted.is_confirmed_by("locked", after(86_400)));
        assert!(!wanted.is_confirmed_by("locked", after(-3_600)));
        assert!(!wanted.is_confirmed_by("locked", None));
        assert!(!wanted.is_confirmed_by("unlocked", after(0)));
    }

    #[test]
    fn object_lock_without_positive_days_is_rejected() {
        for days in [0, -1] {
            let error = Retention::google(&lock(Mode::Compliance, days)).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with("objectLock.days: is "), "{text}");
        }
    }
}
