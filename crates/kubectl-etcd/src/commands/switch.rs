//! `pause`, `resume`, `hibernate` and `wake`: change `spec.paused` or `spec.hibernate`.

use api::EtcdCluster;
use serde_json::json;

use crate::access::Access;
use crate::changes::{blocked, gitops_warning, look};
use crate::cli::{ChangeAndWaitArgs, ChangeArgs};
use crate::console::{confirm, note, say, wait};
use crate::error::{Error, Result};

pub(super) async fn pause(access: &Access, args: &ChangeArgs, on: bool) -> Result<()> {
    let name = &args.cluster;
    let cluster = access.cluster(name).await?;
    if cluster.spec.paused == on {
        return say(&format!(
            "cluster {name} is {} paused",
            if on { "already" } else { "not" }
        ));
    }
    if on {
        note(&format!(
            "while cluster {name} is paused, the operator changes and repairs nothing. It does not replace lost members"
        ));
    }
    if let Some(warning) = gitops_warning(&cluster, "spec.paused") {
        note(&warning);
    }
    let verb = if on { "Pause" } else { "Resume" };
    if !confirm(&format!("{verb} cluster {name}?"), args.consent)? {
        return Ok(());
    }
    let _: EtcdCluster = access
        .merge(name, &json!({ "spec": { "paused": on } }))
        .await?;
    say(&if on {
        format!("cluster {name} is paused. End the pause with `kubectl etcd resume {name}`")
    } else {
        format!("cluster {name} is resumed")
    })
}

pub(super) async fn hibernate(access: &Access, args: &ChangeAndWaitArgs, on: bool) -> Result<()> {
    let name = &args.cluster;
    let cluster = access.cluster(name).await?;
    if cluster.spec.hibernate != on {
        if let Some(error) = hibernation_refused(&cluster, on) {
            return Err(error);
        }
        if on {
            note(&format!(
                "all members of cluster {name} stop, and clients get errors until you wake the cluster. The volumes are kept"
            ));
        }
        if let Some(warning) = gitops_warning(&cluster, "spec.hibernate") {
            note(&warning);
        }
        let verb = if on { "Hibernate" } else { "Wake" };
        if !confirm(&format!("{verb} cluster {name}?"), args.consent)? {
            return Ok(());
        }
        let _: EtcdCluster = access
            .merge(name, &json!({ "spec": { "hibernate": on } }))
            .await?;
    } else if !args.waiting.wait {
        return say(&format!("spec.hibernate of cluster {name} is already {on}"));
    }
    if args.waiting.wait {
        let goal = if on { "hibernated" } else { "ready" };
        let object = access.named::<EtcdCluster>(name);
        let looked = async || Ok(look(&access.cluster(name).await?, |_| true));
        let end = wait(&object, goal, args.waiting.timeout, looked).await?;
        return say(&end);
    }
    say(&if on {
        format!("cluster {name} stops. Start it again with `kubectl etcd wake {name}`")
    } else {
        format!("cluster {name} starts")
    })
}

/// The error if the operator would not hibernate or wake the cluster now. `None` if the operator would do so.
fn hibernation_refused(cluster: &EtcdCluster, on: bool) -> Option<Error> {
    if on && !cluster.spec.is_durable() {
        return Some(Error::refused(
            "the members have no volumes, so they would lose their data",
            "set spec.pod.persistentVolumeClaimSpec, or make a backup and delete the cluster",
        ));
    }
    blocked(cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hibernation_without_volumes_and_wake_during_pause_are_refused() {
        let cluster = |spec: &str| -> EtcdCluster {
            serde_json::from_str(&format!(
                r#"{{"apiVersion":"etcd.database.coreos.com/v1beta2","kind":"EtcdCluster","metadata":{{"name":"main"}},"spec":{spec}}}"#
            ))
            .unwrap()
        };
        let error = hibernation_refused(&cluster("{}"), true).unwrap();
        assert!(
            error
                .remedy()
                .unwrap()
                .contains("persistentVolumeClaimSpec")
        );
        assert!(hibernation_refused(&cluster("{}"), false).is_none());
        let durable = r#"{"pod":{"persistentVolumeClaimSpec":{}}}"#;
        assert!(hibernation_refused(&cluster(durable), true).is_none());
        assert!(hibernation_refused(&cluster(r#"{"paused":true}"#), false).is_some());
    }
}
