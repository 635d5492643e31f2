//! Certificates from a real cert-manager. These tests run only with `--full`, because the build of cert-manager takes
//! minutes. They run in one test function, because they share the CustomResourceDefinitions.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::objects::{Kind, await_object, condition, has_condition};
use e2e::sandbox::bare_scenario;
use e2e::testbed::Testbed;
use e2e::tls::{Authority, Identity, Signed};
use e2e::wait::Poll;
use e2e::{DEADLINE, RollingCheck, Sandbox, Writer, step, until};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use tokio::process::{Child, Command};

use super::CRASHES;
use crate::certificates::{STATIC, client_name, make_secrets, service_dns_names, until_with_reads};
use crate::fixtures::{DURABLE, cluster_with, root};
use crate::operator_crash::{CrashingOperator, await_desired_members};
use crate::tls_bad_secrets::await_fault;
use crate::tls_generated::{all_serve_as, client as generated_client, restarts_by_uid, value};
use crate::tls_switch::{switch_under_load, switched};

/// The directory with the CustomResourceDefinitions.
const DEFINITIONS: &str = "e2e/fixtures/cert-manager";
/// cert-manager renews each certificate one minute after it has issued the certificate.
const ISSUED: &str = "  TLS:
    certManager:
      issuerRef: {name: clients}
      peerIssuerRef: {name: peers}
      duration: 1h
      renewBefore: 59m
      clients: [app]
";
/// Time limit for a change of the authority: a renewal, a rolling update, and two minutes until the publication.
const ROTATION: Duration = Duration::from_mins(12);

/// The Secrets that the members mount.
const PUBLISHED: [&str; 2] = ["c-peer-certs", "c-server-certs"];

/// Deletes the CustomResourceDefinitions of cert-manager, also those of an earlier, interrupted test.
async fn delete_definitions(sandbox: &Sandbox) -> Result<()> {
    let delete = [
        "delete",
        "crd",
        "--ignore-not-found",
        "certificates.cert-manager.io",
        "certificaterequests.cert-manager.io",
        "issuers.cert-manager.io",
    ];
    sandbox.kubectl(&delete).await.map(drop)
}

/// Creates the CustomResourceDefinitions of cert-manager, and starts its controllers.
async fn start_cert_manager(sandbox: &Sandbox) -> Result<Child> {
    let program = Testbed::of(sandbox)?.cert_manager().await?;
    let folder = root().join(DEFINITIONS);
    for file in [
        "cert-manager.io_certificates.yaml",
        "cert-manager.io_certificaterequests.yaml",
        "issuers.yaml",
    ] {
        let path = folder.join(file).display().to_string();
        let create = ["apply", "--server-side", "-f", &path];
        sandbox.kubectl(&create).await?;
    }
    let wait = [
        "wait",
        "--for=condition=Established",
        "--timeout=60s",
        "crd/certificates.cert-manager.io",
        "crd/certificaterequests.cert-manager.io",
        "crd/issuers.cert-manager.io",
    ];
    sandbox.kubectl(&wait).await?;
    let kubeconfig = std::env::var("KUBECONFIG").context("KUBECONFIG")?;
    Command::new(&program)
        .arg(format!("--kubeconfig={kubeconfig}"))
        .arg(format!("--namespace={}", sandbox.namespace))
        .kill_on_drop(true)
        .spawn()
        .with_context(|| program.display().to_string())
}

/// Creates an issuer of the type CA, or gives an existing issuer another CA.
async fn put_issuer(sandbox: &Sandbox, name: &str, authority: &Authority) -> Result<()> {
    let secret = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "name": format!("{name}-ca") },
        "type": "kubernetes.io/tls",
        "stringData": { "tls.crt": authority.pem, "tls.key": authority.key_pem() },
    });
    sandbox.apply(&secret.to_string()).await?;
    let issuer = format!(
        "apiVersion: cert-manager.io/v1\nkind: Issuer\nmetadata: {{name: {name}}}\nspec: {{ca: {{secretName: {name}-ca}}}}\n"
    );
    sandbox.apply(&issuer).await.map(drop)
}

