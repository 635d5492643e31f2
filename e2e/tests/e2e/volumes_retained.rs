//! `spec.deletionPolicy: RetainVolumes`: the volumes outlive the EtcdCluster, and a new EtcdCluster of the same name
//! continues the cluster.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use e2e::objects::{Kind, await_object, condition};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, Writer, cluster_scenario, step, until};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::all_pods_lost::same_members;
use crate::fixtures::{DURABLE, cluster_with};

const RETAINS: &str = "  deletionPolicy: RetainVolumes\n";
const KEYS: usize = 100;

async fn claims(sandbox: &Sandbox) -> Result<Vec<PersistentVolumeClaim>> {
    let of_cluster = ListParams::default().labels("etcd_cluster=c");
    let api = sandbox.api::<PersistentVolumeClaim>();
    Ok(api.list(&of_cluster).await?.items)
}

fn uids(claims: &[PersistentVolumeClaim]) -> BTreeSet<Option<String>> {
    claims.iter().map(ResourceExt::uid).collect()
}

/// Waits until no PVC of the cluster has an owner reference, and an annotation of each PVC names all voters.
async fn await_retention(sandbox: &Sandbox) -> Result<Vec<PersistentVolumeClaim>> {
    until("the PVCs are retained", DEADLINE, async || {
        let claims = claims(sandbox).await?;
        let is_retained = |claim: &PersistentVolumeClaim| {
            let voters = claim.annotations().get("etcd.database.coreos.com/voters");
            let count = voters.map_or(0, |voters| voters.split(',').count());
            claim.owner_references().is_empty() && count == claims.len()
        };
        Ok(if claims.iter().all(is_retained) {
            Poll::Done(claims)
        } else {
            Poll::NotYet(format!("{claims:?}"))
        })
    })
    .await
}

/// Deletes the EtcdCluster, and waits until its pods are deleted.
async fn delete(sandbox: &Sandbox, cascade: &str) -> Result<()> {
    let words = ["delete", "etcdcluster", "c", "--wait=true", cascade];
    sandbox.kubectl(&words).await?;
    until("the pods are deleted", DEADLINE, async || {
        let pods = sandbox.member_pods("c").await?.len();
        Ok(if pods == 0 {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{pods} pods"))
        })
    })
    .await
}

/// Creates the EtcdCluster again, and checks that it is the cluster `before` with all its keys.
async fn continues(sandbox: &Sandbox, manifest: &str, before: &DynamicObject) -> Result<()> {
    sandbox.apply(manifest).await?;
    let after = sandbox.await_members("c", 3).await?;
    same_members(before, &after)?;
    ensure!(
        after.uid() != before.uid(),
        "the EtcdCluster was not deleted"
    );
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.verify("kept/", KEYS).await.map(drop)
}

async fn keep(sandbox: &Sandbox, volume: &str, policy: &str) -> Result<()> {
    let volumes: Api<PersistentVolume> = Api::all(sandbox.client.clone());
    let patch = json!({ "spec": { "persistentVolumeReclaimPolicy": policy } });
    let params = PatchParams::default();
    volumes
        .patch(volume, &params, &Patch::Merge(&patch))
        .await?;
    Ok(())
}

/// Deletes the PVC and creates it again on its volume, as a user does after the deletion of the namespace. The new PVC
/// has another UID. Returns the name of the volume.
async fn create_again(sandbox: &Sandbox, claim: &PersistentVolumeClaim) -> Result<String> {
    let api = sandbox.api::<PersistentVolumeClaim>();
    let name = claim.name_any();
    let spec = claim.spec.clone().context("no spec")?;
    let volume = spec.volume_name.clone().context("no volume")?;
    keep(sandbox, &volume, "Retain").await?;
    api.delete(&name, &DeleteParams::default()).await?;
    until("the PVC is deleted", DEADLINE, async || {
        Ok(match api.get_opt(&name).await? {
            None => Poll::Done(()),
            Some(_) => Poll::NotYet(format!("{name} exists")),
        })
    })
    .await?;
    // The reference to the deleted PVC is removed, so that the volume is available to a new PVC.
    let volumes: Api<PersistentVolume> = Api::all(sandbox.client.clone());
    let patch = json!({ "spec": { "claimRef": null } });
    let params = PatchParams::default();
    volumes
        .patch(&volume, &params, &Patch::Merge(&patch))
        .await?;
    let mut annotations = claim.annotations().clone();
    annotations.retain(|key, _| key.contains("etcd"));
    let again = PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(name),
            labels: claim.metadata.labels.clone(),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    };
    api.create(&PostParams::default(), &again).await?;
    Ok(volume)
}

