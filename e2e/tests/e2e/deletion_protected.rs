//! `spec.protected`: ValidatingAdmissionPolicies of the chart reject the deletion of an EtcdCluster and of its
//! namespace. The operators do not read this field, so the test installs no operators.

use anyhow::{Context, Result, bail, ensure};
use e2e::objects::Kind;
use e2e::sandbox::{RELEASE, bare_scenario};
use e2e::wait::Poll;
use e2e::{DEADLINE, Env, Sandbox, chart, step, until};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, DeleteParams, ListParams};

use crate::fixtures::{cluster, cluster_with};

const PROTECTED: &str = "  protected: true\n";
/// Lines under `spec` of a cluster whose members have no volumes, and whose deletion requires a backup.
const BACKUP_WITHOUT_VOLUMES: &str = "  deletionPolicy: BackupThenDelete\n  backup:\n    storageType: S3\n    \
    s3: {path: bucket/key}\n    backupPolicy: {schedule: \"@daily\"}\n";
/// Chart values that install the policies without the operators and the CRDs. The CRDs are already installed.
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
/// An EtcdRestore that owns the cluster `unfinished`. No operator runs, so the restore does not start.
const RESTORE: &str = "apiVersion: etcd.database.coreos.com/v1beta2
kind: EtcdRestore
metadata: {name: unfinished}
spec: {etcdCluster: {name: unfinished}, backupStorageType: S3, s3: {path: bucket/key}}
";

/// The message that rejects the deletion of the cluster.
fn rejection(name: &str) -> String {
    format!(
        "EtcdCluster {name} is protected: set spec.protected to false, then delete the EtcdCluster again"
    )
}

