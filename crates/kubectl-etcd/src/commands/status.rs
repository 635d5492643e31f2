//! `status`: prints members, database, alarms, certificates, backups, and the operator's next step.

use std::time::Duration;

use api::{EtcdBackup, EtcdCluster};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};

use crate::access::Access;
use crate::cli::{Output, StatusArgs};
use crate::console::{machine_readable, paint, say};
use crate::error::{Error, Result};
use crate::etcdctl;
use crate::live;
use crate::members;
use crate::view::{ClusterView, Inputs, LiveAnswer, details, list, view};

/// Maximum time to wait for the responses of all members.
const LIVE_LIMIT: Duration = Duration::from_secs(15);

pub(super) async fn run(access: &Access, args: &StatusArgs) -> Result<()> {
    let now = Timestamp::now();
    let wide = args.output == Output::Wide;
    if let Some(name) = &args.cluster {
        let view = one(access, name, args.offline).await?;
        return match machine_readable(&view, args.output)? {
            Some(text) => say(&text),
            None => say(&details(&view, wide, now, paint())),
        };
    }
    let views = all(access, args.all_namespaces).await?;
    if let Some(text) = machine_readable(&views, args.output)? {
        return say(&text);
    }
    if views.is_empty() {
        let place = if args.all_namespaces {
            "in any namespace".to_owned()
        } else {
            format!(
                "in namespace {} (-A lists all namespaces)",
                access.namespace
            )
        };
        return say(&format!("there is no EtcdCluster {place}"));
    }
    say(&list(&views, wide, now, paint()))
}

/// Builds the view of one cluster. Queries the members if `offline` is false.
pub(super) async fn one(access: &Access, name: &str, offline: bool) -> Result<ClusterView> {
    let cluster = access.cluster(name).await?;
    let pods = access.pods(name).await?;
    let backups = access.backups().await.unwrap_or_default();
    let live = if offline {
        LiveAnswer::NotAsked
    } else {
        ask(access, &cluster, &pods).await
    };
    Ok(view(Inputs {
        cluster: &cluster,
        pods: &pods,
        backups: &backups,
        live: &live,
    }))
}

/// Queries all members with etcdctl in one member's container. If etcd requires a user for this request, the local
/// etcdctl queries each member with the user from the Secret.
async fn ask(access: &Access, cluster: &EtcdCluster, pods: &[Pod]) -> LiveAnswer {
    let name = cluster.name_any();
    let pod = match members::choose(&name, pods, None) {
        Ok(pod) => pod,
        Err(error) => return LiveAnswer::Failed(error.to_string()),
    };
    let endpoints = members::endpoints(pods);
    let asked = etcdctl::run_without_user(access, pod, &endpoints, &request(), LIVE_LIMIT).await;
    let ended = match asked {
        Err(error) => return LiveAnswer::Failed(error.chain()),
        Ok(ended) => ended,
    };
    let answers = live::parse(&ended.stdout).unwrap_or_default();
    let problem = etcdctl::last_line(&ended.stderr).to_owned();
    if !answers.is_empty() {
        let is_complete = answers.len() == endpoints.len();
        return LiveAnswer::Answers(answers, (!is_complete).then_some(problem));
    }
    if etcdctl::needs_password(cluster, &[]) {
        return ask_each(access, cluster, pods).await;
    }
    LiveAnswer::Failed(problem)
}

fn request() -> Vec<String> {
    let words = [
        "endpoint",
        "status",
        "--write-out=json",
        "--command-timeout=3s",
    ];
    words.map(str::to_owned).into()
}

/// Queries each member with the local etcdctl, which logs in with the user from the Secret.
async fn ask_each(access: &Access, cluster: &EtcdCluster, pods: &[Pod]) -> LiveAnswer {
    let running = pods.iter().filter(|pod| members::is_running(pod));
    let asked = running.map(async |pod| {
        let ended = etcdctl::run(access, cluster, pod, &[], &request(), LIVE_LIMIT).await;
        let ended = ended.map_err(|error| error.chain())?;
        let mut answers = live::parse(&ended.stdout).unwrap_or_default();
        let mut answer = answers
            .pop()
            .ok_or_else(|| etcdctl::last_line(&ended.stderr).to_owned())?;
        // The endpoint is replaced by the client URL of the pod, because etcdctl reports the local port of the
        // port-forward.
        members::client_url(pod)
            .unwrap_or_default()
            .clone_into(&mut answer.endpoint);
        Ok::<_, String>(answer)
    });
    let (mut answers, mut problem) = (Vec::new(), None);
    for outcome in futures::future::join_all(asked).await {
        match outcome {
            Ok(answer) => answers.push(answer),
            Err(error) => problem = Some(error),
        }
    }
    LiveAnswer::Answers(answers, problem)
}

/// Builds the views of all clusters from their statuses, without querying members.
async fn all(access: &Access, all_namespaces: bool) -> Result<Vec<ClusterView>> {
    let clusters: Vec<EtcdCluster> = listed(access, all_namespaces, "etcdclusters").await?;
    let backups: Vec<EtcdBackup> = listed(access, all_namespaces, "etcdbackups")
        .await
        .unwrap_or_default();
    let views = clusters.iter().map(|cluster| {
        let namespace = cluster.namespace();
        let own = backups.iter().filter(|one| one.namespace() == namespace);
        let own: Vec<EtcdBackup> = own.cloned().collect();
        view(Inputs {
            cluster,
            pods: &[],
            backups: &own,
            live: &LiveAnswer::NotAsked,
        })
    });
    Ok(views.collect())
}

async fn listed<K>(access: &Access, all_namespaces: bool, what: &str) -> Result<Vec<K>>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
{
    if !all_namespaces {
        return access.list("").await;
    }
    let api: Api<K> = Api::all(access.client.clone());
    let answer = api.list(&ListParams::default()).await;
    let list = answer.map_err(|source| Error::Request {
        verb: "list",
        object: format!("{what} in all namespaces"),
        source: Box::new(source),
    })?;
    Ok(list.items)
}
