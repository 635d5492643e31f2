//! The program of the agent: records all changes of a cluster until the pod ends. Connects only to etcd and to the
//! store.

use std::future::pending;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::storage::StorageSource;
use clap::Args;
use continuous::{Agent, EncryptedStore, Extras, Limits, Settings, Spool, described};
use etcd::EtcdClient;
use store::encryption::{Key, Keys};
use store::{Directories, SecretData, Secrets, Target};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use super::order::{CA, RecordOrder, SPOOL, STORE, prefix};
use super::report;
use crate::pvc::{AUTH, ENCRYPTION, ROOT, TLS, access};
use crate::reason::{Reason, Trouble};
use crate::transfer::{encryption_key, in_store};

/// Interval between two checks whether a mounted Secret has changed. The kubelet updates mounted Secrets about every
/// minute.
const SECRET_CHECK: Duration = Duration::from_secs(10);

/// After a change of a Secret, the agent ends at the latest after this time. With the old credentials, the store may
/// reject the last segments permanently.
const LAST_UPLOADS: Duration = Duration::from_secs(20);

/// Arguments of the command `record`, which runs in the pod of the agent.
#[derive(Args, Clone, Debug)]
pub struct Record {
    /// What to record and where, as JSON. Contains no credentials
    #[arg(long, value_name = "JSON")]
    order: String,
    /// Directory where the PersistentVolumeClaim is mounted
    #[arg(long, default_value = ROOT)]
    root: PathBuf,
    /// Directory for segments that wait for the store
    #[arg(long, default_value = SPOOL)]
    spool: PathBuf,
    /// Directory where the Secret with the encryption keys is mounted
    #[arg(long, default_value = ENCRYPTION)]
    keys: PathBuf,
}

/// Records until the process receives SIGTERM, or until a mounted Secret changes. After a change of a Secret, the
/// kubelet starts the program again. Returns false if the agent cannot record. The last log line is the reason, which
/// the operator reads from the status of the pod.
pub async fn run(arguments: &Record) -> bool {
    match Box::pin(record(arguments)).await {
        Ok(()) => true,
        Err(trouble) => {
            tracing::error!("{}", trouble.message);
            false
        }
    }
}

async fn record(arguments: &Record) -> Result<(), Trouble> {
    let order: RecordOrder = serde_json::from_str(&arguments.order).map_err(|error| {
        let message = format!("the agent cannot parse the order of the operator: {error}");
        Trouble::new(Reason::StepFailed, message)
    })?;
    let mounted = Mounted::read(&arguments.keys);
    let encryption = encryption(&order, mounted.keys.as_ref())?;
    let source = order.storage.source();
    let is_volume = matches!(source, StorageSource::Pvc(_));
    let directories = Directories {
        local: None,
        claim: is_volume.then(|| arguments.root.clone()),
    };
    let secrets = Secrets {
        credentials: mounted.store.as_ref(),
        ca: mounted.ca.as_ref(),
    };
    let opened = store::open(&source, secrets, &directories).await;
    let Target { store, key } = opened.map_err(|error| in_store(&error))?;
    let etcd = EtcdClient::new(access(&order.reach)?).with_max_snapshot(order.max_snapshot);
    let settings = settings(&order, &key, &arguments.spool);
    let encrypted = encryption.map(|(key, keys)| {
        let description = described(&key);
        (EncryptedStore::new(store.as_ref(), key, keys), description)
    });
    let endpoints = order.endpoints.clone();
    let mut agent = match &encrypted {
        Some((store, description)) => {
            Agent::new(&etcd, endpoints, store, settings).encrypted(description.clone())
        }
        None => Agent::new(&etcd, endpoints, store.as_ref(), settings),
    };
    let monitor = agent.monitor();
    let stop = async {
        tokio::select! {
            () = terminated() => tracing::info!("the agent ends after SIGTERM"),
            () = mounted.changed() => tracing::info!("a Secret has changed: the agent starts again"),
        }
    };
    tokio::select! {
        ended = Box::pin(agent.run(stop)) => ended.map_err(|error| {
            Trouble::new(Reason::StepFailed, format!("the agent cannot record: {error}"))
        }),
        () = ended_after_change(&mounted) => {
            // The changes in the segments that are not stored are not lost, because the next process reads them again
            // from etcd.
            tracing::warn!("the last segments cannot be stored with the old Secrets: the agent starts again");
            Ok(())
        }
        // This branch is never chosen, because `report::serve` never returns.
        () = report::serve(monitor) => Ok(()),
    }
}

/// The key for new objects, and all keys of the Secret. `None` without encryption.
fn encryption(
    order: &RecordOrder,
    mounted: Option<&SecretData>,
) -> Result<Option<(Key, Keys)>, Trouble> {
    let Some(encryption) = &order.encryption else {
        return Ok(None);
    };
    let data = mounted.ok_or_else(|| {
        let message = format!(
            "spec.encryption.secret: Secret {} is not mounted",
            encryption.secret
        );
        Trouble::new(Reason::SecretMissing, message)
    })?;
    let key = encryption_key(encryption, data)?;
    Ok(Some((key, Keys::of(data))))
}

