//! The namespace of a test, and the operators that the chart installs in it.

mod cluster;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, PostParams};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::objects::Kind;
use crate::wait::{Poll, until, until_allowed};
use crate::{DEADLINE, Env, chart, crds, kubectl};

/// The name of the Helm release in the namespace of every test.
pub const RELEASE: &str = "etcd-operator";
/// Time limit until the API server has noticed the deletion of a policy. The API server checks once per second.
const POLICY_DELAY: Duration = Duration::from_secs(30);

/// The namespace of a test, the settings of the tests, and a client.
pub struct Sandbox {
    /// The settings of the tests, such as the images and the chart.
    pub env: Env,
    /// A client with the permissions of a cluster administrator, because the test acts as the user.
    pub client: kube::Client,
    /// The name of the namespace.
    pub namespace: String,
}

/// Runs a test in a new namespace with all operators. If the test fails, prints the objects, Events and logs.
///
/// # Panics
/// Panics if the test fails.
pub async fn scenario(name: &str, body: impl AsyncFnOnce(&Sandbox) -> Result<()>) {
    bare_scenario(name, async |sandbox| {
        sandbox.install_operators().await?;
        body(sandbox).await
    })
    .await;
}

/// Like [`scenario`], but without the backup and restore operators, which would use CPU time.
///
/// # Panics
/// Panics if the test fails.
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

/// Like [`scenario`], but in a namespace without operators.
///
/// # Panics
/// Panics if the test fails.
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
        #[allow(clippy::panic)] // The panic reports the failure to the test harness.
        {
            panic!("{name}: {error:?}");
        }
    }
}

