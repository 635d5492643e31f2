//! Tests: the operators' etcd client can use the simulator.

use std::net::Ipv4Addr;

use etcd::{Access, AlarmKind, Deadlines, Error, Etcd, EtcdClient, MemberId};
use tokio::net::TcpListener;

use super::*;
use crate::scale::cluster::Start;
use crate::scale::cluster::tests::start;

const FIRST: [&str; 3] = ["a", "b", "c"];

/// A simulator whose members have loopback IP addresses such as 127.0.0.2, and the operators' etcd client.
struct Simulator {
    fleet: Arc<Fleet>,
    port: u16,
    health: u16,
    client: EtcdClient,
}

impl Simulator {
    async fn start() -> Self {
        let fleet = Arc::new(Fleet::default());
        let listen = async || TcpListener::bind("0.0.0.0:0").await.unwrap();
        let (clients, health) = (listen().await, listen().await);
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let simulator = Self {
            port: port(&clients),
            health: port(&health),
            fleet: Arc::clone(&fleet),
            client: EtcdClient::new(Access::default()),
        };
        tokio::spawn(serve_clients(clients, Arc::clone(&fleet)));
        tokio::spawn(serve_health(health, fleet));
        simulator
    }

    fn run(&self, member: &Start, last: u8) -> String {
        let address = Ipv4Addr::new(127, 0, 0, last);
        self.fleet.start(member, address.into());
        format!("http://{address}:{}", self.port)
    }

    fn stop(&self, last: u8) {
        self.fleet.stop(Ipv4Addr::new(127, 0, 0, last).into());
    }
}

#[tokio::test]
async fn etcd_client_reads_simulated_cluster_and_removes_member() {
    let simulator = Simulator::start().await;
    let client = &simulator.client;
    let mut urls = Vec::new();
    for (name, last) in FIRST.iter().zip(2..) {
        urls.push(simulator.run(&start(&FIRST, name), last));
    }
    let members = client.members(&urls).await.unwrap();
    assert_eq!(members.members.len(), 3);
    let status = client.status(&urls[2]).await.unwrap();
    assert_eq!(status.version, "3.6.15");
    assert_eq!(status.storage_version.as_deref(), Some("3.6.0"));
    assert_eq!(status.cluster_id, members.cluster_id);
    let listed = members.members.iter().find(|one| one.name == "c").unwrap();
    assert_eq!(listed.id, status.member_id);
    assert!(
        status
            .leader
            .is_some_and(|leader| leader != status.member_id)
    );
    let health = format!("127.0.0.4:{}", simulator.health);
    let pulse = client.pulse(&health).await.unwrap();
    assert_eq!(
        (pulse.member_id, pulse.has_leader),
        (status.member_id, true)
    );
    assert_eq!(pulse.peers.len(), 2);
    assert!(client.alarms(&urls).await.unwrap().is_empty());
    let hashes = [
        client.hash(&urls[0], status.revision).await.unwrap(),
        client.hash(&urls[1], status.revision).await.unwrap(),
    ];
    assert!(hashes[0].is_some() && hashes[0] == hashes[1]);
    // Member c stops, and the client removes it from the member list. The simulator then refuses a new member, because
    // members a and b must first have been connected for five seconds.
    simulator.stop(4);
    let gone = client.status(&urls[2]).await.unwrap_err();
    assert!(matches!(gone, Error::Unreachable(_)), "{gone}");
    client.remove_member(&urls, listed.id).await.unwrap();
    let again = client.remove_member(&urls, listed.id).await.unwrap_err();
    assert!(matches!(again, Error::MemberNotFound), "{again}");
    let peer = vec![start(&FIRST, "d").peer_url];
    let running = &urls[..2];
    let early = client.add_member(running, &peer, true).await.unwrap_err();
    assert!(matches!(early, Error::Unavailable(_)), "{early}");
}

#[tokio::test]
async fn etcd_client_promotes_learner_and_moves_leader_of_simulated_cluster() {
    let simulator = Simulator::start().await;
    let client = &simulator.client;
    let urls = [simulator.run(&start(&["a"], "a"), 10)];
    let peer = vec![start(&["a"], "d").peer_url];
    let added = client.add_member(&urls, &peer, true).await.unwrap();
    assert_eq!(added.members.members.len(), 2);
    let learner = simulator.run(&start(&["a"], "d"), 11);
    let refused = client.local_members(&learner).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable(_)), "{refused}");
    assert!(client.status(&learner).await.unwrap().is_learner);
    client.promote_member(&urls, added.id).await.unwrap();
    // The second promotion changes nothing and succeeds, because the member is already a voter.
    client.promote_member(&urls, added.id).await.unwrap();
    client.move_leader(&urls[0], added.id).await.unwrap();
    let leader = client.status(&urls[0]).await.unwrap().leader;
    assert_eq!(leader, Some(added.id));
    let refused = client.move_leader(&urls[0], added.id).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable(_)), "{refused}");
    let nobody = etcd::Alarm {
        member: MemberId(1),
        kind: AlarmKind::NoSpace,
    };
    client.disarm(&urls, nobody).await.unwrap();
    client.compact(&urls, 1).await.unwrap();
    client.defragment(&learner).await.unwrap();
    assert!(simulator.fleet.calls()["Cluster/MemberPromote"] >= 2);
}

#[tokio::test]
async fn simulated_cluster_without_quorum_answers_no_linearizable_read() {
    let simulator = Simulator::start().await;
    let url = simulator.run(&start(&FIRST, "a"), 20);
    let status = simulator.client.status(&url).await.unwrap();
    assert_eq!(status.leader, None);
    let deadlines = Deadlines {
        call: Duration::from_millis(300),
        ..Deadlines::default()
    };
    let client = EtcdClient::with_deadlines(Access::default(), deadlines);
    let read = client.members(&[url]).await.unwrap_err();
    assert!(matches!(read, Error::Timeout(_)), "{read}");
}
