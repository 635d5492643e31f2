//! The binary `etcd-backup-operator`.

use api::EtcdBackup;
use backup::app::Settings;
use clap::Parser;
use kube::CustomResourceExt;
use runtime::cli::{self, Common};
use runtime::process::Definition;

/// Backs up etcd clusters to object stores.
#[derive(Parser)]
#[command(name = "etcd-backup-operator", version)]
struct Options {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    settings: Settings,
}

fn main() -> anyhow::Result<()> {
    let options: Options = cli::parse();
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
    Ok(())
}
