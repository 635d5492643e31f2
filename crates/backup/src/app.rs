//! The wiring: what is watched, and what runs the reconciles.

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
use crate::metrics::Measures;
use crate::observe::ObserveContext;
use crate::reconcile::ReconcileContext;
use crate::workers::{Limits, Workers};

/// As long as a slow API server may take for a record, and a queue of looks at hundreds of EtcdBackups until it is this
/// one's turn: a look at a store that does not answer takes half a minute.
const UNCOUNTED: Duration = Duration::from_mins(5);

/// Transfers that move bytes at the same time: each takes 32 MiB of memory. One store gets half of them at most.
const TRANSFERS: Limits = Limits {
    at_a_time: 4,
    to_one_store: 2,
    longest_pause: 30,
    uncounted: UNCOUNTED,
};

/// Removals move no bytes; what cannot be removed is not asked for all the time.
const REMOVALS: Limits = Limits {
    at_a_time: 8,
    to_one_store: 2,
    longest_pause: 300,
    uncounted: UNCOUNTED,
};

/// What an administrator decides for all EtcdBackups.
#[derive(Args, Clone, Debug, Default)]
pub struct Settings {
    /// A place that a namespace may use with the operator's own identity, as in team-a=s3://backups/team-a. May be
    /// given more than once; * means every namespace. The operator's own namespace needs none
    #[arg(long, value_name = "NAMESPACE=PLACE")]
    pub ambient_identity: Vec<Grant>,
    /// The directory of backups with storageType Local
    #[arg(long, value_name = "DIRECTORY")]
    pub local_directory: Option<PathBuf>,
    /// The image of the pods that write to a claim; the operator's own where it is not given
    #[arg(long, env = "OPERATOR_IMAGE", value_name = "IMAGE")]
    pub operator_image: Option<String>,
}

/// Runs until the operator is told to stop; transfers that run then are given up and leave nothing behind.
pub async fn work(operator: Operator, settings: Settings) {
    let (news, ended) = mpsc::unbounded_channel();
    // What ends is reported at once. All EtcdBackups are looked at then; for those that are done with that costs no
    // call.
    let backups =
        controller::<EtcdBackup>(&operator).reconcile_all_on(UnboundedReceiverStream::new(ended));
    let execute = ExecuteContext {
        client: operator.client.clone(),
        transfers: Workers::new(TRANSFERS, operator.shutdown.clone(), news.clone()),
        removals: Workers::new(REMOVALS, operator.shutdown.clone(), news),
        objects: backups.store(),
        since: Timestamp::now(),
        shutdown: operator.shutdown.clone(),
    };
    operator.metrics.collect(Measures {
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
    let of_clusters = Arc::new(ClusterBackups {
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
    // The metrics count EtcdBackups.
    let beside_them = Operator {
        objects: Objects::default(),
        ..operator.clone()
    };
    tokio::join!(
        drive(&operator, backups, reconciler.clone()),
        drive(&beside_them, clusters, of_clusters),
    );
    reconciler.execute.ended().await;
}

/// The EtcdCluster an EtcdBackup is of.
fn cluster_of(backup: Guarded<EtcdBackup>) -> Option<ObjectRef<Guarded<EtcdCluster>>> {
    let namespace = backup.namespace()?;
    let readable = backup.0.ok()?;
    let reference = readable.spec.etcd_cluster?;
    Some(ObjectRef::new(&reference.name).within(&namespace))
}
