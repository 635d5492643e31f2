//! `spec.protected`: the API server rejects the deletion of an EtcdCluster, because the chart has installed a
//! ValidatingAdmissionPolicy. The operators do not read the field, so the test installs the chart without operators.

use anyhow::{Context, Result, bail, ensure};
use e2e::objects::Kind;
use e2e::sandbox::{RELEASE, bare_scenario};
use e2e::wait::Poll;
use e2e::{DEADLINE, Env, Sandbox, chart, step, until};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, ListParams};

use crate::fixtures::{cluster, cluster_with};

const PROTECTED: &str = "  protected: true\n";
/// Chart values that install only the policy. The CRDs are installed once for all tests.
const WITHOUT_OPERATORS: [&str; 8] = [
    "--set",
    "crds.install=false",
    "--set",
    "clusterOperator.enabled=false",
    "--set",
    "backupOperator.enabled=false",
    "--set",
    "restoreOperator.enabled=false",
];
const POLICY: &str = "kind: ValidatingAdmissionPolicy\n";

/// The message with which the policy rejects the deletion of the cluster.
fn rejection(name: &str) -> String {
    format!(
        "EtcdCluster {name} is protected: set spec.protected to false, then delete the EtcdCluster again"
    )
}

async fn protect(sandbox: &Sandbox, name: &str, protected: bool) -> Result<()> {
    let patch = format!("{{\"spec\":{{\"protected\":{protected}}}}}");
    let words = ["patch", "etcdcluster", name, "--type=merge", "-p", &patch];
    sandbox.kubectl(&words).await.map(drop)
}

async fn exists(sandbox: &Sandbox, name: &str) -> Result<bool> {
    let found = sandbox.objects(Kind::EtcdCluster).get_opt(name).await?;
    Ok(found.is_some())
}

async fn is_installed(sandbox: &Sandbox) -> Result<()> {
    sandbox.install_crds().await?;
    let (env, namespace) = (&sandbox.env, &sandbox.namespace);
    chart::install(env, RELEASE, namespace, &WITHOUT_OPERATORS).await?;
    let manifests = [
        cluster(env, "a-plain", 3)?,
        cluster_with(env, "b-protected", 3, PROTECTED)?,
        cluster(env, "c-plain", 3)?,
    ];
    sandbox.apply(&manifests.join("---\n")).await?;
    // The API server enforces a new policy only after it has read the policy from its own watch.
    let words = ["delete", "etcdcluster", "b-protected", "--dry-run=server"];
    until(
        "the policy is in effect",
        DEADLINE,
        async || match sandbox.kubectl(&words).await {
            Ok(_) => Ok(Poll::NotYet(String::from("the deletion is accepted"))),
            Err(error) if error.to_string().contains(&rejection("b-protected")) => {
                Ok(Poll::Done(()))
            }
            Err(error) => Err(error),
        },
    )
    .await
}

async fn is_rejected(sandbox: &Sandbox) -> Result<()> {
    let words = ["delete", "etcdcluster", "b-protected", "--wait=false"];
    let Err(error) = sandbox.kubectl(&words).await else {
        bail!("the deletion of a protected cluster was accepted");
    };
    let error = error.to_string();
    ensure!(error.contains("(Forbidden)"), "{error}");
    ensure!(error.contains(&rejection("b-protected")), "{error}");

    let clusters = sandbox.objects(Kind::EtcdCluster);
    let collection = clusters
        .delete_collection(&DeleteParams::default(), &ListParams::default())
        .await;
    let Err(kube::Error::Api(status)) = collection else {
        bail!("the deletion of a collection with a protected cluster was accepted");
    };
    let message = &status.message;
    ensure!(message.contains(&rejection("b-protected")), "{message}");
    let found = clusters.get("b-protected").await?;
    ensure!(
        found.metadata.deletion_timestamp.is_none(),
        "the protected cluster is being deleted"
    );
    Ok(())
}

