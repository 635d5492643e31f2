//! Faults of the stores for continuous backups and for copies of backups, and of the destination of a mirror.

use anyhow::Result;
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, backup_with};

use super::Monitor;

impl Monitor<'_> {
    /// Records the changes of `carts` with a Secret whose credentials the store rejects. Waits until the alert fires,
    /// and until it ends after the EtcdBackup names another Secret. Afterwards, the agent records until the end of the
    /// test, so the dashboards show the lag of the agent.
    pub(super) async fn faults_of_continuous_backup(&self, bucket: &Bucket) -> Result<()> {
        let (sandbox, s3) = (self.sandbox, self.sandbox.env.s3()?);
        let mut other = s3.clone();
        "denied".clone_into(&mut other.secret_key);
        sandbox.apply(&aws_secret(&other, "denied")).await?;
        let path = format!("{}/recorded", bucket.name);
        let more = "  continuous: {}\n";
        let manifest = backup_with(s3, "recorded", "carts", &path, more);
        let manifest = manifest.replace("awsSecret: aws", "awsSecret: denied");
        sandbox.apply(&manifest).await?;
        let namespace = ("namespace", sandbox.namespace.as_str());
        let recorded = [namespace, ("name", "recorded")];
        self.fires("EtcdContinuousBackupLate", &recorded).await?;
        let accepted = r#"{"spec":{"s3":{"awsSecret":"aws"}}}"#;
        self.patch("etcdbackup", "recorded", accepted).await?;
        self.ends("EtcdContinuousBackupLate", &recorded).await
    }

    /// Copies a backup to a bucket that does not exist. Waits until the alert fires, and until it ends after the bucket
    /// was created.
    pub(super) async fn faults_of_copies(&self, bucket: &Bucket) -> Result<()> {
        let (sandbox, s3) = (self.sandbox, self.sandbox.env.s3()?);
        let second = format!("{}-second", bucket.name);
        let copy = format!(
            "  copyTo:\n  - name: offsite\n    storageType: S3\n    s3: {{path: {second}/copied, awsSecret: aws, \
             endpoint: \"{}\", forcePathStyle: true}}\n",
            s3.endpoint
        );
        let path = format!("{}/copied", bucket.name);
        let manifest = backup_with(s3, "copied", "carts", &path, &copy);
        sandbox.apply(&manifest).await?;
        let namespace = ("namespace", sandbox.namespace.as_str());
        let copied = [namespace, ("name", "copied")];
        self.fires("EtcdBackupNotCopied", &copied).await?;
        Bucket::create(s3, &second).await?;
        self.ends("EtcdBackupNotCopied", &copied).await
    }

    /// Mirrors `carts` to a cluster that does not exist. Waits until the alert fires, and until it ends after the
    /// deletion of the EtcdMirror.
    pub(super) async fn faults_of_mirror(&self) -> Result<()> {
        let manifest = "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdMirror\nmetadata: {name: late}\n\
                        spec:\n  source: {etcdCluster: {name: carts}}\n  \
                        destination: {etcdCluster: {name: absent}}\n";
        self.sandbox.apply(manifest).await?;
        let namespace = ("namespace", self.sandbox.namespace.as_str());
        let late = [namespace, ("name", "late")];
        self.fires("EtcdMirrorLate", &late).await?;
        let delete = ["delete", "etcdmirror", "late"];
        self.sandbox.kubectl(&delete).await?;
        self.ends("EtcdMirrorLate", &late).await
    }
}
