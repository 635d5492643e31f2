//! Appends entries to the Raft log that change nothing. After `--snapshot-count` entries, etcd saves a snapshot. When
//! it starts, it reads only the entries after the snapshot.

use std::time::Duration;

use etcd_client::{AlarmAction, AlarmOptions, AlarmType};
use futures::{StreamExt, TryStreamExt};
use tokio::time::Instant;

use super::EtcdClient;
use crate::port::{Error, Etcd};

/// ID of a member that does not exist. Each entry disarms an alarm of this member, which changes nothing (`Alarm` in
/// etcd's `server/etcdserver/apply`).
const NO_MEMBER: u64 = 1;
/// Number of concurrent requests. etcd writes the entries of concurrent requests to the disk together.
const CONCURRENT: usize = 32;
/// The applied index of the member is read again after this number of entries.
const BATCH: u64 = 1_000;
/// Time limit for all entries. A busy machine needs minutes for 10,000 entries, the default `--snapshot-count`.
const DEADLINE: Duration = Duration::from_mins(30);

/// Appends entries until the member has applied the entry `until`.
pub(super) async fn append_entries(
    client: &EtcdClient,
    member: &str,
    until: u64,
) -> Result<(), Error> {
    let end = Instant::now() + DEADLINE;
    loop {
        let applied = client.status(member).await?.raft_applied_index;
        let missing = until.saturating_sub(applied);
        if missing == 0 {
            return Ok(());
        }
        if Instant::now() >= end {
            return Err(Error::Timeout(format!(
                "{member}: {missing} entries of the log are missing"
            )));
        }
        let entries = 0..missing.min(BATCH);
        futures::stream::iter(entries.map(|_| append(client, member)))
            .buffer_unordered(CONCURRENT)
            .try_collect::<()>()
            .await?;
    }
}

async fn append(client: &EtcdClient, member: &str) -> Result<(), Error> {
    let deadline = client.deadlines.call;
    let call = |mut client: etcd_client::Client| async move {
        let mut options = AlarmOptions::new();
        options.with_member(NO_MEMBER);
        let answer = client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options));
        answer.await.map(|_| ())
    };
    client.send(member, deadline, call).await
}
