//! The objects of a drill: three clusters, a scheduled backup, and a folder with the user's keys and passwords.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, backup_with};
use e2e::objects::{Kind, await_complete, field, has_condition};
use e2e::tls::{self, Authority};
use e2e::wait::Poll;
use e2e::{
    DEADLINE, Env, Keyspace, Prometheus, Sandbox, chart, drill, kubectl, sandbox, step, until,
};
use kube::api::DynamicObject;
use serde_json::Value;

/// The namespace of the operators and the clusters.
const NAMESPACE: &str = "drill";
/// A cluster with generated certificates.
pub(crate) const ORDERS: &str = "orders";
/// A cluster without TLS, with a small quota and a scheduled backup. During the drill, a client writes to this
/// cluster.
pub(crate) const SESSIONS: &str = "sessions";
/// A cluster with certificates from Secrets, and with authentication.
pub(crate) const BILLING: &str = "billing";
/// The EtcdBackup with a schedule.
pub(crate) const SCHEDULE: &str = "sessions-backup";
/// The Secret with the server certificate of [`BILLING`].
const SERVER_SECRET: &str = "billing-server";
const BUCKET: &str = "drill-backups";
/// The kinds of custom resources, in the order in which they are deleted.
const KINDS: &str = "etcdusers,etcdroles,etcdmirrors,etcdrestores,etcdbackups,etcdclusters";
/// Time limit until the operators have removed the finalizers of the custom resources.
const OBJECTS_TIMEOUT: &str = "--timeout=60s";
/// Time limit for the deletion of the namespace.
const NAMESPACE_TIMEOUT: &str = "--timeout=180s";
/// The common name of the certificate authority (CA) that signs the certificates of [`BILLING`].
const AUTHORITY: &str = "the authority of the drill";
const PASSWORD: &str = "correct-horse-battery";

/// Lines under `spec` of all clusters: each member has a volume.
const DURABLE: &str = "  pod:
    persistentVolumeClaimSpec:
      accessModes: [ReadWriteOnce]
      resources: {requests: {storage: 128Mi}}
";
/// For each cluster, the lines of its manifest under `spec`.
const CLUSTERS: [(&str, &str); 3] = [
    (ORDERS, "  TLS: {generated: {}}\n"),
    (
        SESSIONS,
        "  etcd: {quotaBackendBytes: 25165824, autoCompactionMode: revision, autoCompactionRetention: \"1000\"}\n",
    ),
    (
        BILLING,
        "  TLS:
    static:
      member: {peerSecret: billing-peer, serverSecret: billing-server}
      operatorSecret: billing-operator
  auth: {secret: billing-root}
  memberReplacement: {after: 24h}
",
    ),
];

/// The Kubernetes objects and the files of a drill.
pub(crate) struct Fleet {
    pub(crate) sandbox: Sandbox,
    folder: PathBuf,
}

/// The number of problems that `cargo xtask drill check` found.
#[derive(Debug)]
pub(crate) struct Problems {
    /// Number of EtcdClusters and EtcdBackups that are not ready.
    pub(crate) objects: usize,
    /// Number of alerts that are pending or firing, without a pending `EtcdBackupOld`.
    pub(crate) alerts: usize,
}

impl Problems {
    pub(crate) fn none(&self) -> bool {
        self.objects + self.alerts == 0
    }
}

impl Fleet {
    pub(crate) async fn of(folder: &Path) -> Result<Self> {
        let env = Env::from_vars()?;
        let sandbox = Sandbox {
            client: env.client().await?,
            env,
            namespace: NAMESPACE.to_owned(),
        };
        Ok(Self {
            sandbox,
            folder: folder.to_owned(),
        })
    }

    /// The file that lists the injected faults.
    pub(crate) fn record(&self) -> PathBuf {
        self.folder.join("record")
    }

    /// The file with the address of Prometheus.
    pub(crate) fn address(&self) -> PathBuf {
        self.folder.join("prometheus")
    }

    /// The log file of the background process.
    pub(crate) fn log(&self) -> PathBuf {
        self.folder.join("serve.log")
    }

