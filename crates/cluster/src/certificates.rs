//! What the planner sees of generated certificates, and the writes they take. Plain data without any key.

mod trust;

use std::collections::BTreeMap;
use std::fmt;

use api::EtcdCluster;
use api::cluster::{GeneratedTls, TlsPolicy};
use api::names::{self, CertificateUse};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use member::certificate::certificates;
use member::seed_name;
use member::tls::{Authorities, ClusterTls};

use crate::authority::{Circle, Held, Rule, digest, held};
use crate::expiry::{self, Expiry};

/// What is there of a cluster's generated certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificates {
    /// What the spec says; `None` where they are not generated.
    pub rule: Option<Rule>,
    /// Secrets with this cluster's labels, by name.
    pub secrets: BTreeMap<String, Held>,
    /// What stands on each pod, by member.
    pub pods: BTreeMap<String, Noted>,
    /// A digest of the authorities in Secrets that others keep.
    pub others: Option<String>,
    /// Those authorities themselves, as they are noted on the pods that are started with them.
    pub authorities: Option<Authorities>,
    /// Until when certificates are valid, whoever makes them.
    pub expiries: Vec<Expiry>,
    /// The seed member of a restore that has claimed the cluster: its pod may not carry the cluster's labels yet.
    pub seed: Option<String>,
}

/// What stands on a pod about its certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// A digest of the authorities its etcd trusts, and until when one of them is valid.
    pub trust: Option<String>,
    /// A digest of the certificates it was told of.
    pub certificates: Option<String>,
    /// The authorities it was started with: of Secrets that others keep what stands for each, of generated ones the
    /// beginnings of their fingerprints.
    pub authorities: Option<Authorities>,
}

impl Certificates {
    /// From the object with the spec in effect, the Secrets with its labels, and its pods.
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
        for circle in rule.iter().flat_map(Rule::circles) {
            let name = circle.secret(&cluster.name_any());
            if let Some(held) = secrets.remove(&name) {
                secrets.insert(name, held.of_authority());
            }
        }
        Self {
            rule,
            others: None,
            authorities: None,
            seed: seed(cluster),
            expiries: expiry::of_held(secrets.iter()),
            secrets,
            pods: pods.iter().map(|pod| (pod.name_any(), note(pod))).collect(),
        }
    }

    /// With the Secrets that others keep: whom they say is trusted, and until when they are valid.
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

    /// The Secret of an authority.
    pub fn authority(&self, circle: Circle) -> Option<&Held> {
        self.secrets
            .get(&circle.secret(&self.rule.as_ref()?.cluster))
    }

    /// The Secret with a certificate.
    pub fn leaf(&self, owner: &str, used: CertificateUse) -> Option<&Held> {
        self.secrets.get(&names::certificate_secret(owner, used))
    }

    /// What stands on a pod that was told of its certificates; `None` until all are there.
    pub fn told(&self, member: &str) -> Option<String> {
        let rule = self.rule.as_ref()?;
        let prints: Option<Vec<&str>> = rule
            .uses_of_member()
            .map(|used| {
                Some(
                    self.leaf(member, used)?
                        .certificate
                        .as_ref()?
                        .fingerprint
                        .as_str(),
                )
            })
            .collect();
        prints.map(digest)
    }
}

/// What the spec says about generated certificates, where this of it is in effect about TLS.
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
        rotate: cluster
            .annotations()
            .get(names::ANNOTATION_ROTATE_AUTHORITY)
            .cloned(),
    })
}

/// The seed member of a restore that has claimed the cluster.
pub fn seed(cluster: &EtcdCluster) -> Option<String> {
    let restore = cluster.annotations().get(names::ANNOTATION_RESTORE)?;
    Some(seed_name(&cluster.name_any(), restore))
}

