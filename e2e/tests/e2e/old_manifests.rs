//! Manifests written for coreos/etcd-operator v0.9.4 are accepted unchanged.

use anyhow::{Context, ensure};
use e2e::objects::{Kind, field};
use e2e::{Keyspace, PATIENCE, cluster_scenario};

use crate::fixtures::{manifests, newest_version};

#[tokio::test]
async fn old_manifests_are_accepted_unchanged() {
    cluster_scenario("old_manifests", async |sandbox| {
        let mut seen = 0;
        for path in manifests("e2e/fixtures/v0.9.4")? {
            let manifest = std::fs::read_to_string(&path)?;
            let namespace = sandbox.namespace.as_str();
            let arguments = ["-n", namespace, "apply", "--dry-run=server", "-f", "-"];
            let printed = e2e::kubectl::run_with_input(&sandbox.env, &arguments, Some(&manifest))
                .await
                .with_context(|| format!("{}", path.display()))?;
            ensure!(printed.contains("created"), "{}: {printed}", path.display());
            seen += 1;
        }
        ensure!(seen >= 5, "only {seen} old manifests");
        Ok(())
    })
    .await;
}

/// The first example of the old project runs; only its version, of which no image is at hand, is another.
#[tokio::test]
async fn the_old_example_cluster_runs() {
    cluster_scenario("old_example", async |sandbox| {
        let path = crate::fixtures::root().join("e2e/fixtures/v0.9.4/example-etcd-cluster.yaml");
        let old = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        ensure!(
            old.contains("3.2.13"),
            "the fixture does not name the old version any more"
        );
        sandbox.apply(&old).await?;
        // 3.2 is accepted, and said to be untested.
        let clusters = sandbox.objects(Kind::EtcdCluster);
        e2e::objects::await_object(
            &clusters,
            "example-etcd-cluster",
            "a word on 3.2.13",
            PATIENCE,
            |object| e2e::objects::conditions_line(object).contains("3.2.13"),
        )
        .await?;
        let manifest = old.replace("3.2.13", &newest_version(&sandbox.env)?);
        sandbox.apply(&manifest).await?;
        let object = sandbox.await_members("example-etcd-cluster", 3).await?;
        ensure!(field(&object, "/status/serviceName") == "example-etcd-cluster-client");
        // What clients of the old operator knew: two Services by name, pods by label.
        let services = sandbox.kubectl(&["get", "services", "-o", "name"]).await?;
        for name in [
            "service/example-etcd-cluster\n",
            "service/example-etcd-cluster-client\n",
        ] {
            ensure!(services.contains(name), "{services}");
        }
        let pods = sandbox.member_pods("example-etcd-cluster").await?;
        ensure!(pods.len() == 3, "{} pods", pods.len());
        Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "example-etcd-cluster")
            .await?
            .fill("k/", 10, |_| ())
            .await?;
        let listed = sandbox.kubectl(&["get", "etcd"]).await?;
        ensure!(
            listed.contains("example-etcd-cluster"),
            "short name: {listed}"
        );
        Ok(())
    })
    .await;
}
