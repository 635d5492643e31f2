//! Creates a seed from the surviving member of a cluster without a quorum, with real servers. etcd sends a snapshot
//! even without a leader, and the restore tool creates the first member of a new cluster from it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::time::{Duration, Instant};

use etcd::testing::{EtcdProcess, Programs, Start, free_port};
use etcd::{Access, ClusterId, Etcd, EtcdClient, Status};
use member::DataDirectorySettings;
use restore::reason::Reason;
use restore::seed::{Fetch, Paths, Prepare, ReplaySource, Survivor, fetch, prepare};
use tempfile::TempDir;

#[path = "common/on_disk.rs"]
mod on_disk;

use on_disk::{Member, tool};

const KEYS: usize = 200;
/// The number by which the revision is raised, if the etcd version supports this.
const BUMP: u64 = 1_000_000;

/// A cluster of which two of three members are lost. The survivor has no leader.
struct Loss {
    programs: Programs,
    members: Vec<EtcdProcess>,
    survivor: Status,
    volume: TempDir,
}

impl Loss {
    async fn new(minor: &str) -> Self {
        let programs = Programs::find(minor);
        let mut members = EtcdProcess::start_cluster(&programs, 3, &Start::default()).await;
        let mut client = etcd_client::Client::connect([&members[0].client_url], None)
            .await
            .unwrap();
        for index in 0..KEYS {
            client
                .put(format!("/key/{index:05}"), format!("value {index}"), None)
                .await
                .unwrap();
        }
        members[1].kill();
        members[2].kill();
        let survivor = leaderless(&members[0].client_url).await;
        Self {
            programs,
            members,
            survivor,
            volume: tempfile::tempdir().unwrap(),
        }
    }

    fn paths(&self) -> Paths {
        Paths {
            volume: self.volume.path().to_owned(),
            report: self.volume.path().join("report"),
        }
    }

    fn fetch(&self, cluster_id: ClusterId, revision: i64) -> Fetch {
        Fetch {
            source: None,
            survivor: Survivor {
                member: Some(self.members[0].client_url.clone()),
                cluster_id: Some(cluster_id),
                client_tls: None,
                revision,
            },
            replay: ReplaySource::default(),
            secret: None,
            ca: None,
            claim: None,
            encryption_secret: None,
            encryption_keys: None,
            etcd_version: None,
            sha256: None,
            meter: std::sync::Arc::default(),
            bump_revision: None,
            copy_to: None,
            paths: self.paths(),
        }
    }

    async fn refuses(&self, arguments: &Fetch, reason: Reason, says: &str) {
        let trouble = fetch(arguments).await.unwrap_err();
        assert_eq!(trouble.reason, reason, "{}", trouble.message);
        assert!(trouble.message.contains(says), "{}", trouble.message);
        assert!(!self.volume.path().join("restore/snapshot.db").exists());
    }
}

async fn leaderless(url: &str) -> Status {
    let client = EtcdClient::new(Access::default());
    let end = Instant::now() + Duration::from_secs(30);
    while Instant::now() < end {
        if let Ok(status) = client.status(url).await
            && status.leader.is_none()
        {
            return status;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the survivor still names a leader");
}

async fn check_new_cluster(minor: &str, bump: Option<u64>) {
    let loss = Loss::new(minor).await;
    let old = loss.survivor.clone();
    let fetched = fetch(&loss.fetch(old.cluster_id, old.revision))
        .await
        .unwrap();
    assert_eq!(fetched.revision, old.revision, "etcd {minor}");

    let peer_url = format!("http://127.0.0.1:{}", free_port());
    let arguments = Prepare {
        settings: DataDirectorySettings {
            tool: tool(&loss.programs, minor),
            name: "main-aaaaaaaaaa".into(),
            peer_url: peer_url.clone(),
            token: "recovery".into(),
            bump_revision: bump,
            replay: None,
        },
        etcd: loss.programs.etcd.clone(),
        paths: loss.paths(),
    };
    let restored = prepare(&arguments).unwrap();
    let raised = old.revision + i64::try_from(bump.unwrap_or(0)).unwrap();
    assert_eq!(restored.revision, raised);
    // The second `prepare` changes nothing, because the data directory exists.
    assert_eq!(prepare(&arguments).unwrap(), restored);

    let mut member = Member::start(&loss.programs, &loss.volume.path().join("data"), &peer_url);
    let status = member
        .serves()
        .await
        .expect("etcd must start on the restored data directory");
    assert_eq!(status.revision, raised);
    assert_ne!(
        status.cluster_id, old.cluster_id,
        "the restored cluster must have a new cluster ID"
    );
    for index in [0, KEYS / 2, KEYS - 1] {
        let key = format!("/key/{index:05}");
        assert_eq!(member.value(&key).await, Some(format!("value {index}")));
    }
    // The restore has not changed the surviving member.
    let after = leaderless(&loss.members[0].client_url).await;
    assert_eq!(
        (after.revision, after.cluster_id),
        (old.revision, old.cluster_id)
    );
    if bump.is_some() {
        check_old_watch_is_rejected(&member, old.revision).await;
    }
}

/// Checks that etcd rejects a watch from an old revision. The lost members may have used this revision for another
/// write, so clients must start a new watch.
async fn check_old_watch_is_rejected(member: &Member, revision: i64) {
    let mut client = etcd_client::Client::connect([&member.client_url], None)
        .await
        .unwrap();
    let options = etcd_client::WatchOptions::new().with_start_revision(revision + 1);
    let mut stream = client.watch("/key/00000", Some(options)).await.unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        let answer = stream.message().await.unwrap().unwrap();
        if answer.compact_revision() > revision {
            return;
        }
    }
    panic!("the watch continues in the old history");
}

#[tokio::test]
async fn etcd_3_4_survivor_forms_new_cluster() {
    Box::pin(check_new_cluster("3.4", None)).await;
}

#[tokio::test]
async fn etcd_3_5_survivor_forms_new_cluster() {
    Box::pin(check_new_cluster("3.5", None)).await;
}

#[tokio::test]
async fn etcd_3_6_survivor_forms_new_cluster_with_raised_revision() {
    Box::pin(check_new_cluster("3.6", Some(BUMP))).await;
}

#[tokio::test]
async fn etcd_3_7_survivor_forms_new_cluster_with_raised_revision() {
    Box::pin(check_new_cluster("3.7", Some(BUMP))).await;
}

#[tokio::test]
async fn snapshot_of_unreachable_foreign_or_outdated_survivor_is_rejected() {
    let loss = Loss::new("3.6").await;
    let (ours, revision) = (loss.survivor.cluster_id, loss.survivor.revision);
    let other = loss.fetch(ClusterId(1), 0);
    loss.refuses(&other, Reason::SeedFailed, "belongs to another cluster")
        .await;
    let newer = loss.fetch(ours, revision + 1);
    loss.refuses(
        &newer,
        Reason::SnapshotUnreadable,
        "when the operator chose the member",
    )
    .await;
    let mut silent = loss.fetch(ours, revision);
    silent.survivor.member = Some(format!("http://127.0.0.1:{}", free_port()));
    loss.refuses(&silent, Reason::EtcdUnreachable, "cannot be fetched")
        .await;
}
