//! Starts real etcd processes with the arguments of member pods. The processes can connect to each other only over
//! IPv6.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::net::Ipv6Addr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use api::EtcdCluster;
use api::cluster::EtcdClusterSpec;
use api::names::{CLIENT_PORT, DATA_DIR, METRICS_PORT, PEER_PORT};
use api::version::EtcdVersion;
use etcd::testing::{Programs, free_port};
use etcd::{Access, Etcd, EtcdClient};
use member::{Member, Members, Role, Start, etcd_arguments};
use tempfile::TempDir;

const NAMES: [&str; 3] = ["db-aaaaaaaaaa", "db-bbbbbbbbbb", "db-cccccccccc"];

/// The ports of one member. All members share one address, so their ports must differ.
struct Place {
    name: &'static str,
    peer: u16,
    client: u16,
    metrics: u16,
    data: TempDir,
}

/// A running etcd, which is killed when this value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The arguments of the member's pod with other hosts and ports: URLs contain `[::1]` instead of the name of a Service,
/// and each member has its own ports. The listen addresses are unchanged.
fn arguments(of: &Place, places: &[Place], version: &EtcdVersion) -> Vec<String> {
    let cluster = EtcdCluster::new("db", EtcdClusterSpec::default());
    let members = Members::of(&cluster, "default", "token", None);
    let member = Member {
        name: of.name,
        version,
        role: Role::Voter,
        start: Start::Bootstrap {
            members: NAMES.iter().map(|&name| name.to_owned()).collect(),
        },
    };
    let addresses = members.addresses();
    let local = |argument: &String| {
        let mut text = argument.replace(DATA_DIR, of.data.path().join("data").to_str().unwrap());
        for place in places {
            let peer = format!("http://[::1]:{}", place.peer);
            let client = format!("http://[::1]:{}", place.client);
            text = text.replace(&addresses.peer_url(place.name), &peer);
            text = text.replace(&addresses.client_url(place.name), &client);
        }
        for (port, own) in [
            (PEER_PORT, of.peer),
            (CLIENT_PORT, of.client),
            (METRICS_PORT, of.metrics),
        ] {
            text = text.replace(&format!("0.0.0.0:{port}"), &format!("0.0.0.0:{own}"));
        }
        text
    };
    let all: Vec<String> = etcd_arguments(&members, &member)
        .iter()
        .map(local)
        .collect();
    let listens = |argument: &&String| argument.starts_with("--listen-");
    assert!(
        all.iter()
            .filter(listens)
            .all(|one| one.contains("0.0.0.0"))
    );
    assert!(!all.iter().any(|one| one.contains(".svc")), "{all:?}");
    all
}

fn run(place: &Place, places: &[Place], version: &EtcdVersion, programs: &Programs) -> Running {
    let log = std::fs::File::create(place.data.path().join("log")).unwrap();
    let mut command = Command::new(&programs.etcd);
    command
        .args(arguments(place, places, version))
        .env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    Running(command.spawn().unwrap())
}

/// Members with IPv6 addresses form a cluster. The listen address `0.0.0.0` includes both IP families, so the same
/// arguments work with single stack and dual stack.
#[tokio::test]
async fn members_form_cluster_over_ipv6_only() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let version = EtcdVersion::parse(&format!("{minor}.9")).unwrap();
        let programs = Programs::find(minor);
        let places = NAMES.map(|name| Place {
            name,
            peer: free_port(),
            client: free_port(),
            metrics: free_port(),
            data: tempfile::tempdir().unwrap(),
        });
        let running = places
            .each_ref()
            .map(|place| run(place, &places, &version, &programs));
        let client = EtcdClient::new(Access::default());
        let urls = places
            .each_ref()
            .map(|place| format!("http://[::1]:{}", place.client));
        let begun = Instant::now();
        let list = loop {
            match client.members(&urls).await {
                Ok(list) if list.members.iter().all(|one| !one.name.is_empty()) => break list,
                answer => assert!(
                    begun.elapsed() < Duration::from_mins(1),
                    "etcd {minor} does not form a cluster over IPv6: {answer:?}"
                ),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        assert_eq!(list.members.len(), 3);
        for place in &places {
            // The call is repeated, because a member may detect the leader later than the other members.
            let status = loop {
                match client
                    .status(&format!("http://[::1]:{}", place.client))
                    .await
                {
                    Ok(status) if status.leader.is_some() => break status,
                    answer => assert!(
                        begun.elapsed() < Duration::from_mins(2),
                        "{} of etcd {minor} does not serve: {answer:?}",
                        place.name
                    ),
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            };
            assert!(status.version.starts_with(minor), "{}", status.version);
            // The test connects to the metrics port over IPv6, like the kubelet.
            std::net::TcpStream::connect((Ipv6Addr::LOCALHOST, place.metrics)).unwrap();
            std::net::TcpStream::connect(("127.0.0.1", place.client)).unwrap();
        }
        drop(running);
    }
}
