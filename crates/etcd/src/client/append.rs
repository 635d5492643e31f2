//! Appends entries without effect to the Raft log, so that etcd saves a snapshot of the log.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use tokio::time::Instant;

use super::EtcdClient;
use crate::port::{Alarm, AlarmKind, Error, Etcd, MemberId};

/// Each entry disarms an alarm of this member, which does not exist. etcd makes an entry of each such request, and the
/// entry changes nothing (`Alarm` in etcd's `server/etcdserver/apply`).
const NO_ALARM: Alarm = Alarm {
    member: MemberId(1),
    kind: AlarmKind::NoSpace,
};
/// Number of requests at a time. etcd writes the entries of concurrent requests to the disk together.
const CONCURRENT: usize = 32;
/// Number of entries after which the applied index is read again.
const BATCH: u64 = 1_000;
/// No request starts later. A busy machine needs minutes for the 10,000 entries of the default.
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