/// Retains the volumes of a running cluster, deletes the EtcdCluster, and creates the EtcdCluster again.
async fn is_continued(sandbox: &Sandbox) -> Result<(String, DynamicObject)> {
    let manifest = cluster_with(&sandbox.env, "c", 3, DURABLE)?;
    sandbox.apply(&manifest).await?;
    let before = sandbox.await_members("c", 3).await?;
    let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "c").await?;
    keys.fill("kept/", KEYS, |_| ()).await?;
    let manifest = format!("{manifest}{RETAINS}");
    sandbox.apply(&manifest).await?;
    let kept = await_retention(sandbox).await?;
    ensure!(kept.len() == 3, "{} PVCs", kept.len());
    // With `--cascade=foreground`, the garbage collector deletes the dependents of the EtcdCluster. The PVCs must stay,
    // because they have no owner reference.
    delete(sandbox, "--cascade=foreground").await?;
    ensure!(
        uids(&claims(sandbox).await?) == uids(&kept),
        "a PVC was deleted"
    );
    continues(sandbox, &manifest, &before).await?;
    ensure!(
        uids(&claims(sandbox).await?) == uids(&kept),
        "a PVC was replaced"
    );
    Ok((manifest, before))
}

/// The PVCs are created again with other UIDs, as in a new namespace of the same name.
async fn continues_on_other_claims(
    sandbox: &Sandbox,
    manifest: &str,
    before: &DynamicObject,
) -> Result<()> {
    let kept = await_retention(sandbox).await?;
    delete(sandbox, "--cascade=background").await?;
    let mut volumes = Vec::new();
    for claim in &kept {
        volumes.push(create_again(sandbox, claim).await?);
    }
    continues(sandbox, manifest, before).await?;
    ensure!(
        uids(&claims(sandbox).await?).is_disjoint(&uids(&kept)),
        "a PVC was not created again"
    );
    // With the reclaim policy `Delete`, the testbed deletes these volumes together with the namespace.
    for volume in &volumes {
        keep(sandbox, volume, "Delete").await?;
    }
    Ok(())
}

/// Invariant 36: without the volumes of a quorum, no member starts, and no new cluster is bootstrapped.
async fn is_refused(sandbox: &Sandbox, manifest: &str) -> Result<()> {
    let kept = await_retention(sandbox).await?;
    delete(sandbox, "--cascade=background").await?;
    let [first, second, last] = &kept[..] else {
        bail!("{} PVCs", kept.len());
    };
    let (first, second) = (first.name_any(), second.name_any());
    sandbox.kubectl(&["delete", "pvc", &first, &second]).await?;
    sandbox.apply(manifest).await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    await_object(&clusters, "c", "too few volumes", DEADLINE, |object| {
        condition(object, "Degraded").is_some_and(|found| {
            let message = found["message"].as_str().unwrap_or_default();
            found["reason"] == "IdentityUnknown"
                && [&first, &second].iter().all(|name| message.contains(*name))
        })
    })
    .await?;
    ensure!(
        sandbox.member_pods("c").await?.is_empty(),
        "a pod was created"
    );
    let left = claims(sandbox).await?;
    ensure!(uids(&left) == BTreeSet::from([last.uid()]), "{left:?}");
    Ok(())
}

mod full {
    use super::*;

    #[tokio::test]
    async fn volumes_retained_and_adopted_by_new_etcdcluster() {
        cluster_scenario("volumes_retained", async |sandbox| {
            let continued = step("continue on the volumes", is_continued(sandbox));
            let (manifest, before) = continued.await?;
            let other = continues_on_other_claims(sandbox, &manifest, &before);
            step("continue on PVCs with other UIDs", other).await?;
            step("refuse to start", is_refused(sandbox, &manifest)).await
        })
        .await;
    }

    /// A tool prunes the EtcdCluster by mistake. The same manifest is applied again at once, while the old pods exist.
    /// The CA of the peer certificates is generated, and it is deleted with the old EtcdCluster, so the new EtcdCluster
    /// has another CA.
    #[tokio::test]
    async fn gitops_prune_and_apply_keep_members_and_volumes() {
        cluster_scenario("gitops_prune", async |sandbox| {
            let lines = format!("{DURABLE}{RETAINS}  TLS: {{generated: {{client: false}}}}\n");
            let manifest = cluster_with(&sandbox.env, "c", 3, &lines)?;
            sandbox.apply(&manifest).await?;
            let before = sandbox.await_members("c", 3).await?;
            let kept = await_retention(sandbox).await?;
            let writer = Writer::start(sandbox, "c").await?;
            writer.await_more(20).await?;
            let prune = ["delete", "etcdcluster", "c", "--wait=false"];
            sandbox.kubectl(&prune).await?;
            sandbox.apply(&manifest).await?;
            let after = sandbox.await_members("c", 3).await?;
            same_members(&before, &after)?;
            ensure!(
                after.uid() != before.uid(),
                "the EtcdCluster was not deleted"
            );
            ensure!(
                uids(&claims(sandbox).await?) == uids(&kept),
                "a PVC was deleted"
            );
            writer.await_more(20).await?;
            let tally = writer.finish("prune and apply again").await;
            tally.map(drop)
        })
        .await;
    }
}
