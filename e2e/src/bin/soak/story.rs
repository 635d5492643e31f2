//! The log of a soak: lines with times, on standard output and in the file `story.txt`.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Writes the log to standard output and to a file.
pub(crate) struct Story {
    start: Instant,
    file: Mutex<File>,
}

impl Story {
    pub(crate) fn begin(folder: &Path) -> Result<Self> {
        let path = folder.join("story.txt");
        let file = File::create(&path).with_context(|| path.display().to_string())?;
        Ok(Self {
            start: Instant::now(),
            file: Mutex::new(file),
        })
    }

    /// The time since the start of the soak.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Writes a line with the time since the start of the soak and the time of day.
    pub(crate) fn tell(&self, text: &str) {
        let clock = jiff::Timestamp::now().strftime("%H:%M:%S");
        let line = format!("{:7.1} s  {clock}  {text}", self.elapsed().as_secs_f64());
        println!("{line}");
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = writeln!(file, "{line}") {
            eprintln!("cannot write to story.txt: {error}");
        }
    }
}
