//! Records the durations of stages and test programs of `cargo xtask test` in a file. The next run uses them for the
//! order of the programs and for the estimate of the remaining time. If the file cannot be read, no durations are
//! known.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::{checkout, progress};

/// Durations in seconds, by the name of the stage or job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Times {
    stages: BTreeMap<String, f64>,
    jobs: BTreeMap<String, f64>,
    #[serde(skip)]
    file: PathBuf,
}

impl Times {
    /// Reads the recorded durations from the target directory.
    pub(crate) fn read() -> Result<Self> {
        Ok(Self::read_from(
            &checkout::target()?.join("test-times.json"),
        ))
    }

    fn read_from(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap_or_default();
        Self {
            file: file.to_owned(),
            ..serde_json::from_str(&text).unwrap_or_default()
        }
    }

    /// The last recorded duration of a stage.
    pub(crate) fn stage(&self, name: &str) -> Option<Duration> {
        duration(self.stages.get(name))
    }

    /// The last recorded duration of a test program or an end-to-end test.
    pub(crate) fn job(&self, name: &str) -> Option<Duration> {
        duration(self.jobs.get(name))
    }

    pub(crate) fn note_stage(&mut self, name: &str, took: Duration) {
        self.stages.insert(name.to_owned(), took.as_secs_f64());
    }

    pub(crate) fn note_job(&mut self, name: &str, took: Duration) {
        self.jobs.insert(name.to_owned(), took.as_secs_f64());
    }

    /// Removes the durations of the jobs for which `exists` returns false. Call this function only if all jobs were
    /// selected. Otherwise, it also removes jobs that exist but were not selected.
    pub(crate) fn retain_jobs(&mut self, exists: impl Fn(&str) -> bool) {
        self.jobs.retain(|name, _| exists(name));
    }

    /// Writes the file atomically.
    pub(crate) fn write(&self) {
        let new = self
            .file
            .with_extension(format!("{}.new", std::process::id()));
        let written = serde_json::to_string_pretty(self)
            .map_err(std::io::Error::from)
            .and_then(|text| fs::write(&new, text))
            .and_then(|()| fs::rename(&new, &self.file));
        if let Err(error) = written {
            progress::say(&format!(
                "cannot record the durations of this run in {}: {error}",
                self.file.display()
            ));
        }
    }
}

fn duration(seconds: Option<&f64>) -> Option<Duration> {
    Duration::try_from_secs_f64(*seconds?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_durations_are_read_in_next_run() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("times.json");
        let mut times = Times::read_from(&file);
        assert_eq!(times.stage("clippy"), None);
        times.note_stage("clippy", Duration::from_millis(1500));
        times.note_job("a::b", Duration::from_secs(7));
        times.note_job("removed", Duration::from_secs(1));
        times.retain_jobs(|name| name == "a::b");
        times.write();
        let read = Times::read_from(&file);
        assert_eq!(read, times);
        assert_eq!(read.stage("clippy"), Some(Duration::from_millis(1500)));
        assert_eq!(read.job("removed"), None);
    }

    #[test]
    fn damaged_duration_file_counts_as_empty() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("times.json");
        fs::write(&file, "{\"stages\":{\"x\":-1.0},").unwrap();
        assert_eq!(Times::read_from(&file).stage("x"), None);
    }
}
