//! The store of a continuous backup stops for a while, and clients write during the outage. The status reports the
//! delay, and after the outage no change is missing in the store.

/// The store serves the backups of all tests, so this test runs while no other test runs.
mod alone {
    mod full {
        use anyhow::{Context, Result, ensure};
        use e2e::bucket::Bucket;
        use e2e::manifests::aws_secret;
        use e2e::objects::{Kind, condition, field};
        use e2e::{Keyspace, Recording, Sandbox, Testbed, Writer, scenario, step};

        use crate::fixtures::cluster;

        /// The daemon of the S3 server.
        const STORE: &str = "versitygw";
        /// The maximum lag in seconds. If the lag is longer, the condition `Recording` is False.
        const MAX_LAG: i64 = 60;

        #[tokio::test]
        async fn store_outage_delays_recording_without_gap() {
            scenario("continuous_store_away", async |sandbox| {
                Testbed::with_faults(sandbox, async |testbed| {
                    let s3 = sandbox.env.s3()?;
                    let bucket = Bucket::create(s3, &sandbox.namespace).await?;
                    sandbox.apply(&aws_secret(s3, "aws")).await?;
                    sandbox.apply(&cluster(&sandbox.env, "c", 3)?).await?;
                    sandbox.await_members("c", 3).await?;
                    let recording = Recording::start(sandbox, &bucket, "away", "c").await?;
                    let writer = Writer::start(sandbox, "c").await?;
                    writer.await_more(50).await?;
                    let before = recording.revision().await?;

                    testbed.stop_daemon(STORE).await?;
                    let delayed = delay_is_reported(sandbox, &recording, before);
                    step("report the delay", delayed).await?;
                    writer.await_more(50).await?;
                    testbed.start_daemon(STORE).await?;

                    recording.await_condition("True").await?;
                    writer.finish("the store was stopped").await?;
                    let complete = nothing_is_missing(sandbox, &recording);
                    step("compare the store with etcd", complete).await
                })
                .await
            })
            .await;
        }

        /// Waits until the condition `Recording` and an Event report the delay. `before` is a revision before the
        /// outage.
        async fn delay_is_reported(
            sandbox: &Sandbox,
            recording: &Recording<'_>,
            before: i64,
        ) -> Result<()> {
            let object = recording.await_condition("False").await?;
            let found = condition(&object, "Recording").context("no condition")?;
            ensure!(found["reason"] == "RecordingDelayed", "{found}");
            let message = found["message"].as_str().unwrap_or_default();
            ensure!(message.contains("cannot be stored in s3://"), "{message}");
            let continuous = field(&object, "/status/continuous");
            let number = |field: &str| continuous[field].as_i64().unwrap_or_default();
            ensure!(number("lagSeconds") > MAX_LAG, "{continuous}");
            ensure!(number("lagRevisions") > 0, "{continuous}");
            ensure!(number("revision") >= before, "{continuous}");
            sandbox
                .await_event(Kind::EtcdBackup, "away", &["Warning RecordingDelayed"])
                .await
        }

        /// Ensures that one chain contains all revisions since the base.
        async fn nothing_is_missing(sandbox: &Sandbox, recording: &Recording<'_>) -> Result<()> {
            let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
            let revision = keys.revision().await?;
            recording.await_revision(revision).await?;
            let chains = recording.chains().await?;
            let [chain] = chains.as_slice() else {
                anyhow::bail!("{chains:?}");
            };
            ensure!(chain.last == revision, "{chain:?}, etcd has {revision}");
            let reported = |continuous: &serde_json::Value| continuous["revision"] == revision;
            let object = recording
                .await_status("the status has the last revision", |object| {
                    reported(field(object, "/status/continuous"))
                })
                .await?;
            let continuous = field(&object, "/status/continuous");
            ensure!(continuous["gapCount"] == 0, "{continuous}");
            ensure!(continuous["bases"] == 1, "{continuous}");
            ensure!(continuous["lagRevisions"] == 0, "{continuous}");
            Ok(())
        }
    }
}
