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

use super::{Action, Plan, Verdict, clock, is_open, pod, rules};
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
    /// A transfer in this process, from the etcd cluster to the store that observe has opened.
    Transfer {
        /// Client URLs to which the transfer connects first.
        endpoints: Vec<String>,
        /// The name of the backup's object in the store.
        name: ObjectName,
        /// Whether the object is compressed.
        compress: bool,
        /// The record of the EtcdCluster for the manifest.
        cluster: Option<Box<ManifestCluster>>,
        /// The members to which the transfer may connect.
        limits: EndpointLimits,
    },
    /// A removal in this process, from the store that observe has opened.
    Removal {
        /// The key that the spec names.
        path: String,
        /// The backups to remove.
        scope: RemovalScope,
    },
    /// A transfer or removal in a pod that mounts the PersistentVolumeClaim.
    InPod {
        /// The backup pod, which the operator creates if it does not exist.
        pod: Box<Pod>,
        /// The order in the arguments of the pod.
        order: Order,
    },
    /// The deletion of a pod that an earlier operator process has left, and that may still be pending. Without the
    /// deletion, the pod could make its backup after the status has reported the end of the attempt.
    LeftPod {
        /// The backup pod, in the namespace of the EtcdBackup.
        name: String,
    },
}

/// The transfer for the backup with this start time; `None` if the inputs were not read.
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
    // A pod with a volume runs in the namespace of the EtcdBackup, and reaches the same endpoints as other pods of that
    // namespace.
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
                reach: reach(backup, cluster.as_deref()),
                cluster: cluster.map(|cluster| *cluster),
            }));
            in_pod(backup, (claim, path), task, image)
        }
    }))
}

/// The URLs to which the transfer connects for the endpoints in a spec, and the ID of the only cluster that may answer.
///
/// Invariant 28: an endpoint outside of the namespace needs a grant. If one endpoint has no grant, all are rejected.
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
                        "spec.etcdEndpoints: {url} names no EtcdCluster of this namespace and {why}. Or name an EtcdCluster of this namespace in spec.etcdCluster.name"
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

/// The job that deletes the pod of the recorded backup, if the plan ends this backup and the backup runs in a pod.
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

