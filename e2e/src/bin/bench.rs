//! Measures the operators against a plain StatefulSet in the same run: `cargo xtask bench cluster`.
//!
//! Rounds alternate between the two, so that what else the machine does falls on both alike.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use e2e::objects::{Kind, field, ready_members};
use e2e::wait::Look;
use e2e::{Keyspace, Sandbox, until};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use serde::Serialize;
use serde_json::json;

/// Measures the operators on the cluster of the environment.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Seconds from apply to 3 ready members, and from a deleted pod to 3 healthy voters, beside a StatefulSet's.
    Cluster {
        /// Rounds of each measurement; the median is reported.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Write the figures to this file as JSON.
        #[arg(long)]
        json: Option<PathBuf>,
        /// How the cluster's DNS is set up; only a note in the figures.
        #[arg(long, default_value = "nocache", env = "E2E_DNS")]
        dns: String,
    },
}

/// Whom a round measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Subject {
    /// A parallel StatefulSet with static bootstrap and a volume for each member.
    StatefulSet,
    /// An EtcdCluster without volumes: a deleted pod is replaced by another member.
    Operator,
    /// An EtcdCluster with volumes: a deleted pod comes back on its own.
    OperatorDurable,
}

const SUBJECTS: [Subject; 3] = [
    Subject::StatefulSet,
    Subject::Operator,
    Subject::OperatorDurable,
];
const WITHIN: Duration = Duration::from_mins(2);

/// One round's seconds.
#[derive(Clone, Debug, Serialize)]
struct Round {
    subject: Subject,
    create_seconds: f64,
    delete_pod_seconds: f64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let What::Cluster { rounds, json, dns } = Arguments::parse().what;
    let sandbox = Sandbox::create("bench").await?;
    let outcome = measure(&sandbox, rounds).await;
    sandbox.delete().await;
    let measured = outcome?;
    print_table(&measured, &dns);
    if let Some(path) = json {
        let figures = json!({
            "bench": "cluster", "dns": dns, "rounds": measured,
            "median_seconds": SUBJECTS.map(|subject| json!({
                "subject": subject,
                "create": median(&measured, subject, |round| round.create_seconds),
                "delete_pod": median(&measured, subject, |round| round.delete_pod_seconds),
            })),
        });
        std::fs::write(&path, serde_json::to_string_pretty(&figures)?)
            .with_context(|| format!("{}", path.display()))?;
    }
    Ok(())
}

async fn measure(sandbox: &Sandbox, rounds: usize) -> Result<Vec<Round>> {
    sandbox.install_operators().await?;
    let mut measured = Vec::new();
    // The first round of each warms images and caches up and is not counted.
    for number in 0..=rounds {
        for subject in SUBJECTS {
            let name = format!(
                "{}-{number}",
                match subject {
                    Subject::StatefulSet => "sts",
                    Subject::Operator => "op",
                    Subject::OperatorDurable => "disk",
                }
            );
            let round = one_round(sandbox, subject, &name)
                .await
                .with_context(|| format!("{subject:?}, {number}"))?;
            let kind = if number == 0 { "warm-up" } else { "round" };
            println!(
                "{kind} {number} {subject:?}: created in {:.2} s, whole again in {:.2} s",
                round.create_seconds, round.delete_pod_seconds
            );
            if number > 0 {
                measured.push(round);
            }
        }
    }
    Ok(measured)
}

async fn one_round(sandbox: &Sandbox, subject: Subject, name: &str) -> Result<Round> {
    let manifest = manifest(sandbox, subject, name)?;
    // The clock starts when the API server has taken the objects: kubectl's own start is not measured.
    sandbox.apply(&manifest).await?;
    let begun = Instant::now();
    await_whole(sandbox, name, &[], "").await?;
    let create_seconds = begun.elapsed().as_secs_f64();
    settle(sandbox, subject, name).await?;

    let pods = sandbox.member_pods(name).await?;
    let (victim, survivors): (Vec<_>, Vec<_>) = pods
        .iter()
        .filter_map(|pod| pod.metadata.name.clone())
        .enumerate()
        .partition(|(index, _)| *index == 0);
    let victim = victim.into_iter().next().context("no pod")?.1;
    let uid = pods[0].metadata.uid.clone().unwrap_or_default();
    let survivors: Vec<String> = survivors.into_iter().map(|(_, name)| name).collect();
    let api: Api<Pod> = sandbox.api();
    let begun = Instant::now();
    api.delete(&victim, &kube::api::DeleteParams::default())
        .await?;
    await_whole(sandbox, name, &survivors, &uid).await?;
    let delete_pod_seconds = begun.elapsed().as_secs_f64();

    remove(sandbox, subject, name).await?;
    Ok(Round {
        subject,
        create_seconds,
        delete_pod_seconds,
    })
}

