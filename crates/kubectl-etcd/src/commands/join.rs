//! `join`: creates an EtcdCluster that joins an existing etcd. `join --finish` ends the move (docs/adoption.md).

use std::fs;

use api::cluster::{MemberRole, validate};
use api::conditions::{ConditionType, is_true};
use api::names::{self, ANNOTATION_JOIN};
use api::version::{EtcdVersion, Support};
use api::{EtcdCluster, problem};
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::access::Access;
use crate::changes::{self, blocked, gitops_warning, is_observed};
use crate::cli::JoinArgs;
use crate::console::{Look, confirm, note, say, wait};
use crate::error::{Error, Result};

/// The default number of new members.
const DEFAULT_SIZE: i32 = 3;

pub(super) async fn run(access: &Access, args: &JoinArgs) -> Result<()> {
    let name = &args.cluster;
    if args.finish {
        return finish(access, args).await;
    }
    if let Some(cluster) = access.find::<EtcdCluster>(name).await? {
        note(&resumed(&cluster, &args.endpoints)?);
    } else if !begin(access, args).await? {
        return Ok(());
    }
    if !args.waiting.wait {
        return say(&format!(
            "follow the move with `kubectl etcd join {name} --wait`"
        ));
    }
    let object = access.named::<EtcdCluster>(name);
    let looked = async || Ok(look(&access.cluster(name).await?));
    let end = wait(&object, "joined", args.waiting.timeout, looked).await?;
    say(&format!("{end}\n{}", next_steps(name)))
}

/// Shows the new EtcdCluster, asks for confirmation, and creates it. Returns false with `--dry-run`.
async fn begin(access: &Access, args: &JoinArgs) -> Result<bool> {
    let name = &args.cluster;
    let manifest = manifest(args, &access.namespace)?;
    let cluster = checked(&manifest)?;
    access.check::<EtcdCluster>(name, &manifest).await?;
    let yaml = serde_yaml_ng::to_string(&manifest).map_err(|_| Error::Format("YAML"))?;
    say(&format!("{yaml}\n{}", effect(&cluster)))?;
    if !confirm(&format!("Create EtcdCluster {name}?"), args.consent)? {
        return Ok(false);
    }
    access.create(&cluster).await?;
    say(&format!("etcdcluster/{name} is created"))?;
    Ok(true)
}

/// Builds the manifest of the new EtcdCluster from the file or the options, with the join annotation.
fn manifest(args: &JoinArgs, namespace: &str) -> Result<Value> {
    let mut manifest = match &args.file {
        Some(path) => {
            let text = fs::read_to_string(path).map_err(|source| Error::File {
                path: path.clone(),
                source,
            })?;
            parsed(&text)?
        }
        None => from_options(args)?,
    };
    let metadata = &mut manifest["metadata"];
    for (field, expected, remedy) in [
        (
            "name",
            args.cluster.as_str(),
            "correct the file or the argument",
        ),
        ("namespace", namespace, "correct the file, or set -n"),
    ] {
        match metadata[field].as_str() {
            Some(found) if found != expected => {
                return Err(Error::refused(
                    format!(
                        "metadata.{field} in the file is {found}, but the command line has {expected}"
                    ),
                    remedy,
                ));
            }
            _ => metadata[field] = json!(expected),
        }
    }
    if !args.endpoints.is_empty() {
        metadata["annotations"][ANNOTATION_JOIN] = json!(args.endpoints.join(","));
    }
    if metadata["annotations"][ANNOTATION_JOIN].is_null() {
        return Err(Error::refused(
            "the client URLs of the existing etcd are missing",
            format!(
                "set --endpoints http://HOST:2379, or the annotation {ANNOTATION_JOIN} in the file"
            ),
        ));
    }
    Ok(manifest)
}

/// Parses the manifest of an EtcdCluster, in YAML or JSON.
fn parsed(text: &str) -> Result<Value> {
    let remedy = "write one EtcdCluster into the file, as in docs/adoption.md";
    let manifest: Value = serde_yaml_ng::from_str(text)
        .map_err(|error| Error::refused(format!("the file is no manifest: {error}"), remedy))?;
    let metadata = &manifest["metadata"];
    let annotations = &metadata["annotations"];
    let is_well_formed = metadata.is_object() && (annotations.is_null() || annotations.is_object());
    if manifest["kind"] != "EtcdCluster" || !is_well_formed {
        return Err(Error::refused("the file contains no EtcdCluster", remedy));
    }
    Ok(manifest)
}

