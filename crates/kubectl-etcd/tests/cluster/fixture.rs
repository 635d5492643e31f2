//! A kube-apiserver with the CRDs, and the plugin with a kubeconfig for this server.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use api::{EtcdBackup, EtcdCluster};
use k8s_openapi::api::core::v1::{Event, Namespace, PersistentVolumeClaim, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::server::ApiServer;

/// The token of the only user, who has all rights and may impersonate other users.
const TOKEN: &str = "test-token";
pub(crate) const NAMESPACE: &str = "prod";
pub(crate) const CLUSTER_ID: &str = "7f1c0d1f2a3b4c5d";
pub(crate) const MEMBERS: [&str; 3] = ["main-aaaaaaaaaa", "main-bbbbbbbbbb", "main-cccccccccc"];

pub(crate) struct Fixture {
    pub(crate) server: ApiServer,
    pub(crate) client: Client,
    pub(crate) folder: TempDir,
}

/// The result of a plugin command.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) errors: String,
}

impl Ended {
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.out
    }

    /// Asserts that the command failed with this exit code, and that standard error contains all `parts`.
    #[track_caller]
    pub(crate) fn fails(self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        for part in parts {
            assert!(self.errors.contains(part), "{part}: {}", self.errors);
        }
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output
                .status
                .code()
                .expect("the program ended with an exit code"),
            out: String::from_utf8(output.stdout).expect("text"),
            errors: String::from_utf8(output.stderr).expect("text"),
        }
    }
}

