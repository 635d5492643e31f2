//! Continuous backup of an etcd cluster: records all changes after a snapshot, and replays them up to an exact
//! revision. A base is a stored snapshot with its revision. A segment is an object with consecutive changes. A base and
//! the segments after it are a chain. If the recorder misses changes, the chain ends with a gap, and a new chain begins
//! with a new base.
//!
//! docs/internals/continuous.md describes the mechanisms, and docs/internals/continuous-format.md specifies the stored
//! format. The agent of the backup operator records with this crate, and the seed of a restore replays with it.
//!
//! [`Capture`] records from a watch, [`Reader`] reads from a store, and [`replay`] writes to an etcd. [`Assembler`],
//! [`Recorder`], [`Chain`] and [`Verifier`] make the decisions, and perform no I/O.

mod agent;
mod assemble;
mod base;
mod capture;
mod chain;
mod copy;
mod digest;
mod encryption;
mod error;
#[cfg(test)]
mod fixture;
mod header;
mod locate;
mod message;
mod name;
mod outbox;
mod point;
mod progress;
mod record;
mod recorder;
mod removal;
mod replay;
mod retention;
mod segment;
mod snapshot;
mod source;
mod stored;
mod verify;

pub use agent::{Agent, AgentError, Settings};
pub use assemble::{Assembled, Assembler, MAX_TRANSACTION};
pub use base::{Base, BaseEncryption, BaseError, BaseKey, MAX_BASE, SnapshotObject, StoredBase};
pub use capture::{Capture, CaptureError, End, Extras};
pub use chain::{Chain, ChainFault, RangeError};
pub use copy::{CopiedPart, CopyError, copy_chain};
pub use digest::{Digest, ShortDigest};
pub use encryption::{EncryptedStore, described};
pub use error::SegmentError;
pub use header::{HEADER, Header};
pub use locate::{Located, locate};
pub use name::{BASE, BASES, BaseName, SNAPSHOTS, SegmentName};
pub use outbox::Spool;
pub use point::{FoundPoint, Point, PointError, find_point};
pub use progress::{BaseProgress, Held, Missing, Monitor, Progress};
pub use record::{Gap, GapReason, Hash, Lease, LeaseEnd, Moment, Record, Transaction};
pub use recorder::{Limits, Recorder, RecorderError};
pub use removal::remove_all;
pub use replay::{Options, ReplayError, Report, Target, Until, replay};
pub use segment::{MAX_BODY, MAX_MESSAGE, Sealed, Segment};
pub use snapshot::{TakeError, take_base};
pub use source::{Changes, Source};
pub use stored::{ReadError, Reader, Tip, bases, read_base, tip, write_base, write_segment};
pub use verify::{Verifier, VerifyError};
