//! Makes random changes in an etcd.

use etcd_client::{Client, DeleteOptions, GetOptions, LeaseGrantOptions, PutOptions, Txn, TxnOp};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::lab::revision;

/// A value of nearly the maximum size that etcd accepts by default.
const LARGE: usize = 1_572_864 - 600;

/// Makes random changes, and remembers the keys and the leases that exist.
pub(crate) struct History {
    client: Client,
    rng: StdRng,
    keys: Vec<Vec<u8>>,
    leases: Vec<i64>,
}

impl History {
    pub(crate) fn new(client: Client, mut rng: StdRng) -> Self {
        let keys = (0..150).map(|_| {
            let length = rng.random_range(1..30);
            (0..length).map(|_| rng.random()).collect()
        });
        Self {
            client,
            keys: keys.collect(),
            rng,
            leases: Vec::new(),
        }
    }

    fn key(&mut self) -> Vec<u8> {
        self.keys.choose(&mut self.rng).unwrap().clone()
    }

    fn value(&mut self) -> Vec<u8> {
        let length = self.rng.random_range(0..300);
        (0..length).map(|_| self.rng.random()).collect()
    }

    fn lease(&mut self) -> i64 {
        if self.rng.random_bool(0.3) {
            self.leases.choose(&mut self.rng).copied().unwrap_or(0)
        } else {
            0
        }
    }

    pub(crate) async fn grant(&mut self, ttl: i64) -> i64 {
        let id = self.rng.random_range(1..i64::MAX);
        let options = LeaseGrantOptions::new().with_id(id);
        let granted = self.client.lease_grant(ttl, Some(options)).await;
        granted.unwrap();
        self.leases.push(id);
        id
    }

    /// Makes a random change. Returns the revision after the change.
    pub(crate) async fn step(&mut self) -> i64 {
        match self.rng.random_range(0..20) {
            0..8 => {
                let (key, value, lease) = (self.key(), self.value(), self.lease());
                let options = PutOptions::new().with_lease(lease);
                self.client.put(key, value, Some(options)).await.unwrap();
            }
            8..11 => {
                let key = self.key();
                self.client.delete(key, None).await.unwrap();
            }
            11 => {
                let (one, two) = (self.key(), self.key());
                let options = DeleteOptions::new().with_range(one.clone().max(two.clone()));
                let deleted = self.client.delete(one.min(two), Some(options)).await;
                deleted.unwrap();
            }
            12..16 => self.transaction().await,
            16 => {
                // A transaction that changes nothing does not increase the revision.
                let get = TxnOp::get("missing", Some(GetOptions::new()));
                let delete = TxnOp::delete("missing", None);
                let txn = Txn::new().and_then([get, delete]);
                self.client.txn(txn).await.unwrap();
            }
            17 => {
                let ttl = self.rng.random_range(300..900);
                self.grant(ttl).await;
            }
            18 if self.leases.len() > 3 => {
                let index = self.rng.random_range(0..self.leases.len());
                let id = self.leases.swap_remove(index);
                self.client.lease_revoke(id).await.unwrap();
            }
            _ => {
                let key = self.key();
                for _ in 0..3 {
                    let value = self.value();
                    self.client.put(key.clone(), value, None).await.unwrap();
                }
            }
        }
        revision(&mut self.client).await
    }

    /// A transaction with up to 128 operations.
    async fn transaction(&mut self) {
        let mut keys = self.keys.clone();
        let count = self.rng.random_range(1..=128);
        let mut operations = Vec::new();
        for _ in 0..count {
            let key = keys.swap_remove(self.rng.random_range(0..keys.len()));
            operations.push(if self.rng.random_bool(0.7) {
                let (value, lease) = (self.value(), self.lease());
                TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)))
            } else {
                TxnOp::delete(key, None)
            });
        }
        let txn = Txn::new().and_then(operations);
        self.client.txn(txn).await.unwrap();
    }

    /// Puts three values of almost 1.5 MiB, and then two values of half this size in one transaction.
    pub(crate) async fn large_values(&mut self) {
        for index in 0..3_u8 {
            let value = vec![index; LARGE];
            let key = vec![0xff, index];
            self.client.put(key, value, None).await.unwrap();
        }
        let halves = [7_u8, 9].map(|index| {
            let value = vec![index; LARGE / 2 - 100];
            TxnOp::put([0xff, index], value, None)
        });
        self.client.txn(Txn::new().and_then(halves)).await.unwrap();
    }

    /// Deletes 4,000 keys in one revision. Its events have more than 2 MiB, so etcd sends them in fragments.
    pub(crate) async fn large_deletion(&mut self) {
        let prefix = vec![b'm'; 600];
        let name = |index: u32| [prefix.as_slice(), &index.to_be_bytes()].concat();
        for begin in (0..4_000).step_by(125) {
            let puts = (begin..begin + 125).map(|index| TxnOp::put(name(index), "", None));
            let txn = Txn::new().and_then(puts.collect::<Vec<_>>());
            self.client.txn(txn).await.unwrap();
        }
        let options = DeleteOptions::new().with_prefix();
        let deleted = self.client.delete(prefix, Some(options)).await.unwrap();
        assert_eq!(deleted.deleted(), 4_000);
    }

    /// Puts keys with a lease that expires. Returns when etcd has deleted the keys.
    pub(crate) async fn expiring_lease(&mut self) {
        let id = self.grant(5).await;
        self.leases.retain(|lease| *lease != id);
        for key in ["expires-b", "expires-a", "expires-c"] {
            let options = PutOptions::new().with_lease(id);
            self.client.put(key, "", Some(options)).await.unwrap();
        }
        let count = || GetOptions::new().with_prefix().with_count_only();
        while self
            .client
            .get("expires-", Some(count()))
            .await
            .unwrap()
            .count()
            > 0
        {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }
}
