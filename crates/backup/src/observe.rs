//! Reads what a plan needs: Kubernetes objects, the content of the store, and how etcd is reached. It reads only.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::EtcdBackup;
use api::storage::StorageSource;
use etcd::Etcd;
use jiff::Timestamp;
use kube::runtime::reflector::Store as ReflectorStore;
use kube::{Client, ResourceExt};
use runtime::controller::Guarded;
use runtime::image::OwnImage;
use store::grants::Grants;
use store::{Directories, Store, Target};
use tokio::time::timeout;

use crate::plan::{Need, intent};
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Inputs, Place, Site, Snapshot};
use crate::transfer::{Name, Whose, Written, written};

mod cluster;
mod denied;
mod same_path;
mod site;

/// How long all reads of one reconcile may take together.
const DEADLINE: Duration = Duration::from_secs(30);

/// The clients and caches that are read.
pub(crate) struct ObserveContext {
    /// The API server.
    pub(crate) client: Client,
    /// The members of clusters without TLS and authentication.
    pub(crate) etcd: Arc<dyn Etcd>,
    /// Which namespaces may use the identity of the operator.
    pub(crate) grants: Grants,
    /// The directories that the operator's pod has mounted.
    pub(crate) directories: Directories,
    /// All EtcdBackups, from the watch.
    pub(crate) objects: ReflectorStore<Guarded<EtcdBackup>>,
    /// The image of pods that mount a PersistentVolumeClaim.
    pub(crate) image: OwnImage,
}

/// The store and the etcd client of a job that runs in this process.
#[derive(Default)]
pub(crate) struct Connections {
    pub(crate) store: Option<Arc<dyn Store>>,
    pub(crate) etcd: Option<Arc<dyn Etcd>>,
}

/// What was read.
#[derive(Default)]
struct Read {
    place: Place,
    inputs: Inputs,
    connections: Connections,
}

/// Completes the snapshot, which says what this process does, by what the plan needs.
pub(crate) async fn observe(
    context: &ObserveContext,
    backup: &EtcdBackup,
    snapshot: Snapshot,
    need: Need,
) -> (Snapshot, Connections) {
    let read = async {
        match (need, intent(backup)) {
            (Need::Place, Some(begun)) => Box::pin(for_transfer(context, backup, begun)).await,
            (Need::RemoveSurplus | Need::RemoveAll, _) => {
                Box::pin(for_removal(context, backup)).await
            }
            (Need::Place | Need::Nothing, _) => Ok(Read::default()),
        }
    };
    let read = timeout(DEADLINE, Box::pin(read)).await;
    let read = read.unwrap_or_else(|_| {
        let message = format!("no answer from the store or the API server within {DEADLINE:?}");
        Err(Trouble::new(Reason::StoreUnreachable, message))
    });
    let (snapshot, connections) = match read {
        Ok(read) => (
            Snapshot {
                place: read.place,
                inputs: read.inputs,
                ..snapshot
            },
            read.connections,
        ),
        Err(trouble) => (unread(snapshot, need, trouble), Connections::default()),
    };
    (denied::with_its_secret(backup, snapshot), connections)
}

fn unread(snapshot: Snapshot, need: Need, trouble: Trouble) -> Snapshot {
    if need == Need::Place {
        let place = Place::Unknown(trouble);
        return Snapshot { place, ..snapshot };
    }
    Snapshot {
        obstacle: Some(trouble),
        ..snapshot
    }
}

async fn for_transfer(
    context: &ObserveContext,
    backup: &EtcdBackup,
    begun: Timestamp,
) -> Result<Read, Trouble> {
    let source = site::source_of(backup)?;
    if let StorageSource::Pvc(pvc) = source {
        // Only the pod can read the volume. Problems with the Secrets are reported before there is one.
        let source = cluster::source(context, backup).await?;
        cluster::client(context, backup).await?;
        return Ok(Read {
            place: Place::Free,
            inputs: Inputs::Transfer {
                site: site::volume(context, backup, pvc).await?,
                left: None,
                source,
            },
            connections: Connections::default(),
        });
    }
    let Target { store, key } = site::open(context, backup, &source).await?;
    let uid = backup.uid().unwrap_or_default();
    let whose = Whose {
        uid: &uid,
        cluster: backup.spec.etcd_cluster.as_ref().map(|of| of.name.as_str()),
        reads: false,
    };
    let name = Name::of(key.clone(), backup.spec.is_periodic().then_some(begun));
    let left = match written(store.as_ref(), name, whose, begun).await? {
        Written::Whole(stored) => {
            return Ok(Read {
                place: Place::Written(stored),
                ..Read::default()
            });
        }
        Written::Not(name) => name.left(),
    };
    let source = cluster::source(context, backup).await?;
    let etcd = cluster::client(context, backup).await?;
    Ok(Read {
        place: Place::Free,
        inputs: Inputs::Transfer {
            site: Site::Store { key },
            left,
            source,
        },
        connections: Connections {
            store: Some(store),
            etcd: Some(etcd),
        },
    })
}

async fn for_removal(context: &ObserveContext, backup: &EtcdBackup) -> Result<Read, Trouble> {
    let others = others(context, backup);
    let source = site::source_of(backup)?;
    let (site, store) = if let StorageSource::Pvc(pvc) = source {
        (site::volume(context, backup, pvc).await?, None)
    } else {
        let Target { store, key } = site::open(context, backup, &source).await?;
        (Site::Store { key }, Some(store))
    };
    Ok(Read {
        place: Place::NotAsked,
        inputs: Inputs::Removal { site, others },
        connections: Connections { store, etcd: None },
    })
}

/// The UIDs of the other EtcdBackups that number their backups at the same path.
fn others(context: &ObserveContext, backup: &EtcdBackup) -> BTreeSet<String> {
    let all = context.objects.state();
    same_path::others(backup, all.iter().map(AsRef::as_ref))
}
