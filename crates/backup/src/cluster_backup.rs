//! For each EtcdCluster with `spec.backup`, creates and updates an EtcdBackup. Writes `lastBackup`, `backupForChanges`
//! and `backupRequest` to the status of the EtcdCluster.
//!
//! The EtcdCluster owns the EtcdBackup, so Kubernetes deletes both together. The stored backups are kept, because
//! users need them after the loss of a cluster.

use std::sync::Arc;

use api::cluster::EtcdClusterStatus;
use api::names::MANAGER_BACKUP;
use api::{EtcdBackup, EtcdCluster};
use kube::{Api, Client, Resource, ResourceExt};
use runtime::controller::Cache;
use runtime::{Done, Reconcile, apply};

mod plan;

use plan::{Action, backup_for_changes, backup_request, last_backup, plan, taken};

pub(crate) struct ClusterBackups {
    pub(crate) client: Client,
    pub(crate) backups: Cache<EtcdBackup>,
}

impl Reconcile for ClusterBackups {
    type Object = EtcdCluster;
    type Error = apply::Error;
    // The cluster operator manages EtcdClusters, and writes their conditions `Managed` and `Unreadable`. The backup
    // operator must not write these conditions.
    const MANAGES: bool = false;

    async fn reconcile(&self, cluster: Arc<EtcdCluster>) -> Result<Done, apply::Error> {
        let namespace = cluster.namespace().unwrap_or_default();
        let cached = self.backups.in_namespace(&namespace);
        let readable = cached.iter().filter_map(|backup| backup.0.as_ref().ok());
        let in_namespace: Vec<&EtcdBackup> = readable.collect();
        let backups = Api::<EtcdBackup>::namespaced(self.client.clone(), &namespace);
        let name = cluster.name_any();
        let existing = in_namespace
            .iter()
            .copied()
            .find(|backup| backup.name_any() == name);
        let mut notices = Vec::new();
        // The cached EtcdBackup `existing` may be stale. Before a write, the operator reads the EtcdBackup from the API
        // server, and plans again.
        let action = match plan(&cluster, existing) {
            Action::Apply(_) | Action::Delete(_) => {
                let live = backups.get_opt(&name).await;
                let live = live.map_err(|source| unread(&name, source))?;
                plan(&cluster, live.as_ref())
            }
            action => action,
        };
        match action {
            Action::Nothing => {}
            Action::Apply(backup) => {
                apply::apply(&backups, MANAGER_BACKUP, backup.as_ref()).await?;
            }
            Action::Delete(backup) => {
                apply::delete(&backups, backup.as_ref(), None).await?;
            }
            Action::Taken => notices.push(taken(&cluster)),
        }
        let desired = EtcdClusterStatus {
            last_backup: last_backup(&cluster, &in_namespace),
            backup_for_changes: backup_for_changes(&cluster, &in_namespace),
            backup_request: backup_request(&cluster, existing),
            ..EtcdClusterStatus::default()
        };
        self.report(&cluster, &desired).await?;
        Ok(Done {
            requeue: None,
            notices,
        })
    }
}

impl ClusterBackups {
    /// Writes only `lastBackup`, `backupForChanges` and `backupRequest`, because the cluster operator owns the other
    /// fields of the status.
    async fn report(
        &self,
        cluster: &EtcdCluster,
        desired: &EtcdClusterStatus,
    ) -> Result<(), apply::Error> {
        let of = |status: &EtcdClusterStatus| {
            (
                status.last_backup.clone(),
                status.backup_for_changes.clone(),
                status.backup_request.clone(),
            )
        };
        let current = cluster.status.as_ref().map(of).unwrap_or_default();
        if of(desired) == current {
            return Ok(());
        }
        let clusters = Api::<EtcdCluster>::namespaced(
            self.client.clone(),
            &cluster.namespace().unwrap_or_default(),
        );
        apply::status(&clusters, MANAGER_BACKUP, cluster, None, desired).await?;
        Ok(())
    }
}

fn unread(name: &str, source: kube::Error) -> apply::Error {
    apply::Error::Api {
        verb: "read",
        kind: EtcdBackup::kind(&()).into_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    }
}
