//! The etcd to which a replay writes.

use bytes::Bytes;
use etcd::KeyHash;
use etcd_client::{
    Client, CompactionOptions, Compare, CompareOp, ConnectOptions, DeleteOptions, Error,
    GetOptions, LeaseGrantOptions, LeaseTimeToLiveOptions, PutOptions, ResponseHeader, Txn, TxnOp,
};

use super::leases::LeaseRenewal;
use super::operations::{Part, key_after, parts};
use super::window::{Answer, Attempt, Guard};
use crate::record::Lease;

/// The TTL in seconds of a lease whose TTL was not recorded.
const UNKNOWN_TTL: i64 = 60;

/// A connection to the etcd of a replay. It renews the leases of etcd until it is dropped.
pub struct Target {
    client: Client,
    leases: LeaseRenewal,
}

impl Target {
    /// Connects to an etcd on localhost. If the snapshot requires a login, `user` is the name and the password of a
    /// user with the role `root`.
    ///
    /// # Errors
    /// Fails if etcd does not answer.
    pub async fn connect(
        endpoint: &str,
        user: Option<(String, String)>,
    ) -> Result<Self, etcd_client::Error> {
        let mut options = ConnectOptions::new();
        if let Some((name, password)) = user {
            options = options.with_user(name, password);
        }
        let client = Client::connect([endpoint], Some(options)).await?;
        Ok(Self {
            leases: LeaseRenewal::start(client.clone()),
            client,
        })
    }

    /// The current revision.
    pub(super) async fn revision(&self) -> Result<i64, Error> {
        let options = GetOptions::new().with_count_only();
        let mut client = self.client.kv_client();
        let answer = client.get([0_u8], Some(options)).await?;
        Ok(revision(answer.header()))
    }

    /// Sends the changes of a recorded transaction in one etcd transaction, with the guard of `attempt`.
    pub(super) async fn apply(&self, attempt: &Attempt) -> Result<Answer, Error> {
        let mut operations = Vec::new();
        for part in parts(&attempt.transaction.changes) {
            match part {
                Part::Single(change) => operations.push(match &change.value {
                    Some(value) => {
                        let options = PutOptions::new().with_lease(value.lease);
                        let (key, content) = (change.key.clone(), value.content.clone());
                        TxnOp::put(key, content, Some(options))
                    }
                    None => TxnOp::delete(change.key.clone(), None),
                }),
                Part::Run(run) => {
                    let keys: Vec<Bytes> = run.iter().map(|change| change.key.clone()).collect();
                    operations.extend(self.deletions(keys).await?);
                }
            }
        }
        let compares: Vec<Compare> = attempt.guard.iter().map(compare).collect();
        let mut client = self.client.kv_client();
        let transaction = Txn::new().when(compares).and_then(operations);
        let answer = client.txn(transaction).await?;
        Ok(Answer {
            applied: answer.succeeded(),
            revision: revision(answer.header()),
        })
    }

    /// The operations that delete these keys, which must be in ascending order: one deletion of a range if the target
    /// has only these keys in the range, or else one deletion for each key.
    async fn deletions(&self, keys: Vec<Bytes>) -> Result<Vec<TxnOp>, Error> {
        if let (Some(first), Some(last)) = (keys.first(), keys.last()) {
            let end = key_after(last);
            let options = GetOptions::new().with_range(end.clone()).with_count_only();
            let mut client = self.client.kv_client();
            let found = client.get(first.clone(), Some(options)).await?;
            if usize::try_from(found.count()).ok() == Some(keys.len()) {
                let options = DeleteOptions::new().with_range(end);
                return Ok(vec![TxnOp::delete(first.clone(), Some(options))]);
            }
        }
        let single = keys.into_iter().map(|key| TxnOp::delete(key, None));
        Ok(single.collect())
    }

    /// Starts to renew all leases that exist in the target.
    pub(super) async fn adopt_leases(&self) -> Result<(), Error> {
        let mut client = self.client.lease_client();
        let listed = client.leases().await?;
        for lease in listed.leases() {
            let options = LeaseTimeToLiveOptions::new();
            let found = client.time_to_live(lease.id(), Some(options)).await?;
            if found.ttl() >= 0 {
                self.leases.add(lease.id(), found.granted_ttl());
            }
        }
        Ok(())
    }

    /// Grants a lease with its recorded ID. A lease that already has this ID stays if it has keys or the recorded TTL,
    /// or if no TTL was recorded. A lease that does not stay is revoked first.
    pub(super) async fn grant(&self, lease: Lease) -> Result<(), Error> {
        let mut client = self.client.lease_client();
        let options = LeaseTimeToLiveOptions::new().with_keys();
        let found = client.time_to_live(lease.id, Some(options)).await?;
        if found.ttl() >= 0 {
            let is_equal = lease.ttl.is_none_or(|ttl| ttl == found.granted_ttl());
            if is_equal || !found.keys().is_empty() {
                self.leases.add(lease.id, found.granted_ttl());
                return Ok(());
            }
            self.leases.remove(lease.id);
            client.revoke(lease.id).await?;
        }
        let ttl = lease.ttl.unwrap_or(UNKNOWN_TTL);
        let options = LeaseGrantOptions::new().with_id(lease.id);
        let granted = client.grant(ttl, Some(options)).await?;
        self.leases.add(lease.id, granted.ttl());
        Ok(())
    }

    /// Revokes a lease without keys. Returns false if the lease has keys, and does not revoke it, because etcd would
    /// delete the keys and use a revision.
    pub(super) async fn revoke(&self, id: i64) -> Result<bool, Error> {
        let mut client = self.client.lease_client();
        let options = LeaseTimeToLiveOptions::new().with_keys();
        let found = client.time_to_live(id, Some(options)).await?;
        if !found.keys().is_empty() {
            return Ok(false);
        }
        self.leases.remove(id);
        if found.ttl() >= 0 {
            client.revoke(id).await?;
        }
        Ok(true)
    }

    /// A lease that has expired although it was renewed. `None` if there is none.
    pub(super) fn lost_lease(&self) -> Option<i64> {
        self.leases.lost()
    }

    /// etcd's hash of all keys at a revision.
    pub(super) async fn hash(&self, revision: i64) -> Result<KeyHash, Error> {
        let mut client = self.client.maintenance_client();
        let answer = client.hash_kv(revision).await?;
        Ok(KeyHash {
            hash: answer.hash(),
            // etcd reports the revision -1 if it was never compacted.
            compacted: answer.compact_version().max(0),
        })
    }

    /// Compacts all revisions before `revision`, and waits until etcd has removed them.
    pub(super) async fn compact(&self, revision: i64) -> Result<(), Error> {
        let options = CompactionOptions::new().with_physical();
        let mut client = self.client.kv_client();
        client.compact(revision, Some(options)).await.map(|_| ())
    }
}

/// The comparison of a guard. For a missing key, etcd compares the modification revision 0.
fn compare(guard: &Guard) -> Compare {
    let (key, revision) = match guard {
        Guard::Modified { key, revision } => (key, *revision),
        Guard::Deleted { key } => (key, 0),
    };
    Compare::mod_revision(key.clone(), CompareOp::Equal, revision)
}

fn revision(header: Option<&ResponseHeader>) -> i64 {
    header.map_or(0, ResponseHeader::revision)
}
