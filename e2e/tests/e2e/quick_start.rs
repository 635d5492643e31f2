//! Runs the commands of `docs/quickstart.md` from the first cluster to the restore, and compares their output. The
//! steps that use the tool `kind` are skipped.

use anyhow::{Result, ensure};
use e2e::guide::Guide;
use e2e::objects::Kind;
use e2e::wait::Poll;
use e2e::{DEADLINE, Sandbox, scenario, step, until};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::ListParams;

use crate::fixtures::root;

const CLUSTER: &str = "example-etcd-cluster-durable";

/// Opens a section of the quick start. Its commands expect the namespace `etcd`, and the root of the repository as
/// current directory, so this function replaces both.
fn section(sandbox: &Sandbox, heading: &str) -> Result<Guide> {
    let namespace = format!("-n {} ", sandbox.namespace);
    let examples = format!("-f {}/examples/", root().display());
    let values = [
        ("-n etcd ", namespace.as_str()),
        ("-f examples/", examples.as_str()),
        // The flag `--watch` is removed, because a command with this flag would not end.
        (" --watch", ""),
    ];
    Guide::open(&root().join("docs/quickstart.md"), heading, &values)
}

async fn run(sandbox: &Sandbox, guide: &mut Guide, expected: &[&str]) -> Result<()> {
    let printed = guide.run(&sandbox.env).await?;
    println!("{printed}");
    for text in expected {
        ensure!(printed.contains(text), "{text:?} is missing: {printed}");
    }
    Ok(())
}

/// The names of the members' pods, including terminating pods.
async fn pod_names(sandbox: &Sandbox) -> Result<Vec<String>> {
    let selector = ListParams::default().labels(&format!("app=etcd,etcd_cluster={CLUSTER}"));
    let pods = sandbox.api::<Pod>().list(&selector).await?;
    Ok(pods.iter().map(ResourceExt::name_any).collect())
}

/// Waits until a pod in `before` is deleted and three members are ready. The quick start instructs the reader to wait
/// for this.
async fn await_replacement(sandbox: &Sandbox, before: &[String]) -> Result<()> {
    until("the pod of the lost member ends", DEADLINE, async || {
        let names = pod_names(sandbox).await?;
        Ok(if before.iter().all(|name| names.contains(name)) {
            Poll::NotYet(format!("{names:?}"))
        } else {
            Poll::Done(())
        })
    })
    .await?;
    sandbox.await_members(CLUSTER, 3).await?;
    let removed = ["MemberRemoved"];
    sandbox
        .await_event(Kind::EtcdCluster, CLUSTER, &removed)
        .await
}

async fn follow(sandbox: &Sandbox) -> Result<()> {
    let mut guide = section(sandbox, "4. Create an etcd cluster")?;
    let create = run(
        sandbox,
        &mut guide,
        &["condition met", "True", "pod/", "persistentvolumeclaim/"],
    );
    step("create a cluster", create).await?;
    let mut guide = section(sandbox, "5. Write and read a key")?;
    run(sandbox, &mut guide, &["OK\nhello\nworld\n"]).await?;
    let mut guide = section(sandbox, "6. Lose a member with its data")?;
    let before = pod_names(sandbox).await?;
    run(sandbox, &mut guide, &["deleted"]).await?;
    await_replacement(sandbox, &before).await?;
    run(sandbox, &mut guide, &["hello\nworld\n", "MemberRemoved"]).await?;
    let mut guide = section(sandbox, "7. Make a backup")?;
    let backup = run(sandbox, &mut guide, &["true", "pvc://backups/etcd/example"]);
    step("make a backup", backup).await?;
    let mut guide = section(sandbox, "8. Undo a mistake")?;
    let restore = run(sandbox, &mut guide, &["OK\n", "true", "hello\nworld\n"]);
    step("restore the backup", restore).await
}

#[tokio::test]
async fn commands_of_quick_start_print_expected_output() {
    scenario("quick_start", async |sandbox| follow(sandbox).await).await;
}
