//! Connects the watches, the reconcilers and the workers.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::{EtcdBackup, EtcdCluster};
use clap::Args;
use etcd::{Access, EtcdClient};
use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use mirror::app::Mirrors;
use runtime::Operator;
use runtime::controller::{Controllers, Guarded, Scope, drive};
use runtime::endpoints::{EndpointGrant, EndpointGrants, GrantedBy};
use runtime::image::OwnImage;
use runtime::process::Objects;
use store::LocalStore;
use store::grants::{Grant, Grants};
use tokio::sync::mpsc;

use crate::cluster_backup::ClusterBackups;
use crate::execute::ExecuteContext;
use crate::metrics::BackupMetrics;
use crate::observe::ObserveContext;
use crate::reads::Reads;
use crate::reconcile::ReconcileContext;
use crate::verification::Turns;
use crate::workers::{Limits, Workers};

/// Time limit for recording an attempt in the status. The limit is long, because hundreds of reconciles may be queued,
/// and each reconcile may wait 30 seconds for a store.
const RECORD_TIMEOUT: Duration = Duration::from_mins(5);

/// Maximum back-off between two attempts of a transfer, in seconds.
const TRANSFER_BACKOFF: u64 = 30;

/// Limits of the workers that remove stored backups. More removals than transfers may run concurrently, because
/// removals transfer no data.
const REMOVALS: Limits = Limits {
    concurrent: 8,
    per_store: 2,
    per_namespace: 8,
    max_backoff_seconds: 300,
    record_timeout: RECORD_TIMEOUT,
    // A removal can delete about 100,000 backups in an hour. After the timeout, the next removal deletes the remaining
    // backups.
    timeout: Duration::from_hours(1),
};

/// Limits of the workers that copy backups to the stores of `spec.copyTo`. Copies and transfers use separate slots, so
/// that a slow second store does not delay backups. A copy downloads and uploads at the same time, so it needs twice
/// the memory of a transfer.
const COPIES: Limits = Limits {
    concurrent: 2,
    per_store: 2,
    per_namespace: 2,
    // The worker adds no pause after a failure. The plan computes the pause from the status, so that the pause also
    // applies after a restart of the operator.
    max_backoff_seconds: 0,
    record_timeout: RECORD_TIMEOUT,
    timeout: Duration::from_hours(48),
};

/// If an endpoint has no grant, the message names this operator, this flag and this chart value.
pub(crate) const ENDPOINTS: GrantedBy = GrantedBy {
    operator: "backup operator",
    flag: "--etcd-endpoints",
    value: "backups.etcdEndpoints",
};

/// Settings of an administrator for all EtcdBackups.
#[derive(Args, Clone, Debug)]
pub struct Settings {
    /// Allow a namespace to use a location with the operator's own identity, as in team-a=s3://backups/team-a. Repeat
    /// the flag for more locations; * means every namespace. The operator's own namespace needs no permission
    #[arg(long, value_name = "NAMESPACE=PLACE")]
    pub ambient_identity: Vec<Grant>,
    /// Allow a namespace to use an etcd outside of its EtcdClusters in spec.etcdEndpoints of an EtcdBackup and in
    /// spec.source.etcdEndpoints of an EtcdMirror, as in team-a=etcd.example.com. Repeat the flag for more hosts; *
    /// means every namespace, *.example.com every name below it. The port is 2379 by default. The operator's own
    /// namespace needs no permission
    #[arg(long, value_name = "NAMESPACE=HOST[:PORT]")]
    pub etcd_endpoints: Vec<EndpointGrant>,
    /// Directory for backups with storageType Local. EtcdBackups of other namespaces than the operator's use the
    /// directory namespaces/NAMESPACE in it
    #[arg(long, value_name = "DIRECTORY")]
    pub local_directory: Option<PathBuf>,
    /// Maximum size of all files that a namespace has in the directory for backups. The operator's own namespace has no
    /// limit. The default is no limit
    #[arg(long, value_name = "BYTES")]
    pub local_quota: Option<u64>,
    /// Maximum size of a snapshot in GiB, from 1 to 110
    #[arg(long, value_name = "GIB", default_value = "100", value_parser = clap::value_parser!(u64).range(1..=110))]
    pub max_snapshot: u64,
    /// Number of concurrent transfers to stores. Each transfer needs up to 56 MiB of memory
    #[arg(long, value_name = "NUMBER", default_value = "4")]
    pub max_transfers: NonZeroUsize,
    /// Number of concurrent transfers to one store
    #[arg(long, value_name = "NUMBER", default_value = "2")]
    pub max_transfers_per_store: NonZeroUsize,
    /// Number of concurrent transfers of one namespace. The default is --max-transfers, or half of it if the operator
    /// manages several namespaces
    #[arg(long, value_name = "NUMBER")]
    pub max_transfers_per_namespace: Option<NonZeroUsize>,
    /// Image of the pods that mount a PersistentVolumeClaim or verify a backup. The default is the operator's own image
    #[arg(long, env = "OPERATOR_IMAGE", value_name = "IMAGE")]
    pub operator_image: Option<String>,
    #[command(flatten)]
    pub(crate) mirrors: mirror::app::MirrorSettings,
}

