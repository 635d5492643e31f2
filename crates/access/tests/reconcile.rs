//! EtcdRoles and EtcdUsers with a real kube-apiserver and a real etcd with authentication. The test simulates only the
//! member's pod: a proxy accepts connections at the address in the pod's status, and forwards them to etcd.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../runtime/tests/api_server/server.rs"]
mod server;

use std::net::Ipv4Addr;
use std::time::Duration;

use api::{EtcdCluster, EtcdRole, EtcdUser};
use etcd::testing::{EtcdProcess, Programs, Start};
use etcd::{Access, Credentials, Deadlines, Etcd, EtcdClient, PasswordCheck};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::ApiResource;
use kube::{Api, Client, CustomResourceExt, Resource};
use prometheus_client::registry::Registry;
use runtime::admin::Readiness;
use runtime::controller::Scope;
use runtime::{Operator, crd};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use server::ApiServer;
use tokio::net::{TcpListener, TcpStream};

const NAMESPACE: &str = "default";
const MEMBER: &str = "main-aaaaaaaaaa";
const ROOT_PASSWORD: &str = "correct-horse";

/// The servers of a test.
struct Scene {
    client: Client,
    /// A client that logs in to etcd as the user `root`.
    root: EtcdClient,
    via: [String; 1],
    _etcd: EtcdProcess,
    _server: ApiServer,
}

impl Scene {
    /// Starts the servers, creates the EtcdCluster `main` with authentication, and runs the controllers.
    async fn start() -> Self {
        let server = ApiServer::start().await;
        let client = server.client();
        let start = Start {
            flags: vec!["--bcrypt-cost=4".to_owned()],
            ..Start::default()
        };
        let etcd = EtcdProcess::start(&Programs::find("3.6"), &start).await;
        let root = root();
        let via = [etcd.client_url.clone()];
        root.enable_auth(&via).await.unwrap();
        let scene = Self {
            client,
            root,
            via,
            _etcd: etcd,
            _server: server,
        };
        let address = proxy(&scene.via[0]).await;
        scene.create_cluster(address).await;
        let operator = Operator::new(
            ("etcd-operator", "cluster"),
            (scene.client.clone(), scene.client.clone()),
            Scope::namespace(NAMESPACE),
            (NAMESPACE.into(), "pod".into()),
            &mut Registry::default(),
        );
        tokio::spawn(access::app::run(operator, true));
        eventually("the CRDs are created", async || {
            let all = ListParams::default();
            let roles = scene.api::<EtcdRole>().list(&all).await;
            let users = scene.api::<EtcdUser>().list(&all).await;
            (roles.is_ok() && users.is_ok()).then_some(())
        })
        .await;
        scene
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    async fn create<K>(&self, object: Value)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + Serialize
            + DeserializeOwned,
    {
        let object: K = serde_json::from_value(object).unwrap();
        let (objects, params) = (self.api::<K>(), PostParams::default());
        objects.create(&params, &object).await.unwrap();
    }

    async fn patch<K>(&self, name: &str, patch: Value)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let patch = Patch::Merge(patch);
        let params = PatchParams::default();
        self.api::<K>().patch(name, &params, &patch).await.unwrap();
    }

