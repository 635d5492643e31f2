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
    /// The image a seed member prepares its data with, when a lost quorum is recovered; the operator's own where it
    /// is not given
    #[arg(long, env = "OPERATOR_IMAGE", value_name = "IMAGE")]
    operator_image: Option<String>,
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
    let image = options.operator_image;
    runtime::run(definition, options.common, |operator| {
        cluster::app::work(operator, image)
    })?;
    Ok(())
}
