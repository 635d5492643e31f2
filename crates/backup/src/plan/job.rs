//! Builds the transfer or the removal that an action starts, with its endpoints, object names and pods. Performs no
//! I/O.

use std::collections::BTreeSet;

use api::EtcdBackup;
use api::backup::Compression;
use api::manifest::ManifestCluster;
use api::storage::StorageType;
use etcd::ClusterId;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use member::OperatorImage;

use super::due::rules;
use super::recorded::is_open;
use super::{Action, Plan, Verdict, clock, pod, verification};
use crate::pvc::{Order, Reach, SnapshotTask, Task};
use crate::reason::{Reason, Trouble};
use crate::removal::RemovalScope;
use crate::snapshot::{
    Endpoint, EndpointLimits, EndpointReach, Inputs, MemberPods, Site, Snapshot, Source,
};
use crate::transfer::ObjectName;

/// A transfer or a removal.
#[derive(Clone, Debug, PartialEq)]
pub enum Job {
    /// A transfer in this process, from etcd to the store that `observe` has opened.
    Transfer {
        /// Client URLs to which the transfer connects first.
        endpoints: Vec<String>,
        /// The name of the backup's object in the store.
        name: ObjectName,
        /// Whether the object is compressed.
        compress: bool,
        /// Whether the object is encrypted with the key that `observe` has read.
        encrypt: bool,
        /// The EtcdCluster, as the manifest records it.
        cluster: Option<Box<ManifestCluster>>,
        /// The members to which the transfer may connect (invariant 28).
        limits: EndpointLimits,
    },
    /// A removal in this process, from the store that `observe` has opened.
    Removal {
        /// The path in the spec of the EtcdBackup.
        path: String,
        /// The backups to remove.
        scope: RemovalScope,
    },
    /// A transfer or removal in a pod that mounts the PersistentVolumeClaim.
    InPod {
        /// The pod. The operator creates it if it does not exist.
        pod: Box<Pod>,
        /// The task in the arguments of the pod.
        order: Order,
    },
    /// The deletion of a backup pod that an earlier operator process has created. Without this deletion, the pod could
    /// store its backup after the status has reported the end of the attempt.
    LeftPod {
        /// The name of the pod, in the namespace of the EtcdBackup.
        name: String,
    },
}

/// The transfer for the backup with the start time `begun`. `None` if `observe` has not read the inputs of a transfer.
pub(super) fn transfer(
    backup: &EtcdBackup,
    inputs: &Inputs,
    begun: Timestamp,
) -> Result<Option<Job>, Trouble> {
    let Inputs::Transfer {
        site,
        leftover,
        source,
        rule,
    } = inputs
    else {
        return Ok(None);
    };
    // A transfer to a volume runs in a pod in the namespace of the EtcdBackup. The pod connects to the URLs themselves,
    // and not to the addresses of member pods, because every pod of the namespace can connect to these URLs.
    let in_pod_there = matches!(site, Site::Volume { .. });
    let (endpoints, cluster_id, cluster) = match source {
        Source::Endpoints(endpoints) => {
            let (urls, cluster_id) = reachable(endpoints, in_pod_there)?;
            (urls, cluster_id, None)
        }
        Source::Cluster {
            endpoints,
            pods,
            recorded,
            restoring,
        } => {
            check(recorded, *restoring)?;
            let (urls, cluster_id) = match pods {
                Some(pods) if !in_pod_there => {
                    let MemberPods { urls, cluster_id } = pods.clone()?;
                    (urls, Some(cluster_id))
                }
                _ => (endpoints.clone(), None),
            };
            (urls, cluster_id, Some(recorded.clone()))
        }
    };
    let numbered = backup.spec.is_periodic();
    let compress = backup.spec.compression == Some(Compression::Zstd);
    Ok(Some(match site {
        Site::Store { key } => Job::Transfer {
            endpoints,
            name: ObjectName::of(key.clone(), numbered.then_some(begun))
                .replacing(leftover.clone()),
            compress,
            encrypt: backup.spec.encryption.is_some(),
            cluster,
            limits: EndpointLimits {
                advertised: rule.clone(),
                cluster_id,
            },
        },
        Site::Volume { claim, path, image } => {
            let task = Task::Store(Box::new(SnapshotTask {
                endpoints,
                begun,
                numbered,
                compress,
                encryption: backup.spec.encryption.clone(),
                reach: reach(backup, cluster.as_deref()),
                cluster: cluster.map(|cluster| *cluster),
            }));
            in_pod(backup, (claim, path), task, image)
        }
    }))
}

