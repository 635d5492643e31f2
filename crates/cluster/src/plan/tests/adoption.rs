//! Clusters that other software created: the operator adopts their pods, or a new EtcdCluster joins them.

use etcd::{ClusterId, Members};
use runtime::endpoints::EndpointGrants;

use crate::plan::tests::scene::{self, CLUSTER, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Kept, Seen};
use crate::switch::TlsRollout;

/// A cluster of coreos/etcd-operator: no token, no role, no status, and a Service that routes to every pod.
fn left_by_another() -> Scene {
    let mut scene = Scene::formed(&["a", "b", "c"]);
    let observed = &mut scene.observed;
    (observed.intent, observed.cluster_id) = (None, None);
    observed.services.clear();
    (observed.shared.headless, observed.shared.client) = (Kept::Drifted, Kept::Drifted);
    observed.shared.budget = Kept::Missing;
    for pod in observed.pods.values_mut() {
        (pod.token, pod.cluster_id, pod.role) = (None, None, None);
        pod.spec_hash = None;
        pod.difference.pod = Some("the pod was created by another operator".into());
    }
    scene
}

/// The operator has recorded the adopted cluster, and has changed nothing else.
fn taken_over() -> Scene {
    let mut scene = left_by_another();
    let Some(Write::RecordIntent {
        intent, cluster_id, ..
    }) = recorded(&scene)
    else {
        panic!("the plan records no cluster");
    };
    (scene.observed.intent, scene.observed.cluster_id) = (Some(intent), cluster_id);
    scene
}

fn recorded(scene: &Scene) -> Option<Write> {
    let is_record = |write: &Write| matches!(write, Write::RecordIntent { .. });
    scene.writes().into_iter().find(is_record)
}

fn begins(scene: &Scene) -> bool {
    scene::begun(&scene.plan().step.chains).is_some()
}

#[test]
fn invariant_7_adopted_cluster_keeps_its_cluster_id() {
    let Some(Write::RecordIntent {
        intent, cluster_id, ..
    }) = recorded(&left_by_another())
    else {
        panic!("the plan records no cluster");
    };
    assert_eq!(cluster_id, Some(CLUSTER));
    assert_eq!(intent.members, ["a", "b", "c"].map(String::from).into());
    assert_eq!(
        intent.token,
        format!("db-{CLUSTER}"),
        "concurrent operators must record the same token"
    );
}

/// Invariants 1 and 7: pods or volumes without a token may belong to a cluster that does not answer, so the operator
/// does not bootstrap.
#[test]
fn pods_or_volumes_without_token_prevent_bootstrap() {
    let mut silent = left_by_another().silent();
    assert!(silent.writes().is_empty() && !begins(&silent));
    assert!(silent.waits().contains(&Reason::AdoptionWaits));
    // Failed pods prevent the bootstrap too.
    for pod in silent.observed.pods.values_mut() {
        (pod.failed, pod.running, pod.addressed) = (true, false, false);
    }
    assert!(silent.writes().is_empty() && !begins(&silent));
    let mut scene = left_by_another().with_disk("a").silent();
    scene.observed.disks.get_mut("a").unwrap().token = None;
    scene.observed.pods.clear();
    assert!(scene.writes().is_empty() && !begins(&scene));
}

/// Invariant 7: a cluster may have existed, although none of its objects exists any more.
#[test]
fn members_named_in_status_prevent_bootstrap() {
    let mut scene = Scene::nothing(3);
    assert!(begins(&scene));
    scene.observed.recovery.named_before = ["a".to_owned()].into();
    assert!(scene.writes().is_empty() && !begins(&scene));
    assert_eq!(scene.plan().problems[0].reason, Reason::IdentityUnknown);
}

#[test]
fn pods_of_two_etcd_clusters_are_not_adopted() {
    let mut scene = left_by_another();
    if let Some(Seen::Known(status)) = scene.observed.statuses.get_mut("c") {
        status.cluster_id = ClusterId(0xbad);
    }
    assert!(scene.writes().is_empty() && !begins(&scene));
    assert_eq!(scene.plan().problems[0].reason, Reason::IdentityUnknown);
}

