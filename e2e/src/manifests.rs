//! Manifests that the demo and the tests use.

use crate::env::S3;

/// A Secret with S3 credentials, in the format that the API version v1beta2 requires.
#[must_use]
pub fn aws_secret(s3: &S3, name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata:\n  name: {name}\nstringData:\n  credentials: |\n    [default]\n    \
         aws_access_key_id = {}\n    aws_secret_access_key = {}\n  config: |\n    [default]\n    region = {}\n",
        s3.access_key, s3.secret_key, s3.region
    )
}

/// An EtcdBackup that stores one backup of the cluster at `path`, with the credentials in the Secret `aws`.
#[must_use]
pub fn backup(s3: &S3, name: &str, cluster: &str, path: &str) -> String {
    backup_with(s3, name, cluster, path, "")
}

/// Like [`backup`], with additional lines under `spec`, which are indented by two spaces.
#[must_use]
pub fn backup_with(s3: &S3, name: &str, cluster: &str, path: &str, more: &str) -> String {
    let source = source(s3, path);
    format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdBackup\nmetadata: {{name: {name}}}\nspec:\n  \
         etcdCluster: {{name: {cluster}}}\n  storageType: S3\n  {source}\n{more}"
    )
}

/// An EtcdRestore that restores the backup at `path` to the cluster, with the credentials in the Secret `aws`.
#[must_use]
pub fn restore(s3: &S3, name: &str, cluster: &str, path: &str) -> String {
    restore_with(s3, name, &format!("{{name: {cluster}}}"), path, "")
}

/// Like [`restore`], but `cluster` is the complete value of the field `etcdCluster`. `more` has additional lines under
/// `spec`, indented by two spaces.
#[must_use]
pub fn restore_with(s3: &S3, name: &str, cluster: &str, path: &str, more: &str) -> String {
    let source = source(s3, path);
    format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdRestore\nmetadata: {{name: {name}}}\nspec:\n  \
         etcdCluster: {cluster}\n  backupStorageType: S3\n  {source}\n{more}"
    )
}

fn source(s3: &S3, path: &str) -> String {
    let endpoint = &s3.endpoint;
    format!("s3: {{path: {path}, awsSecret: aws, endpoint: \"{endpoint}\", forcePathStyle: true}}")
}