/// Fails if the EtcdCluster must not be backed up now.
fn check(cluster: &ManifestCluster, restoring: bool) -> Result<(), Trouble> {
    let name = &cluster.name;
    if restoring {
        // A restore is in progress. The retention rules would count a backup of its incomplete data as a good backup.
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

/// The Secrets that a pod needs for the access to etcd.
fn reach(backup: &EtcdBackup, cluster: Option<&ManifestCluster>) -> Reach {
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

/// The removal of the backups that the retention rules do not keep. `None` if the inputs were not read, or if the
/// clocks were not compared or do not agree.
pub(super) fn surplus(backup: &EtcdBackup, snapshot: &Snapshot, now: Timestamp) -> Option<Job> {
    let status = backup.status.as_ref();
    let newest = status.and_then(|status| status.location.clone());
    // Invariant 9: the pod computes ages with this time too, because the clock of its node may differ.
    let now = clock::agreed_time(snapshot, now)?;
    let scope = |others: &BTreeSet<String>| RemovalScope::Surplus {
        rules: rules(backup).unwrap_or_default(),
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
mod tests {
    use jiff::SignedDuration;
    use runtime::endpoints::EndpointRule;
    use serde_json::{Value, json};

    use super::*;

    fn backup(spec: &Value) -> EtcdBackup {
        let mut backup = EtcdBackup::new("nightly", serde_json::from_value(spec.clone()).unwrap());
        backup.metadata.uid = Some("backup-uid".to_owned());
        backup.metadata.namespace = Some("prod".to_owned());
        backup
    }

    fn of_cluster(site: Site, restoring: bool, hibernate: bool) -> Inputs {
        let recorded = json!({ "name": "main", "namespace": "prod", "spec": {
            "size": 3, "hibernate": hibernate, "TLS": { "generated": {} }, "auth": { "secret": "root" },
        } });
        Inputs::Transfer {
            site,
            leftover: Some("etcd_v3_2026-01-01-00:00:00".to_owned()),
            source: Source::Cluster {
                endpoints: vec!["https://main-client.prod.svc:2379".to_owned()],
                pods: None,
                recorded: Box::new(serde_json::from_value(recorded).unwrap()),
                restoring,
            },
            rule: EndpointRule::default(),
        }
    }

    fn store() -> Site {
        Site::Store {
            key: "etcd".to_owned(),
        }
    }

    fn volume() -> Site {
        Site::Volume {
            claim: "backups".to_owned(),
            path: "etcd".to_owned(),
            image: OperatorImage {
                image: "operator:1".to_owned(),
                pull_policy: None,
            },
        }
    }

    fn periodic() -> EtcdBackup {
        backup(&json!({
            "etcdCluster": { "name": "main" }, "storageType": "S3", "s3": { "path": "b/etcd" },
            "backupPolicy": { "schedule": "@daily", "maxBackups": 2 }, "compression": "zstd",
        }))
    }

    #[test]
    fn cluster_in_restore_or_hibernation_is_not_backed_up() {
        let planned = |restoring, hibernate| {
            let inputs = of_cluster(store(), restoring, hibernate);
            transfer(&periodic(), &inputs, Timestamp::UNIX_EPOCH).map_err(|trouble| trouble.reason)
        };
        assert_eq!(planned(true, false), Err(Reason::Restoring));
        assert_eq!(planned(false, true), Err(Reason::Hibernated));
        assert!(planned(false, false).is_ok_and(|job| job.is_some()));
    }

    fn of_endpoints(site: Site, reaches: &[EndpointReach]) -> Inputs {
        let endpoint = |(number, reach): (usize, &EndpointReach)| Endpoint {
            url: format!("http://e{number}.prod.svc:2379"),
            reach: reach.clone(),
        };
        Inputs::Transfer {
            site,
            leftover: None,
            source: Source::Endpoints(reaches.iter().enumerate().map(endpoint).collect()),
            rule: EndpointRule::default(),
        }
    }

    fn pods(cluster_id: u64) -> EndpointReach {
        EndpointReach::Pods(MemberPods {
            urls: vec![format!("http://10.0.0.{cluster_id}:2379")],
            cluster_id: ClusterId(cluster_id),
        })
    }

    #[test]
    fn invariant_28_endpoint_without_grant_starts_no_transfer() {
        let refused = EndpointReach::NotGranted("is not granted to namespace prod".to_owned());
        for site in [store(), volume()] {
            for reaches in [
                vec![refused.clone()],
                vec![EndpointReach::Direct, refused.clone()],
                vec![pods(7), refused.clone()],
            ] {
                let inputs = of_endpoints(site.clone(), &reaches);
                let trouble = transfer(&periodic(), &inputs, Timestamp::UNIX_EPOCH).unwrap_err();
                assert_eq!(trouble.reason, Reason::EndpointNotGranted);
                for part in ["spec.etcdEndpoints", "prod", "spec.etcdCluster.name"] {
                    assert!(trouble.message.contains(part), "{trouble:?}");
                }
            }
        }
    }

    /// Invariant 28: a DNS name in the namespace may resolve to any address. Only the address of a pod is reliable.
    #[test]
    fn invariant_28_operator_connects_to_pods_with_recorded_cluster_id() {
        let planned = |reaches: &[EndpointReach]| {
            let inputs = of_endpoints(store(), reaches);
            match transfer(&periodic(), &inputs, Timestamp::UNIX_EPOCH) {
                Ok(Some(Job::Transfer {
                    endpoints, limits, ..
                })) => Ok((endpoints, limits.cluster_id)),
                Ok(job) => panic!("{job:?}"),
                Err(trouble) => Err(trouble.reason),
            }
        };
        let at = |address: &str| vec![format!("http://{address}:2379")];
        assert_eq!(
            planned(&[pods(7), pods(7)]),
            Ok((at("10.0.0.7"), Some(ClusterId(7))))
        );
        assert_eq!(
            planned(&[EndpointReach::Direct]),
            Ok((at("e0.prod.svc"), None))
        );
        assert_eq!(planned(&[pods(7), pods(8)]), Err(Reason::InvalidSpec));
        // A pod with a volume runs in the namespace, so it uses the URL of the spec.
        let inputs = of_endpoints(volume(), &[pods(7)]);
        let planned = transfer(&periodic(), &inputs, Timestamp::UNIX_EPOCH).unwrap();
        let Some(Job::InPod { order, .. }) = planned else {
            panic!("{planned:?}")
        };
        let Task::Store(task) = &order.task else {
            panic!("{order:?}")
        };
        assert_eq!(task.endpoints, at("e0.prod.svc"));
    }

    #[test]
    fn hibernation_is_reported_before_missing_pods() {
        for (hibernate, reason) in [(true, Reason::Hibernated), (false, Reason::EtcdUnreachable)] {
            let mut inputs = of_cluster(store(), false, hibernate);
            if let Inputs::Transfer {
                source: Source::Cluster { pods, .. },
                ..
            } = &mut inputs
            {
                let trouble = Trouble::new(Reason::EtcdUnreachable, "no pod has an address");
                *pods = Some(Err(trouble));
            }
            let trouble = transfer(&periodic(), &inputs, Timestamp::UNIX_EPOCH).unwrap_err();
            assert_eq!(trouble.reason, reason);
        }
    }

    #[test]
    fn transfer_replaces_incomplete_object_of_earlier_attempt() {
        let inputs = of_cluster(store(), false, false);
        let planned = transfer(&periodic(), &inputs, Timestamp::UNIX_EPOCH).unwrap();
        let Some(Job::Transfer {
            name,
            compress,
            cluster,
            ..
        }) = planned
        else {
            panic!("{planned:?}")
        };
        assert_eq!(
            name,
            ObjectName::Numbered {
                path: "etcd".to_owned(),
                time: Timestamp::UNIX_EPOCH,
                leftover: Some("etcd_v3_2026-01-01-00:00:00".to_owned()),
            }
        );
        assert!(compress && cluster.is_some());
    }

    #[test]
    fn backup_pod_gets_its_task_and_mounts_cluster_secrets() {
        let inputs = of_cluster(volume(), false, false);
        let planned = transfer(&periodic(), &inputs, Timestamp::UNIX_EPOCH).unwrap();
        let Some(Job::InPod { pod, order }) = planned else {
            panic!("{planned:?}")
        };
        assert_eq!(
            (order.claim.as_str(), order.uid.as_str()),
            ("backups", "backup-uid")
        );
        let Task::Store(task) = &order.task else {
            panic!("{order:?}")
        };
        assert!(task.numbered && task.reach.operators);
        assert_eq!(task.reach.auth.as_deref(), Some("root"));
        assert_eq!(pod.namespace().as_deref(), Some("prod"));
        let arguments = pod.spec.unwrap().containers[0].args.clone().unwrap();
        let carried = arguments[1].strip_prefix("--order=").unwrap();
        assert_eq!(serde_json::from_str::<Order>(carried).unwrap(), order);
    }

    #[test]
    fn removal_task_contains_newest_backup_and_other_owners() {
        let mut backup = periodic();
        backup.status.get_or_insert_default().location = Some("s3://b/newest".to_owned());
        let others = BTreeSet::from(["another".to_owned()]);
        let of = |site| Snapshot {
            inputs: Inputs::Removal {
                site,
                others: others.clone(),
            },
            clock_difference: Some(SignedDuration::from_secs(-5)),
            ..Snapshot::default()
        };
        let planned = surplus(&backup, &of(store()), Timestamp::UNIX_EPOCH);
        let Some(Job::Removal {
            scope: RemovalScope::Surplus { newest, others, .. },
            ..
        }) = planned
        else {
            panic!("{planned:?}")
        };
        assert_eq!(newest, "s3://b/newest");
        assert!(others.contains("another"));
        // Invariant 9: the order for the pod contains the earlier time of the two clocks.
        let planned = surplus(&backup, &of(volume()), Timestamp::UNIX_EPOCH);
        let Some(Job::InPod { order, .. }) = planned else {
            panic!("{planned:?}")
        };
        let Task::Surplus { now, .. } = order.task else {
            panic!("{order:?}")
        };
        assert_eq!(now.as_second(), -5);
        let planned = everything(&backup, &of(volume()));
        let Some(Job::InPod { order, .. }) = planned else {
            panic!("{planned:?}")
        };
        assert_eq!(order.task, Task::Everything);
        assert_eq!(everything(&backup, &Snapshot::default()), None);
    }
}
