//! What runs in the pod beside a claim. It talks to etcd and to the file system, and to nobody else.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use etcd::{Access, Credentials, EtcdClient};
use jiff::Timestamp;
use member::tls;
use member::tls::Purpose;
use store::progress;
use store::{LocalStore, Store};
use tokio_util::sync::CancellationToken;

use super::order::{AUTH, Order, ROOT, Reach, Report, SnapshotTask, TLS, Task};
use crate::reason::{Reason, Trouble};
use crate::removal::{Removal, What};
use crate::transfer::{Meter, Name, Transfer, Whose, Written, written};

/// Arguments of `volume`.
#[derive(Args, Clone, Debug)]
pub struct Volume {
    /// What is to be done, as JSON. Holds no credentials
    #[arg(long, value_name = "JSON")]
    order: String,
    /// Where the claim is mounted
    #[arg(long, default_value = ROOT)]
    root: PathBuf,
    /// Where the result is reported
    #[arg(long, default_value = "/dev/termination-log")]
    report: PathBuf,
}

/// Does the work and reports. Says whether it worked.
pub async fn run(arguments: &Volume) -> bool {
    let meter = Meter::default();
    let report = tokio::select! {
        report = work(arguments, &meter) => report.unwrap_or_else(Report::failed),
        // It ends only with the process.
        report = async { progress::serve(|| meter.read()).await; std::future::pending().await } => report,
    };
    let text = serde_json::to_string(&report).unwrap_or_default();
    if let Err(error) = fs::write(&arguments.report, &text) {
        tracing::warn!(%error, "the result cannot be reported to the kubelet");
    }
    tracing::info!(report = text, "ended");
    !matches!(report, Report::Failed { .. })
}

async fn work(arguments: &Volume, meter: &Meter) -> Result<Report, Trouble> {
    let order: Order = serde_json::from_str(&arguments.order).map_err(|error| {
        Trouble::new(
            Reason::StepFailed,
            format!("the order cannot be read: {error}"),
        )
    })?;
    let store: Arc<dyn Store> = Arc::new(opened(&arguments.root, &order));
    let removal = |what| Removal {
        store: store.clone(),
        path: order.path.clone(),
        uid: order.uid.clone(),
        what,
        now: Timestamp::now(),
    };
    let kept = match order.task.clone() {
        Task::Store(snapshot) => {
            return Box::pin(stored(&order, *snapshot, store, meter)).await;
        }
        Task::Surplus {
            rules,
            newest,
            others,
        } => {
            let what = What::Surplus {
                rules,
                newest,
                others,
            };
            removal(what).run().await?
        }
        Task::Everything => removal(What::Everything).run().await?,
    };
    Ok(Report::removed(&kept))
}

/// What is mounted. Other EtcdBackups may write to the same path: their unfinished files are theirs.
fn opened(root: &Path, order: &Order) -> LocalStore {
    LocalStore::named(root, order.store()).owned_by(&order.uid)
}

/// How etcd is reached, from the Secrets that are mounted.
fn access(reach: &Reach) -> Result<Access, Trouble> {
    let trouble = |why: String| Trouble::new(Reason::SecretMissing, why);
    let mut access = Access::default();
    if let Some(secret) = &reach.tls {
        let purpose = if reach.operators {
            Purpose::Operator
        } else {
            Purpose::Client
        };
        let data = mounted(TLS).map_err(|error| trouble(format!("Secret {secret}: {error}")))?;
        let material = tls::material(purpose, secret, Some(&data));
        access = tls::access(&material.map_err(|fault| trouble(fault.message))?);
    }
    if let Some(secret) = &reach.auth {
        let data = mounted(AUTH).map_err(|error| trouble(format!("Secret {secret}: {error}")))?;
        let text = |key: &str| {
            let value = data.get(key).cloned().map(String::from_utf8);
            let value = value.and_then(Result::ok);
            let value = value
                .ok_or_else(|| trouble(format!("Secret {secret} has no key {key}: add it")))?;
            // An editor's last line break is nobody's password.
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

/// A mounted Secret's files. Kubernetes mounts the keys as links beside directories whose names begin with dots.
fn mounted(directory: &str) -> std::io::Result<BTreeMap<String, Vec<u8>>> {
    let mut data = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') && entry.path().is_file() {
            data.insert(name, fs::read(entry.path())?);
        }
    }
    Ok(data)
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
        cluster,
        reach,
    } = snapshot;
    let name = Name::of(order.path.clone(), numbered.then_some(begun));
    // A pod before this one may have done it all.
    let whose = Whose {
        uid: &order.uid,
        cluster: cluster.as_ref().map(|cluster| cluster.name.as_str()),
        reads: true,
    };
    let name = match written(store.as_ref(), name, whose, begun).await? {
        Written::Whole(stored) => return Ok(Report::Stored(stored)),
        Written::Not(name) => name,
    };
    let transfer = Transfer {
        etcd: Arc::new(EtcdClient::new(access(&reach)?)),
        endpoints,
        store,
        name,
        compress,
        uid: order.uid.clone(),
        cluster,
        // There is one pod at a time for an EtcdBackup: what it finds of itself was left by one that is dead.
        since: Timestamp::now(),
    };
    let stored = transfer.run(meter, &CancellationToken::new()).await?;
    Ok(Report::Stored(stored))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claimed(dir: &tempfile::TempDir, uid: &str) -> LocalStore {
        let order = Order {
            claim: "backups".to_owned(),
            path: "key".to_owned(),
            uid: uid.to_owned(),
            task: Task::Everything,
        };
        opened(dir.path(), &order)
    }

    /// Also of one that is made once, as this one may be.
    #[tokio::test]
    async fn what_the_pod_of_a_neighbour_is_writing_is_left_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut upload = claimed(&dir, "one").begin("key").await.unwrap();
        upload.write("content".into()).await.unwrap();
        for (uid, is_left) in [("two", true), ("one", false)] {
            let store = claimed(&dir, uid);
            let since = Timestamp::now().as_second();
            store.discard_unfinished("key", since).await.unwrap();
            let files = std::fs::read_dir(dir.path()).unwrap().count();
            assert_eq!(files == 1, is_left, "{uid}");
        }
        assert!(upload.commit().await.is_err());
    }
}
