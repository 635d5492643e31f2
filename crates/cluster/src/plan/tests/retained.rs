//! Volumes that outlive their EtcdCluster (invariants 35 and 36).

use api::cluster::ClusterDeletionPolicy;
use serde_json::Value;

use crate::action::{Object, Request};
use crate::plan::tests::recovered::recovered;
use crate::plan::tests::recovery::NEW;
use crate::plan::tests::scene::{CLUSTER, Scene, at, delete_disk};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Kept, Removal, RetentionNotes, Seen};

fn retains(mut scene: Scene) -> Scene {
    let policy = Some(ClusterDeletionPolicy::RetainVolumes);
    scene.desired.object.spec.deletion_policy = policy;
    scene
}

fn three() -> Scene {
    retains(Scene::formed(&["a", "b", "c"]).durable())
}

fn notes() -> RetentionNotes {
    RetentionNotes {
        voters: ["a", "b", "c"].map(String::from).into(),
        tls: Some("null".to_owned()),
    }
}

/// The same cluster after its EtcdCluster was deleted and created again. Only the PVCs remain.
fn recreated(mut scene: Scene) -> Scene {
    let observed = &mut scene.observed;
    (observed.intent, observed.cluster_id) = (None, None);
    observed.members = Seen::Unknown("no member runs".into());
    observed.recovery.record = None;
    observed.statuses.clear();
    observed.reported_voters.clear();
    observed.pods.clear();
    observed.services.clear();
    let shared = &mut observed.shared;
    (shared.headless, shared.client) = (Kept::Missing, Kept::Missing);
    shared.budget = Kept::Missing;
    scene
}

/// A new EtcdCluster with the retained volumes of these members.
fn with_volumes(members: &[&str]) -> Scene {
    let mut scene = recreated(three());
    let disks = &mut scene.observed.disks;
    disks.retain(|name, _| members.contains(&name.as_str()));
    for disk in disks.values_mut() {
        disk.retention = notes();
    }
    scene
}

/// The token and the cluster ID that the plan records. The plan must write nothing else.
fn recorded(scene: &Scene) -> Option<(String, Option<etcd::ClusterId>)> {
    match scene.writes().as_slice() {
        [
            Write::RecordIntent {
                intent, cluster_id, ..
            },
        ] => Some((intent.token.clone(), *cluster_id)),
        [] => None,
        others => panic!("{others:?}"),
    }
}

fn problem(scene: &Scene) -> String {
    let problems = scene.plan().problems;
    let [problem] = problems.as_slice() else {
        panic!("{problems:?}");
    };
    assert_eq!(problem.reason, Reason::IdentityUnknown);
    problem.message.clone()
}

/// The owners in each request that creates or labels a PVC.
fn owners(scene: &Scene) -> Vec<Value> {
    let actions = scene.built().step.chains.concat();
    let owners = actions.iter().filter_map(|action| match &action.request {
        Request::Create(Object::VolumeClaim(claim)) => {
            serde_json::to_value(&claim.metadata.owner_references).ok()
        }
        Request::Patch(patch) if action.point == "before-label-disk" => {
            Some(patch.body["metadata"]["ownerReferences"].clone())
        }
        _ => None,
    });
    owners.collect()
}

#[test]
fn invariant_35_retained_pvcs_have_no_owner() {
    let begun = || Scene::begun(&["a"]).asks_for_volumes();
    let switched = |mut scene: Scene| {
        scene.observed.disks.get_mut("b").unwrap().owned = false;
        scene
    };
    let formed = || switched(Scene::formed(&["a", "b", "c"]).durable());
    for scene in [begun(), formed()] {
        let [owner] = &owners(&scene)[..] else {
            panic!("{:?}", scene.writes());
        };
        assert_eq!(owner[0]["uid"], "uid");
        let owners = owners(&retains(scene));
        assert!(!owners.is_empty() && owners.iter().all(Value::is_null));
    }
    // A hibernated cluster has no member list. The operator nevertheless removes the owner references of retained PVCs.
    let mut hibernated = formed();
    hibernated.desired.hibernate = true;
    assert_eq!(owners(&hibernated), Vec::<Value>::new());
    assert_eq!(owners(&retains(hibernated)), [Value::Null]);
}

