//! The operator's record of the passwords of etcd. The passwords are in memory only until they are sent (invariant 14).

use api::names;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Resource, ResourceExt};
use runtime::credentials::record_data;

use super::send::patched;
use crate::action::{Kind, Passwords, Reference};
use crate::execute::{Error, ExecuteContext};

impl ExecuteContext<'_> {
    pub(super) async fn passwords(&self, write: Passwords) -> Result<Option<String>, Error> {
        match write {
            Passwords::Record { others } => self.record_passwords(others).await,
            Passwords::Forget => {
                let recorded = self.auth.recorded();
                let reference = Reference {
                    kind: Kind::Secret,
                    name: names::auth_secret(&self.cluster.name_any()),
                    uid: recorded.map(|it| it.uid.clone()).unwrap_or_default(),
                };
                self.delete_of::<Secret>(&reference).await
            }
        }
    }

    /// Invariants 11 and 21: written with a resourceVersion precondition, so that a password recorded concurrently by
    /// another process is not lost.
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
}
