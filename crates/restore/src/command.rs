//! The command line of `etcd-restore-operator`. The pod of a seed runs the command `seed` before etcd.

use std::process::ExitCode;

use api::EtcdRestore;
use clap::{Parser, Subcommand};
use kube::CustomResourceExt;
use kube::core::ApiResource;
use runtime::cli::{self, Common};
use runtime::process::{self, Definition};
use store::grants::Grant;

use crate::{app, search, seed};

/// Restores etcd clusters from backups.
#[derive(Parser)]
#[command(name = "etcd-restore-operator", version)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Image with which seed members fetch their backup. The default is the operator's own image
    #[arg(long, env = "OPERATOR_IMAGE", value_name = "IMAGE")]
    operator_image: Option<String>,
    /// Allow a namespace to read a location with the operator's own identity, as in team-a=s3://backups/team-a. Repeat
    /// the flag for more locations; * means every namespace. The operator's own namespace needs no permission
    #[arg(long, value_name = "NAMESPACE=PLACE")]
    ambient_identity: Vec<Grant>,
    #[command(subcommand)]
    command: Option<Task>,
}

#[derive(Subcommand)]
enum Task {
    /// Prepare a seed member (runs inside the seed's pod)
    #[command(subcommand)]
    Seed(seed::Command),
    /// Search a point in recorded changes on a PersistentVolumeClaim (runs inside a pod that mounts it)
    Search(Box<search::Search>),
}

/// Parses the arguments of the process and runs their command.
///
/// # Errors
/// Fails if the operator ends without a shutdown signal or cannot start.
pub fn run() -> Result<ExitCode, process::Error> {
    let arguments: Arguments = cli::parse();
    let log_json = arguments.common.log_json;
    match &arguments.command {
        Some(Task::Seed(command)) => return process::run_once(log_json, seed::run(command)),
        Some(Task::Search(search)) => return process::run_once(log_json, search::run(search)),
        None => {}
    }
    let definition = Definition {
        name: api::names::MANAGER_RESTORE,
        word: "restore",
        kind: ApiResource::erase::<EtcdRestore>(&()),
        crd: EtcdRestore::crd,
        shards: 1,
    };
    let image = arguments.operator_image;
    let ambient = arguments.ambient_identity;
    process::run(definition, arguments.common, |operator| {
        app::run(operator, image, ambient)
    })?;
    Ok(ExitCode::SUCCESS)
}
