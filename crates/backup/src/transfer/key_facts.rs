//! Requests the hash and the number of keys from the member that sent the snapshot. A restore and a verification
//! compare these values with the restored data.
//!
//! A backup without these values is valid, because the SHA-256 verifies the bytes of the snapshot.

use etcd::{Error, Inspected};

use super::Transfer;
use super::candidates::Candidate;

/// The hash and the number of keys at the revision of the snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyFacts {
    /// The hash of the keys (`HashKV` of etcd).
    pub(super) hash: Option<u32>,
    /// Number of keys.
    pub(super) count: Option<i64>,
}

/// Maximum size of a database for which the hash is requested. While the member computes the hash, it applies no
/// writes, for about half a second per GiB.
const MAX_HASHED: i64 = 1 << 30;

/// Maximum size of a database whose keys are counted. The etcd documentation recommends no larger database. While the
/// member counts the keys, writes wait for about 0.1 s per million keys.
const MAX_COUNTED: i64 = 8 << 30;

impl Transfer {
    /// Requests the hash and the number of keys. If a request fails, this function logs the error, and the value is
    /// `None`.
    pub(super) async fn key_facts(&self, member: &Candidate, inspected: &Inspected) -> KeyFacts {
        let (hash, count) =
            tokio::join!(self.hash(member, inspected), self.count(member, inspected));
        KeyFacts { hash, count }
    }

    async fn hash(&self, member: &Candidate, inspected: &Inspected) -> Option<u32> {
        if member.status.db_size_in_use > MAX_HASHED {
            return None;
        }
        let answer = self.etcd.hash(&member.url, inspected.store_revision());
        let found = received(answer.await, member, "hash")?;
        // If etcd was compacted after the snapshot, the hash is left out. The compaction has changed the hash, so a
        // restore of the snapshot would compute another hash.
        (found.compacted == inspected.compacted).then_some(found.hash)
    }

    /// Counts the keys at the snapshot's revision. The member returns no number after this revision was compacted. A
    /// compaction of older revisions does not change the number.
    async fn count(&self, member: &Candidate, inspected: &Inspected) -> Option<i64> {
        if member.status.db_size_in_use > MAX_COUNTED {
            return None;
        }
        let revision = inspected.store_revision();
        let answer = self.etcd.key_count(&member.url, revision).await;
        received(answer, member, "number")
    }
}

fn received<T>(answer: Result<Option<T>, Error>, member: &Candidate, fact: &str) -> Option<T> {
    answer.unwrap_or_else(|error| {
        let member = &member.url;
        tracing::debug!(%error, member, fact, "the member did not return this value, so the manifest does not contain it");
        None
    })
}
