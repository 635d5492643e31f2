//! The EtcdBackup that `EtcdCluster.spec.backup` asks for, and `EtcdCluster.status.lastBackup`.
//!
//! The EtcdBackup belongs to its EtcdCluster and goes with it; what it has stored stays, since that is what is needed
//! when a cluster is gone. A cluster that is made again under its name goes on with the same path.

use std::sync::Arc;

use api::backup::{ClusterReference, EtcdBackupSpec};
use api::cluster::{ClusterBackup, EtcdClusterStatus, LastBackup};
use api::names::{ANNOTATION_SCOPE, APP, LABEL_APP, LABEL_CLUSTER, MANAGER_BACKUP};
use api::{EtcdBackup, EtcdCluster};
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource, ResourceExt};
use runtime::controller::Guarded;
use runtime::{Done, Notice, Reconcile, apply};

/// What a reconcile works with.
pub(crate) struct ClusterBackups {
    pub(crate) client: Client,
    pub(crate) backups: Store<Guarded<EtcdBackup>>,
}

/// What is to be done about the EtcdBackup of an EtcdCluster.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    /// It is as it should be, or none is wanted and none is there.
    Nothing,
    /// It is made or changed.
    Apply(Box<EtcdBackup>),
    /// It is not wanted any more.
    Delete(Box<EtcdBackup>),
    /// The name is somebody else's.
    Taken,
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
        // The watch may not have seen yet what has this name, and it may be somebody's: what is changed is asked for.
        let step = match plan(&cluster, watched) {
            Step::Apply(_) | Step::Delete(_) => {
                let live = backups.get_opt(&name).await;
                let live = live.map_err(|source| unread(&name, source))?;
                plan(&cluster, live.as_ref())
            }
            step => step,
        };
        match step {
            Step::Nothing => {}
            Step::Apply(backup) => {
                apply::apply(&backups, MANAGER_BACKUP, backup.as_ref()).await?;
            }
            Step::Delete(backup) => {
                apply::delete(&backups, backup.as_ref(), None).await?;
            }
            Step::Taken => notices.push(taken(&cluster)),
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

fn plan(cluster: &EtcdCluster, existing: Option<&EtcdBackup>) -> Step {
    if cluster.meta().deletion_timestamp.is_some() {
        return Step::Nothing;
    }
    let owned = |backup: &EtcdBackup| {
        let owners = backup.owner_references();
        owners
            .iter()
            .any(|owner| Some(&owner.uid) == cluster.meta().uid.as_ref())
    };
    match (&cluster.spec.backup, existing) {
        (None, Some(backup)) if owned(backup) && backup.meta().deletion_timestamp.is_none() => {
            Step::Delete(Box::new(backup.clone()))
        }
        (None, _) => Step::Nothing,
        (Some(_), Some(backup)) if !owned(backup) => Step::Taken,
        (Some(wanted), existing) => {
            let desired = desired(cluster, wanted);
            let same = existing.is_some_and(|backup| {
                backup.spec == desired.spec
                    && backup.annotations().get(ANNOTATION_SCOPE)
                        == desired.annotations().get(ANNOTATION_SCOPE)
            });
            if same {
                Step::Nothing
            } else {
                Step::Apply(Box::new(desired))
            }
        }
    }
}

fn desired(cluster: &EtcdCluster, wanted: &ClusterBackup) -> EtcdBackup {
    let name = cluster.name_any();
    let mut policy = wanted.backup_policy.clone();
    // A cluster that sleeps has nobody to ask.
    policy.suspend |= wanted.suspend || cluster.spec.hibernate;
    let spec = EtcdBackupSpec {
        etcd_endpoints: Vec::new(),
        etcd_cluster: Some(ClusterReference { name: name.clone() }),
        client_tls_secret: None,
        auth_secret: None,
        backup_policy: Some(policy),
        storage_type: wanted.storage_type.clone(),
        s3: wanted.s3.clone(),
        abs: wanted.abs.clone(),
        gcs: wanted.gcs.clone(),
        oss: wanted.oss.clone(),
        pvc: wanted.pvc.clone(),
        local: wanted.local.clone(),
        compression: wanted.compression.clone(),
        ttl_seconds_after_finished: None,
        deletion_policy: None,
    };
    let mut backup = EtcdBackup::new(&name, spec);
    backup.metadata.namespace = cluster.namespace();
    backup.metadata.owner_references = cluster.controller_owner_ref(&()).map(|owner| vec![owner]);
    let labels = [(LABEL_APP, APP), (LABEL_CLUSTER, name.as_str())];
    backup.metadata.labels = Some(
        labels
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
    );
    let scope = cluster.annotations().get(ANNOTATION_SCOPE);
    backup.metadata.annotations =
        scope.map(|scope| [(ANNOTATION_SCOPE.to_owned(), scope.clone())].into());
    backup
}

/// The newest backup of the cluster that any EtcdBackup tells of.
fn last_backup(cluster: &EtcdCluster, backups: &[&EtcdBackup]) -> Option<LastBackup> {
    let name = cluster.name_any();
    let of_it = backups.iter().filter(|backup| {
        let reference = backup.spec.etcd_cluster.as_ref();
        reference.is_some_and(|reference| reference.name == name)
    });
    let told = of_it.filter_map(|backup| {
        let status = backup.status.as_ref()?;
        Some(LastBackup {
            name: backup.name_any(),
            time: Some(status.last_success_date.clone()?),
            revision: status.etcd_revision,
            location: status.location.clone(),
        })
    });
    let before = cluster
        .status
        .as_ref()
        .and_then(|status| status.last_backup.clone());
    told.chain(before)
        .max_by_key(|told| told.time.as_ref().map(|time| time.0))
}

fn taken(cluster: &EtcdCluster) -> Notice {
    let name = cluster.name_any();
    Notice::warning(
        "NameTaken",
        "Backup",
        format!(
            "spec.backup is not in effect: an EtcdBackup {name} exists that does not belong to this EtcdCluster; \
             delete or rename it"
        ),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn cluster(change: impl FnOnce(&mut Value)) -> EtcdCluster {
        let mut object = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2",
            "kind": "EtcdCluster",
            "metadata": { "name": "main", "namespace": "prod", "uid": "1" },
            "spec": { "backup": {
                "backupPolicy": { "schedule": "@hourly", "maxBackups": 3 },
                "storageType": "S3",
                "s3": { "path": "bucket/main", "awsSecret": "aws" },
                "compression": "zstd",
            }},
        });
        change(&mut object);
        serde_json::from_value(object).unwrap()
    }

    fn made(cluster: &EtcdCluster) -> EtcdBackup {
        match plan(cluster, None) {
            Step::Apply(backup) => *backup,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_cluster_that_wants_backups_gets_an_etcd_backup_of_its_own() {
        let cluster = cluster(|object| {
            object["metadata"]["annotations"] = json!({ ANNOTATION_SCOPE: "clusterwide" });
        });
        let backup = made(&cluster);
        assert_eq!(backup.name_any(), "main");
        assert_eq!(backup.owner_references()[0].uid, "1");
        assert_eq!(backup.annotations()[ANNOTATION_SCOPE], "clusterwide");
        assert_eq!(backup.spec.etcd_cluster.as_ref().unwrap().name, "main");
        assert_eq!(
            backup.spec.deletion_policy, None,
            "what is stored outlives the cluster"
        );
        assert_eq!(api::backup::validate(&backup), []);
        assert_eq!(plan(&cluster, Some(&backup)), Step::Nothing);
    }

    #[test]
    fn it_follows_the_cluster_and_rests_with_it() {
        let backup = made(&cluster(|_| ()));
        for (field, value) in [
            ("/spec/backup/backupPolicy/maxBackups", json!(9)),
            ("/spec/backup/s3/path", json!("bucket/other")),
        ] {
            let changed = cluster(|object| *object.pointer_mut(field).unwrap() = value);
            assert!(
                matches!(plan(&changed, Some(&backup)), Step::Apply(_)),
                "{field}"
            );
        }
        for rest in ["suspend", "hibernate"] {
            let resting = cluster(|object| match rest {
                "suspend" => object["spec"]["backup"]["suspend"] = json!(true),
                _ => object["spec"]["hibernate"] = json!(true),
            });
            assert!(made(&resting).spec.backup_policy.unwrap().suspend, "{rest}");
        }
    }

    #[test]
    fn it_goes_when_it_is_not_wanted_and_only_if_it_is_the_clusters_own() {
        let backup = made(&cluster(|_| ()));
        let without = cluster(|object| object["spec"] = json!({}));
        assert!(matches!(plan(&without, Some(&backup)), Step::Delete(_)));
        let mut somebodys = backup.clone();
        somebodys.metadata.owner_references = None;
        assert_eq!(plan(&without, Some(&somebodys)), Step::Nothing);
        assert_eq!(plan(&cluster(|_| ()), Some(&somebodys)), Step::Taken);
        // Of a cluster of the same name that was there before.
        let mut former = backup;
        former.metadata.owner_references.as_mut().unwrap()[0].uid = "0".to_owned();
        assert_eq!(plan(&cluster(|_| ()), Some(&former)), Step::Taken);
        let ending = cluster(|object| {
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        });
        assert_eq!(plan(&ending, None), Step::Nothing);
    }

    #[test]
    fn the_newest_backup_is_told_whoever_made_it() {
        let backup = |name: &str, of: &str, date: Option<&str>| -> EtcdBackup {
            serde_json::from_value(json!({
                "apiVersion": "etcd.database.coreos.com/v1beta2",
                "kind": "EtcdBackup",
                "metadata": { "name": name, "namespace": "prod" },
                "spec": { "etcdCluster": { "name": of }, "storageType": "S3", "s3": { "path": "b/k" } },
                "status": { "succeeded": true, "lastSuccessDate": date, "etcdRevision": 7, "location": "s3://b/k" },
            }))
            .unwrap()
        };
        let all = [
            backup("old", "main", Some("2026-01-01T00:00:00Z")),
            backup("new", "main", Some("2026-01-02T00:00:00Z")),
            backup("never", "main", None),
            backup("other", "another", Some("2026-01-03T00:00:00Z")),
        ];
        let mut cluster = cluster(|_| ());
        let last = last_backup(&cluster, &all.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!((last.name.as_str(), last.revision), ("new", Some(7)));
        // It is not forgotten when its EtcdBackup is gone.
        cluster.status = Some(EtcdClusterStatus {
            last_backup: Some(last.clone()),
            ..EtcdClusterStatus::default()
        });
        assert_eq!(last_backup(&cluster, &[&all[0]]), Some(last));
        assert_eq!(last_backup(&self::cluster(|_| ()), &[&all[3]]), None);
    }
}
