//! The demo backs up a cluster, deletes it, and restores it: `cargo xtask demo`. It runs on the testbed or on a user's
//! cluster.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use e2e::bucket::Bucket;
use e2e::objects::{
    Kind, await_complete, await_no_data, await_object, field, has_condition, ready_members,
};
use e2e::{Env, Keyspace, chart, kubectl, manifests};
use kube::api::{Api, DynamicObject};

/// Install the operators, create a cluster, back it up, delete it, restore it, and compare every key.
#[derive(Parser)]
struct Arguments {
    /// Keep the restored cluster and the operators, and print commands to use them.
    #[arg(long)]
    keep: bool,
    /// Number of keys to write before the backup.
    #[arg(long, default_value_t = 10_000)]
    keys: usize,
    /// Namespace of the demo. The demo deletes an existing namespace of this name.
    #[arg(long, default_value = "etcd-demo")]
    namespace: String,
    /// Bucket for the backup. The demo creates the bucket if it does not exist.
    #[arg(long, default_value = "etcd-demo")]
    bucket: String,
}

const CLUSTER: &str = "example-etcd-cluster";
const KEY: &str = "demo/etcd.backup";
const STEP_TIMEOUT: Duration = Duration::from_mins(5);

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let env = Env::from_vars()?;
    let client = env.client().await?;
    let mut demo = Demo {
        arguments,
        env,
        client,
        steps: Vec::new(),
    };
    let outcome = demo.run().await;
    if outcome.is_err() {
        let commands: [&[&str]; 3] = [
            &[
                "get",
                "etcdclusters,etcdbackups,etcdrestores,etcdmirrors,etcdroles,etcdusers,pods",
                "-o",
                "wide",
            ],
            &[
                "get",
                "events.events.k8s.io",
                "--sort-by=.metadata.creationTimestamp",
            ],
            &[
                "logs",
                "-l",
                "app.kubernetes.io/name=etcd-operator",
                "--prefix",
                "--tail=25",
            ],
        ];
        for command in commands {
            eprintln!(
                "\n--- kubectl {}\n{}",
                command.join(" "),
                demo.kubectl(command)
                    .await
                    .unwrap_or_else(|e| e.to_string())
            );
        }
    }
    outcome
}

struct Demo {
    arguments: Arguments,
    env: Env,
    client: kube::Client,
    steps: Vec<(String, Duration, String)>,
}

/// The revision and the cluster ID of the original cluster, to compare with the restored cluster.
struct Before {
    revision: i64,
    cluster_id: String,
}

impl Demo {
    async fn run(&mut self) -> Result<()> {
        let s3 = self.env.s3()?.clone();
        let begun = Instant::now();
        self.prepare_namespace().await?;
        self.step("install the chart: three operators", async |demo| {
            demo.install().await
        })
        .await?;
        self.step("create a cluster of 3 members", async |demo| {
            demo.create_cluster().await
        })
        .await?;
        let before = {
            let keys = self.arguments.keys;
            self.step(&format!("write {keys} keys"), async |demo| {
                demo.write().await
            })
            .await?
        };
        let bucket = Bucket::create(&s3, &self.arguments.bucket).await?;
        self.step("back up the cluster to S3", async |demo| {
            demo.back_up(&bucket, &before).await
        })
        .await?;
        self.step("delete the cluster with its data", async |demo| {
            demo.lose().await
        })
        .await?;
        self.step("restore it", async |demo| demo.restore(&bucket).await)
            .await?;
        self.step("wait for 3 members", async |demo| {
            demo.await_cluster().await
        })
        .await?;
        self.step("read every key back", async |demo| {
            demo.verify(&before).await
        })
        .await?;
        self.print_table(begun.elapsed());
        if self.arguments.keep {
            self.print_usage();
        } else {
            self.remove().await?;
        }
        Ok(())
    }

