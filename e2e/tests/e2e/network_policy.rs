//! The operator creates, restores and deletes the NetworkPolicy of a cluster. The testbed does not enforce
//! NetworkPolicies.

use anyhow::{Result, ensure};
use e2e::wait::{Poll, until};
use e2e::{DEADLINE, Sandbox, scenario};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use serde_json::{Value, json};

use crate::fixtures::cluster_with;

async fn await_policy(sandbox: &Sandbox, is: impl Fn(Option<&Value>) -> bool) -> Result<Value> {
    let policies = sandbox.api::<NetworkPolicy>();
    until(
        "the NetworkPolicy is as the spec says",
        DEADLINE,
        async || {
            let found = policies.get_opt("c-members").await?;
            let found = found.map(serde_json::to_value).transpose()?;
            Ok(if is(found.as_ref()) {
                Poll::Done(found.unwrap_or_default())
            } else {
                Poll::NotYet(format!("{found:?}"))
            })
        },
    )
    .await
}

#[tokio::test]
async fn network_policy_is_created_repaired_and_deleted() {
    scenario("network_policy", async |sandbox| {
        let with = |more: &str| cluster_with(&sandbox.env, "c", 1, more);
        let team = "{namespaceSelector: {matchLabels: {team: a}}}";
        sandbox
            .apply(&with(&format!("  networkPolicy: {{clients: [{team}]}}\n"))?)
            .await?;
        sandbox.await_members("c", 1).await?;
        let policy = await_policy(sandbox, |policy| policy.is_some()).await?;
        ensure!(policy["metadata"]["ownerReferences"][0]["kind"] == "EtcdCluster");
        let member = json!({ "podSelector": { "matchLabels": { "app": "etcd", "etcd_cluster": "c" } } });
        let operators = json!({
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": sandbox.namespace } },
            "podSelector": { "matchLabels": {
                "app.kubernetes.io/instance": "etcd-operator", "app.kubernetes.io/name": "etcd-operator",
            } },
        });
        let backup_pods = json!({ "podSelector": { "matchLabels": {
            "app.kubernetes.io/managed-by": "etcd-backup-operator", "app.kubernetes.io/name": "etcd-backup",
        } } });
        let clients = json!({ "namespaceSelector": { "matchLabels": { "team": "a" } } });
        let port = |port: u16| json!([{ "port": port, "protocol": "TCP" }]);
        let expected = json!([
            { "from": [member], "ports": port(2380) },
            { "from": [member, operators, backup_pods, clients], "ports": port(2379) },
            { "ports": port(2381) },
        ]);
        ensure!(policy["spec"]["ingress"] == expected, "{}", policy["spec"]["ingress"]);
        ensure!(policy["spec"]["podSelector"] == member["podSelector"]);

        // The operator must restore the changed policy, and delete it when the spec disables it.
        let patch = "{\"spec\":{\"ingress\":[{}]}}";
        sandbox
            .kubectl(&["patch", "networkpolicy", "c-members", "--type=merge", "-p", patch])
            .await?;
        await_policy(sandbox, |policy| policy.is_some_and(|it| it["spec"]["ingress"] == expected)).await?;
        sandbox.apply(&with("  networkPolicy: {enabled: false}\n")?).await?;
        await_policy(sandbox, |policy| policy.is_none()).await?;
        sandbox.await_members("c", 1).await.map(drop)
    })
    .await;
}