/// Builds the manifest from the options of the command line.
fn from_options(args: &JoinArgs) -> Result<Value> {
    let version = args.etcd_version.as_ref().ok_or_else(|| {
        Error::refused(
            "the version of the existing etcd is missing",
            "set --etcd-version, or name a manifest with --file",
        )
    })?;
    let mut spec = json!({ "size": args.size.unwrap_or(DEFAULT_SIZE), "version": version });
    if let Some(storage) = &args.storage {
        let claim = &mut spec["pod"]["persistentVolumeClaimSpec"];
        claim["accessModes"] = json!(["ReadWriteOnce"]);
        claim["resources"]["requests"]["storage"] = json!(storage);
        if let Some(class) = &args.storage_class {
            claim["storageClassName"] = json!(class);
        }
    }
    Ok(json!({
        "apiVersion": format!("{}/{}", names::GROUP, names::VERSION),
        "kind": "EtcdCluster", "metadata": {}, "spec": spec,
    }))
}

/// Parses the manifest. Fails if the operator would reject the EtcdCluster.
fn checked(manifest: &Value) -> Result<EtcdCluster> {
    let remedy = "correct the options or the file (docs/adoption.md)";
    let cluster: EtcdCluster = serde_json::from_value(manifest.clone())
        .map_err(|error| Error::refused(format!("the manifest is invalid: {error}"), remedy))?;
    let problems = validate(&cluster);
    if !problems.is_empty() {
        return Err(Error::refused(problem::summary(&problems), remedy));
    }
    if parse_version(&cluster).is_some_and(|version| !version.has_learners()) {
        return Err(Error::refused(
            "new members join as learners, which etcd has since 3.4",
            "upgrade the existing etcd first, or move with a backup (docs/migration.md)",
        ));
    }
    Ok(cluster)
}

fn parse_version(cluster: &EtcdCluster) -> Option<EtcdVersion> {
    EtcdVersion::parse(&cluster.spec.version).ok()
}

/// Describes the move for the confirmation.
fn effect(cluster: &EtcdCluster) -> String {
    let name = cluster.name_any();
    let version = &cluster.spec.version;
    let service = names::client_service(&name);
    let mut lines = vec![
        format!(
            "{} new members join the existing etcd as learners, copy its data, and become voters",
            cluster.spec.size
        ),
        "then the operator removes the old members from etcd one by one: their processes stop, and their addresses serve no clients"
            .to_owned(),
        format!("clients must change to the Service {service} (docs/migration.md shows how they keep one address)"),
        format!("the existing etcd must run {version}, and all its members must be healthy"),
        "outside of the operators' namespace, an administrator must grant the endpoints (docs/security.md)".to_owned(),
        "make a backup of the existing etcd first".to_owned(),
    ];
    if !cluster.spec.is_durable() {
        lines.push(
            "warning: the new members have no volumes, so a member that loses its pod loses its data: add volumes \
             with --storage"
                .to_owned(),
        );
    }
    if cluster.spec.size < 3 {
        lines.push(
            "warning: with fewer than three members, the loss of one member stops all writes"
                .to_owned(),
        );
    }
    if parse_version(cluster).is_some_and(|version| version.support() != Support::Tested) {
        lines.push(format!("warning: the project does not test etcd {version}"));
    }
    lines.join("\n")
}

/// Checks that the existing EtcdCluster `cluster` joins the etcd at `endpoints` (any etcd if `endpoints` is empty), and
/// describes the move. A user cannot let an existing EtcdCluster join an etcd: the annotation has an effect only if it
/// is set when the EtcdCluster is created.
fn resumed(cluster: &EtcdCluster, endpoints: &[String]) -> Result<String> {
    let name = cluster.name_any();
    let joins = cluster.annotations().get(ANNOTATION_JOIN);
    let Some(joins) = joins.filter(|_| !has_bootstrapped(cluster)) else {
        return Err(Error::refused(
            format!("EtcdCluster {name} exists, and its members do not join another etcd"),
            format!(
                "choose another name: the annotation {ANNOTATION_JOIN} must be set when the EtcdCluster is created"
            ),
        ));
    };
    let named = endpoints.join(",");
    if !named.is_empty() && named != *joins {
        return Err(Error::refused(
            format!("EtcdCluster {name} exists, and joins {joins}"),
            "leave out --endpoints to wait for this move, or choose another name",
        ));
    }
    match blocked(cluster) {
        Some(error) => Err(error),
        None => Ok(format!("EtcdCluster {name} joins {joins}")),
    }
}

