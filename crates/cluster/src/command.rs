//! The command line of `etcd-operator`. The subcommand `check` is for the test pod of `helm test`.

use std::future::Future;
use std::process::ExitCode;

use api::EtcdCluster;
use clap::{Parser, Subcommand};
use futures::future::select;
use kube::CustomResourceExt;
use kube::core::ApiResource;
use runtime::Operator;
use runtime::check::{self, Check};
use runtime::cli::{self, Common, Sharding};
use runtime::endpoints::EndpointGrant;
use runtime::process::{self, Definition};

use crate::app;

/// Runs etcd clusters on Kubernetes.
#[derive(Parser)]
#[command(name = "etcd-operator", version)]
struct Options {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    sharding: Sharding,
    /// Image with which a seed member prepares its data when a lost quorum is recovered. The default is the operator's
    /// own image
    #[arg(long, env = "OPERATOR_IMAGE", value_name = "IMAGE")]
    operator_image: Option<String>,
    /// Label of the pods of all three operators, which NetworkPolicies admit to the members. Repeat the flag for more
    /// labels. Without a label, NetworkPolicies admit every pod of the operator's namespace
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    operator_label: Vec<(String, String)>,
    /// Allow a namespace to name an etcd in the annotation etcd.database.coreos.com/join, as in
    /// team-a=etcd.example.com. Repeat the flag for more hosts; * means every namespace, *.example.com every name below
    /// it. The port is 2379 by default. The operator's own namespace needs no permission
    #[arg(long, value_name = "NAMESPACE=HOST[:PORT]")]
    join: Vec<EndpointGrant>,
    #[command(subcommand)]
    command: Option<Task>,
}

#[derive(Subcommand)]
enum Task {
    /// Check whether operators are ready. The exit code is 0 if all of them are ready
    Check(Check),
}

fn label(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or_else(|| format!("{text:?} is not <key>=<value>"))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Runs the command that the arguments of the process describe. `others` gets the operator and the flag `--create-crd`.
/// It runs further controllers, which must end after the shutdown.
///
/// # Errors
/// If the operator ends without a shutdown signal, or cannot start.
pub fn run<W>(others: impl FnOnce(Operator, bool) -> W) -> Result<ExitCode, process::Error>
where
    W: Future<Output = ()>,
{
    let options: Options = cli::parse();
    if let Some(Task::Check(operators)) = &options.command {
        return process::run_once(options.common.log_json, check::run(operators));
    }
    let definition = Definition {
        name: api::names::MANAGER_CLUSTER,
        word: "cluster",
        kind: ApiResource::erase::<EtcdCluster>(&()),
        crd: EtcdCluster::crd,
        shards: options.sharding.shards,
    };
    let image = options.operator_image;
    let labels = options.operator_label.into_iter().collect();
    let joins = options.join;
    let create_crds = options.common.create_crd;
    process::run(definition, options.common, |operator| async move {
        let shutdown = operator.shutdown.clone();
        let others = Box::pin(others(operator.clone(), create_crds));
        let own = Box::pin(app::work(operator, image, labels, joins));
        // If controllers end before the shutdown, the process ends, and Kubernetes restarts it.
        let ((), rest) = select(own, others).await.factor_first();
        if shutdown.is_cancelled() {
            rest.await;
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