impl Settings {
    /// The limits of transfers. If the operator manages one namespace, all transfers may belong to this namespace.
    fn transfers(&self, scope: &Scope) -> Limits {
        let concurrent = self.max_transfers.get();
        let of_scope = if scope.is_shared() {
            concurrent.div_ceil(2)
        } else {
            concurrent
        };
        Limits {
            concurrent,
            per_store: self.max_transfers_per_store.get(),
            per_namespace: self
                .max_transfers_per_namespace
                .map_or(of_scope, NonZeroUsize::get),
            max_backoff_seconds: TRANSFER_BACKOFF,
            record_timeout: RECORD_TIMEOUT,
            // A transfer has no timeout in its worker, because the plan cancels the transfer at the deadline of its
            // backup.
            timeout: Duration::MAX,
        }
    }
}

/// Limits each namespace to half of the slots if the operator manages several namespaces.
fn in_scope(limits: Limits, scope: &Scope) -> Limits {
    let per_namespace = if scope.is_shared() {
        limits.concurrent / 2
    } else {
        limits.concurrent
    };
    Limits {
        per_namespace,
        ..limits
    }
}

/// Runs the operator until it shuts down. The shutdown cancels running transfers, and waits until each transfer has
/// discarded its upload or completed its backup. `create_crd`: the operator may create or update the CRD of EtcdMirrors.
pub async fn work(operator: Operator, settings: Settings, create_crd: bool) {
    let (changes, requests) = mpsc::unbounded_channel();
    let max_snapshot = settings.max_snapshot << 30;
    // When an EtcdBackup changes, its EtcdCluster is reconciled, so that the status of the EtcdCluster shows the newest
    // backup.
    let (clusters_changed, clusters_to_report) = mpsc::unbounded_channel();
    let backups = Controllers::<EtcdBackup>::with_changes(&operator, move |backup| {
        if let Some(cluster) = cluster_of(backup) {
            // The send fails only after the shutdown, when the receiver no longer exists. The error is ignored.
            let _ = clusters_changed.send(cluster);
        }
    });
    // When a transfer or a removal ends, its worker sends the EtcdBackup to `changes`, the sender of `requests`. The
    // controller then reconciles the EtcdBackup, so that the status shows the result at once.
    let backups = backups.reconcile_on(requests);
    let turns = Arc::new(Turns::default());
    let execute = ExecuteContext {
        turns: turns.clone(),
        client: operator.client.clone(),
        transfers: Workers::new(
            settings.transfers(&operator.scope),
            operator.shutdown.clone(),
            changes.clone(),
        ),
        removals: Workers::new(
            in_scope(REMOVALS, &operator.scope),
            operator.shutdown.clone(),
            changes.clone(),
        ),
        copies: Workers::new(
            in_scope(COPIES, &operator.scope),
            operator.shutdown.clone(),
            changes,
        ),
        objects: backups.cache(),
        since: Timestamp::now(),
        shutdown: operator.shutdown.clone(),
    };
    let endpoints = EndpointGrants::new(&operator.namespace, ENDPOINTS, settings.etcd_endpoints);
    let mirrors = Mirrors::new(&operator, settings.mirrors, endpoints.clone(), create_crd);
    operator.metrics.collect(BackupMetrics {
        objects: backups.cache(),
        transfers: execute.transfers.clone(),
        mirrors: mirrors.metrics(),
    });
    let reconciler = Arc::new(ReconcileContext {
        observe: ObserveContext {
            client: operator.client.clone(),
            etcd: Arc::new(EtcdClient::new(Access::default()).with_max_snapshot(max_snapshot)),
            max_snapshot,
            grants: Grants {
                operator: "backup operator",
                own: operator.namespace.clone(),
                others: settings.ambient_identity,
            },
            reads: Reads::new(&operator.scope),
            endpoints,
            local: settings.local_directory.map(LocalStore::new),
            local_quota: settings.local_quota,
            objects: backups.cache(),
            image: OwnImage::new(&operator, settings.operator_image),
            turns,
        },
        execute,
    });
    let cluster_backups = Arc::new(ClusterBackups {
        client: operator.client.clone(),
        backups: backups.cache(),
    });
    let clusters = Controllers::<EtcdCluster>::new(&operator).reconcile_on(clusters_to_report);
    // `for_clusters` counts its objects separately, so that the metric of managed objects contains only EtcdBackups.
    let for_clusters = Operator {
        objects: Objects::default(),
        ..operator.clone()
    };
    tokio::join!(
        drive(&operator, backups, reconciler.clone()),
        drive(&for_clusters, clusters, cluster_backups),
        Box::pin(mirrors.run()),
    );
    reconciler.execute.join().await;
}