/// Whether the operator has started a new etcd cluster for this EtcdCluster. If so, the operator ignores the join
/// annotation.
fn has_bootstrapped(cluster: &EtcdCluster) -> bool {
    let bootstrap = cluster.status.as_ref().and_then(|it| it.bootstrap.as_ref());
    bootstrap.is_some_and(|bootstrap| !bootstrap.members.is_empty())
}

/// From the status: the number of voters that belong to this EtcdCluster, and the names of all other members of etcd
/// (the old members).
fn members(cluster: &EtcdCluster) -> (usize, Vec<&str>) {
    let name = cluster.name_any();
    let all = cluster.status.iter().flat_map(|it| &it.member_details);
    let (own, old): (Vec<_>, Vec<_>) =
        all.partition(|member| names::cluster_of_member(&member.name) == Some(name.as_str()));
    let is_voter = |role: &MemberRole| matches!(role, MemberRole::Leader | MemberRole::Voter);
    let voting = own
        .iter()
        .filter(|it| it.role.as_ref().is_some_and(is_voter));
    let old = old.iter().map(|member| member.name.as_str());
    (voting.count(), old.collect())
}

fn has_joined(cluster: &EtcdCluster) -> bool {
    let status = cluster.status.as_ref();
    status.is_some_and(|status| status.cluster_id.is_some())
}

/// Returns `Done` if etcd has only the members of this EtcdCluster, `Failed` if a user must act, and `Waiting` in all
/// other cases.
fn look(cluster: &EtcdCluster) -> Look {
    let (voters, old) = members(cluster);
    let size = cluster.spec.size;
    let is_complete = |cluster: &EtcdCluster| has_joined(cluster) && old.is_empty();
    match changes::look(cluster, is_complete) {
        Look::Waiting(text) => Look::Waiting(format!(
            "{voters} of {size} new members vote, old members that remain in etcd: {}; {text}",
            old.len()
        )),
        Look::Done(text) => Look::Done(format!(
            "etcd has only the members of EtcdCluster {}: {text}",
            cluster.name_any()
        )),
        failed @ Look::Failed(_) => failed,
    }
}

/// The user's next steps after the last old member was removed.
fn next_steps(name: &str) -> String {
    format!(
        "next:\n\
         1. change the clients to the Service {}\n\
         2. make a backup: `kubectl etcd backup {name} --wait`\n\
         3. delete the pods, Services and volumes of the old etcd\n\
         4. remove the annotation: `kubectl etcd join {name} --finish`",
        names::client_service(name)
    )
}

/// Ends the move: removes the annotation `etcd.database.coreos.com/join` from the EtcdCluster.
async fn finish(access: &Access, args: &JoinArgs) -> Result<()> {
    let name = &args.cluster;
    let cluster = access.cluster(name).await?;
    if !cluster.annotations().contains_key(ANNOTATION_JOIN) {
        return say(&format!(
            "EtcdCluster {name} has no annotation {ANNOTATION_JOIN}: nothing to do"
        ));
    }
    if let Some(error) = not_finished(&cluster) {
        return Err(error);
    }
    say(&format!(
        "etcd has only the members of EtcdCluster {name}, so the annotation {ANNOTATION_JOIN} is not needed any more"
    ))?;
    if let Some(warning) = gitops_warning(&cluster, &format!("the annotation {ANNOTATION_JOIN}")) {
        note(&warning);
    }
    if !confirm("Remove the annotation?", args.consent)? {
        return Ok(());
    }
    // The patch contains the resourceVersion with which the cluster was read, so the API server rejects the patch if
    // the cluster has changed since.
    let patch = json!({ "metadata": {
        "resourceVersion": cluster.resource_version(), "annotations": { ANNOTATION_JOIN: null } } });
    let _: EtcdCluster = access.merge(name, &patch).await?;
    say(&format!("the move to EtcdCluster {name} is complete"))
}

/// Returns an error if etcd may still have old members: without the annotation, the operator could not remove them.
/// Returns `None` if etcd has only the members of this EtcdCluster.
fn not_finished(cluster: &EtcdCluster) -> Option<Error> {
    let name = cluster.name_any();
    if has_bootstrapped(cluster) {
        return None;
    }
    let (_, old) = members(cluster);
    let is_current =
        is_observed(cluster) && is_true(cluster.conditions(), &ConditionType::Available);
    let problem = if !old.is_empty() {
        format!("old members remain in etcd: {}", old.join(", "))
    } else if !has_joined(cluster) || !is_current {
        "the operator has not reported the current members".to_owned()
    } else {
        return None;
    };
    let remedy =
        format!("wait with `kubectl etcd join {name} --wait`, and keep the annotation until then");
    Some(Error::refused(problem, remedy))
}

#[cfg(test)]
mod tests;
