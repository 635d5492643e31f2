//! Opens the store in the spec with its Secrets, or finds the PersistentVolumeClaim. Of the results, only the opened
//! store and the encryption key contain the content of Secrets (invariant 14).

use api::EtcdBackup;
use api::storage::{PvcSource, SecretName, StorageSource};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret};
use kube::core::Status;
use kube::{Api, Client, ResourceExt};
use store::encryption::Key;
use store::{Directories, LocalStore, SecretData, Secrets, Target};

use super::ObserveContext;
use crate::reason::{Reason, Trouble};
use crate::snapshot::Site;
use crate::transfer::{self, in_store};

/// The storage block of the spec that `spec.storageType` selects.
pub(super) fn source_of(backup: &EtcdBackup) -> Result<StorageSource<'_>, Trouble> {
    let spec = &backup.spec;
    spec.blocks()
        .select(&spec.storage_type, "spec", "storageType")
        .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))
}

/// Opens the store `source`, if the grants of the namespace allow it.
pub(super) async fn open(
    context: &ObserveContext,
    backup: &EtcdBackup,
    source: &StorageSource<'_>,
) -> Result<Target, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    let ambient = store::ambient(source).is_some();
    let allowed = context.grants.check(&namespace, source, ambient);
    allowed.map_err(|why| Trouble::new(Reason::AccessDenied, why))?;
    let (credentials, ca) = secrets(&context.client, &namespace, source).await?;
    let secrets = Secrets {
        credentials: credentials.as_ref(),
        ca: ca.as_ref(),
    };
    let local = context.local.as_ref();
    let directories = Directories {
        local: local
            .map(|local| local_of(local, &context.grants.own, &namespace, context.local_quota)),
        claim: None,
    };
    let opened = store::open(source, secrets, &directories).await;
    opened.map_err(|error| in_store(&error))
}

/// The subdirectory of the operator's backup directory for a namespace (invariant 13). The operator's own namespace
/// uses the whole directory.
fn local_of(local: &LocalStore, own: &str, namespace: &str, quota: Option<u64>) -> LocalStore {
    if namespace == own {
        local.clone()
    } else {
        local.for_namespace(namespace, quota)
    }
}

/// The key that encrypts the backup. `None` if the spec requires no encryption.
pub(super) async fn encryption_key(
    client: &Client,
    backup: &EtcdBackup,
) -> Result<Option<Key>, Trouble> {
    let Some(encryption) = &backup.spec.encryption else {
        return Ok(None);
    };
    let namespace = backup.namespace().unwrap_or_default();
    let secrets = Api::<Secret>::namespaced(client.clone(), &namespace);
    let named = SecretName {
        field: "spec.encryption.secret",
        name: &encryption.secret,
    };
    let data = secret(&secrets, Some(named)).await?.unwrap_or_default();
    transfer::encryption_key(encryption, &data).map(Some)
}

/// The PersistentVolumeClaim in the spec, and the image of the pod that mounts it.
pub(super) async fn volume(
    context: &ObserveContext,
    backup: &EtcdBackup,
    pvc: &PvcSource,
) -> Result<Site, Trouble> {
    let namespace = backup.namespace().unwrap_or_default();
    check_pvc(&context.client, &namespace, pvc).await?;
    let image = context.image.get().await;
    Ok(Site::Volume {
        claim: pvc.claim_name.clone(),
        path: pvc.path.clone(),
        image: image
            .map_err(|why| Trouble::new(Reason::StepFailed, why))?
            .clone(),
    })
}

