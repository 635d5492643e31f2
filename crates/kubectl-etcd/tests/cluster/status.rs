//! Tests of `status`, `plan` and `ctl`, and of errors if the API server or the kubeconfig cannot be used.

use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use serde_json::{Value, json};

use crate::fixture::{CLUSTER_ID, Fixture, MEMBERS, condition};

#[tokio::test(flavor = "multi_thread")]
async fn status_command_shows_reported_status_if_members_do_not_answer() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    fixture.create_series().await;
    // No kubelet runs, so the command cannot query the members. It shows the values in the status of the EtcdCluster.
    let text = fixture.run("status main").ok();
    for part in [
        "prod/main: Ready, available, 3 of 3 members healthy",
        CLUSTER_ID,
        "4.0 KiB of 2.0 GiB (0 %)",
        "by EtcdBackup nightly, revision 100",
        "nightly: Succeeded, checksum verified",
        "the schedule of the defragmentation",
        "the members could not be queried (cannot create pods/exec for pod/main-aaaaaaaaaa",
        MEMBERS[2],
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(
        !text.contains('\u{1b}'),
        "output to a pipe must contain no colors: {text:?}"
    );
    let offline = fixture.run("status main --offline").ok();
    assert!(!offline.contains("pods/exec"), "{offline}");

    let value: Value = serde_json::from_str(&fixture.run("status main -o json").ok()).unwrap();
    assert_eq!(value["members"].as_array().unwrap().len(), 3);
    assert_eq!(value["source"], "status");
    let list = fixture.run("status -A -o wide").ok();
    assert_eq!(list.lines().count(), 2, "{list}");
    assert!(list.contains(CLUSTER_ID), "{list}");
    let yaml = fixture.run("status -o yaml").ok();
    assert!(yaml.contains("clusterId: 7f1c0d1f2a3b4c5d"), "{yaml}");
    let empty = fixture.run("-n default status").ok();
    assert!(
        empty.contains("there is no EtcdCluster in namespace default"),
        "{empty}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn status_command_shows_reported_status_without_exec_permission() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    let rule = |groups: &str, resources: &[&str]| json!({ "apiGroups": [groups], "resources": resources, "verbs": ["get", "list"] });
    fixture
        .create::<Role>(json!({ "metadata": { "name": "reader" }, "rules": [
            rule("", &["pods"]), rule("etcd.database.coreos.com", &["etcdclusters", "etcdbackups"])] }))
        .await;
    fixture
        .create::<RoleBinding>(json!({ "metadata": { "name": "reader" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader" },
            "subjects": [{ "kind": "User", "name": "reader", "apiGroup": "rbac.authorization.k8s.io" }] }))
        .await;
    let reader = fixture.kubeconfig("reader", json!({ "token": "test-token", "as": "reader" }));
    let with = |line: &str| fixture.run(&format!("--kubeconfig {} {line}", reader.display()));
    let text = with("status main").ok();
    assert!(
        text.contains("the members could not be queried (cannot create pods/exec"),
        "{text}"
    );
    assert!(text.contains("3 of 3 members healthy"), "{text}");
    with("ctl main -- endpoint status").fails(
        1,
        &[
            "cannot create pods/exec",
            "what to do: ask an administrator",
        ],
    );
    with("status -A").fails(1, &["etcdclusters in all namespaces", "what to do"]);
    with("pause main --yes").fails(1, &["cannot patch etcdcluster/main in namespace prod"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_command_lists_obstacles_with_remedies() {
    let fixture = Fixture::start().await;
    fixture.create_cluster().await;
    let text = fixture.run("plan main").ok();
    assert_eq!(text.matches("  none").count(), 4, "{text}");
    fixture.run("pause main --yes").ok();
    let degraded = condition("Degraded", "True", "MemberDown");
    fixture
        .set_status(json!({ "state": "Paused", "observedGeneration": 1, "conditions": [degraded] }))
        .await;
    let text = fixture.run("plan main").ok();
    for part in [
        "kubectl etcd resume main",
        "no operator has handled the newest spec",
        "problem Degraded MemberDown: message of Degraded",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn command_errors_name_object_and_remedy() {
    let fixture = Fixture::start().await;
    fixture.run("status nothing").fails(
        1,
        &[
            "cannot get etcdcluster/nothing in namespace prod",
            "what to do: check the name",
        ],
    );
    fixture.run("--context other status").fails(
        1,
        &[
            "the kubeconfig cannot be read",
            "kubectl config get-contexts",
        ],
    );
    fixture
        .run("--kubeconfig /nothing status")
        .fails(1, &["the kubeconfig cannot be read"]);
    fixture
        .run("statuss")
        .fails(2, &["unrecognized subcommand"]);
    fixture.create_cluster().await;
    fixture.run("ctl main --member main-x -- get k").fails(
        1,
        &["member main-x of cluster main does not exist", MEMBERS[0]],
    );
    let wrong = fixture.kubeconfig("wrong", json!({ "token": "wrong" }));
    fixture
        .run(&format!("--kubeconfig {} status", wrong.display()))
        .fails(1, &["log in again"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn shell_completion_contains_commands_and_options() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kubectl-etcd"));
        let output = command
            .args(["completion", shell])
            .current_dir(folder.path())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        for word in ["status", "move-leader", "keep-old-data"] {
            assert!(
                output.status.success() && text.contains(word),
                "{shell}: {word}"
            );
        }
    }
}
