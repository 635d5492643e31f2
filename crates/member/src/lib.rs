//! Builds the Kubernetes objects of members from the EtcdCluster: Services, PersistentVolumeClaim, pod,
//! PodDisruptionBudget and NetworkPolicy. Also checks the certificates with which a member is started.
//!
//! This crate uses no client, no clock and no randomness. The cluster operator and the restore operator both build
//! members with this crate. A seed, which is the first member of a restored cluster, is therefore an ordinary member.

use api::EtcdCluster;
use api::cluster::{EtcdClusterSpec, PeerStage, TlsPolicy, peers_of};
use api::names::{self, Addresses};
use api::version::EtcdVersion;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use std::collections::BTreeMap;

mod budget;
pub mod certificate;
mod difference;
mod flags;
mod hash;
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
pub use difference::{
    Difference, MetadataPatch, Notes, Resizing, ResourcesPatch, difference, recorded_hash,
};
pub use flags::{MAX_LEARNERS, VARIABLE_MAX_LEARNERS, etcd_arguments, etcd_option, snapshot_count};
pub use hash::spec_hash;
pub use network::{BACKUP_POD_LABELS, Operators, network_policy};
pub use pod::{USER, container_security, data_mount, is_image_failure, pod, pod_security};
pub use seed::{
    Contents, DataDirectorySettings, ENCRYPTION, FETCH, OperatorImage, Origin, Report, SHA256,
    SOURCE, Seed, Source, seed_name, seed_pod,
};
pub use services::{
    client_service, closed, has_same_policy, headless_service, is_closed, member_service,
    without_second_port,
};
pub use volume::volume_claim;

/// Annotation with the hash of the fields that require a new pod. If the value differs from [`spec_hash`], the pod was
/// created for another spec.
pub const ANNOTATION_SPEC_HASH: &str = "etcd.database.coreos.com/spec-hash";

/// Properties that all members of a cluster share.
#[derive(Clone, Debug)]
pub struct Members<'a> {
    /// Name of the EtcdCluster.
    pub cluster: &'a str,
    /// The namespace in which the objects of members are created.
    pub namespace: &'a str,
    /// The spec that is in effect. It may differ from the stored spec.
    pub spec: &'a EtcdClusterSpec,
    /// Owner reference for garbage collection. `None` only if the EtcdCluster was not read from an API server.
    pub owner: Option<OwnerReference>,
    /// The cluster token of the bootstrap that the status records.
    pub token: &'a str,
    /// The cluster ID that the status records. `None` if the status has no cluster ID yet.
    pub cluster_id: Option<&'a str>,
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

    /// The rules for the addresses of members.
    pub fn addresses(&self) -> Addresses {
        let tls = self.spec.tls.as_ref();
        Addresses {
            namespace: self.namespace.to_owned(),
            cluster: self.cluster.to_owned(),
            member: self.spec.member_address(),
            cluster_domain: self.spec.cluster_domain().to_owned(),
            peer_tls: peers_of(tls).usual().0,
            // During a TLS change, members accept both TLS and plain text. The `http` URL then works for every client.
            client_tls: tls.is_some_and(TlsPolicy::insists_on_tls),
        }
    }

    /// The stage of the change of peer connections to TLS.
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

    /// The annotations that identify the cluster of a pod or PVC. If the EtcdCluster is created again without its
    /// status, only these annotations show to which etcd cluster the object belongs.
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

/// One member, and how its etcd starts.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    /// Name of the member, its pod, its PVC and its Service.
    pub name: &'a str,
    /// The etcd version to run.
    pub version: &'a EtcdVersion,
    /// The value of the role label. It changes when the member is promoted.
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

/// How etcd starts: the flags `--initial-cluster` and `--initial-cluster-state`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// One of the first members: state `new`, with the names of all first members. Only the members of the bootstrap in
    /// the status start in this way (invariant 6). If the disk has data, etcd ignores the flags and uses the data.
    Bootstrap {
        /// The names of all first members, including this one.
        members: Vec<String>,
    },
    /// A member that was added and has never run: state `existing`, with the [`initial_cluster`] of the member list
    /// that etcd returned when the member was added.
    Join {
        /// `name=peer-url,...` of all members, including this one.
        initial_cluster: String,
    },
    /// A member that has run before and gets a new pod: state `existing`, and the list contains only this member. If
    /// the data exists, etcd ignores the list. If the data is lost, etcd finds no other member and fails to start. With
    /// a longer list, etcd could start with empty data under the old ID of the member (invariant 6).
    OnDisk,
}

/// The value of `--initial-cluster` for the member `joining`. This member has no name in `members` yet.
pub fn initial_cluster(members: &[etcd::Member], joining: &str) -> String {
    let mut parts = Vec::new();
    for member in members {
        for url in &member.peer_urls {
            let known = Some(member.name.as_str()).filter(|name| !name.is_empty());
            // A member that has not started yet has no name in etcd's member list. Its peer URL contains the name.
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