    /// The folder with the user's keys and passwords.
    pub(crate) fn vault(&self) -> PathBuf {
        self.folder.join("vault")
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Creates the namespace, the operators, the clusters and the backup. First deletes the objects of an earlier
    /// drill.
    pub(crate) async fn create(&self) -> Result<()> {
        let sandbox = &self.sandbox;
        let prepared = async {
            self.delete().await?;
            kubectl::run(&sandbox.env, &["create", "namespace", NAMESPACE]).await?;
            sandbox.install_operators().await
        };
        step("install the operators", prepared).await?;
        let s3 = sandbox.env.s3()?;
        self.apply_secrets().await?;
        let clusters = async {
            for (name, more) in CLUSTERS {
                sandbox.apply(&self.cluster(name, more)?).await?;
            }
            for (name, _) in CLUSTERS {
                sandbox.await_members(name, 3).await?;
            }
            anyhow::Ok(())
        };
        step("create three clusters", clusters).await?;
        step("turn on authentication", self.enable_auth()).await?;
        let backed_up = async {
            Bucket::create(s3, BUCKET).await?;
            let path = format!("{BUCKET}/{SESSIONS}");
            let policy = "  backupPolicy: {backupIntervalInSecond: 60, maxBackups: 3}\n";
            let backup = backup_with(s3, SCHEDULE, SESSIONS, &path, policy);
            sandbox.apply(&backup).await?;
            await_complete(&sandbox.objects(Kind::EtcdBackup), SCHEDULE, DEADLINE).await
        };
        step("make the first backup", backed_up).await.map(drop)
    }

    /// Deletes the objects, the operators and the namespace. If the namespace cannot be deleted, the error lists the
    /// objects with finalizers.
    pub(crate) async fn delete(&self) -> Result<()> {
        let env = &self.sandbox.env;
        let get = [
            "get",
            "namespace",
            NAMESPACE,
            "--ignore-not-found",
            "-o=name",
        ];
        if kubectl::run(env, &get).await?.trim().is_empty() {
            return Ok(());
        }
        // The objects of `KINDS` are deleted before the operators, because only the operators remove the finalizers of
        // these objects.
        let words = ["delete", KINDS, "--all", OBJECTS_TIMEOUT];
        if let Err(error) = self.sandbox.kubectl(&words).await {
            println!("some objects cannot be deleted now: {error:#}");
        }
        let release = [
            "uninstall",
            sandbox::RELEASE,
            "-n",
            NAMESPACE,
            "--ignore-not-found",
        ];
        chart::helm(env, &release).await?;
        let words = ["delete", "namespace", NAMESPACE, "--ignore-not-found"];
        let words = [&words[..], &[NAMESPACE_TIMEOUT]].concat();
        match kubectl::run(env, &words).await {
            Ok(_) => Ok(()),
            Err(error) => Err(error.context(self.remains().await)),
        }
    }

    /// The reason why the namespace still exists, and commands that remove it.
    async fn remains(&self) -> String {
        let kinds = format!("{KINDS},pods,pvc,secrets");
        let listed = self.sandbox.kubectl(&["get", &kinds, "-o=json"]).await;
        let list: Option<Value> = listed
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok());
        let remedies = drill::finalizer_remedies(&list.unwrap_or_default(), NAMESPACE);
        let remedies = if remedies.is_empty() {
            format!("`kubectl get namespace {NAMESPACE} -o yaml` names the cause")
        } else {
            remedies.join("\n")
        };
        format!(
            "the namespace {NAMESPACE} cannot be deleted completely:\n{remedies}\nThen repeat the command of the drill"
        )
    }

