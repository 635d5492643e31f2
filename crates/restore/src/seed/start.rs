//! From the fetched snapshot to etcd, in etcd's own container: the data directory is made, unless it is there, and then
//! this process becomes etcd, with the arguments, the signals and the termination message of any other member.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use clap::Args;
use member::Making;

use super::prepare::{Prepare, prepare};
use super::{Paths, is_made};

use crate::reason::{Reason, Trouble};

/// Arguments of `seed start`.
#[derive(Args, Clone, Debug)]
pub struct Start {
    /// With what the data directory is made, as JSON
    #[arg(value_name = "JSON", value_parser = parse)]
    pub making: Making,
    /// etcd, and its arguments
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub etcd: Vec<OsString>,
    #[command(flatten)]
    #[allow(missing_docs, reason = "the text would become part of the help")]
    pub paths: Paths,
}

fn parse(text: &str) -> Result<Making, serde_json::Error> {
    serde_json::from_str(text)
}

/// Ends only with trouble: otherwise the process is etcd.
pub(super) async fn start(arguments: &Start) -> Trouble {
    let paths = arguments.paths.clone();
    // Once it is there it is the member's, and nothing of the restore is asked for any more.
    if is_made(&paths) {
        // A crash may have left it behind.
        if paths.restored().exists() {
            let _ = std::fs::remove_dir_all(paths.work());
        }
    } else {
        let making = arguments.making.clone();
        let made = tokio::task::spawn_blocking(move || prepare(&Prepare { making, paths }));
        let failed = match made.await {
            Ok(made) => made.err(),
            Err(error) => {
                let message = format!("the data directory was not made: {error}");
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
    tracing::info!(program = %program.display(), "the data directory is there: this goes on as etcd");
    let error = Command::new(&program).args(rest).exec();
    Trouble::new(
        Reason::SeedFailed,
        format!(
            "cannot run {}: {error}; spec.repository must hold etcd's own images",
            program.display()
        ),
    )
}
