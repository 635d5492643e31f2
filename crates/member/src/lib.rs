//! Builds the Kubernetes objects of a cluster: Services, PersistentVolumeClaims, pods, PodDisruptionBudget and
//! NetworkPolicy. It also checks the certificates of members, and builds the objects of certificates from cert-manager.
//!
//! This crate uses no client, no clock and no randomness. The cluster operator and the restore operator use this crate,
//! so the first member of a restored cluster (the seed) is like any other member.

use api::EtcdCluster;
use api::cluster::{EtcdClusterSpec, PeerStage, TlsPolicy, peers_of};
use api::names::{self, Addresses};
use api::version::EtcdVersion;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use std::collections::BTreeMap;

mod budget;
pub mod certificate;
mod compare;
mod difference;
mod flags;
mod hash;
mod image;
pub mod issued;
mod network;
mod pod;
mod probe;
mod seed;
mod services;
pub mod tls;
pub mod verification;
mod volume;

#[cfg(test)]
mod fixture;

pub use budget::{disruption_budget, quorum};
pub use compare::contains;
pub use difference::{
    Difference, MetadataPatch, Notes, Resizing, ResourcesPatch, difference, recorded_hash,
};
pub use flags::{
    MAX_LEARNERS, VARIABLE_MAX_LEARNERS, etcd_arguments, etcd_option, knows_variable,
    snapshot_count,
};
pub use hash::spec_hash;
pub use image::{Changed, pull_problem, set_image};
pub use network::{BACKUP_POD_LABELS, Operators, ingress_rule, network_policy};
pub use pod::{USER, container_security, data_mount, is_image_failure, pod, pod_security};
pub use seed::{
    Contents, DataDirectorySettings, ENCRYPTION, FETCH, OperatorImage, Origin, REPLAY_REVISION,
    Replay, Report, SHA256, SOURCE, Seed, Source, seed_name, seed_pod,
};
pub use services::{
    client_service, closed, has_same_policy, headless_service, is_closed, member_service,
    without_second_port,
};
pub use volume::volume_claim;

/// Annotation with the [`spec_hash`] of the spec for which the pod was created.
pub const ANNOTATION_SPEC_HASH: &str = "etcd.database.coreos.com/spec-hash";

/// Properties that all members of a cluster share.
#[derive(Clone, Debug)]
pub struct Members<'a> {
    /// Name of the EtcdCluster.
    pub cluster: &'a str,
    /// The namespace in which the objects of members are created.
    pub namespace: &'a str,
    /// The spec in effect, which may differ from the stored spec.
    pub spec: &'a EtcdClusterSpec,
    /// The owner reference to the EtcdCluster. `None` only if the EtcdCluster was not read from an API server.
    pub owner: Option<OwnerReference>,
    /// The cluster token in the status.
    pub token: &'a str,
    /// The cluster ID in the status, if any.
    pub cluster_id: Option<&'a str>,
}

/// The URL format of the members of an EtcdCluster.
pub fn addresses(cluster: &EtcdCluster) -> Addresses {
    let namespace = cluster.metadata.namespace.as_deref().unwrap_or_default();
    Members::of(cluster, namespace, "", None).addresses()
}

impl<'a> Members<'a> {
    /// The members of an EtcdCluster that was read from the API server.
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

    /// The URL format of the members.
    pub fn addresses(&self) -> Addresses {
        let tls = self.spec.tls.as_ref();
        Addresses {
            namespace: self.namespace.to_owned(),
            cluster: self.cluster.to_owned(),
            member: self.spec.member_address(),
            cluster_domain: self.spec.cluster_domain().to_owned(),
            peer_tls: peers_of(tls).usual().0,
            // While members accept http and https (`acceptPlaintext`), `client_tls` is false, so that the URLs start
            // with http.
            client_tls: tls.is_some_and(TlsPolicy::insists_on_tls),
        }
    }

    /// The stage of the switch of TLS between members.
    pub fn peers(&self) -> PeerStage {
        peers_of(self.spec.tls.as_ref())
    }

    fn metadata(&self, name: String, labels: BTreeMap<String, String>) -> ObjectMeta {
        ObjectMeta {
            name: Some(name),
            namespace: Some(self.namespace.to_owned()),
            labels: Some(labels),
            owner_references: self.owner.clone().map(|owner| vec![owner]),
            ..ObjectMeta::default()
        }
    }

    /// The annotations that identify the etcd cluster of a pod or PVC. If the EtcdCluster is created again without its
    /// status, only these annotations identify the etcd cluster.
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

/// One member of a cluster.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    /// Name of the member, its pod, its PVC and its Service.
    pub name: &'a str,
    /// The etcd version to run.
    pub version: &'a EtcdVersion,
    /// The role of the member. A promotion changes it.
    pub role: Role,
    /// How etcd starts.
    pub start: Start,
}

/// The role of a member in the quorum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The member votes. The PodDisruptionBudget counts it.
    Voter,
    /// The member does not vote yet.
    Learner,
}

impl Role {
    /// The value of the role label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Voter => names::ROLE_VOTER,
            Self::Learner => names::ROLE_LEARNER,
        }
    }
}

/// The flags `--initial-cluster` and `--initial-cluster-state` of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// State `new` with all first members. Only the members of the bootstrap in the status start with this state
    /// (invariant 6). If the volume contains data, etcd ignores the flags.
    Bootstrap {
        /// The names of all first members, including this member.
        members: Vec<String>,
    },
    /// State `existing` for a member that has never run, with the [`initial_cluster`] from the member list that etcd
    /// returned for its addition.
    Join {
        /// `name=peer-url,...` of all members, including this member.
        initial_cluster: String,
    },
    /// State `existing` for a member that has run before, with only this member in `--initial-cluster`. With data, etcd
    /// ignores this flag. Without data, etcd fails to start, because it finds no other member (invariant 6).
    OnDisk,
}

/// The value of `--initial-cluster` for the member `joining`, which has no name in `members` yet.
pub fn initial_cluster(members: &[etcd::Member], joining: &str) -> String {
    let mut parts = Vec::new();
    for member in members {
        for url in &member.peer_urls {
            let known = Some(member.name.as_str()).filter(|name| !name.is_empty());
            // An unstarted member has no name in the member list, but its peer URL contains the name.
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
    fn initial_cluster_reads_names_of_unstarted_members_from_urls() {
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
