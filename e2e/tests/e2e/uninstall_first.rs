//! A user uninstalls the operators, and then deletes the namespace. No operator could remove a finalizer, so objects
//! must have a finalizer only if it protects data.

use e2e::manifests::{aws_secret, backup_with};
use e2e::sandbox::RELEASE;
use e2e::{chart, scenario};

use crate::bad_input::await_waiting;
use crate::fixtures::cluster;

const BUCKET: &str = "no-such-bucket-anywhere";

#[tokio::test]
async fn uninstalled_operators_do_not_block_deletion_of_namespace() {
    scenario("uninstall_first", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
        sandbox.await_members("c", 1).await?;
        let s3 = sandbox.env.s3()?;
        let delete = "  deletionPolicy: Delete\n";
        let unstored = backup_with(s3, "unstored", "c", &format!("{BUCKET}/key"), delete);
        sandbox
            .apply(&[aws_secret(s3, "aws"), unstored].join("---\n"))
            .await?;
        await_waiting(sandbox, "unstored", "BucketMissing", &[BUCKET]).await?;

        let namespace = sandbox.namespace.as_str();
        let uninstall = ["uninstall", RELEASE, "-n", namespace, "--wait"];
        chart::helm(&sandbox.env, &uninstall).await?;
        let delete = ["delete", "namespace", namespace, "--timeout=300s"];
        sandbox.kubectl(&delete).await.map(drop)
    })
    .await;
}
