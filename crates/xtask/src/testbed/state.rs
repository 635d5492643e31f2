//! The state of a testbed between commands: a JSON file in the run folder, which each change replaces atomically.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::addresses::{Addresses, IpFamily, Slot};
use super::process::Identity;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) slot: Slot,
    pub(crate) boot: String,
    /// The init process of the testbed's namespaces. When it ends, the kernel kills all other processes of the
    /// testbed.
    pub(crate) init: Option<Identity>,
    /// True if all nodes and daemons have started.
    pub(crate) ready: bool,
    pub(crate) dns: super::Dns,
    /// The minor version of Kubernetes, such as `1.36`.
    pub(crate) kubernetes: String,
    pub(crate) ip_family: IpFamily,
    pub(crate) nodes: u8,
    pub(crate) snapshotter: String,
    pub(crate) s3_access_key: String,
    pub(crate) s3_secret_key: String,
}

impl State {
    /// The IP addresses of the testbed.
    pub(crate) fn addresses(&self) -> Addresses {
        Addresses {
            slot: self.slot,
            family: self.ip_family,
        }
    }

    /// Reads the state file. `None` if the file does not exist.
    pub(crate) fn read(run_folder: &Path) -> Result<Option<Self>> {
        let file = file(run_folder);
        match fs::read_to_string(&file) {
            Ok(text) => Ok(Some(serde_json::from_str(&text).with_context(|| {
                format!("cannot parse {}: remove it", file.display())
            })?)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| file.display().to_string()),
        }
    }

    pub(crate) fn write(&self, run_folder: &Path) -> Result<()> {
        let (file, temporary) = (file(run_folder), run_folder.join("state.json.new"));
        fs::write(&temporary, serde_json::to_string_pretty(self)?)
            .with_context(|| temporary.display().to_string())?;
        fs::rename(&temporary, &file).with_context(|| file.display().to_string())
    }

    /// True if the init process of the testbed runs.
    pub(crate) fn is_alive(&self) -> bool {
        self.boot == boot() && self.init.is_some_and(Identity::is_alive)
    }
}

/// The boot ID, which differs after each boot of the machine.
pub(crate) fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// Locks the testbed, so that only one command at a time changes it.
pub(crate) fn lock(run_folder: &Path) -> Result<File> {
    let path = run_folder.with_extension("lock");
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    if file.try_lock().is_err() {
        crate::progress::say("waiting for another command that uses this testbed");
        file.lock().with_context(|| path.display().to_string())?;
    }
    Ok(file)
}

fn file(run_folder: &Path) -> PathBuf {
    run_folder.join("state.json")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn state(init: Option<Identity>) -> State {
        State {
            slot: Slot(3),
            boot: boot(),
            init,
            ready: true,
            dns: super::super::Dns::Cache30,
            kubernetes: "1.36".into(),
            ip_family: IpFamily::Ipv4,
            nodes: 3,
            snapshotter: "overlayfs".into(),
            s3_access_key: "a".into(),
            s3_secret_key: "b".into(),
        }
    }

    #[test]
    fn written_testbed_state_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        assert!(State::read(dir.path()).unwrap().is_none());
        state(None).write(dir.path()).unwrap();
        assert_eq!(State::read(dir.path()).unwrap().unwrap().slot, Slot(3));
    }

    #[test]
    fn damaged_testbed_state_is_reported_with_file_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(file(dir.path()), "{").unwrap();
        assert!(format!("{:#}", State::read(dir.path()).unwrap_err()).contains("state.json"));
    }

    #[test]
    fn testbed_of_earlier_boot_is_not_alive() {
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
