//! Certificates that cert-manager issues for a cluster (`spec.TLS.certManager`): the Certificates, and the Secrets that
//! members and clients mount.
//!
//! cert-manager replaces a certificate and its CA certificate in one write. etcd reads its certificate for each new
//! connection, but the CA certificates only when it starts. No pod therefore mounts a Secret of cert-manager: the
//! operator publishes its content in steps ([`Issuance::publications`], invariant 20).
//!
//! Performs no I/O: `runtime::issued` reads the objects.

mod build;
mod held;
mod publish;

#[cfg(test)]
mod tests;

use std::fmt;

use api::cluster::{CertManagerTls, IssuedCertificate, IssuerRef, TlsPolicy};
use api::names;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};

use crate::Members;
use crate::compare::contains;
use crate::tls::{ClusterTls, Fault, FaultKind, Purpose};

pub use build::{certificate, service_names, subject_names};
pub use held::Held;
pub use publish::Publication;

/// The field of the spec, for messages.
const FIELD: &str = "spec.TLS.certManager";
/// The API group of cert-manager.
const GROUP: &str = "cert-manager.io";

/// The API resource of Certificates.
pub fn certificate_resource() -> ApiResource {
    let kind = GroupVersionKind::gvk(GROUP, "v1", "Certificate");
    ApiResource::from_gvk_with_plural(&kind, "certificates")
}

/// The API resource of an issuer, and true if the issuer has a namespace. `None` if another controller than
/// cert-manager defines the issuer, because the operator has no permission to read it.
pub fn issuer_resource(issuer: &IssuerRef) -> Option<(ApiResource, bool)> {
    let (plural, namespaced) = match (issuer.group(), issuer.kind()) {
        (GROUP, "Issuer") => ("issuers", true),
        (GROUP, "ClusterIssuer") => ("clusterissuers", false),
        _ => return None,
    };
    let kind = GroupVersionKind::gvk(GROUP, "v1", issuer.kind());
    let resource = ApiResource::from_gvk_with_plural(&kind, plural);
    Some((resource, namespaced))
}

/// The settings for which the operator writes Certificates. Members use the policy `at`, and `next` is the policy of
/// the next step of a TLS change. `None` if neither policy uses cert-manager.
pub fn settings(at: Option<&TlsPolicy>, next: Option<&TlsPolicy>) -> Option<CertManagerTls> {
    let of = |policy: Option<&TlsPolicy>| policy.and_then(|tls| tls.cert_manager.clone());
    match (of(at), of(next)) {
        (Some(at), Some(next)) => Some(CertManagerTls {
            peer: Some(at.peer() || next.peer()),
            client: Some(at.client() || next.client()),
            ..next
        }),
        (at, next) => next.or(at),
    }
}

/// A write to a Certificate, or to a Secret that members or clients mount.
#[derive(Clone, Debug, PartialEq)]
pub enum IssuedWrite {
    /// Applies a Certificate.
    Apply(Box<DynamicObject>),
    /// Publishes an issued certificate or a trust bundle.
    Publish(Box<Publication>),
    /// Deletes the Certificate of a client that the spec no longer names, or of gRPC proxies that the spec no longer
    /// contains. The garbage collector then deletes the published Secret, which the Certificate owns.
    Discard {
        /// Name of the Certificate.
        name: String,
        /// UID of the Certificate, the precondition of the deletion.
        uid: String,
    },
}

impl fmt::Display for IssuedWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Apply(made) => write!(f, "apply Certificate {}", made.name_any()),
            Self::Publish(publication) => publication.fmt(f),
            Self::Discard { name, .. } => write!(f, "delete Certificate {name}"),
        }
    }
}

/// Why the operator cannot use the Certificates of cert-manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The API server does not serve the kind Certificate.
    NotServed,
    /// The operator lacks a permission. The text is the message of the API server.
    Forbidden(String),
}

/// How an existing Certificate differs from the Certificate that the operator would write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The Certificate does not exist.
    Missing,
    /// The Certificate belongs to another owner.
    Others,
    /// The Certificate differs.
    Drifted,
    /// The Certificate is as the operator would write it.
    AsMade,
}

/// One issued certificate: the object Certificate, the Secret of cert-manager, and the published Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The purpose of the certificate.
    pub of: IssuedCertificate,
    /// UID of the Certificate, if it exists.
    pub uid: Option<String>,
    /// How the Certificate differs from the Certificate that the operator would write.
    pub written: Written,
    /// True if cert-manager reports the Certificate as ready, and is not issuing another certificate.
    pub ready: bool,
    /// Why the certificate is not available, with the remedy; `None` if it is available.
    pub problem: Option<(FaultKind, String)>,
    /// The Secret of cert-manager.
    pub source: Option<Held>,
    /// The Secret that members or clients mount.
    pub target: Option<Held>,
}

