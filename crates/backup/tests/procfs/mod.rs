//! Reads processor time, disk reads and memory from `/proc`.

use std::time::Duration;

/// The processor time of this process.
#[allow(
    dead_code,
    reason = "each test program uses only some of these functions"
)]
pub(crate) fn processor() -> Duration {
    let own = std::fs::read_to_string("/proc/self/stat").unwrap();
    times(&own, 2)
}

/// The processor time of this process, of its running child processes, and of child processes that have ended.
#[allow(dead_code, reason = "not every test measures it")]
pub(crate) fn processor_of_all() -> Duration {
    own_and_started("stat")
        .map(|stat| times(&stat, 4))
        .sum::<Duration>()
}

/// The number of bytes that this process and its child processes have read from disk. Reads from the page cache do not
/// count.
#[allow(dead_code, reason = "not every test measures it")]
pub(crate) fn read_by_all() -> u64 {
    let read = |io: String| {
        let line = io
            .lines()
            .find_map(|line| line.strip_prefix("read_bytes: "));
        line.unwrap().parse::<u64>().unwrap()
    };
    own_and_started("io").map(read).sum()
}

/// The content of a `/proc` file of this process and of each running child process.
fn own_and_started(file: &str) -> impl Iterator<Item = String> {
    let own = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let found = processes.filter(move |process| {
        let stat = std::fs::read_to_string(process.path().join("stat"));
        let parent_is_own = |stat: String| fields(&stat).nth(1) == Some(own.as_str());
        process.file_name().to_str() == Some(own.as_str()) || stat.is_ok_and(parent_is_own)
    });
    found.filter_map(move |process| std::fs::read_to_string(process.path().join(file)).ok())
}

/// The sum of the first `count` times: user and system time of the process, then of its ended child processes.
fn times(stat: &str, count: usize) -> Duration {
    /// The unit of the times in `/proc`.
    const TICK: Duration = Duration::from_millis(10);
    let times = fields(stat).skip(11).take(count);
    times
        .map(|ticks| TICK * ticks.parse::<u32>().unwrap())
        .sum()
}

/// The fields after the process name. The name may contain spaces.
fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(") ").unwrap().1.split(' ')
}

/// A value in `/proc/self/status`, in bytes.
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
