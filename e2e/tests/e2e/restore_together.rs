//! Several restores at once: into clusters of their own, and over one and the same.

use anyhow::{Context, Result, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::restore_with;
use e2e::objects::{
    Kind, await_complete, await_object, conditions_line, field, has_condition, has_failed_for,
};
use e2e::picture::Picture;
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Sandbox, scenario, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};

use crate::backup_restore_s3::backup;
use crate::fixtures::{DURABLE, cluster_with};
use crate::restore_in_place::CLAIM;
use crate::restore_sources::{compare, painted};

/// A cluster of one member with a volume, and two backups of it that differ: `early` and `late`, each with what is in it.
struct Backups {
    bucket: Bucket,
    cluster: DynamicObject,
    pictures: [(&'static str, Picture); 2],
}

async fn two_backups(sandbox: &Sandbox) -> Result<Backups> {
    let manifest = cluster_with(&sandbox.env, "c", 1, DURABLE)?;
    let (bucket, keys) = painted(sandbox, &manifest, 1).await?;
    let cluster = sandbox.await_members("c", 1).await?;
    let early = back_up(sandbox, &bucket, &keys, "early").await?;
    keys.delete("painted/0001").await?;
    keys.paint("more/", 30).await?;
    let late = back_up(sandbox, &bucket, &keys, "late").await?;
    Ok(Backups {
        bucket,
        cluster,
        pictures: [("early", early), ("late", late)],
    })
}

async fn back_up(
    sandbox: &Sandbox,
    bucket: &Bucket,
    keys: &Keyspace,
    name: &str,
) -> Result<Picture> {
    let picture = Picture::now(keys).await?;
    let manifest = backup(sandbox, name, &bucket.name, name)?;
    sandbox.apply(&manifest).await?;
    await_complete(&sandbox.objects(Kind::EtcdBackup), name, PATIENCE).await?;
    Ok(picture)
}

/// Restores in one go, each with the name of its backup, into that cluster.
async fn restore_both(sandbox: &Sandbox, backups: &Backups, into: &str, more: &str) -> Result<()> {
    let s3 = sandbox.env.s3()?;
    let manifests = backups.pictures.iter().map(|(name, _)| {
        let path = format!("{}/{name}", backups.bucket.name);
        restore_with(s3, name, &format!("{{name: {into}}}"), &path, more)
    });
    let manifests: Vec<String> = manifests.collect();
    sandbox.apply(&manifests.join("---\n")).await.map(drop)
}

/// The EtcdRestore when nothing of it goes on any more.
async fn ended(sandbox: &Sandbox, name: &str) -> Result<DynamicObject> {
    let restores = sandbox.objects(Kind::EtcdRestore);
    await_object(&restores, name, "its end", PATIENCE, |object| {
        has_condition(object, "Complete", "True") || field(object, "/status/phase") == "Failed"
    })
    .await
}

/// It was refused in favour of the other one, which it names as the cause, and is in nobody's way.
fn was_refused(refused: &DynamicObject, why: &[&str]) -> Result<()> {
    let said = conditions_line(refused);
    ensure!(has_failed_for(refused, "ClusterExists"), "{said}");
    ensure!(why.iter().any(|why| said.contains(why)), "{said}");
    let finalizers = refused.finalizers();
    ensure!(finalizers.is_empty(), "{finalizers:?} are left");
    Ok(())
}

/// Of the seed that this restore would have made, or has made, nothing is left.
async fn await_no_seed(sandbox: &Sandbox, restore: &DynamicObject) -> Result<()> {
    let Some(seed) = field(restore, "/status/seed/member").as_str() else {
        return Ok(());
    };
    until(
        &format!("nothing is left of {seed}"),
        PATIENCE,
        async || {
            let pod = sandbox.api::<Pod>().get_opt(seed).await?.is_some();
            let claims = sandbox.api::<PersistentVolumeClaim>();
            let claims = claims.list(&ListParams::default()).await?;
            let claim = claims.iter().any(|claim| claim.name_any().contains(seed));
            let service = sandbox.api::<Service>().get_opt(seed).await?.is_some();
            Ok(if pod || claim || service {
                Look::NotYet(format!("pod {pod}, claim {claim}, Service {service}"))
            } else {
                Look::Done(())
            })
        },
    )
    .await
}

/// One member, one volume, no claim, one cluster ID wherever it is asked for; and exactly this backup.
async fn holds_one_of_them(
    sandbox: &Sandbox,
    cluster: &str,
    winner: &DynamicObject,
    backups: &Backups,
) -> Result<DynamicObject> {
    let id = field(winner, "/status/clusterID").as_str();
    let id = id.context("no cluster ID is recorded")?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    // The cluster operator tells of the one before until it has looked.
    await_object(&clusters, cluster, "the restored one", PATIENCE, |object| {
        field(object, "/status/clusterID") == id && !object.annotations().contains_key(CLAIM)
    })
    .await?;
    let is = sandbox.await_members(cluster, 1).await?;
    ensure!(field(&is, "/status/clusterID") == id);
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, cluster).await?;
    ensure!(format!("{:x}", keys.cluster_id().await?) == id);
    let name = winner.name_any();
    let picture = backups.pictures.iter().find(|(of, _)| *of == name);
    let (_, picture) = picture.context("it is neither")?;
    let restored = Picture::at(&keys, picture.revision).await?;
    picture.is_of(&restored)?;
    ensure!(keys.revision().await? == picture.revision);
    let selector = ListParams::default().labels(&format!("etcd_cluster={cluster}"));
    until("one pod and one volume", PATIENCE, async || {
        let pods = sandbox.api::<Pod>().list(&selector).await?.items.len();
        let volumes = sandbox.api::<PersistentVolumeClaim>();
        let volumes = volumes.list(&selector).await?.items.len();
        Ok(match (pods, volumes) {
            (1, 1) => Look::Done(()),
            (pods, volumes) => Look::NotYet(format!("{pods} pods, {volumes} volumes")),
        })
    })
    .await?;
    Ok(is)
}

#[tokio::test]
async fn restore_several_at_once_make_a_cluster_each() {
    scenario("restore_several_at_once", async |sandbox| {
        let manifest = cluster_with(&sandbox.env, "c", 1, "")?;
        let (bucket, keys) = painted(sandbox, &manifest, 1).await?;
        let before = back_up(sandbox, &bucket, &keys, "first").await?;
        let s3 = sandbox.env.s3()?;
        let path = format!("{}/first", bucket.name);
        let named = [("a-tuesday", "d"), ("again", "e"), ("c", "f")];
        let manifests = named.map(|(name, target)| {
            restore_with(s3, name, &format!("{{name: {target}}}"), &path, "")
        });
        sandbox.apply(&manifests.join("---\n")).await?;
        let mut ids = vec![format!("{:x}", keys.cluster_id().await?)];
        let mut times = Vec::new();
        for (name, target) in named {
            let done = compare(sandbox, name, target, &before).await?;
            sandbox.await_members(target, 1).await?;
            let told = |pointer| field(&done, pointer).as_str().map(str::to_owned);
            ids.push(told("/status/clusterID").context("no cluster ID")?);
            times.push((told("/status/startTime"), told("/status/completionTime")));
            // Each goes its own way.
            let own = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, target).await?;
            own.fill(&format!("{target}/"), 5, |_| ()).await?;
        }
        for (_, target) in named {
            let own = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, target).await?;
            for (_, other) in named {
                let count = if other == target { 5 } else { 0 };
                own.verify(&format!("{other}/"), count).await?;
            }
        }
        ids.sort();
        ids.dedup();
        ensure!(ids.len() == 4, "{ids:?}");
        // None waited for the end of another one.
        let last = times.iter().map(|(start, _)| start).max();
        let first = times.iter().map(|(_, end)| end).min();
        ensure!(last <= first, "one after the other: {times:?}");
        // The cluster the backup is of is what it was.
        before.is_of(&Picture::now(&keys).await?)
    })
    .await;
}