    fn cluster(&self, name: &str, more: &str) -> Result<String> {
        let versions = &self.sandbox.env.etcd_versions;
        let version = versions.last().context("E2E_ETCD_VERSIONS is empty")?;
        Ok(format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: {name}}}\nspec:\n  \
             size: 3\n  version: \"{version}\"\n{more}{DURABLE}"
        ))
    }

    /// Creates the Secrets, and stores their content in the vault.
    async fn apply_secrets(&self) -> Result<()> {
        let s3 = self.sandbox.env.s3()?;
        let authority = Authority::new(AUTHORITY)?;
        std::fs::create_dir_all(self.vault()).context("create the vault")?;
        let credentials = format!(
            "aws_access_key_id = {}\naws_secret_access_key = {}\n",
            s3.access_key, s3.secret_key
        );
        for (name, content) in [
            ("billing-ca.crt", authority.pem.clone()),
            ("billing-ca.key", authority.key_pem()),
            ("billing-root-password", format!("{PASSWORD}\n")),
            ("s3-credentials", credentials),
        ] {
            std::fs::write(self.vault().join(name), content).context(name)?;
        }
        for secret in [
            tls::secret(
                "billing-peer",
                tls::PEER,
                &authority.sign(&names())?,
                &authority.pem,
            ),
            tls::secret(
                SERVER_SECRET,
                tls::SERVER,
                &authority.sign(&names())?,
                &authority.pem,
            ),
            tls::secret(
                "billing-operator",
                tls::CLIENT,
                &authority.client()?,
                &authority.pem,
            ),
            password_secret(PASSWORD),
            aws_secret(s3, "aws"),
        ] {
            self.sandbox.apply(&secret).await?;
        }
        Ok(())
    }

    /// Reads the CA from the vault.
    fn authority(&self) -> Result<Authority> {
        let read = |name: &str| {
            let file = self.vault().join(name);
            std::fs::read_to_string(&file).with_context(|| file.display().to_string())
        };
        Authority::of(
            AUTHORITY,
            &read("billing-ca.crt")?,
            &read("billing-ca.key")?,
        )
    }

    /// The Secret of [`BILLING`] with an expired server certificate.
    pub(crate) fn expired_secret(&self) -> Result<String> {
        let authority = self.authority()?;
        let signed = authority.sign_expired(&names())?;
        Ok(tls::secret(
            SERVER_SECRET,
            tls::SERVER,
            &signed,
            &authority.pem,
        ))
    }

    /// Enables authentication of [`BILLING`] with a client certificate, as a user does.
    async fn enable_auth(&self) -> Result<()> {
        let authority = self.authority()?;
        let name = format!("{BILLING}-client.{NAMESPACE}.svc");
        let identity = authority.identity(Some(&authority.client()?), &name);
        let env = &self.sandbox.env;
        let keys = Keyspace::of_tls_cluster(env, NAMESPACE, BILLING, &identity).await?;
        keys.enable_auth(PASSWORD).await?;
        self.sandbox.await_members(BILLING, 3).await.map(drop)
    }

    pub(crate) async fn get(&self, kind: Kind, name: &str) -> Result<Option<DynamicObject>> {
        let found = self.sandbox.objects(kind).get_opt(name).await;
        found.with_context(|| format!("get {name}"))
    }

    pub(crate) fn prometheus(&self) -> Result<Prometheus> {
        let file = self.address();
        let address = std::fs::read_to_string(&file).with_context(|| {
            format!(
                "Prometheus does not run: read the log {}, then run `cargo xtask drill start` again",
                self.log().display()
            )
        })?;
        Ok(Prometheus::at(address))
    }

    /// Counts the objects that are not ready, and the active alerts.
    pub(crate) async fn problems(&self) -> Result<Problems> {
        let mut objects = 0;
        for (name, _) in CLUSTERS {
            let found = self.get(Kind::EtcdCluster, name).await?;
            objects += usize::from(!found.is_some_and(|object| is_ready(&object)));
        }
        let found = self.get(Kind::EtcdBackup, SCHEDULE).await?;
        objects += usize::from(!found.is_some_and(|object| is_ready(&object)));
        let mut alerts = self.prometheus()?.active_alerts().await?;
        // A pending `EtcdBackupOld` is not a problem, because it is also pending while a backup is due or runs.
        let is_due = |alert: &Value| {
            alert["state"] == "pending" && alert["labels"]["alertname"] == "EtcdBackupOld"
        };
        alerts.retain(|alert| !is_due(alert));
        let alerts = alerts.len();
        Ok(Problems { objects, alerts })
    }

    pub(crate) async fn await_healthy(&self) -> Result<()> {
        until("the fleet is healthy", DEADLINE * 2, async || {
            let problems = self.problems().await?;
            Ok(if problems.none() {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{problems:?}"))
            })
        })
        .await
    }
}

/// True if the operator has processed the current spec, and the condition `Ready` is True.
fn is_ready(object: &DynamicObject) -> bool {
    field(object, "/status/observedGeneration").as_i64() == object.metadata.generation
        && has_condition(object, "Ready", "True")
}

/// The DNS names in the server certificate of [`BILLING`].
fn names() -> Vec<String> {
    vec![format!("*.{NAMESPACE}.svc"), "localhost".to_owned()]
}

/// The Secret with the name and password of the etcd user root of [`BILLING`].
pub(crate) fn password_secret(password: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: billing-root}}\ntype: kubernetes.io/basic-auth\nstringData: \
         {{username: root, password: {password}}}\n"
    )
}
