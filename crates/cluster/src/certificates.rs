//! The planner's view of generated certificates, and the writes that change their Secrets. Plain data without keys.

mod trust;

use std::collections::BTreeMap;
use std::fmt;

use api::EtcdCluster;
use api::cluster::{GeneratedTls, TlsPolicy};
use api::names::{self, CertificateUse};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use member::certificate::certificates;
use member::issued::Issuance;
use member::seed_name;
use member::tls::{Authorities, ClusterTls};

use crate::authority::{CaScope, Held, Rule, digest, held};
use crate::expiry::{self, Expiry};

/// The certificates of a cluster: generated certificates, and the CAs and expiries of certificates in Secrets of other
/// owners.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificates {
    /// The settings of the spec; `None` if the operator generates no certificates.
    pub rule: Option<Rule>,
    /// The Secrets of generated certificates and CAs, by name.
    pub secrets: BTreeMap<String, Held>,
    /// The certificate annotations of each pod, by the member's name.
    pub pods: BTreeMap<String, Noted>,
    /// A digest of the CAs in Secrets of other owners; `None` if the operator generates the certificates, or if one of
    /// these Secrets is unreadable.
    pub others: Option<String>,
    /// The CAs in Secrets of other owners, in the format of the annotation that a new pod gets.
    pub authorities: Option<Authorities>,
    /// The expiry of each certificate, whether or not the operator issues it.
    pub expiries: Vec<Expiry>,
    /// The seed member of the restore that holds the restore lock; `None` without a lock.
    pub seed: Option<String>,
    /// The certificates that cert-manager issues; `None` without `spec.TLS.certManager`.
    pub issued: Option<Issuance>,
}

/// The annotations of a pod about its certificates. Each value is `None` if the annotation is missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// A digest of the CAs that the pod's etcd trusts, and the time from which one scope (peers or clients) has no
    /// valid CA.
    pub trust: Option<String>,
    /// A digest of the certificates about which the operator last notified the pod.
    pub certificates: Option<String>,
    /// The CAs with which the pod was started: identifiers for CAs in static Secrets, prefixes of fingerprints for
    /// generated CAs.
    pub authorities: Option<Authorities>,
}

impl Certificates {
    /// Collects the certificates of a cluster. `cluster` contains the spec in effect; `secrets` are the Secrets of
    /// generated certificates and CAs.
    pub fn new(cluster: &EtcdCluster, secrets: &[Secret], pods: &[Pod]) -> Self {
        let rule = rule(cluster, cluster.spec.tls.as_ref());
        let (name, uid) = (cluster.name_any(), cluster.uid().unwrap_or_default());
        let note = |pod: &Pod| Noted {
            trust: pod.annotations().get(names::ANNOTATION_TRUST).cloned(),
            certificates: pod
                .annotations()
                .get(names::ANNOTATION_CERTIFICATES)
                .cloned(),
            authorities: pod
                .annotations()
                .get(names::ANNOTATION_AUTHORITIES)
                .map(|text| Authorities::read(text)),
        };
        let mut secrets: BTreeMap<_, _> = secrets
            .iter()
            .map(|secret| (secret.name_any(), held(secret, (&name, &uid))))
            .collect();
        for scope in rule.iter().flat_map(Rule::scopes) {
            let name = scope.secret(&cluster.name_any());
            if let Some(held) = secrets.remove(&name) {
                secrets.insert(name, held.of_authority());
            }
        }
        Self {
            rule,
            others: None,
            authorities: None,
            seed: seed(cluster),
            issued: None,
            expiries: expiry::of_held(secrets.iter()),
            secrets,
            pods: pods.iter().map(|pod| (pod.name_any(), note(pod))).collect(),
        }
    }

    /// Adds the trusted CAs and the expiries of certificates in Secrets of other owners. Does nothing if the operator
    /// generates the certificates.
    #[must_use]
    pub fn and_of_others(mut self, tls: &ClusterTls) -> Self {
        if self.rule.is_some() {
            return self;
        }
        let slots = [&tls.peer, &tls.server];
        let trusted: Vec<String> = slots
            .into_iter()
            .flatten()
            .filter_map(|slot| certificates(&slot.found.as_ref().ok()?.ca).ok())
            .map(|all| {
                let mut prints: Vec<String> = all.into_iter().map(|one| one.fingerprint).collect();
                prints.sort();
                digest(prints.iter().map(String::as_str))
            })
            .collect();
        let used = [&tls.peer, &tls.server].into_iter().flatten().count();
        let whole = used > 0 && trusted.len() == used;
        self.others = whole.then(|| digest(trusted.iter().map(String::as_str)));
        self.authorities = Authorities::of(tls);
        self.expiries = expiry::of_secrets(tls);
        self
    }