/// The client `app` with its published certificate.
async fn app(sandbox: &Sandbox) -> Result<Identity> {
    let secret = "c-client-app-certs";
    Ok(Identity {
        ca: value(sandbox, secret, "ca.crt").await?,
        own: Some(Signed {
            certificate: value(sandbox, secret, "tls.crt").await?,
            key: value(sandbox, secret, "tls.key").await?,
        }),
        name: client_name(sandbox, "c"),
    })
}

async fn published(sandbox: &Sandbox) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for secret in PUBLISHED {
        all.push(value(sandbox, secret, "tls.crt").await?);
    }
    Ok(all)
}

async fn patch(sandbox: &Sandbox, tls: &str) -> Result<()> {
    let patch = format!(r#"{{"spec":{{"TLS":{tls}}}}}"#);
    let patch = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
    sandbox.kubectl(&patch).await.map(drop)
}

/// The cluster starts no pod before cert-manager and the two issuers in the spec exist.
async fn waits_for_issuers(
    sandbox: &Sandbox,
    (peers, clients): (&Authority, &Authority),
) -> Result<Child> {
    delete_definitions(sandbox).await?;
    let manifest = cluster_with(&sandbox.env, "c", 3, &format!("{ISSUED}{DURABLE}"))?;
    sandbox.apply(&manifest).await?;
    await_fault(sandbox, "CertManagerMissing", &["install cert-manager"]).await?;
    let cert_manager = start_cert_manager(sandbox).await?;
    await_fault(
        sandbox,
        "IssuerMissing",
        &["Issuer peers does not exist", "create it"],
    )
    .await?;
    put_issuer(sandbox, "peers", peers).await?;
    await_fault(sandbox, "IssuerMissing", &["Issuer clients does not exist"]).await?;
    ensure!(
        sandbox.member_pods("c").await?.is_empty(),
        "a member was started"
    );
    put_issuer(sandbox, "clients", clients).await?;
    sandbox.await_members("c", 3).await?;
    Ok(cert_manager)
}

/// cert-manager renews the certificates every minute. Members present the renewed certificates without a restart.
async fn renews(sandbox: &Sandbox) -> Result<()> {
    let (before, members) = (published(sandbox).await?, restarts_by_uid(sandbox).await?);
    let writer = Writer::start_tls(sandbox, "c", &app(sandbox).await?).await?;
    until_with_reads(sandbox, "the certificates are renewed", async || {
        let now = published(sandbox).await?;
        Ok(
            if now.iter().zip(&before).all(|(now, before)| now != before) {
                Poll::Done(())
            } else {
                Poll::NotYet("a published certificate is not renewed".to_owned())
            },
        )
    })
    .await?;
    writer.finish("renewed certificates").await?;
    let renewed = restarts_by_uid(sandbox).await?;
    ensure!(renewed == members, "a member was restarted");
    Ok(())
}

/// The running cluster reports a missing issuer, and keeps its certificates.
async fn reports_missing_issuer(sandbox: &Sandbox, authority: &Authority) -> Result<()> {
    sandbox
        .kubectl(&["delete", "issuers.cert-manager.io", "clients"])
        .await?;
    let clusters = sandbox.objects(Kind::EtcdCluster);
    until_with_reads(sandbox, "the missing issuer is reported", async || {
        let object = clusters.get("c").await?;
        let degraded = condition(&object, "Degraded");
        Ok(
            if degraded.is_some_and(|it| it["reason"] == "IssuerMissing") {
                Poll::Done(())
            } else {
                Poll::NotYet(e2e::objects::conditions_line(&object))
            },
        )
    })
    .await?;
    put_issuer(sandbox, "clients", authority).await?;
    await_object(&clusters, "c", "the issuer exists", DEADLINE, |object| {
        has_condition(object, "Degraded", "False") && has_condition(object, "TLSReady", "True")
    })
    .await
    .map(drop)
}

/// Invariant 20: the issuer `clients` gets another CA while a client writes. The members are restarted one at a time,
/// and then present certificates of the new CA.
async fn changes_authority(sandbox: &Sandbox, new: &Authority) -> Result<()> {
    let first = app(sandbox).await?;
    let both = Identity {
        ca: format!("{}{}", first.ca, new.pem),
        ..first
    };
    let writer = Writer::start_tls(sandbox, "c", &both).await?;
    let check = RollingCheck::start(sandbox, "c", 3).await?;
    put_issuer(sandbox, "clients", new).await?;
    let of_new = Identity {
        ca: new.pem.clone(),
        ..both.clone()
    };
    until(
        "members present certificates of the new CA",
        ROTATION,
        async || {
            sandbox.trigger_reconcile("c").await?;
            sandbox.trigger_kubelet_sync("c").await?;
            tokio::time::sleep(Duration::from_secs(5)).await;
            Ok(if all_serve_as(sandbox, &of_new, &of_new.name).await? {
                Poll::Done(())
            } else {
                Poll::NotYet("a member presents a certificate of the former CA".to_owned())
            })
        },
    )
    .await?;
    let ended = check.finish().await.context("the authority was changed")?;
    ensure!(ended >= 3, "{ended} pods were terminated");
    writer.finish("another authority").await?;
    let after = Writer::start_tls(sandbox, "c", &app(sandbox).await?).await?;
    after.await_more(10).await?;
    after
        .finish("the published client certificate")
        .await
        .map(drop)
}

/// A gRPC proxy serves clients with a certificate of cert-manager. This certificate is deleted with the proxy.
async fn serves_through_proxy(sandbox: &Sandbox) -> Result<()> {
    const PROXY: &str = "c-proxy";
    let proxies = async |settings: &str| {
        let patch = format!(r#"{{"spec":{{"grpcProxy":{settings}}}}}"#);
        let patch = ["patch", "etcdcluster", "c", "--type=merge", "-p", &patch];
        sandbox.kubectl(&patch).await
    };
    proxies(r#"{"replicas":1}"#).await?;
    until("the proxy serves", DEADLINE, async || {
        let found = sandbox.api::<Deployment>().get_opt(PROXY).await?;
        let status = found.and_then(|found| found.status);
        let is_ready = status
            .as_ref()
            .is_some_and(|it| it.ready_replicas == Some(1));
        Ok(if is_ready {
            Poll::Done(())
        } else {
            Poll::NotYet(format!("{status:?}"))
        })
    })
    .await?;
    let identity = Identity {
        name: format!("{PROXY}.{}.svc", sandbox.namespace),
        ..app(sandbox).await?
    };
    let writer = Writer::start_retrying_through(sandbox, PROXY, &identity).await?;
    writer.await_more(20).await?;
    writer.finish("certificate of the proxy").await?;
    proxies("null").await?;
    until(
        "the certificate of the proxy is deleted",
        DEADLINE,
        async || {
            let get = ["get", "certificates.cert-manager.io", "-o", "name"];
            let all = sandbox.kubectl(&get).await?;
            let secret = sandbox.api::<Secret>().get_opt("c-proxy-certs").await?;
            Ok(if all.contains("c-proxy-issued") || secret.is_some() {
                Poll::NotYet(all)
            } else {
                Poll::Done(())
            })
        },
    )
    .await
}

/// The operator crashes before it writes the Certificate of a new client, before it publishes a certificate, and before
/// it deletes the Certificate of a removed client.
async fn survives_crashes(sandbox: &Sandbox) -> Result<()> {
    let mut operator = CrashingOperator {
        sandbox,
        crashes: 0,
    };
    let [apply, publish, delete] = [0, 1, 2].map(|at| &CRASHES[at..=at]);
    let clients = async |names: &str| {
        patch(
            sandbox,
            &format!(r#"{{"certManager":{{"clients":[{names}]}}}}"#),
        )
        .await
    };
    operator
        .crash_at_each(apply, async |_| clients(r#""app","other""#).await)
        .await?;
    operator
        .crash_at_each(publish, async |_| clients(r#""app","more""#).await)
        .await?;
    operator
        .crash_at_each(delete, async |_| clients(r#""app""#).await)
        .await?;
    operator.run_without_failpoints().await?;
    await_desired_members(sandbox, "c", 3).await?;
    let names = ["c-client-other-issued", "c-client-more-issued"];
    until(
        "the Certificates of removed clients are deleted",
        DEADLINE,
        async || {
            let get = ["get", "certificates.cert-manager.io", "-o", "name"];
            let all = sandbox.kubectl(&get).await?;
            Ok(if names.iter().any(|name| all.contains(name)) {
                Poll::NotYet(all)
            } else {
                Poll::Done(())
            })
        },
    )
    .await
}

/// Switches from static Secrets to cert-manager in one step, then to generated certificates, and back to cert-manager.
async fn switches(sandbox: &Sandbox) -> Result<()> {
    sandbox.delete_cluster("c").await?;
    // cert-manager keeps its Secrets after the deletion of the cluster. The test deletes them, because they contain
    // certificates of other CAs.
    let secrets = ["delete", "secrets", "-l", "etcd_cluster=c"];
    sandbox.kubectl(&secrets).await?;
    let authority = make_secrets(sandbox, &service_dns_names(sandbox), false).await?;
    for name in ["peers", "clients"] {
        put_issuer(sandbox, name, &authority).await?;
    }
    let manifest = cluster_with(&sandbox.env, "c", 3, &format!("{STATIC}{DURABLE}"))?;
    sandbox.apply(&manifest).await?;
    switched(sandbox, "Tls", false).await?;
    let identity = crate::certificates::client(&authority, sandbox, "c")?;
    let issued = r#""certManager":{"issuerRef":{"name":"clients"},"clients":["app"]}"#;
    let to_issued = format!(r#"{{"static":null,{issued}}}"#);
    let client = (
        Some(&identity),
        "clients, from static Secrets to cert-manager",
    );
    switch_under_load(sandbox, client, &to_issued, ("Tls", false)).await?;
    mounts(sandbox, "c-server-certs").await?;
    let client = (
        Some(&identity),
        "clients with TLS, before generated certificates",
    );
    switch_under_load(
        sandbox,
        client,
        r#"{"acceptPlaintext":true}"#,
        ("Tls", true),
    )
    .await?;
    let plain = || {
        (
            None,
            "clients without TLS, between two sources of certificates",
        )
    };
    let to_generated = r#"{"certManager":null,"generated":{}}"#;
    switch_under_load(sandbox, plain(), to_generated, ("Tls", true)).await?;
    generated_client(sandbox, "c").await?;
    let back = format!(r#"{{"generated":null,{issued}}}"#);
    switch_under_load(sandbox, plain(), &back, ("Tls", true)).await?;
    let own = app(sandbox).await?;
    let client = (Some(&own), "clients with TLS, after generated certificates");
    switch_under_load(
        sandbox,
        client,
        r#"{"acceptPlaintext":null}"#,
        ("Tls", false),
    )
    .await?;
    mounts(sandbox, "c-server-certs").await
}

/// Ensures that every member mounts this Secret.
async fn mounts(sandbox: &Sandbox, secret: &str) -> Result<()> {
    let has = |pod: &Pod| {
        let volumes = pod
            .spec
            .iter()
            .flat_map(|spec| spec.volumes.iter().flatten());
        let mut secrets = volumes.filter_map(|volume| volume.secret.as_ref()?.secret_name.as_ref());
        secrets.any(|name| name == secret)
    };
    for pod in sandbox.member_pods("c").await? {
        ensure!(has(&pod), "{} does not mount {secret}", pod.name_any());
    }
    Ok(())
}

#[tokio::test]
async fn cert_manager_issues_renews_and_changes_authority() {
    bare_scenario("cert_manager", async |sandbox| {
        let settings = [
            "--set",
            "certManager.enabled=true",
            "--set",
            "backupOperator.enabled=false",
            "--set",
            "restoreOperator.enabled=false",
        ];
        sandbox.install_operators_with(&settings).await?;
        let (peers, clients) = (Authority::new("peers")?, Authority::new("clients")?);
        let waits = waits_for_issuers(sandbox, (&peers, &clients));
        let cert_manager = step("create the issuers after the cluster", waits).await?;
        step("renew certificates", renews(sandbox)).await?;
        let missing = reports_missing_issuer(sandbox, &clients);
        step("delete an issuer", missing).await?;
        let new = Authority::new("the next authority of clients")?;
        let changed = changes_authority(sandbox, &new);
        step("change the authority", changed).await?;
        let proxy = serves_through_proxy(sandbox);
        step("serve through a gRPC proxy", proxy).await?;
        let crashes = survives_crashes(sandbox);
        step("crash the operator", crashes).await?;
        step("switch the source of certificates", switches(sandbox)).await?;
        drop(cert_manager);
        sandbox.delete_cluster("c").await?;
        delete_definitions(sandbox).await
    })
    .await;
}
