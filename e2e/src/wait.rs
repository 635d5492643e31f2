//! Waiting for conditions, not for seconds.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::time::timeout;

/// How often a condition is looked at that no watch covers.
const EVERY: Duration = Duration::from_millis(100);
/// A look that takes longer hangs, and is given up for the next one.
const LOOK: Duration = Duration::from_secs(90);

/// What one look at the world found.
pub enum Look<T> {
    /// The condition holds.
    Done(T),
    /// It does not hold yet; the text says what was seen instead.
    NotYet(String),
}

/// Looks again and again until the condition holds.
///
/// An error of a single look counts as not yet: what is being waited for is often the end of such errors.
///
/// # Errors
/// After `within`, with what was seen last.
pub async fn until<T>(
    what: &str,
    within: Duration,
    mut look: impl AsyncFnMut() -> Result<Look<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let seen = match timeout(LOOK, look()).await {
            Ok(Ok(Look::Done(value))) => return Ok(value),
            Ok(Ok(Look::NotYet(seen))) => seen,
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => format!("no answer in {} s", LOOK.as_secs()),
        };
        if start.elapsed() > within {
            bail!(
                "waited {} s for: {what}; last seen: {seen}",
                within.as_secs()
            );
        }
        tokio::time::sleep(EVERY).await;
    }
}