    async fn patch_status<K>(&self, name: &str, patch: Value)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let patch = Patch::Merge(patch);
        let (objects, params) = (self.api::<K>(), PatchParams::default());
        objects.patch_status(name, &params, &patch).await.unwrap();
    }

    async fn create_cluster(&self, address: Ipv4Addr) {
        let kind = ApiResource::erase::<EtcdCluster>(&());
        let make: &(dyn Fn() -> _ + Sync) = &EtcdCluster::crd;
        let scope = Scope::namespace(NAMESPACE);
        crd::ready(
            &self.client,
            &kind,
            Some(make),
            &scope,
            &Readiness::default(),
        )
        .await;
        self.create::<Secret>(json!({
            "metadata": { "name": "root" }, "stringData": { "username": "root", "password": ROOT_PASSWORD },
        }))
        .await;
        self.create::<EtcdCluster>(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster", "metadata": { "name": "main" },
            "spec": { "size": 1, "version": "3.6.16", "auth": { "secret": "root", "enabled": true } },
        }))
        .await;
        let id = self.root.members(&self.via).await.unwrap().cluster_id;
        let status = json!({ "status": {
            "clusterID": id.to_string(), "currentVersion": "3.6.16", "memberDetails": [{ "name": MEMBER }],
        } });
        self.patch_status::<EtcdCluster>("main", status).await;
        self.create::<Pod>(json!({
            "metadata": { "name": MEMBER },
            "spec": { "containers": [{ "name": "etcd", "image": "etcd" }], "automountServiceAccountToken": false },
        }))
        .await;
        let address = address.to_string();
        let status = json!({ "status": { "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }] } });
        self.patch_status::<Pod>(MEMBER, status).await;
    }

    /// Waits until the condition Ready of the object has this status and this reason. Returns the message of the
    /// condition.
    async fn await_ready<K>(&self, name: &str, status: &str, reason: &str) -> String
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + Serialize
            + DeserializeOwned,
    {
        eventually(&format!("{name}: Ready={status} {reason}"), async || {
            let object = json!(self.api::<K>().get(name).await.unwrap());
            let conditions = object["status"]["conditions"].as_array()?;
            let ready = conditions.iter().find(|one| one["type"] == "Ready")?;
            println!("{name}: {ready}");
            let is_expected = ready["status"] == status
                && ready["reason"] == reason
                && ready["observedGeneration"] == object["metadata"]["generation"];
            is_expected.then(|| ready["message"].to_string())
        })
        .await
    }

    async fn await_deleted<K>(&self, name: &str)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let objects = self.api::<K>();
        let params = DeleteParams::default();
        drop(objects.delete(name, &params).await.unwrap());
        eventually(&format!("{name} is deleted"), async || {
            let found = objects.get_opt(name).await.unwrap();
            found.is_none().then_some(())
        })
        .await;
    }

    async fn await_roles(&self, user: &str, expected: Option<&[&str]>) {
        eventually(&format!("{user} has the roles {expected:?}"), async || {
            let roles = self.root.user_roles(&self.via, user).await.unwrap();
            let roles = roles.as_ref();
            let found: Option<Vec<&str>> =
                roles.map(|roles| roles.iter().map(String::as_str).collect());
            (found.as_deref() == expected).then_some(())
        })
        .await;
    }

    async fn await_permissions(&self, role: &str, expected: Option<usize>) {
        let what = format!("{role} has {expected:?} permissions");
        eventually(&what, async || {
            let found = self.root.role_permissions(&self.via, role).await.unwrap();
            (found.map(|found| found.len()) == expected).then_some(())
        })
        .await;
    }

    /// Triggers a reconcile of the object.
    async fn touch<K>(&self, name: &str)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let nanos = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_nanos();
        let annotations = json!({ "annotations": { "touched": nanos.to_string() } });
        self.patch::<K>(name, json!({ "metadata": annotations }))
            .await;
    }
}

fn root() -> EtcdClient {
    let access = Access {
        tls: None,
        credentials: Some(Credentials {
            user: "root".to_owned(),
            password: ROOT_PASSWORD.to_owned(),
            former: Vec::new(),
        }),
    };
    let deadlines = Deadlines {
        connect: Duration::from_secs(30),
        status: Duration::from_secs(30),
        call: Duration::from_mins(1),
        ..Deadlines::default()
    };
    EtcdClient::with_deadlines(access, deadlines)
}

/// Listens at port 2379 of a loopback address that only this test uses, and forwards connections to etcd. The operators
/// always use this port of a pod.
async fn proxy(client_url: &str) -> Ipv4Addr {
    let target = client_url.rsplit('/').next().unwrap().to_owned();
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = Ipv4Addr::new(127, 77, high, low.max(1));
    let listener = TcpListener::bind((address, 2379)).await.unwrap();
    tokio::spawn(async move {
        loop {
            let (mut from, _) = listener.accept().await.unwrap();
            let target = target.clone();
            tokio::spawn(async move {
                let mut to = TcpStream::connect(target).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
            });
        }
    });
    address
}

