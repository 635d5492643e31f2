//! The program of the pod that mounts a PersistentVolumeClaim. It connects to etcd, but not to the API server.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::backup::Encryption;
use clap::Args;
use etcd::{Access, Credentials, EtcdClient};
use jiff::Timestamp;
use member::tls;
use member::tls::Purpose;
use store::encryption::Key;
use store::progress;
use store::{LocalStore, Store};
use tokio_util::sync::CancellationToken;

use super::order::{AUTH, ENCRYPTION, Order, ROOT, Reach, Report, SnapshotTask, TLS, Task};
use crate::reason::{Reason, Trouble};
use crate::removal::{Removal, RemovalScope};
use crate::snapshot::EndpointLimits;
use crate::transfer::{
    EarlierAttempt, Meter, ObjectName, Owner, Transfer, earlier_attempt, encryption_key,
};

/// Arguments of the command `volume`, which runs in the backup pod.
#[derive(Args, Clone, Debug)]
pub struct Volume {
    /// The transfer or removal to carry out, as JSON. Contains no credentials
    #[arg(long, value_name = "JSON")]
    order: String,
    /// Directory where the PersistentVolumeClaim is mounted
    #[arg(long, default_value = ROOT)]
    root: PathBuf,
    /// File to which the pod writes its report
    #[arg(long, default_value = "/dev/termination-log")]
    report: PathBuf,
}

/// Carries out the order and writes the report. Returns true if the task succeeded.
pub async fn run(arguments: &Volume) -> bool {
    let meter = Meter::default();
    let report = tokio::select! {
        report = work(arguments, &meter) => report.unwrap_or_else(Report::failed),
        // This branch serves the progress until the task in the first branch has ended. It never returns a report.
        report = async { progress::serve(|| meter.read()).await; std::future::pending().await } => report,
    };
    let text = serde_json::to_string(&report).unwrap_or_default();
    if let Err(error) = fs::write(&arguments.report, &text) {
        tracing::warn!(%error, "cannot write the report for the kubelet");
    }
    tracing::info!(report = text, "task ended");
    !matches!(report, Report::Failed { .. })
}

async fn work(arguments: &Volume, meter: &Meter) -> Result<Report, Trouble> {
    let order: Order = serde_json::from_str(&arguments.order).map_err(|error| {
        Trouble::new(
            Reason::StepFailed,
            format!("the backup pod cannot parse the task from the operator: {error}"),
        )
    })?;
    let store: Arc<dyn Store> = Arc::new(opened(&arguments.root, &order));
    let removal = |scope| Removal {
        store: store.clone(),
        path: order.path.clone(),
        uid: order.uid.clone(),
        scope,
    };
    let result = match order.task.clone() {
        Task::Store(snapshot) => {
            return Box::pin(stored(&order, *snapshot, store, meter)).await;
        }
        Task::Surplus {
            rules,
            newest,
            others,
            now,
        } => {
            let scope = RemovalScope::Surplus {
                rules,
                newest,
                others,
                now,
            };
            removal(scope).run().await?
        }
        Task::Everything => removal(RemovalScope::Everything).run().await?,
    };
    Ok(Report::removed(&result))
}

/// Opens the mounted volume as a store. With `owned_by`, the store ignores an unfinished file of another EtcdBackup
/// until ten minutes after the last write to this file.
fn opened(root: &Path, order: &Order) -> LocalStore {
    LocalStore::named(root, order.store()).owned_by(&order.uid)
}

/// Reads the credentials for etcd from the mounted Secrets.
pub(crate) fn access(reach: &Reach) -> Result<Access, Trouble> {
    let trouble = |why: String| Trouble::new(Reason::SecretMissing, why);
    let mut access = Access::default();
    if let Some(secret) = &reach.tls {
        let purpose = if reach.operators {
            Purpose::Operator
        } else {
            Purpose::Client
        };
        let data = store::mounted(Path::new(TLS))
            .map_err(|error| trouble(format!("Secret {secret} cannot be used: {error}")))?;
        let material = tls::material(purpose, secret, Some(&data));
        access = tls::access(&material.map_err(|fault| trouble(fault.message))?);
    }
    if let Some(secret) = &reach.auth {
        let data = store::mounted(Path::new(AUTH))
            .map_err(|error| trouble(format!("Secret {secret}: {error}")))?;
        let text = |key: &str| {
            let value = data.get(key).cloned().map(String::from_utf8);
            let value = value.and_then(Result::ok);
            let value = value
                .ok_or_else(|| trouble(format!("Secret {secret} has no key {key}: add it")))?;
            // Line breaks at the end are removed, because an editor may have added them to the password.
            Ok::<_, Trouble>(value.trim_end_matches(['\r', '\n']).to_owned())
        };
        access.credentials = Some(Credentials {
            user: text("username")?,
            password: text("password")?,
            former: Vec::new(),
        });
    }
    Ok(access)
}

