//! `defrag`, `compact` and `move-leader`. `defrag` runs etcdctl for one member at a time. `compact` and `move-leader`
//! run one etcdctl command on the leader.

use std::time::Duration;

use api::EtcdCluster;
use k8s_openapi::api::core::v1::Pod;

use super::status;
use crate::access::Access;
use crate::cli::{CompactArgs, DefragArgs, MoveLeaderArgs};
use crate::console::{confirm, note, say};
use crate::error::{Error, Result};
use crate::etcdctl;
use crate::members;
use crate::text::bytes;
use crate::view::{ClusterView, MemberView, Source};

/// Maximum time to wait for the defragmentation of one member. Longer than [`DEFRAG_TIMEOUT`], so that etcdctl itself
/// reports its timeout.
const DEFRAG_LIMIT: Duration = Duration::from_mins(30);
/// Maximum time to wait for a request of etcdctl that is not a defragmentation.
const LIMIT: Duration = Duration::from_secs(30);
/// The option of etcdctl that limits a defragmentation.
const DEFRAG_TIMEOUT: &str = "--command-timeout=29m";

/// The state of a cluster whose members are all healthy.
struct Seen {
    cluster: EtcdCluster,
    pods: Vec<Pod>,
    view: ClusterView,
}

async fn see(access: &Access, name: &str) -> Result<Seen> {
    let cluster = access.cluster(name).await?;
    let pods = access.pods(name).await?;
    let view = Box::pin(status::one(access, name, false)).await?;
    all_answer(&view)?;
    Ok(Seen {
        cluster,
        pods,
        view,
    })
}

/// Refuses the command if a member did not respond or is unhealthy.
fn all_answer(view: &ClusterView) -> Result<()> {
    let name = &view.name;
    if view.source == Source::Status {
        let why = view.source_problem.as_deref().unwrap_or("no answer");
        return Err(Error::refused(
            format!("the members of cluster {name} cannot be queried: {why}"),
            "you need the right to create pods/exec, and a member that runs",
        ));
    }
    let down: Vec<&str> = view
        .members
        .iter()
        .filter(|member| !member.healthy)
        .map(|member| member.name.as_str())
        .collect();
    if down.is_empty() {
        return Ok(());
    }
    Err(Error::refused(
        format!(
            "members of cluster {name} do not serve: {}",
            down.join(", ")
        ),
        format!("`kubectl etcd plan {name}` names the cause. Remove the cause first"),
    ))
}

/// Runs etcdctl with the arguments for one member.
async fn at(
    access: &Access,
    seen: &Seen,
    member: &str,
    args: &[&str],
    limit: Duration,
) -> Result<String> {
    let pod = members::choose(&seen.view.name, &seen.pods, Some(member))?;
    let endpoints = members::endpoints(std::slice::from_ref(pod));
    etcdctl::run_ok(access, &seen.cluster, pod, &endpoints, args, limit).await
}

fn is_leader(view: &ClusterView, member: &MemberView) -> bool {
    view.leader.as_deref() == Some(member.name.as_str())
}

/// The names of the members to defragment, the leader last. If `only` is set, only this member.
fn defrag_order(view: &ClusterView, only: Option<&str>) -> Result<Vec<String>> {
    let mut order: Vec<&MemberView> = view
        .members
        .iter()
        .filter(|member| only.is_none_or(|name| member.name == name))
        .collect();
    if let (Some(name), true) = (only, order.is_empty()) {
        return Err(Error::Missing {
            object: format!("member {name} of cluster {}", view.name),
            remedy: format!("`kubectl etcd status {}` lists the members", view.name),
        });
    }
    order.sort_by_key(|member| is_leader(view, member));
    Ok(order
        .into_iter()
        .map(|member| member.name.clone())
        .collect())
}

