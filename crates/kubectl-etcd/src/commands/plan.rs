//! `plan`: prints the operator's next step, and why the operator makes no further changes.

use api::EtcdCluster;
use jiff::Timestamp;
use kube::ResourceExt;

use super::status;
use crate::access::Access;
use crate::changes::{blocked, is_observed};
use crate::console::{paint, say};
use crate::error::Result;
use crate::text::{Paint, Tone, distance};
use crate::view::ClusterView;

/// Maximum number of past problems that the command prints.
const SHOWN_PROBLEMS: usize = 5;

pub(super) async fn run(access: &Access, name: &str) -> Result<()> {
    let cluster = access.cluster(name).await?;
    let view = Box::pin(status::one(access, name, true)).await?;
    say(&explanation(&cluster, &view, Timestamp::now(), paint()))
}

/// The whole output of `plan`.
fn explanation(cluster: &EtcdCluster, view: &ClusterView, now: Timestamp, paint: Paint) -> String {
    let mut lines = vec![
        format!(
            "{}/{}: {}",
            view.namespace,
            view.name,
            paint.paint(&view.state, Tone::Bold)
        ),
        format!(
            "next step:  {}",
            view.next_step.as_deref().unwrap_or("none")
        ),
        format!(
            "waits for:  {}",
            view.waiting_for.as_deref().unwrap_or("nothing")
        ),
    ];
    section(
        &mut lines,
        paint,
        "Differences between spec and cluster:",
        differences(cluster, view),
    );
    section(
        &mut lines,
        paint,
        "Obstacles that block the operator:",
        obstacles(cluster, view),
    );
    section(&mut lines, paint, "Last problems:", history(cluster, now));
    lines.join("\n")
}

/// The newest past problems in the status, newest first.
fn history(cluster: &EtcdCluster, now: Timestamp) -> Vec<String> {
    let status = cluster.status.as_ref();
    let all = status.into_iter().flat_map(|status| &status.last_errors);
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|error| std::cmp::Reverse(error.time.0));
    let shown = all.into_iter().take(SHOWN_PROBLEMS).map(|error| {
        let age = distance(error.time.0, now);
        format!(
            "{age}, {} times {}: {}",
            error.count, error.reason, error.message
        )
    });
    shown.collect()
}

fn section(lines: &mut Vec<String>, paint: Paint, title: &str, content: Vec<String>) {
    lines.push(String::new());
    lines.push(paint.paint(title, Tone::Bold));
    if content.is_empty() {
        lines.push("  none".to_owned());
    }
    lines.extend(content.into_iter().map(|line| format!("  {line}")));
}

/// The differences between the spec and the running cluster, which the operator must still resolve.
fn differences(cluster: &EtcdCluster, view: &ClusterView) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(running) = view
        .version
        .as_ref()
        .filter(|it| **it != view.desired_version)
    {
        found.push(format!(
            "version: {running}, spec.version is {}",
            view.desired_version
        ));
    }
    let members = cluster.status.as_ref().and_then(|status| status.size);
    if let Some(members) = members.filter(|members| *members != cluster.spec.size) {
        found.push(format!(
            "members: {members}, spec.size is {}",
            cluster.spec.size
        ));
    }
    let down: Vec<&str> = view
        .members
        .iter()
        .filter(|member| !member.healthy)
        .map(|member| member.name.as_str())
        .collect();
    if !down.is_empty() {
        found.push(format!("members that do not serve: {}", down.join(", ")));
    }
    found
}

/// The reasons why the operator makes no further changes, and the problems and advice in the conditions. Each has its
/// remedy.
fn obstacles(cluster: &EtcdCluster, view: &ClusterView) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(error) = blocked(cluster) {
        let remedy = error.remedy().unwrap_or_default();
        found.push(format!("{error}: {remedy}"));
    }
    if cluster.spec.hibernate {
        let name = cluster.name_any();
        found.push(format!(
            "spec.hibernate keeps the cluster stopped: run `kubectl etcd wake {name}` to start it"
        ));
    }
    if !is_observed(cluster) {
        found.push(
            "no operator has handled the newest spec: check that an operator runs for this namespace (docs/troubleshooting.md)"
                .to_owned(),
        );
    }
    for problem in &view.problems {
        let kind = if problem.advice { "advice" } else { "problem" };
        found.push(format!(
            "{kind} {} {}: {}",
            problem.condition, problem.reason, problem.message
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Inputs, LiveAnswer, view};

    fn explained(json: &serde_json::Value) -> String {
        let mut all = serde_json::json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main", "namespace": "prod", "generation": 1 }
        });
        all["spec"] = json["spec"].clone();
        all["status"] = json["status"].clone();
        let cluster: EtcdCluster = serde_json::from_value(all).unwrap();
        let view = view(Inputs {
            cluster: &cluster,
            pods: &[],
            backups: &[],
            live: &LiveAnswer::NotAsked,
        });
        explanation(
            &cluster,
            &view,
            "2026-11-26T05:00:00Z".parse().unwrap(),
            Paint(false),
        )
    }

    #[test]
    fn plan_of_healthy_cluster_has_no_actions() {
        let text = explained(&serde_json::json!({
            "spec": { "size": 3, "version": "3.6.16" },
            "status": { "observedGeneration": 1, "state": "Ready", "size": 3, "currentVersion": "3.6.16" }
        }));
        assert!(
            text.contains("prod/main: Ready\nnext step:  none\nwaits for:  nothing"),
            "{text}"
        );
        assert_eq!(text.matches("  none").count(), 4, "{text}");
    }

    #[test]
    fn plan_lists_differences_and_obstacles_with_remedies() {
        let text = explained(&serde_json::json!({
            "spec": { "size": 5, "version": "v3.7.3", "paused": true },
            "status": { "observedGeneration": 0, "state": "Paused", "size": 3, "currentVersion": "3.5.35",
                "memberDetails": [{ "name": "main-a", "healthy": false }],
                "lastErrors": [{ "time": "2026-11-26T00:00:00Z", "reason": "MemberDown", "message": "M", "count": 2 }],
                "conditions": [{ "type": "Upgrading", "status": "False", "reason": "VersionRefused",
                    "message": "set spec.version to 3.6.11", "lastTransitionTime": "2026-11-26T00:00:00Z" }] }
        }));
        for part in [
            "version: 3.5.35, spec.version is 3.7.3",
            "members: 3, spec.size is 5",
            "members that do not serve: main-a",
            "kubectl etcd resume main",
            "5h ago, 2 times MemberDown: M",
            "no operator has handled the newest spec",
            "problem Upgrading VersionRefused: set spec.version to 3.6.11",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