/// Reads the encryption key from the mounted Secret.
fn key(encryption: &Encryption) -> Result<Key, Trouble> {
    let secret = &encryption.secret;
    let data = store::mounted(Path::new(ENCRYPTION)).map_err(|error| {
        let message = format!("Secret {secret} cannot be used: {error}");
        Trouble::new(Reason::SecretMissing, message)
    })?;
    encryption_key(encryption, &data)
}

async fn stored(
    order: &Order,
    snapshot: SnapshotTask,
    store: Arc<dyn Store>,
    meter: &Meter,
) -> Result<Report, Trouble> {
    let SnapshotTask {
        endpoints,
        begun,
        numbered,
        compress,
        encryption,
        cluster,
        reach,
    } = snapshot;
    let name = ObjectName::of(order.path.clone(), numbered.then_some(begun));
    let owner = Owner {
        uid: &order.uid,
        cluster: cluster.as_ref().map(|cluster| cluster.name.as_str()),
        encrypted: encryption.is_some(),
        verify_content: true,
    };
    // An earlier pod for this order may have completed the backup. In this case, the report contains that backup.
    let name = match earlier_attempt(store.as_ref(), name, owner, begun).await? {
        EarlierAttempt::Complete(stored) => return Ok(Report::Stored(stored)),
        EarlierAttempt::Incomplete(name) => name,
    };
    let transfer = Transfer {
        etcd: Arc::new(EtcdClient::new(access(&reach)?)),
        endpoints,
        store,
        name,
        compress,
        encryption: encryption.as_ref().map(key).transpose()?,
        uid: order.uid.clone(),
        cluster,
        limits: EndpointLimits::default(),
        // An EtcdBackup has at most one pod at a time, so all its unfinished files are from earlier pods. The transfer
        // deletes all unfinished files from before `since`.
        since: Timestamp::now(),
    };
    let stored = transfer.run(meter, &CancellationToken::new()).await?;
    Ok(Report::Stored(stored))
}

#[cfg(test)]
mod tests {
    use api::backup::name::{self, Numbered};
    use api::manifest::manifest_key;

    use super::*;
    use crate::retention::Rules;

    fn volume_of(dir: &tempfile::TempDir, uid: &str) -> LocalStore {
        let order = Order {
            claim: "backups".to_owned(),
            path: "key".to_owned(),
            uid: uid.to_owned(),
            task: Task::Everything,
        };
        opened(dir.path(), &order)
    }

    #[tokio::test]
    async fn unfinished_file_of_another_etcdbackup_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut upload = volume_of(&dir, "one").begin("key").await.unwrap();
        upload.write("content".into()).await.unwrap();
        for (uid, remains) in [("two", true), ("one", false)] {
            let store = volume_of(&dir, uid);
            let since = Timestamp::now().as_second();
            store.discard_unfinished("key", since).await.unwrap();
            let files = std::fs::read_dir(dir.path()).unwrap().count();
            assert_eq!(files == 1, remains, "{uid}");
        }
        assert!(upload.commit().await.is_err());
    }

    /// Invariant 9: the clock of a node may be wrong, so the pod computes the ages of backups from the time in the
    /// order.
    #[tokio::test]
    async fn invariant_9_retention_in_pod_ignores_node_clock() {
        let dir = tempfile::tempdir().unwrap();
        let report = dir.path().join("report");
        let root = dir.path().join("volume");
        std::fs::create_dir(&root).unwrap();
        let now: Timestamp = "2020-01-10T00:00:00Z".parse().unwrap();
        let key = |days: i64| {
            let time = now - jiff::SignedDuration::from_hours(24 * days);
            name::name("key", Numbered { time, revision: 7 })
        };
        let store = LocalStore::new(&root);
        for days in [0, 1, 3] {
            store.put(&key(days), "snapshot".into()).await.unwrap();
            let manifest = serde_json::json!({
                "formatVersion": 1, "etcdVersion": "3.6.16", "clusterID": "aa", "revision": 7, "size": 8, "sha256": "",
                "compression": "none", "createdAt": now.to_string(), "backupUID": "uid",
            });
            let manifest = serde_json::to_vec(&manifest).unwrap();
            store
                .put(&manifest_key(&key(days)), manifest.into())
                .await
                .unwrap();
        }
        let policy = serde_json::from_str(r#"{"maxAge":"48h"}"#).unwrap();
        let order = Order {
            claim: "backups".to_owned(),
            path: "key".to_owned(),
            uid: "uid".to_owned(),
            task: Task::Surplus {
                rules: Rules::of(&policy),
                newest: format!("pvc://backups/{}", key(0)),
                others: std::collections::BTreeSet::new(),
                now,
            },
        };
        let arguments = Volume {
            order: serde_json::to_string(&order).unwrap(),
            root,
            report: report.clone(),
        };
        assert!(run(&arguments).await);
        let report: Report = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
        assert!(
            matches!(report, Report::Removed { deleted: 1, .. }),
            "{report:?}"
        );
        assert_eq!(store.head(&key(3)).await.unwrap(), None);
        assert!(store.head(&key(1)).await.unwrap().is_some());
    }
}
