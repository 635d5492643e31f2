//! The program `kubectl-etcd`. kubectl runs it as `kubectl etcd`.

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::Parser;
use kubectl_etcd::cli::Cli;
use kubectl_etcd::error::Error;
use kubectl_etcd::{commands, console};

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    match Box::pin(commands::run(cli)).await {
        Ok(code) => ExitCode::from(code),
        // A closed output is not a failure. For example, `head` in `kubectl etcd logs main | head` ends before this
        // program.
        Err(Error::Output(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            console::note(&console::error_text(&error, console::paint_errors()));
            ExitCode::from(error.exit_code())
        }
    }
}