    async fn step<T>(
        &mut self,
        what: &str,
        body: impl AsyncFnOnce(&Self) -> Result<(T, String)>,
    ) -> Result<T> {
        print!("{what} ... ");
        std::io::stdout().flush()?;
        let begun = Instant::now();
        let (value, note) = body(self).await.with_context(|| what.to_owned())?;
        let took = begun.elapsed();
        println!(
            "{:.1} s{}{note}",
            took.as_secs_f64(),
            if note.is_empty() { "" } else { ": " }
        );
        self.steps.push((what.to_owned(), took, note));
        Ok(value)
    }

    async fn prepare_namespace(&self) -> Result<()> {
        // The namespace is deleted first, because an interrupted demo may have left it.
        let name = &self.arguments.namespace;
        kubectl::run(
            &self.env,
            &[
                "delete",
                "namespace",
                name,
                "--ignore-not-found",
                "--wait=true",
            ],
        )
        .await?;
        kubectl::run(&self.env, &["create", "namespace", name]).await?;
        Ok(())
    }

    async fn install(&self) -> Result<((), String)> {
        let settings = ["--set", "crds.install=true", "--take-ownership", "--wait"];
        chart::install(
            &self.env,
            "etcd-operator",
            &self.arguments.namespace,
            &settings,
        )
        .await?;
        Ok(((), String::new()))
    }

    async fn create_cluster(&self) -> Result<((), String)> {
        let manifest = Self::example("example-etcd-cluster.yaml")?;
        self.apply(&manifest).await?;
        self.await_cluster().await
    }

    async fn await_cluster(&self) -> Result<((), String)> {
        let object = await_object(
            &self.objects(Kind::EtcdCluster),
            CLUSTER,
            "3 ready members",
            STEP_TIMEOUT,
            |object| {
                ready_members(object).len() == 3
                    && has_condition(object, "Available", "True")
                    && has_condition(object, "Progressing", "False")
            },
        )
        .await?;
        let version = field(&object, "/status/currentVersion")
            .as_str()
            .unwrap_or("?")
            .to_owned();
        let id = field(&object, "/status/clusterID")
            .as_str()
            .unwrap_or("?")
            .to_owned();
        Ok(((), format!("etcd {version}, cluster ID {id}")))
    }

    async fn write(&self) -> Result<(Before, String)> {
        let keys = Keyspace::of_cluster(&self.env, &self.arguments.namespace, CLUSTER).await?;
        let count = self.arguments.keys;
        let live = std::io::stdout().is_terminal();
        let revision = keys
            .fill("demo/", count, |done| {
                if live && (done % 250 == 0 || done == count) {
                    print!("\rwrite {count} keys ... {done} ");
                    let _ = std::io::stdout().flush();
                }
            })
            .await?;
        let cluster_id = format!("{:x}", keys.cluster_id().await?);
        Ok((
            Before {
                revision,
                cluster_id,
            },
            format!("revision {revision}"),
        ))
    }

    async fn back_up(&self, bucket: &Bucket, before: &Before) -> Result<((), String)> {
        let s3 = self.env.s3()?;
        let secret = manifests::aws_secret(s3, "aws");
        self.apply(&secret).await?;
        let manifest = manifests::backup(s3, "demo", CLUSTER, &format!("{}/{KEY}", bucket.name));
        self.apply(&manifest).await?;
        let done = await_complete(&self.objects(Kind::EtcdBackup), "demo", STEP_TIMEOUT).await?;
        let revision = field(&done, "/status/etcdRevision").as_i64().unwrap_or(0);
        ensure!(
            revision == before.revision,
            "the backup has revision {revision}, expected {}",
            before.revision
        );
        let size = field(&done, "/status/size").as_u64().unwrap_or(0);
        let location = field(&done, "/status/location")
            .as_str()
            .unwrap_or("?")
            .to_owned();
        Ok((
            (),
            format!(
                "{location}, {:.1} MiB, revision {revision}",
                mebibytes(size)
            ),
        ))
    }

