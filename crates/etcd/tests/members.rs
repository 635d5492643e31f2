//! Tests of the client with real etcd processes: membership, deadlines, unknown member lists and rejections.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use etcd::testing::{EtcdProcess, Programs, Start, free_port};
use etcd::{Access, Credentials, Deadlines, Error, Etcd, EtcdClient, MemberId};

fn client() -> EtcdClient {
    EtcdClient::new(Access::default())
}

fn urls(members: &[EtcdProcess]) -> Vec<String> {
    members
        .iter()
        .map(|member| member.client_url.clone())
        .collect()
}

/// Maximum number of attempts of [`is_quick`].
const ATTEMPTS: usize = 5;

/// Returns the result of the first attempt that takes less than `limit`. A busy machine delays some attempts, so only a
/// call that is too slow in every attempt fails.
async fn is_quick<T>(limit: Duration, mut ask: impl AsyncFnMut() -> T) -> T {
    let mut times = Vec::new();
    for _ in 0..ATTEMPTS {
        let began = Instant::now();
        let answer = ask().await;
        let took = began.elapsed();
        if took < limit {
            return answer;
        }
        times.push(took);
    }
    panic!("no attempt took less than {limit:?}: {times:?}");
}

/// Repeats a call until it succeeds, because members do not respond during an election.
async fn answered<T>(mut ask: impl AsyncFnMut() -> Result<T, Error>) -> T {
    let began = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(Error::Timeout(_) | Error::Unavailable(_))
                if began.elapsed() < Duration::from_mins(1) => {}
            Err(error) => panic!("{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A listener that accepts connections, but never responds.
fn silent() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

#[tokio::test]
async fn client_reads_members_and_status_on_every_minor() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let etcd = EtcdProcess::start(&Programs::find(minor), &Start::default()).await;
        let via = [etcd.client_url.clone()];
        let members = client().members(&via).await.unwrap();
        assert_eq!(members.members.len(), 1);
        assert_eq!(members.members[0].name, "m0");
        assert_eq!(
            members.members[0].peer_urls,
            std::slice::from_ref(&etcd.peer_url)
        );
        let status = client().status(&via[0]).await.unwrap();
        assert!(status.version.starts_with(minor), "{}", status.version);
        assert_eq!(status.cluster_id, members.cluster_id);
        assert_eq!(status.leader, Some(members.members[0].id));
        assert_eq!(client().alarms(&via).await.unwrap(), []);
    }
}

/// The test reads the metrics on the client port, where etcd serves them if the port has no TLS.
#[tokio::test]
async fn health_data_matches_status_call_and_missing_answer_is_an_error() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let etcd = EtcdProcess::start(&Programs::find(minor), &Start::default()).await;
        let health = etcd.client_url.trim_start_matches("http://").to_owned();
        let pulse = client().pulse(&health).await.unwrap();
        let status = client().status(&etcd.client_url).await.unwrap();
        assert_eq!(pulse.member_id, status.member_id, "{minor}");
        assert!(pulse.has_leader, "{minor}");
        let applied = pulse.raft_applied_index;
        assert!(
            applied > 0 && applied <= status.raft_applied_index,
            "{minor}: {applied} of {}",
            status.raft_applied_index
        );
    }
    let (_silent, url) = silent();
    let brief = Deadlines {
        status: Duration::from_millis(200),
        ..Deadlines::default()
    };
    let client = EtcdClient::with_deadlines(Access::default(), brief);
    let answer = client.pulse(url.trim_start_matches("http://")).await;
    assert!(matches!(answer, Err(Error::Timeout(_))), "{answer:?}");
    let closed = format!("127.0.0.1:{}", free_port());
    let answer = client.pulse(&closed).await;
    assert!(matches!(answer, Err(Error::Unreachable(_))), "{answer:?}");
}