/// Fails if the PersistentVolumeClaim is missing, because a pod that mounts it would stay pending. Ignores all other
/// errors, such as missing permission to read PersistentVolumeClaims. If the pod cannot mount the volume, the status of
/// the pod shows the cause.
async fn check_pvc(client: &Client, namespace: &str, pvc: &PvcSource) -> Result<(), Trouble> {
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

/// True if the API server reports that no object of this name exists. A 404 response without the name may come from a
/// proxy, so it is no proof. With `deletionPolicy: Delete`, a false proof would delete the EtcdBackup without its
/// stored backups.
fn is_missing(status: &Status, name: &str) -> bool {
    let named = status.details.as_ref().map(|details| details.name.as_str());
    status.reason == "NotFound" && named == Some(name)
}

type Content = Option<SecretData>;

async fn secrets(
    client: &Client,
    namespace: &str,
    source: &StorageSource<'_>,
) -> Result<(Content, Content), Trouble> {
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let names = source.secrets();
    Ok((
        secret(&secrets, names.credentials).await?,
        secret(&secrets, names.ca).await?,
    ))
}

async fn secret(secrets: &Api<Secret>, named: Option<SecretName<'_>>) -> Result<Content, Trouble> {
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use store::Store;
    use tower::service_fn;

    use super::*;

    /// Runs `check_pvc` against a fake API server that returns `code` and `answer`.
    async fn checked(code: u16, answer: impl ToString) -> Result<(), Trouble> {
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
        check_pvc(&Client::new(service, "prod"), "prod", &pvc).await
    }

    /// The encryption key of an EtcdBackup, read from a fake API server. Its Secret `keys` contains `entries`.
    async fn key_of(encryption: Value, entries: Value) -> Result<Option<Key>, Trouble> {
        let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "keys" }, "data": entries });
        let service = service_fn(move |request: Request<Body>| {
            let path = request.uri().path().to_owned();
            let (code, answer) = if path == "/api/v1/namespaces/prod/secrets/keys" {
                (200, secret.clone())
            } else {
                let answer = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
                                     "reason": "NotFound", "message": "no" });
                (404, answer)
            };
            let body = Body::from(answer.to_string().into_bytes());
            async move { Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap()) }
        });
        let spec = json!({ "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": { "path": "b/k" },
                           "encryption": encryption });
        let mut backup = EtcdBackup::new("nightly", serde_json::from_value(spec).unwrap());
        backup.metadata.namespace = Some("prod".to_owned());
        encryption_key(&Client::new(service, "prod"), &backup).await
    }

    #[tokio::test]
    async fn encryption_key_is_read_or_problem_of_its_secret_is_reported() {
        // `key` is encoded in base64 twice: the entry of the Secret is a base64 text, and the API server encodes every
        // entry.
        let key = "QUFFQ0F3UUZCZ2NJQ1FvTERBME9EeEFSRWhNVUZSWVhHQmthR3h3ZEhoOD0=";
        let one = json!({ "2026": key });
        assert_eq!(key_of(Value::Null, one.clone()).await, Ok(None));
        let found = key_of(json!({ "secret": "keys" }), one.clone()).await;
        let found = found.unwrap().unwrap();
        assert_eq!(
            (found.name(), found.id().to_string().as_str()),
            ("2026", "a62e0f7753a4df18")
        );
        let two = json!({ "2026": key, "2027": key });
        for (encryption, entries, part) in [
            (json!({ "secret": "other" }), one.clone(), "no Secret other"),
            (json!({ "secret": "keys" }), two, "2026, 2027"),
            (json!({ "secret": "keys", "key": "2028" }), one, "\"2028\""),
            (json!({ "secret": "keys" }), json!({}), "no entries"),
            (
                json!({ "secret": "keys" }),
                json!({ "2026": "c2VjcmV0" }),
                "openssl rand",
            ),
        ] {
            let trouble = key_of(encryption, entries).await.unwrap_err();
            assert_eq!(trouble.reason, Reason::SecretMissing);
            for part in ["spec.encryption.secret", part] {
                assert!(trouble.message.contains(part), "{}", trouble.message);
            }
            assert!(!trouble.message.contains("AAECAw"), "{}", trouble.message);
        }
    }

    #[test]
    fn invariant_13_each_namespace_has_its_own_local_directory() {
        let local = LocalStore::new("/backups");
        let location = |namespace| local_of(&local, "operators", namespace, Some(1)).location();
        assert_eq!(location("operators"), "file:///backups");
        assert_eq!(location("team-a"), "file:///backups/namespaces/team-a");
    }

    #[tokio::test]
    async fn missing_backup_pvc_is_reported_with_remedy() {
        let refusal = |code: u16, reason: &str, named: Value| {
            json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
                    "message": "no", "details": named })
        };
        let named = json!({ "name": "backups", "kind": "persistentvolumeclaims" });
        let missing = refusal(404, "NotFound", named.clone());
        let trouble = checked(404, missing).await.unwrap_err();
        assert_eq!(trouble.reason, Reason::BucketMissing);
        for part in [
            "spec.pvc.claimName",
            "PersistentVolumeClaim backups",
            "create it",
        ] {
            assert!(trouble.message.contains(part), "{trouble:?}");
        }
        let claim = json!({ "metadata": { "name": "backups" } });
        checked(200, claim).await.unwrap();
        // Invariant 1: the check accepts each of the following answers, because none of them proves that the
        // PersistentVolumeClaim is missing.
        for (code, reason) in [(403, "Forbidden"), (500, "InternalError")] {
            let refused = refusal(code, reason, named.clone());
            checked(code, refused).await.unwrap();
        }
        checked(404, refusal(404, "NotFound", json!({})))
            .await
            .unwrap();
        checked(404, "404 page not found").await.unwrap();
    }
}
