//! The etcd client for a restored cluster, with the Secrets in the spec of the EtcdCluster. A snapshot contains the
//! users of etcd, so the restored cluster requires the passwords from the time of the backup.

use api::EtcdCluster;
use etcd::{Access, Error, EtcdClient};

use super::ObserveContext;
use crate::snapshot::Serving;

/// The etcd client of one cluster, or the problem of its Secrets.
#[derive(Default)]
pub(super) struct Reached {
    own: Option<EtcdClient>,
    fault: Option<String>,
}

/// The client for a cluster. If the spec names no Secrets, the shared client (`context.etcd`) is used.
pub(super) async fn client(context: &ObserveContext<'_>, cluster: &EtcdCluster) -> Reached {
    match runtime::reach::of_cluster(context.client, cluster).await {
        Ok(access) if access == Access::default() => Reached::default(),
        Ok(access) => Reached {
            own: Some(EtcdClient::new(access)),
            fault: None,
        },
        Err(why) => Reached {
            own: None,
            fault: Some(why),
        },
    }
}

/// Requests the member list, which needs a quorum, and then the revision of the member.
pub(super) async fn serving(context: &ObserveContext<'_>, url: &str) -> Serving {
    if let Err(error) = context.etcd.members(&[url.to_owned()]).await {
        return Serving::Unknown(context.describe(&error));
    }
    match context.etcd.status(url).await {
        Err(error) => Serving::Unknown(error.to_string()),
        Ok(status) => Serving::Serves {
            cluster_id: status.cluster_id.to_string(),
            revision: status.revision,
        },
    }
}

impl Reached {
    /// The context with the client of the cluster. Without such a client, the context keeps the shared client.
    pub(super) fn context<'a>(&'a self, context: &ObserveContext<'a>) -> ObserveContext<'a> {
        ObserveContext {
            client: context.client,
            etcd: self.own.as_ref().map_or(context.etcd, |own| own),
            grants: context.grants,
            reads: context.reads,
            image: context.image,
            fault: self.fault.as_deref(),
        }
    }
}

impl ObserveContext<'_> {
    /// Describes why etcd gave no answer. If a Secret has a problem or etcd rejects the password, the text contains
    /// the remedy.
    pub(super) fn describe(&self, error: &Error) -> String {
        match (self.fault, error) {
            (Some(fault), _) => fault.to_owned(),
            (None, Error::AccessDenied(why)) => format!(
                "the restored cluster has authentication enabled, with the users and passwords of the backup, and \
                 rejects the operator ({why}): put the password from the time of the backup into the Secret of \
                 the EtcdCluster's spec.auth.secret"
            ),
            (None, error) => error.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restore_reports_rejected_password_or_credentials_fault() {
        let denied =
            Error::AccessDenied("http://a: etcd does not take the password of user root".into());
        let etcd = EtcdClient::new(Access::default());
        let grants = store::grants::Grants::default();
        let reads = crate::fake::reads();
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let _guard = runtime.enter();
        let client = kube::Client::try_from(config).unwrap();
        let image = crate::fake::image(&client);
        let context = |fault| ObserveContext {
            client: &client,
            etcd: &etcd,
            grants: &grants,
            reads: &reads,
            image: &image,
            fault,
        };
        let text = context(None).describe(&denied);
        assert!(
            text.contains("spec.auth.secret") && text.contains("user root"),
            "{text}"
        );
        let fault = "spec.auth.secret: there is no Secret root";
        assert_eq!(context(Some(fault)).describe(&denied), fault);
    }
}
