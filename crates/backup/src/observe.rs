//! Reads what a plan needs: the Secrets and the cluster a spec names, and what the store holds. Reads only.

use std::sync::Arc;
use std::time::Duration;

use api::conditions::Reason;
use api::storage::StorageSource;
use api::{EtcdBackup, EtcdCluster};
use etcd::Etcd;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt};
use store::{Directories, SecretName, secrets_of};
use tokio::time::timeout;

use crate::identity::Grants;
use crate::observed::{Observed, Place, Trouble};
use crate::plan::{Need, compresses, intent, need, rules};
use crate::removal::{Removal, What};
use crate::source::{SecretData, Target, endpoints, members_of, target};
use crate::transfer::{Name, Transfer, Written, written};

/// What all reads of one round may take together.
const DEADLINE: Duration = Duration::from_secs(30);

/// What is read with.
pub(crate) struct Means {
    /// Talks to the API server.
    pub(crate) client: Client,
    /// Talks to the members of all clusters.
    pub(crate) etcd: Arc<dyn Etcd>,
    /// Who may use the operator's own identity.
    pub(crate) grants: Grants,
    /// What the operator's pod has mounted.
    pub(crate) directories: Directories,
    /// When this process began.
    pub(crate) since: Timestamp,
}

/// What a step may need, ready to run.
#[derive(Default)]
pub(crate) enum Ready {
    /// Nothing.
    #[default]
    Nothing,
    /// A transfer.
    Transfer(Box<Transfer>),
    /// A removal.
    Removal(Box<Removal>),
}

/// Completes `observed`; what the plan may begin comes with it.
pub(crate) async fn observe(
    means: &Means,
    backup: &EtcdBackup,
    observed: Observed,
    now: Timestamp,
) -> (Observed, Ready) {
    let need = need(backup, &observed, now);
    let looked = async {
        match (need, intent(backup)) {
            (Need::Place, Some(begun)) => place(means, backup, begun).await,
            (Need::Tidy | Need::Purge, _) => {
                let removal = removal(means, backup, need, now).await?;
                Ok((Place::NotAsked, Ready::Removal(Box::new(removal))))
            }
            (Need::Place | Need::Nothing, _) => Ok((Place::NotAsked, Ready::Nothing)),
        }
    };
    let looked = timeout(DEADLINE, looked).await.unwrap_or_else(|_| {
        let message = format!("no answer from the store or the API server within {DEADLINE:?}");
        Err(Trouble::new(Reason::StoreUnreachable, message))
    });
    match looked {
        Ok((place, ready)) => (Observed { place, ..observed }, ready),
        Err(trouble) if need == Need::Place => {
            let place = Place::Unknown(trouble);
            (Observed { place, ..observed }, Ready::Nothing)
        }
        Err(trouble) => {
            let obstacle = Some(trouble);
            (
                Observed {
                    obstacle,
                    ..observed
                },
                Ready::Nothing,
            )
        }
    }
}

async fn place(
    means: &Means,
    backup: &EtcdBackup,
    begun: Timestamp,
) -> Result<(Place, Ready), Trouble> {
    let Target { store, key } = open(means, backup).await?;
    let name = if backup.spec.is_periodic() {
        Name::Numbered {
            path: key,
            time: begun,
            left: None,
        }
    } else {
        Name::Exact(key)
    };
    let uid = backup.uid().unwrap_or_default();
    let name = match written(store.as_ref(), name, &uid, begun).await? {
        Written::Whole(stored) => return Ok((Place::Written(stored), Ready::Nothing)),
        Written::Not(name) => name,
    };
    let namespace = backup.namespace().unwrap_or_default();
    let (endpoints, cluster) = match &backup.spec.etcd_cluster {
        None => (endpoints(&backup.spec.etcd_endpoints, &namespace), None),
        Some(reference) => {
            let cluster = cluster(&means.client, &namespace, &reference.name).await?;
            let (urls, manifest) = members_of(&cluster, &namespace)?;
            (urls, Some(manifest))
        }
    };
    let transfer = Transfer {
        etcd: means.etcd.clone(),
        endpoints,
        store,
        name,
        compress: compresses(backup),
        uid,
        cluster,
        since: means.since,
    };
    Ok((Place::Free, Ready::Transfer(Box::new(transfer))))
}

async fn removal(
    means: &Means,
    backup: &EtcdBackup,
    need: Need,
    now: Timestamp,
) -> Result<Removal, Trouble> {
    let Target { store, key } = open(means, backup).await?;
    let status = backup.status.as_ref();
    let what = match (need, rules(backup)) {
        (Need::Tidy, Some(rules)) => What::Surplus {
            rules,
            newest: status
                .and_then(|status| status.location.clone())
                .unwrap_or_default(),
        },
        _ => What::Everything,
    };
    Ok(Removal {
        store,
        path: key,
        uid: backup.uid().unwrap_or_default(),
        what,
        now,
    })
}

async fn open(means: &Means, backup: &EtcdBackup) -> Result<Target, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let spec = &backup.spec;
    let source = spec
        .blocks()
        .select(&spec.storage_type, "spec", "storageType")
        .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))?;
    means.grants.check(&namespace, &source)?;
    let (credentials, ca) = secrets(&means.client, &namespace, &source).await?;
    target(
        &source,
        credentials.as_ref(),
        ca.as_ref(),
        &means.directories,
    )
    .await
}

type Held = Option<SecretData>;

async fn secrets(
    client: &Client,
    namespace: &str,
    source: &StorageSource<'_>,
) -> Result<(Held, Held), Trouble> {
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let names = secrets_of(source);
    Ok((
        secret(&secrets, names.credentials).await?,
        secret(&secrets, names.ca).await?,
    ))
}

async fn secret(secrets: &Api<Secret>, named: Option<SecretName<'_>>) -> Result<Held, Trouble> {
    let Some(SecretName { field, name }) = named else {
        return Ok(None);
    };
    match secrets.get_opt(name).await {
        Ok(Some(secret)) => {
            let data = secret.data.unwrap_or_default().into_iter();
            Ok(Some(data.map(|(key, value)| (key, value.0)).collect()))
        }
        Ok(None) => Err(Trouble::new(
            Reason::SecretMissing,
            format!(
                "{field}: there is no Secret {name} in this namespace: create it or correct the name"
            ),
        )),
        Err(error) => Err(Trouble::new(
            Reason::StepFailed,
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
