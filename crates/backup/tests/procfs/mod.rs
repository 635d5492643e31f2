//! What the tests that measure share.

use std::time::Duration;

/// The processor time this process has taken so far.
#[allow(dead_code, reason = "not every test measures it")]
pub(crate) fn processor() -> Duration {
    let own = std::fs::read_to_string("/proc/self/stat").unwrap();
    times(&own, 2)
}

/// The processor time of this process, of those it has started, and of those of them that have ended. However busy the
/// machine is, that is what the work takes.
#[allow(dead_code, reason = "not every test measures it")]
pub(crate) fn processor_of_all() -> Duration {
    let own = std::fs::read_to_string("/proc/self/stat").unwrap();
    let parent = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let started = processes
        .filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok())
        .filter(|stat| fields(stat).nth(1) == Some(parent.as_str()));
    times(&own, 4) + started.map(|stat| times(&stat, 4)).sum::<Duration>()
}

/// The first two times are the process's own, the next two those of its children that have ended.
fn times(stat: &str, count: usize) -> Duration {
    /// Linux counts in hundredths of a second.
    const TICK: Duration = Duration::from_millis(10);
    let times = fields(stat).skip(11).take(count);
    times
        .map(|ticks| TICK * ticks.parse::<u32>().unwrap())
        .sum()
}

/// What follows the name, which may hold anything.
fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(") ").unwrap().1.split(' ')
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
