//! The recovery point of a continuous backup: acknowledged writes that are missing in the store if the whole cluster is
//! lost at a random moment.
//!
//! The names of the segments contain their revisions, so the newest revision in the store is known from one listing.

mod full {
    use std::io::Write as _;
    use std::time::{Duration, Instant, SystemTime};

    use anyhow::{Context, Result, ensure};
    use e2e::bucket::Bucket;
    use e2e::manifests::{aws_secret, backup_with};
    use e2e::objects::{Kind, await_object, field, has_condition, is_ready};
    use e2e::wait::Poll;
    use e2e::{DEADLINE, Sandbox, Testbed, Writer, scenario, until};
    use k8s_openapi::api::core::v1::Pod;
    use kube::api::{DynamicObject, ListParams};

    use crate::all_pods_lost::await_restarts;
    use crate::fixtures::cluster;

    const FLUSH_INTERVAL: Duration = Duration::from_secs(1);
    /// Time for the upload of a segment, in addition to the interval.
    const UPLOAD: Duration = Duration::from_millis(500);
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
            let path = format!("{}/etcd/rpo", bucket.name);
            let more = "  continuous: {flushInterval: 1s}\n";
            let manifest = backup_with(sandbox.env.s3()?, "rpo", "c", &path, more);
            sandbox.apply(&manifest).await?;
            let object = recording(sandbox).await?;
            let location = field(&object, "/status/continuous/location");
            let location = location.as_str().context("the location")?;
            let prefix = format!("s3://{}/", bucket.name);
            let prefix = location.strip_prefix(&prefix).context(prefix.clone())?;

            let writer = Writer::start(sandbox, "c").await?;
            writer.await_more(50).await?;
            let samples = sample(&bucket, prefix, &writer).await?;
            // Of 100 sorted samples, the second largest is the 99th percentile.
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
                kill(sandbox, &testbed, &bucket, prefix, &writer).await?;
            }
            writer
                .finish("all members and the agent were killed")
                .await?;
            ends_without_gap(sandbox, &bucket, prefix).await
        })
        .await;
    }

    /// Waits until the condition `Recording` is True.
    async fn recording(sandbox: &Sandbox) -> Result<DynamicObject> {
        let backups = sandbox.objects(Kind::EtcdBackup);
        await_object(&backups, "rpo", "Recording=True", DEADLINE, |object| {
            has_condition(object, "Recording", "True")
        })
        .await
    }

    /// The newest revision in the names of the segments.
    async fn stored_revision(bucket: &Bucket, prefix: &str) -> Result<i64> {
        let keys = bucket.keys().await?;
        ensure!(keys.len() < 1000, "the listing has only its first page");
        let names = keys.iter().filter_map(|key| key.strip_prefix(prefix));
        let last = names.filter_map(|name| {
            let segment = name.strip_suffix(".segment")?.rsplit('/').next()?;
            segment.split('-').nth(1)?.parse().ok()
        });
        last.max().context("the store has no segment")
    }

    /// A pause of up to 1.2 s, so that the samples are spread over the interval of the segments.
    async fn pause() -> Result<()> {
        let nanos = SystemTime::UNIX_EPOCH.elapsed()?.subsec_nanos();
        let pause = Duration::from_micros(u64::from(nanos) % 1_200_000);
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// The recovery points at random moments, in ascending order: if everything fails at this moment, the writes of
    /// this time are lost. A segment that is stored during the listing counts as stored.
    async fn sample(bucket: &Bucket, prefix: &str, writer: &Writer) -> Result<Vec<Duration>> {
        let mut points = Vec::new();
        while points.len() < SAMPLES {
            pause().await?;
            let at = Instant::now();
            let revision = stored_revision(bucket, prefix).await?;
            let (_, point) = writer.newer_than(revision, at);
            points.push(point);
        }
        points.sort();
        Ok(points)
    }

    /// Kills all members and the agent at once, and compares the store with the acknowledged writes. Then waits until
    /// the cluster and the agent continue.
    async fn kill(
        sandbox: &Sandbox,
        testbed: &Testbed<'_>,
        bucket: &Bucket,
        prefix: &str,
        writer: &Writer,
    ) -> Result<()> {
        let mut pods = sandbox.member_pods("c").await?;
        pods.extend(agents(sandbox).await?);
        ensure!(pods.len() == 4, "{} pods", pods.len());
        pause().await?;
        testbed.kill_containers(&pods).await?;
        let at = Instant::now();
        let revision = stored_revision(bucket, prefix).await?;
        let (count, point) = writer.newer_than(revision, at);
        let report = format!("{count} acknowledged writes of {point:?} were not stored");
        let _ = writeln!(std::io::stderr(), "    killed: {report}");
        ensure!(point <= FLUSH_INTERVAL + UPLOAD, "{report}");
        await_restarts(sandbox, &pods).await?;
        sandbox.await_members("c", 3).await?;
        writer.await_more(50).await?;
        until("the agent is ready", DEADLINE, async || {
            let agents = agents(sandbox).await?;
            Ok(if agents.len() == 1 && agents.iter().all(is_ready) {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{} agents", agents.len()))
            })
        })
        .await
    }

    /// The pods of the agent.
    async fn agents(sandbox: &Sandbox) -> Result<Vec<Pod>> {
        let own = ListParams::default().labels("etcd.database.coreos.com/backup-uid");
        Ok(sandbox.api::<Pod>().list(&own).await?.items)
    }

    /// Ensures that the agent has stored all changes of the cluster, in one chain without a gap.
    async fn ends_without_gap(sandbox: &Sandbox, bucket: &Bucket, prefix: &str) -> Result<()> {
        let keys = e2e::Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
        let revision = keys.revision().await?;
        until("all revisions are stored", DEADLINE, async || {
            let stored = stored_revision(bucket, prefix).await?;
            Ok(if stored >= revision {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{stored} of {revision}"))
            })
        })
        .await?;
        let object = recording(sandbox).await?;
        let continuous = field(&object, "/status/continuous");
        ensure!(continuous["gapCount"] == 0, "{continuous}");
        ensure!(continuous["bases"] == 1, "{continuous}");
        Ok(())
    }
}
