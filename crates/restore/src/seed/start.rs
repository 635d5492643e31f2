//! Runs in the etcd container. Creates the data directory from the fetched snapshot, unless it exists. Then this
//! process executes etcd (exec), so etcd receives the signals of the kubelet.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use member::DataDirectorySettings;

use super::prepare::{Prepare, prepare};
use super::{Paths, is_created};

use crate::reason::{Reason, Trouble};

/// Arguments of `seed start`.
#[derive(Args, Clone, Debug)]
pub struct Start {
    /// Tool for the data directory with its arguments, as JSON
    #[arg(value_name = "JSON", value_parser = parse)]
    pub settings: DataDirectorySettings,
    /// etcd and its arguments
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub etcd: Vec<OsString>,
    #[command(flatten)]
    #[allow(
        missing_docs,
        reason = "a doc comment here would become part of the help text"
    )]
    pub paths: Paths,
}

fn parse(text: &str) -> Result<DataDirectorySettings, serde_json::Error> {
    serde_json::from_str(text)
}

/// Creates the data directory and executes etcd (exec). Returns only after a failure.
pub(super) async fn start(arguments: &Start) -> Trouble {
    let paths = arguments.paths.clone();
    // If the data directory exists, etcd starts with it, even if the backup and the snapshot were deleted.
    if is_created(&paths) {
        // If `restored.json` exists, this restore has created the data directory. A crash after the rename of this
        // directory may have left temporary files.
        if paths.restored().exists() {
            let _ = std::fs::remove_dir_all(paths.work());
        }
    } else {
        let settings = arguments.settings.clone();
        let etcd = arguments.etcd.first().map(PathBuf::from);
        let prepared = Prepare {
            settings,
            etcd: etcd.unwrap_or_default(),
            paths,
        };
        let created = tokio::task::spawn_blocking(move || prepare(&prepared));
        let failed = match created.await {
            Ok(created) => created.err(),
            Err(error) => {
                let message = format!("the data directory was not created: {error}");
                Some(Trouble::new(Reason::SeedFailed, message))
            }
        };
        if let Some(trouble) = failed {
            return trouble;
        }
    }
    become_etcd(&arguments.etcd)
}

fn become_etcd(command: &[OsString]) -> Trouble {
    let (program, rest) = command
        .split_first()
        .map_or_else(Default::default, |(program, rest)| (program.clone(), rest));
    tracing::info!(program = %program.display(), "the data directory exists: starting etcd");
    let error = Command::new(&program).args(rest).exec();
    Trouble::new(
        Reason::SeedFailed,
        format!(
            "cannot run {}: {error}; spec.repository must contain the images of etcd",
            program.display()
        ),
    )
}
