//! Decides whether a cluster has proxies, and which version they run. Performs no I/O.

use api::EtcdCluster;
use api::cluster::{GrpcProxy, validate};
use api::version::EtcdVersion;

/// What happens to the proxies of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Plan<'a> {
    /// The proxies stay as they are.
    Keep,
    /// The proxies are deleted, because the spec has none.
    Remove,
    /// The proxies run with these settings.
    Run(Run<'a>),
}

/// The settings of the proxies.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Run<'a> {
    /// `spec.grpcProxy`.
    pub(crate) proxy: &'a GrpcProxy,
    /// The version of etcd that the proxies run.
    pub(crate) version: EtcdVersion,
    /// The cluster token.
    pub(crate) token: &'a str,
}

/// Plans the proxies of a cluster. They stay as they are while the cluster is paused, is being deleted, has an invalid
/// spec, or has not formed.
pub(crate) fn plan(cluster: &EtcdCluster) -> Plan<'_> {
    let is_deleted = cluster.metadata.deletion_timestamp.is_some();
    if is_deleted || cluster.spec.paused || !validate(cluster).is_empty() {
        return Plan::Keep;
    }
    let Some(proxy) = &cluster.spec.grpc_proxy else {
        return Plan::Remove;
    };
    run(cluster, proxy).map_or(Plan::Keep, Plan::Run)
}

fn run<'a>(cluster: &'a EtcdCluster, proxy: &'a GrpcProxy) -> Option<Run<'a>> {
    let status = cluster.status.as_ref()?;
    // A cluster without a cluster ID has not formed.
    status.cluster_id.as_ref()?;
    let bootstrap = status.bootstrap.as_ref()?;
    Some(Run {
        proxy,
        version: version(cluster)?,
        token: &bootstrap.token,
    })
}

/// The version that the members run, so that an upgrade changes the proxies after the members. If `spec.image` pins the
/// digest of another version, no image of the running version is known, and the version is `spec.version`.
fn version(cluster: &EtcdCluster) -> Option<EtcdVersion> {
    let status = cluster.status.as_ref()?;
    let running = status.current_version.as_deref();
    let running = running.and_then(|text| EtcdVersion::parse(text).ok());
    let running = running.filter(|version| cluster.spec.image_for(version).is_some());
    running.or_else(|| EtcdVersion::parse(&cluster.spec.version).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn cluster(spec: &Value, status: &Value) -> EtcdCluster {
        serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "db", "namespace": "prod", "uid": "1" }, "spec": spec, "status": status,
        }))
        .unwrap()
    }

    fn formed() -> Value {
        json!({ "clusterID": "abc", "currentVersion": "3.6.16", "bootstrap": { "token": "db-1", "members": [] } })
    }

    #[test]
    fn proxies_of_formed_cluster_run_version_of_members() {
        let cluster = cluster(&json!({ "version": "3.7.3", "grpcProxy": {} }), &formed());
        let Plan::Run(run) = plan(&cluster) else {
            panic!("{:?}", plan(&cluster));
        };
        assert_eq!(run.version.to_string(), "3.6.16");
        assert_eq!(run.token, "db-1");
    }

    #[test]
    fn proxies_run_version_of_pinned_image() {
        let image = format!("registry.example.com/etcd@sha256:{}", "0".repeat(64));
        let spec = json!({ "version": "3.7.3", "image": image, "grpcProxy": {} });
        let cluster = cluster(&spec, &formed());
        let Plan::Run(run) = plan(&cluster) else {
            panic!("{:?}", plan(&cluster));
        };
        assert_eq!(run.version.to_string(), "3.7.3");
    }

    #[test]
    fn proxies_wait_until_cluster_has_formed() {
        let spec = json!({ "grpcProxy": {} });
        for status in [
            json!(null),
            json!({}),
            json!({ "bootstrap": { "token": "db-1", "members": [] } }),
            json!({ "clusterID": "abc" }),
        ] {
            let cluster = cluster(&spec, &status);
            assert_eq!(plan(&cluster), Plan::Keep);
        }
    }

    #[test]
    fn proxies_are_removed_only_by_valid_unpaused_spec() {
        assert_eq!(plan(&cluster(&json!({}), &formed())), Plan::Remove);
        assert_eq!(
            plan(&cluster(&json!({ "paused": true }), &formed())),
            Plan::Keep
        );
        assert_eq!(plan(&cluster(&json!({ "size": 9 }), &formed())), Plan::Keep);
        let mut deleted = cluster(&json!({}), &formed());
        let time = serde_json::from_value(json!("2026-11-28T12:00:00Z")).unwrap();
        deleted.metadata.deletion_timestamp = Some(time);
        assert_eq!(plan(&deleted), Plan::Keep);
    }
}
