//! Tests: adding, removing and promoting members, and the loss of members.

use super::*;

/// The etcd arguments of the member `name` in a cluster whose initial members are `first`.
pub(in super::super) fn start(first: &[&str], name: &str) -> Start {
    let url = |name: &str| format!("http://{name}.ns.svc:2380");
    Start {
        token: "token".to_owned(),
        name: name.to_owned(),
        peer_url: url(name),
        client_url: format!("http://{name}.ns.svc:2379"),
        initial: first
            .iter()
            .map(|name| ((*name).to_owned(), url(name)))
            .collect(),
        joins: !first.contains(&name),
        version: "3.6.15".to_owned(),
        pod: format!("pod-{name}"),
    }
}

/// A cluster of three members that have run for a minute, the IDs of the members, and the current time.
fn formed() -> (Cluster, [u64; 3], Instant) {
    let names = ["a", "b", "c"];
    let began = Instant::now();
    let mut cluster = Cluster::bootstrap(&start(&names, "a"));
    let ids = names.map(|name| {
        let started = cluster.start(&start(&names, name), began);
        started.unwrap()
    });
    (cluster, ids, began + Duration::from_mins(1))
}

fn url(name: &str) -> Vec<String> {
    vec![start(&[], name).peer_url]
}

#[test]
fn cluster_elects_leader_when_majority_runs() {
    let names = ["a", "b", "c"];
    let mut cluster = Cluster::bootstrap(&start(&names, "a"));
    let now = Instant::now();
    cluster.start(&start(&names, "a"), now);
    assert!(!cluster.has_quorum() && cluster.leader.is_none());
    assert!(cluster.members[0].client_urls.is_empty());
    cluster.start(&start(&names, "b"), now);
    assert!(cluster.has_quorum() && cluster.leader.is_some());
    assert_eq!(cluster.members[0].client_urls.len(), 1);
    assert!(!cluster.is_complete(3, "3.6.15"));
    cluster.start(&start(&names, "c"), now);
    assert!(cluster.is_complete(3, "3.6.15") && !cluster.is_complete(3, "3.6.16"));
}

#[test]
fn new_leader_is_elected_after_leader_stops_unless_quorum_is_lost() {
    let (mut cluster, [a, b, _], _) = formed();
    let (leader, term) = (cluster.leader.unwrap(), cluster.term);
    assert_eq!(leader, a);
    cluster.stop(a);
    assert_eq!((cluster.leader, cluster.term), (Some(b), term + 1));
    cluster.stop(b);
    assert!(!cluster.has_quorum() && cluster.leader.is_none());
}

#[test]
fn lost_member_is_removed_and_learner_takes_its_place() {
    let (mut cluster, [a, b, _], now) = formed();
    cluster.stop(b);
    assert_eq!(
        cluster.add(a, &url("d"), true, now),
        Err(Refusal::Unhealthy)
    );
    cluster.remove(a, b, now).unwrap();
    assert_eq!(cluster.remove(a, b, now), Err(Refusal::MemberNotFound));
    let d = cluster.add(a, &url("d"), true, now).unwrap();
    assert_eq!(cluster.promote(d), Err(Refusal::LearnerNotReady));
    let started = cluster.start(&start(&["a", "b", "c"], "d"), now);
    assert_eq!(started, Some(d));
    assert!(!cluster.is_complete(3, "3.6.15"));
    cluster.promote(d).unwrap();
    assert_eq!(cluster.promote(d), Err(Refusal::NotALearner));
    assert!(cluster.is_complete(3, "3.6.15"));
}

#[test]
fn new_member_is_refused_until_voters_are_connected_long_enough() {
    let (mut cluster, [a, b, _], now) = formed();
    cluster.stop(b);
    cluster.start(&start(&["a", "b", "c"], "b"), now);
    let add = |cluster: &mut Cluster, after| cluster.add(a, &url("d"), true, now + after);
    let early = Duration::from_secs(4);
    assert_eq!(add(&mut cluster, early), Err(Refusal::Unhealthy));
    assert!(add(&mut cluster, HEALTH_INTERVAL).is_ok());
    assert_eq!(
        add(&mut cluster, HEALTH_INTERVAL),
        Err(Refusal::PeerUrlExists)
    );
}

#[test]
fn removal_that_would_lose_quorum_is_refused() {
    let (mut cluster, [a, b, c], now) = formed();
    cluster.stop(c);
    assert_eq!(cluster.remove(a, b, now), Err(Refusal::Unhealthy));
    cluster.remove(a, c, now).unwrap();
    assert_eq!(cluster.voters().count(), 2);
}

#[test]
fn learner_does_not_count_for_quorum() {
    let (mut cluster, [a, b, c], now) = formed();
    let d = cluster.add(a, &url("d"), true, now).unwrap();
    cluster.start(&start(&["a", "b", "c"], "d"), now);
    cluster.stop(b);
    cluster.stop(c);
    assert!(!cluster.has_quorum());
    assert!(cluster.member(d).unwrap().is_learner);
}

#[test]
fn leader_transfer_needs_call_to_leader_and_running_target() {
    let (mut cluster, [a, b, c], _) = formed();
    assert_eq!(cluster.move_leader(b, c), Err(Refusal::NotLeader));
    cluster.stop(c);
    assert_eq!(cluster.move_leader(a, c), Err(Refusal::BadTransferee));
    cluster.move_leader(a, b).unwrap();
    assert_eq!(cluster.leader, Some(b));
}

#[test]
fn member_starts_only_in_its_own_pod_and_if_it_is_in_member_list() {
    let (mut cluster, [_, b, _], now) = formed();
    cluster.stop(b);
    let mut again = start(&["a", "b", "c"], "b");
    again.pod = "another".to_owned();
    assert_eq!(cluster.start(&again, now), None);
    let stranger = start(&["a", "b", "c"], "d");
    assert_eq!(cluster.start(&stranger, now), None);
}
