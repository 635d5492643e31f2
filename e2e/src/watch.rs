//! Observes every change of objects. Polling could miss a state that ends before the next poll.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt};
use kube::ResourceExt;
use kube::api::{Api, WatchEvent, WatchParams};
use serde::de::DeserializeOwned;
use tokio::time::{sleep, timeout};

const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// Calls `check` for every change after the resource version `since`, until `check` returns a value. If the API server
/// closes the watch, a new watch resumes at the last resource version.
///
/// # Errors
/// Fails after the time `within`, or if the API server no longer has the changes after the last resource version.
pub async fn watch_until<K, T>(
    api: &Api<K>,
    params: &WatchParams,
    since: &str,
    within: Duration,
    mut check: impl FnMut(WatchEvent<K>) -> Option<T>,
) -> Result<T>
where
    K: kube::Resource + Clone + DeserializeOwned + Debug,
{
    let mut since = since.to_owned();
    let found = async {
        loop {
            // If the watch cannot be opened, the loop retries with the same resource version, so no change is missed.
            if let Ok(changes) = api.watch(params, &since).await {
                let mut changes = changes.boxed();
                while let Ok(Some(change)) = changes.try_next().await {
                    let version = match &change {
                        WatchEvent::Added(object)
                        | WatchEvent::Modified(object)
                        | WatchEvent::Deleted(object) => object.resource_version(),
                        WatchEvent::Bookmark(mark) => Some(mark.metadata.resource_version.clone()),
                        WatchEvent::Error(status) if status.code == 410 => {
                            bail!(
                                "the API server no longer has the changes since {since}: {status:?}"
                            )
                        }
                        WatchEvent::Error(_) => break,
                    };
                    since = version.unwrap_or(since);
                    if let Some(found) = check(change) {
                        return Ok(found);
                    }
                }
            }
            sleep(RECONNECT_INTERVAL).await;
        }
    };
    timeout(within, found).await.with_context(|| {
        format!(
            "the expected change was not observed within {} s",
            within.as_secs()
        )
    })?
}
