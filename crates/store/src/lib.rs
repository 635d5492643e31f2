//! The object-store port: a trait, one file a provider, a fake.
//!
//! Objects are written as a stream that is committed or aborted: nothing is visible under a key before
//! [`Upload::commit`] has returned. Keys are full object names; nothing here invents or matches names.

mod port;

pub use port::{Committed, Error, Object, ObjectStream, Store, Upload};
