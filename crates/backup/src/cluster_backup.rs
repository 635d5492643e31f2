//! The EtcdBackup that `EtcdCluster.spec.backup` asks for, and `EtcdCluster.status.lastBackup`.
//!
//! The EtcdBackup belongs to its EtcdCluster and goes with it; what it has stored stays, since that is what is needed
//! when a cluster is gone. A cluster that is made again under its name goes on with the same path.

use std::sync::Arc;

use api::cluster::{EtcdClusterStatus, LastBackup};
use api::names::MANAGER_BACKUP;
use api::{EtcdBackup, EtcdCluster};
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::controller::Guarded;
use runtime::{Done, Reconcile, apply};

mod plan;

use plan::{Action, last_backup, plan, taken};

/// The client and the cache of all reconciles.
pub(crate) struct ClusterBackups {
    pub(crate) client: Client,
    pub(crate) backups: Store<Guarded<EtcdBackup>>,
}

impl Reconcile for ClusterBackups {
    type Object = EtcdCluster;
    type Error = apply::Error;

    async fn reconcile(&self, cluster: Arc<EtcdCluster>) -> Result<Done, apply::Error> {
        let namespace = cluster.namespace().unwrap_or_default();
        let known: Vec<EtcdBackup> = self
            .backups
            .state()
            .iter()
            .filter_map(|backup| backup.0.clone().ok())
            .collect();
        let ours: Vec<&EtcdBackup> = known
            .iter()
            .filter(|backup| backup.namespace().as_ref() == Some(&namespace))
            .collect();
        let backups = Api::<EtcdBackup>::namespaced(self.client.clone(), &namespace);
        let name = cluster.name_any();
        let watched = ours
            .iter()
            .copied()
            .find(|backup| backup.name_any() == name);
        let mut notices = Vec::new();
        // The cache may lack the object that has this name now, and another owner may have it: a change is planned from
        // the object as it is in the API server.
        let action = match plan(&cluster, watched) {
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
        self.report(&cluster, last_backup(&cluster, &ours)).await?;
        Ok(Done {
            requeue: None,
            notices,
        })
    }
}

impl ClusterBackups {
    /// The rest of the status is the cluster operator's, and stays as it is.
    async fn report(
        &self,
        cluster: &EtcdCluster,
        last: Option<LastBackup>,
    ) -> Result<(), apply::Error> {
        let current = cluster
            .status
            .as_ref()
            .and_then(|status| status.last_backup.as_ref());
        // The EtcdBackup it came from may be gone by now; the backup is still there.
        if last.is_none() || last.as_ref() == current {
            return Ok(());
        }
        let clusters = Api::<EtcdCluster>::namespaced(
            self.client.clone(),
            &cluster.namespace().unwrap_or_default(),
        );
        let desired = EtcdClusterStatus {
            last_backup: last,
            ..EtcdClusterStatus::default()
        };
        apply::status(&clusters, MANAGER_BACKUP, cluster, None, &desired).await?;
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
