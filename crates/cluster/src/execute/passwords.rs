//! Writes the operator's record of etcd's passwords to a Secret. Plans contain no passwords (invariant 14).

use api::names;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use runtime::apply;
use runtime::credentials::record_data;

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

    /// Invariants 11 and 21: with the resourceVersion precondition, the write never replaces a password that another
    /// process has recorded.
    async fn record_passwords(&self, others: bool) -> Result<Option<String>, Error> {
        let Some((user, passwords)) = self.auth.to_record(others) else {
            return Err(Error::Missing(
                "spec.auth.secret is not set, so the operator has no credentials to record"
                    .to_owned(),
            ));
        };
        let recorded = self.auth.recorded();
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(names::auth_secret(&self.cluster.name_any())),
                namespace: self.cluster.namespace(),
                labels: Some(names::cluster_labels(&self.cluster.name_any())),
                owner_references: apply::owner_reference(self.cluster).map(|owner| vec![owner]),
                uid: recorded.map(|recorded| recorded.uid.clone()),
                ..ObjectMeta::default()
            },
            data: Some(record_data(&user, &passwords)),
            type_: Some("Opaque".to_owned()),
            ..Secret::default()
        };
        let over = recorded.map(|recorded| recorded.resource_version.as_str());
        self.put(secret, over).await
    }
}
