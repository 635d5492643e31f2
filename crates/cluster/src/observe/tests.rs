//! Tests of the conversion: objects as the API server returns them become the planner's types.

use api::EtcdCluster;
use api::cluster::{BootstrapStatus, EtcdClusterSpec, EtcdClusterStatus};
use api::names;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimStatus, Pod, PodStatus, Service,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use member::tls::ClusterTls;
use member::{self, Member, Members, Role, Start};
use serde_json::json;

use crate::clock::ApiServerClock;
use crate::objects::Objects;
use crate::observe::KubeSnapshot;
use crate::plan::effective::Effective;
use crate::snapshot::{Kept, Observed, Trouble};
use crate::switch::Started;

mod coreos;
mod golden;

const MEMBER: &str = "db-aaaaaaaaaa";

fn cluster(spec: EtcdClusterSpec) -> EtcdCluster {
    let mut cluster = EtcdCluster::new("db", spec);
    cluster.metadata.namespace = Some("prod".into());
    cluster.metadata.uid = Some("uid".into());
    let bootstrap = BootstrapStatus {
        token: "token".into(),
        members: vec![MEMBER.into()],
    };
    cluster.status = Some(EtcdClusterStatus {
        bootstrap: Some(bootstrap),
        cluster_id: Some("00000000000000ff".into()),
        ..EtcdClusterStatus::default()
    });
    cluster
}

