//! `logs`: prints the logs of members, or the operators' log lines that name a cluster.

use futures::{AsyncBufReadExt, StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, LogParams};
use kube::{Api, ResourceExt};

use crate::access::Access;
use crate::cli::LogsArgs;
use crate::console::{note, say};
use crate::error::{Error, Result};

/// The label selector for the operators' pods. The chart sets this label.
const OPERATORS: &str = "app.kubernetes.io/name=etcd-operator";

pub(super) async fn run(access: &Access, args: &LogsArgs) -> Result<()> {
    if args.operators {
        return operators(access, args).await;
    }
    access.cluster(&args.cluster).await?;
    let mut pods = access.pods(&args.cluster).await?;
    pods.retain(|pod| {
        args.member
            .as_ref()
            .is_none_or(|name| pod.name_any() == *name)
    });
    if pods.is_empty() {
        return Err(Error::Missing {
            object: format!("a pod of cluster {}", args.cluster),
            remedy: format!("`kubectl etcd plan {}` names the cause", args.cluster),
        });
    }
    let params = LogParams {
        container: Some(api::names::CONTAINER_ETCD.to_owned()),
        follow: args.follow,
        previous: args.previous,
        tail_lines: Some(args.tail),
        ..LogParams::default()
    };
    if args.follow {
        return follow(access, &pods, &params).await;
    }
    let mut read = 0;
    for pod in &pods {
        match text(access, pod, &params).await {
            Ok(log) => {
                read += 1;
                say(&prefixed(&pod.name_any(), &log))?;
            }
            // If the log of a pod cannot be read, the command prints the error and continues with the next pod.
            Err(error) => note(&error.chain()),
        }
    }
    if read == 0 {
        return Err(Error::refused(
            format!("no log of cluster {} can be read", args.cluster),
            "the messages above name the cause",
        ));
    }
    Ok(())
}

/// Reads the log of the pod.
pub(super) async fn text(access: &Access, pod: &Pod, params: &LogParams) -> Result<String> {
    let namespace = pod.namespace().unwrap_or_else(|| access.namespace.clone());
    let of_pod = access.in_namespace(&namespace);
    let api: Api<Pod> = of_pod.api();
    let name = pod.name_any();
    api.logs(&name, params)
        .await
        .map_err(|source| Error::Request {
            verb: "get",
            object: format!("the log of {}", of_pod.named::<Pod>(&name)),
            source: Box::new(source),
        })
}

async fn follow(access: &Access, pods: &[Pod], params: &LogParams) -> Result<()> {
    let mut streams = Vec::new();
    for pod in pods {
        let api: Api<Pod> = access.api();
        let name = pod.name_any();
        let opened = api.log_stream(&name, params).await;
        let opened = opened.map_err(|source| Error::Request {
            verb: "get",
            object: format!("the log of {}", access.named::<Pod>(&name)),
            source: Box::new(source),
        })?;
        streams.push(
            opened
                .lines()
                .map_ok(move |line| format!("{name}  {line}"))
                .boxed(),
        );
    }
    let mut lines = stream::select_all(streams);
    while let Some(line) = lines.next().await {
        say(&line?)?;
    }
    Ok(())
}

/// Lists the operators' pods in `namespace`. `None` means all namespaces.
pub(super) async fn operator_pods(access: &Access, namespace: Option<&str>) -> Result<Vec<Pod>> {
    let api: Api<Pod> = match namespace {
        Some(namespace) => Api::namespaced(access.client.clone(), namespace),
        None => Api::all(access.client.clone()),
    };
    let answer = api.list(&ListParams::default().labels(OPERATORS)).await;
    let list = answer.map_err(|source| Error::Request {
        verb: "list",
        object: format!("pods with the label {OPERATORS}"),
        source: Box::new(source),
    })?;
    Ok(list.items)
}

async fn operators(access: &Access, args: &LogsArgs) -> Result<()> {
    let pods = operator_pods(access, args.operator_namespace.as_deref()).await?;
    if pods.is_empty() {
        return Err(Error::Missing {
            object: format!("a pod with the label {OPERATORS}"),
            remedy: "name the namespace with --operator-namespace, or install the operators"
                .to_owned(),
        });
    }
    let params = LogParams {
        previous: args.previous,
        tail_lines: Some(args.tail),
        ..LogParams::default()
    };
    for pod in &pods {
        match text(access, pod, &params).await {
            Ok(log) => {
                let lines: Vec<&str> = log
                    .lines()
                    .filter(|line| names(line, &args.cluster))
                    .collect();
                if !lines.is_empty() {
                    say(&prefixed(&pod.name_any(), &lines.join("\n")))?;
                }
            }
            Err(error) => note(&error.chain()),
        }
    }
    Ok(())
}

/// Whether the log line contains the cluster's name as a whole word, or the name of a member.
fn names(line: &str, cluster: &str) -> bool {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '-';
    line.split(|letter| !is_part(letter))
        .any(|word| word == cluster || api::names::cluster_of_member(word) == Some(cluster))
}

fn prefixed(name: &str, log: &str) -> String {
    let lines: Vec<String> = log.lines().map(|line| format!("{name}  {line}")).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operator_log_lines_are_selected_by_cluster_name() {
        assert!(names("INFO object=prod/main: created", "main"));
        assert!(names("pod main-abcdefghij is lost", "main"));
        assert!(!names("domain main2 main-backup remain", "main"));
    }

    #[test]
    fn log_lines_begin_with_pod_name() {
        assert_eq!(prefixed("a", "x\ny\n"), "a  x\na  y");
    }
}
