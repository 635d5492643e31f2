//! From an EtcdCluster to members that serve.

use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::objects::{Kind, await_object, field, has_condition, ready_members};
use e2e::wait::Look;
use e2e::{Keyspace, PATIENCE, Writer, cluster_scenario, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams, ListParams};

use crate::fixtures::{DURABLE, cluster, cluster_with};

#[tokio::test]
async fn three_members_form_a_cluster_and_serve() {
    cluster_scenario("bootstrap", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "plain", 3)?).await?;
        sandbox.await_members("plain", 3).await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        let object = await_object(&clusters, "plain", "all is well", PATIENCE, |object| {
            field(object, "/status/phase") == "Running"
                && field(object, "/status/currentVersion") == field(object, "/spec/version")
                && has_condition(object, "Available", "True")
                && has_condition(object, "Degraded", "False")
                && ready_members(object).len() == 3
        })
        .await?;
        ensure!(field(&object, "/status/serviceName") == "plain-client");
        ensure!(field(&object, "/status/clientPort") == 2379);

        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "plain").await?;
        keys.fill("boot/", 100, |_| ()).await?;
        keys.verify("boot/", 100).await?;
        let id = format!("{:x}", keys.cluster_id().await?);
        ensure!(
            field(&object, "/status/clusterID") == id.as_str(),
            "clusterID: {id}"
        );

        // The names in etcd, of the pods and in the status are the same.
        let mut members: Vec<String> = keys
            .members()
            .await?
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        members.sort();
        let mut ready = ready_members(&object);
        ready.sort();
        ensure!(members == ready, "etcd: {members:?}, status: {ready:?}");

        let budget = sandbox
            .api::<PodDisruptionBudget>()
            .list(&ListParams::default())
            .await?;
        ensure!(
            budget.items.len() == 1,
            "{} PodDisruptionBudgets",
            budget.items.len()
        );
        let allowed = until("the PDB allows one disruption", PATIENCE, async || {
            let budget = sandbox
                .api::<PodDisruptionBudget>()
                .list(&ListParams::default())
                .await?;
            let allowed = budget
                .items
                .first()
                .and_then(|pdb| pdb.status.as_ref())
                .map(|s| s.disruptions_allowed);
            Ok(if allowed == Some(1) {
                Look::Done(1)
            } else {
                Look::NotYet(format!("{allowed:?}"))
            })
        });
        allowed.await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn services_deleted_by_hand_come_back() {
    cluster_scenario("services_return", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "plain", 1)?).await?;
        let object = sandbox.await_members("plain", 1).await?;
        let member = ready_members(&object).remove(0);
        let services: Api<Service> = sandbox.api();
        for name in ["plain", "plain-client", member.as_str()] {
            let uid = services.get(name).await?.metadata.uid;
            services.delete(name, &DeleteParams::default()).await?;
            until(&format!("Service {name} is back"), PATIENCE, async || {
                let found = services
                    .get_opt(name)
                    .await?
                    .and_then(|service| service.metadata.uid);
                Ok(match found {
                    Some(new) if Some(&new) != uid.as_ref() => Look::Done(()),
                    other => Look::NotYet(format!("{other:?}")),
                })
            })
            .await?;
        }
        Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "plain")
            .await?
            .fill("after/", 10, |_| ())
            .await?;
        Ok(())
    })
    .await;
}

/// Invariant 7: an operator that starts anew finds the cluster, it does not make another.
#[tokio::test]
async fn operator_restart_during_bootstrap_makes_one_cluster() {
    cluster_scenario("operator_restart", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "durable", 3, DURABLE)?)
            .await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(
            &clusters,
            "durable",
            "the intent is recorded",
            PATIENCE,
            |object| field(object, "/status/bootstrap/token").is_string(),
        )
        .await?;
        let pods: Api<Pod> = sandbox.api();
        let operators = ListParams::default().labels("app.kubernetes.io/component=etcd-operator");
        let found = pods.list(&operators).await?;
        ensure!(
            found.items.len() == 1,
            "{} pods of the cluster operator",
            found.items.len()
        );
        for pod in found {
            let name = pod.metadata.name.unwrap_or_default();
            pods.delete(&name, &DeleteParams::default().grace_period(0))
                .await?;
        }
        let object = sandbox.await_members("durable", 3).await?;
        let volumes: Api<PersistentVolumeClaim> = sandbox.api();
        let count = volumes.list(&ListParams::default()).await?.items.len();
        ensure!(
            count == 3,
            "{count} volumes: a second set of members was made"
        );
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "durable").await?;
        keys.fill("restart/", 100, |_| ()).await?;

        // Once more with the cluster formed.
        sandbox
            .kubectl(&["rollout", "restart", "deployment/etcd-operator"])
            .await?;
        sandbox.await_operators().await?;
        tokio::time::sleep(Duration::from_secs(3)).await; // Time in which nothing may happen.
        let after = sandbox.await_members("durable", 3).await?;
        ensure!(field(&after, "/status/clusterID") == field(&object, "/status/clusterID"));
        ensure!(ready_members(&after).len() == 3);
        keys.verify("restart/", 100).await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn deleting_the_cluster_removes_everything_it_owned() {
    cluster_scenario("deletion", async |sandbox| {
        sandbox
            .apply(&cluster_with(&sandbox.env, "durable", 1, DURABLE)?)
            .await?;
        sandbox.await_members("durable", 1).await?;
        sandbox
            .kubectl(&["delete", "etcdcluster", "durable"])
            .await?;
        until(
            "pods, volumes and Services are gone",
            PATIENCE,
            async || {
                let selector = ListParams::default().labels("etcd_cluster=durable");
                let pods = sandbox.api::<Pod>().list(&selector).await?.items.len();
                let volumes = sandbox
                    .api::<PersistentVolumeClaim>()
                    .list(&selector)
                    .await?
                    .items
                    .len();
                let services = sandbox.api::<Service>().list(&selector).await?.items.len();
                let budgets = sandbox
                    .api::<PodDisruptionBudget>()
                    .list(&ListParams::default())
                    .await?
                    .items
                    .len();
                Ok(if pods + volumes + services + budgets == 0 {
                    Look::Done(())
                } else {
                    Look::NotYet(format!(
                        "{pods} pods, {volumes} volumes, {services} Services, {budgets} PDBs"
                    ))
                })
            },
        )
        .await
    })
    .await;
}

