//! The requests of a capture to etcd. Tests replace etcd by a simulation.

use async_trait::async_trait;
use etcd::{ClusterId, Error, Etcd, EtcdClient, KeyHash, LeaseTtl, Watch, WatchBatch, WatchError};

/// An etcd cluster whose changes are recorded. The methods are those of [`EtcdClient`].
#[async_trait]
pub trait Source: Send + Sync {
    /// Watches all keys from `start_revision`, through one member. The watch includes the events of `start_revision`.
    async fn watch(&self, member: &str, start_revision: i64) -> Result<Box<dyn Changes>, Error>;
    /// Returns the ID of the cluster and its newest revision, by a linearizable read.
    async fn newest_revision(&self, member: &str) -> Result<(ClusterId, i64), Error>;
    /// Returns the TTL with which a lease was granted.
    async fn lease(&self, member: &str, id: i64) -> Result<LeaseTtl, Error>;
    /// Returns the hash of one member's keys at a revision. `None` if the member has compacted this revision.
    async fn hash(&self, member: &str, revision: i64) -> Result<Option<KeyHash>, Error>;
}

/// A running watch. Dropping it ends the watch.
#[async_trait]
pub trait Changes: Send {
    /// Waits for the next batch. If the caller drops the future, no batch is lost.
    async fn next(&mut self) -> Result<WatchBatch, WatchError>;
    /// Requests a progress notification, which is a batch without events.
    async fn request_progress(&mut self) -> Result<(), WatchError>;
}

#[async_trait]
impl Source for EtcdClient {
    async fn watch(&self, member: &str, start_revision: i64) -> Result<Box<dyn Changes>, Error> {
        let watch = Box::pin(EtcdClient::watch(self, member, start_revision)).await?;
        Ok(Box::new(watch))
    }

    async fn newest_revision(&self, member: &str) -> Result<(ClusterId, i64), Error> {
        Box::pin(EtcdClient::newest_revision(self, member)).await
    }

    async fn lease(&self, member: &str, id: i64) -> Result<LeaseTtl, Error> {
        Box::pin(EtcdClient::lease(self, member, id)).await
    }

    async fn hash(&self, member: &str, revision: i64) -> Result<Option<KeyHash>, Error> {
        Etcd::hash(self, member, revision).await
    }
}

#[async_trait]
impl Changes for Watch {
    async fn next(&mut self) -> Result<WatchBatch, WatchError> {
        Watch::next(self).await
    }

    async fn request_progress(&mut self) -> Result<(), WatchError> {
        Watch::request_progress(self).await
    }
}
