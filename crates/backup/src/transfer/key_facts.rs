//! Requests facts about the keys of a snapshot from the member that sent it, for the manifest. A restore and a
//! verification compare these facts with the restored keys.
//!
//! Each fact may be missing, because the SHA-256 checksum already verifies the bytes of the snapshot.

use etcd::{Error, Inspected};

use super::Transfer;
use super::candidates::Candidate;

/// The facts about the keys at the revision of the snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyFacts {
    /// etcd's hash of the keys (`HashKV`).
    pub(super) hash: Option<u32>,
    /// Number of keys.
    pub(super) count: Option<i64>,
}

/// Maximum size of a database for which the member computes the hash. The member applies no writes meanwhile, for about
/// half a second per GiB.
const MAX_HASHED: i64 = 1 << 30;

/// Maximum size of a database whose keys the member counts. Writes wait meanwhile, for about 0.1 s per million keys.
/// The etcd documentation recommends at most this size.
const MAX_COUNTED: i64 = 8 << 30;

impl Transfer {
    /// Requests the facts from the member that sent the snapshot.
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
        // If a compaction since the snapshot has changed the hash, a restore could not compare it. The manifest then
        // contains no hash.
        (found.compacted == inspected.compacted).then_some(found.hash)
    }

    /// A compaction since the snapshot does not change the number of keys at its revision. After a compaction of this
    /// revision, the member can no longer count the keys.
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
        tracing::debug!(%error, member, fact, "the manifest does not contain this fact about the keys");
        None
    })
}
