//! What a testbed has to remember between two commands: one JSON file in the
//! run folder, replaced in one step.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::process::Identity;
use super::slot::Slot;

/// The record of a testbed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) slot: Slot,
    pub(crate) boot: String,
    /// The first process: with it ends all the rest.
    pub(crate) init: Option<Identity>,
    /// Set when everything was up.
    pub(crate) ready: bool,
    pub(crate) dns: super::Dns,
    pub(crate) nodes: u8,
    pub(crate) snapshotter: String,
    pub(crate) s3_access_key: String,
    pub(crate) s3_secret_key: String,
}

impl State {
    /// The record in a run folder, if there is one.
    pub(crate) fn read(run_folder: &Path) -> Result<Option<Self>> {
        let file = file(run_folder);
        match fs::read_to_string(&file) {
            Ok(text) => Ok(Some(serde_json::from_str(&text).with_context(|| {
                format!("{}: not readable, remove it", file.display())
            })?)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| file.display().to_string()),
        }
    }

    /// Writes the record.
    pub(crate) fn write(&self, run_folder: &Path) -> Result<()> {
        let (file, temporary) = (file(run_folder), run_folder.join("state.json.new"));
        fs::write(&temporary, serde_json::to_string_pretty(self)?)
            .with_context(|| temporary.display().to_string())?;
        fs::rename(&temporary, &file).with_context(|| file.display().to_string())
    }

    /// Whether the testbed's first process runs.
    pub(crate) fn is_alive(&self) -> bool {
        self.boot == boot() && self.init.is_some_and(Identity::is_alive)
    }
}

/// What differs after each boot of the machine.
pub(crate) fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// Keeps two commands on one testbed from working at the same time.
pub(crate) fn lock(run_folder: &Path) -> Result<File> {
    let path = run_folder.with_extension("lock");
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    if file.try_lock().is_err() {
        crate::progress::say("another command works on this testbed; waiting for it");
        file.lock().with_context(|| path.display().to_string())?;
    }
    Ok(file)
}

fn file(run_folder: &Path) -> PathBuf {
    run_folder.join("state.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(init: Option<Identity>) -> State {
        State {
            slot: Slot(3),
            boot: boot(),
            init,
            ready: true,
            dns: super::super::Dns::Cache30,
            nodes: 3,
            snapshotter: "overlayfs".into(),
            s3_access_key: "a".into(),
            s3_secret_key: "b".into(),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        assert!(State::read(dir.path()).unwrap().is_none());
        state(None).write(dir.path()).unwrap();
        assert_eq!(State::read(dir.path()).unwrap().unwrap().slot, Slot(3));
    }

    #[test]
    fn a_torn_record_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(file(dir.path()), "{").unwrap();
        assert!(format!("{:#}", State::read(dir.path()).unwrap_err()).contains("state.json"));
    }

    #[test]
    fn a_testbed_of_before_the_boot_is_not_alive() {
        let own = Identity::own().unwrap();
        assert!(state(Some(own)).is_alive());
        assert!(
            !State {
                boot: "other".into(),
                ..state(Some(own))
            }
            .is_alive()
        );
        assert!(!state(None).is_alive());
    }
}
