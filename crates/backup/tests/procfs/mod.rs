//! What the tests that measure share.

use std::time::Duration;

/// The processor time this process has taken so far, from `/proc/self/stat`.
#[allow(dead_code, reason = "not every test measures it")]
pub(crate) fn processor() -> Duration {
    /// Linux counts in hundredths of a second.
    const TICK: Duration = Duration::from_millis(10);
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name before may hold anything.
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let times = fields.split(' ').skip(11).take(2);
    times
        .map(|ticks| TICK * ticks.parse::<u32>().unwrap())
        .sum()
}

/// From `/proc/self/status`, in bytes.
pub(crate) fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1024
}
