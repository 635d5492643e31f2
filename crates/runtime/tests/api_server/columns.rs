//! Tests of the columns that `kubectl get` prints for the six kinds, and of their category and short names.

use std::process::Command;

use api::{EtcdBackup, EtcdMirror, EtcdRestore, EtcdRole, EtcdUser};
use serde_json::Value;

use super::*;

/// Runs `kubectl`. One binary of the testbed contains all Kubernetes programs, and the name of the executable selects
/// the program.
fn kubectl(server: &ApiServer, args: &[&str]) -> String {
    let built = etcd::testing::built("kube-", "kube")
        .expect("kubectl is not installed: run `cargo xtask testbed build`");
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("kubectl");
    std::os::unix::fs::symlink(built, &program).unwrap();
    let output = Command::new(program)
        .args([
            &format!("--server={}", server.url),
            &format!("--token={}", server::TOKEN),
            "--insecure-skip-tls-verify",
            &format!("--namespace={NAMESPACE}"),
            &format!("--cache-dir={}", dir.path().display()),
        ])
        .args(args)
        .env("KUBECONFIG", "/dev/null")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {args:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// The cells of a line. kubectl separates columns with at least three spaces.
fn cells(line: &str) -> Vec<&str> {
    line.split("   ")
        .map(str::trim)
        .filter(|cell| !cell.is_empty())
        .collect()
}

/// Creates an object without a status, and then writes its status.
async fn create<K>(client: &Client, name: &str, spec: Value, status: Option<Value>)
where
    K: Resource<DynamicType = ()>,
{
    let kind = ApiResource::erase::<K>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), NAMESPACE, &kind);
    let object = json!({
        "apiVersion": kind.api_version, "kind": kind.kind, "metadata": { "name": name }, "spec": spec,
    });
    let object: DynamicObject = serde_json::from_value(object).unwrap();
    api.create(&PostParams::default(), &object).await.unwrap();
    if let Some(status) = status {
        let patch = Patch::Merge(json!({ "status": status }));
        api.patch_status(name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
}

fn condition(kind: &str, status: &str, reason: &str) -> Value {
    json!({
        "type": kind, "status": status, "reason": reason, "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    })
}

#[tokio::test]
async fn kubectl_get_shows_columns_and_category_of_every_kind() {
    let server = ApiServer::start().await;
    let client = server.client();
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in api::crd::all() {
        let parameters = PostParams::default();
        definitions.create(&parameters, &definition).await.unwrap();
    }
    for kind in [
        ApiResource::erase::<EtcdCluster>(&()),
        ApiResource::erase::<EtcdBackup>(&()),
        ApiResource::erase::<EtcdRestore>(&()),
        ApiResource::erase::<EtcdMirror>(&()),
        ApiResource::erase::<EtcdRole>(&()),
        ApiResource::erase::<EtcdUser>(&()),
    ] {
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), NAMESPACE, &kind);
        eventually("the API of the kind is served", async || {
            api.list(&ListParams::default()).await.ok()
        })
        .await;
    }
    create_objects(&client).await;
    shows_backups(&server);
    shows_restores(&server);
    shows_mirrors(&server);
    shows_users(&server);

    let all = kubectl(&server, &["get", "etcds", "--no-headers", "-o", "name"]);
    let group = "etcd.database.coreos.com";
    let mut names: Vec<&str> = all.lines().collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            format!("etcdbackup.{group}/nightly"),
            format!("etcdbackup.{group}/old"),
            format!("etcdcluster.{group}/main"),
            format!("etcdmirror.{group}/copy"),
            format!("etcdrestore.{group}/again"),
            format!("etcdrole.{group}/reader"),
            format!("etcduser.{group}/app"),
        ]
    );
    let cluster = kubectl(&server, &["get", "etcd"]);
    let row = cells(cluster.lines().nth(1).unwrap());
    assert_eq!(
        row[..6],
        ["main", "3", "3", "3.7.3", "True", "Ready"],
        "{cluster}"
    );
}

