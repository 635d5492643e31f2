//! The trait `Store` and its types. Performs no I/O.

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;

/// The metadata of an object, as a store reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The full key inside the bucket.
    pub key: String,
    /// Size in bytes.
    pub size: u64,
    /// Time of the last write, in seconds since the epoch. `None` if the store does not report the time.
    pub modified_unix_seconds: Option<i64>,
    /// Identifies one version of the object, for example an entity tag. `None` if the store does not report a tag. Some
    /// stores omit the tag in a listing.
    pub tag: Option<String>,
}

/// A stream of an object's content.
pub struct ObjectStream {
    /// Size of the whole object in bytes.
    pub size: u64,
    /// The content of the object, in order.
    pub chunks: BoxStream<'static, Result<Bytes, Error>>,
}

/// An upload that was neither committed nor aborted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The full key of the object.
    pub key: String,
    /// The store's identifier of the upload.
    pub id: String,
    /// Start of the upload in seconds since the epoch, by the clock of the store.
    pub begun_unix_seconds: i64,
}

impl Unfinished {
    /// Tolerance in seconds for comparing the start of an upload with the start of a process, because times are whole
    /// seconds and clocks differ. Some stores (versitygw) also report the time of the last part as the start, and can
    /// receive this part shortly after its sender has ended.
    const CLOCK_TOLERANCE: i64 = 5;

    /// Whether the upload is older than a process that started at `unix_seconds`. An upload that started less than 5
    /// seconds after the process also counts as older (`CLOCK_TOLERANCE`).
    pub fn is_older_than(&self, unix_seconds: i64) -> bool {
        self.begun_unix_seconds < unix_seconds.saturating_add(Self::CLOCK_TOLERANCE)
    }
}

/// An object that the store has acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Size of the stored object in bytes, as the store reports it after the commit.
    pub size: u64,
    /// The tag of this version of the object, as [`Object::tag`] reports it.
    pub tag: Option<String>,
}

/// The remedy for a denied access. `text` contains the error code of the store, if it sent a code.
fn denial_remedy(text: &str) -> &'static str {
    let holds = |codes: &[&str]| codes.iter().any(|code| text.contains(code));
    if holds(&["SignatureDoesNotMatch"]) {
        "the secret key does not match the access key: correct the secret key"
    } else if holds(&["InvalidAccessKeyId", "XAdminUserNotFound"]) {
        "the store does not know the access key: correct the access key"
    } else if holds(&["ExpiredToken", "InvalidToken"]) {
        "the store does not accept the token: renew the token"
    } else {
        "check the credentials and the bucket's policy"
    }
}

/// Why a store request failed. The error text contains the remedy, and never credentials.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The bucket or container does not exist.
    #[error("bucket {bucket:?} does not exist: create it or correct the path")]
    NoSuchBucket {
        /// The name of the bucket or container.
        bucket: String,
    },
    /// The object does not exist.
    #[error("object {key:?} does not exist")]
    NoSuchObject {
        /// The key that does not exist.
        key: String,
    },
    /// The identity lacks a permission, or the credentials are wrong.
    #[error("access denied: {0}; {remedy}", remedy = denial_remedy(.0))]
    AccessDenied(String),
    /// The spec names no Secret, and the pod has no usable cloud identity. The text is the cause.
    #[error(
        "the spec names no Secret, and the pod has no usable cloud identity ({0}): name a Secret in the spec, or configure \
         a cloud identity for the pod's ServiceAccount"
    )]
    NoIdentity(String),
    /// The store rejects the time of a signed request, because the store's clock differs too much from the clock of the
    /// node that sent the request.
    #[error(
        "the store rejects the time of the request: correct the clock of the node that sent the request ({0})"
    )]
    ClockSkew(String),
    /// The server's certificate is not trusted.
    #[error(
        "the store's certificate is not trusted: {0}; for S3 set caSecret to the store's CA, for other stores add the CA to \
         the operator's certificates (SSL_CERT_FILE)"
    )]
    Certificate(String),
    /// The store cannot be reached.
    #[error(
        "the store at {endpoint} cannot be reached: check the endpoint, the network and DNS ({detail})"
    )]
    Unreachable {
        /// The endpoint that did not answer.
        endpoint: String,
        /// The error of the connection.
        detail: String,
    },
    /// The store did not respond in time.
    #[error("the store did not answer in time: check the store and the network ({0})")]
    Timeout(String),
    /// The store has no space for the object.
    #[error("no space is left: {0}; enlarge the volume or remove old backups")]
    Full(String),
    /// The store exceeds a limit: for example, a response is too long or a listing does not end.
    #[error("the store at {endpoint} {problem}")]
    Excessive {
        /// The endpoint of the store.
        endpoint: String,
        /// The exceeded limit and the remedy.
        problem: String,
    },
    /// The content of a Secret is invalid.
    #[error("{key}: {problem}")]
    Secret {
        /// The key of the Secret, or the field of the spec that names the Secret.
        key: String,
        /// The problem and the remedy, without values of the Secret.
        problem: String,
    },
    /// The configuration is invalid.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field of the spec to correct.
        field: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// The object cannot be encrypted or decrypted.
    #[error(transparent)]
    Encryption(#[from] crate::encryption::Error),
    /// An error that no other variant describes.
    #[error("store error: {0}")]
    Other(String),
}

/// A bucket, container or directory, accessed with one identity.
#[async_trait]
pub trait Store: Send + Sync {
    /// The location of the objects as messages show it, such as `s3://bucket`.
    fn location(&self) -> String;
    /// URL of the server. Empty for a directory.
    fn endpoint(&self) -> String {
        String::new()
    }
    /// Starts an upload. The object is not visible under `key` before the commit.
    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error>;
    /// Writes a small object, without splitting it into parts.
    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error>;
    /// Opens an object for reading. If the connection breaks, the read continues at the last offset.
    async fn get(&self, key: &str) -> Result<ObjectStream, Error>;
    /// Returns the metadata of an object; `None` if the object does not exist.
    async fn head(&self, key: &str) -> Result<Option<Object>, Error>;
    /// Lists all objects with this key prefix, from all pages.
    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error>;
    /// Deletes an object. Succeeds if the object does not exist.
    async fn delete(&self, key: &str) -> Result<(), Error>;
    /// Lists the unfinished uploads with this key prefix, from all pages. Empty for Google and Azure, which do not list
    /// unfinished uploads and remove them after a week.
    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error>;
    /// Removes an unfinished upload, and changes no objects. Succeeds if the upload no longer exists.
    async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error>;
    /// Removes unfinished uploads of exactly this key that are older than a process that started at `begun_before`, in
    /// seconds since the epoch ([`Unfinished::is_older_than`]). Callers pass the start of their own process, so these
    /// uploads belong to processes that have ended.
    async fn discard_unfinished(&self, key: &str, begun_before: i64) -> Result<(), Error> {
        for unfinished in self.unfinished(key).await? {
            // Invariant 13: uploads with another key are kept, because the listing contains all uploads whose keys
            // begin with `key`.
            if unfinished.key == key && unfinished.is_older_than(begun_before) {
                self.discard(&unfinished).await?;
            }
        }
        Ok(())
    }
}

/// An upload that uses constant memory.
#[async_trait]
pub trait Upload: Send {
    /// Writes the next bytes. Waits while the maximum number of bytes is in flight.
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error>;
    /// Makes the complete object visible, and reads its size from the store.
    async fn commit(self: Box<Self>) -> Result<Committed, Error>;
    /// Aborts the upload and removes its data from the store.
    async fn abort(self: Box<Self>) -> Result<(), Error>;
}
