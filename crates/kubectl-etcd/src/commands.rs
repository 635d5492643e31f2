//! The subcommands. Each module reads objects, decides with pure functions, and sends its change to the API server.

mod backup;
mod bundle;
mod ctl;
mod events;
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

use clap::CommandFactory;

use crate::access::Access;
use crate::cli::{Cli, Command};
use crate::error::Result;

/// Runs the subcommand, and returns the exit code of the program.
///
/// # Errors
/// Fails with an error that names the object and the remedy.
pub async fn run(cli: Cli) -> Result<u8> {
    if let Command::Completion(args) = &cli.command {
        // The generated script completes the command `kubectl-etcd` in the shell. kubectl does not use this script: it
        // completes a plugin with a program `kubectl_complete-etcd`.
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
        Command::Logs(args) => logs::run(&access, &args).await?,
        Command::Events(args) => events::run(&access, &args).await?,
        Command::Report(args) => Box::pin(bundle::run(&access, &args)).await?,
        Command::Completion(_) => {}
    }
    Ok(0)
}
