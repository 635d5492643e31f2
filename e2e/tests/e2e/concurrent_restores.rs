//! Two EtcdRestores restore into the same cluster at the same time: into a new cluster, then in place.
//! `restore_sources.rs` calls these functions.

use anyhow::{Context, Result, bail, ensure};
use e2e::manifests::restore_with;
use e2e::objects::{Kind, await_object, conditions_line, field, has_condition, has_failed_for};
use e2e::store_state::StoreState;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::ResourceExt;
use kube::api::{DynamicObject, ListParams};

use crate::restore_in_place::RESTORE_LOCK;
use crate::restore_sources::Sources;

/// Creates the EtcdRestores `{prefix}-early` and `{prefix}-late` at the same time. They restore different backups into
/// the cluster `into`.
async fn restore_both(
    sandbox: &Sandbox,
    sources: &Sources,
    prefix: &str,
    into: &str,
    more: &str,
) -> Result<[DynamicObject; 2]> {
    let s3 = sandbox.env.s3()?;
    let target = format!("{{name: {into}}}");
    let names = [format!("{prefix}-early"), format!("{prefix}-late")];
    let manifests = [
        restore_with(s3, &names[0], &target, &sources.early.path, more),
        restore_with(s3, &names[1], &target, &sources.late.path, more),
    ];
    sandbox.apply(&manifests.join("---\n")).await?;
    let [early, late] = &names;
    Ok([ended(sandbox, early).await?, ended(sandbox, late).await?])
}

/// Waits until the EtcdRestore has completed or failed.
async fn ended(sandbox: &Sandbox, name: &str) -> Result<DynamicObject> {
    let restores = sandbox.objects(Kind::EtcdRestore);
    await_object(
        &restores,
        name,
        "completion or failure",
        DEADLINE,
        |object| {
            has_condition(object, "Complete", "True") || field(object, "/status/phase") == "Failed"
        },
    )
    .await
}

/// Ensures that the EtcdRestore failed because of the other EtcdRestore, with one of the texts `why` in its message.
/// The failed EtcdRestore must have no finalizer, because it owns nothing.
fn ensure_rejected(refused: &DynamicObject, why: &[&str]) -> Result<()> {
    let message = conditions_line(refused);
    ensure!(has_failed_for(refused, "ClusterExists"), "{message}");
    ensure!(why.iter().any(|why| message.contains(why)), "{message}");
    let finalizers = refused.finalizers();
    ensure!(finalizers.is_empty(), "finalizers {finalizers:?} remain");
    Ok(())
}

/// Waits until the pod, the PVC and the Service of the restore's seed are deleted.
async fn await_no_seed(sandbox: &Sandbox, restore: &DynamicObject) -> Result<()> {
    let Some(seed) = field(restore, "/status/seed/member").as_str() else {
        return Ok(());
    };
    until(
        &format!("all objects of {seed} are deleted"),
        DEADLINE,
        async || {
            let pod = sandbox.api::<Pod>().get_opt(seed).await?.is_some();
            let claims = sandbox.api::<PersistentVolumeClaim>();
            let claims = claims.list(&ListParams::default()).await?;
            let claim = claims.iter().any(|claim| claim.name_any().contains(seed));
            let service = sandbox.api::<Service>().get_opt(seed).await?.is_some();
            Ok(if pod || claim || service {
                Poll::NotYet(format!("pod {pod}, PVC {claim}, Service {service}"))
            } else {
                Poll::Done(())
            })
        },
    )
    .await
}

