//! The binary `etcd-operator`.

use api::EtcdCluster;
use clap::Parser;
use kube::CustomResourceExt;
use runtime::cli::{self, Common};
use runtime::process::Definition;

/// Runs etcd clusters on Kubernetes.
#[derive(Parser)]
#[command(name = "etcd-operator", version)]
struct Options {
    #[command(flatten)]
    common: Common,
}

fn main() -> anyhow::Result<()> {
    let options: Options = cli::parse();
    #[cfg(feature = "failpoints")]
    let _failpoints = {
        // A fail point stands for the death of the process, not of one task.
        std::panic::set_hook(Box::new(|what| {
            tracing::error!("{what}");
            std::process::abort();
        }));
        fail::FailScenario::setup()
    };
    let definition = Definition {
        name: "etcd-operator",
        word: "cluster",
        crd: EtcdCluster::crd(),
    };
    runtime::run(definition, options.common, cluster::app::work)?;
    Ok(())
}
