//! Writes keys and transfers the leadership, to make alerts fire.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Sandbox, plugin, until};

/// Number of writes between two checks of the time limit.
const WRITES: usize = 32;

/// Writes keys until the database reaches its quota. `number` is the number of the next key.
pub(super) async fn fill(keys: &Keyspace, number: &AtomicUsize) -> Result<()> {
    until("the database is full", DEADLINE, async || {
        for _ in 0..WRITES {
            let key = format!("big/{}", number.fetch_add(1, Ordering::Relaxed));
            if let Err(error) = keys.write(&key, vec![7; 128 << 10]).await {
                let text = format!("{error:#}");
                return Ok(if text.contains("database space exceeded") {
                    Poll::Done(())
                } else {
                    Poll::NotYet(text)
                });
            }
        }
        Ok(Poll::NotYet(format!("{number:?} writes")))
    })
    .await
}

/// Fills the database again whenever the operator has freed space. Returns only after an error.
pub(super) async fn keep_full(keys: &Keyspace, number: &AtomicUsize) -> Result<()> {
    loop {
        fill(keys, number).await?;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Writes small keys without end. Writes may fail, because the disk is slow.
pub(super) async fn keep_writing(keys: &Keyspace) {
    for number in 0_u64.. {
        let key = format!("small/{}", number % 8);
        if let Err(error) = keys.write(&key, vec![7; 512]).await {
            println!("{error:#}");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Transfers the leadership of the cluster `orders`. Retries if the plugin refuses the transfer, for example because a
/// member has no leader yet.
pub(super) async fn move_leader(sandbox: &Sandbox, next: &str) -> Result<()> {
    let words = ["move-leader", "orders", "--to", next, "--yes"];
    until("the leadership moves", DEADLINE, async || {
        match plugin::run(sandbox, &words).await {
            // An earlier attempt, whose response was lost, transferred the leadership.
            Err(error) if format!("{error:#}").contains("already the leader") => Ok(Poll::Done(())),
            outcome => outcome.map(|_| Poll::Done(())),
        }
    })
    .await
}
