//! The trait and its words. No I/O here.

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;

/// An object as listed or looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The full key inside the bucket.
    pub key: String,
    /// Bytes.
    pub size: u64,
    /// When it was last written, in seconds since the epoch; `None` when the store does not say.
    pub modified_unix_seconds: Option<i64>,
    /// What tells this writing of the key from any other; `None` when the store does not say, as some do in listings.
    pub tag: Option<String>,
}

/// An object being read.
pub struct ObjectStream {
    /// Bytes of the whole object.
    pub size: u64,
    /// The content, in order.
    pub chunks: BoxStream<'static, Result<Bytes, Error>>,
}

/// An upload that was begun and has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The full key it is for.
    pub key: String,
    /// What the store calls it.
    pub id: String,
    /// When it was begun, as the store tells it.
    pub begun_unix_seconds: i64,
}

impl Unfinished {
    /// How much later than its process an upload may seem to be: times are whole seconds, clocks differ, and some
    /// stores (versitygw) tell the time of the last part, which they may still take in when the process is dead.
    const BLUR: i64 = 5;

    /// Whether it was begun before a process that was started at `unix_seconds`.
    pub fn is_older_than(&self, unix_seconds: i64) -> bool {
        self.begun_unix_seconds < unix_seconds.saturating_add(Self::BLUR)
    }
}

/// What the store acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Bytes the store holds under the key, asked of the store after the commit.
    pub size: u64,
    /// As [`Object::tag`] has it while nobody writes to the key again.
    pub tag: Option<String>,
}

/// Why a store call failed. The text names the remedy and never carries credentials.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The bucket or container does not exist.
    #[error("bucket {bucket:?} does not exist: create it or correct the path")]
    NoSuchBucket {
        /// The name asked for.
        bucket: String,
    },
    /// No object under the key.
    #[error("object {key:?} does not exist")]
    NoSuchObject {
        /// The key asked for.
        key: String,
    },
    /// The identity is not allowed to do this, or the credentials are wrong.
    #[error("access denied: {0}; check the credentials in the Secret and the bucket's policy")]
    AccessDenied(String),
    /// The clocks differ too much for signed requests.
    #[error("the store refuses the request's time: set this node's clock ({0})")]
    ClockSkew(String),
    /// The server's certificate is not trusted.
    #[error(
        "the store's certificate is not trusted: {0}; for S3 set caSecret to its CA, for other stores add the CA to \
         the operator's certificates (SSL_CERT_FILE)"
    )]
    Certificate(String),
    /// Nothing answered.
    #[error(
        "the store at {endpoint} cannot be reached: correct the endpoint, or look at the network and its DNS ({detail})"
    )]
    Unreachable {
        /// Where.
        endpoint: String,
        /// What the connection said.
        detail: String,
    },
    /// No answer in time.
    #[error("the store did not answer in time: look at the store and the network ({0})")]
    Timeout(String),
    /// No room for the object.
    #[error("no space is left: {0}; enlarge the volume or remove old backups")]
    Full(String),
    /// What a Secret holds cannot work.
    #[error("{key}: {problem}")]
    Secret {
        /// The key of the Secret, or the field of the spec that names the Secret.
        key: String,
        /// What is wrong and what to do; no value.
        problem: String,
    },
    /// The configuration cannot work; names the field.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field of the spec.
        field: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Anything else.
    #[error("the store answered: {0}")]
    Other(String),
}

/// One bucket, reached with one identity.
#[async_trait]
pub trait Store: Send + Sync {
    /// Where objects go, for people: `s3://bucket`.
    fn location(&self) -> String;
    /// Begins an object. Nothing is visible under `key` before the commit.
    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error>;
    /// Writes a small object in one request.
    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error>;
    /// Opens an object for reading from its beginning; reads are resumed at the offset reached when a connection breaks.
    async fn get(&self, key: &str) -> Result<ObjectStream, Error>;
    /// Looks an object up; `None` when there is none.
    async fn head(&self, key: &str) -> Result<Option<Object>, Error>;
    /// Lists every object whose key starts with `prefix`, through all pages.
    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error>;
    /// Deletes one object; deleting one that is not there succeeds.
    async fn delete(&self, key: &str) -> Result<(), Error>;
    /// Lists the uploads whose key starts with `prefix` that were begun and never ended, through all pages. Empty
    /// where nothing of them can be seen and the store removes it by itself (Google after a week, Azure too).
    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error>;
    /// Removes what one of [`Store::unfinished`] has left; one that is gone is no failure. Objects are not touched.
    async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error>;
    /// Removes what uploads of exactly this key have left that were begun before the time given, in seconds since
    /// the epoch: their process died.
    async fn discard_unfinished(&self, key: &str, begun_before: i64) -> Result<(), Error> {
        for unfinished in self.unfinished(key).await? {
            // Invariant 13: the prefix also finds other objects' uploads.
            if unfinished.key == key && unfinished.is_older_than(begun_before) {
                self.discard(&unfinished).await?;
            }
        }
        Ok(())
    }
}

/// An object being written in constant memory.
#[async_trait]
pub trait Upload: Send {
    /// Takes the next bytes; waits while the fixed memory budget is in use.
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error>;
    /// Makes the object visible, all of it or nothing, and asks the store what it holds.
    async fn commit(self: Box<Self>) -> Result<Committed, Error>;
    /// Gives up: nothing is left behind in the store.
    async fn abort(self: Box<Self>) -> Result<(), Error>;
}
