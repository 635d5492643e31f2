//! Commands in messages for users.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// The command that sets an annotation. `kind` is the kind in lower case.
pub fn annotate(kind: &str, object: &ObjectMeta, annotation: &str, value: &str) -> String {
    let namespace = object.namespace.as_deref().unwrap_or_default();
    let name = object.name.as_deref().unwrap_or_default();
    format!("`kubectl -n {namespace} annotate {kind} {name} {annotation}={value} --overwrite`")
}

/// The command that makes a backup of a cluster with the plugin.
pub fn backup(namespace: &str, cluster: &str) -> String {
    format!("`kubectl etcd -n {namespace} backup {cluster}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubectl_commands_contain_namespace_and_object() {
        let object = ObjectMeta {
            namespace: Some("prod".into()),
            name: Some("main".into()),
            ..ObjectMeta::default()
        };
        assert_eq!(
            annotate("etcdcluster", &object, "a/b", "c"),
            "`kubectl -n prod annotate etcdcluster main a/b=c --overwrite`"
        );
        assert_eq!(backup("prod", "main"), "`kubectl etcd -n prod backup main`");
    }
}