async fn eventually<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..900 {
        if let Some(seen) = check().await {
            return seen;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("not true within 90 s: {what}");
}

fn role(name: &str, more: Value) -> Value {
    let mut spec = json!({ "etcdCluster": { "name": "main" } });
    let Value::Object(more) = more else {
        panic!("{more} is not an object");
    };
    spec.as_object_mut().unwrap().extend(more);
    json!({ "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdRole", "metadata": { "name": name },
            "spec": spec })
}

fn user(name: &str, more: Value) -> Value {
    let mut object = role(name, more);
    object["kind"] = json!("EtcdUser");
    object
}

fn secret(password: &str) -> Value {
    json!({ "metadata": { "name": "app" }, "stringData": { "password": password } })
}

/// A client that logs in to etcd as the user `app`. `None` if etcd rejects the password.
async fn application(scene: &Scene, password: &str) -> Option<etcd_client::Client> {
    let options = etcd_client::ConnectOptions::new().with_user("app", password);
    let connected = etcd_client::Client::connect(&scene.via, Some(options)).await;
    connected.ok()
}

/// Invariant 43: the operator corrects and deletes only roles and users that an EtcdRole or EtcdUser owns.
#[tokio::test]
async fn invariant_43_users_and_roles_follow_their_objects() {
    let scene = Scene::start().await;
    is_created(&scene).await;
    drift_is_corrected(&scene).await;
    password_follows_secret(&scene).await;
    existing_user_needs_adoption(&scene).await;
    conflict_is_reported(&scene).await;
    is_deleted(&scene).await;
}

async fn is_created(scene: &Scene) {
    let permissions = json!([{ "access": "ReadWrite", "prefix": "/app/" }]);
    let spec = json!({ "roles": ["writer"], "password": { "secret": "app" } });
    scene.create::<EtcdUser>(user("app", spec)).await;
    let message = scene
        .await_ready::<EtcdUser>("app", "False", "SecretMissing")
        .await;
    assert!(message.contains("Secret app"), "{message}");
    scene.create::<Secret>(secret("first-password")).await;
    scene.touch::<EtcdUser>("app").await;
    scene
        .await_ready::<EtcdUser>("app", "False", "RoleMissing")
        .await;
    let spec = json!({ "permissions": permissions });
    scene.create::<EtcdRole>(role("writer", spec)).await;
    scene
        .await_ready::<EtcdRole>("writer", "True", "AsDesired")
        .await;
    // The EtcdRole triggers the reconcile of the EtcdUser.
    scene
        .await_ready::<EtcdUser>("app", "True", "AsDesired")
        .await;
    scene.await_roles("app", Some(&["writer"])).await;
    let mut app = application(scene, "first-password").await.unwrap();
    app.put("/app/key", "value", None).await.unwrap();
    assert!(app.put("/other", "value", None).await.is_err());
}

async fn drift_is_corrected(scene: &Scene) {
    let (root, via) = (&scene.root, &scene.via);
    let found = root.role_permissions(via, "writer").await.unwrap().unwrap();
    let revoked = root.revoke_permission(via, "writer", &found[0].range);
    revoked.await.unwrap();
    root.create_role(via, "foreign").await.unwrap();
    root.grant_role(via, "app", "foreign").await.unwrap();
    root.grant_role(via, "app", "root").await.unwrap();
    scene.touch::<EtcdRole>("writer").await;
    scene.await_permissions("writer", Some(1)).await;
    // The change of the EtcdRole also triggers a reconcile of the EtcdUser.
    scene.await_roles("app", Some(&["writer"])).await;
    root.delete_user(via, "app").await.unwrap();
    scene.touch::<EtcdUser>("app").await;
    scene.await_roles("app", Some(&["writer"])).await;
    let permissions = root.role_permissions(via, "foreign").await.unwrap();
    assert_eq!(permissions, Some(Vec::new()), "a foreign role stays");
}

async fn password_follows_secret(scene: &Scene) {
    let second = json!({ "stringData": { "password": "second-password" } });
    scene.patch::<Secret>("app", second).await;
    scene.touch::<EtcdUser>("app").await;
    eventually("etcd accepts the second password", async || {
        let check = scene
            .root
            .check_password(&scene.via, "app", "second-password");
        (check.await.unwrap() == PasswordCheck::Accepted).then_some(())
    })
    .await;
    assert!(application(scene, "first-password").await.is_none());
    assert!(application(scene, "second-password").await.is_some());
    let found = scene.api::<EtcdUser>().get("app").await.unwrap();
    let text = serde_json::to_string(&found).unwrap();
    assert!(!text.contains("second-password"), "{text}");
}

async fn existing_user_needs_adoption(scene: &Scene) {
    let (root, via) = (&scene.root, &scene.via);
    assert!(
        root.create_user(via, "legacy", Some("theirs"))
            .await
            .unwrap()
    );
    root.grant_role(via, "legacy", "foreign").await.unwrap();
    let spec = json!({ "password": { "secret": "app" } });
    scene.create::<EtcdUser>(user("legacy", spec)).await;
    scene
        .await_ready::<EtcdUser>("legacy", "False", "AlreadyExists")
        .await;
    let check = root.check_password(via, "legacy", "theirs").await.unwrap();
    assert_eq!(check, PasswordCheck::Accepted);
    scene.await_deleted::<EtcdUser>("legacy").await;
    scene.await_roles("legacy", Some(&["foreign"])).await;
    let spec =
        json!({ "password": { "secret": "app" }, "adopt": true, "deletionPolicy": "Retain" });
    scene.create::<EtcdUser>(user("legacy", spec)).await;
    scene
        .await_ready::<EtcdUser>("legacy", "True", "AsDesired")
        .await;
    scene.await_roles("legacy", Some(&[])).await;
    let check = root.check_password(via, "legacy", "second-password");
    assert_eq!(check.await.unwrap(), PasswordCheck::Accepted);
    scene.await_deleted::<EtcdUser>("legacy").await;
    scene.await_roles("legacy", Some(&[])).await;
}

async fn conflict_is_reported(scene: &Scene) {
    let spec = json!({ "roleName": "writer" });
    scene.create::<EtcdRole>(role("second", spec)).await;
    let message = scene
        .await_ready::<EtcdRole>("second", "False", "NameConflict")
        .await;
    assert!(message.contains("EtcdRole writer"), "{message}");
    scene.await_deleted::<EtcdRole>("second").await;
    scene.await_permissions("writer", Some(1)).await;
}

async fn is_deleted(scene: &Scene) {
    scene.await_deleted::<EtcdUser>("app").await;
    scene.await_roles("app", None).await;
    // The finalizer must not block the deletion of objects whose EtcdCluster no longer exists.
    let clusters = scene.api::<EtcdCluster>();
    let params = DeleteParams::default();
    drop(clusters.delete("main", &params).await.unwrap());
    scene
        .await_ready::<EtcdRole>("writer", "False", "ClusterMissing")
        .await;
    scene.await_deleted::<EtcdRole>("writer").await;
    scene.await_permissions("writer", Some(1)).await;
}
