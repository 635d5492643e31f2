//! Every change params some objects, one by one: for what is over before a busy machine looks again.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt};
use kube::ResourceExt;
use kube::api::{Api, WatchEvent, WatchParams};
use serde::de::DeserializeOwned;
use tokio::time::{sleep, timeout};

/// From one watch to the next.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// Shows every change that was made after a version, until `check` has found enough. An API server closes watches when it
/// likes: the next one begins where the last one ended.
///
/// # Errors
/// After `within`; and when the API server does not know the version any more.
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
            // One that cannot be begun is begun again: what was missed comes with the next one.
            if let Ok(changes) = api.watch(params, &since).await {
                let mut changes = changes.boxed();
                while let Ok(Some(change)) = changes.try_next().await {
                    let version = match &change {
                        WatchEvent::Added(object)
                        | WatchEvent::Modified(object)
                        | WatchEvent::Deleted(object) => object.resource_version(),
                        WatchEvent::Bookmark(mark) => Some(mark.metadata.resource_version.clone()),
                        WatchEvent::Error(status) if status.code == 410 => {
                            bail!("changes since {since} are not known any more: {status:?}")
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
    timeout(within, found)
        .await
        .with_context(|| format!("not found in {} s", within.as_secs()))?
}