/// Ensures that the cluster has one pod, one volume, no restore lock, and exactly the data of the backup that `winner`
/// restored.
async fn ensure_one_backup_restored(
    sandbox: &Sandbox,
    cluster: &str,
    winner: &DynamicObject,
    sources: &Sources,
) -> Result<DynamicObject> {
    let id = field(winner, "/status/clusterID").as_str();
    let id = id.context("no cluster ID is recorded")?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    // The test waits for the new cluster ID, because the status describes the replaced cluster until the operator
    // reconciles the EtcdCluster.
    await_object(
        &clusters,
        cluster,
        "the restored cluster",
        DEADLINE,
        |object| {
            field(object, "/status/clusterID") == id
                && !object.annotations().contains_key(RESTORE_LOCK)
        },
    )
    .await?;
    let is = sandbox.await_members(cluster, 1).await?;
    ensure!(field(&is, "/status/clusterID") == id);
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, cluster).await?;
    ensure!(format!("{:x}", keys.cluster_id().await?) == id);
    let is_early = winner.name_any().ends_with("-early");
    let source = if is_early {
        &sources.early
    } else {
        &sources.late
    };
    let state = &source.state;
    let restored = StoreState::at(&keys, state.revision).await?;
    state.ensure_same(&restored)?;
    ensure!(keys.revision().await? == state.revision);
    let selector = ListParams::default().labels(&format!("etcd_cluster={cluster}"));
    until("one pod and one volume", DEADLINE, async || {
        let pods = sandbox.api::<Pod>().list(&selector).await?.items.len();
        let volumes = sandbox.api::<PersistentVolumeClaim>();
        let volumes = volumes.list(&selector).await?.items.len();
        Ok(match (pods, volumes) {
            (1, 1) => Poll::Done(()),
            (pods, volumes) => Poll::NotYet(format!("{pods} pods, {volumes} volumes")),
        })
    })
    .await?;
    Ok(is)
}

/// One of two EtcdRestores creates the cluster, and the operator rejects the other EtcdRestore.
pub(crate) async fn two_into_one_new_cluster(sandbox: &Sandbox, sources: &Sources) -> Result<()> {
    let [early, late] = restore_both(sandbox, sources, "new", "f", "").await?;
    let is_complete = |object: &DynamicObject| has_condition(object, "Complete", "True");
    let (winner, loser) = match (is_complete(&early), is_complete(&late)) {
        (true, false) => (early, late),
        (false, true) => (late, early),
        _ => bail!("{}, {}", conditions_line(&early), conditions_line(&late)),
    };
    ensure_rejected(&loser, &["another EtcdRestore", "exists"])?;
    await_no_seed(sandbox, &loser).await?;
    ensure_one_backup_restored(sandbox, "f", &winner, sources).await?;
    // The rejected EtcdRestore owns no objects, so its deletion must not change the cluster.
    let delete = ["delete", "etcdrestore", &loser.name_any()];
    sandbox.kubectl(&delete).await?;
    ensure_one_backup_restored(sandbox, "f", &winner, sources)
        .await
        .map(drop)
}

/// Two EtcdRestores restore in place over the cluster `c`. The cluster has the data of the last restore that
/// completed.
pub(crate) async fn two_over_one_cluster(sandbox: &Sandbox, sources: &Sources) -> Result<()> {
    let before = sandbox.await_members("c", 1).await?;
    let both = restore_both(sandbox, sources, "over", "c", "  overwrite: true\n").await?;
    let (mut complete, refused): (Vec<_>, Vec<_>) = both
        .into_iter()
        .partition(|object| has_condition(object, "Complete", "True"));
    // Both restores complete if one starts after the other is complete. The later restore determines the data of the
    // cluster. The sort puts the later restore last: it has replaced the cluster of the earlier restore, and not the
    // cluster in `before`.
    complete.sort_by_key(|one| {
        let replaces = field(one, "/status/replaces/clusterID");
        replaces != field(&before, "/status/clusterID")
    });
    let message: Vec<String> = refused.iter().map(conditions_line).collect();
    let winner = complete
        .pop()
        .with_context(|| format!("no restore completed: {message:?}"))?;
    for loser in &refused {
        ensure_rejected(loser, &["another EtcdRestore is restoring the EtcdCluster"])?;
    }
    for other in complete.iter().chain(&refused) {
        await_no_seed(sandbox, other).await?;
    }
    let is = ensure_one_backup_restored(sandbox, "c", &winner, sources).await?;
    ensure!(
        is.metadata.uid == before.metadata.uid,
        "the EtcdCluster was recreated"
    );
    ensure!(field(&is, "/spec") == field(&before, "/spec"));
    let id = field(&before, "/status/clusterID");
    ensure!(field(&is, "/status/clusterID") != id);
    Ok(())
}
