//! Renews the leases of a target during a replay. If a lease expired, etcd would delete its keys and use a revision.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use etcd_client::{Client, LeaseClient};
use tokio::task::JoinHandle;

/// Time between two passes of the renewal loop. With its default election timeout, etcd's smallest TTL is 2 s.
const RENEWAL_INTERVAL: Duration = Duration::from_millis(250);

/// A lease is renewed after a fraction of its TTL: the TTL divided by this number.
const TTL_DIVISOR: u32 = 4;

#[derive(Default)]
struct State {
    /// The time of the next renewal and the TTL of each lease. The key is the ID of the lease.
    leases: HashMap<i64, (Instant, Duration)>,
    /// A lease that has expired.
    lost: Option<i64>,
}

type Shared = Arc<Mutex<State>>;

/// The leases of a target, and the task that renews them.
pub(super) struct LeaseRenewal {
    state: Shared,
    task: JoinHandle<()>,
}

impl LeaseRenewal {
    pub(super) fn start(client: Client) -> Self {
        let state = Shared::default();
        Self {
            task: tokio::spawn(renew_all(client, state.clone())),
            state,
        }
    }

    /// Adds a lease to the renewed leases. `ttl` is in seconds.
    pub(super) fn add(&self, id: i64, ttl: i64) {
        let ttl = Duration::from_secs(u64::try_from(ttl).unwrap_or_default());
        locked(&self.state).leases.insert(id, (Instant::now(), ttl));
    }

    pub(super) fn remove(&self, id: i64) {
        locked(&self.state).leases.remove(&id);
    }

    /// A lease that has expired. `None` if there is none.
    pub(super) fn lost(&self) -> Option<i64> {
        locked(&self.state).lost
    }
}

impl Drop for LeaseRenewal {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn renew_all(client: Client, state: Shared) {
    let mut client = client.lease_client();
    loop {
        let now = Instant::now();
        let due: Vec<i64> = {
            let state = locked(&state);
            let due = state.leases.iter().filter(|(_, (next, _))| *next <= now);
            due.map(|(id, _)| *id).collect()
        };
        for id in due {
            // If the request fails, the lease stays due, and the next pass of the loop renews it.
            let Ok(is_alive) = renew(&mut client, id).await else {
                continue;
            };
            let mut state = locked(&state);
            if !is_alive && state.leases.remove(&id).is_some() {
                state.lost = Some(id);
            } else if let Some((next, ttl)) = state.leases.get_mut(&id) {
                *next = Instant::now() + *ttl / TTL_DIVISOR;
            }
        }
        tokio::time::sleep(RENEWAL_INTERVAL).await;
    }
}

/// Renews a lease. Returns false if the lease does not exist.
async fn renew(client: &mut LeaseClient, id: i64) -> Result<bool, etcd_client::Error> {
    match client.keep_alive(id).await {
        Ok(_) => Ok(true),
        Err(etcd_client::Error::LeaseKeepAliveError(text)) if text.contains("not found") => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}
