//! Access to object stores: the trait [`Store`], one module for each provider, and a fake store for tests.
//!
//! Uploads are streams. An object becomes visible under its key only when the upload is committed. The callers of this
//! crate choose the keys.

mod abs;
pub mod compression;
pub mod encryption;
mod failure;
#[cfg(feature = "fake")]
pub mod fake;
mod gcs;
pub mod grants;
mod http;
mod limits;
mod local;
mod lock;
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
pub mod unpack;

pub use abs::{AbsAccess, AbsCloud, AbsConfig, AbsStore};
pub use gcs::{GcsAccess, GcsConfig, GcsStore};
pub use local::LocalStore;
pub use port::{Committed, Error, Object, ObjectStream, Store, Unfinished, Upload};
pub use s3::{S3Access, S3Config, S3Keys, S3Protection, S3Store};
pub use secret::mounted;
pub use source::{Directories, SecretData, Secrets, Target, ambient, open};
