//! `upgrade`: checks that the change of the version is allowed, and sets `spec.version`.

use api::EtcdCluster;
use api::conditions::{ConditionType, is_true};
use api::version::path::{UpgradeDirection, direction, stops};
use api::version::{EtcdVersion, Support};
use jiff::Timestamp;
use serde_json::json;

use crate::access::Access;
use crate::changes::{blocked, gitops_warning, look};
use crate::cli::UpgradeArgs;
use crate::console::{confirm, say, wait};
use crate::error::{Error, Result};
use crate::text::distance;

pub(super) async fn run(access: &Access, args: &UpgradeArgs) -> Result<()> {
    let name = &args.cluster;
    let target = EtcdVersion::parse(&args.target)
        .map_err(|error| Error::refused(error.to_string(), "use a full version, such as 3.6.16"))?;
    let cluster = access.cluster(name).await?;
    let plan = plan(&cluster, &target, Timestamp::now())?;
    say(&plan.text)?;
    if plan.is_change {
        if !confirm(
            &format!("Set spec.version of cluster {name} to {target}?"),
            args.consent,
        )? {
            return Ok(());
        }
        let patch = json!({ "spec": { "version": target.to_string() } });
        let _: EtcdCluster = access.merge(name, &patch).await?;
    }
    if !args.waiting.wait {
        return say(&format!(
            "follow the upgrade with `kubectl etcd plan {name}` or --wait"
        ));
    }
    let object = access.named::<EtcdCluster>(name);
    let wanted = target.to_string();
    let is_running = |cluster: &EtcdCluster| {
        let status = cluster.status.as_ref();
        status.and_then(|status| status.current_version.as_deref()) == Some(wanted.as_str())
    };
    let looked = async || Ok(look(&access.cluster(name).await?, is_running));
    let end = wait(&object, "upgraded", args.waiting.timeout, looked).await?;
    say(&format!("cluster {name} runs {target}: {end}"))
}

/// The description of the version change, which the command shows before the confirmation.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    text: String,
    is_change: bool,
}

/// Checks that `spec.version` can be set to `target` now. Fails with the reason and the remedy.
fn plan(cluster: &EtcdCluster, target: &EtcdVersion, now: Timestamp) -> Result<Plan> {
    let name = cluster.metadata.name.as_deref().unwrap_or_default();
    if let Some(error) = blocked(cluster) {
        return Err(error);
    }
    let status = cluster.status.clone().unwrap_or_default();
    let running = status
        .current_version
        .as_deref()
        .unwrap_or(&cluster.spec.version);
    let running = EtcdVersion::parse(running).map_err(|error| {
        Error::refused(error.to_string(), "correct spec.version of the EtcdCluster")
    })?;
    let is_change = EtcdVersion::parse(&cluster.spec.version).ok().as_ref() != Some(target);
    let mut lines = vec![format!("cluster {name} runs etcd {running}")];
    let way =
        direction(&running, target).map_err(|refused| refusal(&running, target, name, refused))?;
    let step = match way {
        UpgradeDirection::Within if running == *target => {
            "the cluster already runs this version".to_owned()
        }
        UpgradeDirection::Within => "patch release, can be rolled back at any time".to_owned(),
        UpgradeDirection::Up => {
            "next minor release, can be rolled back until the last member has changed".to_owned()
        }
        UpgradeDirection::Down => {
            "previous minor release, by a downgrade that etcd supports".to_owned()
        }
    };
    lines.push(format!("path: {running} → {target} ({step})"));
    lines.push("the operator restarts one member at a time, the leader last".to_owned());
    lines.extend(warnings(cluster, target, now));
    Ok(Plan {
        text: lines.join("\n"),
        is_change,
    })
}

/// The error if etcd does not allow the change from the running version to the target. If intermediate versions lead to
/// the target, the remedy lists them.
fn refusal(running: &EtcdVersion, target: &EtcdVersion, name: &str, refused: String) -> Error {
    match stops(running, target) {
        Ok(path) => {
            let all: Vec<String> = path.iter().map(ToString::to_string).collect();
            let first = path.first().map(|stop| stop.version.to_string());
            Error::refused(
                refused,
                format!(
                    "upgrade in steps: {running} → {}. Begin with `kubectl etcd upgrade {name} {} --wait`",
                    all.join(" → "),
                    first.unwrap_or_default()
                ),
            )
        }
        Err(_) => Error::refused(refused, "docs/upgrades.md lists the allowed paths"),
    }
}

