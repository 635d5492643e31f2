//! Protection of stored S3 objects: server-side encryption and locks against deletion. Performs no I/O.

use api::storage::{ObjectLock, ObjectLockMode as Mode, ServerSideEncryption as Encryption};
use aws_sdk_s3::primitives::DateTime;
use aws_sdk_s3::types::{ObjectLockMode, ServerSideEncryption};

use crate::lock;
use crate::port::Error;

/// Server-side encryption and lock of stored objects. By default, objects are neither encrypted nor locked.
#[derive(Clone, Debug, Default)]
pub struct S3Protection {
    /// Server-side encryption.
    pub encryption: Option<Encryption>,
    /// The ID of the AWS KMS key.
    pub kms_key_id: Option<String>,
    /// The lock against deletion.
    pub lock: Option<ObjectLock>,
}

impl S3Protection {
    /// Whether encryption or a lock is configured.
    pub(super) fn is_enabled(&self) -> bool {
        self.encryption.is_some() || self.lock.is_some()
    }

    pub(super) fn encryption(&self) -> Option<ServerSideEncryption> {
        let encryption = self.encryption.as_ref()?;
        Some(ServerSideEncryption::from(encryption.to_string().as_str()))
    }

    pub(super) fn kms_key_id(&self) -> Option<String> {
        self.kms_key_id.clone()
    }

    pub(super) fn lock_mode(&self) -> Option<ObjectLockMode> {
        self.lock.as_ref().map(|lock| match &lock.mode {
            Mode::Governance => ObjectLockMode::Governance,
            Mode::Compliance => ObjectLockMode::Compliance,
            Mode::Unknown(other) => ObjectLockMode::from(other.as_str()),
        })
    }

    /// The end of the lock of an object that is uploaded now. `None` without a lock.
    pub(super) fn lock_until(&self) -> Result<Option<DateTime>, Error> {
        let until = self.lock.as_ref().map(lock::until).transpose()?;
        Ok(until.map(DateTime::from))
    }

    /// Fails if the store does not confirm the requested encryption, because some stores accept the request and do not
    /// encrypt the object.
    pub(super) fn check_encryption(
        &self,
        answered: Option<&ServerSideEncryption>,
    ) -> Result<(), Error> {
        match self.encryption() {
            Some(expected) if answered != Some(&expected) => Err(Error::Invalid {
                field: "serverSideEncryption".to_owned(),
                problem: format!(
                    "the store does not confirm the encryption {expected}: correct or remove it"
                ),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn store_that_ignores_encryption_is_rejected() {
        let protection = S3Protection {
            encryption: Some(Encryption::Kms),
            ..S3Protection::default()
        };
        assert!(
            protection
                .check_encryption(Some(&ServerSideEncryption::AwsKms))
                .is_ok()
        );
        for answered in [None, Some(&ServerSideEncryption::Aes256)] {
            let error = protection
                .check_encryption(answered)
                .unwrap_err()
                .to_string();
            assert!(
                error.starts_with(
                    "serverSideEncryption: the store does not confirm the encryption aws:kms"
                ),
                "{error}"
            );
        }
        assert!(S3Protection::default().check_encryption(None).is_ok());
    }

    #[test]
    fn object_lock_ends_after_configured_days() {
        let protection = S3Protection {
            lock: Some(ObjectLock {
                mode: Mode::Governance,
                days: 2,
            }),
            ..S3Protection::default()
        };
        let until = protection.lock_until().unwrap().unwrap().secs();
        let now = DateTime::from(SystemTime::now()).secs();
        assert!((172_795..=172_805).contains(&(until - now)));
        assert_eq!(protection.lock_mode(), Some(ObjectLockMode::Governance));
        assert_eq!(S3Protection::default().lock_until().unwrap(), None);
    }
}
