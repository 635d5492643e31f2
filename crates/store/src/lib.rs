//! The object-store port: a trait, one module for each provider, and a fake.
//!
//! Objects are written as streams, which are committed or aborted. No object is visible under its key before
//! [`Upload::commit`] has returned. Keys are full object names. This crate neither creates names nor matches patterns
//! of names.

mod abs;
pub mod compression;
mod failure;
#[cfg(feature = "fake")]
pub mod fake;
mod gcs;
pub mod grants;
mod http;
mod limits;
mod local;
mod oss;
mod parts;
mod port;
pub mod progress;
mod resume;
mod s3;
mod secret;
mod source;
#[cfg(feature = "testing")]
pub mod testing;

pub use abs::{AbsAccess, AbsCloud, AbsConfig, AbsStore};
pub use gcs::{GcsAccess, GcsConfig, GcsStore};
pub use local::LocalStore;
pub use port::{Committed, Error, Object, ObjectStream, Store, Unfinished, Upload};
pub use s3::{S3Access, S3Config, S3Keys, S3Protection, S3Store};
pub use source::{
    Directories, SecretData, SecretName, SecretNames, Secrets, Target, ambient, open, secrets_of,
};