#[tokio::test]
async fn restore_two_on_one_target_make_one_whole_cluster() {
    scenario("restore_two_on_one_target", async |sandbox| {
        let backups = two_backups(sandbox).await?;
        restore_both(sandbox, &backups, "d", "").await?;
        let early = ended(sandbox, "early").await?;
        let late = ended(sandbox, "late").await?;
        let is_complete = |object: &DynamicObject| has_condition(object, "Complete", "True");
        let (winner, loser) = match (is_complete(&early), is_complete(&late)) {
            (true, false) => (early, late),
            (false, true) => (late, early),
            _ => anyhow::bail!("{}, {}", conditions_line(&early), conditions_line(&late)),
        };
        was_refused(&loser, &["another EtcdRestore", "exists"])?;
        await_no_seed(sandbox, &loser).await?;
        holds_one_of_them(sandbox, "d", &winner, &backups).await?;
        // Whoever was refused is done: it owns nothing, and nothing goes with it.
        let gone = ["delete", "etcdrestore", &loser.name_any()];
        sandbox.kubectl(&gone).await?;
        holds_one_of_them(sandbox, "d", &winner, &backups)
            .await
            .map(drop)
    })
    .await;
}

#[tokio::test]
async fn restore_two_on_one_target_that_lives_leave_one_of_them_whole() {
    scenario("restore_two_over_one", async |sandbox| {
        let backups = two_backups(sandbox).await?;
        restore_both(sandbox, &backups, "c", "  overwrite: true\n").await?;
        let both = [
            ended(sandbox, "early").await?,
            ended(sandbox, "late").await?,
        ];
        let (mut complete, refused): (Vec<_>, Vec<_>) = both
            .into_iter()
            .partition(|object| has_condition(object, "Complete", "True"));
        // One that looked when the other one was done has replaced what that had made.
        complete.sort_by_key(|one| {
            let replaces = field(one, "/status/replaces/clusterID");
            replaces != field(&backups.cluster, "/status/clusterID")
        });
        let said: Vec<String> = refused.iter().map(conditions_line).collect();
        let winner = complete.pop().with_context(|| format!("none: {said:?}"))?;
        for loser in &refused {
            was_refused(loser, &["is being restored by another EtcdRestore"])?;
        }
        for other in complete.iter().chain(&refused) {
            await_no_seed(sandbox, other).await?;
        }
        let is = holds_one_of_them(sandbox, "c", &winner, &backups).await?;
        ensure!(is.metadata.uid == backups.cluster.metadata.uid, "made anew");
        ensure!(field(&is, "/spec") == field(&backups.cluster, "/spec"));
        let before = field(&backups.cluster, "/status/clusterID");
        ensure!(field(&is, "/status/clusterID") != before);
        Ok(())
    })
    .await;
}