fn settings(order: &RecordOrder, key: &str, spool: &Path) -> Settings {
    Settings {
        prefix: prefix(key, &order.uid),
        limits: Limits {
            interval: order.flush_interval(),
            ..Limits::default()
        },
        extras: Extras::default(),
        max_age: Duration::from_secs(order.base_seconds),
        max_bytes: order.base_bytes,
        window: Duration::from_secs(order.window_seconds),
        spool: Some(Spool {
            directory: spool.to_owned(),
            limit: order.spool_bytes,
        }),
    }
}

/// The content of the Secrets that the pod mounts. `None` if a Secret is not mounted.
#[derive(PartialEq)]
struct Mounted {
    store: Option<SecretData>,
    ca: Option<SecretData>,
    tls: Option<SecretData>,
    auth: Option<SecretData>,
    keys: Option<SecretData>,
    /// The directory of `keys`.
    directory: PathBuf,
}

impl Mounted {
    fn read(keys: &Path) -> Self {
        let read = |directory: &str| store::mounted(Path::new(directory)).ok();
        Self {
            keys: store::mounted(keys).ok(),
            directory: keys.to_owned(),
            store: read(STORE),
            ca: read(CA),
            tls: read(TLS),
            auth: read(AUTH),
        }
    }

    /// Waits until the content of a Secret changes, for example because its certificate was renewed. A content that is
    /// read while the kubelet replaces it can be incomplete, so the change must be read twice.
    async fn changed(&self) {
        let mut last = None;
        loop {
            sleep(SECRET_CHECK).await;
            let found = Self::read(&self.directory);
            if found != *self && last.as_ref() == Some(&found) {
                return;
            }
            last = Some(found);
        }
    }
}

/// Waits until a Secret changes, and then for the time in which the agent must end.
async fn ended_after_change(mounted: &Mounted) {
    mounted.changed().await;
    sleep(LAST_UPLOADS).await;
}

/// Waits for SIGTERM.
async fn terminated() {
    match signal(SignalKind::terminate()) {
        Ok(mut signals) => {
            signals.recv().await;
        }
        Err(error) => {
            tracing::warn!(%error, "SIGTERM cannot be received");
            pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pvc::Reach;

    #[test]
    fn record_order_becomes_agent_settings() {
        let storage = json!({ "pvc": { "claimName": "backups", "path": "etcd/main" } });
        let order = RecordOrder {
            storage: serde_json::from_value(storage).unwrap(),
            uid: "uid".to_owned(),
            endpoints: vec!["http://c:2379".to_owned()],
            reach: Reach::default(),
            encryption: None,
            flush_millis: 500,
            base_seconds: 60,
            base_bytes: 7,
            window_seconds: 120,
            spool_bytes: 9,
            max_snapshot: 1,
        };
        let text = serde_json::to_string(&order).unwrap();
        let order: RecordOrder = serde_json::from_str(&text).unwrap();
        let settings = settings(&order, "etcd/main", Path::new("/spool"));
        assert_eq!(settings.prefix, "etcd/main.continuous/uid/");
        assert_eq!(settings.limits.interval, Duration::from_millis(500));
        assert_eq!(settings.max_age, Duration::from_mins(1));
        assert_eq!((settings.max_bytes, settings.window.as_secs()), (7, 120));
        assert_eq!(settings.spool.unwrap().limit, 9);
        assert!(encryption(&order, None).unwrap().is_none());
    }

    #[test]
    fn agent_without_usable_encryption_key_does_not_record() {
        let block = json!({ "secret": "keys", "key": "2027" });
        let order = |encryption| RecordOrder {
            storage: serde_json::from_value(json!({ "s3": { "path": "b/k" } })).unwrap(),
            uid: "uid".to_owned(),
            endpoints: Vec::new(),
            reach: Reach::default(),
            encryption,
            flush_millis: 1,
            base_seconds: 1,
            base_bytes: 1,
            window_seconds: 1,
            spool_bytes: 1,
            max_snapshot: 1,
        };
        let encrypts = order(serde_json::from_value(block).unwrap());
        let text = b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
        let secret = |name: &str| SecretData::from([(name.to_owned(), text.to_vec())]);
        let (key, _) = encryption(&encrypts, Some(&secret("2027")))
            .unwrap()
            .unwrap();
        assert_eq!(key.name(), "2027");
        for mounted in [None, Some(&secret("2026"))] {
            let trouble = encryption(&encrypts, mounted).unwrap_err();
            assert_eq!(trouble.reason, Reason::SecretMissing);
            let field = "spec.encryption.secret";
            assert!(trouble.message.contains(field), "{}", trouble.message);
        }
    }
}
