//! Everything a member consists of, built from the EtcdCluster and nothing else: Services, volume claim, pod,
//! disruption budget.
//!
//! Pure and total: no client, no clock, no randomness. The cluster operator and the restore operator both
//! start members, and both through this module, so that a seed member is an ordinary member from its first
//! second. With TLS a member differs in its URLs ([`Members::addresses`]) and in what `tls` adds.

use api::EtcdCluster;
use api::cluster::{EtcdClusterSpec, PeerStage, TlsPolicy, peers_of};
use api::names::{self, Addresses};
use api::version::EtcdVersion;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use std::collections::BTreeMap;

mod budget;
mod difference;
mod flags;
mod hash;
mod network;
mod pod;
mod probe;
mod seed;
mod services;
mod tls;
mod volume;

#[cfg(test)]
mod fixture;

pub use budget::{disruption_budget, quorum};
pub use difference::{
    Difference, MetadataPatch, Notes, Resizing, ResourcesPatch, difference, recorded_hash,
};
pub use flags::{MAX_LEARNERS, VARIABLE_MAX_LEARNERS, etcd_arguments};
pub use hash::spec_hash;
pub use network::{BESIDE_A_CLAIM, Operators, network_policy};
pub use pod::{USER, container_security, data_mount, pod, pod_security};
pub use seed::{
    Contents, FETCH, Making, OperatorImage, Origin, Report, Seed, Source, seed_name, seed_pod,
};
pub use services::{
    client_service, closed, headless_service, is_closed, member_service, says_the_same,
    without_second_port,
};
pub use volume::volume_claim;

/// Annotation with a hash of what the spec says about pods: a pod whose hash differs from
/// [`spec_hash`] was made for another spec.
pub const ANNOTATION_SPEC_HASH: &str = "etcd.database.coreos.com/spec-hash";

/// What all members of one cluster have in common.
#[derive(Clone, Debug)]
pub struct Members<'a> {
    /// The EtcdCluster's name.
    pub cluster: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// Its spec.
    pub spec: &'a EtcdClusterSpec,
    /// The reference that lets garbage collection remove everything with the EtcdCluster; `None` only for an
    /// object that was never in an API server.
    pub owner: Option<OwnerReference>,
    /// The token of the recorded bootstrap.
    pub token: &'a str,
    /// The cluster ID, once recorded.
    pub cluster_id: Option<&'a str>,
}

impl<'a> Members<'a> {
    /// The members of an EtcdCluster as read from the API server.
    pub fn of(
        cluster: &'a EtcdCluster,
        namespace: &'a str,
        token: &'a str,
        cluster_id: Option<&'a str>,
    ) -> Self {
        Self {
            cluster: cluster.metadata.name.as_deref().unwrap_or_default(),
            namespace,
            spec: &cluster.spec,
            owner: cluster.controller_owner_ref(&()),
            token,
            cluster_id,
        }
    }

    /// How members are reached.
    pub fn addresses(&self) -> Addresses {
        let tls = self.spec.tls.as_ref();
        Addresses {
            namespace: self.namespace.to_owned(),
            cluster: self.cluster.to_owned(),
            member: self.spec.member_address(),
            cluster_domain: self.spec.cluster_domain().to_owned(),
            peer_tls: peers_of(tls).usual().0,
            // Whoever accepts both is reached by all in the way that everybody speaks.
            client_tls: tls.is_some_and(TlsPolicy::insists_on_tls),
        }
    }

    /// How members talk to each other.
    pub fn peers(&self) -> PeerStage {
        peers_of(self.spec.tls.as_ref())
    }

    /// Labels a member's objects carry and, for pods and claims, what finds a cluster again whose object was
    /// recreated without its status.
    fn metadata(&self, name: String, labels: BTreeMap<String, String>) -> ObjectMeta {
        ObjectMeta {
            name: Some(name),
            namespace: Some(self.namespace.to_owned()),
            labels: Some(labels),
            owner_references: self.owner.clone().map(|owner| vec![owner]),
            ..ObjectMeta::default()
        }
    }

    fn identity_annotations(&self) -> BTreeMap<String, String> {
        let mut annotations = BTreeMap::from([(
            names::ANNOTATION_CLUSTER_TOKEN.to_owned(),
            self.token.to_owned(),
        )]);
        if let Some(id) = self.cluster_id {
            annotations.insert(names::ANNOTATION_CLUSTER_ID.to_owned(), id.to_owned());
        }
        annotations
    }
}

/// One member and how its pod is to begin.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    /// The member's name: that of its pod, claim and Service.
    pub name: &'a str,
    /// The etcd version to run.
    pub version: &'a EtcdVersion,
    /// Whether it votes now; a label, changed when the member is promoted.
    pub role: Role,
    /// What etcd is told about the cluster it belongs to.
    pub start: Start,
}

/// A member's part in the quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It votes; the disruption budget counts it.
    Voter,
    /// It does not vote yet.
    Learner,
}

impl Role {
    /// The label's value.
    pub fn label(self) -> &'static str {
        match self {
            Self::Voter => names::ROLE_VOTER,
            Self::Learner => names::ROLE_LEARNER,
        }
    }
}

/// What etcd is told when its pod starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// A first member: state `new`, with the names of all first members. Only inside the recorded
    /// bootstrap (invariant 6). On a disk that holds data already etcd goes on with that data.
    Bootstrap {
        /// The names of all first members, this one included.
        members: Vec<String>,
    },
    /// A member that was added and has never run: state `existing`, with [`initial_cluster`] of the list the
    /// addition returned.
    Join {
        /// `name=peer-url,...` of all members, this one included.
        initial_cluster: String,
    },
    /// A member that ran before and gets its pod back on its disk. It is told of nobody but itself: with its
    /// data it needs nothing more, and without it etcd finds nobody to ask and refuses to start, instead of
    /// coming up empty under its old ID (invariant 6).
    OnDisk,
}

/// The value of `--initial-cluster` for a member that joins `members`, where its own entry has no name yet.
pub fn initial_cluster(members: &[etcd::Member], joining: &str) -> String {
    let mut parts = Vec::new();
    for member in members {
        for url in &member.peer_urls {
            let known = Some(member.name.as_str()).filter(|name| !name.is_empty());
            // A member that has not started yet has no name; its address tells it.
            let name = known
                .or_else(|| names::member_of_url(url))
                .unwrap_or(joining);
            parts.push(format!("{name}={url}"));
        }
    }
    parts.join(",")
}

fn initial_cluster_of_names(members: &Members<'_>, first: &[String]) -> String {
    members
        .addresses()
        .initial_cluster(first.iter().map(String::as_str))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: u64, name: &str, url: &str) -> etcd::Member {
        etcd::Member {
            id: etcd::MemberId(id),
            name: name.into(),
            peer_urls: vec![url.into()],
            client_urls: vec![],
            is_learner: false,
        }
    }

    #[test]
    fn a_joining_member_is_told_of_all_members_and_of_those_not_started_by_their_address() {
        let members = [
            entry(1, "db-aaaaaaaaaa", "http://db-aaaaaaaaaa.prod.svc:2380"),
            entry(2, "", "http://db-bbbbbbbbbb.prod.svc:2380"),
            entry(3, "", "http://10.0.0.7:2380"),
        ];
        assert_eq!(
            initial_cluster(&members, "db-cccccccccc"),
            "db-aaaaaaaaaa=http://db-aaaaaaaaaa.prod.svc:2380,db-bbbbbbbbbb=http://db-bbbbbbbbbb.prod.svc:2380,\
             db-cccccccccc=http://10.0.0.7:2380"
        );
    }
}
