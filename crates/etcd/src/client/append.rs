//! Appends entries to the Raft log that change no data. After `--snapshot-count` entries, etcd saves a snapshot. At its
//! next start, etcd reads only the entries after the snapshot.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use tokio::time::Instant;

use super::EtcdClient;
use crate::port::{Alarm, AlarmKind, Error, Etcd, MemberId};

/// The alarm that each request disarms. No member has raised this alarm, so the entry that etcd appends for the request
/// changes nothing (`Alarm` in etcd's `server/etcdserver/apply`).
const NO_ALARM: Alarm = Alarm {
    member: MemberId(1),
    kind: AlarmKind::NoSpace,
};
/// Number of concurrent requests. etcd writes the entries of concurrent requests to the disk together.
const CONCURRENT: usize = 32;
/// The applied index of the member is read again after this number of entries.
const BATCH: u64 = 1_000;
/// After this time, no further request is started. A busy machine needs minutes for 10,000 entries, the default
/// `--snapshot-count`.
const DEADLINE: Duration = Duration::from_secs(10);

/// Appends entries until the member has applied the entry `until`, or until the deadline.
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