/// The message that rejects the deletion of the namespace.
fn namespace_rejection(namespace: &str, name: &str) -> String {
    format!(
        "Namespace {namespace} contains the protected EtcdCluster {name}: set spec.protected of this EtcdCluster to \
         false, then delete the namespace again"
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

/// Runs `kubectl delete`. Returns the message if a policy rejects the deletion, or `None` if the API server accepts
/// it.
async fn rejected_deletion(sandbox: &Sandbox, words: &[&str]) -> Result<Option<String>> {
    match sandbox.kubectl(&[&["delete"][..], words].concat()).await {
        Ok(_) => Ok(None),
        Err(error) => {
            let text = error.to_string();
            let is_rejected = text.contains("(Forbidden)") && text.contains("denied request");
            if is_rejected {
                Ok(Some(text))
            } else {
                Err(error)
            }
        }
    }
}

/// Waits until a policy rejects a dry run of the deletion with this message. The API server enforces a policy only
/// after its watches have reported the policy and the EtcdClusters.
async fn await_rejection(sandbox: &Sandbox, [kind, name]: [&str; 2], message: &str) -> Result<()> {
    let what = format!("the deletion of {kind} {name} is rejected");
    let words = [kind, name, "--dry-run=server"];
    until(&what, DEADLINE, async || {
        match rejected_deletion(sandbox, &words).await? {
            None => Ok(Poll::NotYet(String::from("the deletion is accepted"))),
            Some(found) if found.contains(message) => Ok(Poll::Done(())),
            Some(found) => bail!("{found}"),
        }
    })
    .await
}

async fn is_installed(sandbox: &Sandbox) -> Result<()> {
    sandbox.install_crds().await?;
    let (env, namespace) = (&sandbox.env, sandbox.namespace.as_str());
    chart::install(env, RELEASE, namespace, &WITHOUT_OPERATORS).await?;
    let manifests = [
        cluster(env, "a-plain", 3)?,
        cluster_with(env, "b-protected", 3, PROTECTED)?,
        cluster(env, "c-plain", 3)?,
        cluster_with(env, "d-backup", 3, BACKUP_WITHOUT_VOLUMES)?,
    ];
    sandbox.apply(&manifests.join("---\n")).await?;
    let target = ["etcdcluster", "b-protected"];
    await_rejection(sandbox, target, &rejection("b-protected")).await?;
    let message = namespace_rejection(namespace, "b-protected");
    await_rejection(sandbox, ["namespace", namespace], &message).await
}

async fn is_rejected(sandbox: &Sandbox) -> Result<()> {
    let words = ["etcdcluster", "b-protected", "--wait=false"];
    let Some(message) = rejected_deletion(sandbox, &words).await? else {
        bail!("the deletion of a protected cluster was accepted");
    };
    ensure!(message.contains(&rejection("b-protected")), "{message}");

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

/// A foreground deletion of a cluster without volumes would delete the data before the backup, so a policy rejects it.
async fn foreground_deletion_is_rejected(sandbox: &Sandbox) -> Result<()> {
    let words = ["etcdcluster", "d-backup", "--dry-run=server"];
    let foreground = [&words[..], &["--cascade=foreground"]].concat();
    let Some(message) = rejected_deletion(sandbox, &foreground).await? else {
        bail!("a foreground deletion that loses data was accepted");
    };
    ensure!(message.contains("--cascade=background"), "{message}");
    let background = rejected_deletion(sandbox, &words).await?;
    ensure!(background.is_none(), "{background:?}");
    Ok(())
}

/// The API server rejects the deletion of a namespace that contains a protected cluster.
async fn namespace_is_rejected(sandbox: &Sandbox) -> Result<()> {
    let name = sandbox.namespace.as_str();
    let words = ["namespace", name, "--wait=false"];
    let Some(message) = rejected_deletion(sandbox, &words).await? else {
        bail!("the deletion of a namespace with a protected cluster was accepted");
    };
    let expected = namespace_rejection(name, "b-protected");
    ensure!(message.contains(&expected), "{message}");
    let namespaces: Api<Namespace> = Api::all(sandbox.client.clone());
    let found = namespaces.get(name).await?;
    ensure!(
        found.metadata.deletion_timestamp.is_none(),
        "the namespace of a protected cluster is being deleted"
    );
    Ok(())
}

/// Creates a protected cluster that an EtcdRestore owns. A restore owns the cluster that it creates until it hands the
/// cluster over to the cluster operator.
async fn create_unfinished(sandbox: &Sandbox) -> Result<()> {
    sandbox.apply(RESTORE).await?;
    let restore = sandbox.objects(Kind::EtcdRestore).get("unfinished").await?;
    let uid = restore.metadata.uid.context("the EtcdRestore has no UID")?;
    let owner = format!(
        "  ownerReferences:\n  - {{apiVersion: etcd.database.coreos.com/v1beta2, kind: EtcdRestore, name: unfinished, \
         uid: \"{uid}\"}}\n"
    );
    let manifest = cluster_with(&sandbox.env, "unfinished", 1, PROTECTED)?;
    let manifest = manifest.replacen("spec:\n", &format!("{owner}spec:\n"), 1);
    sandbox.apply(&manifest).await.map(drop)
}

/// The API server accepts the deletion of clusters without protection, of the unfinished cluster of a restore, and of a
/// namespace that contains only such clusters.
async fn is_accepted(sandbox: &Sandbox) -> Result<()> {
    // These clusters may already be deleted, because an earlier request of this test tries to delete all EtcdClusters.
    let plain = ["delete", "etcdcluster", "a-plain", "c-plain"];
    sandbox
        .kubectl(&[&plain[..], &["--ignore-not-found"]].concat())
        .await?;
    create_unfinished(sandbox).await?;
    protect(sandbox, "b-protected", false).await?;
    // The deletion is retried, because the API server checks the namespace with its own watch of EtcdClusters, which
    // may lag behind.
    let words = ["namespace", &sandbox.namespace, "--dry-run=server"];
    until(
        "the deletion of the namespace is accepted",
        DEADLINE,
        async || {
            Ok(match rejected_deletion(sandbox, &words).await? {
                None => Poll::Done(()),
                Some(found) => Poll::NotYet(found),
            })
        },
    )
    .await?;
    let words = ["delete", "etcdcluster", "unfinished", "--dry-run=server"];
    sandbox.kubectl(&words).await?;
    sandbox
        .kubectl(&["delete", "etcdcluster", "b-protected"])
        .await?;
    for name in ["a-plain", "b-protected", "c-plain"] {
        ensure!(!exists(sandbox, name).await?, "{name} exists");
    }
    Ok(())
}

/// Deletes the namespace. Its only protected cluster is `unfinished`, which an EtcdRestore owns. Kubernetes must delete
/// this cluster with the namespace.
async fn namespace_is_deleted(sandbox: &Sandbox) -> Result<()> {
    ensure!(
        exists(sandbox, "unfinished").await?,
        "the unfinished cluster does not exist"
    );
    let words = ["delete", "namespace", &sandbox.namespace, "--timeout=300s"];
    sandbox.kubectl(&words).await.map(drop)
}

#[tokio::test]
async fn deletion_of_protected_cluster_or_its_namespace_is_rejected() {
    bare_scenario("deletion_protected", async |sandbox| {
        step("install the policies", is_installed(sandbox)).await?;
        let foreground = foreground_deletion_is_rejected(sandbox);
        step("reject the foreground deletion", foreground).await?;
        step("reject the deletion", is_rejected(sandbox)).await?;
        let rejected = namespace_is_rejected(sandbox);
        step("reject the deletion of the namespace", rejected).await?;
        step("accept other deletions", is_accepted(sandbox)).await?;
        step("delete the namespace", namespace_is_deleted(sandbox)).await
    })
    .await;
}

/// Renders the chart for an API server that supports these kinds. Without kinds, Helm assumes its default kinds.
async fn rendered(env: &Env, kinds: &[&str]) -> Result<String> {
    let path = env.chart.to_string_lossy();
    let mut words = vec!["template", "x", &path];
    for kind in kinds {
        words.extend(["--api-versions", *kind]);
    }
    chart::helm(env, &words).await.context("render the chart")
}

#[tokio::test]
async fn chart_omits_policies_that_api_server_does_not_support() {
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
                "with {kinds:?}, the chart renders the policies: {found}"
            );
        }
        Ok(())
    }
    .await;
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
}