/// Creates an EtcdCluster, two EtcdBackups, an EtcdRestore, an EtcdMirror, an EtcdRole and an EtcdUser, each with a
/// status.
async fn create_objects(client: &Client) {
    let cluster = json!({ "state": "Ready", "healthyMembers": 3, "currentVersion": "3.7.3", "controlPaused": false,
        "conditions": [condition("Ready", "True", "Ready")] });
    create::<EtcdCluster>(client, "main", json!({ "size": 3 }), Some(cluster)).await;
    let spec = json!({ "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": { "path": "bucket/key" },
        "backupPolicy": { "schedule": "0 3 * * *" } });
    let backup = json!({ "succeeded": true, "cluster": "main", "schedule": "0 3 * * *", "sizeText": "1.2 GiB",
        "duration": "1m12s", "nextBackupTime": "2026-11-27T03:00:00Z", "lastSuccessDate": "2026-01-01T00:00:00Z",
        "conditions": [condition("Complete", "True", "Succeeded"), condition("Ready", "True", "Scheduled")] });
    create::<EtcdBackup>(client, "nightly", spec.clone(), Some(backup)).await;
    // An earlier release wrote this status, so it lacks the fields that later releases have added.
    let old = json!({ "succeeded": true, "size": 7 });
    create::<EtcdBackup>(client, "old", spec, Some(old)).await;
    let spec = json!({ "etcdCluster": { "name": "main" }, "backup": { "name": "nightly" } });
    let restore = json!({ "succeeded": false, "source": "EtcdBackup nightly", "phase": "Preparing",
        "progress": { "bytes": 45, "totalBytes": 100, "text": "45%" },
        "conditions": [condition("Ready", "False", "InProgress")] });
    create::<EtcdRestore>(client, "again", spec, Some(restore)).await;
    let spec = json!({ "source": { "etcdEndpoints": ["https://etcd.example.com:2379"] },
        "destination": { "etcdCluster": { "name": "main" } } });
    let mirror = json!({ "source": "etcd.example.com", "sourceRevision": 70,
        "lag": { "revisions": 12, "seconds": 3, "text": "12 revisions, 3s" },
        "conditions": [condition("Ready", "True", "UpToDate")] });
    create::<EtcdMirror>(client, "copy", spec, Some(mirror)).await;
    let owned = |name: &str| {
        json!({ "owned": { "name": name, "cluster": "main", "clusterUID": "u", "clusterID": "aa", "created": true },
            "conditions": [condition("Ready", "True", "AsDesired")] })
    };
    let spec = json!({ "etcdCluster": { "name": "main" }, "roleName": "read-all",
        "permissions": [{ "access": "Read", "prefix": "" }] });
    create::<EtcdRole>(client, "reader", spec, Some(owned("read-all"))).await;
    let spec = json!({ "etcdCluster": { "name": "main" }, "roles": ["reader"], "clientCertificate": true });
    create::<EtcdUser>(client, "app", spec, Some(owned("app"))).await;
}

fn shows_backups(server: &ApiServer) {
    let backups = kubectl(server, &["get", "etcdb"]);
    let mut lines = backups.lines();
    let header = [
        "NAME",
        "CLUSTER",
        "SCHEDULE",
        "SUCCEEDED",
        "STATE",
        "LAST SUCCESS",
        "NEXT",
        "SIZE",
        "DURATION",
        "AGE",
    ];
    assert_eq!(cells(lines.next().unwrap()), header, "{backups}");
    let row = cells(lines.next().unwrap());
    let shown = [&row[..5], &row[6..9]].concat();
    assert_eq!(
        shown,
        [
            "nightly",
            "main",
            "0 3 * * *",
            "true",
            "Scheduled",
            "2026-11-27T03:00:00Z",
            "1.2 GiB",
            "1m12s"
        ],
        "{backups}"
    );
    assert_eq!(
        cells(lines.next().unwrap())[..2],
        ["old", "true"],
        "{backups}"
    );
}

fn shows_restores(server: &ApiServer) {
    let restores = kubectl(server, &["get", "etcdr"]);
    let mut lines = restores.lines();
    let header = [
        "NAME",
        "CLUSTER",
        "SOURCE",
        "PHASE",
        "PROGRESS",
        "SUCCEEDED",
        "STATE",
        "AGE",
    ];
    assert_eq!(cells(lines.next().unwrap()), header, "{restores}");
    let row = cells(lines.next().unwrap());
    let expected = [
        "again",
        "main",
        "EtcdBackup nightly",
        "Preparing",
        "45%",
        "false",
        "InProgress",
    ];
    assert_eq!(row[..7], expected, "{restores}");
}

fn shows_mirrors(server: &ApiServer) {
    let mirrors = kubectl(server, &["get", "etcdm"]);
    let mut lines = mirrors.lines();
    let header = [
        "NAME",
        "SOURCE",
        "DESTINATION",
        "STATE",
        "REVISION",
        "LAG",
        "AGE",
    ];
    assert_eq!(cells(lines.next().unwrap()), header, "{mirrors}");
    let row = cells(lines.next().unwrap());
    let expected = [
        "copy",
        "etcd.example.com",
        "main",
        "UpToDate",
        "70",
        "12 revisions, 3s",
    ];
    assert_eq!(row[..6], expected, "{mirrors}");
}

fn shows_users(server: &ApiServer) {
    let kinds: [(&str, &[&str], &[&str]); 2] = [
        (
            "etcdroles",
            &["NAME", "CLUSTER", "ROLE", "READY", "STATE", "AGE"],
            &["reader", "main", "read-all", "True", "AsDesired"],
        ),
        (
            "etcdusers",
            &["NAME", "CLUSTER", "USER", "ROLES", "READY", "STATE", "AGE"],
            &["app", "main", "app", "[\"reader\"]", "True", "AsDesired"],
        ),
    ];
    for (kind, header, expected) in kinds {
        let shown = kubectl(server, &["get", kind]);
        let mut lines = shown.lines();
        assert_eq!(cells(lines.next().unwrap()), header, "{shown}");
        let row = cells(lines.next().unwrap());
        assert_eq!(&row[..expected.len()], expected, "{shown}");
    }
}
