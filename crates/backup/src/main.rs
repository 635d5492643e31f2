//! The binary `etcd-backup-operator`. Its command `volume` runs in a pod that mounts a PersistentVolumeClaim.

use std::process::ExitCode;

use api::EtcdBackup;
use backup::app::Settings;
use backup::pvc;
use clap::{Parser, Subcommand};
use kube::CustomResourceExt;
use kube::core::ApiResource;
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
    /// Write or remove backups on a mounted PersistentVolumeClaim. The operator runs this command in a pod
    Volume(pvc::Volume),
}

fn main() -> anyhow::Result<ExitCode> {
    let options: Options = cli::parse();
    if let Some(Task::Volume(arguments)) = &options.command {
        return Ok(process::run_once(
            options.common.log_json,
            pvc::run(arguments),
        )?);
    }
    #[cfg(feature = "failpoints")]
    let _failpoints = {
        process::abort_on_panic();
        fail::FailScenario::setup()
    };
    let definition = Definition {
        name: api::names::MANAGER_BACKUP,
        word: "backup",
        kind: ApiResource::erase::<EtcdBackup>(&()),
        crd: EtcdBackup::crd,
    };
    let settings = options.settings;
    process::run(definition, options.common, |operator| {
        backup::app::work(operator, settings)
    })?;
    Ok(ExitCode::SUCCESS)
}