fn warnings(cluster: &EtcdCluster, target: &EtcdVersion, now: Timestamp) -> Vec<String> {
    let mut found = Vec::new();
    let status = cluster.status.clone().unwrap_or_default();
    if target.support() != Support::Tested {
        found.push(format!("warning: the project does not test etcd {target}"));
    }
    if !is_true(cluster.conditions(), &ConditionType::Ready) {
        let state = status.state.unwrap_or_else(|| "Unknown".to_owned());
        found.push(format!(
            "warning: the cluster is not ready ({state}): the operator waits until all members are healthy"
        ));
    }
    if cluster.spec.size < 3 {
        found.push(
            "warning: with fewer than three members, clients get errors while a member restarts"
                .to_owned(),
        );
    }
    match status.last_backup.and_then(|backup| backup.time) {
        Some(time) => found.push(format!("last backup: {}", distance(time.0, now))),
        None => found.push(
            "warning: no backup of the cluster is known. Make a backup with `kubectl etcd backup`"
                .to_owned(),
        ),
    }
    found.extend(gitops_warning(cluster, "spec.version"));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(spec: &str, running: &str) -> EtcdCluster {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main" },
            "spec": { "version": spec },
            "status": { "currentVersion": running, "state": "Ready", "conditions": [
                { "type": "Ready", "status": "True", "reason": "AsDesired", "message": "",
                  "lastTransitionTime": "2026-11-26T00:00:00Z" }],
                "lastBackup": { "name": "main", "time": "2026-11-26T00:00:00Z" } }
        }))
        .unwrap()
    }

    fn planned(spec: &str, running: &str, target: &str) -> Result<Plan> {
        let now = "2026-11-26T05:00:00Z".parse().unwrap();
        plan(
            &cluster(spec, running),
            &EtcdVersion::parse(target).unwrap(),
            now,
        )
    }

    #[test]
    fn allowed_version_change_is_shown_with_upgrade_path() {
        let plan = planned("3.5.35", "3.5.35", "3.6.16").unwrap();
        assert!(plan.is_change);
        for part in [
            "3.5.35 → 3.6.16",
            "next minor release",
            "last backup: 5h ago",
        ] {
            assert!(plan.text.contains(part), "{part}: {}", plan.text);
        }
        assert!(!plan.text.contains("warning"), "{}", plan.text);
    }

    #[test]
    fn refused_version_change_shows_path_and_first_command() {
        let error = planned("3.5.20", "3.5.20", "3.7.3").unwrap_err();
        let remedy = error.remedy().unwrap();
        assert!(
            remedy.contains("3.5.20 → 3.5.26 or later → 3.6.11 or later → 3.7.3"),
            "{remedy}"
        );
        assert!(
            remedy.contains("kubectl etcd upgrade main 3.5.26 --wait"),
            "{remedy}"
        );
        assert_eq!(error.exit_code(), crate::error::CODE_REFUSED);
    }

    #[test]
    fn impossible_version_change_is_refused_with_reason() {
        let error = planned("3.5.35", "3.5.35", "3.4.23").unwrap_err();
        assert!(
            error.to_string().contains("cannot be downgraded"),
            "{error}"
        );
    }

    #[test]
    fn return_to_running_version_counts_as_change() {
        let plan = planned("3.6.16", "3.5.35", "3.5.35").unwrap();
        assert!(
            plan.is_change && plan.text.contains("the cluster already runs this version"),
            "{}",
            plan.text
        );
        let plan = planned("v3.6.16", "3.6.16", "3.6.16").unwrap();
        assert!(!plan.is_change);
    }

    #[test]
    fn upgrade_warns_about_untested_version_no_backup_and_single_member() {
        let mut cluster = cluster("3.7.3", "3.7.3");
        cluster.status.as_mut().unwrap().last_backup = None;
        cluster.spec.size = 1;
        let target = EtcdVersion::parse("3.8.0").unwrap();
        let text = plan(&cluster, &target, Timestamp::now()).unwrap().text;
        assert_eq!(text.matches("warning").count(), 3, "{text}");
    }
}
