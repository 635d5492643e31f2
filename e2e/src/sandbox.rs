//! A namespace of a test's own, with the operators installed in it by the chart, under the chart's own RBAC.

use std::fs::File;
use std::io::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim, Pod};
use kube::api::{
    Api, DeleteParams, DynamicObject, ListParams, PostParams, WatchEvent, WatchParams,
};
use serde_json::json;
use tokio::sync::OnceCell;

use crate::objects::{self, Kind};
use crate::wait::{Poll, until};
use crate::watch::watch_until;
use crate::{DEADLINE, Env, chart, kubectl};

/// Names a file that is empty when a run of `cargo xtask test` begins; each test of the run is a process of its own.
const RUN_LOCK: &str = "E2E_RUN_LOCK";
/// The CRDs are the cluster's, not a namespace's: installed once for all tests of a process, and of a run.
static CRDS: OnceCell<()> = OnceCell::const_new();

/// The release name in every test's namespace.
pub const RELEASE: &str = "etcd-operator";

/// A test's namespace and what it needs to work there.
pub struct Sandbox {
    /// The surroundings.
    pub env: Env,
    /// A client with the rights of the cluster's administrator: the test is the user, not the operator.
    pub client: kube::Client,
    /// The namespace.
    pub namespace: String,
}

/// Runs a test in a namespace of its own with the operators installed. When it fails, what a person would look at is
/// printed: objects, events, logs.
///
/// # Panics
/// When the test fails.
pub async fn scenario(name: &str, body: impl AsyncFnOnce(&Sandbox) -> Result<()>) {
    bare_scenario(name, async |sandbox| {
        sandbox.install_operators().await?;
        body(sandbox).await
    })
    .await;
}

/// As [`scenario`], with the cluster operator alone: the others' pods take the machine's time and have nothing to do.
///
/// # Panics
/// When the test fails.
pub async fn cluster_scenario(name: &str, body: impl AsyncFnOnce(&Sandbox) -> Result<()>) {
    const ALONE: [&str; 4] = [
        "--set",
        "backupOperator.enabled=false",
        "--set",
        "restoreOperator.enabled=false",
    ];
    bare_scenario(name, async |sandbox| {
        sandbox.install_operators_with(&ALONE).await?;
        body(sandbox).await
    })
    .await;
}

/// As [`scenario`], in a namespace without operators.
///
/// # Panics
/// When the test fails.
pub async fn bare_scenario(name: &str, body: impl AsyncFnOnce(&Sandbox) -> Result<()>) {
    let outcome = async {
        let sandbox = Sandbox::create(name).await?;
        let outcome = body(&sandbox).await;
        if outcome.is_err() {
            sandbox.print_state().await;
        }
        sandbox.delete().await;
        outcome
    }
    .await;
    if let Err(error) = outcome {
        #[allow(clippy::panic)] // How a test fails.
        {
            panic!("{name}: {error:?}");
        }
    }
}

impl Sandbox {
    /// Makes the namespace, in which the API server enforces the restricted pod security profile.
    ///
    /// # Errors
    /// When the surroundings are not there.
    pub async fn create(name: &str) -> Result<Self> {
        let env = Env::from_vars()?;
        let client = env.client().await?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let namespace = format!(
            "e2e-{}-{:x}",
            name.replace('_', "-"),
            now.as_micros() % 0x1000_0000
        );
        let object: Namespace = serde_json::from_value(json!({
            "metadata": {"name": namespace, "labels": {
                "app.kubernetes.io/managed-by": "etcd-operator-e2e",
                "pod-security.kubernetes.io/enforce": "restricted",
            }},
        }))?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        until("the namespace is made", DEADLINE, async || {
            match namespaces.create(&PostParams::default(), &object).await {
                // Of an attempt that was not answered: its name is nobody else's.
                Err(kube::Error::Api(error)) if error.code == 409 => Ok(Poll::Done(())),
                made => made.map(|_| Poll::Done(())).context("create the namespace"),
            }
        })
        .await?;
        Ok(Self {
            env,
            client,
            namespace,
        })
    }

    /// Installs the CRDs, once per run, without operators.
    ///
    /// # Errors
    /// If Helm or kubectl fails.
    pub async fn install_crds(&self) -> Result<()> {
        CRDS.get_or_try_init(|| install_crds_once(&self.env))
            .await?;
        Ok(())
    }

    /// Installs the CRDs (once) and the three operators, and waits until they are ready.
    ///
    /// # Errors
    /// When Helm fails or a Deployment does not become available.
    pub async fn install_operators(&self) -> Result<()> {
        self.install_operators_with(&[]).await
    }

