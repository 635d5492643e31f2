//! The identity of a process: its number and when it began, because numbers
//! are given out again.

use std::fs;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// A process that cannot be mistaken for a later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) pid: i32,
    /// Clock ticks after boot.
    pub(crate) started: u64,
}

impl Identity {
    /// The identity of a process that runs now.
    pub(crate) fn of(pid: i32) -> Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))
            .with_context(|| format!("process {pid} does not run"))?;
        let started = start_time(&stat).with_context(|| format!("/proc/{pid}/stat: {stat}"))?;
        Ok(Self { pid, started })
    }

    /// This process.
    pub(crate) fn own() -> Result<Self> {
        Self::of(i32::try_from(std::process::id()).context("process number")?)
    }

    /// Whether the very same process still runs.
    pub(crate) fn is_alive(self) -> bool {
        Self::of(self.pid).is_ok_and(|now| now == self)
    }
}

/// The 22nd field of /proc/PID/stat; none for a process that has ended and only waits to be taken.
/// The second field is the name in brackets and may hold anything, brackets and spaces too.
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
    fn this_process_is_alive_and_an_earlier_one_with_its_number_is_not() {
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
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(start_time(&format!("7 (a) b (c) {rest}")), Some(4711));
        assert_eq!(start_time("7 (a"), None);
    }

    #[test]
    fn a_process_that_has_ended_is_not_alive() {
        assert_eq!(
            start_time("7 (a) Z 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20"),
            None
        );
    }
}
