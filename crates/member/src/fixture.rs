//! Specs and members for tests. The cluster and its members have different names, so that a test fails if names are
//! swapped.

use api::cluster::EtcdClusterSpec;
use api::version::EtcdVersion;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::{Member, Members, Role, Start};

pub(super) fn spec(json: &str) -> EtcdClusterSpec {
    let mut value: serde_json::Value = serde_json::from_str(json).unwrap();
    if value.get("size").is_none() {
        value["size"] = 3.into();
    }
    serde_json::from_value(value).unwrap()
}

pub(super) struct Fixture {
    pub(super) spec: EtcdClusterSpec,
    pub(super) cluster_id: Option<&'static str>,
    pub(super) version: EtcdVersion,
    pub(super) start: Start,
    pub(super) role: Role,
}

impl Default for Fixture {
    fn default() -> Self {
        Self::with("{}")
    }
}

impl Fixture {
    pub(super) fn with(json: &str) -> Self {
        Self {
            spec: spec(json),
            cluster_id: Some("abc"),
            version: EtcdVersion::parse("3.6.16").unwrap(),
            start: Start::Bootstrap {
                members: vec!["db-aaaaaaaaaa".into(), "db-bbbbbbbbbb".into()],
            },
            role: Role::Voter,
        }
    }

    pub(super) fn durable() -> Self {
        Self::with(
            r#"{"pod":{"persistentVolumeClaimSpec":{"storageClassName":"fast",
                "resources":{"requests":{"storage":"1Gi"}}}}}"#,
        )
    }

    pub(super) fn version(mut self, version: &str) -> Self {
        self.version = EtcdVersion::parse(version).unwrap();
        self
    }

    pub(super) fn start(mut self, start: Start) -> Self {
        self.start = start;
        self
    }

    pub(super) fn members(&self) -> Members<'_> {
        Members {
            cluster: "db",
            namespace: "prod",
            spec: &self.spec,
            owner: Some(OwnerReference {
                api_version: "etcd.database.coreos.com/v1beta2".into(),
                kind: "EtcdCluster".into(),
                name: "db".into(),
                uid: "cluster-uid".into(),
                controller: Some(true),
                block_owner_deletion: None,
            }),
            token: "token",
            cluster_id: self.cluster_id,
        }
    }

    pub(super) fn member(&self) -> Member<'_> {
        Member {
            name: "db-aaaaaaaaaa",
            version: &self.version,
            role: self.role,
            start: self.start.clone(),
        }
    }

    pub(super) fn pod(&self) -> k8s_openapi::api::core::v1::Pod {
        super::pod(&self.members(), &self.member())
    }

    pub(super) fn arguments(&self) -> Vec<String> {
        super::etcd_arguments(&self.members(), &self.member())
    }
}
