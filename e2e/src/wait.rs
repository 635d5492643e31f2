//! Waiting for conditions, not for seconds.

use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};
use tokio::time::timeout;

/// How often a condition is looked at that no watch covers.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// A poll that takes longer hangs, and is given up for the next one.
const POLL_TIMEOUT: Duration = Duration::from_secs(90);
/// What `kubectl` prints when it is refused.
const REFUSED: [&str; 3] = [
    "Error from server (Forbidden)",
    "Error from server (Unauthorized)",
    "error: You must be logged in to the server",
];

/// What the API server says beside a refusal that passes: a quota that is in use or not counted yet, a namespace that
/// goes, and one that is so new that it has no ServiceAccount.
const TEMPORARY: [&str; 5] = [
    "exceeded quota",
    "status unknown for quota",
    "being terminated",
    "error looking up service account",
    "serviceaccount \"default\" not found",
];

/// What one poll at the world found.
pub enum Poll<T> {
    /// The condition holds.
    Done(T),
    /// It does not hold yet; the text says what was seen instead.
    NotYet(String),
}

/// Looks again and again until the condition holds.
///
/// An error of a single poll counts as not yet: what is being waited for is often the end of such errors. Being refused
/// by the API server is none of them: nobody gets rights by waiting. What it refuses for now is waited for.
///
/// # Errors
/// After `within`, with what was seen last; at once, when the API server refuses what is asked of it.
pub async fn until<T>(
    what: &str,
    within: Duration,
    poll: impl AsyncFnMut() -> Result<Poll<T>>,
) -> Result<T> {
    poll_until(what, within, poll, is_refusal).await
}

/// As [`until`], where the rights are waited for, too: being refused counts as not yet.
///
/// # Errors
/// After `within`, with what was seen last.
pub async fn until_allowed<T>(
    what: &str,
    within: Duration,
    poll: impl AsyncFnMut() -> Result<Poll<T>>,
) -> Result<T> {
    poll_until(what, within, poll, |_| false).await
}

/// Whether the API server has refused something: to this client, or to a `kubectl`.
fn is_refusal(error: &Error) -> bool {
    let has = |text: &str, words: &[&str]| words.iter().any(|words| text.contains(words));
    error.chain().any(|cause| {
        let text = cause.to_string();
        let refused = match cause.downcast_ref() {
            Some(kube::Error::Api(status)) => [401, 403].contains(&status.code),
            _ => has(&text, &REFUSED),
        };
        refused && !has(&text, &TEMPORARY)
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
                return Err(error.context(format!("refused while waiting for: {what}")));
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
    async fn ends_wait_on_denial_but_not_on_failure() {
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