#[test]
fn invariant_35_retained_pvcs_record_voters_and_tls_settings() {
    let labels = |scene: &Scene| -> Vec<(String, Option<RetentionNotes>)> {
        let label = |write| match write {
            Write::LabelDisk(label) => Some((label.member, label.retention)),
            other => panic!("{other:?}"),
        };
        scene.writes().into_iter().filter_map(label).collect()
    };
    let all = |notes: RetentionNotes| -> Vec<(String, Option<RetentionNotes>)> {
        let each = |member: &str| (member.to_owned(), Some(notes.clone()));
        ["a", "b", "c"].map(each).into()
    };
    let mut scene = three();
    assert_eq!(labels(&scene), all(notes()));
    for disk in scene.observed.disks.values_mut() {
        disk.retention = notes();
    }
    assert!(labels(&scene).is_empty());
    scene.desired.object.spec.deletion_policy = None;
    assert_eq!(labels(&scene), all(RetentionNotes::default()));
}

/// The operator removes a member from the lists of voters on the PVCs before it deletes the volume of this member.
#[test]
fn volume_of_removed_member_is_deleted_after_voters_are_recorded() {
    let deletes = |scene: &Scene| scene.writes().contains(&delete_disk("d"));
    let mut scene = three().with_leftover_disk("d");
    assert!(!deletes(&scene));
    for disk in scene.observed.disks.values_mut() {
        disk.retention = notes();
    }
    assert!(deletes(&scene));
}

#[test]
fn recreated_cluster_continues_with_volumes_of_quorum() {
    let continued = Some(("token".to_owned(), Some(CLUSTER)));
    assert_eq!(recorded(&with_volumes(&["a", "b", "c"])), continued);
    assert_eq!(recorded(&with_volumes(&["a", "c"])), continued);
    // The volumes are used whatever deletion policy the new EtcdCluster has.
    let mut deletes = with_volumes(&["a", "b", "c"]);
    deletes.desired.object.spec.deletion_policy = None;
    assert_eq!(recorded(&deletes), continued);
    // Without a list of voters, the operator cannot know whether volumes are missing, so etcd decides about the quorum.
    let mut unknown = with_volumes(&["a"]);
    unknown.observed.disks.get_mut("a").unwrap().retention = RetentionNotes::default();
    assert_eq!(recorded(&unknown), continued);
}

#[test]
fn invariant_36_members_do_not_start_without_volumes_of_quorum() {
    let lost = with_volumes(&["a", "b", "c"]).volume_lost("b");
    let deleted = with_volumes(&["a", "b"]).claim_deleted("b");
    for (scene, missing) in [
        (with_volumes(&["a"]), "b, c"),
        (lost.volume_lost("c"), "b, c"),
        (deleted, "b, c"),
    ] {
        assert_eq!(recorded(&scene), None);
        let text = problem(&scene);
        for words in [missing, "etcd.database.coreos.com/voters-", "EtcdRestore"] {
            assert!(text.contains(words), "{text}");
        }
    }
}

#[test]
fn recreated_cluster_waits_for_pods_of_deleted_cluster() {
    let mut scene = with_volumes(&["a", "b", "c"]);
    scene.observed.strangers = vec!["pod a".to_owned()];
    assert_eq!(recorded(&scene), None);
    assert_eq!(scene.waits(), [Reason::StrangersPresent]);
    // Pods of this EtcdCluster prove that the EtcdCluster was not deleted.
    let mut forgotten = three();
    forgotten.observed.strangers = vec!["pod x".to_owned()];
    (forgotten.observed.intent, forgotten.observed.cluster_id) = (None, None);
    assert!(recorded(&forgotten).is_some());
}

#[test]
fn invariant_36_no_member_starts_on_volume_of_earlier_cluster() {
    let marks = |scene: &Scene| -> Vec<String> {
        let mark = |write| match write {
            Write::NoteRemoval { member, .. } => Some(member),
            _ => None,
        };
        scene.writes().into_iter().filter_map(mark).collect()
    };
    assert_eq!(marks(&recovered()), Vec::<String>::new());
    let mut scene = retains(recovered());
    assert_eq!(marks(&scene), ["a", "b"]);
    // Until `a` and `b` are marked as volumes of an earlier cluster, the operator cannot know which cluster is newer.
    assert_eq!(recorded(&recreated(scene.clone())), None);
    assert!(problem(&recreated(scene.clone())).contains("do not identify it"));
    for member in ["a", "b"] {
        let disk = scene.observed.disks.get_mut(member).unwrap();
        disk.removal = Some(Removal::ByOthers {
            since: at(1000),
            majority: false,
        });
    }
    assert_eq!(marks(&scene), Vec::<String>::new());
    let newest = Some(("new".to_owned(), Some(NEW)));
    assert_eq!(recorded(&recreated(scene)), newest);
}
