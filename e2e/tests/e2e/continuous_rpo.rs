//! The recovery point of a continuous backup: acknowledged writes that are missing in the store if the whole cluster is
//! lost at a random moment.

mod full {
    use std::io::Write as _;
    use std::time::Duration;

    use anyhow::{Result, ensure};
    use e2e::bucket::Bucket;
    use e2e::manifests::aws_secret;
    use e2e::objects::field;
    use e2e::{Keyspace, Recording, Sandbox, Testbed, Writer, scenario};

    use crate::all_pods_lost::await_restarts;
    use crate::fixtures::cluster;

    const FLUSH_INTERVAL: Duration = Duration::from_secs(1);
    /// Time for the upload of a segment on a loaded machine, in addition to the flush interval. On an idle machine, the
    /// goal for the upload is 0.5 s, which `cargo xtask bench continuous` measures.
    const UPLOAD: Duration = Duration::from_secs(5);
    /// Number of random moments at which the store is listed while the cluster serves clients.
    const SAMPLES: usize = 100;
    /// Number of times that all members and the agent are killed.
    const KILLS: usize = 3;

    #[tokio::test]
    async fn killed_cluster_loses_only_writes_of_flush_interval() {
        scenario("continuous_rpo", async |sandbox| {
            let testbed = Testbed::of(sandbox)?;
            let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
            sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
            sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
            sandbox.await_members("c", 3).await?;
            let recording = Recording::start(sandbox, &bucket, "rpo", "c").await?;

            let writer = Writer::start(sandbox, "c").await?;
            writer.await_more(50).await?;
            let samples = recording.sample(&writer, SAMPLES).await?;
            // Of 100 samples in ascending order, the 99th is the 99th percentile.
            let percentile = samples[SAMPLES - 2];
            let report = format!(
                "recovery point: median {:?}, 99th percentile {percentile:?}, maximum {:?}",
                samples[SAMPLES / 2],
                samples[SAMPLES - 1],
            );
            // The line is written to standard error directly, because the test harness hides the output of
            // `eprintln!` if the test passes.
            let _ = writeln!(std::io::stderr(), "    {report}");
            ensure!(percentile <= FLUSH_INTERVAL + UPLOAD, "{report}");

            for _ in 0..KILLS {
                kill(sandbox, &testbed, &recording, &writer).await?;
            }
            writer
                .finish("all members and the agent were killed")
                .await?;
            ends_without_gap(sandbox, &recording).await
        })
        .await;
    }

    /// Kills all members and the agent at the same time, and compares the store with the acknowledged writes. Then
    /// waits until the cluster and the agent run again.
    async fn kill(
        sandbox: &Sandbox,
        testbed: &Testbed<'_>,
        recording: &Recording<'_>,
        writer: &Writer,
    ) -> Result<()> {
        let (pods, point) = recording.kill(testbed, "c", writer).await?;
        let report = format!("acknowledged writes of {point:?} were not stored");
        let _ = writeln!(std::io::stderr(), "    killed: {report}");
        ensure!(point <= FLUSH_INTERVAL + UPLOAD, "{report}");
        await_restarts(sandbox, &pods).await?;
        sandbox.await_members("c", 3).await?;
        writer.await_more(50).await?;
        recording.await_agents(1).await
    }

    /// Ensures that the agent has stored all changes of the cluster, in one chain without a gap.
    async fn ends_without_gap(sandbox: &Sandbox, recording: &Recording<'_>) -> Result<()> {
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        recording.await_revision(keys.revision().await?).await?;
        let object = recording.await_condition("True").await?;
        let continuous = field(&object, "/status/continuous");
        ensure!(continuous["gapCount"] == 0, "{continuous}");
        ensure!(continuous["bases"] == 1, "{continuous}");
        Ok(())
    }
}