/// A learner reports a leader even without a connection to the leader, so the operators must not rely on a learner's
/// `has_leader`.
#[tokio::test]
async fn learner_reports_leader_without_connection_to_leader() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let programs = Programs::find(minor);
        let mut first = EtcdProcess::start(&programs, &Start::default()).await;
        let via = [first.client_url.clone()];
        let leader = client().status(&via[0]).await.unwrap().member_id;
        let peer = format!("http://127.0.0.1:{}", free_port());
        let peers = std::slice::from_ref(&peer);
        let added = client().add_member(&via, peers, true).await.unwrap();
        let health = format!("127.0.0.1:{}", free_port());
        let start = Start {
            join: vec![format!("m0={}", first.peer_url)],
            flags: vec![format!("--listen-metrics-urls=http://{health}")],
            ..Start::default()
        };
        let _learner = EtcdProcess::join(&programs, "m1", &peer, &start);
        let until = async |peers: &BTreeSet<MemberId>| loop {
            match client().pulse(&health).await {
                // The test waits for an applied entry, because the learner may connect long before it has applied
                // one.
                Ok(pulse)
                    if pulse.has_leader
                        && pulse.peers == *peers
                        && pulse.raft_applied_index > 0 =>
                {
                    return pulse;
                }
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        let pulse = until(&[leader].into()).await;
        assert_eq!(pulse.member_id, added.id, "{minor}");
        first.kill();
        let pulse = until(&[].into()).await;
        assert!(pulse.raft_applied_index > 0, "{minor}");
    }
}

