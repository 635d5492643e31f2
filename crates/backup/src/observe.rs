//! Reads what a plan needs: the Secrets and the cluster a spec names, and what the store holds. Reads only.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::backup::EtcdBackupSpec;
use api::conditions::Reason;
use api::manifest::ManifestCluster;
use api::storage::{PvcSource, StorageSource};
use api::{EtcdBackup, EtcdCluster};
use etcd::{Access, Etcd, EtcdClient};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::core::Status;
use kube::runtime::reflector::Store as ReflectorStore;
use kube::{Api, Client, ResourceExt};
use runtime::controller::Guarded;
use runtime::grants::Grants;
use runtime::image::OwnImage;
use runtime::tls::{self, ClusterTls, Purpose};
use store::{Directories, SecretName, secrets_of};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::claim::{InPod, Order, Reach, Report, Snapshot, Task};
use crate::neighbours::neighbours;
use crate::observed::{Kept, Observed, Place, Stored, Trouble};
use crate::plan::{Need, compresses, intent, need, rules};
use crate::removal::{Removal, What};
use crate::source::{SecretData, Target, endpoints, members_of, target};
use crate::transfer::{Name, Transfer, Whose, Written, written};

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
    /// All EtcdBackups, as the watch has them.
    pub(crate) objects: ReflectorStore<Guarded<EtcdBackup>>,
    /// What pods beside a claim run.
    pub(crate) image: OwnImage,
    /// The end of this process.
    pub(crate) shutdown: CancellationToken,
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
    /// A transfer in a pod beside the claim.
    TransferInPod(Box<InPod<Stored>>),
    /// A removal in such a pod.
    RemovalInPod(Box<InPod<Kept>>),
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
            (Need::Place, Some(begun)) => Box::pin(place(means, backup, begun)).await,
            (Need::Tidy | Need::Purge, _) => {
                let ready = Box::pin(removal(means, backup, need, now)).await?;
                Ok((Place::NotAsked, ready))
            }
            (Need::Place | Need::Nothing, _) => Ok((Place::NotAsked, Ready::Nothing)),
        }
    };
    let looked = timeout(DEADLINE, Box::pin(looked))
        .await
        .unwrap_or_else(|_| {
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
    if let StorageSource::Pvc(pvc) = source_of(backup)? {
        // What lies on a claim only the pod can see.
        let (endpoints, cluster) = members(means, backup).await?;
        let task = Task::Store(Box::new(Snapshot {
            endpoints,
            begun,
            numbered: backup.spec.is_periodic(),
            compress: compresses(backup),
            reach: reach_in_pod(means, backup, cluster.as_ref()).await?,
            cluster,
        }));
        let job = in_pod(means, backup, pvc, task, Report::into_stored).await?;
        return Ok((Place::Free, Ready::TransferInPod(Box::new(job))));
    }
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
    let whose = Whose {
        uid: &uid,
        cluster: backup.spec.etcd_cluster.as_ref().map(|of| of.name.as_str()),
        reads: false,
    };
    let name = match written(store.as_ref(), name, whose, begun).await? {
        Written::Whole(stored) => return Ok((Place::Written(stored), Ready::Nothing)),
        Written::Not(name) => name,
    };
    let (endpoints, cluster) = members(means, backup).await?;
    let transfer = Transfer {
        etcd: reach(means, backup).await?,
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

/// How etcd is to be asked: with what the EtcdCluster or the EtcdBackup names.
async fn reach(means: &Means, backup: &EtcdBackup) -> Result<Arc<dyn Etcd>, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let spec = &backup.spec;
    let access = match (&spec.etcd_cluster, &spec.auth_secret) {
        (Some(reference), _) => {
            let cluster = cluster(&means.client, &namespace, &reference.name).await?;
            runtime::reach::of_cluster(&means.client, &cluster).await
        }
        (None, secret) => {
            let tls = certified(&means.client, &namespace, spec).await?;
            match secret {
                None => Ok(tls),
                Some(secret) => {
                    let field = "spec.authSecret";
                    let of_secret = runtime::credentials::of_secret;
                    let found = of_secret(&means.client, &namespace, secret, field).await;
                    found.map(|credentials| Access {
                        credentials: Some(credentials),
                        ..tls
                    })
                }
            }
        }
    };
    let access = access.map_err(|why| Trouble::new(Reason::SecretMissing, why))?;
    if access == Access::default() {
        return Ok(means.etcd.clone());
    }
    Ok(Arc::new(EtcdClient::new(access)))
}

/// How endpoints are reached that a Secret of client certificates is for.
async fn certified(
    client: &Client,
    namespace: &str,
    spec: &EtcdBackupSpec,
) -> Result<Access, Trouble> {
    let Some(name) = spec.client_tls_secret() else {
        return Ok(Access::default());
    };
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let held = tls::held(&secrets, Purpose::Client, name).await;
    held.map(|material| tls::access(&material))
        .map_err(|fault| Trouble::new(Reason::SecretMissing, fault.message))
}

/// Where etcd is to be asked, and what the manifest says of its cluster.
async fn members(
    means: &Means,
    backup: &EtcdBackup,
) -> Result<(Vec<String>, Option<ManifestCluster>), Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let Some(reference) = &backup.spec.etcd_cluster else {
        return Ok((endpoints(&backup.spec.etcd_endpoints, &namespace), None));
    };
    let cluster = cluster(&means.client, &namespace, &reference.name).await?;
    let policy = cluster.spec.tls.as_ref();
    let tls = ClusterTls::read(&means.client, (&namespace, &reference.name), policy).await;
    let (urls, manifest) = members_of(&cluster, &namespace, &tls)?;
    Ok((urls, Some(manifest)))
}

/// The Secrets for that, for a pod: what is wrong with them is said before one is made.
async fn reach_in_pod(
    means: &Means,
    backup: &EtcdBackup,
    cluster: Option<&ManifestCluster>,
) -> Result<Reach, Trouble> {
    reach(means, backup).await?;
    let spec = &backup.spec;
    Ok(match cluster {
        Some(cluster) => Reach {
            tls: cluster
                .spec
                .tls
                .as_ref()
                .and_then(|tls| tls.operator_secret_of(&cluster.name)),
            operators: true,
            auth: cluster.spec.auth.as_ref().map(|auth| auth.secret.clone()),
        },
        None => Reach {
            tls: spec.client_tls_secret().map(str::to_owned),
            operators: false,
            auth: spec.auth_secret.clone(),
        },
    })
}

async fn in_pod<T>(
    means: &Means,
    backup: &EtcdBackup,
    pvc: &PvcSource,
    task: Task,
    read: fn(Report, &Order) -> Result<T, Trouble>,
) -> Result<InPod<T>, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    claimed(&means.client, &namespace, pvc).await?;
    let image = means.image.get().await;
    Ok(InPod {
        client: means.client.clone(),
        backup: backup.clone(),
        order: Order {
            claim: pvc.claim_name.clone(),
            path: pvc.path.clone(),
            uid: backup.uid().unwrap_or_default(),
            task,
        },
        image: image
            .map_err(|why| Trouble::new(Reason::StepFailed, why))?
            .clone(),
        shutdown: means.shutdown.clone(),
        read,
    })
}