/// The certificates that cert-manager issues for a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuance {
    cluster: String,
    /// The settings of the certificates.
    pub tls: CertManagerTls,
    /// The certificates that the cluster needs.
    pub pairs: Vec<Pair>,
    /// Name and UID of each Certificate to delete: of a client that the spec no longer names, or of gRPC proxies that
    /// the spec no longer contains.
    pub discarded: Vec<(String, String)>,
}

impl Issuance {
    /// Collects the certificates of a cluster from the objects that were read. `secrets` contains the Secrets of
    /// cert-manager and the published Secrets.
    pub fn of(
        members: &Members<'_>,
        tls: &CertManagerTls,
        certificates: Result<&[DynamicObject], &Denied>,
        secrets: &[Secret],
    ) -> Self {
        let cluster = members.cluster;
        let uid = members
            .owner
            .as_ref()
            .map_or("", |owner| owner.uid.as_str());
        let found = certificates.unwrap_or_default();
        let secret = |name: String| secrets.iter().find(|secret| secret.name_any() == name);
        let pair = |of: IssuedCertificate| {
            let name = of.certificate(cluster);
            let there = found.iter().find(|there| there.name_any() == name);
            let owners = [uid, name.as_str()];
            let read = |secret: &Secret| Held::of(secret, (cluster, owners));
            let (source, target) = (secret(name.clone()), secret(of.secret(cluster)));
            let mut pair = Pair {
                uid: there.and_then(ResourceExt::uid),
                written: written(there, &certificate(members, tls, &of), (cluster, uid)),
                ready: there.is_some_and(is_ready),
                problem: None,
                source: source.map(read),
                target: target.map(read),
                of,
            };
            pair.problem = match certificates {
                Err(denied) => Some((FaultKind::CertManagerMissing, denied_text(denied))),
                Ok(_) => pair.obstacle(cluster, there),
            };
            pair
        };
        let needed = tls.certificates(members.spec.grpc_proxy.is_some());
        let is_needed = |there: &&DynamicObject| {
            needed
                .iter()
                .any(|of| of.certificate(cluster) == there.name_any())
        };
        let prefix = IssuedCertificate::Client(String::new()).certificate(cluster);
        let prefix = prefix.trim_end_matches("-issued").to_owned();
        let proxies = IssuedCertificate::Proxy.certificate(cluster);
        let of_clients = |there: &&DynamicObject| {
            let name = there.name_any();
            name.starts_with(&prefix) || name == proxies
        };
        let discarded = found.iter().filter(|there| {
            of_clients(there) && !is_needed(there) && is_owned(&there.metadata, uid)
        });
        Self {
            cluster: cluster.to_owned(),
            tls: tls.clone(),
            discarded: discarded
                .map(|there| (there.name_any(), there.uid().unwrap_or_default()))
                .collect(),
            pairs: needed.iter().cloned().map(pair).collect(),
        }
    }

    /// The issuers to read: those of certificates that are not available, or that cert-manager does not report as
    /// ready.
    pub fn suspects<'a>(&self, tls: &'a CertManagerTls) -> Vec<&'a IssuerRef> {
        let mut found: Vec<&IssuerRef> = Vec::new();
        for pair in &self.pairs {
            let issuer = tls.issuer_of(&pair.of);
            if pair.is_suspect() && !found.contains(&issuer) {
                found.push(issuer);
            }
        }
        found
    }

    /// Replaces the problems of an issuer's certificates if the issuer does not exist or is not ready. `there` is
    /// `None` if the issuer does not exist.
    pub fn blame(
        &mut self,
        tls: &CertManagerTls,
        issuer: &IssuerRef,
        there: Option<&DynamicObject>,
    ) {
        let (kind, name) = (issuer.kind(), &issuer.name);
        let text = match there.map(readiness) {
            None => format!(
                "{FIELD}: the {kind} {name} does not exist: create it, or correct the name, the kind and the group"
            ),
            Some(Some((true, _))) => return,
            Some(state) => {
                let why = state.map_or_else(
                    || "cert-manager has not processed it".to_owned(),
                    |(_, why)| why,
                );
                format!(
                    "{FIELD}: the {kind} {name} is not ready: {why}. Correct the issuer, and check that cert-manager \
                     runs"
                )
            }
        };
        for pair in &mut self.pairs {
            if pair.is_suspect() && tls.issuer_of(&pair.of) == issuer {
                pair.problem = Some((FaultKind::IssuerMissing, text.clone()));
            }
        }
    }

    /// For each Secret in `tls` that is not published yet, replaces the fault by its cause. A Secret of another owner
    /// gets a fault too, so that no member starts with it.
    pub fn explain(&self, tls: &mut ClusterTls) {
        let slots = [
            (Purpose::Peer, &mut tls.peer),
            (Purpose::Server, &mut tls.server),
            (Purpose::Operator, &mut tls.operator),
        ];
        for (purpose, slot) in slots {
            let Some(slot) = slot else { continue };
            let mut pairs = self.pairs.iter();
            let pair = pairs.find(|pair| pair.of.secret(&self.cluster) == slot.secret);
            let Some((code, message)) = pair.and_then(|pair| pair.problem.clone()) else {
                continue;
            };
            let unpublished = match &slot.found {
                Err(fault) => fault.code == FaultKind::CertificateNotIssued,
                Ok(_) => pair.is_some_and(Pair::is_of_others),
            };
            if unpublished {
                slot.found = Err(Fault {
                    purpose,
                    code,
                    message,
                });
            }
        }
    }
}

