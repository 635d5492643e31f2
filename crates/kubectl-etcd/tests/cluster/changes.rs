//! Tests of the commands that change an EtcdCluster or delete a volume.

use api::EtcdCluster;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::fixture::{CLUSTER_ID, Ended, Fixture, MEMBERS, condition, eventually};

#[tokio::test(flavor = "multi_thread")]
async fn pause_command_requires_confirmation_and_may_be_repeated() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture
        .run("pause main")
        .fails(3, &["standard input is no terminal", "add --yes"]);
    assert!(
        fixture
            .run("pause main --dry-run")
            .ok()
            .contains("nothing was changed")
    );
    assert!(!fixture.cluster().await.spec.paused);
    fixture.run("pause main --yes").ok();
    let paused = fixture.cluster().await;
    assert!(paused.spec.paused);
    let managers = paused.metadata.managed_fields.unwrap();
    assert!(
        managers
            .iter()
            .any(|one| one.manager.as_deref() == Some("kubectl-etcd"))
    );
    assert!(
        fixture
            .run("pause main --yes")
            .ok()
            .contains("already paused")
    );
    fixture
        .run("upgrade main 3.6.16 --yes")
        .fails(3, &["is paused", "kubectl etcd resume main"]);
    fixture.run("resume main -y").ok();
    assert!(!fixture.cluster().await.spec.paused);
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_shows_path_and_waits_for_operator() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture.run("upgrade main 3.7.3 --yes").fails(
        3,
        &[
            "one minor release at a time",
            "3.5.35 → 3.6.11 or later → 3.7.3",
            "kubectl etcd upgrade main 3.6.11 --wait",
        ],
    );
    fixture
        .run("upgrade main latest --yes")
        .fails(3, &["not a version"]);
    fixture
        .run("upgrade main 3.4.23 --yes")
        .fails(3, &["cannot be downgraded"]);
    assert_eq!(fixture.cluster().await.spec.version, "3.5.35");

    let running = fixture.spawn("upgrade main 3.6.16 --yes --wait --timeout 1m");
    eventually("the new version", async || {
        fixture.cluster().await.spec.version == "3.6.16"
    })
    .await;
    // The command must wait, because no member runs the new version yet.
    let busy = [condition("Ready", "False", "Upgrading")];
    fixture
        .set_status(json!({ "state": "Upgrading 3.5.35→3.6.16", "conditions": busy }))
        .await;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    fixture
        .set_status(json!({ "currentVersion": "3.6.16" }))
        .await;
    let ended = Ended::from(running.wait_with_output().unwrap());
    assert!(
        ended.errors.contains("Upgrading 3.5.35→3.6.16"),
        "{ended:?}"
    );
    assert!(ended.ok().contains("runs 3.6.16"));

    fixture
        .run("upgrade main 3.6.17 --yes --wait --timeout 2s")
        .fails(4, &["did not become upgraded within 2 s"]);
    let stalled = [condition("Stalled", "True", "UpgradeStopped")];
    fixture.set_status(json!({ "conditions": stalled })).await;
    fixture
        .run("upgrade main 3.6.17 --yes --wait")
        .fails(5, &["UpgradeStopped: message of Stalled"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn hibernate_and_wake_commands_change_spec() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture.run("hibernate main --yes").ok();
    assert!(fixture.cluster().await.spec.hibernate);
    fixture.run("wake main --yes").ok();
    assert!(!fixture.cluster().await.spec.hibernate);
    let without = json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
        "metadata": { "name": "small" }, "spec": {} });
    fixture.create::<EtcdCluster>(without).await;
    fixture
        .run("hibernate small --yes")
        .fails(3, &["no volumes", "persistentVolumeClaimSpec"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn replace_command_deletes_volume_only_if_other_members_serve() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    let claims: Api<PersistentVolumeClaim> = fixture.api();
    fixture
        .run("replace main-x --yes")
        .fails(1, &["member main-x in namespace prod does not exist"]);
    let lost = [condition("Available", "False", "QuorumLost")];
    fixture.set_status(json!({ "conditions": lost })).await;
    let line = format!("replace {} --yes", MEMBERS[1]);
    fixture
        .run(&line)
        .fails(3, &["has no quorum", "docs/recovery.md"]);
    assert!(
        claims
            .get(MEMBERS[1])
            .await
            .unwrap()
            .metadata
            .deletion_timestamp
            .is_none()
    );
    fixture.set_status(json!({})).await;
    fixture.run(&line).ok();
    // A deleted PVC may still exist with a deletion timestamp, because kube-apiserver adds a finalizer to every PVC.
    let found = claims.get_opt(MEMBERS[1]).await.unwrap();
    assert!(found.is_none_or(|claim| claim.metadata.deletion_timestamp.is_some()));
    assert!(
        claims
            .get(MEMBERS[0])
            .await
            .unwrap()
            .metadata
            .deletion_timestamp
            .is_none()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_is_approved_by_documented_annotation() {
    const ANNOTATION: &str = "etcd.database.coreos.com/recover";
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture
        .run("recover main --yes")
        .fails(3, &["a quorum of cluster main answers"]);
    let lost = [
        condition("Available", "False", "QuorumLost"),
        condition("Degraded", "True", "QuorumLost"),
    ];
    fixture.set_status(json!({ "conditions": lost })).await;
    let shown = fixture.run("recover main");
    assert!(
        shown
            .out
            .contains("the operator reports QuorumLost: message of Degraded"),
        "{shown:?}"
    );
    shown.fails(3, &["add --yes"]);
    assert!(
        !fixture
            .cluster()
            .await
            .annotations()
            .contains_key(ANNOTATION)
    );
    fixture.run("recover main --yes").ok();
    assert_eq!(
        fixture.cluster().await.annotations()[ANNOTATION],
        CLUSTER_ID
    );

    // The operator ignores this approval, because it was set before the quorum was lost. The command must remove it,
    // wait until the operator has noticed the removal, and set it again.
    fixture
        .set_status(json!({ "conditions": lost, "staleApproval": CLUSTER_ID }))
        .await;
    let running = fixture.spawn("recover main --yes");
    eventually("the removal", async || {
        !fixture
            .cluster()
            .await
            .annotations()
            .contains_key(ANNOTATION)
    })
    .await;
    fixture
        .set_status(json!({ "conditions": lost, "staleApproval": null }))
        .await;
    Ended::from(running.wait_with_output().unwrap()).ok();
    assert_eq!(
        fixture.cluster().await.annotations()[ANNOTATION],
        CLUSTER_ID
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn upkeep_commands_are_refused_without_member_answers() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    for line in [
        "defrag main --yes",
        "compact main --keep 10 --yes",
        "move-leader main --yes",
    ] {
        fixture
            .run(line)
            .fails(3, &["the members of cluster main cannot be queried"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn join_command_creates_cluster_then_removes_annotation() {
    const ANNOTATION: &str = "etcd.database.coreos.com/join";
    const URL: &str = "http://etcd-0.etcd.prod.svc:2379";
    let fixture = Fixture::start().await;
    let clusters: Api<EtcdCluster> = fixture.api();
    let line = format!("join main --endpoints {URL} --etcd-version 3.5.35 --storage 1Gi");
    let shown = fixture.run(&format!("{line} --dry-run")).ok();
    assert!(
        shown.contains("Service main-client") && shown.contains("nothing was changed"),
        "{shown}"
    );
    // The API server rejects a manifest with an unknown field, here `sise`.
    let manifest = "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\n\
                    metadata: {name: main}\nspec: {sise: 3, version: 3.5.35}\n";
    std::fs::write(fixture.folder.path().join("main.yaml"), manifest).unwrap();
    fixture
        .run(&format!(
            "join main --file main.yaml --endpoints {URL} --yes"
        ))
        .fails(1, &["sise", "correct the field"]);
    assert!(clusters.get_opt("main").await.unwrap().is_none());

    let running = fixture.spawn(&format!("{line} --yes --wait --timeout 1m"));
    eventually("the EtcdCluster", async || {
        clusters.get_opt("main").await.unwrap().is_some()
    })
    .await;
    let made = fixture.cluster().await;
    assert_eq!(made.annotations()[ANNOTATION], URL);
    assert!(made.spec.is_durable());
    let old = json!([{ "name": "etcd-0", "role": "Leader", "healthy": true }]);
    let busy = [
        condition("Ready", "False", "Scaling"),
        condition("Available", "True", "QuorumHealthy"),
    ];
    fixture
        .set_status(json!({ "memberDetails": old, "conditions": busy }))
        .await;
    fixture
        .run("join main --finish --yes")
        .fails(3, &["old members remain in etcd: etcd-0"]);
    assert!(
        fixture
            .cluster()
            .await
            .annotations()
            .contains_key(ANNOTATION)
    );
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    fixture.set_status(json!({})).await;
    let ended = Ended::from(running.wait_with_output().unwrap());
    assert!(
        ended
            .errors
            .contains("0 of 3 new members vote, old members that remain in etcd: 1"),
        "{ended:?}"
    );
    assert!(ended.ok().contains("kubectl etcd join main --finish"));

    fixture
        .run("join main --endpoints http://b:2379 --yes")
        .fails(3, &[URL, "leave out --endpoints"]);
    fixture.run("join main --finish --yes").ok();
    let moved = fixture.cluster().await;
    assert!(!moved.annotations().contains_key(ANNOTATION));
    assert!(
        fixture
            .run("join main --finish --yes")
            .ok()
            .contains("nothing to do")
    );
    fixture
        .run("join main --wait")
        .fails(3, &["do not join another etcd", "choose another name"]);
}