/// The EtcdCluster that `spec.etcdCluster` of an EtcdBackup names; `None` if the field is not set.
fn cluster_of(backup: &Guarded<EtcdBackup>) -> Option<ObjectRef<Guarded<EtcdCluster>>> {
    let namespace = backup.namespace()?;
    let readable = backup.0.as_ref().ok()?;
    let reference = readable.spec.etcd_cluster.as_ref()?;
    Some(ObjectRef::new(&reference.name).within(&namespace))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        settings: Settings,
    }

    fn limits(arguments: &[&str], scope: &Scope) -> (usize, usize, usize) {
        let all = std::iter::once("backup").chain(arguments.iter().copied());
        let limits = Flags::parse_from(all).settings.transfers(scope);
        (limits.concurrent, limits.per_store, limits.per_namespace)
    }

    #[test]
    fn namespace_gets_half_of_shared_transfer_slots_by_default() {
        let own = Scope::namespace("n");
        assert_eq!(limits(&[], &own), (4, 2, 4));
        let list = Scope::Namespaces(["a", "b"].map(str::to_owned).into());
        for shared in [Scope::Annotated, Scope::All, list] {
            assert_eq!(limits(&[], &shared), (4, 2, 2), "{shared:?}");
        }
        assert_eq!(limits(&["--max-transfers=1"], &Scope::All), (1, 2, 1));
        let all = [
            "--max-transfers=9",
            "--max-transfers-per-store=3",
            "--max-transfers-per-namespace=5",
        ];
        assert_eq!(limits(&all, &Scope::All), (9, 3, 5));
        assert!(Flags::try_parse_from(["backup", "--max-transfers=0"]).is_err());
    }

    /// An upload to S3 has at most 10,000 parts. The operator limits the memory per part, so a snapshot can have at
    /// most 110 GiB.
    #[test]
    fn max_snapshot_flag_accepts_1_to_110_gib() {
        let parsed = |argument: &str| {
            let flags = Flags::try_parse_from(["backup", argument]);
            flags.map(|flags| flags.settings.max_snapshot).ok()
        };
        assert_eq!(parsed("--local-quota=1"), Some(100));
        assert_eq!(parsed("--max-snapshot=110"), Some(110));
        for outside in ["--max-snapshot=0", "--max-snapshot=111"] {
            assert_eq!(parsed(outside), None, "{outside}");
        }
    }
}
