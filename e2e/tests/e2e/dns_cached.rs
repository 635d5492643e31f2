//! DNS that caches names, and their absence, for 30 s, as kubeadm's did before 1.33 and NodeLocal DNS does.

mod alone {
    use anyhow::{Context, ensure};
    use e2e::objects::{leader, ready_members};
    use e2e::{Testbed, Writer, cluster_scenario};

    use crate::all_pods_lost::same_members;
    use crate::fixtures::{DURABLE, cluster, cluster_with};

    /// How long each takes is for `cargo xtask bench --dns cache30` to say.
    #[tokio::test]
    async fn dns_that_caches_stands_in_the_way_of_nothing() {
        cluster_scenario("dns_cached", async |sandbox| {
            Testbed::breaking(sandbox, async |testbed| {
                testbed.dns("cache30").await?;
                sandbox.apply(&cluster(&sandbox.env, "plain", 3)?).await?;
                let durable = cluster_with(&sandbox.env, "durable", 1, DURABLE)?;
                sandbox.apply(&durable).await?;
                let plain = sandbox.await_members("plain", 3).await?;
                sandbox.await_members("durable", 1).await?;
                let writers = [
                    Writer::start(sandbox, "plain").await?,
                    Writer::start(sandbox, "durable").await?,
                ];

                // New names, which the cache may know as absent: a replacement, and growth.
                let victim = leader(&plain)?;
                sandbox.lose_pod("plain", &victim).await?;
                sandbox.scale("durable", 3).await?;
                let after = sandbox.await_members("plain", 3).await.context("plain")?;
                ensure!(!ready_members(&after).contains(&victim));
                let before = sandbox
                    .await_members("durable", 3)
                    .await
                    .context("durable")?;

                // A name that stays while its pod has another address.
                sandbox.lose_pod("durable", &leader(&before)?).await?;
                let after = sandbox.await_members("durable", 3).await.context("back")?;
                same_members(&before, &after)?;
                for (writer, cluster) in writers.into_iter().zip(["plain", "durable"]) {
                    writer.await_more(10).await?;
                    let what = format!("caching DNS, {cluster} members");
                    writer.finish(&what).await?;
                }
                Ok(())
            })
            .await
        })
        .await;
    }
}
