//! Sends generated certificates: generates a key, writes it to a Secret, and drops it.
//!
//! Invariant 11: a Secret is created under its fixed name, or replaced with a resourceVersion precondition. A CA signs
//! only if its Secret has not changed since the observation. Invariant 14: no key is logged, and each key is sent only
//! to its Secret.

use api::names::{self, CertificateUse};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use member::certificate::{Certificate, certificates};
use member::issued::IssuedWrite;
use runtime::{apply, issued};

use super::send::{failed, patched};
use crate::authority::{
    self, AUTHORITIES, CaScope, Made, NEXT_CERTIFICATE, NEXT_KEY, Request, Rule, TLS_CERTIFICATE,
    TLS_KEY,
};
use crate::certificates::CertificateWrite;
use crate::execute::{Error, ExecuteContext};

/// The content of a CA's Secret, with its keys.
struct Authority {
    signs: Made,
    next: Option<Made>,
    trusted: Vec<u8>,
    version: String,
}

impl ExecuteContext<'_> {
    pub(super) async fn certificate(
        &self,
        write: &CertificateWrite,
    ) -> Result<Option<String>, Error> {
        let rule = self.observed.certificates.rule.as_ref();
        let rule =
            rule.ok_or_else(|| Error::Missing("spec.TLS.generated is not set".to_owned()))?;
        match write {
            CertificateWrite::Authority {
                scope,
                extra_cas,
                over,
            } => {
                let made = self.draw_authority(rule, *scope)?;
                let all = extra_cas.iter().map(Vec::as_slice);
                let trusted = authority::bundle(all.chain([made.certificate.as_slice()]));
                self.put_authority(rule, *scope, (&made, None, trusted), over.as_deref())
                    .await
            }
            CertificateWrite::Rejoin {
                scope,
                extra_cas,
                over,
            } => {
                let held = self.held_authority(rule, *scope, over).await?;
                let own = [Some(&held.signs), held.next.as_ref()]
                    .into_iter()
                    .flatten();
                let own = own.map(|made| made.certificate.as_slice());
                let trusted = authority::bundle(extra_cas.iter().map(Vec::as_slice).chain(own));
                let said = (&held.signs, held.next.as_ref(), trusted);
                self.put_authority(rule, *scope, said, Some(over)).await
            }
            CertificateWrite::Prepare { scope, over } => {
                let held = self.held_authority(rule, *scope, over).await?;
                let next = self.draw_authority(rule, *scope)?;
                let trusted = authority::bundle([&*held.trusted, &*next.certificate]);
                let said = (&held.signs, Some(&next), trusted);
                self.put_authority(rule, *scope, said, Some(over)).await
            }
            CertificateWrite::Switch { scope, over } => {
                let held = self.held_authority(rule, *scope, over).await?;
                let next = held.next.ok_or_else(|| changed(rule, *scope))?;
                let said = (&next, None, held.trusted);
                self.put_authority(rule, *scope, said, Some(over)).await
            }
            CertificateWrite::Retire { scope, over } => {
                let held = self.held_authority(rule, *scope, over).await?;
                let trusted = held.signs.certificate.clone();
                let said = (&held.signs, None, trusted);
                self.put_authority(rule, *scope, said, Some(over)).await
            }
            CertificateWrite::Issue {
                owner,
                used,
                over,
                by,
            } => self.issue(rule, (owner, *used), over.as_deref(), by).await,
            CertificateWrite::Trust {
                owner,
                used,
                over,
                by,
            } => self.write_trust(rule, (owner, *used), over, by).await,
            CertificateWrite::Mark { secret, over } => self.mark_secret(rule, secret, over).await,
        }
    }

    fn draw_authority(&self, rule: &Rule, scope: CaScope) -> Result<Made, Error> {
        authority::authority(scope, rule.authority_validity, self.time()).map_err(|source| {
            Error::Certificate {
                what: scope.secret(&rule.cluster),
                source,
            }
        })
    }

    /// The creation time of certificates, from the clock by which the planner also checks them.
    fn time(&self) -> Timestamp {
        self.observed.clock.for_certificates(Timestamp::now())
    }

    async fn put_authority(
        &self,
        rule: &Rule,
        scope: CaScope,
        said: (&Made, Option<&Made>, Vec<u8>),
        over: Option<&str>,
    ) -> Result<Option<String>, Error> {
        let owner = apply::owner_reference(self.cluster);
        self.put(authority::authority_secret(rule, scope, owner, said), over)
            .await
    }

    async fn issue(
        &self,
        rule: &Rule,
        (owner, used): (&str, CertificateUse),
        over: Option<&str>,
        by: &str,
    ) -> Result<Option<String>, Error> {
        let held = self.held_authority(rule, CaScope::of(used), by).await?;
        let what = names::certificate_secret(owner, used);
        let broken = |source| Error::Certificate {
            what: what.clone(),
            source,
        };
        let signer = read_one(&held.signs.certificate).map_err(broken)?;
        let names = rule.names(owner, used);
        // With authentication, etcd uses the common name of a client certificate as the user name. `Operator` therefore
        // gets a reserved user name, and `Client` gets a name that no etcd user has. A gRPC proxy does not start if its
        // client certificate has a common name, because all its clients would be this user.
        let common_name = match used {
            CertificateUse::Peer | CertificateUse::Server => owner.to_owned(),
            CertificateUse::Operator => names::OPERATOR_USER.to_owned(),
            CertificateUse::Client => names::client_service(&rule.cluster),
            CertificateUse::Proxy => String::new(),
        };
        let request = Request {
            common_name: &common_name,
            names: &names,
            used,
            validity: rule.validity,
        };
        let made =
            authority::leaf(&request, (&signer, &held.signs.key), self.time()).map_err(broken)?;
        let reference = apply::owner_reference(self.cluster);
        let material = (made, held.trusted);
        let secret = authority::leaf_secret(rule, (owner, used), reference, material);
        self.put(secret, over).await
    }

    async fn write_trust(
        &self,
        rule: &Rule,
        (owner, used): (&str, CertificateUse),
        over: &str,
        by: &str,
    ) -> Result<Option<String>, Error> {
        let held = self.held_authority(rule, CaScope::of(used), by).await?;
        let name = names::certificate_secret(owner, used);
        self.change_secret(&name, over, |secret| {
            let data = secret.data.get_or_insert_default();
            data.insert(AUTHORITIES.to_owned(), ByteString(held.trusted));
        })
        .await
    }

    async fn mark_secret(
        &self,
        rule: &Rule,
        name: &str,
        over: &str,
    ) -> Result<Option<String>, Error> {
        self.change_secret(name, over, |secret| {
            let labels = authority::labels(&rule.cluster, name).unwrap_or_default();
            secret.labels_mut().extend(labels);
            let owner = apply::owner_reference(self.cluster);
            secret.metadata.owner_references = owner.map(|owner| vec![owner]);
        })
        .await
    }

    /// Changes the Secret, with the resourceVersion of the plan as precondition.
    async fn change_secret(
        &self,
        name: &str,
        over: &str,
        change: impl FnOnce(&mut Secret),
    ) -> Result<Option<String>, Error> {
        let read = self.api::<Secret>().get_opt(name).await;
        let read = read.map_err(|source| failed("read", "Secret", name, source))?;
        let mut secret = read.ok_or_else(|| Error::Changed {
            what: format!("Secret {name}"),
        })?;
        change(&mut secret);
        secret.metadata.managed_fields = None;
        self.put(secret, Some(over)).await
    }

    /// Reads the CA with its key, if it is still the CA of the observation.
    async fn held_authority(
        &self,
        rule: &Rule,
        scope: CaScope,
        version: &str,
    ) -> Result<Authority, Error> {
        let name = scope.secret(&rule.cluster);
        let read = self.api::<Secret>().get_opt(&name).await;
        let secret = read.map_err(|source| failed("read", "Secret", &name, source))?;
        let held = secret.and_then(|secret| {
            let version = secret.resource_version()?;
            let value = |key: &str| Some(secret.data.as_ref()?.get(key)?.0.clone());
            let pair = |certificate: &str, key: &str| {
                Some(Made {
                    certificate: value(certificate)?,
                    key: value(key)?,
                })
            };
            Some(Authority {
                signs: pair(TLS_CERTIFICATE, TLS_KEY)?,
                next: pair(NEXT_CERTIFICATE, NEXT_KEY),
                trusted: value(AUTHORITIES).unwrap_or_default(),
                version,
            })
        });
        held.filter(|held| held.version == version)
            .ok_or_else(|| changed(rule, scope))
    }

    /// Writes or deletes a Certificate of cert-manager, or publishes an issued certificate.
    pub(super) async fn issued(&self, write: &IssuedWrite) -> Result<Option<String>, Error> {
        match write {
            IssuedWrite::Apply(made) => {
                issued::apply(self.client, names::MANAGER_CLUSTER, made).await?;
            }
            IssuedWrite::Discard { name, uid } => {
                let namespace = self.cluster.namespace().unwrap_or_default();
                issued::delete(self.client, &namespace, (name.as_str(), uid.as_str())).await?;
            }
            IssuedWrite::Publish(publication) => {
                let name = &publication.from;
                let read = self.api::<Secret>().get_opt(name).await;
                let read = read.map_err(|source| failed("read", "Secret", name, source))?;
                let version = Some(&publication.from_version);
                let read = read.filter(|it| it.metadata.resource_version.as_ref() == version);
                let from = read.ok_or_else(|| Error::Changed {
                    what: format!("Secret {name}"),
                })?;
                let secret = publication.with_keys(&from);
                return self.put(secret, publication.over.as_deref()).await;
            }
        }
        Ok(None)
    }

    /// Creates the Secret, or replaces it if it still has this resourceVersion.
    pub(super) async fn put(
        &self,
        mut secret: Secret,
        over: Option<&str>,
    ) -> Result<Option<String>, Error> {
        let Some(over) = over else {
            return self.create(&secret).await;
        };
        let name = secret.name_any();
        let api: Api<Secret> = self.api();
        secret.metadata.resource_version = Some(over.to_owned());
        let params = PostParams {
            field_manager: Some(names::MANAGER_CLUSTER.to_owned()),
            ..PostParams::default()
        };
        match api.replace(&name, &params, &secret).await {
            Ok(_) => Ok(None),
            Err(source) => Err(patched("Secret", &name, source)),
        }
    }
}

fn read_one(pem: &[u8]) -> Result<Certificate, authority::Error> {
    let all = certificates(pem).map_err(|_| authority::Error::Certificate)?;
    all.into_iter().next().ok_or(authority::Error::Certificate)
}

fn changed(rule: &Rule, scope: CaScope) -> Error {
    Error::Changed {
        what: format!("Secret {}", scope.secret(&rule.cluster)),
    }
}
