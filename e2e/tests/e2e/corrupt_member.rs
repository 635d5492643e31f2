//! A member cannot start, because its data is damaged. The operator replaces the member and its volume.

use anyhow::{Context, ensure};
use e2e::objects::{field, follower, leader, ready_members};
use e2e::{Testbed, Writer, cluster_scenario};
use k8s_openapi::api::core::v1::Pod;

use crate::fixtures::{DURABLE, cluster_with};
use crate::member_loss::{SelectMember, await_one_volume_per_member};

/// The data that the test overwrites: the first records of the WAL files of a follower, then the first pages of the
/// leader's database.
const DAMAGE: [(&str, &str, SelectMember); 2] = [
    ("*.wal", "bs=1 seek=32 count=4096", follower),
    ("db", "bs=4096 count=4", leader),
];

#[tokio::test]
async fn member_with_damaged_data_is_replaced() {
    cluster_scenario("corrupt_member", async |sandbox| {
        let testbed = Testbed::of(sandbox)?;
        let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
        sandbox.apply(&manifest).await?;
        let before = sandbox.await_members("c", 3).await?;
        let writer = Writer::start(sandbox, "c").await?;
        for (files, how, choose) in DAMAGE {
            let victim = choose(&sandbox.await_members("c", 3).await?)?;
            let pods = [sandbox.api::<Pod>().get(&victim).await?];
            let volume_directory = sandbox.volume_directory(&victim).await?;
            // The containers are frozen before the damage, because a running member would overwrite the damaged
            // files.
            testbed.signal_containers(&pods, "SIGSTOP").await?;
            let damaged = testbed
                .script(&format!(
                    "for file in $(find {volume_directory} -name '{files}' -size +0); do \
                     dd if=/dev/urandom of=$file {how} conv=notrunc status=none; echo $file; done"
                ))
                .await?;
            ensure!(
                damaged.contains(&volume_directory),
                "no file was damaged: {damaged}"
            );
            testbed.kill_containers(&pods).await?;
            sandbox.await_unready("c", &victim).await?;
            let after = sandbox.await_members("c", 3).await.context(files)?;
            let members = ready_members(&after);
            ensure!(
                !members.contains(&victim),
                "{victim} restarted with damaged {files}"
            );
            ensure!(field(&after, "/status/clusterID") == field(&before, "/status/clusterID"));
            await_one_volume_per_member(sandbox, &members).await?;
        }
        writer.await_more(10).await?;
        writer.finish("damaged data").await.map(drop)
    })
    .await;
}
