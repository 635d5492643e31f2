//! Clusters with static TLS Secrets: certificates are verified, members change, and certificates and their CA are
//! rotated without a restart of an operator.

use anyhow::{Context, Result, ensure};
use e2e::leaks::{cluster_scenario_without_leaks, scenario_without_leaks};
use e2e::objects::field;
use e2e::tls::{self, Authority};
use e2e::{Sandbox, Writer, step};
use kube::ResourceExt;

use crate::certificates::{
    STATIC, await_tls_ready, change_members, client, pod_dns_names, service_dns_names,
    urls_have_tls,
};
use crate::fixtures::{DURABLE, cluster_with};
use crate::tls_bad_secrets::{invalid_secrets_start_no_member, lost_secret_stops_changes};
use crate::tls_refused::rejects_strangers;
use crate::tls_rotation_static::{operators, renews, replaces_authority};

/// Invariant 20: members start only with valid certificates. The certificates have the names of the members' Services.
#[tokio::test]
async fn static_certificates_are_verified_and_rotated() {
    scenario_without_leaks("tls_static", async |sandbox| {
        let names = service_dns_names(sandbox);
        let manifest = cluster_with(&sandbox.env, "c", 3, &format!("{STATIC}{DURABLE}"))?;
        sandbox.apply(&manifest).await?;
        let rejected = invalid_secrets_start_no_member(sandbox, &names);
        let authority = step("apply invalid Secrets", rejected).await?;
        let strangers = rejects_strangers(sandbox, &authority);
        step("connect without a certificate", strangers).await?;
        let identity = client(&authority, sandbox, "c")?;
        let writer = Writer::start_tls(sandbox, "c", &identity).await?;
        let waits = lost_secret_stops_changes(sandbox, &authority, &names);
        step("delete a Secret and grow to five members", waits).await?;
        step("lose a member and shrink", shrinks(sandbox)).await?;
        let processes = operators(sandbox).await?;
        let renewed = renews(sandbox, &authority, &names);
        step("renew certificates", renewed).await?;
        writer.finish("static certificates").await?;
        let replaced = replaces_authority(sandbox, &authority, &names);
        step("replace the authority", replaced).await?;
        ensure!(
            operators(sandbox).await? == processes,
            "an operator was restarted"
        );
        Ok(())
    })
    .await;
}

/// Loses a member, and scales the cluster from five members to three.
async fn shrinks(sandbox: &Sandbox) -> Result<()> {
    let pods = sandbox.member_pods("c").await?;
    let lost = pods.first().map(ResourceExt::name_any).context("no pod")?;
    sandbox.lose_pod("c", &lost).await?;
    sandbox.await_members("c", 5).await?;
    sandbox.scale("c", 3).await?;
    sandbox.await_members("c", 3).await.map(drop)
}

/// Runs the TLS example of v0.9.4 with the Secrets that its documentation describes. The certificates have names of
/// pods, but not of the members' Services. The members have no volumes.
#[tokio::test]
async fn cluster_from_v0_9_4_tls_example_survives_member_changes() {
    cluster_scenario_without_leaks("tls_old_example", async |sandbox| {
        let path = crate::fixtures::root().join("e2e/fixtures/v0.9.4/example-tls-cluster.yaml");
        let old = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        let names = pod_dns_names(sandbox, "example");
        let authority = Authority::new("old authority")?;
        for (name, keys, signed) in [
            ("etcd-peer-tls", tls::PEER, authority.sign(&names)?),
            ("etcd-server-tls", tls::SERVER, authority.sign(&names)?),
            ("etcd-client-tls", tls::CLIENT, authority.client()?),
        ] {
            let secret = tls::secret(name, keys, &signed, &authority.pem);
            sandbox.apply(&secret).await?;
        }
        sandbox.apply(&old).await?;
        await_tls_ready(sandbox, "example", "of the form Pod").await?;
        let formed = sandbox.await_members("example", 3).await?;
        ensure!(field(&formed, "/spec/memberAddress").is_null());
        urls_have_tls(sandbox, "example").await?;
        let identity = client(&authority, sandbox, "example")?;
        let writer = Writer::start_tls(sandbox, "example", &identity).await?;
        change_members(sandbox, "example").await?;
        let tally = writer.finish("TLS example of v0.9.4").await?;
        ensure!(tally.acknowledged > 50, "{tally}");
        Ok(())
    })
    .await;
}