#[test]
fn adoption_labels_pods_before_changing_client_service() {
    let scene = taken_over();
    let writes = scene.writes();
    let marks = writes.iter().filter(
        |write| matches!(write, Write::LabelPod(label) if label.cluster_id == Some(CLUSTER)),
    );
    assert_eq!(marks.count(), 3);
    let client = |writes: &[Write]| {
        let mut writes = writes.iter();
        writes.any(|write| matches!(write, Write::ApplyClient { .. }))
    };
    assert!(!client(&writes), "{writes:?}");
    assert_eq!(
        scene.changes(),
        [],
        "no member may be removed before all pods have the cluster token"
    );
    let mut marked = scene;
    let token = marked
        .observed
        .intent
        .as_ref()
        .map(|intent| intent.token.clone());
    for pod in marked.observed.pods.values_mut() {
        (pod.token, pod.cluster_id) = (token.clone(), Some(CLUSTER));
    }
    assert!(marked.writes().contains(&Write::ApplyClient { open: true }));
}

// ---- joining an external cluster ----

/// A new EtcdCluster with an annotation that names an external cluster of three members.
fn joins() -> Scene {
    let mut scene = Scene::formed(&["x", "y", "z"]);
    let observed = &mut scene.observed;
    observed.cluster = "db".into();
    observed.join = vec!["http://x:2379".into()];
    (observed.intent, observed.cluster_id) = (None, None);
    for name in ["x", "y", "z"] {
        let url = format!("http://{name}.ns.svc:2379");
        observed.elsewhere.insert(name.into(), url);
    }
    observed.pods.clear();
    observed.services.clear();
    observed.reported_voters.clear();
    observed.shared.client = Kept::AsMade(false);
    scene
}

/// The operator has recorded the joined cluster. The members `ours` of the EtcdCluster are voters in it.
fn joined(ours: &[&str]) -> Scene {
    let theirs = joins();
    let mut all = vec!["x", "y", "z"];
    all.extend(ours);
    let mut scene = Scene::formed(&all).aged();
    for name in ["x", "y", "z"] {
        scene.observed.pods.remove(name);
        scene.observed.services.remove(name);
    }
    scene.observed.join = theirs.observed.join;
    scene.observed.elsewhere = theirs.observed.elsewhere;
    scene.observed.intent.as_mut().unwrap().members.clear();
    scene.size(3)
}

#[test]
fn invariant_7_joined_cluster_is_recorded_without_bootstrap() {
    let Some(Write::RecordIntent {
        intent, cluster_id, ..
    }) = recorded(&joins())
    else {
        panic!("the plan records no cluster");
    };
    assert_eq!(cluster_id, Some(CLUSTER));
    assert!(
        intent.members.is_empty(),
        "a joined cluster must have no first members"
    );
    let silent = joins().silent();
    assert!(silent.writes().is_empty() && !begins(&silent));
    assert!(silent.waits().contains(&Reason::JoinWaits));
}

fn says(mut scene: Scene, tls: &str) -> Scene {
    scene.observed.tls_rollout = Some(TlsRollout {
        at: serde_json::from_str(tls).unwrap(),
        recorded: false,
        next: None,
        modes: [].into(),
        refused: None,
    });
    scene
}

/// Makes the external members use TLS.
fn with_tls(mut scene: Scene) -> Scene {
    if let Seen::Known(list) = &mut scene.observed.members {
        let urls = list.members.iter_mut().flat_map(|it| &mut it.peer_urls);
        urls.for_each(|url| *url = url.replace("http://", "https://"));
    }
    scene
}

const PLAIN: &str = "null";
const PEERS: &str = r#"{"static":{"member":{"peerSecret":"p"}}}"#;
const CLIENTS: &str = r#"{"static":{"member":{"serverSecret":"s"},"operatorSecret":"o"}}"#;
const GENERATED: &str = r#"{"generated":{}}"#;

#[test]
fn join_waits_until_peer_tls_settings_match() {
    for (theirs, ours, field) in [
        (
            with_tls(joins()),
            PLAIN,
            "spec.TLS.static.member.peerSecret",
        ),
        (
            with_tls(joins()),
            CLIENTS,
            "spec.TLS.static.member.peerSecret",
        ),
        (joins(), PEERS, "remove spec.TLS.static.member.peerSecret"),
        (joins(), GENERATED, "spec.TLS.generated"),
    ] {
        let scene = says(theirs, ours);
        assert!(recorded(&scene).is_none() && !begins(&scene), "{ours}");
        assert!(scene.writes().is_empty(), "{ours}");
        let problems = scene.plan().problems;
        assert_eq!(problems[0].reason, Reason::JoinRefused);
        assert!(problems[0].message.contains(field), "{problems:?}");
    }
    for (theirs, ours) in [
        (with_tls(joins()), PEERS),
        (with_tls(joins()), GENERATED),
        (joins(), PLAIN),
        (joins(), CLIENTS),
    ] {
        assert!(recorded(&says(theirs, ours)).is_some(), "{ours}");
    }
}

