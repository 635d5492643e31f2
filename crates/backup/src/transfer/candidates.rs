//! Selects the member that sends the snapshot: a healthy follower, or else the leader. Performs no I/O.

use std::collections::BTreeMap;

use etcd::{ClusterId, MemberId, Members, Status};

use crate::reason::{Reason, Trouble};

/// Maximum number of Raft entries that a follower may lag. If a follower lags by more, the leader is preferred.
const MAX_LAG: u64 = 1000;

/// A member that has answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// The client URL at which the member answered.
    pub(super) url: String,
    /// The status that the member reports.
    pub(super) status: Status,
}

/// Selects the answers that the transfer can use. The URL must be an endpoint in the spec, or a listed client URL of
/// the member that answers. An advertised URL such as `http://localhost:2379` may lead to another etcd, so the member
/// ID must match.
///
/// The URLs of members come first. Behind the URL of a Service, different members may answer the requests for the
/// status and the snapshot. Without a member list, all answers are returned.
pub(super) fn usable(
    answers: Vec<Candidate>,
    given: &[String],
    listed: Option<&Members>,
) -> Vec<Candidate> {
    let Some(listed) = listed else {
        return answers;
    };
    let is_own = |answer: &Candidate| {
        answer.status.cluster_id == listed.cluster_id
            && listed.members.iter().any(|member| {
                member.id == answer.status.member_id && member.client_urls.contains(&answer.url)
            })
    };
    let (own, others): (Vec<Candidate>, Vec<Candidate>) = answers.into_iter().partition(is_own);
    let others = others
        .into_iter()
        .filter(|answer| given.contains(&answer.url));
    own.into_iter().chain(others).collect()
}

/// Selects the answers of the expected cluster, because a member of another cluster may have the address of a deleted
/// pod (invariant 28).
pub(super) fn of_cluster(
    answers: Vec<Candidate>,
    expected: ClusterId,
) -> Result<Vec<Candidate>, Trouble> {
    let (ours, others): (Vec<Candidate>, Vec<Candidate>) = answers
        .into_iter()
        .partition(|answer| answer.status.cluster_id == expected);
    match others.first() {
        Some(other) if ours.is_empty() => Err(Trouble::new(
            Reason::EtcdUnreachable,
            format!(
                "{} does not belong to the cluster ID {expected} in the status of the EtcdCluster: the next attempt \
                 reads the addresses of the EtcdCluster's pods again",
                other.url
            ),
        )),
        _ => Ok(ours),
    }
}

