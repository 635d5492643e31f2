//! Identifies a process by its PID and start time, because the kernel assigns the PID of an ended process again.

use std::fs;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The PID and start time of a process. A later process with the same PID has another start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) pid: i32,
    /// The start time, in clock ticks after boot.
    pub(crate) started: u64,
}

impl Identity {
    /// The identity of a running process.
    pub(crate) fn of(pid: i32) -> Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))
            .with_context(|| format!("process {pid} is not running"))?;
        let started = start_time(&stat).with_context(|| format!("/proc/{pid}/stat: {stat}"))?;
        Ok(Self { pid, started })
    }

    /// The identity of the calling process.
    pub(crate) fn own() -> Result<Self> {
        Self::of(i32::try_from(std::process::id()).context("PID")?)
    }

    /// True if this process is running, and not a later process with its PID.
    pub(crate) fn is_alive(self) -> bool {
        Self::of(self.pid).is_ok_and(|now| now == self)
    }
}

/// The start time of a process: the 22nd field of `/proc/PID/stat`. `None` for a zombie. The second field is the
/// process name in parentheses, which can itself contain parentheses and spaces.
fn start_time(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = fields.next()?;
    if state == "Z" || state == "X" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_not_alive_if_start_time_differs() {
        let own = Identity::own().unwrap();
        assert!(own.is_alive());
        assert!(
            !Identity {
                started: own.started - 1,
                ..own
            }
            .is_alive()
        );
    }

    #[test]
    fn start_time_is_parsed_if_process_name_contains_parentheses() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(start_time(&format!("7 (a) b (c) {rest}")), Some(4711));
        assert_eq!(start_time("7 (a"), None);
    }

    #[test]
    fn zombie_process_is_not_alive() {
        assert_eq!(
            start_time("7 (a) Z 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20"),
            None
        );
    }
}
