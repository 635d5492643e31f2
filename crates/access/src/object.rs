//! The properties that EtcdRoles and EtcdUsers have in common.

use std::fmt::Debug;

use api::access::{
    AccessDeletionPolicy, EtcdRoleStatus, EtcdUserStatus, OwnedStatus, PasswordStatus,
    validate_role, validate_user,
};
use api::cluster::ROOT_USER;
use api::names::OPERATOR_USER;
use api::{EtcdRole, EtcdUser, Problem};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::Resource;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::snapshot::EtcdFacts;

/// The fields of the status of both kinds. An EtcdRole has neither `password` nor `checked`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CommonStatus {
    pub(crate) observed_generation: Option<i64>,
    pub(crate) owned: Option<OwnedStatus>,
    pub(crate) password: Option<PasswordStatus>,
    pub(crate) checked: Option<Time>,
    pub(crate) conditions: Vec<Condition>,
}

/// An EtcdRole or an EtcdUser.
pub(crate) trait AccessObject:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
    + Send
    + Sync
    + 'static
{
    type Status: Serialize + PartialEq + Send + Sync;
    /// `role` or `user`, for messages.
    const WORD: &'static str;
    /// The field of the spec with the name in etcd.
    const NAME_FIELD: &'static str;

    fn etcd_name(&self) -> &str;
    /// The name of the EtcdCluster in the spec.
    fn cluster(&self) -> &str;
    fn adopts(&self) -> bool;
    fn policy(&self) -> Option<&AccessDeletionPolicy>;
    fn problems(&self) -> Vec<Problem>;
    fn status(&self) -> Option<&Self::Status>;
    fn common_status(&self) -> CommonStatus;
    fn status_from(common: CommonStatus) -> Self::Status;
    fn owned(&self) -> Option<&OwnedStatus>;
    /// Invariant 43: whether the operators need the role or the user with this name to log in.
    fn is_of_operators(name: &str, etcd: &EtcdFacts) -> bool;

    /// The name of the EtcdCluster whose etcd contains the role or the user: from the status while the object is being
    /// deleted, else from the spec.
    fn target(&self) -> &str {
        match self.owned() {
            Some(owned) if self.meta().deletion_timestamp.is_some() => &owned.cluster,
            _ => self.cluster(),
        }
    }

    /// The name of the role or the user in etcd: from the status while the object is being deleted, else from the spec.
    fn entry(&self) -> &str {
        match self.owned() {
            Some(owned) if self.meta().deletion_timestamp.is_some() => &owned.name,
            _ => self.etcd_name(),
        }
    }
}

impl AccessObject for EtcdRole {
    type Status = EtcdRoleStatus;
    const WORD: &'static str = "role";
    const NAME_FIELD: &'static str = "spec.roleName";

    fn etcd_name(&self) -> &str {
        EtcdRole::etcd_name(self)
    }

    fn cluster(&self) -> &str {
        &self.spec.etcd_cluster.name
    }

    fn adopts(&self) -> bool {
        self.spec.adopt
    }

    fn policy(&self) -> Option<&AccessDeletionPolicy> {
        self.spec.deletion_policy.as_ref()
    }

    fn problems(&self) -> Vec<Problem> {
        validate_role(self)
    }

    fn status(&self) -> Option<&EtcdRoleStatus> {
        self.status.as_ref()
    }

    fn common_status(&self) -> CommonStatus {
        let status = self.status.clone().unwrap_or_default();
        CommonStatus {
            observed_generation: status.observed_generation,
            owned: status.owned,
            conditions: status.conditions,
            ..CommonStatus::default()
        }
    }

    fn status_from(common: CommonStatus) -> EtcdRoleStatus {
        EtcdRoleStatus {
            observed_generation: common.observed_generation,
            owned: common.owned,
            conditions: common.conditions,
        }
    }

    fn owned(&self) -> Option<&OwnedStatus> {
        self.status.as_ref()?.owned.as_ref()
    }

    fn is_of_operators(name: &str, _: &EtcdFacts) -> bool {
        name == ROOT_USER
    }
}

impl AccessObject for EtcdUser {
    type Status = EtcdUserStatus;
    const WORD: &'static str = "user";
    const NAME_FIELD: &'static str = "spec.userName";

    fn etcd_name(&self) -> &str {
        EtcdUser::etcd_name(self)
    }

    fn cluster(&self) -> &str {
        &self.spec.etcd_cluster.name
    }

    fn adopts(&self) -> bool {
        self.spec.adopt
    }

    fn policy(&self) -> Option<&AccessDeletionPolicy> {
        self.spec.deletion_policy.as_ref()
    }

    fn problems(&self) -> Vec<Problem> {
        validate_user(self)
    }

    fn status(&self) -> Option<&EtcdUserStatus> {
        self.status.as_ref()
    }

    fn common_status(&self) -> CommonStatus {
        let status = self.status.clone().unwrap_or_default();
        CommonStatus {
            observed_generation: status.observed_generation,
            owned: status.owned,
            password: status.password,
            checked: status.checked,
            conditions: status.conditions,
        }
    }

    fn status_from(common: CommonStatus) -> EtcdUserStatus {
        EtcdUserStatus {
            observed_generation: common.observed_generation,
            owned: common.owned,
            password: common.password,
            checked: common.checked,
            conditions: common.conditions,
        }
    }

    fn owned(&self) -> Option<&OwnedStatus> {
        self.status.as_ref()?.owned.as_ref()
    }

    fn is_of_operators(name: &str, etcd: &EtcdFacts) -> bool {
        [ROOT_USER, OPERATOR_USER].contains(&name) || etcd.operator_user.as_deref() == Some(name)
    }
}
