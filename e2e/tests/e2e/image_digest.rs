//! `spec.image` pins the image of the members by digest. The registries of this test do not exist. Instead of pushing
//! images, the test gives images on the nodes the names of these registries.

mod full {
    use std::fmt::Write as _;

    use anyhow::{Context, Result, ensure};
    use e2e::objects::{Kind, await_object, condition, field, members};
    use e2e::wait::Poll;
    use e2e::{DEADLINE, Sandbox, Testbed, Writer, cluster_scenario, step, until};
    use kube::api::DynamicObject;
    use serde_json::json;

    use crate::fixtures::DURABLE;
    use crate::upgrade::{WRITE_INTERVAL, await_version, change, manifest};

    /// The registries of the test. Images with these names exist only on the nodes.
    const MIRRORS: [&str; 2] = ["one.testbed/etcd", "two.testbed/etcd"];

    /// Gives the image of this etcd version the names `MIRROR@DIGEST` on all nodes. Returns the digest.
    async fn digest_of(sandbox: &Sandbox, version: &str) -> Result<String> {
        let testbed = Testbed::of(sandbox)?;
        let name = format!("quay.io/coreos/etcd:v{version}");
        let mut script = String::new();
        for node in testbed.nodes() {
            let ctr = format!("ctr -a /run/{node}/containerd.sock -n k8s.io images");
            writeln!(
                script,
                "digest=$({ctr} ls name=={name} | awk 'NR == 2 {{print $3}}')"
            )?;
            for mirror in MIRRORS {
                writeln!(
                    script,
                    "{ctr} tag --local --force {name} {mirror}@$digest >/dev/null"
                )?;
            }
            script.push_str("echo $digest\n");
        }
        let printed = testbed.script(&script).await?;
        let digest = printed.lines().next().context("there are no nodes")?.trim();
        ensure!(
            digest.starts_with("sha256:") && printed.lines().all(|line| line.trim() == digest),
            "the nodes have different images: {printed}"
        );
        Ok(digest.to_owned())
    }

    /// The number of members whose pod has this image.
    async fn count_of(sandbox: &Sandbox, image: &str) -> Result<usize> {
        let pods = sandbox.member_pods("c").await?;
        let specs = pods.iter().filter_map(|pod| pod.spec.as_ref());
        let images = specs.filter_map(|spec| spec.containers.first()?.image.as_deref());
        Ok(images.filter(|one| *one == image).count())
    }

    /// Waits until all members run this image and this version.
    async fn await_image(sandbox: &Sandbox, image: &str, version: &str) -> Result<()> {
        until("all members have the image", DEADLINE, async || {
            let count = count_of(sandbox, image).await?;
            Ok(if count == 3 {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{count} members have {image}"))
            })
        })
        .await?;
        await_version(sandbox, "c", 3, version).await.map(drop)
    }

    /// Waits until the cluster is healthy, and then sets version and image.
    async fn is_changed(sandbox: &Sandbox, image: &str, version: &str) -> Result<()> {
        let before = sandbox.await_members("c", 3).await?;
        is_set(sandbox, &before, (image, version)).await
    }

    /// Sets version and image, and waits until all members run them. Ensures that the members are the same as in
    /// `before`.
    async fn is_set(
        sandbox: &Sandbox,
        before: &DynamicObject,
        (image, version): (&str, &str),
    ) -> Result<()> {
        let spec = json!({ "version": version, "image": image });
        change(sandbox, "c", spec).await?;
        await_image(sandbox, image, version).await?;
        let after = sandbox.await_members("c", 3).await?;
        ensure!(members(&after) == members(before), "the members changed");
        Ok(())
    }

    /// Waits until the rollout has stopped for this reason, with this text in the message. Ensures that only one member
    /// has the image.
    async fn await_stopped(sandbox: &Sandbox, reason: &str, text: &str, image: &str) -> Result<()> {
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(&clusters, "c", reason, DEADLINE, |object| {
            condition(object, "Upgrading").is_some_and(|found| {
                let message = found["message"].as_str().unwrap_or_default();
                found["reason"] == reason && message.contains(text)
            })
        })
        .await?;
        sandbox
            .await_event(Kind::EtcdCluster, "c", &["Warning", reason])
            .await?;
        let count = count_of(sandbox, image).await?;
        ensure!(count == 1, "{count} members have {image}");
        Ok(())
    }

    /// Sets a digest that does not exist, waits until the rollout stops, and sets the previous image again.
    async fn missing_digest(sandbox: &Sandbox, image: &str, version: &str) -> Result<()> {
        let before = sandbox.await_members("c", 3).await?;
        let missing = format!("{}@sha256:{}", MIRRORS[0], "0".repeat(64));
        change(sandbox, "c", json!({ "image": missing })).await?;
        await_stopped(sandbox, "UpgradeStopped", image, &missing).await?;
        is_set(sandbox, &before, (image, version)).await
    }

    /// Sets the image of `version` together with another version, waits until the rollout stops, and then corrects the
    /// version.
    async fn wrong_version(
        sandbox: &Sandbox,
        image: &str,
        (version, wrong): (&str, &str),
    ) -> Result<()> {
        let before = sandbox.await_members("c", 3).await?;
        change(sandbox, "c", json!({ "version": wrong, "image": image })).await?;
        await_stopped(sandbox, "VersionMismatch", version, image).await?;
        is_set(sandbox, &before, (image, version)).await
    }

    /// Changes the registry and the version of a pinned image. No write of a client with retries fails while the
    /// members change their image.
    #[tokio::test]
    async fn image_pinned_by_digest_changes_without_failed_writes() {
        cluster_scenario("image_digest", async |sandbox| {
            let (old, new) = sandbox.env.oldest_and_newest_of("3.5")?;
            let (old_digest, new_digest) = (
                digest_of(sandbox, &old).await?,
                digest_of(sandbox, &new).await?,
            );
            let [first, second] = MIRRORS.map(|mirror| format!("{mirror}@{old_digest}"));
            let upgraded = format!("{}@{new_digest}", MIRRORS[0]);
            let image = format!("  image: {first}\n{DURABLE}");
            sandbox.apply(&manifest("c", 3, &old, &image)).await?;
            await_image(sandbox, &first, &old).await?;
            let writer = Writer::start_retrying(sandbox, "c", WRITE_INTERVAL).await?;
            step(
                "move to another registry",
                is_changed(sandbox, &second, &old),
            )
            .await?;
            step("upgrade", is_changed(sandbox, &upgraded, &new)).await?;
            step("roll back", is_changed(sandbox, &first, &old)).await?;
            step(
                "set a missing digest",
                missing_digest(sandbox, &first, &old),
            )
            .await?;
            let wrong = wrong_version(sandbox, &second, (&old, &new));
            step("set a wrong version", wrong).await?;
            let tag = format!("quay.io/coreos/etcd:v{old}");
            step("remove the digest", async {
                change(sandbox, "c", json!({ "image": null })).await?;
                await_image(sandbox, &tag, &old).await
            })
            .await?;
            let object = sandbox.await_members("c", 3).await?;
            ensure!(field(&object, "/status/currentVersion") == old.as_str());
            let tally = writer.finish("changes of the image").await?;
            ensure!(tally.unknown == 0, "failed writes: {tally}");
            Ok(())
        })
        .await;
    }
}
