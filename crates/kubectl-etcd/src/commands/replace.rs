//! `replace`: deletes the volume of a member, so that the operator replaces the member, as docs/concepts.md describes.

use api::EtcdCluster;
use api::conditions::{ConditionType, is_true};
use api::names;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::{Api, ResourceExt};

use super::status;
use crate::access::Access;
use crate::changes::{blocked, progress};
use crate::cli::ReplaceArgs;
use crate::console::{Look, confirm, say, wait};
use crate::error::{Error, Result};
use crate::view::ClusterView;

/// Minimum number of members for the replacement of a member without a volume. In a smaller cluster, the other members
/// do not form a quorum.
const SMALLEST_WITHOUT_VOLUMES: usize = 3;

pub(super) async fn run(access: &Access, args: &ReplaceArgs) -> Result<()> {
    let member = &args.member;
    let pod = optional::<Pod>(access, member).await?;
    let claim = optional::<PersistentVolumeClaim>(access, member).await?;
    let labels = [
        pod.as_ref().map(ResourceExt::labels),
        claim.as_ref().map(ResourceExt::labels),
    ];
    let labelled = labels
        .into_iter()
        .flatten()
        .find_map(|all| all.get(names::LABEL_CLUSTER));
    let Some(name) = labelled else {
        return Err(Error::Missing {
            object: format!("member {member} in namespace {}", access.namespace),
            remedy: "`kubectl etcd status CLUSTER` lists the members".to_owned(),
        });
    };
    let cluster = access.cluster(name).await?;
    let view = status::one(access, name, false).await?;
    check(&cluster, &view, member, claim.is_some())?;
    let what = if claim.is_some() {
        "the PersistentVolumeClaim and its data"
    } else {
        "the pod and its data"
    };
    say(&format!(
        "member {member} of cluster {name}: {what} are deleted. The operator removes the member from etcd, and adds a new member that copies the data from the leader"
    ))?;
    if !confirm(&format!("Replace member {member}?"), args.consent)? {
        return Ok(());
    }
    match (&claim, &pod) {
        (Some(claim), _) => access.delete(claim).await?,
        (None, Some(pod)) => access.delete(pod).await?,
        (None, None) => {}
    }
    if !args.waiting.wait {
        return say(&format!(
            "follow the replacement with `kubectl etcd plan {name}`"
        ));
    }
    let object = access.named::<EtcdCluster>(name);
    let looked = async || Ok(is_replaced(&access.cluster(name).await?, member));
    let end = wait(
        &object,
        "ready with a new member",
        args.waiting.timeout,
        looked,
    )
    .await?;
    say(&format!("member {member} is replaced: {end}"))
}

/// Reads the object `name`. Returns `None` if it does not exist.
async fn optional<K>(access: &Access, name: &str) -> Result<Option<K>>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
{
    let api: Api<K> = access.api();
    api.get_opt(name).await.map_err(|source| Error::Request {
        verb: "get",
        object: access.named::<K>(name),
        source: Box::new(source),
    })
}

/// Refuses the replacement if the operator would not apply it now, or if the cluster could lose its quorum.
fn check(cluster: &EtcdCluster, view: &ClusterView, member: &str, has_volume: bool) -> Result<()> {
    if let Some(error) = blocked(cluster) {
        return Err(error);
    }
    let name = &view.name;
    let plan = format!("`kubectl etcd plan {name}` names the cause. Remove the cause first");
    if !view.available {
        return Err(Error::refused(
            format!(
                "cluster {name} has no quorum, and the volume of {member} may have the only copy of writes"
            ),
            format!("read docs/recovery.md. {plan}"),
        ));
    }
    let others = view.members.iter().filter(|one| one.name != member);
    let down: Vec<&str> = others
        .clone()
        .filter(|one| !one.healthy)
        .map(|one| one.name.as_str())
        .collect();
    if !down.is_empty() {
        return Err(Error::refused(
            format!(
                "other members of cluster {name} do not serve: {}",
                down.join(", ")
            ),
            plan,
        ));
    }
    if !has_volume && others.count() + 1 < SMALLEST_WITHOUT_VOLUMES {
        return Err(Error::refused(
            format!(
                "cluster {name} has fewer than three members, and the members have no volumes: without this pod, the \
                 cluster loses its quorum"
            ),
            "raise spec.size to 3 first",
        ));
    }
    Ok(())
}

fn is_replaced(cluster: &EtcdCluster, member: &str) -> Look {
    let status = cluster.status.as_ref();
    let mut members = status.into_iter().flat_map(|status| &status.member_details);
    let is_gone = !members.any(|one| one.name == member);
    if is_gone && is_true(cluster.conditions(), &ConditionType::Ready) {
        Look::Done(progress(cluster))
    } else {
        Look::Waiting(progress(cluster))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Inputs, LiveAnswer, view};

    fn checked(available: bool, healthy: &[bool], has_volume: bool) -> Result<()> {
        let members: Vec<_> = healthy
            .iter()
            .enumerate()
            .map(|(index, healthy)| serde_json::json!({ "name": format!("main-{index}"), "healthy": healthy }))
            .collect();
        let cluster: EtcdCluster = serde_json::from_value(serde_json::json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main" }, "spec": {},
            "status": { "memberDetails": members, "conditions": [{ "type": "Available",
                "status": if available { "True" } else { "False" }, "reason": "R", "message": "",
                "lastTransitionTime": "2026-11-26T00:00:00Z" }] }
        }))
        .unwrap();
        let view = view(Inputs {
            cluster: &cluster,
            pods: &[],
            backups: &[],
            live: &LiveAnswer::NotAsked,
        });
        check(&cluster, &view, "main-0", has_volume)
    }

    #[test]
    fn replacement_that_endangers_quorum_is_refused() {
        assert!(checked(true, &[true, true, true], true).is_ok());
        assert!(checked(true, &[false, true, true], true).is_ok());
        assert!(checked(true, &[true], true).is_ok());
        assert!(checked(true, &[true, true, true], false).is_ok());
        for (available, healthy, has_volume, part) in [
            (false, &[true, true, true][..], true, "no quorum"),
            (true, &[true, false, true], true, "do not serve: main-1"),
            (true, &[true, true], false, "fewer than three members"),
            (true, &[true], false, "fewer than three members"),
        ] {
            let error = checked(available, healthy, has_volume).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
