//! Which member a snapshot is taken from: the healthiest that is not the leader. Pure.

use std::collections::BTreeMap;

use etcd::{ClusterId, MemberId, Members, Status};

use crate::reason::{Reason, Trouble};

/// A follower that is further behind than this many raft entries is taken only when there is nothing better.
const NEAR: u64 = 1000;

/// A member that answered, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Its client URL.
    pub(super) url: String,
    /// What it says of itself.
    pub(super) status: Status,
}

/// What answered, put right by what the cluster says of its members. A URL that only the cluster knows may lead
/// elsewhere from here, as `http://localhost:2379` does: it counts where the member answers that it is said to be of.
/// A member's own URLs come first: behind that of a Service another member may send the snapshot than the one that was
/// judged by its status.
pub(super) fn known(
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

/// The members to try, best first. Learners may be behind and are left out.
pub(super) fn ranked(answers: Vec<Candidate>) -> Result<Vec<Candidate>, Trouble> {
    let clusters: BTreeMap<ClusterId, String> = answers
        .iter()
        .map(|answer| (answer.status.cluster_id, answer.url.clone()))
        .collect();
    if clusters.len() > 1 {
        let listed: Vec<String> = clusters
            .iter()
            .map(|(id, url)| format!("{url} belongs to {id}"))
            .collect();
        return Err(Trouble::new(
            Reason::InvalidSpec,
            format!(
                "spec.etcdEndpoints names members of different clusters: {}; give those of one",
                listed.join(", ")
            ),
        ));
    }
    // One member may answer at several URLs.
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
        let leads = status.leader == Some(status.member_id);
        (
            corrupt,
            status.leader.is_none(),
            behind > NEAR,
            leads,
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
    fn takes_the_most_advanced_follower_and_the_leader_last() {
        let answers = vec![
            answer("leader", 1, 500),
            answer("b", 2, 480),
            answer("c", 3, 490),
        ];
        assert_eq!(order(answers), ["c", "b", "leader"]);
    }

    #[test]
    fn prefers_the_leader_to_a_follower_that_lags() {
        let answers = vec![answer("leader", 1, 5000), answer("b", 2, 100)];
        assert_eq!(order(answers), ["leader", "b"]);
    }

    #[test]
    fn a_single_member_is_the_leader_and_is_taken() {
        assert_eq!(order(vec![answer("leader", 1, 5)]), ["leader"]);
    }

    #[test]
    fn takes_a_corrupt_member_and_one_without_a_leader_last() {
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
    fn never_takes_a_learner() {
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
    fn a_member_at_two_urls_is_one_member() {
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

    /// Behind a Service's URL another member may send the snapshot, which nobody has judged.
    #[test]
    fn a_member_is_asked_at_its_own_url_and_not_at_that_of_a_service() {
        let given = ["a-service".to_owned(), "own-2".to_owned()];
        let answers = vec![
            answer("a-service", 2, 500),
            answer("own-1", 1, 500),
            answer("own-2", 2, 500),
        ];
        let listed = listed(&[(1, &["own-1"]), (2, &["own-2"])]);
        assert_eq!(
            order(known(answers.clone(), &given, Some(&listed))),
            ["own-2", "own-1"]
        );
        // Without a quorum nobody says which are the members.
        assert_eq!(order(known(answers, &given, None)), ["a-service", "own-1"]);
    }

    #[test]
    fn an_advertised_url_that_leads_to_another_cluster_or_member_prevents_no_backup() {
        let given = ["given".to_owned()];
        let mut foreign = answer("http://localhost:2379", 9, 500);
        foreign.status.cluster_id = ClusterId(2);
        let answers = vec![answer("given", 1, 5), foreign, answer("http://other", 1, 5)];
        let listed = listed(&[(1, &["http://localhost:2379"]), (2, &["http://other"])]);
        assert_eq!(order(known(answers, &given, Some(&listed))), ["given"]);
    }

    #[test]
    fn refuses_endpoints_of_different_clusters() {
        let mut other = answer("other", 2, 5);
        other.status.cluster_id = ClusterId(2);
        let trouble = ranked(vec![answer("one", 1, 5), other]).unwrap_err();
        assert_eq!(trouble.reason, Reason::InvalidSpec);
        assert!(
            trouble.message.contains("other belongs to 2"),
            "{}",
            trouble.message
        );
    }
}
