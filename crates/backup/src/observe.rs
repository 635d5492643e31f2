//! Reads the input of a plan: Kubernetes objects, the content of the store, and the addresses of etcd. Changes nothing.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::EtcdBackup;
use api::storage::StorageSource;
use etcd::Etcd;
use jiff::{SignedDuration, Timestamp};
use kube::{Client, ResourceExt};
use runtime::controller::Cache;
use runtime::endpoints::EndpointGrants;
use runtime::image::OwnImage;
use store::encryption::Key;
use store::grants::Grants;
use store::{LocalStore, Store, Target};
use tokio::time::timeout;

use crate::plan::{Need, intent};
use crate::reads::Reads;
use crate::reason::{Reason, Trouble};
use crate::snapshot::{Destination, Inputs, Site, Snapshot};
use crate::transfer::{EarlierAttempt, ObjectName, Owner, earlier_attempt};
use crate::verification::Turns;

mod clock;
mod cluster;
pub(crate) mod copies;
mod denied;
pub(crate) mod recording;
mod same_path;
mod site;
pub(crate) mod verification;

/// Time limit for the reads of one part of a reconcile. The parts are the backup in the first store, each copy, and the
/// agent.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct ObserveContext {
    pub(crate) client: Client,
    /// The client for clusters that use neither TLS nor authentication.
    pub(crate) etcd: Arc<dyn Etcd>,
    /// The storage locations that each namespace may use with the operator's own cloud identity.
    pub(crate) grants: Grants,
    /// Limits the number of concurrent listings and manifest reads of stores.
    pub(crate) reads: Reads,
    /// The etcd endpoints that each namespace may use in `spec.etcdEndpoints` (`--etcd-endpoints`).
    pub(crate) endpoints: EndpointGrants,
    /// The directory for backups with storageType `Local`.
    pub(crate) local: Option<LocalStore>,
    /// The maximum size of all files of a namespace in `local`, in bytes.
    pub(crate) local_quota: Option<u64>,
    /// Maximum size of a snapshot in bytes.
    pub(crate) max_snapshot: u64,
    /// All EtcdBackups, from the watch.
    pub(crate) objects: Cache<EtcdBackup>,
    /// The image of pods that mount a PersistentVolumeClaim, and of pods that verify a backup.
    pub(crate) image: OwnImage,
    /// The EtcdBackups whose backups are being verified.
    pub(crate) turns: Arc<Turns>,
}

/// The store, the etcd client and the encryption key for a job that runs in this process.
#[derive(Default)]
pub(crate) struct Connections {
    pub(crate) store: Option<Arc<dyn Store>>,
    pub(crate) etcd: Option<Arc<dyn Etcd>>,
    /// The key for the encryption of the backup, if the spec requires encryption.
    pub(crate) encryption: Option<Key>,
}

#[derive(Default)]
struct Read {
    destination: Destination,
    inputs: Inputs,
    connections: Connections,
    clock_difference: Option<SignedDuration>,
}

/// Reads the data that the plan needs, and adds it to `snapshot`, which contains the state of the workers.
pub(crate) async fn observe(
    context: &ObserveContext,
    backup: &EtcdBackup,
    snapshot: Snapshot,
    need: Need,
) -> (Snapshot, Connections) {
    let read = async {
        match (need, intent(backup)) {
            (Need::Destination, Some(begun)) => {
                Box::pin(for_transfer(context, backup, begun)).await
            }
            (Need::RemoveSurplus, _) => {
                let difference = clock::difference(&context.client).await?;
                let read = Box::pin(for_removal(context, backup)).await?;
                Ok(Read {
                    clock_difference: Some(difference),
                    ..read
                })
            }
            (Need::RemoveAll, _) => Box::pin(for_removal(context, backup)).await,
            (Need::Clock, _) => Ok(Read {
                clock_difference: Some(clock::difference(&context.client).await?),
                ..Read::default()
            }),
            (Need::Destination | Need::Nothing, _) => Ok(Read::default()),
        }
    };
    let read = timeout(READ_TIMEOUT, Box::pin(read)).await;
    let read = read.unwrap_or_else(|_| {
        let message = format!("no answer from the store or the API server within {READ_TIMEOUT:?}");
        Err(Trouble::new(Reason::StoreUnreachable, message))
    });
    let (snapshot, connections) = match read {
        Ok(read) => (
            Snapshot {
                destination: read.destination,
                inputs: read.inputs,
                clock_difference: read.clock_difference,
                ..snapshot
            },
            read.connections,
        ),
        Err(trouble) => (unread(snapshot, need, trouble), Connections::default()),
    };
    (denied::name_secret(backup, snapshot), connections)
}