/// The deletion of clusters without protection: a cluster that was never protected, a cluster that is no longer
/// protected, and the unfinished cluster of a restore.
async fn is_accepted(sandbox: &Sandbox) -> Result<()> {
    // The request for the collection may have deleted the clusters without protection.
    let plain = ["delete", "etcdcluster", "a-plain", "c-plain"];
    sandbox
        .kubectl(&[&plain[..], &["--ignore-not-found"]].concat())
        .await?;
    protect(sandbox, "b-protected", false).await?;
    sandbox
        .kubectl(&["delete", "etcdcluster", "b-protected"])
        .await?;
    for name in ["a-plain", "b-protected", "c-plain"] {
        ensure!(!exists(sandbox, name).await?, "{name} exists");
    }
    // Until the handover, an EtcdRestore owns the cluster that it creates. If the owner does not exist, as in this
    // test, the garbage collector may delete the cluster first.
    let owner = "  ownerReferences:\n  - {apiVersion: etcd.database.coreos.com/v1beta2, kind: EtcdRestore, \
                 name: absent, uid: absent}\n";
    let unfinished = cluster_with(&sandbox.env, "unfinished", 1, PROTECTED)?;
    let unfinished = unfinished.replacen("spec:\n", &format!("{owner}spec:\n"), 1);
    sandbox.apply(&unfinished).await?;
    let words = ["delete", "etcdcluster", "unfinished", "--ignore-not-found"];
    sandbox.kubectl(&words).await.map(drop)
}

/// The message of the condition with which the namespace controller reports that it could not delete all objects.
fn content_failure(namespace: &Namespace) -> Option<&str> {
    let conditions = namespace.status.as_ref()?.conditions.as_ref()?;
    let failure = conditions
        .iter()
        .find(|condition| condition.type_ == "NamespaceDeletionContentFailure")?;
    failure.message.as_deref()
}

/// The deletion of the namespace: the protected cluster stays until it is no longer protected, but its volumes do not.
/// docs/deletion.md warns of this.
async fn namespace_waits(sandbox: &Sandbox) -> Result<()> {
    let claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\nspec: {accessModes: \
                 [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}\n";
    let kept = cluster_with(&sandbox.env, "kept", 3, PROTECTED)?;
    sandbox.apply(&[claim, &kept].join("---\n")).await?;
    let name = sandbox.namespace.as_str();
    let words = ["delete", "namespace", name, "--wait=false"];
    sandbox.kubectl(&words).await?;
    let namespaces: Api<Namespace> = Api::all(sandbox.client.clone());
    until(
        "the namespace reports the rejection",
        DEADLINE,
        async || {
            let found = namespaces.get(name).await?;
            let message = content_failure(&found).unwrap_or_default();
            Ok(if message.contains(&rejection("kept")) {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("the condition says {message:?}"))
            })
        },
    )
    .await?;
    until("the PVC is deleted", DEADLINE, async || {
        let claims = sandbox.api::<PersistentVolumeClaim>();
        Ok(match claims.get_opt("data").await? {
            None => Poll::Done(()),
            Some(_) => Poll::NotYet(String::from("the PVC exists")),
        })
    })
    .await?;
    ensure!(exists(sandbox, "kept").await?, "the cluster is deleted");
    protect(sandbox, "kept", false).await?;
    let target = format!("namespace/{name}");
    let words = ["wait", "--for=delete", &target, "--timeout=300s"];
    sandbox.kubectl(&words).await.map(drop)
}

#[tokio::test]
async fn deletion_protected() {
    bare_scenario("deletion_protected", async |sandbox| {
        step("install the policy", is_installed(sandbox)).await?;
        step("reject the deletion", is_rejected(sandbox)).await?;
        step("accept other deletions", is_accepted(sandbox)).await?;
        step("delete the namespace", namespace_waits(sandbox)).await
    })
    .await;
}

/// Renders the chart for an API server with these kinds. Without kinds, Helm renders the chart without an API server.
async fn rendered(env: &Env, kinds: &[&str]) -> Result<String> {
    let path = env.chart.to_string_lossy();
    let mut words = vec!["template", "x", &path];
    for kind in kinds {
        words.extend(["--api-versions", *kind]);
    }
    chart::helm(env, &words).await.context("render the chart")
}

#[tokio::test]
async fn chart_omits_policy_that_api_server_does_not_support() {
    let outcome: Result<()> = async {
        let env = Env::from_vars()?;
        let policy = "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy";
        for (kinds, expected) in [
            (&[][..], true),
            (&["v1/Pod", policy][..], true),
            (&["v1/Pod"][..], false),
        ] {
            let found = rendered(&env, kinds).await?.contains(POLICY);
            ensure!(
                found == expected,
                "with {kinds:?}, the chart renders the policy: {found}"
            );
        }
        Ok(())
    }
    .await;
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
}
