//! Connects the watches, the reconcilers and the workers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::{EtcdBackup, EtcdCluster};
use clap::Args;
use etcd::{Access, EtcdClient};
use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use runtime::Operator;
use runtime::controller::{Guarded, controller, drive};
use runtime::image::OwnImage;
use runtime::process::Objects;
use store::Directories;
use store::grants::{Grant, Grants};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::cluster_backup::ClusterBackups;
use crate::execute::ExecuteContext;
use crate::metrics::BackupMetrics;
use crate::observe::ObserveContext;
use crate::reconcile::ReconcileContext;
use crate::workers::{Limits, Workers};

/// Time limit for the record of an attempt in the status. It covers a slow API server and a queue of hundreds of
/// reconciles, each of which waits up to 30 seconds for a store that does not answer.
const RECORD_TIMEOUT: Duration = Duration::from_mins(5);

/// Limits of transfers. Each transfer needs 32 MiB of memory.
const TRANSFERS: Limits = Limits {
    concurrent: 4,
    per_store: 2,
    max_backoff_seconds: 30,
    record_timeout: RECORD_TIMEOUT,
};

/// Limits of removals. They transfer no data, so more of them may run.
const REMOVALS: Limits = Limits {
    concurrent: 8,
    per_store: 2,
    max_backoff_seconds: 300,
    record_timeout: RECORD_TIMEOUT,
};

/// Settings of an administrator for all EtcdBackups.
#[derive(Args, Clone, Debug, Default)]
pub struct Settings {
    /// Allow a namespace to use a location with the operator's own identity, as in team-a=s3://backups/team-a. Repeat
    /// the flag for more locations; * means every namespace. The operator's own namespace needs no permission
    #[arg(long, value_name = "NAMESPACE=PLACE")]
    pub ambient_identity: Vec<Grant>,
    /// Directory for backups with storageType Local
    #[arg(long, value_name = "DIRECTORY")]
    pub local_directory: Option<PathBuf>,
    /// Image of the pods that mount a PersistentVolumeClaim. The default is the operator's own image
    #[arg(long, env = "OPERATOR_IMAGE", value_name = "IMAGE")]
    pub operator_image: Option<String>,
}

/// Runs until the operator shuts down. The shutdown cancels running transfers, which leave no objects in the store.
pub async fn work(operator: Operator, settings: Settings) {
    let (changes, ended) = mpsc::unbounded_channel();
    // The end of a worker reconciles all EtcdBackups, so its outcome is reported at once. A reconcile of a finished
    // EtcdBackup sends no request.
    let backups =
        controller::<EtcdBackup>(&operator).reconcile_all_on(UnboundedReceiverStream::new(ended));
    let execute = ExecuteContext {
        client: operator.client.clone(),
        transfers: Workers::new(TRANSFERS, operator.shutdown.clone(), changes.clone()),
        removals: Workers::new(REMOVALS, operator.shutdown.clone(), changes),
        objects: backups.store(),
        since: Timestamp::now(),
        shutdown: operator.shutdown.clone(),
    };
    operator.metrics.collect(BackupMetrics {
        objects: backups.store(),
        transfers: execute.transfers.clone(),
    });
    let reconciler = Arc::new(ReconcileContext {
        observe: ObserveContext {
            client: operator.client.clone(),
            etcd: Arc::new(EtcdClient::new(Access::default())),
            grants: Grants {
                operator: "backup operator",
                own: operator.namespace.clone(),
                others: settings.ambient_identity,
            },
            directories: Directories {
                local: settings.local_directory,
                claim: None,
            },
            objects: backups.store(),
            image: OwnImage::new(&operator, settings.operator_image),
        },
        execute,
    });
    let cluster_backups = Arc::new(ClusterBackups {
        client: operator.client.clone(),
        backups: backups.store(),
    });
    let clusters = controller::<EtcdCluster>(&operator).watches(
        operator
            .scope
            .api::<Guarded<EtcdBackup>>(operator.client.clone()),
        watcher::Config::default(),
        cluster_of,
    );
    // The object counts of the metrics cover EtcdBackups only.
    let for_clusters = Operator {
        objects: Objects::default(),
        ..operator.clone()
    };
    tokio::join!(
        drive(&operator, backups, reconciler.clone()),
        drive(&for_clusters, clusters, cluster_backups),
    );
    reconciler.execute.join().await;
}

/// The EtcdCluster that an EtcdBackup backs up.
fn cluster_of(backup: Guarded<EtcdBackup>) -> Option<ObjectRef<Guarded<EtcdCluster>>> {
    let namespace = backup.namespace()?;
    let readable = backup.0.ok()?;
    let reference = readable.spec.etcd_cluster?;
    Some(ObjectRef::new(&reference.name).within(&namespace))
}
