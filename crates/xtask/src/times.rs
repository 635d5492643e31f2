//! How long each end-to-end test took: they write it into a file, one line each, and the longest are told at the end. It
//! may not fail a run.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use crate::checkout;

/// Names the file to the tests.
pub(crate) const FILE: &str = "E2E_TIMES";
/// So many are told.
const LONGEST: usize = 10;

/// The file, which is not there yet.
pub(crate) fn begin() -> Result<PathBuf> {
    let file = checkout::target()?.join("e2e-times");
    // One of an earlier run that cannot be removed is added to.
    drop(fs::remove_file(&file));
    Ok(file)
}

/// The longest of the lines `NAME SECONDS`, in words, and what all took together.
pub(crate) fn longest(lines: &str) -> Option<String> {
    let mut times: Vec<(f64, &str)> = lines
        .lines()
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(name, seconds)| Some((seconds.parse().ok()?, name)))
        .collect();
    times.sort_by(|one, other| other.0.total_cmp(&one.0));
    let all: f64 = times.iter().map(|(seconds, _)| seconds).sum();
    let told = times.iter().take(LONGEST);
    let told: Vec<String> = told
        .map(|(seconds, name)| format!("{name} {seconds:.0} s"))
        .collect();
    (times.len() > LONGEST).then(|| {
        format!(
            "{} end-to-end tests took {all:.0} s one by one; the longest: {}",
            times.len(),
            told.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_are_told_first_and_few_are_not_told_of() {
        let lines: Vec<String> = (1..=11).map(|time| format!("t-{time} {time}.4")).collect();
        let told = longest(&format!("{}\nnonsense\n", lines.join("\n"))).unwrap();
        assert!(
            told.starts_with(
                "11 end-to-end tests took 70 s one by one; the longest: t-11 11 s, t-10 10 s"
            ),
            "{told}"
        );
        assert!(!told.contains("t-1 1 s"), "{told}");
        assert_eq!(longest("a 1\n"), None);
    }
}