    async fn lose(&self) -> Result<((), String)> {
        self.kubectl(&["delete", "etcdcluster", CLUSTER]).await?;
        await_no_data(
            &self.client,
            &self.arguments.namespace,
            CLUSTER,
            STEP_TIMEOUT,
        )
        .await?;
        Ok(((), "all pods and volumes are deleted".to_owned()))
    }

    async fn restore(&self, bucket: &Bucket) -> Result<((), String)> {
        let s3 = self.env.s3()?;
        let manifest = manifests::restore(s3, "demo", CLUSTER, &format!("{}/{KEY}", bucket.name));
        self.apply(&manifest).await?;
        let done = await_complete(&self.objects(Kind::EtcdRestore), "demo", STEP_TIMEOUT).await?;
        let revision = field(&done, "/status/restoredRevision")
            .as_i64()
            .unwrap_or(0);
        Ok(((), format!("etcd serves revision {revision}")))
    }

    async fn verify(&self, before: &Before) -> Result<((), String)> {
        let keys = Keyspace::of_cluster(&self.env, &self.arguments.namespace, CLUSTER).await?;
        let revision = keys.verify("demo/", self.arguments.keys).await?;
        ensure!(
            revision == before.revision,
            "revision {revision} after the restore, expected {}",
            before.revision
        );
        let id = format!("{:x}", keys.cluster_id().await?);
        ensure!(
            id != before.cluster_id,
            "the cluster ID did not change, so the cluster was not restored"
        );
        Ok((
            (),
            format!(
                "read all {} keys; revision {revision}, as before the backup",
                self.arguments.keys
            ),
        ))
    }

    async fn remove(&self) -> Result<()> {
        let namespace = self.arguments.namespace.as_str();
        chart::helm(&self.env, &["uninstall", "etcd-operator", "-n", namespace]).await?;
        kubectl::run(
            &self.env,
            &["delete", "namespace", namespace, "--wait=false"],
        )
        .await?;
        Ok(())
    }

    fn example(file: &str) -> Result<String> {
        let root: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../examples")
            .join(file);
        std::fs::read_to_string(&root).with_context(|| format!("read {}", root.display()))
    }

    async fn apply(&self, manifest: &str) -> Result<()> {
        let arguments = ["-n", &self.arguments.namespace, "apply", "-f", "-"];
        kubectl::run_with_input(&self.env, &arguments, Some(manifest)).await?;
        Ok(())
    }

    async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let mut all = vec!["-n", self.arguments.namespace.as_str()];
        all.extend_from_slice(arguments);
        kubectl::run(&self.env, &all).await
    }

    fn objects(&self, kind: Kind) -> Api<DynamicObject> {
        kind.api(self.client.clone(), &self.arguments.namespace)
    }

    fn print_table(&self, total: Duration) {
        let width = self
            .steps
            .iter()
            .map(|(what, _, _)| what.len())
            .max()
            .unwrap_or(0);
        println!("\n{:width$}  seconds", "step");
        for (what, took, note) in &self.steps {
            println!("{what:width$}  {:7.1}  {note}", took.as_secs_f64());
        }
        println!("{:width$}  {:7.1}", "total", total.as_secs_f64());
    }

    fn print_usage(&self) {
        let namespace = &self.arguments.namespace;
        println!(
            "\nThe cluster is still running. To use it:\n\
             \n  eval \"$(cargo xtask testbed env)\"        # on the testbed: KUBECONFIG and PATH\
             \n  kubectl -n {namespace} get etcd,pods\
             \n  kubectl -n {namespace} describe etcd {CLUSTER}\
             \n  kubectl -n {namespace} port-forward service/{CLUSTER}-client 2379\
             \n  kubectl -n {namespace} scale etcdcluster/{CLUSTER} --replicas=5\
             \n\nTo remove it: kubectl delete namespace {namespace}; cargo xtask testbed down"
        );
    }
}

#[allow(clippy::cast_precision_loss)] // The result is only displayed, so its precision is sufficient.
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1u32 << 20)
}