/// Three pods ready, none of them `gone`, and three voters in etcd's own list.
async fn await_whole(sandbox: &Sandbox, name: &str, via: &[String], gone: &str) -> Result<()> {
    let mut connection: Option<Keyspace> = match via.first() {
        Some(pod) => Some(Keyspace::of_pod(&sandbox.env, &sandbox.namespace, pod).await?),
        None => None,
    };
    until(&format!("{name} is whole"), WITHIN, async || {
        let pods = sandbox.member_pods(name).await?;
        let ready: Vec<&Pod> = pods
            .iter()
            .filter(|pod| is_ready(pod) && pod.metadata.uid.as_deref() != Some(gone))
            .collect();
        if ready.len() != 3 || pods.len() != 3 {
            return Ok(Look::NotYet(format!(
                "{} of {} pods ready",
                ready.len(),
                pods.len()
            )));
        }
        if connection.is_none() {
            let pod = ready[0].metadata.name.clone().unwrap_or_default();
            connection = Some(Keyspace::of_pod(&sandbox.env, &sandbox.namespace, &pod).await?);
        }
        let Some(keys) = &connection else {
            return Ok(Look::NotYet("no connection".to_owned()));
        };
        let members = keys.members().await?;
        let voters = members
            .iter()
            .filter(|(name, learner)| !learner && !name.is_empty())
            .count();
        Ok(if voters == 3 && members.len() == 3 {
            Look::Done(())
        } else {
            Look::NotYet(format!("{members:?}"))
        })
    })
    .await
}

/// Nothing is in progress any more, so that the next measurement starts from rest.
async fn settle(sandbox: &Sandbox, subject: Subject, name: &str) -> Result<()> {
    if subject != Subject::StatefulSet {
        sandbox.await_members(name, 3).await?;
        let object = sandbox.objects(Kind::EtcdCluster).get(name).await?;
        anyhow::ensure!(
            ready_members(&object).len() == 3,
            "{}",
            field(&object, "/status")
        );
    }
    // An addition is refused until the voters have been connected for five seconds: a cluster at rest is older.
    tokio::time::sleep(Duration::from_secs(6)).await;
    Ok(())
}