pub(super) async fn defrag(access: &Access, args: &DefragArgs) -> Result<()> {
    let name = &args.cluster;
    let seen = see(access, name).await?;
    if !seen.view.ready && seen.view.alarms.is_empty() {
        return Err(Error::refused(
            format!(
                "cluster {name} is not ready ({}), so a defragmentation could disturb the work of the operator",
                seen.view.state
            ),
            format!("wait until the cluster is ready (`kubectl etcd plan {name}`)"),
        ));
    }
    let order = defrag_order(&seen.view, args.member.as_deref())?;
    say(&format!(
        "the members are defragmented one at a time, in this order: {}. A member answers no requests during its defragmentation",
        order.join(", ")
    ))?;
    if !confirm(
        &format!("Defragment {} members of cluster {name}?", order.len()),
        args.consent,
    )? {
        return Ok(());
    }
    for member in &order {
        // The command reads the cluster again before each member, because a member may have failed since the last
        // defragmentation.
        let mut seen = see(access, name).await?;
        let leads = seen.view.leader.as_deref() == Some(member.as_str());
        if leads && let Some(next) = successor(&seen.view, None)? {
            transfer(access, &seen, next).await?;
            seen = see(access, name).await?;
        }
        let before = size_of(&seen.view, member);
        note(&format!(
            "member {member}: defragmentation of the database file ({}) begins",
            bytes(before)
        ));
        at(
            access,
            &seen,
            member,
            &["defrag", DEFRAG_TIMEOUT],
            DEFRAG_LIMIT,
        )
        .await?;
        let after = size_of(&status::one(access, name, false).await?, member);
        say(&format!(
            "member {member}: {} → {}",
            bytes(before),
            bytes(after)
        ))?;
    }
    Ok(())
}

fn size_of(view: &ClusterView, member: &str) -> u64 {
    let found = view.members.iter().find(|one| one.name == member);
    found.and_then(|member| member.db_size).unwrap_or_default()
}

pub(super) async fn compact(access: &Access, args: &CompactArgs) -> Result<()> {
    let name = &args.cluster;
    let seen = see(access, name).await?;
    let (newest, target) = compaction(&seen.view, args.keep)?;
    say(&format!(
        "cluster {name} is at revision {newest}. Revisions below {target} are removed. Watches and reads of removed revisions fail"
    ))?;
    if !confirm(
        &format!("Compact cluster {name} to revision {target}?"),
        args.consent,
    )? {
        return Ok(());
    }
    let member = seen.view.leader.clone().unwrap_or_default();
    let revision = target.to_string();
    let command = ["compaction", revision.as_str(), "--command-timeout=25s"];
    at(access, &seen, &member, &command, LIMIT).await?;
    say(&format!(
        "compacted to revision {target}. To shrink the database files of the members, run `kubectl etcd defrag {name}`"
    ))
}

/// The newest revision of the cluster, and the revision to compact to. The last `keep` revisions remain.
fn compaction(view: &ClusterView, keep: u64) -> Result<(u64, u64)> {
    let newest = view
        .members
        .iter()
        .filter_map(|member| member.revision)
        .max();
    let newest = newest.unwrap_or_default();
    match newest.checked_sub(keep).filter(|target| *target > 0) {
        Some(target) => Ok((newest, target)),
        None => Err(Error::refused(
            format!(
                "cluster {} has only {newest} revisions, so there is nothing to compact",
                view.name
            ),
            "use a smaller --keep",
        )),
    }
}

pub(super) async fn move_leader(access: &Access, args: &MoveLeaderArgs) -> Result<()> {
    let name = &args.cluster;
    let seen = see(access, name).await?;
    let Some(next) = successor(&seen.view, args.to.as_deref())? else {
        return Err(Error::refused(
            format!("cluster {name} has one voter, so no other member can lead"),
            "raise spec.size",
        ));
    };
    let leader = seen.view.leader.as_deref().unwrap_or("none");
    say(&format!(
        "leader of cluster {name}: {leader} → {}",
        next.name
    ))?;
    if !confirm("Move leadership?", args.consent)? {
        return Ok(());
    }
    transfer(access, &seen, next).await?;
    let view = status::one(access, name, false).await?;
    say(&format!(
        "leader of cluster {name} is {}",
        view.leader.as_deref().unwrap_or("unknown")
    ))
}

