//! Reads what a plan needs: the Secrets and the cluster a spec names, and what the store holds. Reads only.

use std::sync::Arc;
use std::time::Duration;

use api::conditions::Reason;
use api::storage::{S3Source, StorageSource};
use api::{EtcdBackup, EtcdCluster};
use etcd::Etcd;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt};
use tokio::time::timeout;

use crate::observed::{Observed, Place, Trouble};
use crate::plan::{intent, needs_place};
use crate::source::{SecretData, Target, endpoints, members_of, target};
use crate::transfer::{Transfer, written};

/// What all reads of one round may take together.
const DEADLINE: Duration = Duration::from_secs(30);

/// What is read with.
pub(crate) struct Means {
    /// Talks to the API server.
    pub(crate) client: Client,
    /// Talks to the members of all clusters.
    pub(crate) etcd: Arc<dyn Etcd>,
    /// When this process began.
    pub(crate) since: Timestamp,
}

/// Completes `observed`; where the plan may begin a transfer, that comes with it.
pub(crate) async fn observe(
    means: &Means,
    backup: &EtcdBackup,
    observed: Observed,
    now: Timestamp,
) -> (Observed, Option<Transfer>) {
    let Some(begun) = intent(backup).filter(|_| needs_place(backup, &observed, now)) else {
        return (observed, None);
    };
    let looked = async {
        let transfer = transfer(means, backup).await?;
        let uid = backup.uid().unwrap_or_default();
        let found = written(transfer.store.as_ref(), &transfer.key, &uid, begun).await?;
        Ok((found, transfer))
    };
    let looked = timeout(DEADLINE, looked).await.unwrap_or_else(|_| {
        let message = format!("no answer from the store or the API server within {DEADLINE:?}");
        Err(Trouble::new(Reason::StoreUnreachable, message))
    });
    let (place, transfer) = match looked {
        Ok((Some(stored), _)) => (Place::Written(stored), None),
        Ok((None, transfer)) => (Place::Free, Some(transfer)),
        Err(trouble) => (Place::Unknown(trouble), None),
    };
    (Observed { place, ..observed }, transfer)
}

async fn transfer(means: &Means, backup: &EtcdBackup) -> Result<Transfer, Trouble> {
    let client = &means.client;
    let namespace = backup.namespace().unwrap_or_default();
    let spec = &backup.spec;
    let source = spec
        .blocks()
        .select(&spec.storage_type, "spec", "storageType")
        .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))?;
    let StorageSource::S3(source) = source else {
        let message = format!("spec.storageType is {}: use S3", spec.storage_type);
        return Err(Trouble::new(Reason::NotSupported, message));
    };
    let Target { store, key } = open(client, &namespace, source).await?;
    let (endpoints, cluster) = match &spec.etcd_cluster {
        None => (endpoints(&spec.etcd_endpoints, &namespace), None),
        Some(reference) => {
            let cluster = cluster(client, &namespace, &reference.name).await?;
            let (urls, manifest) = members_of(&cluster, &namespace)?;
            (urls, Some(manifest))
        }
    };
    Ok(Transfer {
        etcd: means.etcd.clone(),
        endpoints,
        store,
        key,
        uid: backup.uid().unwrap_or_default(),
        cluster,
        since: means.since,
    })
}

async fn open(client: &Client, namespace: &str, source: &S3Source) -> Result<Target, Trouble> {
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let credentials = match source.aws_secret() {
        Some(name) => Some(secret(&secrets, name, "spec.s3.awsSecret").await?),
        None => None,
    };
    let ca = match source.ca_secret.as_deref() {
        Some(name) => Some(secret(&secrets, name, "spec.s3.caSecret").await?),
        None => None,
    };
    target(source, credentials.as_ref(), ca.as_ref()).await
}

async fn secret(secrets: &Api<Secret>, name: &str, field: &str) -> Result<SecretData, Trouble> {
    match secrets.get_opt(name).await {
        Ok(Some(secret)) => Ok(secret
            .data
            .unwrap_or_default()
            .into_iter()
            .map(|(key, value)| (key, value.0))
            .collect()),
        Ok(None) => Err(Trouble::new(
            Reason::SecretMissing,
            format!(
                "{field}: there is no Secret {name} in this namespace: create it or correct the name"
            ),
        )),
        Err(error) => Err(Trouble::new(
            Reason::SecretMissing,
            format!("{field}: Secret {name} cannot be read: {error}"),
        )),
    }
}

async fn cluster(client: &Client, namespace: &str, name: &str) -> Result<EtcdCluster, Trouble> {
    let clusters = Api::<EtcdCluster>::namespaced(client.clone(), namespace);
    match clusters.get_opt(name).await {
        Ok(Some(cluster)) => Ok(cluster),
        Ok(None) => Err(Trouble::new(
            Reason::ClusterMissing,
            format!(
                "spec.etcdCluster.name: there is no EtcdCluster {name} in this namespace: create it or correct the name"
            ),
        )),
        Err(error) => Err(Trouble::new(
            Reason::ClusterMissing,
            format!("spec.etcdCluster.name: EtcdCluster {name} cannot be read: {error}"),
        )),
    }
}