/// A pod would wait in vain for a claim that is not there. Only that is said: an operator that may not read claims makes
/// the pod, and the pod tells what it lacks.
async fn claimed(client: &Client, namespace: &str, pvc: &PvcSource) -> Result<(), Trouble> {
    let name = &pvc.claim_name;
    let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace);
    match claims.get(name).await {
        Err(kube::Error::Api(status)) if is_missing(&status, name) => Err(Trouble::new(
            Reason::BucketMissing,
            format!(
                "spec.pvc.claimName: there is no PersistentVolumeClaim {name} in this namespace: create it or correct the name"
            ),
        )),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Whether the API server says that there is no object of this name. What a claim holds is given up for that
/// (`deletionPolicy: Delete`), so not for the 404 of a proxy that knows no way to the API server.
fn is_missing(status: &Status, name: &str) -> bool {
    let named = status.details.as_ref().map(|details| details.name.as_str());
    status.reason == "NotFound" && named == Some(name)
}

async fn removal(
    means: &Means,
    backup: &EtcdBackup,
    need: Need,
    now: Timestamp,
) -> Result<Ready, Trouble> {
    let status = backup.status.as_ref();
    let what = match (need, rules(backup)) {
        (Need::Tidy, Some(rules)) => What::Surplus {
            rules,
            newest: status
                .and_then(|status| status.location.clone())
                .unwrap_or_default(),
            others: beside(means, backup),
        },
        _ => What::Everything,
    };
    if let StorageSource::Pvc(pvc) = source_of(backup)? {
        let task = match what {
            What::Surplus {
                rules,
                newest,
                others,
            } => Task::Surplus {
                rules,
                newest,
                others,
            },
            What::Everything => Task::Everything,
        };
        let job = in_pod(means, backup, pvc, task, Report::into_kept).await?;
        return Ok(Ready::RemovalInPod(Box::new(job)));
    }
    let Target { store, key } = open(means, backup).await?;
    Ok(Ready::Removal(Box::new(Removal {
        store,
        path: key,
        uid: backup.uid().unwrap_or_default(),
        what,
        now,
    })))
}

/// The UIDs of the other EtcdBackups that number theirs at the same path.
fn beside(means: &Means, backup: &EtcdBackup) -> BTreeSet<String> {
    let all = means.objects.state();
    neighbours(backup, all.iter().map(AsRef::as_ref))
}

fn source_of(backup: &EtcdBackup) -> Result<StorageSource<'_>, Trouble> {
    let spec = &backup.spec;
    spec.blocks()
        .select(&spec.storage_type, "spec", "storageType")
        .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))
}

