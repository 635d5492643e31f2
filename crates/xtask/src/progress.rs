//! Prints progress on standard error: each step, its duration, and a line every ten seconds during long steps.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

const HEARTBEAT: Duration = Duration::from_secs(10);
/// The interval of progress lines for work that prints its own progress.
const SLOW_HEARTBEAT: Duration = Duration::from_secs(30);

/// Prints a line of progress.
pub(crate) fn say(text: &str) {
    eprintln!("==> {text}");
}

/// Runs `work`. Prints a line with its duration every ten seconds and at its end.
pub(crate) fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    Ok(timed(what, work)?.0)
}

/// Like [`step`], but also returns the duration.
pub(crate) fn timed<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    beating(what, HEARTBEAT, work)
}

/// Like [`timed`], with fewer lines, for work that prints its own progress.
pub(crate) fn stage<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    beating(what, SLOW_HEARTBEAT, work)
}

fn beating<T>(
    what: &str,
    period: Duration,
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, Duration)> {
    let begun = Instant::now();
    let (done, waiting) = mpsc::channel::<()>();
    let label = what.to_owned();
    let heart = thread::spawn(move || {
        while let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(period) {
            eprintln!("    {label} ... {} so far", seconds(begun.elapsed()));
        }
    });
    let result = work();
    drop(done);
    // A panic of the thread that prints progress is ignored, because it does not affect `result`.
    let _ = heart.join();
    let took = begun.elapsed();
    match &result {
        Ok(_) => eprintln!("    {what}: {}", seconds(took)),
        Err(_) => eprintln!("    {what}: failed after {}", seconds(took)),
    }
    result.map(|value| (value, took))
}

/// A duration with one decimal, such as `75.0 s`.
pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// A rounded duration in seconds or minutes, such as `75 s` or `22 min`.
pub(crate) fn rough(time: Duration) -> String {
    let seconds = (time + Duration::from_millis(500)).as_secs();
    if seconds < 120 {
        format!("{seconds} s")
    } else {
        format!("{} min", (seconds + 30) / 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimated_durations_are_rounded() {
        assert_eq!(rough(Duration::from_millis(74_600)), "75 s");
        assert_eq!(rough(Duration::from_secs(22 * 60 + 29)), "22 min");
    }
}