    /// As [`Self::install_operators`], with further Helm arguments.
    ///
    /// # Errors
    /// When Helm fails or a Deployment does not become available.
    pub async fn install_operators_with(&self, settings: &[&str]) -> Result<()> {
        self.install_crds().await?;
        let mut all = vec!["--set", "crds.install=false"];
        all.extend_from_slice(settings);
        chart::install(&self.env, RELEASE, &self.namespace, &all).await?;
        self.await_operators().await
    }

    /// Waits until all Deployments, which are the operators', are available.
    ///
    /// # Errors
    /// When they do not become available.
    pub async fn await_operators(&self) -> Result<()> {
        let deployments: Api<Deployment> = self.api();
        until("all operators are available", DEADLINE, async || {
            let list = deployments.list(&ListParams::default()).await?;
            let available = list
                .iter()
                .filter(|deployment| {
                    let status = deployment.status.as_ref();
                    status
                        .and_then(|status| status.available_replicas)
                        .unwrap_or(0)
                        > 0
                })
                .count();
            Ok(if available > 0 && available == list.items.len() {
                Poll::Done(())
            } else {
                Poll::NotYet(format!(
                    "{available} of {} Deployments available",
                    list.items.len()
                ))
            })
        })
        .await
    }

    /// Typed objects in this namespace.
    #[must_use]
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The project's own kinds in this namespace.
    #[must_use]
    pub fn objects(&self, kind: Kind) -> Api<DynamicObject> {
        kind.api(self.client.clone(), &self.namespace)
    }

    /// `kubectl apply -f -` in this namespace.
    ///
    /// # Errors
    /// With what kubectl says.
    pub async fn apply(&self, manifest: &str) -> Result<String> {
        kubectl::run_with_input(
            &self.env,
            &["-n", &self.namespace, "apply", "-f", "-"],
            Some(manifest),
        )
        .await
    }

    /// `kubectl apply --dry-run=server -f -` in this namespace: whether the API server would take it.
    ///
    /// # Errors
    /// With what kubectl says.
    pub async fn dry_run(&self, manifest: &str) -> Result<String> {
        let words = [
            "-n",
            &self.namespace,
            "apply",
            "--dry-run=server",
            "-f",
            "-",
        ];
        kubectl::run_with_input(&self.env, &words, Some(manifest)).await
    }

    /// `kubectl` in this namespace.
    ///
    /// # Errors
    /// With what kubectl says.
    pub async fn kubectl(&self, args: &[&str]) -> Result<String> {
        let mut all = vec!["-n", &self.namespace];
        all.extend_from_slice(args);
        kubectl::run(&self.env, &all).await
    }

    /// Waits until the cluster reports this many ready members, as many voters in etcd, a leader among them, and nothing
    /// left to do.
    ///
    /// # Errors
    /// With the conditions last seen.
    pub async fn await_members(&self, cluster: &str, count: usize) -> Result<DynamicObject> {
        let what = format!("{count} ready members, all voters, nothing in progress");
        objects::await_object(
            &self.objects(Kind::EtcdCluster),
            cluster,
            &what,
            DEADLINE,
            |object| {
                let details = objects::field(object, "/status/memberDetails");
                let voters = details.as_array().map_or(0, |list| {
                    list.iter()
                        .filter(|member| member["role"] != "Learner")
                        .count()
                });
                objects::ready_members(object).len() == count
                    && voters == count
                    && objects::leader(object).is_ok()
                    && objects::field(object, "/status/size") == count
                    && objects::field(object, "/status/observedGeneration").as_i64()
                        == object.metadata.generation
                    && objects::has_condition(object, "Available", "True")
                    && objects::has_condition(object, "Progressing", "False")
            },
        )
        .await
    }

