//! Transfers that are interrupted: the transfer is canceled, or a process is killed.

use super::*;

#[tokio::test]
async fn canceled_transfer_leaves_no_objects() {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    fill(&etcd.client_url, 60).await;
    let server = S3Server::start(&["bucket"]);
    let transfer = transfer(client(), vec![etcd.client_url.clone()], s3(&server).await);
    let cancelled = CancellationToken::new();
    let meter = Meter::default();
    let watch = async {
        while meter.read().bytes < 30 << 20 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        cancelled.cancel();
    };
    let (outcome, ()) = tokio::join!(transfer.run(&meter, &cancelled), watch);
    assert!(outcome.is_err());
    assert_eq!(transfer.store.list("").await.unwrap(), []);
    assert_eq!(
        server.unfinished("bucket"),
        Vec::<std::path::PathBuf>::new()
    );
}

#[tokio::test]
async fn backup_completes_after_kill_of_sending_member() {
    let programs = Programs::find("3.6");
    let mut members = EtcdProcess::start_cluster(&programs, 3, &Start::default()).await;
    fill(&members[0].client_url, 60).await;
    let server = S3Server::start(&["bucket"]);
    let endpoints: Vec<String> = members
        .iter()
        .map(|member| member.client_url.clone())
        .collect();
    let transfer = transfer(client(), endpoints, s3(&server).await);
    let leader = client()
        .status(&members[0].client_url)
        .await
        .unwrap()
        .leader;
    let meter = Meter::default();
    let cancelled = CancellationToken::new();
    let kill = async {
        while meter.read().bytes < 10 << 20 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // One of the two followers sends the snapshot. The test does not know which, so it kills both followers.
        for member in &mut members {
            let status = client().status(&member.client_url).await;
            if status.is_ok_and(|status| Some(status.member_id) != leader) {
                member.kill();
            }
        }
    };
    let (outcome, ()) = tokio::join!(transfer.run(&meter, &cancelled), kill);
    // The transfer continues with the leader, or fails with the reason `EtcdUnreachable`.
    let stored = match outcome {
        Ok(stored) => stored,
        Err(trouble) => {
            assert_eq!(trouble.reason, Reason::EtcdUnreachable, "{trouble:?}");
            assert_eq!(transfer.store.head(KEY).await.unwrap(), None);
            transfer
                .run(&Meter::default(), &CancellationToken::new())
                .await
                .unwrap()
        }
    };
    let head = transfer.store.head(KEY).await.unwrap().unwrap();
    assert_eq!(i64::try_from(head.size), Ok(stored.size));
    assert_eq!(
        server.unfinished("bucket"),
        Vec::<std::path::PathBuf>::new()
    );
}

/// A killed process cannot abort its upload, so the server keeps the parts. The server uses the time of the last part
/// as the start of the upload.
#[tokio::test]
async fn next_backup_discards_upload_of_killed_process() {
    let etcd = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let server = S3Server::start(&["bucket"]);
    let store = s3(&server).await;
    let mut upload = store.begin(KEY).await.unwrap();
    for _ in 0..24 {
        let content = store::testing::content(1 << 20);
        upload.write(content).await.unwrap();
    }
    // The loop waits until the server has received all parts of the upload.
    let (mut parts, mut same) = (0, 0);
    for _ in 0..600 {
        let now = server.unfinished("bucket").len();
        same = if now == parts { same + 1 } else { 0 };
        parts = now;
        if parts > 3 && same > 5 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(parts > 3, "{parts} parts");
    std::mem::forget(upload);
    let transfer = Transfer {
        since: jiff::Timestamp::now(),
        ..transfer(client(), vec![etcd.client_url.clone()], store.clone())
    };
    let none = CancellationToken::new();
    transfer.run(&Meter::default(), &none).await.unwrap();
    assert_eq!(
        server.unfinished("bucket"),
        Vec::<std::path::PathBuf>::new()
    );
    assert!(store.head(KEY).await.unwrap().is_some());
}
