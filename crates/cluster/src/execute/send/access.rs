//! Writes about who gets in: etcd's authentication, the operator's record of its passwords, the NetworkPolicy.

use api::names;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Resource, ResourceExt};
use runtime::apply;
use runtime::credentials::record_data;

use super::failed;
use super::patch::patched;
use crate::access::AccessWrite;
use crate::execute::{Actor, Error};
use crate::snapshot::Seen;

impl Actor<'_> {
    /// Sends one write about who gets in.
    pub(super) async fn access(&self, write: AccessWrite) -> Result<Option<String>, Error> {
        let via: Vec<String> = self
            .observed
            .statuses
            .iter()
            .filter(|(_, status)| matches!(status, Seen::Known(status) if !status.is_learner))
            .map(|(name, _)| self.client_url(name))
            .collect();
        let asked = match write {
            AccessWrite::Record { others } => return self.record_passwords(others).await,
            AccessWrite::Forget => return self.forget_passwords().await,
            AccessWrite::ApplyNetwork => {
                let wanted = self.cluster.spec.network_policy.clone().unwrap_or_default();
                let policy = member::network_policy(&self.members(), &wanted, self.operators);
                return self.apply(&policy).await;
            }
            AccessWrite::DeleteNetwork => return self.delete_network_policy().await,
            AccessWrite::Enable => self.etcd.enable_auth(&via).await,
            AccessWrite::Disable => self.etcd.disable_auth(&via).await,
            AccessWrite::ChangePassword => self.etcd.change_password(&via).await,
        };
        asked.map(|()| None).map_err(|source| Error::Etcd {
            what: write.to_string(),
            source,
        })
    }

    /// Invariant 21, and invariant 11: written only over the version that was read, so that nothing that another
    /// process has recorded meanwhile is lost.
    async fn record_passwords(&self, others: bool) -> Result<Option<String>, Error> {
        let Some((user, passwords)) = self.auth.to_record(others) else {
            return Err(Error::Missing(
                "there are no credentials to record".to_owned(),
            ));
        };
        let name = names::auth_secret(&self.cluster.name_any());
        let recorded = self.auth.recorded();
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                namespace: self.cluster.namespace(),
                labels: Some(names::cluster_labels(&self.cluster.name_any())),
                owner_references: self
                    .cluster
                    .controller_owner_ref(&())
                    .map(|owner| vec![owner]),
                uid: recorded.map(|recorded| recorded.uid.clone()),
                resource_version: recorded.map(|recorded| recorded.resource_version.clone()),
                ..ObjectMeta::default()
            },
            data: Some(record_data(&user, &passwords)),
            type_: Some("Opaque".to_owned()),
            ..Secret::default()
        };
        if recorded.is_none() {
            return self.create(&secret).await;
        }
        let params = PostParams {
            field_manager: Some(names::MANAGER_CLUSTER.to_owned()),
            ..PostParams::default()
        };
        let secrets: Api<Secret> = self.api();
        let written = secrets.replace(&name, &params, &secret).await;
        written
            .map(|_| None)
            .map_err(|source| patched("Secret", &name, source))
    }

    async fn forget_passwords(&self) -> Result<Option<String>, Error> {
        let name = names::auth_secret(&self.cluster.name_any());
        let uid = self.auth.recorded().map(|recorded| recorded.uid.clone());
        self.delete::<Secret>(&name, &uid.unwrap_or_default()).await
    }

    async fn delete_network_policy(&self) -> Result<Option<String>, Error> {
        let policies: Api<NetworkPolicy> = self.api();
        let name = names::network_policy(&self.cluster.name_any());
        let seen = policies.get_opt(&name).await;
        let seen = seen.map_err(|source| failed("read", "NetworkPolicy", &name, source))?;
        match seen {
            Some(seen) => self.removed(apply::delete(&policies, &seen, None).await?, &name),
            None => Ok(None),
        }
    }
}