    /// The pods of a cluster that are not being deleted, sorted by name.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn member_pods(&self, cluster: &str) -> Result<Vec<Pod>> {
        let pods: Api<Pod> = self.api();
        let list = pods
            .list(&ListParams::default().labels(&format!("app=etcd,etcd_cluster={cluster}")))
            .await?;
        Ok(list
            .items
            .into_iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .collect())
    }

    /// `kubectl scale`.
    ///
    /// # Errors
    /// With what kubectl says.
    pub async fn scale(&self, cluster: &str, size: usize) -> Result<()> {
        let (cluster, size) = (
            format!("etcdcluster/{cluster}"),
            format!("--replicas={size}"),
        );
        self.kubectl(&["scale", &cluster, &size]).await.map(drop)
    }

    /// Has the operator look at a cluster now: Secrets are not watched, and at rest they are read once a minute. Who uses
    /// it does not test that minute.
    ///
    /// # Errors
    /// With what kubectl says.
    pub async fn trigger_reconcile(&self, cluster: &str) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
        let look = format!("look=at-{now}");
        let words = ["annotate", "etcdcluster", cluster, &look, "--overwrite"];
        self.kubectl(&words).await.map(drop)
    }

    /// Has the kubelets look at a cluster's pods now, and so at their Secrets: by themselves they do once a minute.
    ///
    /// # Errors
    /// With what kubectl says.
    pub async fn trigger_kubelet_sync(&self, cluster: &str) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
        let (members, look) = (
            format!("--selector=app=etcd,etcd_cluster={cluster}"),
            format!("look=at-{now}"),
        );
        let words = ["annotate", "pods", &members, &look, "--overwrite"];
        self.kubectl(&words).await.map(drop)
    }

    /// Deletes a member's pod at once and waits until the operator has seen the loss: until then, the old status
    /// still holds.
    ///
    /// # Errors
    /// When the loss is not reported.
    pub async fn lose_pod(&self, cluster: &str, pod: &str) -> Result<()> {
        let before = self.objects(Kind::EtcdCluster).get(cluster).await?;
        let since = before.metadata.resource_version.unwrap_or_default();
        // The operator is faster where something else has lost the member already.
        let delete = ["delete", "pod", pod, "--now", "--wait=false"];
        self.kubectl(&[&delete[..], &["--ignore-not-found"]].concat())
            .await?;
        // One that comes back on its volume may be ready again before a busy machine looks: so every status is looked at
        // that there was.
        let only = WatchParams::default().fields(&format!("metadata.name={cluster}"));
        let clusters = self.objects(Kind::EtcdCluster);
        let seen = watch_until(&clusters, &only, &since, DEADLINE, |change| {
            let WatchEvent::Modified(object) = change else {
                return None;
            };
            let ready = objects::ready_members(&object);
            (!ready.iter().any(|name| name == pod)).then_some(())
        })
        .await;
        match seen {
            Ok(()) => Ok(()),
            Err(_) => self.await_unready(cluster, pod).await,
        }
    }

    /// Waits until a member is not reported as ready.
    ///
    /// # Errors
    /// When it is reported as ready all along.
    pub async fn await_unready(&self, cluster: &str, member: &str) -> Result<()> {
        objects::await_object(
            &self.objects(Kind::EtcdCluster),
            cluster,
            &format!("the loss of {member} is seen"),
            DEADLINE,
            |object| {
                !objects::ready_members(object)
                    .iter()
                    .any(|name| name == member)
            },
        )
        .await
        .map(drop)
    }

    /// Waits until a member is reported as one whose etcd does not serve. Its kubelet may be dead: etcd is asked.
    ///
    /// # Errors
    /// When it is reported as healthy all along.
    pub async fn await_unhealthy(&self, cluster: &str, member: &str) -> Result<()> {
        let is_member = |one: &serde_json::Value| one["name"] == member && one["healthy"] == false;
        objects::await_object(
            &self.objects(Kind::EtcdCluster),
            cluster,
            &format!("{member} is seen to be down"),
            DEADLINE,
            |object| {
                let details = objects::field(object, "/status/memberDetails").as_array();
                details.into_iter().flatten().any(is_member)
            },
        )
        .await
        .map(drop)
    }

    /// Deletes a cluster and waits until its pods and volumes are gone.
    ///
    /// # Errors
    /// With what is left.
    pub async fn delete_cluster(&self, cluster: &str) -> Result<()> {
        self.kubectl(&["delete", "etcdcluster", cluster]).await?;
        await_no_data(&self.client, &self.namespace, cluster, DEADLINE).await
    }

    /// Waits until so many pods of an operator are left: one that is ending still works for a moment.
    ///
    /// # Errors
    /// When there are others in the end.
    pub async fn await_operator_pods(&self, operator: &str, count: usize) -> Result<()> {
        let what = format!("{count} pods of {operator} are left");
        let selector = format!("app.kubernetes.io/component={operator}");
        let selector = ListParams::default().labels(&selector);
        until(&what, DEADLINE, async || {
            let pods = self.api::<Pod>().list(&selector).await?;
            let found = pods.items.len();
            Ok(if found == count {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{found} pods"))
            })
        })
        .await
    }

    /// Waits for an Event about an object whose `type reason: message` has all these words. Events are told beside the
    /// status, and may be there a moment later.
    ///
    /// # Errors
    /// When there is none in time, with those there are.
    pub async fn await_event(&self, kind: Kind, name: &str, words: &[&str]) -> Result<()> {
        let what = format!("an Event of {name} with {words:?}");
        until(&what, DEADLINE, async || {
            let events = self.events(kind, name).await?;
            let says = |event: &String| words.iter().all(|word| event.contains(word));
            Ok(if events.iter().any(says) {
                Poll::Done(())
            } else {
                Poll::NotYet(events.join("; "))
            })
        })
        .await
    }

    /// The Events about an object, as `type reason: message` lines.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn events(&self, kind: Kind, name: &str) -> Result<Vec<String>> {
        use k8s_openapi::api::events::v1::Event;
        let events: Api<Event> = self.api();
        let list = events.list(&ListParams::default()).await?;
        let about = |event: &Event| {
            let regarding = event.regarding.as_ref();
            regarding.and_then(|regarding| regarding.kind.as_deref()) == Some(&format!("{kind:?}"))
                && regarding.and_then(|regarding| regarding.name.as_deref()) == Some(name)
        };
        Ok(list
            .iter()
            .filter(|event| about(event))
            .map(|event| {
                format!(
                    "{} {}: {}",
                    event.type_.as_deref().unwrap_or(""),
                    event.reason.as_deref().unwrap_or(""),
                    event.note.as_deref().unwrap_or("")
                )
            })
            .collect())
    }

    /// Asks for the namespace's deletion; that it ends is Kubernetes' business.
    pub async fn delete(&self) {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        if let Err(error) = namespaces
            .delete(&self.namespace, &DeleteParams::default())
            .await
        {
            eprintln!("namespace {} is left behind: {error}", self.namespace);
        }
    }

    /// Prints what a person would look at.
    pub async fn print_state(&self) {
        eprintln!("----- state of namespace {} -----", self.namespace);
        let looks: [&[&str]; 7] = [
            &["get", "etcdclusters,etcdbackups,etcdrestores", "-o", "yaml"],
            &["get", "pods,services,pvc,endpointslices", "-o", "wide"],
            &["describe", "pods"],
            &[
                "get",
                "events.events.k8s.io",
                "--sort-by=.metadata.creationTimestamp",
            ],
            &["logs", "deployment/etcd-operator", "--tail=150"],
            &["logs", "deployment/etcd-backup-operator", "--tail=60"],
            &["logs", "deployment/etcd-restore-operator", "--tail=60"],
        ];
        for look in looks {
            eprintln!("--- kubectl {}", look.join(" "));
            let bounded = tokio::time::timeout(Duration::from_secs(30), self.kubectl(look)).await;
            match bounded {
                Ok(Ok(text)) => eprintln!("{text}"),
                Ok(Err(error)) => eprintln!("{error:#}"),
                Err(_) => eprintln!("(no answer in 30 s)"),
            }
        }
    }
}

