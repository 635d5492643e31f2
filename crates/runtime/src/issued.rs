//! Reads and writes the objects of certificates that cert-manager issues (`spec.TLS.certManager`). cert-manager's kinds
//! are read as JSON, so the operator needs no types of cert-manager.

use std::collections::BTreeSet;

use api::EtcdCluster;
use api::cluster::{CertManagerTls, IssuedCertificate};
use api::names;
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::core::DynamicObject;
use kube::{Api, Client, ResourceExt};
use member::Members;
use member::issued::{Denied, Issuance, certificate_resource, issuer_resource};

use crate::apply::{self, is_not_found};

/// The Certificates. [`Denied`] if the API server does not serve this kind, or denies access to it.
type Certificates = Result<Vec<DynamicObject>, Denied>;

/// Reads the Certificates, their Secrets and, for certificates that are not available, the issuers.
///
/// # Errors
/// Fails if the API server cannot be reached, or denies access to the Secrets.
pub async fn read(
    client: &Client,
    cluster: &EtcdCluster,
    tls: &CertManagerTls,
) -> Result<Issuance, kube::Error> {
    let (namespace, name) = (cluster.namespace().unwrap_or_default(), cluster.name_any());
    let needed = tls.certificates(cluster.spec.grpc_proxy.is_some());
    let secrets: BTreeSet<String> = needed
        .iter()
        .flat_map(|of| [of.certificate(&name), of.secret(&name)])
        .collect();
    let api = Api::<Secret>::namespaced(client.clone(), &namespace);
    let secrets = try_join_all(secrets.iter().map(|secret| api.get_opt(secret)));
    let (secrets, certificates) = tokio::join!(
        secrets,
        certificates(client, (namespace.as_str(), name.as_str()), &needed)
    );
    let secrets: Vec<Secret> = secrets?.into_iter().flatten().collect();
    let certificates = certificates?;
    let members = Members::of(cluster, &namespace, "", None);
    let found = certificates.as_deref();
    let mut issuance = Issuance::of(&members, tls, found, &secrets);
    for issuer in issuance.suspects(tls) {
        let Some((resource, namespaced)) = issuer_resource(issuer) else {
            continue;
        };
        let api: Api<DynamicObject> = if namespaced {
            Api::namespaced_with(client.clone(), &namespace, &resource)
        } else {
            Api::all_with(client.clone(), &resource)
        };
        match api.get_opt(&issuer.name).await {
            Ok(there) => issuance.blame(tls, issuer, there.as_ref()),
            // If the operator may not read issuers (403), the reported problem contains only the message of the
            // Certificate.
            Err(kube::Error::Api(status)) if status.code == 403 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(issuance)
}

/// Reads the Certificates with the labels of the cluster, and those with the name of a needed Certificate.
async fn certificates(
    client: &Client,
    (namespace, cluster): (&str, &str),
    needed: &[IssuedCertificate],
) -> Result<Certificates, kube::Error> {
    let api = api(client, namespace);
    let of_cluster = ListParams::default().labels(&names::cluster_selector(cluster));
    let mut found = match api.list(&of_cluster).await {
        Ok(found) => found.items,
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(Err(Denied::NotServed)),
        Err(kube::Error::Api(status)) if status.code == 403 => {
            return Ok(Err(Denied::Forbidden(status.message.clone())));
        }
        Err(error) => return Err(error),
    };
    let needed = needed.iter().map(|of| of.certificate(cluster));
    let is_missing = |name: &String| !found.iter().any(|one| one.name_any() == *name);
    let missing: Vec<String> = needed.filter(is_missing).collect();
    let others = try_join_all(missing.iter().map(|name| api.get_opt(name)));
    found.extend(others.await?.into_iter().flatten());
    Ok(Ok(found))
}

/// Applies a Certificate.
///
/// # Errors
/// Fails if the API server rejects the request or cannot be reached.
pub async fn apply(
    client: &Client,
    manager: &str,
    certificate: &DynamicObject,
) -> Result<(), apply::Error> {
    let namespace = certificate.namespace().unwrap_or_default();
    let (api, name) = (api(client, &namespace), certificate.name_any());
    let params = PatchParams::apply(manager).force();
    let applied = api.patch(&name, &params, &Patch::Apply(certificate)).await;
    applied
        .map(drop)
        .map_err(|source| failed("apply", &name, source))
}

/// Deletes a Certificate with this UID. Does nothing if it no longer exists.
///
/// # Errors
/// Fails if the API server rejects the request or cannot be reached.
pub async fn delete(
    client: &Client,
    namespace: &str,
    (name, uid): (&str, &str),
) -> Result<(), apply::Error> {
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    match api(client, namespace).delete(name, &params).await {
        Ok(_) => Ok(()),
        Err(error) if is_not_found(&error) => Ok(()),
        Err(source) => Err(failed("delete", name, source)),
    }
}

fn api(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &certificate_resource())
}

fn failed(verb: &'static str, name: &str, source: kube::Error) -> apply::Error {
    apply::Error::Api {
        verb,
        kind: "Certificate".to_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    }
}