async fn remove(sandbox: &Sandbox, subject: Subject, name: &str) -> Result<()> {
    let object = match subject {
        Subject::StatefulSet => format!("statefulset/{name}"),
        Subject::Operator | Subject::OperatorDurable => format!("etcdcluster/{name}"),
    };
    sandbox.kubectl(&["delete", &object]).await?;
    sandbox
        .kubectl(&[
            "delete",
            "pvc",
            "-l",
            &format!("etcd_cluster={name}"),
            "--wait=false",
        ])
        .await?;
    until("its pods are gone", WITHIN, async || {
        let list = sandbox
            .api::<Pod>()
            .list(&ListParams::default().labels(&format!("etcd_cluster={name}")))
            .await?;
        Ok(if list.items.is_empty() {
            Look::Done(())
        } else {
            Look::NotYet(format!("{}", list.items.len()))
        })
    })
    .await
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn manifest(sandbox: &Sandbox, subject: Subject, name: &str) -> Result<String> {
    let version = sandbox
        .env
        .etcd_versions
        .last()
        .context("E2E_ETCD_VERSIONS is empty")?;
    let durable = "  pod:\n    persistentVolumeClaimSpec:\n      accessModes: [ReadWriteOnce]\n      resources: \
                   {requests: {storage: 64Mi}}\n";
    Ok(match subject {
        Subject::StatefulSet => stateful_set(name, version),
        Subject::Operator | Subject::OperatorDurable => format!(
            "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdCluster\nmetadata: {{name: {name}}}\nspec:\n  size: \
             3\n  version: \"{version}\"\n{}",
            if subject == Subject::OperatorDurable {
                durable
            } else {
                ""
            }
        ),
    })
}

/// The reference: what one writes by hand, with the same image, probes and pod security as the operator's pods.
fn stateful_set(name: &str, version: &str) -> String {
    let peers: Vec<String> = (0..3)
        .map(|i| format!("{name}-{i}=http://{name}-{i}.{name}:2380"))
        .collect();
    let labels = json!({"app": "etcd", "etcd_cluster": name});
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": true, "selector": labels,
                 "ports": [{"name": "client", "port": 2379}, {"name": "peer", "port": 2380}]},
    });
    let set = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name, "labels": labels},
        "spec": {
            "serviceName": name, "replicas": 3, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"},
            "volumeClaimTemplates": [{"metadata": {"name": "data", "labels": labels},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Mi"}}}}],
            "template": {"metadata": {"labels": labels}, "spec": {
                "automountServiceAccountToken": false,
                "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
                                    "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{
                    "name": "etcd", "image": format!("quay.io/coreos/etcd:v{version}"),
                    "imagePullPolicy": "IfNotPresent",
                    "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
                    "command": ["/usr/local/bin/etcd", "--name=$(POD)", "--data-dir=/var/etcd/data",
                        format!("--initial-advertise-peer-urls=http://$(POD).{name}:2380"),
                        "--listen-peer-urls=http://0.0.0.0:2380", "--listen-client-urls=http://0.0.0.0:2379",
                        format!("--advertise-client-urls=http://$(POD).{name}:2379"),
                        "--listen-metrics-urls=http://0.0.0.0:2381",
                        format!("--initial-cluster={}", peers.join(",")),
                        format!("--initial-cluster-token={name}"), "--initial-cluster-state=new"],
                    "readinessProbe": {"httpGet": {"path": "/readyz", "port": 2381}, "periodSeconds": 1,
                                       "timeoutSeconds": 5, "failureThreshold": 3},
                    "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                                        "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "data", "mountPath": "/var/etcd"}],
                }],
            }},
        },
    });
    format!("{service}\n---\n{set}\n")
}

fn values(rounds: &[Round], subject: Subject, figure: impl Fn(&Round) -> f64) -> Vec<f64> {
    let mut values: Vec<f64> = rounds
        .iter()
        .filter(|round| round.subject == subject)
        .map(figure)
        .collect();
    values.sort_by(f64::total_cmp);
    values
}

fn median(rounds: &[Round], subject: Subject, figure: impl Fn(&Round) -> f64) -> f64 {
    let values = values(rounds, subject, figure);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

fn print_table(rounds: &[Round], dns: &str) {
    println!(
        "\nDNS: {dns}; seconds: median (minimum to maximum), ratio to the StatefulSet's median"
    );
    println!(
        "{:18} {:>34} {:>34}",
        "", "apply to 3 ready members", "deleted pod to 3 healthy voters"
    );
    let figures: [fn(&Round) -> f64; 2] = [
        |round| round.create_seconds,
        |round| round.delete_pod_seconds,
    ];
    for subject in SUBJECTS {
        print!("{:18}", format!("{subject:?}"));
        for figure in figures {
            let all = values(rounds, subject, figure);
            let (low, high) = (
                all.first().copied().unwrap_or(f64::NAN),
                all.last().copied().unwrap_or(f64::NAN),
            );
            let middle = median(rounds, subject, figure);
            let ratio = middle / median(rounds, Subject::StatefulSet, figure);
            print!(
                " {:>34}",
                format!("{middle:.2} ({low:.2} to {high:.2}) x{ratio:.2}")
            );
        }
        println!();
    }
}

#[cfg(test)]
mod tests {
    use super::{Round, Subject, median};

    #[test]
    fn the_median_is_the_middle_or_between_the_two_middle_values() {
        let round = |seconds: f64| Round {
            subject: Subject::Operator,
            create_seconds: seconds,
            delete_pod_seconds: 0.0,
        };
        let rounds: Vec<Round> = [5.0, 1.0, 3.0].map(round).into();
        let of = |rounds: &[Round]| median(rounds, Subject::Operator, |round| round.create_seconds);
        assert!((of(&rounds) - 3.0).abs() < f64::EPSILON);
        let rounds: Vec<Round> = [4.0, 1.0, 2.0, 9.0].map(round).into();
        assert!((of(&rounds) - 3.0).abs() < f64::EPSILON);
    }
}