/// A write to a Secret of generated certificates, or about them to a pod. Each is made only over what was seen
/// (invariant 11).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateWrite {
    /// Makes an authority; what is trusted beside it is what certificates trusted that are there already.
    Authority {
        /// Which.
        circle: Circle,
        /// Authorities that are trusted beside it, in PEM.
        beside: Vec<Vec<u8>>,
        /// The version of the Secret that is replaced, if there is one.
        over: Option<String>,
    },
    /// Puts authorities that members trust and show certificates of back into the trust bundle of an authority that
    /// was replaced.
    Rejoin {
        /// Which.
        circle: Circle,
        /// All that are to be trusted beside the one that signs and the next one, in PEM.
        beside: Vec<Vec<u8>>,
        /// The version of the Secret.
        over: String,
    },
    /// Makes the authority that signs next; members are to trust it first.
    Prepare {
        /// Which.
        circle: Circle,
        /// The version of the Secret.
        over: String,
    },
    /// The next authority signs from now on.
    Switch {
        /// Which.
        circle: Circle,
        /// The version of the Secret.
        over: String,
    },
    /// Nobody but the one that signs is trusted any longer.
    Retire {
        /// Which.
        circle: Circle,
        /// The version of the Secret.
        over: String,
    },
    /// Makes a certificate, or makes it anew.
    Issue {
        /// A member, or the cluster.
        owner: String,
        /// What for.
        used: CertificateUse,
        /// The version of the Secret that is replaced, if there is one.
        over: Option<String>,
        /// The version of the authority's Secret.
        by: String,
    },
    /// Writes the trust bundle of its authority to the Secret of a certificate, which stays as it is.
    Trust {
        /// A member, or the cluster.
        owner: String,
        /// What the certificate is for.
        used: CertificateUse,
        /// The version of the Secret.
        over: String,
        /// The version of the authority's Secret.
        by: String,
    },
    /// Sets the owner and the labels of a Secret, which stays as it is.
    Mark {
        /// The Secret.
        secret: String,
        /// Its version.
        over: String,
    },
    /// Tells a pod of its certificates: the kubelet then looks at the Secrets at once, instead of within a minute.
    Tell {
        /// Whose pod.
        member: String,
        /// The pod that was seen.
        uid: String,
        /// What its etcd trusts, where that did not stand there.
        trust: Option<String>,
        /// The authorities it was started with, where they did not stand there.
        authorities: Option<String>,
        /// Which certificates.
        certificates: String,
    },
    /// Deletes the Secret of a member that is gone.
    Discard {
        /// Its name.
        secret: String,
        /// The Secret that was seen.
        uid: String,
    },
}

impl fmt::Display for CertificateWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Authority { circle, .. } => write!(f, "make the {} authority", circle.word()),
            Self::Rejoin { circle, .. } => {
                let word = circle.word();
                write!(
                    f,
                    "trust the {word} authorities that members use, beside the one in the Secret"
                )
            }
            Self::Prepare { circle, .. } => {
                write!(
                    f,
                    "make the next {} authority, to be trusted first",
                    circle.word()
                )
            }
            Self::Switch { circle, .. } => {
                write!(f, "let the next {} authority sign", circle.word())
            }
            Self::Retire { circle, .. } => {
                write!(f, "trust the {} authority before no longer", circle.word())
            }
            Self::Issue {
                owner, used, over, ..
            } => {
                let verb = if over.is_some() { "renew" } else { "issue" };
                write!(f, "{verb} the {} certificate of {owner}", used.word())
            }
            Self::Mark { secret, .. } => write!(f, "label Secret {secret}"),
            Self::Trust { owner, used, .. } => {
                let word = used.word();
                write!(
                    f,
                    "write the trust bundle beside the {word} certificate of {owner}"
                )
            }
            Self::Tell { member, .. } => write!(f, "tell the pod of {member} of its certificates"),
            Self::Discard { secret, .. } => write!(f, "delete Secret {secret}"),
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
        authority(Circle::Peers, day, "2026-11-21T12:00:00Z".parse().unwrap()).unwrap()
    }

    /// A Secret somebody else keeps, with these authorities.
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
    fn a_member_is_started_again_when_the_authorities_of_its_secret_change() {
        let (old, new) = (made(), made());
        let started = with(&[&old], None).trust();
        assert_eq!(with(&[&old], started.clone()).outdated("db-a"), None);
        assert!(with(&[&old, &new], started).outdated("db-a").is_some());
        // The order in which they stand there is no difference.
        let both = with(&[&old, &new], None).trust();
        assert_eq!(with(&[&new, &old], both).outdated("db-a"), None);
        // Of a pod that does not say it nobody knows.
        assert_eq!(with(&[&new], None).outdated("db-a"), None);
    }

    #[test]
    fn until_when_certificates_of_others_are_valid_is_known() {
        let (one, other) = (made(), made());
        // Of the two authorities in the bundle one has signed what stands beside it.
        let seen = with(&[&one, &other], None);
        let keys: Vec<_> = seen.expiries.iter().map(|one| one.key).collect();
        assert_eq!(keys, ["tls.crt", "ca.crt"]);
        assert!(seen.expiries.iter().all(|one| !one.generated));
    }
}
