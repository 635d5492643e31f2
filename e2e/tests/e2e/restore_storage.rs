//! No storage for a restore's seed: it is told with the remedy; a new cluster goes on when there is some, and a cluster that
//! lives stays as it was.

use anyhow::{Context, Result, ensure};
use e2e::manifests::restore_with;
use e2e::objects::{
    Kind, await_object, condition, conditions_line, field, has_condition, has_failed_for,
};
use e2e::picture::Picture;
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, Writer, scenario, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, ResourceQuota, Service};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;

use crate::fixtures::newest_version;
use crate::restore_in_place::{CLAIM, await_gone, living, over, pods_of, pods_of_cluster};
use crate::restore_sources::compare;
use crate::storage_class_change::{claims_with, with_class};

/// The EtcdRestore has failed for want of storage, with these words, and a Warning Event says so too.
async fn told(sandbox: &Sandbox, restore: &str, words: &[&str]) -> Result<()> {
    let restores = sandbox.objects(Kind::EtcdRestore);
    let what = format!("StorageMissing with {words:?}");
    await_object(&restores, restore, &what, PATIENCE, |object| {
        let failed = condition(object, "Failed");
        let message = failed.and_then(|it| it["message"].as_str());
        has_failed_for(object, "StorageMissing")
            && message.is_some_and(|message| words.iter().all(|word| message.contains(word)))
    })
    .await?;
    until("a Warning Event says so", PATIENCE, async || {
        let events = sandbox.events(Kind::EtcdRestore, restore).await?;
        let says =
            |event: &String| event.starts_with("Warning") && event.contains("StorageMissing");
        Ok(if events.iter().any(says) {
            Look::Done(())
        } else {
            Look::NotYet(format!("{events:?}"))
        })
    })
    .await
}

#[tokio::test]
async fn restore_no_storage_for_a_new_cluster_is_told_and_goes_on_when_its_class_is_there() {
    scenario("restore_no_storage_new", async |sandbox| {
        let living = living(sandbox, 1).await?;
        // The name that a class of this test's gets.
        let class = format!("late-{}", sandbox.namespace);
        let spec = claims_with(&class, "64Mi").replace('\n', "\n      ");
        let version = newest_version(&sandbox.env)?;
        let template = format!(
            "\n    name: d\n    template:\n      spec:\n        size: 1\n        version: \"{version}\"\n      {}",
            spec.trim_end()
        );
        let path = format!("{}/etcd.backup", living.bucket.name);
        let manifest = restore_with(sandbox.env.s3()?, "new", &template, &path, "");
        sandbox.apply(&manifest).await?;
        let field = "spec.pod.persistentVolumeClaimSpec.storageClassName";
        told(sandbox, "new", &[&class, "does not exist", field]).await?;

        with_class(sandbox, "late", false, async |made| {
            ensure!(made == class, "{made}");
            let restores = sandbox.objects(Kind::EtcdRestore);
            await_object(&restores, "new", "Complete", PATIENCE, |object| {
                has_condition(object, "Complete", "True")
            })
            .await?;
            compare(sandbox, "new", "d", &living.picture).await?;
            sandbox.await_members("d", 1).await.map(drop)
        })
        .await?;
        over_a_cluster_whose_class_is_gone(sandbox, &path, &class).await
    })
    .await;
}

/// A cluster that lives on the volume it has: its class is told to be missing, and nothing of it is touched.
async fn over_a_cluster_whose_class_is_gone(
    sandbox: &Sandbox,
    backup: &str,
    class: &str,
) -> Result<()> {
    let before = sandbox.await_members("d", 1).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "d").await?;
    keys.paint("later/", 20).await?;
    let (pods, picture) = (
        pods_of_cluster(sandbox, "d").await?,
        Picture::now(&keys).await?,
    );
    let s3 = sandbox.env.s3()?;
    let overwrite = "  overwrite: true\n";
    let manifest = restore_with(s3, "over", "{name: d}", backup, overwrite);
    sandbox.apply(&manifest).await?;
    let given_up = "the restore is given up";
    told(sandbox, "over", &[class, "does not exist", given_up]).await?;
    let is = Picture::now(&keys).await?;
    picture.is_of(&is).context("while it was told")?;
    let seed = left(sandbox, "d").await?;
    ensure!(!seed.is_empty(), "no seed waits for a volume");

    // That it is given up in three minutes need not be waited for.
    let restores = sandbox.objects(Kind::EtcdRestore);
    restores.delete("over", &DeleteParams::default()).await?;
    await_gone(sandbox, "over").await?;
    await_no_seed(sandbox, "d").await?;
    let after = sandbox.await_members("d", 1).await?;
    ensure!(!after.annotations().contains_key(CLAIM), "it is claimed");
    for part in ["/spec", "/status/clusterID", "/status/memberDetails/0/id"] {
        ensure!(
            field(&after, part) == field(&before, part),
            "{part} changed"
        );
    }
    let now = pods_of_cluster(sandbox, "d").await?;
    ensure!(now == pods, "pods {now:?}, and there were {pods:?}");
    picture.is_of(&Picture::now(&keys).await?)
}