impl Sandbox {
    /// Creates the namespace. Its pods must satisfy the restricted Pod Security Standard.
    ///
    /// # Errors
    /// Fails if the environment is incomplete or the API server does not respond.
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
        until("the namespace is created", DEADLINE, async || {
            match namespaces.create(&PostParams::default(), &object).await {
                // The name of the namespace is unique. Status 409 therefore means that an earlier attempt has created
                // the namespace, and that the response to this attempt was lost.
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

    /// Installs the CRDs, unless another test of the same `cargo xtask test` has installed them.
    ///
    /// # Errors
    /// Fails if Helm or kubectl fails.
    pub async fn install_crds(&self) -> Result<()> {
        crds::install_once(&self.env).await
    }

    /// Deletes the CRDs, and so all custom resources in all namespaces. Only a test that runs alone may call this.
    ///
    /// # Errors
    /// Fails if kubectl fails.
    pub async fn delete_crds(&self) -> Result<()> {
        crds::delete(&self.env).await
    }

    /// Deletes the CRDs like [`Self::delete_crds`], and installs them again for the next tests.
    ///
    /// # Errors
    /// Fails if Helm or kubectl fails.
    pub async fn replace_crds(&self) -> Result<()> {
        crds::delete(&self.env).await?;
        crds::install(&self.env).await
    }

    /// Installs the CRDs and the three operators, and waits until the operators are available.
    ///
    /// # Errors
    /// Fails if Helm fails or a Deployment does not become available.
    pub async fn install_operators(&self) -> Result<()> {
        self.install_operators_with(&[]).await
    }

    /// Like [`Self::install_operators`], with additional Helm arguments.
    ///
    /// # Errors
    /// Fails if Helm fails or a Deployment does not become available.
    pub async fn install_operators_with(&self, settings: &[&str]) -> Result<()> {
        self.install_crds().await?;
        let mut all = vec!["--set", "crds.install=false"];
        all.extend_from_slice(settings);
        chart::install(&self.env, RELEASE, &self.namespace, &all).await?;
        self.await_operators().await
    }

    /// Waits until each Deployment in the namespace, and so each operator, has an available pod.
    ///
    /// # Errors
    /// Fails if a Deployment does not become available.
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

    /// A client for objects of a built-in kind in this namespace.
    #[must_use]
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// A client for custom resources of this kind in this namespace.
    #[must_use]
    pub fn objects(&self, kind: Kind) -> Api<DynamicObject> {
        kind.api(self.client.clone(), &self.namespace)
    }

    /// Runs `kubectl apply -f -` in this namespace.
    ///
    /// # Errors
    /// Fails if kubectl fails. The error contains the error output of kubectl.
    pub async fn apply(&self, manifest: &str) -> Result<String> {
        kubectl::run_with_input(
            &self.env,
            &["-n", &self.namespace, "apply", "-f", "-"],
            Some(manifest),
        )
        .await
    }

    /// Runs `kubectl apply --dry-run=server -f -` in this namespace. The API server validates the manifest, but stores
    /// nothing.
    ///
    /// # Errors
    /// Fails if kubectl fails. The error contains the error output of kubectl.
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

    /// Runs `kubectl` in this namespace.
    ///
    /// # Errors
    /// Fails if kubectl fails. The error contains the error output of kubectl.
    pub async fn kubectl(&self, args: &[&str]) -> Result<String> {
        let mut all = vec!["-n", &self.namespace];
        all.extend_from_slice(args);
        kubectl::run(&self.env, &all).await
    }

    /// Waits until an operator has `count` pods. Terminating pods count, because they may still send requests.
    ///
    /// # Errors
    /// Fails if the number differs at the time limit.
    pub async fn await_operator_pods(&self, operator: &str, count: usize) -> Result<()> {
        let what = format!("{operator} has {count} pods");
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

    /// Waits for an Event about the object. The text `type reason: message` of the Event must contain all `words`. The
    /// operators write Events separately from the status, so the Event may appear after the status.
    ///
    /// # Errors
    /// Fails if no such Event is published in time. The error contains the existing Events.
    pub async fn await_event(&self, kind: Kind, name: &str, words: &[&str]) -> Result<()> {
        let what = format!("an Event about {name} with {words:?}");
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

    /// The Events about the object, each as `type reason: message`.
    ///
    /// # Errors
    /// Fails if the API server does not respond.
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

    /// Deletes the cluster-scoped policies of the release, and requests the deletion of the namespace without waiting
    /// for it.
    pub async fn delete(&self) {
        // Bindings are deleted before policies. If the test stops between the two calls, only policies without a
        // binding remain, which reject nothing.
        self.delete_policies::<ValidatingAdmissionPolicyBinding>()
            .await;
        self.delete_policies::<ValidatingAdmissionPolicy>().await;
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let what = format!("the deletion of namespace {} is accepted", self.namespace);
        // The deletion of the namespace is retried: after a failed test, the namespace may contain a protected cluster.
        // The API server then rejects the deletion until it has noticed that the policies are deleted.
        let deleted = until_allowed(&what, POLICY_DELAY, async || {
            let params = DeleteParams::default();
            match namespaces.delete(&self.namespace, &params).await {
                Err(kube::Error::Api(error)) if error.code == 404 => Ok(Poll::Done(())),
                accepted => accepted
                    .map(|_| Poll::Done(()))
                    .context("delete the namespace"),
            }
        });
        if let Err(error) = deleted.await {
            eprintln!("{error:#}");
        }
    }

    /// Deletes the objects of this kind that the release created. Their names end with the name of the namespace.
    async fn delete_policies<K>(&self)
    where
        K: kube::Resource<Scope = k8s_openapi::ClusterResourceScope, DynamicType = ()>
            + DeserializeOwned
            + Clone
            + std::fmt::Debug,
    {
        let policies: Api<K> = Api::all(self.client.clone());
        let suffix = format!(".{}", self.namespace);
        let deleted = async {
            let names = policies.list(&ListParams::default()).await?;
            let names = names.iter().map(ResourceExt::name_any);
            for name in names.filter(|name| name.ends_with(&suffix)) {
                policies.delete(&name, &DeleteParams::default()).await?;
            }
            Ok::<(), kube::Error>(())
        };
        if let Err(error) = deleted.await {
            eprintln!(
                "the policies of {} could not be deleted: {error}",
                self.namespace
            );
        }
    }

    /// Prints the objects, Events and logs of the namespace, to find the cause of a failure.
    pub async fn print_state(&self) {
        eprintln!("----- state of namespace {} -----", self.namespace);
        let commands: [&[&str]; 7] = [
            &[
                "get",
                "etcdclusters,etcdbackups,etcdrestores,etcdmirrors,etcdroles,etcdusers",
                "-o",
                "yaml",
            ],
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
        for command in commands {
            eprintln!("--- kubectl {}", command.join(" "));
            let bounded =
                tokio::time::timeout(Duration::from_secs(30), self.kubectl(command)).await;
            match bounded {
                Ok(Ok(text)) => eprintln!("{text}"),
                Ok(Err(error)) => eprintln!("{error:#}"),
                Err(_) => eprintln!("(no answer in 30 s)"),
            }
        }
    }
}
