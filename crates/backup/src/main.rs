//! The binary `etcd-backup-operator`; with `volume`, what runs in a pod beside a claim.

use std::process::ExitCode;

use api::EtcdBackup;
use backup::app::Settings;
use backup::claim;
use clap::{Parser, Subcommand};
use kube::CustomResourceExt;
use runtime::cli::{self, Common};
use runtime::process::{self, Definition};

/// Backs up etcd clusters to object stores.
#[derive(Parser)]
#[command(name = "etcd-backup-operator", version)]
struct Options {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    settings: Settings,
    #[command(subcommand)]
    command: Option<Task>,
}

#[derive(Subcommand)]
enum Task {
    /// Write or remove backups on the claim that is mounted, inside a pod of the operator's
    Volume(claim::Volume),
}

fn main() -> anyhow::Result<ExitCode> {
    let options: Options = cli::parse();
    if let Some(Task::Volume(arguments)) = &options.command {
        process::log_to_stderr(options.common.log_json);
        let worked = tokio::runtime::Runtime::new()?.block_on(claim::run(arguments));
        return Ok(if worked {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    #[cfg(feature = "failpoints")]
    let _failpoints = {
        // A fail point stands for the death of the process, not of one task.
        std::panic::set_hook(Box::new(|_| std::process::abort()));
        fail::FailScenario::setup()
    };
    let definition = Definition {
        name: "etcd-backup-operator",
        word: "backup",
        crd: EtcdBackup::crd(),
    };
    let settings = options.settings;
    runtime::run(definition, options.common, |operator| {
        backup::app::work(operator, settings)
    })?;
    Ok(ExitCode::SUCCESS)
}
