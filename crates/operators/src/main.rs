//! The program of all three operators. Its file name selects the operator that it runs: `etcd-operator`,
//! `etcd-backup-operator` or `etcd-restore-operator`. The image contains one copy of the program, and two symbolic
//! links with the other names.

use std::path::Path;
use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    #[cfg(feature = "failpoints")]
    let _failpoints = {
        runtime::process::abort_on_panic();
        fail::FailScenario::setup()
    };
    let started_as = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&started_as).file_name().unwrap_or_default();
    match name.to_str() {
        Some(api::names::MANAGER_BACKUP) => Ok(backup::command::run()?),
        Some(api::names::MANAGER_RESTORE) => Ok(restore::command::run()?),
        _ => Ok(cluster::command::run(access::app::run)?),
    }
}