/// What there is of a seed for a cluster, but for what is on its way out.
pub(crate) async fn left(sandbox: &Sandbox, cluster: &str) -> Result<Vec<String>> {
    let of_seed = ListParams::default().labels(CLAIM);
    let selector = format!("etcd_cluster={cluster}");
    let of_cluster = ListParams::default().labels(&selector);
    let members = pods_of_cluster(sandbox, cluster).await?;
    let members: Vec<String> = members.into_iter().map(|it| it.0).collect();
    let pods = sandbox.api::<Pod>().list(&of_seed).await?;
    let claims = sandbox.api::<PersistentVolumeClaim>();
    let claims = claims.list(&of_cluster).await?;
    let services = sandbox.api::<Service>();
    let services = services.list(&of_cluster).await?;
    let mut left: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
    left.extend(claims.iter().map(ResourceExt::name_any));
    left.extend(services.iter().map(ResourceExt::name_any));
    let (of_it, client) = (format!("{cluster}-"), format!("{cluster}-client"));
    left.retain(|name| name.starts_with(&of_it) && *name != client && !members.contains(name));
    Ok(left)
}

async fn await_no_seed(sandbox: &Sandbox, cluster: &str) -> Result<()> {
    until("nothing is left of the seed", PATIENCE, async || {
        let left = left(sandbox, cluster).await?;
        Ok(match left.as_slice() {
            [] => Look::Done(()),
            _ => Look::NotYet(left.join(", ")),
        })
    })
    .await
}

/// Invariant 9.
#[tokio::test]
async fn restore_no_storage_over_a_living_cluster_is_given_up_and_leaves_it_unharmed() {
    scenario("restore_no_storage_in_place", async |sandbox| {
        let living = living(sandbox, 3).await?;
        let pods = pods_of(sandbox).await?;
        let quota = json!({ "metadata": { "name": "few" }, "spec": { "hard": { "persistentvolumeclaims": "3" } } });
        let quotas = sandbox.api::<ResourceQuota>();
        let quota: ResourceQuota = serde_json::from_value(quota)?;
        quotas.create(&PostParams::default(), &quota).await?;
        // Until it is counted nobody is told what is exceeded.
        until("the quota is used up", PATIENCE, async || {
            let used = quotas.get("few").await?.status.and_then(|status| status.used);
            let used = used.and_then(|mut used| used.remove("persistentvolumeclaims"));
            Ok(match used {
                Some(used) if used.0 == "3" => Look::Done(()),
                used => Look::NotYet(format!("{used:?}")),
            })
        })
        .await?;

        let writer = Writer::start(sandbox, "c").await?;
        sandbox.apply(&over(sandbox, &living.bucket, "")?).await?;
        let field_named = "spec.pod.persistentVolumeClaimSpec";
        told(sandbox, "over", &["exceeded quota: few", field_named]).await?;
        let restores = sandbox.objects(Kind::EtcdRestore);
        let failed = await_object(&restores, "over", "given up", PATIENCE, |object| {
            field(object, "/status/phase") == "Failed" && has_failed_for(object, "StorageMissing")
        })
        .await?;
        let text = conditions_line(&failed);
        ensure!(text.contains("left as it was"), "{text}");

        let clusters = sandbox.objects(Kind::EtcdCluster);
        let after = await_object(&clusters, "c", "no claim", PATIENCE, |cluster| {
            let annotations = cluster.metadata.annotations.as_ref();
            !annotations.is_some_and(|all| all.contains_key(CLAIM))
        })
        .await?;
        ensure!(field(&after, "/status/clusterID") == field(&living.before, "/status/clusterID"));
        await_no_seed(sandbox, "c").await?;
        writer.await_more(10).await?;
        writer.finish("a restore without storage").await?;
        living.keys.verify("later/", 50).await?;
        let is = Picture::at(&living.keys, living.picture.revision).await?;
        living.picture.is_of(&is)?;
        let now = pods_of(sandbox).await?;
        ensure!(now == pods, "pods {now:?}, and there were {pods:?}");
        // The cluster operator has it again.
        sandbox.scale("c", 1).await?;
        sandbox.await_members("c", 1).await.map(drop)
    })
    .await;
}
