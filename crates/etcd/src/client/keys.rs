//! Reads ranges of keys and changes keys, for mirrors. A change has preconditions, so the caller can repeat it after a
//! lost answer.

use bytes::Bytes;
use etcd_client::{
    Compare, CompareOp, GetOptions, GetResponse, KeyValue, ResponseHeader, Txn, TxnOp,
};
use futures::FutureExt;

use super::EtcdClient;
use crate::answer::COMPACTED;
use crate::port::{ClusterId, Error};
use crate::range::KeyRange;

/// A part of the keys in a range, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPage {
    /// The cluster ID in the response header.
    pub cluster_id: ClusterId,
    /// etcd's newest revision at the time of the read.
    pub revision: i64,
    /// The keys with their values.
    pub entries: Vec<(Bytes, Bytes)>,
    /// The revision of the last change of the first key. 0 if the page has no key.
    pub first_changed: i64,
    /// Whether the range has more keys after these entries.
    pub has_more: bool,
}

/// Why a page cannot be read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PageError {
    /// etcd has compacted the revision.
    #[error("etcd has compacted the revision of the read")]
    Compacted,
    /// The response exceeds the limit of the client. A response with fewer keys may be small enough.
    #[error("the response exceeds the limit of the client")]
    TooLarge,
    /// The read has failed.
    #[error(transparent)]
    Failed(#[from] Error),
}

/// A precondition of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Precondition {
    /// The key exists and has this value.
    Value {
        /// The key.
        key: Bytes,
        /// The value.
        value: Bytes,
    },
    /// The last change of the key has this revision. 0: the key does not exist.
    Changed {
        /// The key.
        key: Bytes,
        /// The revision.
        revision: i64,
    },
    /// No key of the range exists.
    Empty(KeyRange),
}

/// A change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Sets the value of the key. The key gets no lease.
    Put {
        /// The key.
        key: Bytes,
        /// The value.
        value: Bytes,
    },
    /// Deletes the key if it exists.
    Delete {
        /// The key.
        key: Bytes,
    },
}

impl Operation {
    /// The key.
    pub fn key(&self) -> &Bytes {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }

    /// The number of bytes of the key and of the value.
    pub fn size(&self) -> usize {
        match self {
            Self::Put { key, value } => key.len() + value.len(),
            Self::Delete { key } => key.len(),
        }
    }
}

impl EtcdClient {
    /// Reads at most `limit` keys of a range at a revision, through one member. The read is linearizable. The revision
    /// 0 means the newest revision.
    ///
    /// # Errors
    /// Fails if the member does not answer, if the revision is compacted, or if the response is too large.
    pub async fn page(
        &self,
        member: &str,
        range: &KeyRange,
        revision: i64,
        limit: i64,
    ) -> Result<KeyPage, PageError> {
        let max_answer = self.max_answer;
        let answer = self
            .ask(member, self.deadlines.call, |client| {
                let (start, end) = (range.start.to_vec(), range.end.to_vec());
                async move {
                    let options = GetOptions::new().with_range(end);
                    let options = options.with_revision(revision).with_limit(limit);
                    let mut keys = client.kv_client().max_decoding_message_size(max_answer);
                    keys.get(start, Some(options)).await
                }
            })
            .boxed()
            .await;
        match answer {
            Ok(answer) => Ok(page_of(answer)),
            Err(Error::Other(text)) if text.ends_with(COMPACTED) => Err(PageError::Compacted),
            Err(Error::Other(text)) if is_too_large(&text) => Err(PageError::TooLarge),
            Err(error) => Err(PageError::Failed(error)),
        }
    }

    /// Sends all changes as one transaction to one member, at most once. Returns the revision of the transaction, or
    /// `None` if a precondition does not hold and nothing was changed.
    ///
    /// # Errors
    /// Fails if the member rejects the changes or does not answer. After [`Error::AnswerLost`] and [`Error::Timeout`],
    /// etcd may have applied the changes, or may still apply them if the preconditions hold.
    pub async fn commit(
        &self,
        member: &str,
        preconditions: &[Precondition],
        operations: &[Operation],
    ) -> Result<Option<i64>, Error> {
        self.send(member, self.deadlines.call, |client| {
            let txn = Txn::new()
                .when(preconditions.iter().map(compare).collect::<Vec<_>>())
                .and_then(operations.iter().map(operation).collect::<Vec<_>>());
            async move {
                let answer = client.kv_client().txn(txn).await?;
                let revision = answer.header().map_or(0, ResponseHeader::revision);
                Ok(answer.succeeded().then_some(revision))
            }
        })
        .boxed()
        .await
    }
}

fn page_of(mut answer: GetResponse) -> KeyPage {
    let header = answer.take_header();
    let has_more = answer.more();
    let kvs = answer.take_kvs();
    let first_changed = kvs.first().map_or(0, KeyValue::mod_revision);
    let entries = kvs.into_iter().map(|kv| {
        let (key, value) = kv.into_key_value();
        (Bytes::from(key), Bytes::from(value))
    });
    KeyPage {
        cluster_id: ClusterId(header.as_ref().map_or(0, ResponseHeader::cluster_id)),
        revision: header.as_ref().map_or(0, ResponseHeader::revision),
        entries: entries.collect(),
        first_changed,
        has_more,
    }
}

/// True for the errors of the channel and of the decoder for a response that exceeds the limit.
fn is_too_large(text: &str) -> bool {
    text.contains("length too large") || text.contains("the response has more than")
}

fn compare(precondition: &Precondition) -> Compare {
    match precondition {
        Precondition::Value { key, value } => {
            Compare::value(key.to_vec(), CompareOp::Equal, value.to_vec())
        }
        Precondition::Changed { key, revision } => {
            Compare::mod_revision(key.to_vec(), CompareOp::Equal, *revision)
        }
        // etcd compares every key of the range. The create revision of a key is above 0, so only an empty range passes.
        Precondition::Empty(range) => {
            Compare::create_revision(range.start.to_vec(), CompareOp::Equal, 0)
                .with_range(range.end.to_vec())
        }
    }
}

fn operation(operation: &Operation) -> TxnOp {
    match operation {
        Operation::Put { key, value } => TxnOp::put(key.to_vec(), value.to_vec(), None),
        Operation::Delete { key } => TxnOp::delete(key.to_vec(), None),
    }
}