impl Pair {
    fn is_suspect(&self) -> bool {
        let denied = matches!(self.problem, Some((FaultKind::CertManagerMissing, _)));
        !denied && (self.problem.is_some() || !self.ready)
    }

    /// True if another owner has a Secret with the name of the published Secret.
    pub fn is_of_others(&self) -> bool {
        self.target.as_ref().is_some_and(|target| !target.owned)
    }

    fn obstacle(
        &self,
        cluster: &str,
        there: Option<&DynamicObject>,
    ) -> Option<(FaultKind, String)> {
        let (name, secret) = (self.of.certificate(cluster), self.of.secret(cluster));
        let usable = self.source.as_ref().is_some_and(Held::is_usable);
        let text = match there.map(readiness) {
            _ if self.is_of_others() => format!(
                "{FIELD}: Secret {secret} belongs to another owner: delete it, or move its data to a Secret with \
                 another name"
            ),
            Some(_) if self.written == Written::Others => {
                format!("{FIELD}: Certificate {name} belongs to another owner: delete it")
            }
            _ if usable => return None,
            None => format!("{FIELD}: the operator creates Certificate {name}: wait"),
            Some(Some((true, _))) => format!(
                "{FIELD}: Secret {name} has no usable {}: use an issuer that returns its CA certificate in ca.crt",
                held::KEYS.join(", ")
            ),
            Some(state) => {
                let why = state.map_or_else(
                    || "cert-manager has not processed it. Check that cert-manager runs".to_owned(),
                    |(_, why)| why,
                );
                format!(
                    "{FIELD}: Certificate {name} is not ready: {why}. For the cause, run kubectl -n NAMESPACE describe \
                     certificaterequests"
                )
            }
        };
        Some((FaultKind::CertificateNotIssued, text))
    }
}

fn denied_text(denied: &Denied) -> String {
    match denied {
        Denied::NotServed => format!(
            "{FIELD}: the API server has no Certificates of {GROUP}/v1: install cert-manager, or use another source of \
             certificates"
        ),
        Denied::Forbidden(why) => format!(
            "{FIELD}: the operator may not manage Certificates: {why}. Set certManager.enabled=true in the values of \
             the chart"
        ),
    }
}

/// The condition `Ready` of an object of cert-manager: true if it is ready, and the message. `None` without the
/// condition.
fn readiness(object: &DynamicObject) -> Option<(bool, String)> {
    condition(object, "Ready")
}

fn condition(object: &DynamicObject, kind: &str) -> Option<(bool, String)> {
    let conditions = object.data.pointer("/status/conditions")?.as_array()?;
    let found = conditions.iter().find(|one| one["type"] == kind)?;
    let text = found["message"].as_str().unwrap_or_default();
    let text = text.trim_end_matches('.').to_owned();
    Some((found["status"] == "True", text))
}

/// True if the Certificate is ready and is not being renewed. During a renewal, cert-manager reports the previous
/// certificate as ready.
fn is_ready(certificate: &DynamicObject) -> bool {
    let is_true = |kind| condition(certificate, kind).is_some_and(|(is_true, _)| is_true);
    is_true("Ready") && !is_true("Issuing")
}

fn written(
    there: Option<&DynamicObject>,
    made: &DynamicObject,
    (cluster, uid): (&str, &str),
) -> Written {
    let Some(there) = there else {
        return Written::Missing;
    };
    let label = there.labels().get(names::LABEL_CLUSTER);
    let owners = there.owner_references();
    if !is_owned(&there.metadata, uid)
        && (!owners.is_empty() || label.is_none_or(|it| it != cluster))
    {
        return Written::Others;
    }
    // Fields that the operator does not set are not compared. Server-side apply cannot remove fields of another
    // manager, so a comparison would make the operator apply the Certificate without end.
    let without_types = |object: &DynamicObject| DynamicObject {
        types: None,
        ..object.clone()
    };
    if contains(&without_types(there), &without_types(made)) {
        Written::AsMade
    } else {
        Written::Drifted
    }
}

fn is_owned(metadata: &ObjectMeta, uid: &str) -> bool {
    let mut owners = metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.uid == uid)
}