#[tokio::test]
async fn learner_becomes_voter_and_leader_and_invalid_changes_fail() {
    let programs = Programs::find("3.6");
    let first = EtcdProcess::start(&programs, &Start::default()).await;
    let via = [first.client_url.clone()];
    let client = client();
    let peer = format!("http://127.0.0.1:{}", free_port());

    let added = client
        .add_member(&via, std::slice::from_ref(&peer), true)
        .await
        .unwrap();
    assert_eq!(added.members.members.len(), 2);
    let again = client
        .add_member(&via, std::slice::from_ref(&peer), true)
        .await;
    assert!(matches!(again, Err(Error::PeerUrlExists)), "{again:?}");
    let second = client
        .add_member(&via, &["http://127.0.0.1:1".to_owned()], true)
        .await;
    assert!(
        matches!(&second, Err(Error::Unavailable(text)) if text.contains("too many learner")),
        "{second:?}"
    );
    let early = client.promote_member(&via, added.id).await;
    assert!(matches!(early, Err(Error::Unavailable(_))), "{early:?}");

    let start = Start {
        join: vec![format!("m0={}", first.peer_url)],
        ..Start::default()
    };
    let mut learner = EtcdProcess::join(&programs, "m1", &peer, &start);
    assert!(learner.serves().await);
    // A learner rejects the linearizable read that precedes the request for the member list, so the client must call
    // the next member.
    let both = [learner.client_url.clone(), via[0].clone()];
    assert_eq!(client.members(&both).await.unwrap().members.len(), 2);
    // The second promotion must succeed too, although the member is already a voter.
    for _ in 0..2 {
        while let Err(error) = client.promote_member(&via, added.id).await {
            assert!(matches!(error, Error::Unavailable(_)), "{error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    let leader = answered(async || client.status(&via[0]).await).await;
    assert_eq!(leader.leader, Some(leader.member_id));
    let wrong = client
        .move_leader(&learner.client_url, leader.member_id)
        .await;
    assert!(matches!(wrong, Err(Error::Unavailable(_))), "{wrong:?}");
    // On a busy machine, the transfer of the leadership may exceed its deadline. The loop below waits for the new
    // leader.
    if let Err(error) = client.move_leader(&via[0], added.id).await {
        assert!(matches!(error, Error::Timeout(_)), "{error}");
    }
    while answered(async || client.status(&via[0]).await).await.leader != Some(added.id) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    let unknown = client.remove_member(&via, MemberId(1)).await;
    assert!(matches!(unknown, Err(Error::MemberNotFound)), "{unknown:?}");
}

/// Invariant 1: without a quorum, the member list is unknown, not empty.
#[tokio::test]
async fn invariant_1_member_list_is_unknown_without_quorum() {
    let programs = Programs::find("3.6");
    let mut members = EtcdProcess::start_cluster(&programs, 3, &Start::default()).await;
    let via = urls(&members);
    let list = answered(async || client().members(&via).await).await;
    assert_eq!(list.members.len(), 3);
    members[0].kill();
    let list = answered(async || client().members(&via).await).await;
    assert_eq!(list.members.len(), 3);
    members[1].kill();
    let limit = Duration::from_secs(7);
    let answer = is_quick(limit, async || client().members(&via).await).await;
    assert!(
        matches!(answer, Err(Error::Timeout(_) | Error::Unavailable(_))),
        "{answer:?}"
    );
    members[2].kill();
    let answer = client().members(&via).await;
    assert!(matches!(answer, Err(Error::Unreachable(_))), "{answer:?}");
}

#[tokio::test]
async fn unresponsive_member_times_out_and_does_not_delay_member_list() {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let (_listener, silent) = silent();
    let refused = format!("http://127.0.0.1:{}", free_port());

    let limit = Duration::from_millis(2500);
    let status = is_quick(limit, async || client().status(&silent).await).await;
    assert!(matches!(status, Err(Error::Timeout(_))), "{status:?}");

    let via = [silent, refused, etcd.client_url.clone()];
    // `first` uses a new client in each attempt, because a client remembers the member that responded first.
    let limit = Duration::from_millis(1800);
    let first = is_quick(limit, async || {
        let client = client();
        client.members(&via).await.map(|_| client)
    });
    let client = first.await.unwrap();
    // `client` calls the member that responded first, so the next call is quick.
    let limit = Duration::from_millis(500);
    let next = is_quick(limit, async || client.members(&via).await);
    next.await.unwrap();
}

#[tokio::test]
async fn dead_member_is_skipped_and_error_contains_its_url() {
    let programs = Programs::find("3.6");
    let mut members = EtcdProcess::start_cluster(&programs, 3, &Start::default()).await;
    let via = urls(&members);
    let client = client();
    answered(async || client.members(&via).await).await;
    members[0].kill();
    for _ in 0..3 {
        answered(async || client.members(&via).await).await;
    }
    let dead = client.status(&via[0]).await;
    assert!(
        matches!(&dead, Err(Error::Unreachable(text)) if text.contains(&via[0])),
        "{dead:?}"
    );
}

#[tokio::test]
async fn tls_and_authentication_errors_are_reported() {
    let programs = Programs::find("3.6");
    let flags = Start {
        flags: vec!["--auto-tls".to_owned()],
        ..Start::default()
    };
    let secure = EtcdProcess::start(&programs, &flags).await;
    let unknown = EtcdClient::new(Access {
        tls: Some(etcd::TlsAccess::default()),
        credentials: None,
    });
    for client in [client(), unknown] {
        let answer = client.status(&secure.client_url).await;
        assert!(matches!(answer, Err(Error::Tls(_))), "{answer:?}");
    }

    let open = EtcdProcess::start(&programs, &Start::default()).await;
    let mut raw = etcd_client::Client::connect([&open.client_url], None)
        .await
        .unwrap();
    raw.user_add("root", "secret", None).await.unwrap();
    raw.user_grant_role("root", "root").await.unwrap();
    raw.auth_enable().await.unwrap();
    let via = [open.client_url.clone()];
    let answer = client().members(&via).await;
    assert!(matches!(answer, Err(Error::AccessDenied(_))), "{answer:?}");
    let login = |password: &str| {
        EtcdClient::new(Access {
            tls: None,
            credentials: Some(Credentials {
                user: "root".into(),
                password: password.into(),
                former: Vec::new(),
            }),
        })
    };
    let answer = login("wrong").members(&via).await;
    assert!(matches!(answer, Err(Error::AccessDenied(_))), "{answer:?}");
    assert_eq!(
        login("secret").members(&via).await.unwrap().members.len(),
        1
    );
}

/// Forwards a port of the IPv6 loopback address to a member, because a pod in an IPv6 cluster has an IPv6 address.
async fn over_ipv6(url: &str) -> String {
    let target = url.trim_start_matches("http://").to_owned();
    let listener = tokio::net::TcpListener::bind("[::1]:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let target = target.clone();
            tokio::spawn(async move {
                let mut far = tokio::net::TcpStream::connect(target).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    format!("http://{address}")
}

#[tokio::test]
async fn client_connects_to_ipv6_address() {
    let etcd = EtcdProcess::start(&Programs::find("3.7"), &Start::default()).await;
    let url = over_ipv6(&etcd.client_url).await;
    assert!(url.starts_with("http://[::1]:"), "{url}");
    let client = client();
    let via = [url.clone()];
    let members = client.members(&via).await.unwrap();
    assert_eq!(members.members.len(), 1);
    assert_eq!(
        client.status(&url).await.unwrap().member_id,
        members.members[0].id
    );
    client
        .move_leader(&url, members.members[0].id)
        .await
        .unwrap();
}