/// The TLS settings of the joined cluster, or the spec, may change after the joined cluster was recorded.
#[test]
fn join_adds_no_member_while_peer_tls_settings_differ() {
    let scene = says(with_tls(joined(&[])).reserved("a"), PLAIN);
    assert_eq!(scene.changes(), []);
    let records = |write: &Write| matches!(write, Write::RecordTls { .. });
    assert!(
        !scene.writes().iter().any(records),
        "the plan must not record TLS settings, because the user may still change the spec"
    );
    assert_eq!(scene.plan().problems[0].reason, Reason::JoinRefused);
    let scene = says(with_tls(joined(&[])).reserved("a"), PEERS);
    assert!(matches!(
        scene.changes().as_slice(),
        [Write::AddMember { .. }]
    ));
    // If etcd's list already contains a member of this EtcdCluster, the join continues although the TLS settings
    // differ.
    let late = says(with_tls(joined(&["a"])), PLAIN);
    assert!(late.plan().problems.is_empty());
}

/// Sets the grants that the administrator of a cluster-wide release has given to namespace `team-b`.
fn granted(mut scene: Scene, grants: &[&str]) -> Scene {
    let grants = grants.iter().map(|text| text.parse().unwrap()).collect();
    let by = crate::app::JOINS;
    let grants = EndpointGrants::new("operators", by, grants);
    scene.observed.join_rule = grants.of("team-b");
    scene
}

/// Makes the external members advertise URLs with this host.
fn advertising(mut scene: Scene, host: &str) -> Scene {
    if let Seen::Known(list) = &mut scene.observed.members {
        let theirs = list
            .members
            .iter_mut()
            .filter(|it| "xyz".contains(&it.name));
        theirs.for_each(|it| it.client_urls = vec![format!("http://{}.{host}:2379", it.name)]);
    }
    scene
}

#[test]
fn invariant_28_tenant_join_without_grant_records_nothing() {
    let cases: [(&[&str], &str); 4] = [
        (&[], "ns.svc"),
        (&["team-a=*"], "ns.svc"),
        (&["team-b=x:2380"], "ns.svc"),
        // The endpoint in the annotation has a grant, but etcd's member list names a host without a grant.
        (&["team-b=x", "team-b=*.ns.svc"], "team-a.svc"),
    ];
    for (grants, theirs) in cases {
        let scene = granted(advertising(joins(), theirs), grants);
        assert!(scene.writes().is_empty() && !begins(&scene), "{grants:?}");
        let problems = scene.plan().problems;
        assert_eq!(problems[0].reason, Reason::JoinRefused);
        for part in [
            "etcd.database.coreos.com/join",
            "--join=team-b=",
            "clusters.join",
        ] {
            let text = &problems[0].message;
            let redirected = theirs == "team-a.svc" && part.starts_with("etcd.");
            assert!(text.contains(part) || redirected, "{text}");
        }
    }
    let scene = granted(
        advertising(joins(), "ns.svc"),
        &["team-b=x", "team-b=*.ns.svc"],
    );
    assert!(recorded(&scene).is_some());
}

/// Invariant 28: if the administrator withdraws the grant during the join, the operator changes no member. The members
/// of the EtcdCluster continue to run.
#[test]
fn withdrawn_grant_stops_member_changes_of_join() {
    let all = ["team-b=x", "team-b=*.ns.svc"];
    let began = || advertising(joined(&[]).reserved("a"), "ns.svc");
    assert!(!granted(began(), &all).changes().is_empty());
    assert_eq!(granted(began(), &[]).changes(), []);
    let ends = || advertising(joined(&["a", "b", "c"]).leader("a"), "ns.svc");
    assert_eq!(granted(ends(), &all).changes(), [scene::remove("x")]);
    assert_eq!(granted(ends(), &[]).changes(), []);
    let lost = advertising(joined(&["a", "b", "c"]).durable(), "ns.svc").without_pod("b");
    let lost = granted(lost, &[]);
    assert_eq!(lost.plan().problems[0].reason, Reason::JoinRefused);
    let writes = lost.writes();
    assert!(
        writes.iter().any(|write| scene::makes_pod(write, "b")),
        "{writes:?}"
    );
}

/// Invariant 28: an annotation without effect causes no call of an external endpoint, so it needs no grant.
#[test]
fn join_annotation_without_effect_needs_no_grant() {
    let mut moved = granted(Scene::formed(&["a", "b", "c"]), &[]);
    moved.observed.join = vec!["http://x:2379".into()];
    assert!(
        moved.plan().problems.is_empty(),
        "a cluster that the operator bootstrapped needs no grant"
    );
    moved.observed.intent.as_mut().unwrap().members.clear();
    assert!(
        moved.plan().problems.is_empty(),
        "a cluster without an external member needs no grant"
    );
}