/// Waits until no pod and no volume of a cluster is left.
///
/// # Errors
/// With what is left.
pub async fn await_no_data(
    client: &kube::Client,
    namespace: &str,
    cluster: &str,
    within: Duration,
) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let volumes: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let selector = ListParams::default().labels(&format!("etcd_cluster={cluster}"));
    until(
        "pods and volumes of the cluster are gone",
        within,
        async || {
            let pods = pods.list(&selector).await?.items.len();
            let volumes = volumes.list(&selector).await?.items.len();
            Ok(if pods + volumes == 0 {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{pods} pods, {volumes} volumes"))
            })
        },
    )
    .await
}

/// Installs the CRDs unless a test of the same run has.
async fn install_crds_once(env: &Env) -> Result<()> {
    let Ok(path) = std::env::var(RUN_LOCK) else {
        return install_crds(env).await;
    };
    let mut file = tokio::task::spawn_blocking(move || {
        let file = File::options().append(true).open(&path)?;
        file.lock()?;
        anyhow::Ok(file)
    })
    .await?
    .context(RUN_LOCK)?;
    if file.metadata().context(RUN_LOCK)?.len() == 0 {
        install_crds(env).await?;
        file.write_all(b"the CRDs are installed\n")
            .context(RUN_LOCK)?;
    }
    Ok(())
}

/// Renders the CRDs out of the chart and applies them, as an administrator may do who installs them apart.
///
/// # Errors
/// With what Helm or kubectl say.
async fn install_crds(env: &Env) -> Result<()> {
    let chart = env.chart.to_string_lossy().into_owned();
    let rendered = chart::helm(
        env,
        &[
            "template",
            "crds",
            &chart,
            "--set",
            "crds.install=true",
            "--show-only",
            "templates/crds.yaml",
        ],
    )
    .await?;
    kubectl::run_with_input(
        env,
        &["apply", "--server-side", "--force-conflicts", "-f", "-"],
        Some(&rendered),
    )
    .await?;
    kubectl::run(
        env,
        &[
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "crd/etcdclusters.etcd.database.coreos.com",
            "crd/etcdbackups.etcd.database.coreos.com",
            "crd/etcdrestores.etcd.database.coreos.com",
        ],
    )
    .await?;
    Ok(())
}
