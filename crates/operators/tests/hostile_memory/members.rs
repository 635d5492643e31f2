//! Tests with hostile etcd members.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use api::names::{ANNOTATION_JOIN, MANAGER_BACKUP, MANAGER_CLUSTER};
use api::{EtcdBackup, EtcdCluster};
use bytes::Bytes;
use etcd::testing::{EtcdProcess, Programs, Start};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

use crate::member::{Answer, HostileMember, field, framed, list_of, status};
use crate::process::OperatorProcess;
use crate::{HONEST, TENANTS, backs_up_honest_tenant, create_in, prepared};

/// Number of hostile objects of all tenants together.
const OBJECTS: usize = 48;

/// The number of the field `blob` in `SnapshotResponse`.
const BLOB: u8 = 3;

/// Counts the calls of one method.
#[derive(Clone, Default)]
struct Count(Arc<AtomicUsize>);

impl Count {
    fn add(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// A list of 100,000 members, of which the operator reads only a part.
fn long_list() -> Answer {
    Answer::Message(list_of(100_000, &[8, 1]))
}

/// The list that needs the most memory of all lists that the operator accepts. The server keeps the call open.
fn costly_list() -> Answer {
    Answer::Open(list_of(16_000, &[]))
}

/// An answer that sends one byte every 29 s, just within the time limit between two parts of a snapshot.
fn slow() -> Answer {
    Answer::Slow(Duration::from_secs(29))
}

/// An answer whose header announces a message of 3 MiB, and that never ends.
fn long_answer() -> Answer {
    let piece = [&[0, 0, 48, 0, 0][..], &[0].repeat(60_000)].concat();
    Answer::Endless(piece.into())
}

/// A command-line argument of an operator that permits a tenant to use the member. `flag` is `--etcd-endpoints` or
/// `--join`.
fn grant(flag: &str, tenant: &str, member: &HostileMember) -> String {
    let host = member.url.trim_start_matches("http://");
    format!("{flag}={tenant}={host}")
}

/// Many EtcdBackups of three tenants back up hostile members, which send an endless snapshot, a slow snapshot, or
/// endless messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_etcd_does_not_fill_memory_of_backup_operator() {
    let began = Instant::now();
    let [endless, stalled, long] = [(); 3].map(|()| Count::default());
    let counts = [endless.clone(), stalled.clone(), long.clone()];
    let blob: Bytes = framed(&field(BLOB, &[7].repeat(32 << 10)));
    let members = [
        HostileMember::start(move |method| match method {
            "MemberList" => long_list(),
            "Status" => Answer::Message(status()),
            "Snapshot" => {
                endless.add();
                Answer::Endless(blob.clone())
            }
            _ => Answer::Message(Vec::new()),
        })
        .await,
        HostileMember::start(move |method| match method {
            "MemberList" => costly_list(),
            "Status" => Answer::Message(status()),
            "Snapshot" => {
                stalled.add();
                slow()
            }
            _ => Answer::Message(Vec::new()),
        })
        .await,
        HostileMember::start(move |_| {
            long.add();
            long_answer()
        })
        .await,
    ];
    let (server, client) = prepared().await;
    let source = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let directory = tempfile::tempdir().unwrap();
    let host = source.client_url.trim_start_matches("http://");
    let mut arguments = vec![
        format!("--local-directory={}", directory.path().display()),
        format!("--local-quota={}", 32 << 20),
        format!("--etcd-endpoints={HONEST}={host}"),
    ];
    let tenants = TENANTS.into_iter().zip(&members);
    arguments.extend(tenants.map(|(tenant, member)| grant("--etcd-endpoints", tenant, member)));
    let operator = OperatorProcess::start(MANAGER_BACKUP, &server, &arguments);
    let tenants = TENANTS.into_iter().zip(&members).cycle();
    for (number, (tenant, member)) in (0..OBJECTS).zip(tenants) {
        let backup = json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdBackup",
            "metadata": { "name": format!("backup-{number}") },
            "spec": {
                "etcdEndpoints": [member.url], "storageType": "Local",
                "local": { "path": format!("etcd/{number}") },
            },
        });
        create_in::<EtcdBackup>(&client, tenant, backup).await;
    }
    let all_called = async || counts.iter().all(|count| count.get() > 0);
    operator.until("hostile members", all_called).await;
    backs_up_honest_tenant(&operator, &client, &source).await;
    let several = async || counts[0].get() >= 4 && counts[1].get() >= 4;
    operator.until("more hostile snapshots", several).await;
    println!("{:?}", began.elapsed());
}

/// Many EtcdClusters of three tenants join hostile members, which send a costly member list, a long list, or a slow
/// list.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_etcd_does_not_fill_memory_of_cluster_operator() {
    let began = Instant::now();
    let counts = [(); 3].map(|()| Count::default());
    let lists: [fn() -> Answer; 3] = [costly_list, long_list, slow];
    let mut members = Vec::new();
    for (count, list) in counts.iter().cloned().zip(lists) {
        let answers = move |method: &str| {
            if method != "MemberList" {
                return Answer::Message(Vec::new());
            }
            count.add();
            list()
        };
        members.push(HostileMember::start(answers).await);
    }
    let (server, client) = prepared().await;
    let grants = TENANTS.into_iter().zip(&members);
    let grants: Vec<String> = grants
        .map(|(tenant, member)| grant("--join", tenant, member))
        .collect();
    let operator = OperatorProcess::start(MANAGER_CLUSTER, &server, &grants);
    let cluster = |name: &str, annotations: Value| {
        json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": name, "annotations": annotations },
            "spec": { "size": 1, "version": "3.6.16" },
        })
    };
    let tenants = TENANTS.into_iter().zip(&members).cycle();
    for (number, (tenant, member)) in (0..OBJECTS).zip(tenants) {
        let join = json!({ ANNOTATION_JOIN: member.url });
        let cluster = cluster(&format!("cluster-{number}"), join);
        create_in::<EtcdCluster>(&client, tenant, cluster).await;
    }
    let all_called = async || counts.iter().all(|count| count.get() >= OBJECTS / 3);
    operator.until("hostile members", all_called).await;

    create_in::<EtcdCluster>(&client, HONEST, cluster(HONEST, json!({}))).await;
    let pods: Api<Pod> = Api::namespaced(client.clone(), HONEST);
    let of_cluster = ListParams::default().labels("etcd_cluster=honest");
    let has_pod = async || !pods.list(&of_cluster).await.unwrap().items.is_empty();
    operator
        .until("the first member of another tenant", has_pod)
        .await;
    let several = async || counts.iter().all(|count| count.get() >= OBJECTS);
    operator.until("more hostile lists", several).await;
    println!("{:?}", began.elapsed());
}
