//! Takes the snapshot of a base and streams it to the store.

use bytes::Bytes;
use etcd::{Etcd, EtcdClient, InspectError, Inspected, Inspector};
use futures::StreamExt;
use store::{Store, Upload};

use crate::base::{Base, BaseEncryption, BaseError, SnapshotObject, StoredBase};
use crate::capture::now_micros;
use crate::name::{SNAPSHOTS, snapshot_name};
use crate::stored::write_base;

/// Why a base cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// etcd does not send a snapshot.
    #[error("the snapshot cannot be taken")]
    Etcd(#[from] etcd::Error),
    /// The snapshot is damaged or not complete.
    #[error("the snapshot is not valid")]
    Invalid(#[from] InspectError),
    /// The snapshot cannot be stored.
    #[error("the snapshot cannot be stored")]
    Store(#[from] store::Error),
    /// The revision of the snapshot cannot be the revision of a base.
    #[error("the snapshot cannot be the base of a chain")]
    Base(#[from] BaseError),
    /// The store has a different number of bytes than the agent has sent.
    #[error("the store has {stored} bytes of the snapshot, but the agent has sent {sent}")]
    OtherSize {
        /// Number of bytes in the store.
        stored: u64,
        /// Number of bytes that the agent has sent.
        sent: u64,
    },
    /// After the snapshot, the member belongs to another cluster.
    #[error("the member has joined another cluster during the snapshot")]
    ClusterChanged,
}

/// Takes a snapshot from one member, and stores it with its base. `store` must not encrypt its objects. `prefix` is
/// empty or ends with a slash.
///
/// # Errors
/// Fails if etcd or the store fails. If the base could not be written, the store may have a snapshot without a base.
pub async fn take_base(
    client: &EtcdClient,
    member: &str,
    store: &dyn Store,
    prefix: &str,
) -> Result<StoredBase, TakeError> {
    take_described_base(client, member, (store, None), prefix).await
}

/// Takes a base as [`take_base`] does. The base contains `encryption`, the description of the encryption of `store`.
/// `encryption` is `None` if `store` does not encrypt its objects.
pub(crate) async fn take_described_base(
    client: &EtcdClient,
    member: &str,
    (store, encryption): (&dyn Store, Option<&BaseEncryption>),
    prefix: &str,
) -> Result<StoredBase, TakeError> {
    let cluster_id = client.status(member).await?.cluster_id;
    let snapshot = client.snapshot(member).await?;
    let key = format!("{prefix}{SNAPSHOTS}{}", snapshot_name(now_micros()));
    let mut upload = store.begin(&key).await?;
    let sent = match send(snapshot.chunks, upload.as_mut()).await {
        Ok(sent) => sent,
        Err(error) => {
            // The caller gets the error of `send`, because it is the cause. If `abort` fails too, retention discards
            // the unfinished upload later.
            let _ = upload.abort().await;
            return Err(error);
        }
    };
    let snapshot = SnapshotObject {
        key: key.clone(),
        size: sent.size,
        sha256: hex::encode(sent.sha256),
    };
    let base = Base {
        cluster_id,
        revision: sent.store_revision(),
        snapshot,
        created: 0,
        encryption: encryption.cloned(),
    };
    let base = match complete(client, member, upload, base).await {
        Ok(base) => base,
        Err(error) => {
            // No base names this snapshot. The caller gets the error of `complete`, even if the deletion fails.
            let _ = store.delete(&key).await;
            return Err(error);
        }
    };
    // If this write fails, the snapshot is not deleted: perhaps only the answer was lost, and the store has the base
    // that names this snapshot.
    write_base(store, prefix, &base).await?;
    Ok(base)
}

/// Completes the upload of a snapshot. Returns its base, which is not stored yet, with the current time.
async fn complete(
    client: &EtcdClient,
    member: &str,
    upload: Box<dyn Upload>,
    base: Base,
) -> Result<StoredBase, TakeError> {
    let (stored, sent) = (upload.commit().await?.size, base.stored_size());
    if stored != sent {
        return Err(TakeError::OtherSize { stored, sent });
    }
    if client.status(member).await?.cluster_id != base.cluster_id {
        return Err(TakeError::ClusterChanged);
    }
    let base = Base {
        created: now_micros(),
        ..base
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