fn durable() -> EtcdClusterSpec {
    let spec = json!({ "size": 1, "version": "3.6.16", "pod": { "persistentVolumeClaimSpec": {
        "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } } });
    serde_json::from_value(spec).unwrap()
}

/// The objects that the operator builds for a cluster and for the member `MEMBER`.
fn made(spec: EtcdClusterSpec) -> Objects {
    let cluster = cluster(spec);
    let members = Members::of(&cluster, "prod", "token", Some("ff"));
    let version = EtcdVersion::parse("3.6.16").unwrap();
    let start = Start::Bootstrap {
        members: vec![MEMBER.into(), "db-bbbbbbbbbb".into()],
    };
    let pod = member::pod(
        &members,
        &Member {
            name: MEMBER,
            version: &version,
            role: Role::Voter,
            start,
        },
    );
    let services = vec![
        member::headless_service(&members),
        member::client_service(&members),
        member::member_service(&members, MEMBER),
    ];
    let claims = member::volume_claim(&members, MEMBER).into_iter().collect();
    let budget = Some(member::disruption_budget(&members, member::quorum(3)));
    Objects {
        cluster: cluster.clone(),
        pods: vec![pod],
        claims,
        services,
        budget,
        policy: None,
        secrets: Vec::new(),
        tls: ClusterTls::default(),
        next_tls: ClusterTls::default(),
        issuance: None,
        started: Started::default(),
        form: None,
        clock: ApiServerClock::default(),
    }
}

/// The snapshot that the operator builds from these Kubernetes objects.
fn look_at(objects: Objects) -> KubeSnapshot {
    let effective = Effective::of(&objects, jiff::Timestamp::UNIX_EPOCH);
    objects.snapshot(effective)
}

/// A snapshot of a cluster with one member, for tests of other modules.
pub(crate) fn snapshot() -> KubeSnapshot {
    look_at(made(durable()))
}

/// The objects of a cluster whose status names its member.
pub(crate) fn made_durable() -> Objects {
    let mut objects = made(durable());
    let status = objects.cluster.status.as_mut().unwrap();
    let member = json!({ "name": MEMBER, "role": "Leader", "healthy": true });
    status.member_details = vec![serde_json::from_value(member).unwrap()];
    objects
}

fn seen(mend: impl FnOnce(&mut Objects)) -> Observed {
    let mut objects = made(durable());
    mend(&mut objects);
    look_at(objects).without_etcd
}

#[test]
fn members_are_called_at_pod_ip() {
    let urls = |address: Option<&str>| {
        let mut objects = made(durable());
        objects.pods[0].status = Some(PodStatus {
            pod_ip: address.map(str::to_owned),
            ..PodStatus::default()
        });
        look_at(objects).urls.remove(MEMBER)
    };
    assert_eq!(
        urls(Some("10.0.0.7")).as_deref(),
        Some("http://10.0.0.7:2379")
    );
    assert_eq!(
        urls(Some("fd00::7")).as_deref(),
        Some("http://[fd00::7]:2379")
    );
    assert_eq!(urls(None), None);
}

#[test]
fn voter_is_not_called_until_its_service_has_endpoints() {
    use crate::snapshot::Role;
    let asked_as = |role: Role, closed: bool| {
        let mut objects = made(durable());
        objects.pods[0].status = Some(PodStatus {
            pod_ip: Some("10.0.0.7".to_owned()),
            ..PodStatus::default()
        });
        let mut observed = look_at(objects).without_etcd;
        if let Some(service) = observed.services.get_mut(MEMBER) {
            service.closed = closed;
        }
        observed.pods.get_mut(MEMBER).unwrap().role = Some(role);
        super::asked(&observed)
    };
    assert_eq!(asked_as(Role::Voter, true), [] as [&str; 0]);
    assert_eq!(asked_as(Role::Voter, false), [MEMBER]);
    // A learner is called even while its Service has no endpoints: an answer shows that its first requests are done.
    assert_eq!(asked_as(Role::Learner, true), [MEMBER]);
}

#[test]
fn objects_built_by_operator_have_no_drift() {
    let observed = seen(|_| {});
    assert_eq!(observed.shared.headless, Kept::AsMade(()));
    assert_eq!(observed.shared.client, Kept::AsMade(true));
    assert_eq!(observed.shared.budget, Kept::AsMade(2));
    assert!(
        !observed.services[MEMBER].drifted
            && observed.services[MEMBER].owned
            && !observed.services[MEMBER].started
    );
    assert_eq!(
        observed.services.len(),
        1,
        "the Services of the whole cluster must not count as Services of members"
    );
    let pod = &observed.pods[MEMBER];
    assert!(pod.owned && pod.durable && pod.stays() && !pod.running);
    assert_eq!(
        pod.initial,
        [MEMBER.to_owned(), "db-bbbbbbbbbb".into()].into()
    );
    assert_eq!(
        (pod.token.as_deref(), pod.version.as_deref()),
        (Some("token"), Some("3.6.16"))
    );
    assert_eq!(observed.cluster_id, Some(etcd::ClusterId(255)));
    assert_eq!(
        observed.disks[MEMBER].cluster_id,
        Some(etcd::ClusterId(255))
    );
}

/// The API server adds defaults to the objects. If they counted as drift, the operator would write the objects
/// repeatedly.
#[test]
fn defaults_of_api_server_are_not_reported_as_drift() {
    let observed = seen(|objects| {
        for service in &mut objects.services {
            let spec = service.spec.as_mut().unwrap();
            spec.session_affinity = Some("None".into());
            spec.ip_families = Some(vec!["IPv4".into()]);
            service.annotations_mut().insert("team".into(), "a".into());
        }
    });
    assert_eq!(
        (observed.shared.headless, observed.shared.client),
        (Kept::AsMade(()), Kept::AsMade(true))
    );
    assert!(!observed.services[MEMBER].drifted);
}

#[test]
fn edited_services_and_budgets_have_drift() {
    let observed = seen(|objects| {
        for service in &mut objects.services {
            service.spec.as_mut().unwrap().ports.as_mut().unwrap()[0].port = 1;
        }
        objects
            .budget
            .as_mut()
            .unwrap()
            .spec
            .as_mut()
            .unwrap()
            .selector = None;
    });
    assert_eq!(
        (observed.shared.headless, observed.shared.client),
        (Kept::Drifted, Kept::Drifted)
    );
    assert_eq!(observed.shared.budget, Kept::Drifted);
    assert!(observed.services[MEMBER].drifted);
}

#[test]
fn client_service_with_changed_selector_has_drift() {
    let observed = seen(|objects| {
        let selector = objects.services[1]
            .spec
            .as_mut()
            .unwrap()
            .selector
            .as_mut()
            .unwrap();
        selector.insert("etcd_node".into(), MEMBER.into());
    });
    assert_eq!(observed.shared.client, Kept::Drifted);
}

#[test]
fn objects_of_other_owners_belong_to_no_member() {
    let observed = seen(|objects| {
        objects.pods[0].metadata.owner_references.as_mut().unwrap()[0].uid = "older".into();
        objects.claims[0].metadata.owner_references = None;
        objects.claims[0].metadata.annotations = None;
    });
    assert!(observed.pods.is_empty() && observed.disks.is_empty());
    assert_eq!(observed.strangers.len(), 2);
}

#[test]
fn invariant_7_objects_with_token_but_no_owner_belong_to_cluster() {
    let observed = seen(|objects| {
        objects.pods[0].metadata.owner_references = None;
        objects.claims[0].metadata.owner_references = None;
    });
    assert!(!observed.pods[MEMBER].owned && !observed.disks[MEMBER].owned);
    assert!(observed.strangers.is_empty());
}

#[test]
fn invariant_35_retained_pvc_must_have_no_owner() {
    let disk = |policy: &str, has_owner: bool| {
        let observed = seen(|objects| {
            objects.cluster.spec.deletion_policy = Some(policy.into());
            let metadata = &mut objects.claims[0].metadata;
            let voters = ("etcd.database.coreos.com/voters", "db-a,db-b");
            let annotations = metadata.annotations.as_mut().unwrap();
            annotations.insert(voters.0.to_owned(), voters.1.to_owned());
            if !has_owner {
                metadata.owner_references = None;
            }
        });
        assert!(observed.strangers.is_empty());
        observed.disks[MEMBER].clone()
    };
    for (policy, has_owner) in [
        ("Delete", true),
        ("RetainVolumes", false),
        ("BackupThenDelete", false),
    ] {
        assert!(disk(policy, has_owner).owned, "{policy}");
        assert!(!disk(policy, !has_owner).owned, "{policy}");
    }
    let voters = disk("RetainVolumes", false).retention.voters;
    assert_eq!(voters, ["db-a", "db-b"].map(String::from).into());
}

#[test]
fn invariant_26_retained_pvc_without_annotations_belongs_to_member_in_status() {
    let observed = |mend: &dyn Fn(&mut Objects)| {
        seen(|objects| {
            objects.cluster.spec.deletion_policy = Some("RetainVolumes".into());
            objects.claims[0].metadata.owner_references = None;
            objects.claims[0].metadata.annotations = None;
            mend(objects);
        })
    };
    let found = observed(&|_| ());
    assert!(found.disks[MEMBER].owned && found.disks[MEMBER].token.is_none());
    assert!(found.strangers.is_empty());
    let details = |objects: &mut Objects, name: &str| {
        let member = json!({ "name": name, "healthy": true });
        let status = objects.cluster.status.as_mut().unwrap();
        status.member_details = vec![serde_json::from_value(member).unwrap()];
    };
    assert!(
        !observed(&|objects| details(objects, MEMBER))
            .disks
            .is_empty()
    );
    let noted = |objects: &mut Objects, cluster_id: &str| {
        let key = names::ANNOTATION_CLUSTER_ID.to_owned();
        objects.claims[0].metadata.annotations = Some([(key, cluster_id.to_owned())].into());
    };
    assert!(!observed(&|objects| noted(objects, "ff")).disks.is_empty());
    let strangers: [&dyn Fn(&mut Objects); 6] = [
        &|objects| details(objects, "db-bbbbbbbbbb"),
        &|objects| noted(objects, "ee"),
        &|objects| {
            objects.claims[0].metadata.name = Some("data".to_owned());
            details(objects, "data");
        },
        &|objects| objects.cluster.spec.deletion_policy = None,
        &|objects| objects.cluster.status.as_mut().unwrap().bootstrap = None,
        &|objects| {
            let pod = &objects.pods[0].metadata;
            let mut owners = pod.owner_references.clone().unwrap();
            owners[0].uid = "older".to_owned();
            objects.claims[0].metadata.owner_references = Some(owners);
        },
    ];
    for (number, stranger) in strangers.into_iter().enumerate() {
        let observed = observed(stranger);
        assert!(observed.disks.is_empty(), "stranger {number}");
        assert_eq!(observed.strangers.len(), 1, "stranger {number}");
    }
}

#[test]
fn container_state_is_converted_to_pod_problem() {
    let cases = [
        (
            json!({ "waiting": { "reason": "ErrImageNeverPull", "message": "not present" } }),
            "image",
        ),
        (
            json!({ "waiting": { "reason": "CrashLoopBackOff", "message": "back-off 10s" } }),
            "failing",
        ),
        (
            json!({ "waiting": { "reason": "ContainerCreating" } }),
            "none",
        ),
        (
            json!({ "running": { "startedAt": "2026-01-01T00:00:00Z" } }),
            "none",
        ),
    ];
    for (state, expected) in cases {
        let observed = seen(|objects| {
            let status = json!({ "phase": "Pending", "containerStatuses": [{
                "name": "etcd", "image": "", "imageID": "", "ready": false, "restartCount": 2, "state": state.clone() }] });
            objects.pods[0].status = Some(serde_json::from_value(status).unwrap());
        });
        let pod = &observed.pods[MEMBER];
        let kind = match &pod.trouble {
            Some(Trouble::Image(_)) => "image",
            Some(Trouble::Failing(_)) => "failing",
            Some(Trouble::Unschedulable(_)) => "unschedulable",
            None => "none",
        };
        assert_eq!(kind, expected, "{state}");
        assert_eq!(pod.restarts, 2);
        assert_eq!(pod.running, state.get("running").is_some());
    }
}

#[test]
fn unschedulable_pod_reports_scheduler_message() {
    let observed = seen(|objects| {
        let status = json!({ "phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available" }] });
        objects.pods[0].status = Some(serde_json::from_value(status).unwrap());
    });
    assert_eq!(
        observed.pods[MEMBER].trouble,
        Some(Trouble::Unschedulable("0/3 nodes are available".into()))
    );
}

#[test]
fn evicted_pod_counts_as_stopped() {
    let observed = seen(|objects| {
        objects.pods[0].status = Some(
            serde_json::from_value(json!({ "phase": "Failed", "reason": "Evicted" })).unwrap(),
        );
    });
    assert!(!observed.pods[MEMBER].stays());
}

#[test]
fn cluster_without_objects_has_no_members_and_services() {
    let observed = seen(|objects| {
        objects.pods = Vec::<Pod>::new();
        objects.claims = Vec::<PersistentVolumeClaim>::new();
        objects.services = Vec::<Service>::new();
        objects.budget = None;
    });
    assert!(observed.pods.is_empty() && observed.disks.is_empty() && observed.services.is_empty());
    assert_eq!(
        (observed.shared.headless, observed.shared.client),
        (Kept::Missing, Kept::Missing)
    );
}

/// The init container of a seed reports its failure as JSON in its termination message. The status must contain only
/// the text of the failure.
#[test]
fn json_failure_of_seed_is_reported_as_text() {
    let observed = seen(|objects| {
        let report =
            r#"{"result":"failed","reason":"EtcdUnreachable","message":"no answer from b"}"#;
        let status = json!({ "phase": "Pending", "initContainerStatuses": [{
            "name": "fetch", "image": "", "imageID": "", "ready": false, "restartCount": 2,
            "state": { "waiting": { "reason": "CrashLoopBackOff", "message": "back-off 10s" } },
            "lastState": { "terminated": { "exitCode": 1, "message": report } } }] });
        objects.pods[0].status = Some(serde_json::from_value(status).unwrap());
    });
    let trouble = observed.pods[MEMBER].trouble.as_ref().unwrap();
    assert!(
        trouble.message().ends_with("no answer from b)"),
        "{trouble:?}"
    );
}

/// The time since which the cluster has been unavailable comes from the condition `Available` in the status, so it
/// survives a restart of the operator.
#[test]
fn recovery_approval_and_unavailable_time_are_read_from_etcdcluster() {
    let observed = seen(|objects| {
        let approval = (
            "etcd.database.coreos.com/recover".to_owned(),
            "c0ffee".to_owned(),
        );
        objects.cluster.metadata.annotations = Some([approval].into());
        let status = json!({ "staleApproval": "c0ffee", "conditions": [{
            "type": "Available", "status": "False", "reason": "QuorumLost", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:07Z" }] });
        objects.cluster.status = Some(serde_json::from_value(status).unwrap());
    });
    let recovery = observed.recovery;
    assert_eq!(recovery.approval.as_deref(), Some("c0ffee"));
    assert_eq!(recovery.stale_approval.as_deref(), Some("c0ffee"));
    let since = recovery.unavailable_since.unwrap();
    assert_eq!(since.to_string(), "2026-01-01T00:00:07Z");
}

/// A member's object without its labels still belongs to the cluster. The operator restores the labels.
#[test]
fn member_objects_without_labels_are_found_for_label_repair() {
    let owned = |label: &'static str| {
        let observed = seen(|objects| {
            let pod = objects.pods[0].metadata.labels.as_mut().unwrap();
            pod.remove(label);
            let claim = objects.claims[0].metadata.labels.as_mut().unwrap();
            claim.remove(label);
        });
        (observed.pods[MEMBER].owned, observed.disks[MEMBER].owned)
    };
    assert_eq!(owned("none"), (true, true));
    assert_eq!(owned("etcd_cluster"), (false, false));
    assert_eq!(owned("etcd_node"), (false, false));
    assert_eq!(owned("etcd.database.coreos.com/token"), (false, true));
    let service = seen(|objects| {
        let labels = &mut objects.services[2].metadata.labels;
        labels.as_mut().unwrap().remove("etcd_node");
    });
    assert!(service.services[MEMBER].drifted);
}

#[test]
fn same_named_objects_of_other_owners_are_recognized() {
    let shared = |mend: &dyn Fn(&mut ObjectMeta)| {
        let observed = seen(|objects| {
            mend(&mut objects.services[0].metadata);
            mend(&mut objects.services[1].metadata);
            mend(&mut objects.budget.as_mut().unwrap().metadata);
        });
        let shared = observed.shared;
        let all = [
            shared.headless == Kept::Others,
            shared.client == Kept::Others,
            shared.budget == Kept::Others,
        ];
        assert!(all.iter().all(|one| *one == all[0]), "{shared:?}");
        all[0]
    };
    assert!(!shared(&|_| ()));
    // Another EtcdCluster owns the objects in this call. For example, the headless Service of an EtcdCluster
    // `db-client` has the name of the client Service of `db`.
    assert!(shared(&|metadata| {
        metadata.owner_references.as_mut().unwrap()[0].uid = "other".to_owned();
    }));
    assert!(shared(&|metadata| {
        metadata.owner_references = None;
        metadata.labels = None;
    }));
    // An object with the cluster's labels and without an owner does not count as an object of another owner: it remains
    // from a deleted EtcdCluster whose children were kept.
    assert!(!shared(&|metadata| metadata.owner_references = None));
}

#[test]
fn network_policy_of_another_owner_is_recognized() {
    let cluster = cluster(durable());
    let members = Members::of(&cluster, "prod", "token", Some("ff"));
    let spec = cluster.spec.network_policy.clone().unwrap_or_default();
    let made = member::network_policy(&members, &spec, &member::Operators::default());
    let compared = |mend: &dyn Fn(&mut ObjectMeta)| {
        let mut there = made.clone();
        mend(&mut there.metadata);
        crate::plan::diff::network(&members, Some(&there), made.clone(), "uid")
    };
    assert_eq!(compared(&|_| ()), Kept::AsMade(()));
    let other = compared(&|metadata| {
        metadata.owner_references.as_mut().unwrap()[0].uid = "other".to_owned();
    });
    assert_eq!(other, Kept::Others);
    let by_user = compared(&|metadata| {
        metadata.owner_references = None;
        metadata.labels = None;
    });
    assert_eq!(by_user, Kept::Others);
}

/// Invariant 7: if the status shows a cluster of coreos/etcd-operator, the operator bootstraps no new cluster, even if
/// no object of the old cluster exists.
#[test]
fn status_of_coreos_operator_proves_earlier_cluster() {
    let named = |status: serde_json::Value| {
        let observed = seen(|objects| {
            objects.cluster.status = Some(serde_json::from_value(status).unwrap());
        });
        observed.recovery.named_before
    };
    let old = json!({ "phase": "Running", "members": { "ready": ["db-a"], "unready": ["db-b"] } });
    assert_eq!(named(old), ["db-a", "db-b"].map(String::from).into());
    // Only this operator writes `memberDetails`, so the status below proves no cluster of coreos/etcd-operator.
    let ours = json!({ "members": { "ready": ["db-a"] }, "memberDetails": [{ "name": "db-a", "healthy": true }] });
    assert_eq!(named(ours), [].into());
}

/// Neither the phase `Pending` nor a missing phase indicates a lost volume.
#[test]
fn volume_counts_as_lost_only_if_its_pvc_is_in_phase_lost() {
    let lost = |phase: Option<&str>| {
        let seen = seen(|objects| {
            objects.claims[0].status = phase.map(|phase| PersistentVolumeClaimStatus {
                phase: Some(phase.to_owned()),
                ..PersistentVolumeClaimStatus::default()
            });
        });
        let disk = &seen.disks[MEMBER];
        assert_eq!(disk.stays(), !disk.lost);
        disk.lost
    };
    assert!(lost(Some("Lost")));
    for phase in [
        None,
        Some(""),
        Some("Pending"),
        Some("Bound"),
        Some("Released"),
    ] {
        assert!(!lost(phase), "{phase:?}");
    }
}
