//! Polls until a state is reached, for example until a pod is ready.

use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};
use tokio::time::timeout;

const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit for one poll. A poll that times out is repeated.
const POLL_TIMEOUT: Duration = Duration::from_secs(90);
/// Prefixes of the messages of `kubectl` when the API server denies a request.
const DENIED: [&str; 3] = [
    "Error from server (Forbidden)",
    "Error from server (Unauthorized)",
    "error: You must be logged in to the server",
];

/// Denials that end without a change of permissions, for example because of a quota, a terminating namespace, or a
/// missing ServiceAccount in a new namespace.
const TEMPORARY: [&str; 5] = [
    "exceeded quota",
    "status unknown for quota",
    "being terminated",
    "error looking up service account",
    "serviceaccount \"default\" not found",
];

/// The result of one poll.
pub enum Poll<T> {
    /// The state is reached.
    Done(T),
    /// The state is not reached yet. The text describes the current state.
    NotYet(String),
}

/// Calls `poll` until it returns [`Poll::Done`].
///
/// A failed poll is repeated, because most errors are temporary. A denied request ends the wait, because waiting does
/// not grant a permission. The denials in [`TEMPORARY`] do not end the wait.
///
/// # Errors
/// Fails after the time `within`; the error contains the last state. Fails at once if the API server denies a request.
pub async fn until<T>(
    what: &str,
    within: Duration,
    poll: impl AsyncFnMut() -> Result<Poll<T>>,
) -> Result<T> {
    poll_until(what, within, poll, is_denial).await
}

/// Like [`until`], but also continues after a denial. Use this function to wait for a permission.
///
/// # Errors
/// Fails after the time `within`. The error contains the last state.
pub async fn until_allowed<T>(
    what: &str,
    within: Duration,
    poll: impl AsyncFnMut() -> Result<Poll<T>>,
) -> Result<T> {
    poll_until(what, within, poll, |_| false).await
}

/// True if the API server denied a request of this client or of `kubectl`, and the denial is not in [`TEMPORARY`].
fn is_denial(error: &Error) -> bool {
    let has = |text: &str, words: &[&str]| words.iter().any(|words| text.contains(words));
    error.chain().any(|cause| {
        let text = cause.to_string();
        let denied = match cause.downcast_ref() {
            Some(kube::Error::Api(status)) => [401, 403].contains(&status.code),
            _ => has(&text, &DENIED),
        };
        denied && !has(&text, &TEMPORARY)
    })
}

async fn poll_until<T>(
    what: &str,
    within: Duration,
    mut poll: impl AsyncFnMut() -> Result<Poll<T>>,
    ends: impl Fn(&Error) -> bool,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let seen = match timeout(POLL_TIMEOUT, poll()).await {
            Ok(Ok(Poll::Done(value))) => return Ok(value),
            Ok(Ok(Poll::NotYet(seen))) => seen,
            Ok(Err(error)) if ends(&error) => {
                return Err(error.context(format!("denied while waiting for: {what}")));
            }
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => format!("no answer in {} s", POLL_TIMEOUT.as_secs()),
        };
        if start.elapsed() > within {
            bail!(
                "waited {} s for: {what}; last seen: {seen}",
                within.as_secs()
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};
    use kube::core::Status;

    use super::*;

    fn answer(code: u16) -> Error {
        let status = Status::failure("no", "Because").with_code(code).boxed();
        Err::<(), _>(kube::Error::Api(status))
            .context("get c")
            .unwrap_err()
    }

    fn passing(why: &str) -> Error {
        let message = format!("pods \"c\" is forbidden: {why}");
        let status = Status::failure(&message, "Forbidden").with_code(403);
        Err::<(), _>(kube::Error::Api(status.boxed()))
            .context("create c")
            .unwrap_err()
    }

    #[tokio::test]
    async fn wait_ends_after_denied_request_but_not_after_other_errors() {
        let printed = |text: &str| anyhow!("kubectl get pods: {text}");
        for (error, ends) in [
            (answer(403), true),
            (answer(401), true),
            (answer(404), false),
            (answer(500), false),
            (
                printed("Error from server (Forbidden): pods is forbidden"),
                true,
            ),
            (
                passing("exceeded quota: q, requested: pods=1, used: pods=3, limited: pods=3"),
                false,
            ),
            (
                passing(
                    "error looking up service account n/default: serviceaccount \"default\" not found",
                ),
                false,
            ),
            (
                printed(
                    "Error from server (Forbidden): pods \"c\" is forbidden: unable to create new content in \
                     namespace n because it is being terminated",
                ),
                false,
            ),
            (
                printed("Error from server (NotFound): pods \"c\" not found"),
                false,
            ),
        ] {
            let (what, text) = ("x", format!("{error:#}"));
            let mut error = Some(error);
            let mut polls = 0;
            let outcome = until(what, Duration::from_mins(1), async || {
                polls += 1;
                error.take().map_or(Ok(Poll::Done(())), Err)
            })
            .await;
            assert_eq!(
                (outcome.is_err(), polls),
                (ends, if ends { 1 } else { 2 }),
                "{text}"
            );
        }
        let mut error = Some(answer(403));
        until_allowed("x", Duration::from_mins(1), async || {
            error.take().map_or(Ok(Poll::Done(())), Err)
        })
        .await
        .unwrap();
    }
}
