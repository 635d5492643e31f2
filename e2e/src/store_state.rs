//! The data of an etcd cluster at one revision: all keys with their revisions and leases, and the hash of the data.
//! Tests compare this data before and after a restore.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use etcd_client::{GetOptions, PutOptions};
use k8s_openapi::ByteString;
use serde_json::Value;

use crate::Keyspace;
use crate::keyspace::is_transient;
use crate::retry::retry_transient;

/// The TTL of the leases in seconds. It is longer than any test.
const LEASE_TTL_SECONDS: i64 = 7200;

/// The prefix of the keys in which mirrors store their records, such as checkpoints.
const MIRROR_RECORDS: &[u8] = api::names::MIRROR_RECORDS.as_bytes();

/// The value, revisions, version and lease of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredKey {
    value: Vec<u8>,
    created: i64,
    modified: i64,
    version: i64,
    lease: i64,
}

/// The data at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreState {
    /// The revision at which the data was read.
    pub revision: i64,
    /// The hash and the compact revision that `HashKV` returned for this revision.
    pub hash: (u32, i64),
    keys: BTreeMap<Vec<u8>, StoredKey>,
    /// The granted TTL in seconds of each lease, by lease ID.
    leases: BTreeMap<i64, i64>,
}

impl StoreState {
    /// Reads the current data. No client may write during this call.
    ///
    /// # Errors
    /// Fails if etcd does not respond.
    pub async fn now(keys: &Keyspace) -> Result<Self> {
        let revision = keys.revision().await?;
        Self::at(keys, revision).await
    }

    /// Reads the keys at an earlier revision, and the current leases, because etcd keeps no history of leases.
    ///
    /// # Errors
    /// Fails if etcd does not respond, or has compacted the revision.
    pub async fn at(keys: &Keyspace, revision: i64) -> Result<Self> {
        let hash = retry_transient(is_transient, async |_| {
            let mut client = keys.client.maintenance_client();
            Ok(client.hash_kv(revision).await?)
        });
        let hash = hash.await.context("the hash of the keys")?;
        Ok(Self {
            revision,
            hash: (hash.hash(), hash.compact_version()),
            keys: stored(keys, revision).await?,
            leases: leases(keys).await?,
        })
    }

    /// The keys with their values, without the records of mirrors. Tests of mirrors compare only the values, because a
    /// mirror copies neither revisions nor leases.
    #[must_use]
    pub fn values(&self) -> BTreeMap<&[u8], &[u8]> {
        let keys = self.keys.iter();
        let copied = keys.filter(|(key, _)| !key.starts_with(MIRROR_RECORDS));
        copied
            .map(|(key, stored)| (key.as_slice(), stored.value.as_slice()))
            .collect()
    }

    /// Whether a mirror has a checkpoint in this cluster.
    #[must_use]
    pub fn has_checkpoint(&self) -> bool {
        let checkpoints = [MIRROR_RECORDS, b"checkpoint/"].concat();
        self.keys.keys().any(|key| key.starts_with(&checkpoints))
    }

    /// Parses the output of `etcdctl get` and `etcdctl lease timetolive` with `-w json`. This output has no hash, so
    /// use [`Self::ensure_same_keys`] for comparisons.
    ///
    /// # Errors
    /// Fails if a field is missing.
    pub fn from_etcdctl(answer: &Value, leases: &Value) -> Result<Self> {
        let revision = answer["header"]["revision"].as_i64();
        let pairs = answer["kvs"].as_array().context("no keys")?;
        let granted = leases.as_array().context("no leases")?.iter().map(|lease| {
            let time = lease["granted-ttl"].as_i64();
            Ok((
                lease["id"].as_i64().context("a lease without ID")?,
                time.context("no time")?,
            ))
        });
        Ok(Self {
            revision: revision.context("no revision")?,
            hash: (0, 0),
            keys: pairs.iter().map(etcdctl_key).collect::<Result<_>>()?,
            leases: granted.collect::<Result<_>>()?,
        })
    }

    /// Checks that the restored data has the same revision, keys, leases and hash.
    ///
    /// # Errors
    /// Fails if the data differs. The error contains the first difference.
    pub fn ensure_same(&self, restored: &Self) -> Result<()> {
        ensure!(self.revision == restored.revision);
        self.ensure_same_keys(restored)?;
        ensure!(
            self.hash == restored.hash,
            "the hash is {:?}, but was {:?}",
            restored.hash,
            self.hash
        );
        Ok(())
    }