/// Returns the URLs to which the transfer connects. If the URLs are addresses of pods, also returns the ID of the
/// cluster that must answer. `in_pod_there`: a pod of the namespace connects to the URLs themselves.
///
/// Invariant 28: an endpoint outside of the namespace needs a grant. If an endpoint lacks its grant, this function
/// fails, and the transfer does not start.
fn reachable(
    endpoints: &[Endpoint],
    in_pod_there: bool,
) -> Result<(Vec<String>, Option<ClusterId>), Trouble> {
    let mut urls = Vec::new();
    let mut own: Option<ClusterId> = None;
    for Endpoint { url, reach } in endpoints {
        match reach {
            EndpointReach::NotGranted(why) => {
                return Err(Trouble::new(
                    Reason::EndpointNotGranted,
                    format!(
                        "spec.etcdEndpoints: {url} names no EtcdCluster of this namespace and {why}. Or set \
                         spec.etcdCluster.name to an EtcdCluster of this namespace"
                    ),
                ));
            }
            EndpointReach::Pods(pods) if !in_pod_there => match own {
                None => {
                    own = Some(pods.cluster_id);
                    urls.extend(pods.urls.iter().cloned());
                }
                Some(other) if other == pods.cluster_id => {}
                Some(_) => {
                    return Err(Trouble::new(
                        Reason::InvalidSpec,
                        "spec.etcdEndpoints names different EtcdClusters: name one EtcdCluster",
                    ));
                }
            },
            EndpointReach::Direct | EndpointReach::Pods(_) => urls.push(url.clone()),
        }
    }
    Ok((urls, own))
}

/// The deletion of the pod of the backup in progress, if this backup runs in a pod and the plan ends this backup.
pub(super) fn left_pod(backup: &EtcdBackup, plan: &Plan) -> Option<Job> {
    let ends = plan.action == Action::RecordIntent
        || matches!(
            plan.verdict,
            Verdict::Failed(_) | Verdict::Refused(_) | Verdict::Suspended
        );
    let status = backup.status.as_ref().filter(|status| is_open(status))?;
    let begun = status.start_time.as_ref()?.0;
    let in_pod = backup.spec.storage_type == StorageType::Pvc;
    (ends && in_pod).then(|| Job::LeftPod {
        name: pod::store_name(backup, begun),
    })
}

/// Fails if the EtcdCluster is being restored or hibernates.
fn check(cluster: &ManifestCluster, restoring: bool) -> Result<(), Trouble> {
    let name = &cluster.name;
    if restoring {
        // During a restore, the data of the cluster is incomplete. A backup of this data is refused, because the
        // retention rules would keep it like a complete backup.
        return Err(Trouble::new(
            Reason::Restoring,
            format!(
                "EtcdCluster {name} is being restored: the backup starts when the restore has ended"
            ),
        ));
    }
    if cluster.spec.hibernate {
        return Err(Trouble::new(
            Reason::Hibernated,
            format!(
                "EtcdCluster {name} hibernates: set its spec.hibernate to false, or suspend the backups"
            ),
        ));
    }
    Ok(())
}

/// The Secrets that the pod needs to connect to etcd.
pub(super) fn reach(backup: &EtcdBackup, cluster: Option<&ManifestCluster>) -> Reach {
    match cluster {
        Some(cluster) => Reach {
            tls: cluster
                .spec
                .tls
                .as_ref()
                .and_then(|tls| tls.operator_secret_of(&cluster.name)),
            operators: true,
            auth: cluster.spec.auth.as_ref().map(|auth| auth.secret.clone()),
        },
        None => Reach {
            tls: backup.spec.client_tls_secret().map(str::to_owned),
            operators: false,
            auth: backup.spec.auth_secret.clone(),
        },
    }
}

/// The removal of the backups that the retention rules do not keep. `None` if `observe` has not read the inputs, or if
/// the clocks differ.
pub(super) fn surplus(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Option<Job> {
    let status = backup.status.as_ref();
    let newest = status.and_then(|status| status.location.clone());
    // Invariant 9: `now` becomes the time on the clock that is behind: of the operator or of the API server. A backup
    // pod computes ages from this time, because the clock of its node may differ.
    let now = clock::agreed_time(snapshot, now)?;
    let scope = |others: &BTreeSet<String>| RemovalScope::Surplus {
        // Invariant 31: the newest verified backup is kept.
        rules: rules(backup)
            .unwrap_or_default()
            .keeping(verification::verified(backup)),
        newest: newest.clone().unwrap_or_default(),
        others: others.clone(),
        now,
    };
    removal(backup, &snapshot.inputs, scope)
}

/// The removal of all stored backups of this EtcdBackup.
pub(super) fn everything(backup: &EtcdBackup, snapshot: &Snapshot) -> Option<Job> {
    removal(backup, &snapshot.inputs, |_| RemovalScope::Everything)
}

fn removal(
    backup: &EtcdBackup,
    inputs: &Inputs,
    scope: impl FnOnce(&BTreeSet<String>) -> RemovalScope,
) -> Option<Job> {
    let Inputs::Removal { site, others } = inputs else {
        return None;
    };
    let scope = scope(others);
    Some(match site {
        Site::Store { key } => Job::Removal {
            path: key.clone(),
            scope,
        },
        Site::Volume { claim, path, image } => in_pod(backup, (claim, path), task(scope), image),
    })
}

fn task(scope: RemovalScope) -> Task {
    match scope {
        RemovalScope::Surplus {
            rules,
            newest,
            others,
            now,
        } => Task::Surplus {
            rules,
            newest,
            others,
            now,
        },
        RemovalScope::Everything => Task::Everything,
    }
}

fn in_pod(
    backup: &EtcdBackup,
    (claim, path): (&str, &str),
    task: Task,
    image: &OperatorImage,
) -> Job {
    let order = Order {
        claim: claim.to_owned(),
        path: path.to_owned(),
        uid: backup.uid().unwrap_or_default(),
        task,
    };
    Job::InPod {
        pod: Box::new(pod::build(backup, &order, image)),
        order,
    }
}

#[cfg(test)]
mod tests;