async fn open(means: &Means, backup: &EtcdBackup) -> Result<Target, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let source = source_of(backup)?;
    let ambient = store::ambient(&source).is_some();
    let allowed = means.grants.check(&namespace, &source, ambient);
    allowed.map_err(|why| Trouble::new(Reason::AccessDenied, why))?;
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;

    /// Of an API server that gives this answer.
    async fn looked(code: u16, answer: impl ToString) -> Result<(), Trouble> {
        let answer = answer.to_string();
        let service = service_fn(move |request: Request<Body>| {
            let answer = answer.clone();
            async move {
                let path = "/api/v1/namespaces/prod/persistentvolumeclaims/backups";
                assert_eq!(
                    (request.method().as_str(), request.uri().path()),
                    ("GET", path)
                );
                let body = Body::from(answer.into_bytes());
                Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
            }
        });
        let pvc = json!({ "claimName": "backups", "path": "etcd/main" });
        let pvc = serde_json::from_value(pvc).unwrap();
        claimed(&Client::new(service, "prod"), "prod", &pvc).await
    }

    #[tokio::test]
    async fn a_claim_that_is_missing_is_named_with_the_remedy_before_a_pod_waits_for_it() {
        let refusal = |code: u16, reason: &str, named: Value| {
            json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
                    "message": "no", "details": named })
        };
        let named = json!({ "name": "backups", "kind": "persistentvolumeclaims" });
        let missing = refusal(404, "NotFound", named.clone());
        let trouble = looked(404, missing).await.unwrap_err();
        assert_eq!(trouble.reason, Reason::BucketMissing);
        for part in [
            "spec.pvc.claimName",
            "PersistentVolumeClaim backups",
            "create it",
        ] {
            assert!(trouble.message.contains(part), "{trouble:?}");
        }
        let claim = json!({ "metadata": { "name": "backups" } });
        looked(200, claim).await.unwrap();
        // Invariant 1: nobody has said that there is none.
        for (code, reason) in [(403, "Forbidden"), (500, "InternalError")] {
            let refused = refusal(code, reason, named.clone());
            looked(code, refused).await.unwrap();
        }
        looked(404, refusal(404, "NotFound", json!({})))
            .await
            .unwrap();
        looked(404, "404 page not found").await.unwrap();
    }
}