/// The voter that becomes the leader: the member `to`. If `to` is `None`, the voter with the newest Raft log, apart
/// from the current leader. `None` if the leader is the only voter.
fn successor<'a>(view: &'a ClusterView, to: Option<&str>) -> Result<Option<&'a MemberView>> {
    let is_voter = |member: &&MemberView| member.role.as_deref() == Some("Voter");
    if let Some(name) = to {
        let member = view.members.iter().find(|member| member.name == name);
        let reason = match member {
            None => "is not a member",
            Some(member) if is_leader(view, member) => "is already the leader",
            Some(member) if !is_voter(&member) => "is not a voter",
            Some(member) => return Ok(Some(member)),
        };
        return Err(Error::refused(
            format!("{name} {reason} of cluster {}", view.name),
            format!(
                "`kubectl etcd status {}` lists the members with their roles",
                view.name
            ),
        ));
    }
    let others = view
        .members
        .iter()
        .filter(|member| !is_leader(view, member));
    Ok(others
        .filter(is_voter)
        .max_by_key(|member| member.raft_index))
}

/// Requests that the leader transfers the leadership to the member `next`. etcdctl ends when `next` is the leader.
async fn transfer(access: &Access, seen: &Seen, next: &MemberView) -> Result<()> {
    let leader = seen.view.leader.clone().unwrap_or_default();
    let id = next.id.clone().unwrap_or_default();
    at(access, seen, &leader, &["move-leader", &id], LIMIT)
        .await
        .map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, role: &str, raft_index: u64) -> MemberView {
        MemberView {
            name: name.to_owned(),
            role: Some(role.to_owned()),
            healthy: true,
            raft_index: Some(raft_index),
            revision: Some(500),
            ..MemberView::default()
        }
    }

    fn view(members: Vec<MemberView>) -> ClusterView {
        let cluster: EtcdCluster = serde_json::from_value(serde_json::json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main" }, "spec": {}
        }))
        .unwrap();
        let mut view = crate::view::view(crate::view::Inputs {
            cluster: &cluster,
            pods: &[],
            backups: &[],
            live: &crate::view::LiveAnswer::NotAsked,
        });
        let leader = members
            .iter()
            .find(|one| one.role.as_deref() == Some("Leader"));
        view.leader = leader.map(|one| one.name.clone());
        view.source = Source::Members;
        view.members = members;
        view
    }

    #[test]
    fn leader_is_defragmented_last() {
        let view = view(vec![
            member("a", "Leader", 9),
            member("b", "Voter", 9),
            member("c", "Learner", 9),
        ]);
        assert_eq!(defrag_order(&view, None).unwrap(), ["b", "c", "a"]);
        assert_eq!(defrag_order(&view, Some("a")).unwrap(), ["a"]);
        assert!(
            defrag_order(&view, Some("z"))
                .unwrap_err()
                .to_string()
                .contains("member z")
        );
    }

    #[test]
    fn voter_with_newest_log_or_requested_voter_becomes_leader() {
        let all = view(vec![
            member("a", "Leader", 9),
            member("b", "Voter", 7),
            member("c", "Voter", 8),
            member("d", "Learner", 9),
        ]);
        assert_eq!(successor(&all, None).unwrap().unwrap().name, "c");
        assert_eq!(successor(&all, Some("b")).unwrap().unwrap().name, "b");
        for (to, part) in [
            ("a", "already the leader"),
            ("d", "not a voter"),
            ("z", "not a member"),
        ] {
            let error = successor(&all, Some(to)).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        assert_eq!(
            successor(&view(vec![member("a", "Leader", 9)]), None).unwrap(),
            None
        );
    }

    #[test]
    fn compaction_keeps_requested_number_of_newest_revisions() {
        let view = view(vec![member("a", "Leader", 9)]);
        assert_eq!(compaction(&view, 100).unwrap(), (500, 400));
        assert_eq!(compaction(&view, 0).unwrap(), (500, 500));
        assert!(compaction(&view, 500).is_err());
    }

    #[test]
    fn upkeep_is_refused_if_member_does_not_answer() {
        let mut down = member("b", "Voter", 9);
        down.healthy = false;
        let error = all_answer(&view(vec![member("a", "Leader", 9), down])).unwrap_err();
        assert!(error.to_string().contains("do not serve: b"), "{error}");
        let mut unknown = view(vec![member("a", "Leader", 9)]);
        unknown.source = Source::Status;
        unknown.source_problem = Some("forbidden".into());
        assert!(
            all_answer(&unknown)
                .unwrap_err()
                .to_string()
                .contains("forbidden")
        );
    }
}