fn unread(snapshot: Snapshot, need: Need, trouble: Trouble) -> Snapshot {
    if need == Need::Destination {
        let destination = Destination::Unknown(trouble);
        return Snapshot {
            destination,
            ..snapshot
        };
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
    let namespace = backup.namespace().unwrap_or_default();
    let rule = context.endpoints.of(&namespace);
    if let StorageSource::Pvc(pvc) = source {
        // Only the backup pod can read the volume. The operator reads the Secrets before it creates the pod, to report
        // errors in the Secrets early.
        let source = Box::pin(cluster::source(&context.client, backup, &rule)).await?;
        Box::pin(cluster::client(context, backup)).await?;
        site::encryption_key(&context.client, backup).await?;
        return Ok(Read {
            destination: Destination::Free,
            inputs: Inputs::Transfer {
                site: site::volume(context, backup, pvc).await?,
                leftover: None,
                source,
                rule,
            },
            ..Read::default()
        });
    }
    let Target { store, key } = site::open(context, backup, &source).await?;
    let uid = backup.uid().unwrap_or_default();
    let reference = backup.spec.etcd_cluster.as_ref();
    let owner = Owner {
        uid: &uid,
        cluster: reference.map(|cluster| cluster.name.as_str()),
        encrypted: backup.spec.encryption.is_some(),
        verify_content: false,
    };
    let name = ObjectName::of(key.clone(), backup.spec.is_periodic().then_some(begun));
    let slot = context.reads.slot(&namespace, store.as_ref()).await;
    let leftover = match earlier_attempt(store.as_ref(), name, owner, begun).await? {
        EarlierAttempt::Complete(stored) => {
            return Ok(Read {
                destination: Destination::Complete(stored),
                ..Read::default()
            });
        }
        EarlierAttempt::Incomplete(name) => name.leftover(),
    };
    drop(slot);
    let source = Box::pin(cluster::source(&context.client, backup, &rule)).await?;
    let etcd = Box::pin(cluster::client(context, backup)).await?;
    let encryption = site::encryption_key(&context.client, backup).await?;
    Ok(Read {
        destination: Destination::Free,
        inputs: Inputs::Transfer {
            site: Site::Store { key },
            leftover,
            source,
            rule,
        },
        connections: Connections {
            store: Some(context.reads.limit(&namespace, store)),
            etcd: Some(etcd),
            encryption,
        },
        ..Read::default()
    })
}

async fn for_removal(context: &ObserveContext, backup: &EtcdBackup) -> Result<Read, Trouble> {
    let source = site::source_of(backup)?;
    let others = others(&context.objects, backup, &source)?;
    let (site, store) = if let StorageSource::Pvc(pvc) = source {
        (site::volume(context, backup, pvc).await?, None)
    } else {
        let Target { store, key } = site::open(context, backup, &source).await?;
        let namespace = backup.namespace().unwrap_or_default();
        let store = context.reads.limit(&namespace, store);
        (Site::Store { key }, Some(store))
    };
    Ok(Read {
        inputs: Inputs::Removal { site, others },
        connections: Connections {
            store,
            ..Connections::default()
        },
        ..Read::default()
    })
}

/// The UIDs of the other periodic EtcdBackups that write to `own`, a store of this EtcdBackup. Retention fails while a
/// namespace is not listed, because the EtcdBackups of that namespace may use this path (invariant 1). The deletion of
/// an EtcdBackup removes only backups of this EtcdBackup, so it needs no complete list.
fn others(
    all: &Cache<EtcdBackup>,
    backup: &EtcdBackup,
    own: &StorageSource<'_>,
) -> Result<BTreeSet<String>, Trouble> {
    if backup.metadata.deletion_timestamp.is_none() && !all.is_complete() {
        return Err(Trouble::new(
            Reason::StepFailed,
            "the operator cannot list the EtcdBackups of a watched namespace, and removes no stored backup until it \
             can. The operator's log names the namespace: give the operator its Role there, or remove the namespace \
             from the list (--watch-namespace, watchNamespaces of the chart)",
        ));
    }
    let others = all.select(|other| same_path::writes_to(backup, own, other));
    Ok(others.iter().filter_map(|other| other.uid()).collect())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kube::client::Body;
    use prometheus_client::registry::Registry;
    use runtime::Operator;
    use runtime::controller::{Controllers, Scope};
    use serde_json::json;
    use tower::service_fn;

    use super::*;

    /// The cache of an operator that has not listed any of these namespaces.
    fn cache(namespaces: &[&str]) -> Cache<EtcdBackup> {
        let answer = async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty()));
        let client = Client::new(service_fn(answer), "operators");
        let operator = Operator::new(
            ("etcd-backup-operator", "backup"),
            (client.clone(), client),
            Scope::Namespaces(namespaces.iter().map(ToString::to_string).collect()),
            ("operators".to_owned(), "pod".to_owned()),
            &mut Registry::default(),
        );
        Controllers::new(&operator).cache()
    }

    /// Another EtcdBackup may store backups at the path of `backup`, in a namespace that the operator has not listed.
    #[tokio::test]
    async fn invariant_1_retention_waits_until_all_namespaces_are_listed() {
        let object = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": "b", "namespace": "a" },
            "spec": { "etcdCluster": { "name": "c" }, "storageType": "S3", "s3": { "path": "bucket/etcd" },
                      "backupPolicy": { "schedule": "@daily" } },
        });
        let mut backup: EtcdBackup = serde_json::from_value(object).unwrap();
        let others = |all: &Cache<EtcdBackup>, backup: &EtcdBackup| {
            others(all, backup, &site::source_of(backup).unwrap())
        };
        let trouble = others(&cache(&["a", "b"]), &backup).unwrap_err();
        assert_eq!(trouble.reason, Reason::StepFailed);
        assert!(trouble.message.contains("watchNamespaces"), "{trouble:?}");
        assert_eq!(others(&cache(&[]), &backup), Ok(BTreeSet::new()));
        // `others` needs no complete list of namespaces for an EtcdBackup that is being deleted, because the deletion
        // removes only backups of this EtcdBackup.
        backup.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        assert_eq!(others(&cache(&["a", "b"]), &backup), Ok(BTreeSet::new()));
    }
}
