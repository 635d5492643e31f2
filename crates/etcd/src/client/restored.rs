//! Reads the revision, the number of keys and their hash from a restored etcd, over plain HTTP. No credentials are
//! used, because the passwords in the restored data are those at the time of the backup.
//!
//! The hash comes from `GET /members/hashkv` on the peer listener. With this request, members compare their data. etcd
//! reads every key for the answer. etcd before 3.4.4 does not support this request.

use std::time::Duration;

use serde::Deserialize;

use super::plain;
use crate::port::{Error, KeyHash};

/// Properties of the data that a restored etcd serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// etcd's current revision. It is read after the number of keys.
    pub revision: i64,
    /// The hash of all keys at the requested revision. `None` if this etcd release does not support the request.
    pub hash: Option<KeyHash>,
    /// Number of keys. `None` if etcd does not report the metric.
    pub keys: Option<i64>,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    header: Header,
    #[serde(default)]
    hash: u32,
    #[serde(default)]
    compact_revision: i64,
}

#[derive(Default, Deserialize)]
struct Header {
    #[serde(default)]
    revision: i64,
}

/// Reads the revision, the number of keys, and the hash of the keys at the revision `at`. `peer` and `metrics` are
/// addresses with a port. `deadline` limits each request.
///
/// # Errors
/// Fails if etcd does not answer, or if an answer does not come from etcd.
pub async fn served(
    peer: &str,
    metrics: &str,
    at: i64,
    deadline: Duration,
) -> Result<Served, Error> {
    let other = |what: &str| Error::Other(format!("{peer}: {what}"));
    let keys = metric(metrics, "etcd_debugging_mvcc_keys_total", deadline).await?;
    let answer = plain::get(
        peer,
        "/members/hashkv",
        &format!("{{\"revision\":{at}}}"),
        deadline,
    )
    .await?;
    match plain::parts(&answer) {
        Some((200, body)) => {
            let found: Answer = serde_json::from_str(body).map_err(|error| {
                other(&format!("the hash of the keys cannot be parsed: {error}"))
            })?;
            Ok(Served {
                revision: found.header.revision,
                hash: Some(KeyHash {
                    hash: found.hash,
                    // etcd reports -1 if it was never compacted.
                    compacted: found.compact_revision.max(0),
                }),
                keys,
            })
        }
        Some((404, _)) => {
            let current = metric(metrics, "etcd_debugging_mvcc_current_revision", deadline);
            let revision = current
                .await?
                .ok_or_else(|| other("etcd does not report its revision"))?;
            Ok(Served {
                revision,
                hash: None,
                keys,
            })
        }
        Some((code, body)) => Err(other(&format!(
            "etcd answers {code} to the request for the hash of the keys: {}",
            body.trim()
        ))),
        None => Err(other("the answer is not HTTP")),
    }
}

/// Reads the value of one metric. `None` if etcd does not report this metric.
async fn metric(address: &str, name: &str, deadline: Duration) -> Result<Option<i64>, Error> {
    let other = |what: &str| Error::Other(format!("{address}: {what}"));
    let text = plain::get(address, "/metrics", "", deadline).await?;
    let (200, body) = plain::parts(&text).ok_or_else(|| other("the answer is not HTTP"))? else {
        return Err(other("etcd does not report its metrics"));
    };
    Ok(plain::metric(body, name).and_then(whole))
}

/// Converts a metric to a whole number. Metrics are floats, which are exact up to 2^53.
#[allow(clippy::cast_possible_truncation)] // `contains` excludes values that do not fit into `i64`.
fn whole(value: f64) -> Option<i64> {
    (0.0..9.0e15).contains(&value).then_some(value as i64)
}