impl Fixture {
    /// Starts a kube-apiserver, and creates the CRDs and the namespace.
    pub(crate) async fn start() -> Self {
        let server = ApiServer::start().await;
        let client = server.client();
        let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
        for definition in api::crd::all() {
            definitions
                .create(&PostParams::default(), &definition)
                .await
                .unwrap();
        }
        let fixture = Self {
            server,
            client,
            folder: tempfile::tempdir().unwrap(),
        };
        let namespace = json!({ "metadata": { "name": NAMESPACE } });
        let namespaces: Api<Namespace> = Api::all(fixture.client.clone());
        let namespace = serde_json::from_value(namespace).unwrap();
        namespaces
            .create(&PostParams::default(), &namespace)
            .await
            .unwrap();
        eventually("the kinds that the plugin reads", async || {
            let clusters: Api<EtcdCluster> = fixture.api();
            let backups: Api<EtcdBackup> = fixture.api();
            let restores: Api<api::EtcdRestore> = fixture.api();
            let all = ListParams::default();
            clusters.list(&all).await.is_ok()
                && backups.list(&all).await.is_ok()
                && restores.list(&all).await.is_ok()
        })
        .await;
        fixture.kubeconfig("kubeconfig", json!({ "token": TOKEN }));
        fixture
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Writes a kubeconfig for this server with the credentials in `user`, and returns its path.
    pub(crate) fn kubeconfig(&self, name: &str, user: Value) -> PathBuf {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": {
                "server": self.server.config().cluster_url.to_string(), "insecure-skip-tls-verify": true } }],
            "users": [{ "name": "test", "user": user }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test", "namespace": NAMESPACE } }]
        });
        let file = self.folder.path().join(name);
        std::fs::write(&file, config.to_string()).unwrap();
        file
    }

    /// The plugin with the arguments in `line`. Its working directory is the test's temporary directory.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-etcd"));
        command
            .args(line.split(' '))
            .env("KUBECONFIG", self.folder.path().join("kubeconfig"))
            .env_remove("NO_COLOR")
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
        command
    }

    /// Runs the plugin with the arguments in `line` until it ends.
    pub(crate) fn run(&self, line: &str) -> Ended {
        self.command(line)
            .output()
            .expect("the program can be started")
            .into()
    }

    /// Starts the plugin with the arguments in `line`. Does not wait.
    pub(crate) fn spawn(&self, line: &str) -> Child {
        let mut command = self.command(line);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the program can be started")
    }

    pub(crate) async fn cluster(&self) -> EtcdCluster {
        self.api().get("main").await.unwrap()
    }

    /// Creates the EtcdCluster `main`, whose status has three healthy members, with their pods and volumes.
    pub(crate) async fn create_cluster(&self) {
        let spec = json!({
            "size": 3, "version": "3.5.35",
            "pod": { "persistentVolumeClaimSpec": { "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Gi" } } } }
        });
        self.create::<EtcdCluster>(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main" }, "spec": spec
        }))
        .await;
        self.set_status(json!({})).await;
        for member in MEMBERS {
            self.create_member(member).await;
        }
    }

    async fn create_member(&self, name: &str) {
        let labels = json!({ "app": "etcd", "etcd_cluster": "main", "etcd_node": name,
            "etcd.database.coreos.com/role": "voter" });
        self.create::<PersistentVolumeClaim>(json!({
            "metadata": { "name": name, "labels": labels },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } }
        }))
        .await;
        self.create::<Pod>(json!({
            "metadata": { "name": name, "labels": labels },
            "spec": { "nodeName": "node-0", "containers": [{ "name": "etcd", "image": "etcd",
                "args": [format!("--advertise-client-urls=http://{name}.prod.svc:2379")],
                "env": [{ "name": "X_PASSWORD", "value": "hunter2" }] }] }
        }))
        .await;
        let running = json!({ "status": { "phase": "Running", "containerStatuses": [{ "name": "etcd", "ready": true,
            "restartCount": 0, "image": "etcd", "imageID": "etcd", "state": { "running": {} } }] } });
        let pods: Api<Pod> = self.api();
        let params = PatchParams::default();
        pods.patch_status(name, &params, &Patch::Merge(&running))
            .await
            .unwrap();
    }

    pub(crate) async fn create<K>(&self, object: Value) -> K
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::Serialize
            + serde::de::DeserializeOwned,
    {
        let object: K = serde_json::from_value(object).unwrap();
        self.api()
            .create(&PostParams::default(), &object)
            .await
            .unwrap()
    }

    /// Writes the status of a healthy cluster with these changes, as the operator would.
    pub(crate) async fn set_status(&self, changes: Value) {
        let cluster = self.cluster().await;
        let members: Vec<Value> = MEMBERS
            .iter()
            .enumerate()
            .map(|(index, name)| {
                json!({ "name": name, "id": format!("{index:x}a"), "healthy": true,
                "role": if index == 0 { "Leader" } else { "Voter" }, "version": "3.5.35",
                "dbSize": 4096, "dbSizeInUse": 2048, "revisionLag": 0, "node": "node-0" })
            })
            .collect();
        let mut status = json!({
            "observedGeneration": cluster.metadata.generation, "state": "Ready", "clusterID": CLUSTER_ID,
            "size": 3, "healthyMembers": 3, "currentVersion": "3.5.35", "leader": MEMBERS[0], "memberDetails": members,
            "nextStep": null, "waitingFor": "the schedule of the defragmentation",
            "conditions": [condition("Ready", "True", "AsDesired"), condition("Available", "True", "QuorumHealthy")],
            "lastBackup": { "name": "nightly", "time": "2026-11-26T00:00:00Z", "revision": 100, "location": "s3://b/k" }
        });
        for (key, value) in changes.as_object().unwrap() {
            status[key] = value.clone();
        }
        let patch = json!({ "status": status });
        let clusters: Api<EtcdCluster> = self.api();
        let params = PatchParams::default();
        clusters
            .patch_status("main", &params, &Patch::Merge(&patch))
            .await
            .unwrap();
    }

    /// Creates a periodic EtcdBackup of `main` with one complete backup.
    pub(crate) async fn create_series(&self) {
        self.create::<EtcdBackup>(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": "nightly" },
            "spec": { "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": { "path": "b/k", "awsSecret": "aws" },
                "backupPolicy": { "schedule": "@daily", "maxBackups": 7 } }
        }))
        .await;
        let status = json!({ "status": { "succeeded": true, "sha256": "00", "etcdRevision": 100, "size": 4096,
            "etcdVersion": "3.5.35", "lastSuccessDate": "2026-11-26T00:00:00Z", "location": "s3://b/k_v100",
            "backups": [{ "location": "s3://b/k_v100", "etcdRevision": 100, "completionTime": "2026-11-26T00:00:00Z" }],
            "conditions": [condition("Complete", "True", "Succeeded")] } });
        let backups: Api<EtcdBackup> = self.api();
        let params = PatchParams::default();
        backups
            .patch_status("nightly", &params, &Patch::Merge(&status))
            .await
            .unwrap();
    }

    pub(crate) async fn create_event(&self, name: &str, kind: &str, object: &str) {
        self.create::<Event>(json!({
            "metadata": { "name": name }, "type": "Warning", "reason": "MemberRemoved", "message": format!("{object} is lost"),
            "involvedObject": { "kind": kind, "name": object, "namespace": NAMESPACE },
            "lastTimestamp": "2026-11-26T00:00:00Z", "count": 2
        }))
        .await;
    }
}

pub(crate) fn condition(kind: &str, status: &str, reason: &str) -> Value {
    json!({ "type": kind, "status": status, "reason": reason, "message": format!("message of {kind}"),
        "lastTransitionTime": "2026-11-26T00:00:00Z" })
}

pub(crate) async fn eventually(what: &str, check: impl AsyncFn() -> bool) {
    let end = Instant::now() + Duration::from_mins(1);
    while !check().await {
        assert!(
            Instant::now() < end,
            "{what} was not observed within a minute"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