/// The members that can send a snapshot, best first. Learners are left out, because they may lag.
pub(super) fn ranked(answers: Vec<Candidate>) -> Result<Vec<Candidate>, Trouble> {
    let clusters: BTreeMap<ClusterId, String> = answers
        .iter()
        .map(|answer| (answer.status.cluster_id, answer.url.clone()))
        .collect();
    if clusters.len() > 1 {
        let listed: Vec<String> = clusters
            .iter()
            .map(|(id, url)| format!("{url} belongs to cluster {id}"))
            .collect();
        return Err(Trouble::new(
            Reason::InvalidSpec,
            format!(
                "spec.etcdEndpoints names members of different clusters: {}; name the members of one cluster",
                listed.join(", ")
            ),
        ));
    }
    // A member that answers at several URLs is counted once.
    let members: BTreeMap<MemberId, Candidate> = answers
        .into_iter()
        .rev()
        .filter(|answer| !answer.status.is_learner)
        .map(|answer| (answer.status.member_id, answer))
        .collect();
    let newest = members
        .values()
        .map(|candidate| candidate.status.raft_applied_index)
        .max()
        .unwrap_or_default();
    let mut ranked: Vec<Candidate> = members.into_values().collect();
    ranked.sort_by_key(|candidate| {
        let status = &candidate.status;
        let corrupt = status.errors.iter().any(|error| error.contains("CORRUPT"));
        let behind = newest - status.raft_applied_index;
        let is_leader = status.leader == Some(status.member_id);
        (
            corrupt,
            status.leader.is_none(),
            behind > MAX_LAG,
            is_leader,
            behind,
        )
    });
    if ranked.is_empty() {
        return Err(Trouble::new(
            Reason::EtcdUnreachable,
            "no voter of the etcd cluster answered: check spec.etcdEndpoints or the cluster",
        ));
    }
    Ok(ranked)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(url: &str, id: u64, applied: u64) -> Candidate {
        Candidate {
            url: url.to_owned(),
            status: Status {
                cluster_id: ClusterId(1),
                member_id: MemberId(id),
                version: "3.6.16".to_owned(),
                leader: Some(MemberId(1)),
                is_learner: false,
                revision: 1,
                raft_term: 2,
                raft_index: applied,
                raft_applied_index: applied,
                db_size: 0,
                db_size_in_use: 0,
                errors: Vec::new(),
                storage_version: None,
                downgrade: None,
            },
        }
    }

    fn order(answers: Vec<Candidate>) -> Vec<String> {
        ranked(answers)
            .unwrap()
            .into_iter()
            .map(|candidate| candidate.url)
            .collect()
    }

    #[test]
    fn most_advanced_follower_is_preferred_to_leader() {
        let answers = vec![
            answer("leader", 1, 500),
            answer("b", 2, 480),
            answer("c", 3, 490),
        ];
        assert_eq!(order(answers), ["c", "b", "leader"]);
    }

    #[test]
    fn leader_is_preferred_to_lagging_follower() {
        let answers = vec![answer("leader", 1, 5000), answer("b", 2, 100)];
        assert_eq!(order(answers), ["leader", "b"]);
    }

    #[test]
    fn leader_sends_snapshot_if_it_is_the_only_member() {
        assert_eq!(order(vec![answer("leader", 1, 5)]), ["leader"]);
    }

    #[test]
    fn corrupt_and_leaderless_members_are_last_choice() {
        let mut corrupt = answer("corrupt", 2, 500);
        corrupt.status.errors.push("alarm:CORRUPT".to_owned());
        let mut alone = answer("alone", 3, 500);
        alone.status.leader = None;
        assert_eq!(
            order(vec![corrupt, alone, answer("leader", 1, 500)]),
            ["leader", "alone", "corrupt"]
        );
    }

    #[test]
    fn snapshot_is_never_taken_from_learner() {
        let mut learner = answer("learner", 2, 500);
        learner.status.is_learner = true;
        assert_eq!(
            order(vec![learner.clone(), answer("leader", 1, 500)]),
            ["leader"]
        );
        assert_eq!(
            ranked(vec![learner]).unwrap_err().reason,
            Reason::EtcdUnreachable
        );
    }

    #[test]
    fn member_with_two_urls_counts_once() {
        assert_eq!(
            order(vec![answer("service", 1, 5), answer("own", 1, 5)]),
            ["service"]
        );
    }

    fn listed(members: &[(u64, &[&str])]) -> Members {
        let member = |(id, urls): &(u64, &[&str])| etcd::Member {
            id: MemberId(*id),
            name: id.to_string(),
            peer_urls: Vec::new(),
            client_urls: urls.iter().map(|url| (*url).to_owned()).collect(),
            is_learner: false,
        };
        Members {
            cluster_id: ClusterId(1),
            members: members.iter().map(member).collect(),
        }
    }

    #[test]
    fn member_url_is_preferred_to_service_url() {
        let given = ["a-service".to_owned(), "own-2".to_owned()];
        let answers = vec![
            answer("a-service", 2, 500),
            answer("own-1", 1, 500),
            answer("own-2", 2, 500),
        ];
        let listed = listed(&[(1, &["own-1"]), (2, &["own-2"])]);
        assert_eq!(
            order(usable(answers.clone(), &given, Some(&listed))),
            ["own-2", "own-1"]
        );
        // Without a quorum, etcd returns no member list. Then all answers are used, and the first URL of each member is
        // kept.
        assert_eq!(order(usable(answers, &given, None)), ["a-service", "own-1"]);
    }

    #[test]
    fn advertised_url_of_another_cluster_is_ignored() {
        let given = ["given".to_owned()];
        let mut foreign = answer("http://localhost:2379", 9, 500);
        foreign.status.cluster_id = ClusterId(2);
        let answers = vec![answer("given", 1, 5), foreign, answer("http://other", 1, 5)];
        let listed = listed(&[(1, &["http://localhost:2379"]), (2, &["http://other"])]);
        assert_eq!(order(usable(answers, &given, Some(&listed))), ["given"]);
    }

    #[test]
    fn invariant_28_only_members_of_recorded_cluster_send_snapshot() {
        let mut other = answer("other", 2, 5);
        other.status.cluster_id = ClusterId(2);
        let both = vec![answer("one", 1, 5), other.clone()];
        assert_eq!(order(of_cluster(both, ClusterId(1)).unwrap()), ["one"]);
        let trouble = of_cluster(vec![other], ClusterId(1)).unwrap_err();
        assert_eq!(trouble.reason, Reason::EtcdUnreachable);
        assert!(trouble.message.contains("other does not belong"));
    }

    #[test]
    fn endpoints_of_different_clusters_are_rejected() {
        let mut other = answer("other", 2, 5);
        other.status.cluster_id = ClusterId(2);
        let trouble = ranked(vec![answer("one", 1, 5), other]).unwrap_err();
        assert_eq!(trouble.reason, Reason::InvalidSpec);
        assert!(
            trouble.message.contains("other belongs to cluster 2"),
            "{}",
            trouble.message
        );
    }
}
