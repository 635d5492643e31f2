//! Checks the TLS Secrets of a cluster before a member starts with them, and builds the [`Access`] of the operators to
//! members. Performs no I/O: `runtime::reach` reads the Secrets.
//!
//! Only an [`Access`] contains key material outside of this module (invariant 14). Users cannot turn off the checks of
//! certificates (invariant 20).

mod check;
mod material;
mod started;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use api::cluster::{EtcdClusterSpec, MemberAddress};
use api::names::Addresses;
use etcd::{Access, TlsAccess};
use jiff::Timestamp;

pub use material::{Fault, FaultKind, Material, Purpose, SecretData, data_of, material};
pub use started::Authorities;

/// A TLS Secret and its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The name of the Secret.
    pub secret: String,
    /// The content of the Secret, or the reason why it cannot be used.
    pub found: Result<Material, Fault>,
}

/// The TLS Secrets of a cluster. All are `None` without TLS. Secrets of generated member certificates are not included,
/// because each member has its own Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterTls {
    /// Certificate for connections between members.
    pub peer: Option<Slot>,
    /// Certificate that members present to clients.
    pub server: Option<Slot>,
    /// Client certificate of the operators.
    pub operator: Option<Slot>,
}

impl ClusterTls {
    /// True if the cluster uses TLS between members or for clients.
    pub fn is_used(&self) -> bool {
        self.peer.is_some() || self.server.is_some()
    }

    /// The access of the operators to the members.
    ///
    /// # Errors
    /// Fails if the operator Secret cannot be used.
    pub fn access(&self) -> Result<Access, Fault> {
        match &self.operator {
            None => Ok(Access::default()),
            Some(slot) => slot.found.as_ref().map(access).map_err(Clone::clone),
        }
    }

    /// All faults of the Secrets, for members with these addresses.
    pub fn faults(&self, addresses: &Addresses, now: Timestamp) -> Vec<Fault> {
        check::faults(self, addresses, now)
    }

    /// All faults for running members, which trust the authorities that they have started with. Leaves out Secrets that
    /// have a fault in `own`.
    pub fn faults_of_started(
        &self,
        started: &BTreeMap<String, Authorities>,
        own: &[Fault],
        now: Timestamp,
    ) -> Vec<Fault> {
        let mut faults = started::faults(self, started, now);
        faults.retain(|fault| !own.iter().any(|other| other.purpose == fault.purpose));
        faults
    }

    /// The fault of a change from these Secrets to the Secrets `next`, if members with current Secrets and members with
    /// new Secrets would reject each other. `started` contains the authorities with which each running member was
    /// started, by the name of the member.
    pub fn fault_of_change(
        &self,
        next: &Self,
        started: &BTreeMap<String, Authorities>,
        (addresses, now): (&Addresses, Timestamp),
    ) -> Option<Fault> {
        let mixed = |own: &Option<Slot>, next: &Option<Slot>| {
            let (own, next) = own.as_ref().zip(next.as_ref())?;
            let found = own.found.as_ref().ok().zip(next.found.as_ref().ok());
            let (own_found, next_found) = found?;
            let found = Ok(Material {
                ca: next_found.ca.clone(),
                ..own_found.clone()
            });
            let secret = own.secret.clone();
            Some(Slot { secret, found })
        };
        // During a change of the Secrets, members with the current certificates connect to members with the new trust
        // bundles.
        let before = Self {
            peer: mixed(&self.peer, &next.peer),
            server: mixed(&self.server, &next.server),
            operator: mixed(&self.operator, &next.operator),
        };
        let unknown = |fault: &Fault| fault.code == FaultKind::UnknownAuthority;
        let before = before.faults(addresses, now).into_iter().filter(unknown);
        let mut faults = next.faults_of_started(started, &[], now);
        faults.extend(before);
        let purpose = faults.first()?.purpose;
        let which = match purpose {
            Purpose::Peer => "peer certificates",
            _ => "certificates for clients",
        };
        let message = format!(
            "spec.TLS: the current and the new {which} have no common authority, so members would reject each other \
             during the change. The cluster keeps its certificates. Use an issuer with the current authority, or switch \
             TLS off, and then on with the new certificates"
        );
        let code = FaultKind::AuthorityReplaced;
        Some(Fault {
            purpose,
            code,
            message,
        })
    }

    /// Adds data from the Secrets to a spec: the names of the keys, and `memberAddress` if the spec does not set it.
    /// Running members keep their address format (`running`). Without running members, the format is `Pod` if the
    /// certificates are valid only for `Pod`. In all other cases, the format is `Service`.
    pub fn complete_spec(
        &self,
        spec: &mut EtcdClusterSpec,
        (namespace, cluster): (&str, &str),
        running: Option<MemberAddress>,
    ) {
        let names = |slot: &Option<Slot>| {
            let material = slot.as_ref().and_then(|slot| slot.found.as_ref().ok());
            material.map(|material| material.names)
        };
        let static_ = spec.tls.as_mut().and_then(|tls| tls.static_.as_mut());
        if let Some(member) = static_.and_then(|tls| tls.member.as_mut()) {
            member.peer_keys = names(&self.peer).unwrap_or_default();
            member.server_keys = names(&self.server).unwrap_or_default();
        }
        if spec.member_address.is_some() || !self.is_used() {
            return;
        }
        let covered = |member: MemberAddress| {
            let addresses = Addresses {
                namespace: namespace.to_owned(),
                cluster: cluster.to_owned(),
                member,
                cluster_domain: spec.cluster_domain().to_owned(),
                peer_tls: self.peer.is_some(),
                client_tls: self.server.is_some(),
            };
            check::covers_members(self, &addresses)
        };
        let chosen = running.unwrap_or_else(|| {
            if !covered(MemberAddress::Service) && covered(MemberAddress::Pod) {
                MemberAddress::Pod
            } else {
                MemberAddress::Service
            }
        });
        // `Service` is the default and is not written to the spec, so that specs with and without this field build
        // equal objects.
        if chosen == MemberAddress::Pod {
            spec.member_address = Some(chosen);
        }
    }
}

/// The access to the members of a cluster, with the client certificate in this Secret.
pub fn access(material: &Material) -> Access {
    let identity = (material.certificate.clone(), material.key.clone());
    Access {
        tls: Some(TlsAccess {
            ca: material.ca.clone(),
            identity: Some(identity),
            user: None,
        }),
        credentials: None,
    }
}