    /// The Secret of the CA for this scope.
    pub fn authority(&self, scope: CaScope) -> Option<&Held> {
        self.secrets
            .get(&scope.secret(&self.rule.as_ref()?.cluster))
    }

    /// The Secret of the certificate with this owner and use.
    pub fn leaf(&self, owner: &str, used: CertificateUse) -> Option<&Held> {
        self.secrets.get(&names::certificate_secret(owner, used))
    }

    /// The annotation value that notifies the pod about its current certificates; `None` until all certificates of the
    /// member exist.
    pub fn notification(&self, member: &str) -> Option<String> {
        let rule = self.rule.as_ref()?;
        let print = |used| {
            let leaf = self.leaf(member, used)?.certificate.as_ref()?;
            Some(leaf.fingerprint.as_str())
        };
        let prints: Option<Vec<&str>> = rule.uses_of_member().map(print).collect();
        prints.map(digest)
    }
}

/// The settings for generated certificates in the TLS policy in effect; `None` if that policy does not generate
/// certificates.
pub fn rule(cluster: &EtcdCluster, tls: Option<&TlsPolicy>) -> Option<Rule> {
    let spec = &cluster.spec;
    let generated: &GeneratedTls = tls?.generated()?;
    Some(Rule {
        namespace: cluster.namespace().unwrap_or_default(),
        cluster: cluster.name_any(),
        domain: spec.cluster_domain().trim_matches('.').to_owned(),
        peers: generated.peer(),
        clients: generated.client(),
        validity: generated.certificate_duration(),
        authority_validity: generated.authority_duration(),
        server_names: generated.server_names.clone(),
        proxy: spec
            .grpc_proxy
            .as_ref()
            .map(|proxy| proxy.service_name(&cluster.name_any())),
        rotate: cluster
            .annotations()
            .get(names::ANNOTATION_ROTATE_AUTHORITY)
            .cloned(),
    })
}

/// The seed member of the restore that holds the restore lock; `None` without a lock.
pub fn seed(cluster: &EtcdCluster) -> Option<String> {
    let restore = cluster.annotations().get(names::ANNOTATION_RESTORE)?;
    Some(seed_name(&cluster.name_any(), restore))
}

/// A write to a Secret of generated certificates. Each write has a precondition from the observation (invariant 11).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateWrite {
    /// Creates a CA. Its trust bundle contains the new CA and the CAs in `extra_cas`.
    Authority {
        /// The connections that the CA serves: between peers, or with clients.
        scope: CaScope,
        /// The CAs in the trust bundles of the existing Secrets, in PEM.
        extra_cas: Vec<Vec<u8>>,
        /// The resourceVersion of the Secret that the write replaces, as precondition; `None` creates the Secret.
        over: Option<String>,
    },
    /// Extends the trust bundle of a new CA by the CAs that running members trust and use.
    Rejoin {
        /// The connections that the CA serves: between peers, or with clients.
        scope: CaScope,
        /// All trusted CAs except the current and the next signer, in PEM.
        extra_cas: Vec<Vec<u8>>,
        /// The resourceVersion precondition of the Secret.
        over: String,
    },
    /// Creates the next signer. All members must trust it before it signs.
    Prepare {
        /// The connections that the CA serves: between peers, or with clients.
        scope: CaScope,
        /// The resourceVersion precondition of the Secret.
        over: String,
    },
    /// Makes the next signer the current signer.
    Switch {
        /// The connections that the CA serves: between peers, or with clients.
        scope: CaScope,
        /// The resourceVersion precondition of the Secret.
        over: String,
    },
    /// Removes all CAs except the current signer from the trust bundle.
    Retire {
        /// The connections that the CA serves: between peers, or with clients.
        scope: CaScope,
        /// The resourceVersion precondition of the Secret.
        over: String,
    },
    /// Issues a certificate: a new one, or the replacement of an existing one.
    Issue {
        /// Name of the member or of the cluster to which the certificate belongs.
        owner: String,
        /// The use of the certificate: peer, server, operator, client or proxy.
        used: CertificateUse,
        /// The resourceVersion of the Secret that the write replaces, as precondition; `None` creates the Secret.
        over: Option<String>,
        /// The resourceVersion precondition of the Secret of the CA that signs.
        by: String,
    },
    /// Copies the CA's trust bundle to the Secret of a certificate. The certificate does not change.
    Trust {
        /// Name of the member or of the cluster to which the certificate belongs.
        owner: String,
        /// The use of the certificate: peer, server, operator, client or proxy.
        used: CertificateUse,
        /// The resourceVersion precondition of the Secret.
        over: String,
        /// The resourceVersion precondition of the CA's Secret.
        by: String,
    },
    /// Restores the owner and the labels of a Secret. The data does not change.
    Mark {
        /// Name of the Secret whose owner and labels are restored.
        secret: String,
        /// The resourceVersion precondition of the Secret.
        over: String,
    },
}