#[test]
fn invariant_16_joined_cluster_with_external_members_is_not_recovered() {
    let mut scene = joined(&["a"]).silent();
    scene.desired.recovery.automatic = true;
    scene.observed.recovery.approval = Some(CLUSTER.to_string());
    for name in ["x", "y", "z", "a"] {
        scene.observed.reported_voters.insert(name.into());
    }
    scene.observed.recovery.unavailable_since = Some(jiff::Timestamp::UNIX_EPOCH);
    let recovers = |write: &Write| matches!(write, Write::RecordRecovery(_));
    assert!(!scene.writes().iter().any(recovers));
    assert!(scene.waits().contains(&Reason::JoinWaits));
}

#[test]
fn learners_join_before_external_members_are_removed() {
    let scene = joined(&[]).reserved("a");
    assert_eq!(
        scene.changes(),
        [Write::AddMember {
            member: "a".into(),
            learner: true
        }],
        "the plan must add one learner at a time, because the limit of the external members is unknown"
    );
    assert_eq!(joined(&["a", "b"]).changes(), []);
}

/// A user deleted the EtcdCluster without its pods and created it again. The token of the pods contains the cluster ID,
/// as after an adoption or a join.
#[test]
fn recreated_cluster_with_external_members_is_recorded_as_joined() {
    let mut scene = joined(&["a"]);
    let token = format!("db-{CLUSTER}");
    for pod in scene.observed.pods.values_mut() {
        pod.token = Some(token.clone());
    }
    (scene.observed.intent, scene.observed.cluster_id) = (None, None);
    let members = |scene: &Scene| match recorded(scene) {
        Some(Write::RecordIntent { intent, .. }) => intent.members.len(),
        _ => panic!("the plan records no cluster"),
    };
    assert_eq!(members(&scene), 0);
    // The token below has the format of this operator, so the operator bootstrapped the cluster, and the join
    // annotation has no effect.
    for pod in scene.observed.pods.values_mut() {
        pod.token = Some("db-0123456789abcdef".to_owned());
    }
    assert_eq!(members(&scene), 1);
}

/// Invariant 18: the version of a joining member must be compatible with the versions of the existing members.
#[test]
fn joining_member_starts_with_version_compatible_with_external_members() {
    let started = |theirs: &str, wanted: &str| {
        let mut scene = joined(&[]).version(theirs).reserved("a").added("a");
        (scene.desired.version, scene.desired.image) = (wanted.into(), format!("etcd:v{wanted}"));
        let mut writes = scene.writes().into_iter();
        writes.find_map(|write| match write {
            Write::CreatePod(start) => Some(start.version),
            _ => None,
        })
    };
    for (theirs, wanted, starts) in [
        ("3.6.16", "3.5.35", "3.6.16"),
        ("3.5.35", "3.6.16", "3.6.16"),
        ("3.4.40", "3.6.16", "3.4.40"),
        ("3.6.11", "3.6.16", "3.6.16"),
    ] {
        assert_eq!(started(theirs, wanted).as_deref(), Some(starts), "{theirs}");
    }
}

#[test]
fn invariant_3_external_members_are_removed_one_by_one() {
    let scene = joined(&["a", "b", "c"]);
    assert_eq!(
        scene.observed.leader(),
        Some(etcd::MemberId(u64::from(b'x')))
    );
    assert!(matches!(
        scene.changes().as_slice(),
        [Write::MoveLeader { from, to, .. }] if from == "x" && ["a", "b", "c"].contains(&to.as_str())
    ));
    assert_eq!(scene.clone().leader("a").changes(), [scene::remove("x")]);
    // While a member of this EtcdCluster is down, the operator removes no external member.
    assert_eq!(scene.leader("a").down("b").changes(), []);
}

#[test]
fn external_members_are_kept_without_join_annotation() {
    let mut scene = joined(&["a", "b", "c"]).leader("a");
    scene.observed.join.clear();
    let goes =
        |write: &Write| matches!(write, Write::Remove { member, .. } if "xyz".contains(member));
    assert!(!scene.changes().iter().any(goes));
}

#[test]
fn member_list_of_another_cluster_changes_nothing() {
    let mut scene = joined(&["a", "b", "c"]).leader("a");
    scene.observed.members = Seen::Known(Members {
        cluster_id: ClusterId(0xbad),
        members: Vec::new(),
    });
    assert_eq!(scene.changes(), []);
    assert_eq!(scene.plan().problems[0].reason, Reason::ForeignCluster);
}
