//! Takes the snapshot of a base and streams it to the store.

use bytes::Bytes;
use etcd::{ClusterId, Etcd, EtcdClient, InspectError, Inspected, Inspector};
use futures::StreamExt;
use store::{Store, Upload};

use crate::base::{Base, BaseError, SnapshotObject, StoredBase};
use crate::capture::now_micros;
use crate::name::{SNAPSHOTS, snapshot_name};
use crate::stored::write_base;

/// Why a base cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// etcd does not send a snapshot.
    #[error("the snapshot cannot be taken")]
    Etcd(#[from] etcd::Error),
    /// The snapshot is not complete.
    #[error("the snapshot is not valid")]
    Invalid(#[from] InspectError),
    /// The snapshot cannot be stored.
    #[error("the snapshot cannot be stored")]
    Store(#[from] store::Error),
    /// The revision of the snapshot cannot be the revision of a base.
    #[error("the snapshot cannot be the base of a chain")]
    Base(#[from] BaseError),
    /// The store has a different number of bytes than etcd has sent.
    #[error("the store has {stored} bytes of the snapshot, but etcd has sent {sent}")]
    OtherSize {
        /// Number of bytes in the store.
        stored: u64,
        /// Number of bytes that etcd has sent.
        sent: u64,
    },
    /// After the snapshot, the member belongs to another cluster.
    #[error("the member has joined another cluster during the snapshot")]
    ClusterChanged,
}

/// Takes a snapshot from one member, and stores it with its base. `prefix` is empty or ends with a slash.
///
/// # Errors
/// Fails if etcd or the store fails. If the base could not be written, the store may have a snapshot without a base.
pub async fn take_base(
    client: &EtcdClient,
    member: &str,
    store: &dyn Store,
    prefix: &str,
) -> Result<StoredBase, TakeError> {
    let cluster_id = client.status(member).await?.cluster_id;
    let snapshot = client.snapshot(member).await?;
    let key = format!("{prefix}{SNAPSHOTS}{}", snapshot_name(now_micros()));
    let mut upload = store.begin(&key).await?;
    let sent = match send(snapshot.chunks, upload.as_mut()).await {
        Ok(sent) => sent,
        Err(error) => {
            // The caller gets the error of `send`, because it is the cause. If `abort` fails too, the store removes
            // the upload later.
            let _ = upload.abort().await;
            return Err(error);
        }
    };
    let base = match complete(client, member, cluster_id, upload, &key, &sent).await {
        Ok(base) => base,
        Err(error) => {
            // No base names this snapshot. If the deletion fails too, the caller still gets the first error.
            let _ = store.delete(&key).await;
            return Err(error);
        }
    };
    // After a failure of this write, the store can have the base, because only the answer may be lost. The snapshot is
    // therefore not deleted.
    write_base(store, prefix, &base).await?;
    Ok(base)
}

/// Completes the upload of a snapshot. Returns its base, which is not stored yet.
async fn complete(
    client: &EtcdClient,
    member: &str,
    cluster_id: ClusterId,
    upload: Box<dyn Upload>,
    key: &str,
    sent: &Inspected,
) -> Result<StoredBase, TakeError> {
    let stored = upload.commit().await?.size;
    if stored != sent.size {
        return Err(TakeError::OtherSize {
            stored,
            sent: sent.size,
        });
    }
    if client.status(member).await?.cluster_id != cluster_id {
        return Err(TakeError::ClusterChanged);
    }
    let base = Base {
        cluster_id,
        revision: sent.store_revision(),
        snapshot: SnapshotObject {
            key: key.to_owned(),
            size: sent.size,
            sha256: hex::encode(sent.sha256),
        },
        created: now_micros(),
    };
    Ok(base.encode()?)
}

/// Sends the snapshot to the store, and inspects it at the same time.
async fn send(
    mut chunks: impl futures::Stream<Item = Result<Bytes, etcd::Error>> + Unpin,
    upload: &mut dyn Upload,
) -> Result<Inspected, TakeError> {
    let mut inspector = Inspector::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        inspector.push(&chunk);
        upload.write(chunk).await?;
    }
    Ok(inspector.finish()?)
}
