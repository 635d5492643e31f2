//! Appends entries that change no data to the Raft log, so that etcd saves a snapshot of its state. etcd does this
//! after `--snapshot-count` entries. At its next start, etcd reads only the entries after the snapshot.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use tokio::time::Instant;

use super::EtcdClient;
use crate::port::{Alarm, AlarmKind, Error, Etcd, MemberId};

/// Each request disarms this alarm, which no member has raised. etcd appends an entry for the request, and the entry
/// changes nothing (`Alarm` in etcd's `server/etcdserver/apply`).
const NO_ALARM: Alarm = Alarm {
    member: MemberId(1),
    kind: AlarmKind::NoSpace,
};
/// Number of concurrent requests. etcd writes the entries of concurrent requests to the disk together.
const CONCURRENT: usize = 32;
/// After this number of entries, the client reads the applied index of the member again.
const BATCH: u64 = 1_000;
/// After this time, the client starts no further request. On a busy machine, 10,000 entries (the default of
/// `--snapshot-count`) take minutes, so the caller repeats the call.
const DEADLINE: Duration = Duration::from_secs(10);

/// Appends entries until the member has applied the entry with the index `until`, or until the deadline.
pub(super) async fn append_entries(
    client: &EtcdClient,
    member: &str,
    until: u64,
) -> Result<(), Error> {
    let end = Instant::now() + DEADLINE;
    let via = [member.to_owned()];
    loop {
        let applied = client.status(member).await?.raft_applied_index;
        let missing = until.saturating_sub(applied);
        if missing == 0 || Instant::now() >= end {
            return Ok(());
        }
        let entries = (0..missing.min(BATCH)).take_while(|_| Instant::now() < end);
        futures::stream::iter(entries.map(|_| client.disarm(&via, NO_ALARM)))
            .buffer_unordered(CONCURRENT)
            .try_collect::<()>()
            .await?;
    }
}