    /// Checks that the restored data has the same keys and leases. Use this if the restore has increased the revision,
    /// because then the hash differs.
    ///
    /// # Errors
    /// Fails if the data differs. The error contains the first difference.
    pub fn ensure_same_keys(&self, restored: &Self) -> Result<()> {
        for (key, before) in &self.keys {
            let after = restored.keys.get(key);
            let name = String::from_utf8_lossy(key);
            ensure!(
                after == Some(before),
                "{name}: {after:?}, before {before:?}"
            );
        }
        ensure!(
            self.keys.len() == restored.keys.len(),
            "there are additional keys"
        );
        ensure!(
            self.leases == restored.leases,
            "the leases are {:?}, but were {:?}",
            restored.leases,
            self.leases
        );
        Ok(())
    }
}

/// Parses one key in the output of etcdctl, which omits empty fields.
fn etcdctl_key(pair: &Value) -> Result<(Vec<u8>, StoredKey)> {
    let bytes = |field: &str| {
        let text = pair.get(field).cloned();
        let bytes = text.map(serde_json::from_value::<ByteString>).transpose()?;
        anyhow::Ok(bytes.unwrap_or_default().0)
    };
    let number = |field: &str| pair[field].as_i64().unwrap_or_default();
    let stored = StoredKey {
        value: bytes("value")?,
        created: number("create_revision"),
        modified: number("mod_revision"),
        version: number("version"),
        lease: number("lease"),
    };
    Ok((bytes("key")?, stored))
}

async fn stored(keys: &Keyspace, revision: i64) -> Result<BTreeMap<Vec<u8>, StoredKey>> {
    let answer = retry_transient(is_transient, async |_| {
        let options = GetOptions::new().with_all_keys().with_revision(revision);
        Ok(keys.client.kv_client().get("", Some(options)).await?)
    });
    let pairs = answer.await.context("read all keys")?.take_kvs();
    let stored = pairs.into_iter().map(|pair| {
        let stored = StoredKey {
            created: pair.create_revision(),
            modified: pair.mod_revision(),
            version: pair.version(),
            lease: pair.lease(),
            value: pair.value().to_vec(),
        };
        (pair.key().to_vec(), stored)
    });
    Ok(stored.collect())
}

async fn leases(keys: &Keyspace) -> Result<BTreeMap<i64, i64>> {
    let client = || keys.client.lease_client();
    let mut leases = BTreeMap::new();
    let list = retry_transient(is_transient, async |_| Ok(client().leases().await?));
    for lease in list.await.context("list the leases")?.leases() {
        let answer = retry_transient(is_transient, async |_| {
            Ok(client().time_to_live(lease.id(), None).await?)
        });
        leases.insert(lease.id(), answer.await?.granted_ttl());
    }
    Ok(leases)
}

impl Keyspace {
    /// Writes keys with several versions, deleted keys, and keys with leases, so that a test can compare them after a
    /// restore.
    ///
    /// # Errors
    /// Fails if etcd rejects a write.
    pub async fn fill_mixed(&self, prefix: &str, count: usize) -> Result<()> {
        let grant = async |seconds| {
            let granted = retry_transient(is_transient, async |_| {
                Ok(self.client.lease_client().grant(seconds, None).await?)
            });
            anyhow::Ok(granted.await.context("grant a lease")?.id())
        };
        let granted = grant(LEASE_TTL_SECONDS).await?;
        let empty = grant(LEASE_TTL_SECONDS + 1).await?;
        ensure!(granted != empty);
        let kv = || self.client.kv_client();
        for number in 0..count {
            let key = format!("{prefix}{number:05}");
            for version in 0..=number % 3 {
                let put = retry_transient(is_transient, async |_| {
                    let held = (number % 5 == 0).then(|| PutOptions::new().with_lease(granted));
                    let value = format!("{key} in version {version}");
                    Ok(kv().put(key.as_str(), value, held).await?)
                });
                put.await.context("put")?;
            }
            if number % 7 == 3 {
                let delete = retry_transient(is_transient, async |_| {
                    Ok(kv().delete(key.as_str(), None).await?)
                });
                delete.await.context("delete")?;
            }
        }
        Ok(())
    }
}
