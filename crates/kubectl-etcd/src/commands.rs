//! The subcommands. The module of a subcommand reads objects, decides with pure functions, and sends the changes to the
//! API server.

mod backup;
mod bundle;
mod ctl;
mod events;
mod join;
mod logs;
mod plan;
mod recover;
mod replace;
mod restore;
mod status;
mod switch;
mod upgrade;
mod upkeep;
mod verify;

use std::fmt::Debug;

use clap::CommandFactory;
use k8s_openapi::NamespaceResourceScope;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::access::Access;
use crate::cli::{Cli, Command, Waiting};
use crate::console::{Look, say, wait};
use crate::error::Result;

/// Runs the subcommand, and returns the exit code of the program.
///
/// # Errors
/// Fails if the command fails. The error names the object and the remedy.
pub async fn run(cli: Cli) -> Result<u8> {
    if let Command::Completion(args) = &cli.command {
        // The script completes the command `kubectl-etcd` in a shell, but not `kubectl etcd`: for a plugin, kubectl
        // calls a program named `kubectl_complete-etcd`.
        let mut command = Cli::command();
        clap_complete::generate(
            args.shell,
            &mut command,
            "kubectl-etcd",
            &mut std::io::stdout(),
        );
        return Ok(0);
    }
    let access = Access::connect(&cli.connection).await?;
    match cli.command {
        Command::Status(args) => status::run(&access, &args).await?,
        Command::Ctl(args) => return ctl::run(&access, &args).await,
        Command::Plan(args) => plan::run(&access, &args.cluster).await?,
        Command::Upgrade(args) => Box::pin(upgrade::run(&access, &args)).await?,
        Command::Pause(args) => switch::pause(&access, &args, true).await?,
        Command::Resume(args) => switch::pause(&access, &args, false).await?,
        Command::Hibernate(args) => switch::hibernate(&access, &args, true).await?,
        Command::Wake(args) => switch::hibernate(&access, &args, false).await?,
        Command::Replace(args) => Box::pin(replace::run(&access, &args)).await?,
        Command::Defrag(args) => Box::pin(upkeep::defrag(&access, &args)).await?,
        Command::Compact(args) => Box::pin(upkeep::compact(&access, &args)).await?,
        Command::MoveLeader(args) => Box::pin(upkeep::move_leader(&access, &args)).await?,
        Command::Recover(args) => Box::pin(recover::run(&access, &args)).await?,
        Command::Backup(args) => Box::pin(backup::run(&access, &args)).await?,
        Command::Restore(args) => Box::pin(restore::run(&access, &args)).await?,
        Command::Verify(args) => Box::pin(verify::run(&access, &args)).await?,
        Command::Join(args) => Box::pin(join::run(&access, &args)).await?,
        Command::Logs(args) => logs::run(&access, &args).await?,
        Command::Events(args) => events::run(&access, &args).await?,
        Command::Report(args) => Box::pin(bundle::run(&access, &args)).await?,
        Command::Completion(_) => {}
    }
    Ok(0)
}

/// Creates the object. With `--wait`, waits until `look` returns `Done` or `Failed`.
async fn create<K>(
    access: &Access,
    object: &K,
    waiting: &Waiting,
    look: fn(&K) -> Look,
) -> Result<()>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned
        + Serialize,
{
    let (kind, name) = (K::kind(&()).to_lowercase(), object.name_any());
    access.create(object).await?;
    say(&format!("{kind}/{name} is created"))?;
    if !waiting.wait {
        return say(&format!(
            "follow the {} with `kubectl -n {} get {kind} {name} -o wide --watch`",
            kind.trim_start_matches("etcd"),
            access.namespace
        ));
    }
    let looked = async || Ok(look(&access.get::<K>(&name).await?));
    let end = wait(
        &access.named::<K>(&name),
        "complete",
        waiting.timeout,
        looked,
    )
    .await?;
    say(&end)
}
