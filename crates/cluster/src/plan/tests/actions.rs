//! Tests that the planner's actions contain the right requests.

use kube::ResourceExt;
use member::{OperatorImage, ResourcesPatch};
use serde_json::{Value, json};

use crate::action::{Action, Change, EtcdCall, Object, Patch, Request};
use crate::plan::tests::scene::{CLUSTER, Scene, creates_pod};
use crate::plan::tests::under_way::under_way;
use crate::plan::{Draft, Label, SHORTLY, Start, State, actions};
use crate::reason::Reason;
use crate::snapshot::{Role, Seen};

fn three() -> Scene {
    Scene::formed(&["a", "b", "c"]).durable()
}

fn start(durable: bool) -> Start {
    Start {
        member: "n".into(),
        state: State::OnDisk,
        initial: ["n".to_owned()].into(),
        role: Role::Voter,
        durable,
        version: "3.6.16".into(),
        token: "token".into(),
        cluster_id: Some(CLUSTER),
    }
}

fn has_init_container(action: &Action) -> bool {
    let Request::Create(Object::Pod(pod)) = &action.request else {
        return false;
    };
    let spec = pod.spec.as_ref();
    spec.is_some_and(|spec| spec.init_containers.is_some())
}

#[test]
fn planner_returns_equal_plans_for_equal_input() {
    for scene in [
        Scene::nothing(3),
        Scene::begun(&["a", "b", "c"]),
        three().without_pod("b").size(5),
        under_way(),
    ] {
        assert_eq!(scene.built(), scene.built());
    }
}

/// Two phases may each request a change of the members, because no phase reads the actions of another phase.
#[test]
fn invariant_2_plan_keeps_only_first_of_two_member_changes() {
    let scene = three();
    let phase = |member: &str| {
        let mut phase = Draft::new(scene.build());
        phase.change = Some(Change {
            chain: vec![scene.build().add_member(member, true)],
            via: vec!["a".to_owned()],
            planned_from: scene.observed.members.known().unwrap().clone(),
        });
        phase.problem(Reason::InvalidSpec, "both phases report their change");
        phase.requeue = SHORTLY;
        phase
    };
    let mut plan = phase("d");
    plan.join(phase("e"));
    assert_eq!(plan.change, phase("d").change);
    assert_eq!((plan.problems.len(), plan.requeue), (1, SHORTLY));
}

/// Without the operator's image, the seed of a recovery cannot start. The plan therefore does not set the annotation
/// `started` on the seed's Service (invariant 6).
#[test]
fn recovery_seed_needs_known_operator_image() {
    let mut scene = under_way();
    scene.observed.operator_image = Seen::Unknown("set --operator-image".into());
    let plan = scene.built();
    let problems = plan.problems.iter();
    let mut problems = problems.filter(|problem| problem.reason == Reason::OperatorImageUnknown);
    assert!(problems.any(|problem| problem.message.contains("--operator-image")));
    let actions = || plan.step.chains.iter().flatten();
    assert!(actions().all(|action| action.start.is_none()));
    scene.observed.operator_image = Seen::Known(OperatorImage {
        image: "operator".into(),
        pull_policy: None,
    });
    let plan = scene.built();
    let mut actions = plan.step.chains.iter().flatten();
    let pod = actions.find(|action| creates_pod(action, "n")).unwrap();
    assert!(
        has_init_container(pod),
        "an init container must fetch the data"
    );
    assert!(
        plan.problems
            .iter()
            .all(|one| one.reason != Reason::OperatorImageUnknown)
    );
}

/// Invariants 10 and 11: server-side apply removes each field that a later request of the same field manager omits, so
/// each record must be complete.
#[test]
fn status_record_contains_all_identity_fields_and_resource_version() {
    let mut scene = under_way();
    scene.observed.resource_version = "7".into();
    let Request::Record(record) = scene.build().record_cluster_id(CLUSTER).request else {
        panic!("the action does not write the status");
    };
    assert_eq!(record.over, "7");
    assert_eq!(record.status["clusterID"], json!(CLUSTER.to_string()));
    let intent = scene.observed.intent.as_ref().unwrap();
    assert_eq!(record.status["bootstrap"]["token"], json!(intent.token));
    let recovery = scene.observed.recovery.record.as_ref().unwrap();
    let recorded = &record.status["recovery"];
    assert_eq!(recorded["survivor"], json!(recovery.survivor));
}

