//! etcd is compacted while the agent of a continuous backup does not run. The missing revisions are reported as a gap,
//! and the agent continues with a new base.

mod full {
    use anyhow::{Context, Result, ensure};
    use e2e::bucket::Bucket;
    use e2e::manifests::aws_secret;
    use e2e::objects::{Kind, condition, field};
    use e2e::recording::Chain;
    use e2e::{Keyspace, Recording, Sandbox, Writer, scenario, step};
    use kube::ResourceExt;

    use crate::fixtures::cluster;

    #[tokio::test]
    async fn compaction_without_agent_is_reported_as_gap() {
        scenario("continuous_compacted", async |sandbox| {
            let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
            sandbox.apply(&aws_secret(sandbox.env.s3()?, "aws")).await?;
            sandbox.apply(&cluster(&sandbox.env, "c", 1)?).await?;
            sandbox.await_members("c", 1).await?;
            let recording = Recording::start(sandbox, &bucket, "gap", "c").await?;
            let writer = Writer::start(sandbox, "c").await?;
            writer.await_more(50).await?;

            let agent = deployment(&recording).await?;
            scale(sandbox, &agent, 0).await?;
            recording.await_agents(0).await?;
            // The agent stores all received changes before it exits, so `after` is the last stored revision.
            let after = recording.revision().await?;
            writer.await_more(50).await?;
            let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
            let compacted = keys.revision().await?;
            ensure!(compacted > after, "{compacted}, {after} is stored");
            keys.compact(compacted).await?;

            scale(sandbox, &agent, 1).await?;
            let reported = gap_is_reported(sandbox, &recording, (after, compacted));
            let until = step("report the gap", reported).await?;
            writer.await_more(50).await?;
            writer.finish("etcd was compacted").await?;
            let revision = keys.revision().await?;
            recording.await_revision(revision).await?;
            let chains = recording.chains().await?;
            let expected = [(recorded_base(&chains)?, after), (until, revision)];
            let expected = expected.map(|(base, last)| Chain { base, last });
            ensure!(chains == expected, "{chains:?}, expected {expected:?}");
            Ok(())
        })
        .await;
    }

    /// The revision of the first base.
    fn recorded_base(chains: &[Chain]) -> Result<i64> {
        Ok(chains.first().context("no base")?.base)
    }

    /// The name of the agent's Deployment.
    async fn deployment(recording: &Recording<'_>) -> Result<String> {
        let agents = recording.agents().await?;
        let pod = agents.first().context("no agent")?.name_any();
        // The name of the pod consists of the name of the Deployment and two suffixes: one from the Deployment, and one
        // from the ReplicaSet.
        let name = pod.rsplitn(3, '-').nth(2).context("no suffixes")?;
        Ok(format!("deployment/{name}"))
    }

    async fn scale(sandbox: &Sandbox, deployment: &str, replicas: usize) -> Result<()> {
        let replicas = format!("--replicas={replicas}");
        let words = ["scale", deployment, &replicas];
        sandbox.kubectl(&words).await.map(drop)
    }

    /// Waits until the status and an Event report the gap. The revisions after `after` are missing, at least up to
    /// `compacted`. Returns the revision of the next base.
    async fn gap_is_reported(
        sandbox: &Sandbox,
        recording: &Recording<'_>,
        (after, compacted): (i64, i64),
    ) -> Result<i64> {
        recording
            .await_status("a gap", |object| {
                field(object, "/status/continuous/gapCount") == 1
            })
            .await?;
        // The operator writes the condition `Recording` and the gap in the same update of the status.
        let object = recording.await_condition("True").await?;
        let continuous = field(&object, "/status/continuous");
        let gap = &continuous["gaps"][0];
        ensure!(
            gap["afterRevision"] == after,
            "{continuous}, {after} is stored"
        );
        ensure!(gap["clusterChanged"] != true, "{continuous}");
        let until = gap["untilRevision"].as_i64().context("no untilRevision")?;
        ensure!(until >= compacted, "{continuous}, {compacted} is compacted");
        ensure!(continuous["base"]["revision"] == until, "{continuous}");
        ensure!(continuous["bases"] == 2, "{continuous}");
        let found = condition(&object, "Recording").context("no condition")?;
        let message = found["message"].as_str().unwrap_or_default();
        ensure!(
            message.contains("number of gaps in the store: 1"),
            "{message}"
        );
        let missing = [
            "Warning ChangesMissing",
            &format!("after revision {after} and"),
            &format!("of revision {until} "),
        ];
        sandbox
            .await_event(Kind::EtcdBackup, "gap", &missing)
            .await?;
        Ok(until)
    }
}
