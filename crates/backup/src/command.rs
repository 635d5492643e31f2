//! The command line of `etcd-backup-operator`. Pods that mount a PVC, verify a backup or record changes run its
//! subcommands. Users can run `request` and `decrypt`.

use std::process::ExitCode;

use api::EtcdBackup;
use clap::{Parser, Subcommand};
use kube::CustomResourceExt;
use kube::core::ApiResource;
use runtime::cli::{self, Common};
use runtime::process::{self, Definition};

use crate::app::{self, Settings};
use crate::{decrypt, pvc, recording, request, verification};

/// Backs up etcd clusters to object stores, and mirrors them to other clusters.
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
    /// Create an EtcdBackup from a file, in the pod of a CronJob
    Request(request::Request),
    /// Decrypt a stored backup: read it from the standard input, and write the snapshot to the standard output
    Decrypt(decrypt::Decrypt),
    /// Write or remove backups on a mounted PersistentVolumeClaim. The operator runs this command in a pod
    Volume(pvc::Volume),
    /// Compare a restored etcd with its backup. The operator runs this command in a pod
    Verify(verification::Verify),
    /// Record all changes of a cluster in the store of an EtcdBackup. The operator runs this command in a pod
    Record(recording::Record),
}

/// Parses the arguments of the process and runs their command.
///
/// # Errors
/// Fails if the operator ends without a shutdown signal or cannot start.
pub fn run() -> Result<ExitCode, process::Error> {
    let options: Options = cli::parse();
    if let Some(Task::Volume(arguments)) = &options.command {
        return process::run_once(options.common.log_json, pvc::run(arguments));
    }
    if let Some(Task::Request(arguments)) = &options.command {
        return process::run_once(options.common.log_json, request::run(arguments));
    }
    if let Some(Task::Decrypt(arguments)) = &options.command {
        return process::run_once(options.common.log_json, decrypt::run(arguments));
    }
    if let Some(Task::Verify(arguments)) = &options.command {
        return process::run_once(options.common.log_json, verification::run(arguments));
    }
    if let Some(Task::Record(arguments)) = &options.command {
        return process::run_once(options.common.log_json, recording::run(arguments));
    }
    let definition = Definition {
        name: api::names::MANAGER_BACKUP,
        word: "backup",
        kind: ApiResource::erase::<EtcdBackup>(&()),
        crd: EtcdBackup::crd,
        shards: 1,
    };
    let (settings, create_crd) = (options.settings, options.common.create_crd);
    process::run(definition, options.common, |operator| {
        app::work(operator, settings, create_crd)
    })?;
    Ok(ExitCode::SUCCESS)
}
