//! The binary `etcd-operator`.

use api::EtcdCluster;
use clap::Parser;
use kube::CustomResourceExt;
use kube::core::ApiResource;
use runtime::cli::{self, Common};
use runtime::process::{self, Definition};

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
    /// A label of the operators' pods, all three of them, which NetworkPolicies let in to the members; may be given more
    /// than once. Without any, every pod of the operator's namespace is let in
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    operator_label: Vec<(String, String)>,
}

fn label(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or_else(|| format!("{text:?} is not <key>=<value>"))?;
    Ok((key.to_owned(), value.to_owned()))
}

fn main() -> anyhow::Result<()> {
    let options: Options = cli::parse();
    #[cfg(feature = "failpoints")]
    let _failpoints = {
        process::abort_on_panic();
        fail::FailScenario::setup()
    };
    let definition = Definition {
        name: api::names::MANAGER_CLUSTER,
        word: "cluster",
        kind: ApiResource::erase::<EtcdCluster>(&()),
        crd: EtcdCluster::crd,
    };
    let image = options.operator_image;
    let labels = options.operator_label.into_iter().collect();
    process::run(definition, options.common, |operator| {
        cluster::app::work(operator, image, labels)
    })?;
    Ok(())
}
