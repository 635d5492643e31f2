//! Tests of transfers and removals.

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

/// Invariant 28: users can point a DNS name of their namespace to any address, so the operator connects to the
/// addresses of pods.
#[test]
fn invariant_28_operator_connects_to_member_pods_and_checks_cluster_id() {
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
    // The backup pod of a PersistentVolumeClaim runs in the namespace of the EtcdBackup, so it connects to the URL in
    // the spec, and not to the address of a member pod.
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
fn hibernation_is_reported_instead_of_missing_pods() {
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
fn backup_pod_argument_contains_complete_order() {
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
fn removal_job_contains_newest_backup_other_etcdbackups_and_time() {
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
    // Invariant 9: the backup pod gets the time on the clock that is behind, here the clock of the API server.
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