impl fmt::Display for CertificateWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Authority { scope, .. } => {
                write!(f, "create the {} certificate authority", scope.word())
            }
            Self::Rejoin { scope, .. } => {
                let word = scope.word();
                write!(
                    f,
                    "complete the trust bundle of the {word} certificate authority with the authorities that members use"
                )
            }
            Self::Prepare { scope, .. } => {
                write!(
                    f,
                    "create the next {} certificate authority; members trust it before it signs",
                    scope.word()
                )
            }
            Self::Switch { scope, .. } => {
                write!(
                    f,
                    "sign new certificates with the next {} certificate authority",
                    scope.word()
                )
            }
            Self::Retire { scope, .. } => {
                write!(
                    f,
                    "remove the former {} certificate authority from the trust bundle",
                    scope.word()
                )
            }
            Self::Issue {
                owner, used, over, ..
            } => {
                let verb = if over.is_some() { "renew" } else { "issue" };
                write!(f, "{verb} the {} certificate of {owner}", used.word())
            }
            Self::Mark { secret, .. } => {
                write!(f, "restore the owner and the labels of Secret {secret}")
            }
            Self::Trust { owner, used, .. } => {
                let word = used.word();
                write!(
                    f,
                    "update the trust bundle in the Secret with the {word} certificate of {owner}"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use member::tls::{ClusterTls, Material, Slot};

    use super::*;
    use crate::authority::{Made, authority};

    fn made() -> Made {
        let day = std::time::Duration::from_hours(24);
        authority(CaScope::Peers, day, "2026-11-21T12:00:00Z".parse().unwrap()).unwrap()
    }

    /// Certificates in a Secret of another owner, with these trusted CAs.
    fn of_others(authorities: &[&Made]) -> ClusterTls {
        let all = authorities.iter().map(|made| made.certificate.as_slice());
        let material = Material {
            names: api::cluster::KeyNames::Usual,
            certificate: authorities[0].certificate.clone(),
            key: Vec::new(),
            ca: crate::authority::bundle(all),
        };
        let peer = Some(Slot {
            secret: "peer".into(),
            found: Ok(material),
        });
        ClusterTls {
            peer,
            ..ClusterTls::default()
        }
    }

    fn with(authorities: &[&Made], noted: Option<String>) -> Certificates {
        let mut seen = Certificates::default().and_of_others(&of_others(authorities));
        let note = Noted {
            trust: noted,
            ..Noted::default()
        };
        seen.pods.insert("db-a".into(), note);
        seen
    }

    #[test]
    fn changed_trust_bundle_restarts_member() {
        let (old, new) = (made(), made());
        let started = with(&[&old], None).trust();
        assert_eq!(with(&[&old], started.clone()).outdated("db-a"), None);
        assert!(with(&[&old, &new], started).outdated("db-a").is_some());
        // The order of the CAs in the trust bundle makes no difference.
        let both = with(&[&old, &new], None).trust();
        assert_eq!(with(&[&new, &old], both).outdated("db-a"), None);
        // A pod without annotations about its CAs is not outdated, unless cert-manager issues the certificates.
        assert_eq!(with(&[&new], None).outdated("db-a"), None);
        assert_eq!(with(&[&old, &new], None).outdated("db-a"), None);
    }

    #[test]
    fn invariant_20_second_issued_authority_restarts_pod_without_annotation() {
        let (old, new) = (made(), made());
        let object = EtcdCluster::new("db", serde_json::from_str("{}").unwrap());
        let members = member::Members::of(&object, "prod", "", None);
        let outdated = |authorities: &[&Made]| {
            let mut seen = with(authorities, None);
            let tls = api::cluster::CertManagerTls::default();
            seen.issued = Some(Issuance::of(&members, &tls, Ok(&[]), &[]));
            seen.outdated("db-a").is_some()
        };
        assert!(!outdated(&[&old]));
        assert!(outdated(&[&old, &new]));
    }

    #[test]
    fn expiry_of_certificates_in_user_secrets_is_recorded() {
        let (one, other) = (made(), made());
        // Only one of the two CAs in the trust bundle signed the certificate. The expiry of the other CA is not
        // recorded, so `ca.crt` occurs once.
        let seen = with(&[&one, &other], None);
        let keys: Vec<_> = seen.expiries.iter().map(|one| one.key).collect();
        assert_eq!(keys, ["tls.crt", "ca.crt"]);
        assert!(seen.expiries.iter().all(|one| !one.generated));
    }
}