#[tokio::test]
async fn a_paused_cluster_reports_and_changes_nothing() {
    cluster_scenario("paused", async |sandbox| {
        sandbox.apply(&cluster(&sandbox.env, "plain", 3)?).await?;
        sandbox.await_members("plain", 3).await?;
        let patch = r#"{"spec":{"paused":true}}"#;
        sandbox
            .kubectl(&["patch", "etcdcluster", "plain", "--type=merge", "-p", patch])
            .await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(&clusters, "plain", "controlPaused", PATIENCE, |object| {
            field(object, "/status/controlPaused") == true
        })
        .await?;
        let victim = sandbox
            .member_pods("plain")
            .await?
            .remove(0)
            .metadata
            .name
            .unwrap_or_default();
        sandbox
            .kubectl(&["delete", "pod", &victim, "--now"])
            .await?;
        let what = "two ready members are reported, and that something is wrong";
        await_object(&clusters, "plain", what, PATIENCE, |object| {
            ready_members(object).len() == 2 && has_condition(object, "Degraded", "True")
        })
        .await?;
        ensure!(
            sandbox.member_pods("plain").await?.len() == 2,
            "a pod was made while paused"
        );

        let patch = r#"{"spec":{"paused":false}}"#;
        sandbox
            .kubectl(&["patch", "etcdcluster", "plain", "--type=merge", "-p", patch])
            .await?;
        sandbox.await_members("plain", 3).await?;
        Ok(())
    })
    .await;
}

/// Each minor release the project supports forms a cluster.
#[tokio::test]
async fn every_supported_minor_forms_a_cluster() {
    cluster_scenario("minors", async |sandbox| {
        let versions = ["3.4", "3.5", "3.6", "3.7"].map(|minor| sandbox.env.newest_of(minor));
        let versions: Vec<String> = versions.into_iter().collect::<Result<_>>()?;
        for (number, version) in versions.iter().enumerate() {
            let manifest = format!(
                "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: minor-{number}}}\n\
                 spec: {{size: 3, version: \"{version}\"}}\n"
            );
            sandbox.apply(&manifest).await?;
        }
        for (number, version) in versions.iter().enumerate() {
            let name = format!("minor-{number}");
            sandbox.await_members(&name, 3).await?;
            let clusters = sandbox.objects(Kind::EtcdCluster);
            let what = format!("every member runs {version}");
            await_object(&clusters, &name, &what, PATIENCE, |object| {
                field(object, "/status/currentVersion") == version.as_str()
                    && all_run(object, version)
            })
            .await?;
        }
        Ok(())
    })
    .await;
}

/// Every member says itself that it runs `version`.
fn all_run(object: &kube::api::DynamicObject, version: &str) -> bool {
    let members = field(object, "/status/memberDetails").as_array();
    members.is_some_and(|members| members.iter().all(|member| member["version"] == version))
}

/// `bootstrap: Seed`: one member is recorded and forms the cluster, the others join it as learners. Its volume is the
/// only one that is claimed at first; when that claim is deleted later, the member is replaced while it serves.
#[tokio::test]
async fn a_seed_grows_to_the_wanted_size_and_can_be_replaced_while_it_serves() {
    cluster_scenario("seed", async |sandbox| {
        let more = format!("  bootstrap: Seed\n{DURABLE}");
        let manifest = cluster_with(&sandbox.env, "c", 3, &more)?;
        sandbox.apply(&manifest).await?;
        let object = sandbox.await_members("c", 3).await?;
        let first = field(&object, "/status/bootstrap/members");
        ensure!(
            first.as_array().is_some_and(|members| members.len() == 1),
            "first members: {first}"
        );
        let seed = first[0].as_str().unwrap_or_default().to_owned();
        sandbox
            .await_event(Kind::EtcdCluster, "c", &["MemberPromoted"])
            .await?;

        // Nothing but the claim is deleted: Kubernetes holds it back, the operator replaces the member.
        let writer = Writer::start(sandbox, "c").await?;
        writer.await_more(10).await?;
        sandbox
            .kubectl(&["delete", "pvc", &seed, "--wait=false"])
            .await?;
        let clusters = sandbox.objects(Kind::EtcdCluster);
        await_object(&clusters, "c", "the seed is replaced", PATIENCE, |object| {
            let ready = ready_members(object);
            ready.len() == 3
                && !ready.contains(&seed)
                && has_condition(object, "Recovering", "False")
        })
        .await?;
        writer.await_more(10).await?;
        writer
            .finish("the seed's volume claim deleted")
            .await
            .map(drop)
    })
    .await;
}
