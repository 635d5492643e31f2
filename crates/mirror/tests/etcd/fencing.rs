//! Invariant 42: only one mirror writes to a key, and no mirror writes after the promotion of its destination.

use std::time::Duration;

use etcd_client::Client;
use mirror::progress::State;
use mirror::reason::Reason;
use mirror::task::release;
use tokio::time::sleep;

use crate::lab::{Lab, Running, client, keys_below, until};

async fn write(client: &mut Client, count: usize) {
    for index in 0..count {
        let key = format!("k/{:03}", index % 40);
        client.put(key, index.to_string(), None).await.unwrap();
    }
}

async fn await_trouble(mirror: &Running, reason: Reason, part: &str) {
    let reported = || {
        let trouble = mirror.progress().trouble;
        trouble.is_some_and(|it| it.reason == reason && it.message.contains(part))
    };
    until(part, reported).await;
}

#[tokio::test]
async fn invariant_42_two_processes_of_a_mirror_lose_no_change() {
    let pair = ("k/", "copy/");
    let lab = Lab::new("3.6", "3.6").await;
    let mut source = client(&lab.source).await;
    write(&mut source, 100).await;
    let mirrors = [lab.mirror("m", pair), lab.mirror("m", pair)];
    write(&mut source, 2_000).await;
    lab.await_equal(pair).await;
    let [first, second] = mirrors;
    let (first, second) = (first.stop().await, second.stop().await);
    assert!(first.transactions + second.transactions > 1);
}

#[tokio::test]
async fn invariant_42_foreign_and_overlapping_keys_are_refused() {
    let lab = Lab::new("3.6", "3.6").await;
    let mut source = client(&lab.source).await;
    let mut destination = client(&lab.destination).await;
    write(&mut source, 50).await;
    destination.put("used/key", "kept", None).await.unwrap();
    let refused = lab.mirror("refused", ("k/", "used/"));
    await_trouble(&refused, Reason::Conflict, "delete these keys").await;
    let first = lab.mirror("first", ("k/", "copy/"));
    lab.await_equal(("k/", "copy/")).await;
    let same = lab.mirror("same", ("k/", "copy/"));
    await_trouble(&same, Reason::Conflict, "test/first").await;
    let below = lab.mirror("below", ("k/", "copy/more/"));
    await_trouble(&below, Reason::Conflict, "test/first").await;
    let all = lab.mirror("all", ("", ""));
    await_trouble(&all, Reason::Conflict, "test/first").await;
    let adjacent = lab.mirror("adjacent", ("k/", "copy2/"));
    lab.await_equal(("k/", "copy2/")).await;
    for mirror in [refused, first, same, below, all, adjacent] {
        mirror.stop().await;
    }
    let kept = keys_below(&lab.destination, "used/").await;
    assert_eq!(kept.len(), 1);
}

#[tokio::test]
async fn invariant_42_promoted_destination_is_not_changed() {
    let pair = ("k/", "copy/");
    let lab = Lab::new("3.6", "3.6").await;
    let mut source = client(&lab.source).await;
    write(&mut source, 50).await;
    let mirror = lab.mirror("m", pair);
    lab.await_equal(pair).await;
    until("the copy is complete", || {
        mirror.progress().state == State::Following
    })
    .await;
    // The test does not stop the task, so the task continues like that of a process that has lost the leader election.
    let released = release(&lab.destination_end(), "m").await.unwrap();
    assert!(released.is_some());
    assert!(
        release(&lab.destination_end(), "m")
            .await
            .unwrap()
            .is_none()
    );
    let promoted = keys_below(&lab.destination, "copy/").await;
    write(&mut source, 200).await;
    await_trouble(
        &mirror,
        Reason::Conflict,
        "no longer contains the checkpoint",
    )
    .await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(keys_below(&lab.destination, "copy/").await, promoted);
    mirror.stop().await;
}

#[tokio::test]
async fn invariant_42_replaced_source_deletes_nothing_without_approval() {
    let pair = ("k/", "copy/");
    let mut lab = Lab::new("3.6", "3.6").await;
    let mut source = client(&lab.source).await;
    write(&mut source, 50).await;
    let mirror = lab.mirror("m", pair);
    lab.await_equal(pair).await;
    until("the copy is complete", || {
        mirror.progress().state == State::Following
    })
    .await;
    mirror.stop().await;
    let copied = keys_below(&lab.destination, "copy/").await;
    // A new and empty cluster replaces the source.
    lab.source = Lab::new("3.6", "3.6").await.source;
    let mirror = lab.mirror("m", pair);
    await_trouble(&mirror, Reason::SourceReplaced, "accept-source=").await;
    assert_eq!(keys_below(&lab.destination, "copy/").await, copied);
    mirror.stop().await;
}
