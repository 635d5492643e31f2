//! A mirror copies a cluster while clients write, continues after a restart of the operator, and is promoted.

use anyhow::{Context, Result, bail, ensure};
use e2e::objects::{Kind, await_object, condition, conditions_line, field, has_condition};
use e2e::store_state::StoreState;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, scenario, step, until};

use crate::backup_schedule::OPERATOR;
use crate::fixtures::cluster;

/// Number of keys before the mirror starts.
const KEYS: usize = 500;
/// Number of writes that the client makes before and after the restart of the operator.
const WRITES: usize = 100;

#[tokio::test]
async fn mirror_survives_operator_restart_and_is_promoted() {
    scenario("mirror", async |sandbox| {
        let manifests = ["old", "new"].map(|name| cluster(&sandbox.env, name, 1));
        let manifests: Vec<String> = manifests.into_iter().collect::<Result<_>>()?;
        sandbox.apply(&manifests.join("---\n")).await?;
        for name in ["old", "new"] {
            sandbox.await_members(name, 1).await?;
        }
        let source = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "old").await?;
        source.fill("copied/", KEYS, |_| ()).await?;
        step("copy all keys", copy(sandbox)).await?;
        step("restart the operator", restart(sandbox, &source)).await?;
        step("refuse other mirrors", refuse(sandbox)).await?;
        step("promote", promote(sandbox, &source)).await
    })
    .await;
}

/// The manifest of an EtcdMirror with this source and this destination.
fn mirror(name: &str, source: &str, destination: &str) -> String {
    format!(
        "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdMirror\nmetadata: {{name: {name}}}\nspec:\n  \
         source: {source}\n  destination: {destination}\n"
    )
}

async fn await_up_to_date(sandbox: &Sandbox, name: &str) -> Result<()> {
    let mirrors = sandbox.objects(Kind::EtcdMirror);
    await_object(&mirrors, name, "Ready", DEADLINE, |object| {
        has_condition(object, "Ready", "True")
    })
    .await
    .map(drop)
}

/// Waits until both clusters have the same keys with the same values.
async fn await_equal(sandbox: &Sandbox, source: &Keyspace) -> Result<()> {
    let destination = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "new").await?;
    let expected = StoreState::now(source).await?;
    until("the destination equals the source", DEADLINE, async || {
        let found = StoreState::now(&destination).await?;
        Ok(if found.values() == expected.values() {
            Poll::Done(())
        } else {
            let (found, expected) = (found.values().len(), expected.values().len());
            Poll::NotYet(format!("{found} of {expected} keys"))
        })
    })
    .await
}

async fn copy(sandbox: &Sandbox) -> Result<()> {
    let manifest = mirror(
        "copy",
        "{etcdCluster: {name: old}}",
        "{etcdCluster: {name: new}}",
    );
    sandbox.apply(&manifest).await?;
    await_up_to_date(sandbox, "copy").await?;
    let kind = Kind::EtcdMirror;
    sandbox.await_event(kind, "copy", &["CopyComplete"]).await
}

/// Restarts the operator while a client writes. The mirror continues from its checkpoint, and does not copy all keys
/// again.
async fn restart(sandbox: &Sandbox, source: &Keyspace) -> Result<()> {
    let writer = Writer::start(sandbox, "old").await?;
    writer.await_more(WRITES).await?;
    let delete = ["delete", "pod", "-l", OPERATOR, "--wait=true"];
    sandbox.kubectl(&delete).await?;
    sandbox.await_operators().await?;
    writer.await_more(WRITES).await?;
    writer.finish("the mirror").await?;
    await_equal(sandbox, source).await?;
    await_up_to_date(sandbox, "copy").await?;
    let revision = source.revision().await?;
    let mirrors = sandbox.objects(Kind::EtcdMirror);
    let found = await_object(&mirrors, "copy", "no lag", DEADLINE, |object| {
        let copied = field(object, "/status/sourceRevision").as_i64();
        *field(object, "/status/lag/revisions") == 0 && copied >= Some(revision)
    })
    .await?;
    let copy = field(&found, "/status/copy");
    ensure!(
        copy["reason"] == "Initial" && copy["complete"] == true,
        "{copy}"
    );
    Ok(())
}

/// A second mirror to the same keys is refused, and the destination of a mirror cannot be changed.
async fn refuse(sandbox: &Sandbox) -> Result<()> {
    let source = "{etcdEndpoints: [\"http://old-client:2379\"], prefix: copied/}";
    let second = mirror("second", source, "{etcdCluster: {name: new}}");
    sandbox.apply(&second).await?;
    let mirrors = sandbox.objects(Kind::EtcdMirror);
    let refused = await_object(&mirrors, "second", "Stalled", DEADLINE, |object| {
        has_condition(object, "Stalled", "True")
    })
    .await?;
    let stalled = condition(&refused, "Stalled").context("no condition Stalled")?;
    let message = stalled["message"].as_str().unwrap_or_default();
    let expected = format!("EtcdMirror {}/copy", sandbox.namespace);
    ensure!(
        stalled["reason"] == "Conflict" && message.contains(&expected),
        "{}",
        conditions_line(&refused)
    );
    let patch = r#"{"spec":{"destination":{"etcdCluster":{"name":"old"}}}}"#;
    let patch = ["patch", "etcdmirror", "copy", "--type=merge", "-p", patch];
    match sandbox.kubectl(&patch).await {
        Ok(_) => bail!("the destination was changed"),
        Err(error) => {
            let text = format!("{error:#}");
            ensure!(text.contains("cannot be changed"), "{text}");
        }
    }
    let delete = ["delete", "etcdmirror", "second", "--timeout=60s"];
    sandbox.kubectl(&delete).await.map(drop)
}

/// After the deletion of the EtcdMirror, the destination keeps its keys, and gets no further changes.
async fn promote(sandbox: &Sandbox, source: &Keyspace) -> Result<()> {
    let destination = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "new").await?;
    let before = StoreState::now(&destination).await?;
    ensure!(before.has_checkpoint(), "the mirror has no checkpoint");
    let delete = ["delete", "etcdmirror", "copy", "--timeout=60s"];
    sandbox.kubectl(&delete).await?;
    let kind = Kind::EtcdMirror;
    sandbox.await_event(kind, "copy", &["Promoted"]).await?;
    source.fill("late/", 10, |_| ()).await?;
    destination.fill("own/", 10, |_| ()).await?;
    let after = StoreState::now(&destination).await?;
    ensure!(!after.has_checkpoint(), "the checkpoint still exists");
    let values = after.values();
    ensure!(
        values.keys().all(|key| !key.starts_with(b"late/")),
        "the promoted cluster has changes of the source"
    );
    ensure!(values.len() == before.values().len() + 10, "keys are lost");
    destination.verify("copied/", KEYS).await.map(drop)
}