#[test]
fn invariant_11_patches_and_deletes_have_preconditions() {
    let precondition = |request: &Request, key: &str| match request {
        Request::Patch(Patch { body, .. }) => body["metadata"][key].clone(),
        Request::Delete(reference) => json!(reference.uid),
        other => panic!("{other:?}"),
    };
    let label = Label {
        member: "a".into(),
        uid: "uid".into(),
        role: Some(Role::Voter),
        token: "token".into(),
        cluster_id: Some(CLUSTER),
        retention: None,
    };
    let scene = three().reserved("n");
    let build = scene.build();
    for action in [
        build.label_pod(&label),
        build.label_volume(&label),
        actions::grow_volume("a", "uid", "2Gi"),
        actions::delete_pod("a", "uid"),
        actions::clear_image_change("a", "uid"),
    ] {
        let of = precondition(&action.request, "uid");
        assert_eq!(of, json!("uid"), "{action:?}");
    }
    let service = &scene.observed.services["n"];
    let mark = build.mark_service_again("n", service).request;
    let version = json!(service.resource_version);
    assert_eq!(precondition(&mark, "resourceVersion"), version);
}

#[test]
fn resize_request_has_annotations_for_acceptance_and_rejection() {
    let noted = |patch: &Patch| patch.body["metadata"]["annotations"].clone();
    let patch = ResourcesPatch {
        resources: json!({ "limits": { "cpu": "2" } }),
        taken: [("taken".to_owned(), Some("yes".to_owned()))].into(),
        refused: [("refused".to_owned(), None)].into(),
    };
    let Request::Resize(resize) = actions::resize_pod("a", "uid", &patch).request else {
        panic!("a resize");
    };
    let container = &resize.patch.body["spec"]["containers"][0];
    assert_eq!(container["resources"]["limits"]["cpu"], json!("2"));
    assert_eq!(noted(&resize.accepted), json!({ "taken": "yes" }));
    assert_eq!(noted(&resize.rejected), json!({ "refused": Value::Null }));
}

/// Invariant 5: the existing volume contains the member's data, even if the new spec requests no volumes.
#[test]
fn recreated_pod_mounts_existing_volume_after_spec_change() {
    let mut scene = three();
    scene.desired.object.spec.pod = None;
    let on_volume = |durable| {
        let action = scene.build().create_pod(&start(durable)).unwrap();
        let Request::Create(Object::Pod(pod)) = action.request else {
            panic!("a pod");
        };
        let volumes = pod.spec.unwrap().volumes.unwrap();
        let claims = volumes.iter();
        let mut claims = claims.filter_map(|volume| volume.persistent_volume_claim.as_ref());
        claims.any(|claim| claim.claim_name == "n")
    };
    assert!(on_volume(true) && !on_volume(false));
}

#[test]
fn added_member_gets_peer_url_of_its_service() {
    let Request::Etcd(EtcdCall::AddMember { url, learner }) =
        three().build().add_member("n", true).request
    else {
        panic!("the action does not add a member to etcd");
    };
    assert!(learner && url.starts_with("http://n."), "{url}");
}

#[test]
fn member_service_is_created_with_started_annotation_and_without_endpoints() {
    let action = three().build().create_service("n", true, true);
    let Request::Create(Object::Service(service)) = &action.request else {
        panic!("{action:?}");
    };
    let mark = service.annotations().get(api::names::ANNOTATION_STARTED);
    assert!(mark.is_some() && member::is_closed(service));
    let part = action.start.as_ref().unwrap();
    assert_eq!(part.marks(), Some("n"));
}
