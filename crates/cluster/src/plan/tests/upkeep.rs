//! Tests of full databases, of defragmentation, and of members with corrupt data.

use api::cluster::{
    Defragmentation, DefragmentationCause as Cause, DefragmentationStatus, MemberDefragmentation,
};
use etcd::{Alarm, AlarmKind, MemberId, Status};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::plan::tests::scene::{self, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::Seen;
use crate::upkeep::Call;

const QUOTA: i64 = 100 << 20;

fn status(scene: &mut Scene, member: &str, change: impl FnOnce(&mut Status)) {
    match scene.observed.statuses.get_mut(member) {
        Some(Seen::Known(status)) => change(status),
        other => panic!("{member} does not answer: {other:?}"),
    }
}

/// Three members, of which `a` is the leader. `size` and `used` are the MiB of each database and of the data in it.
fn three(size: i64, used: i64) -> Scene {
    let mut scene = Scene::formed(&["a", "b", "c"]).durable();
    scene.desired.upkeep.quota = QUOTA;
    for member in ["a", "b", "c"] {
        sized(&mut scene, member, size, used);
    }
    scene
}

fn sized(scene: &mut Scene, member: &str, size: i64, used: i64) {
    status(scene, member, |status| {
        (status.db_size, status.db_size_in_use) = (size << 20, used << 20);
        status.revision = 5000;
    });
}

fn alarmed(mut scene: Scene, kind: AlarmKind, id: u64) -> Scene {
    let alarm = Alarm {
        member: MemberId(id),
        kind,
    };
    scene.observed.upkeep.alarms = Seen::Known(vec![alarm]);
    scene
}

fn full(size: i64, used: i64) -> Scene {
    alarmed(three(size, used), AlarmKind::NoSpace, b'a'.into())
}

fn time(seconds: i64) -> Time {
    Time(Timestamp::from_second(seconds).unwrap())
}

fn run(cause: Cause, members: &[(&str, bool)]) -> DefragmentationStatus {
    let one = |&(name, done): &(&str, bool)| MemberDefragmentation {
        name: name.to_owned(),
        start_time: time(900),
        completion_time: done.then(|| time(910)),
        size_before: QUOTA,
        size_after: done.then_some(QUOTA / 2),
        error: None,
    };
    DefragmentationStatus {
        cause,
        start_time: time(900),
        completion_time: None,
        compacted_revision: None,
        members: members.iter().map(one).collect(),
    }
}

fn under_way(mut scene: Scene, members: &[(&str, bool)]) -> Scene {
    scene.observed.upkeep.record = Some(run(Cause::NoSpace, members));
    scene
}

fn by_share(mut scene: Scene, percent: i64) -> Scene {
    scene.desired.upkeep.defragmentation = Some(Defragmentation {
        free_percent: Some(percent),
        min_free_bytes: Some(1 << 20),
        ..Defragmentation::default()
    });
    scene
}

fn record(scene: &Scene) -> Option<DefragmentationStatus> {
    scene.writes().into_iter().find_map(|write| match write {
        Write::RecordDefragmentation { record, .. } => Some(*record),
        _ => None,
    })
}

fn requests(scene: &Scene) -> Vec<String> {
    let writes = scene.drained().writes().into_iter();
    let requests = writes.filter_map(|write| match write {
        Write::Defragment { member, .. } => Some(member),
        _ => None,
    });
    requests.collect()
}

fn problem(scene: &Scene) -> String {
    let problems = scene.plan().problems;
    problems
        .first()
        .map(|problem| format!("{}: {}", problem.reason, problem.message))
        .unwrap_or_default()
}

// ---- repair of a full database ----

#[test]
fn full_database_with_free_space_is_defragmented() {
    let scene = full(100, 20);
    let record = record(&scene).unwrap();
    assert_eq!(record.cause, Cause::NoSpace);
    assert_eq!(record.members, []);
    assert!(
        problem(&scene).contains("the operator frees space"),
        "{}",
        problem(&scene)
    );
}

#[test]
fn full_database_without_free_space_is_reported_with_remedy() {
    let scene = full(100, 99);
    assert_eq!(scene.writes(), []);
    assert!(
        problem(&scene).contains("quotaBackendBytes"),
        "{}",
        problem(&scene)
    );
    let mut left = full(100, 20);
    left.desired.upkeep.only_reports = true;
    assert_eq!(left.writes(), []);
    assert!(problem(&left).contains("policy is Report"));
}

#[test]
fn full_database_is_compacted_if_spec_sets_retained_revisions() {
    let mut scene = full(100, 99);
    scene.desired.upkeep.keep_revisions = Some(1000);
    let writes = scene.writes();
    assert!(
        matches!(&writes[0], Write::Compact { revision: 4000, .. }),
        "{writes:?}"
    );
    assert_eq!(record(&scene).unwrap().compacted_revision, Some(4000));
    // The operator starts no second run, because revision 4000 is already compacted and no space is free.
    let mut over = run(Cause::NoSpace, &[]);
    over.compacted_revision = Some(4000);
    over.completion_time = Some(time(100));
    scene.observed.upkeep.record = Some(over);
    assert_eq!(scene.writes(), []);
    assert!(problem(&scene).contains("no free space"));
}

#[test]
fn defragmentation_is_delayed_after_run_that_freed_no_space() {
    let mut scene = full(100, 20);
    let mut over = run(Cause::NoSpace, &[("b", true)]);
    over.members[0].size_after = Some(QUOTA);
    over.completion_time = Some(time(990));
    scene.observed.upkeep.record = Some(over.clone());
    assert_eq!(scene.writes(), []);
    assert!(scene.waits().contains(&Reason::DefragmentationWaits));
    // The operator starts no other run, because the last run ended 100 s ago and another defragmentation could free no
    // more space.
    (over.members[0].size_before, over.members[0].size_after) = (25 << 20, Some(25 << 20));
    over.completion_time = Some(time(900));
    scene.observed.upkeep.record = Some(over.clone());
    assert_eq!(scene.writes(), []);
    over.completion_time = Some(time(100));
    scene.observed.upkeep.record = Some(over);
    assert!(record(&scene).is_some());
}

/// After a compaction, a member reports the freed space as used until the next write. A full database accepts no write,
/// so the operator defragments one member as a test.
#[test]
fn full_database_is_defragmented_after_compaction() {
    let mut scene = full(100, 100);
    let mut compacted = run(Cause::NoSpace, &[]);
    compacted.compacted_revision = Some(5000);
    compacted.start_time = time(995);
    scene.observed.upkeep.record = Some(compacted.clone());
    assert_eq!(scene.writes(), []);
    assert_eq!(
        scene.waits(),
        [Reason::Compacting],
        "the operator must wait, because the members may soon report the freed space"
    );
    compacted.start_time = time(980);
    scene.observed.upkeep.record = Some(compacted.clone());
    assert_eq!(record(&scene).unwrap().members[0].name, "b");
    // The operator does not defragment `a` and `c`, because the defragmentation of `b` has freed no space.
    compacted.members = run(Cause::NoSpace, &[("b", true)]).members;
    scene.observed.upkeep.record = Some(compacted.clone());
    assert!(record(&scene).unwrap().completion_time.is_some());
    // The operator defragments `c` next, because the current status of `b` shows free space, although `size_after` in
    // the record does not.
    compacted.members[0].size_after = Some(QUOTA);
    scene.observed.upkeep.record = Some(compacted.clone());
    sized(&mut scene, "b", 20, 20);
    assert_eq!(record(&scene).unwrap().members[1].name, "c");
    // The operator skips `a` and `c` and completes the run, because both members already have free space.
    let mut roomy = scene.clone();
    for member in ["a", "c"] {
        sized(&mut roomy, member, 50, 50);
    }
    assert!(record(&roomy).unwrap().completion_time.is_some());
    // The operator defragments each member at most once in a run.
    compacted.members = run(Cause::NoSpace, &[("a", true), ("b", true), ("c", true)]).members;
    scene.observed.upkeep.record = Some(compacted.clone());
    assert!(record(&scene).unwrap().completion_time.is_some());
    // After a compaction, only a run for a full database defragments a member as a test. This scheduled run ends.
    (compacted.cause, compacted.members) = (Cause::Schedule, Vec::new());
    scene.observed.upkeep.record = Some(compacted);
    assert!(record(&scene).unwrap().completion_time.is_some());
}

#[test]
fn compaction_is_delayed_after_run_that_freed_no_space() {
    let mut scene = full(100, 99);
    scene.desired.upkeep.keep_revisions = Some(0);
    let mut over = run(Cause::NoSpace, &[("b", true)]);
    over.members[0].size_after = Some(QUOTA);
    over.compacted_revision = Some(4999);
    let mut ended = |start: i64, end: i64| {
        over.start_time = time(start);
        over.completion_time = Some(time(end));
        scene.observed.upkeep.record = Some(over.clone());
        record(&scene).is_some()
    };
    assert!(
        !ended(925, 945),
        "the pause must be three times the 20 s of the defragmentation"
    );
    assert!(ended(915, 935));
    assert!(!ended(970, 971), "the pause is at least 30 s");
    assert!(ended(100, 400), "the pause is at most ten minutes");
}

#[test]
fn invariant_19_alarm_is_disarmed_when_every_database_has_space() {
    let scene = full(50, 50);
    let writes = scene.writes();
    assert!(matches!(&writes[..], [Write::Disarm { .. }]), "{writes:?}");
    let mut one = full(50, 50);
    sized(&mut one, "c", 95, 50);
    assert!(
        !one.writes()
            .iter()
            .any(|write| matches!(write, Write::Disarm { .. }))
    );
    let mut silent = full(50, 50);
    silent = silent.down("b");
    assert_eq!(
        silent.writes(),
        [],
        "the alarm must stay, because the member that does not answer may have a full database"
    );
}

// ---- defragmentation of one member at a time ----

/// Invariants 10 and 19: the operator records each member before it sends the call, and defragments the leader last.
#[test]
fn invariant_19_followers_are_defragmented_one_by_one_then_leader() {
    let first = under_way(full(100, 20), &[]);
    assert_eq!(record(&first).unwrap().members[0].name, "b");
    assert_eq!(
        requests(&first),
        Vec::<String>::new(),
        "the member must be recorded before the request"
    );

    let recorded = under_way(full(100, 20), &[("b", false)]);
    assert_eq!(requests(&recorded), ["b"]);
    assert_eq!(record(&recorded), None);

    let mut running = recorded.clone();
    running.observed.upkeep.call = Some(Call::Running);
    assert_eq!(running.writes(), []);
    assert_eq!(running.waits(), [Reason::Defragmenting]);

    let mut done = recorded;
    done.observed.upkeep.call = Some(Call::Done);
    sized(&mut done, "b", 20, 20);
    let written = record(&done).unwrap();
    assert_eq!(written.members[0].size_after, Some(20 << 20));
    assert!(written.members[0].completion_time.is_some());

    let mut leader = under_way(full(100, 20), &[("b", true), ("c", true)]);
    for member in ["b", "c"] {
        sized(&mut leader, member, 20, 20);
    }
    assert!(matches!(&leader.changes()[..], [Write::MoveLeader { from, .. }] if from == "a"));
    assert_eq!(leader.writes(), []);
    let moved = leader.leader("b");
    assert_eq!(record(&moved).unwrap().members[2].name, "a");
}

#[test]
fn invariant_19_defragmentation_waits_while_member_is_down_or_slow() {
    let begun = || under_way(full(100, 20), &[]);
    let down = begun().down("c");
    assert_eq!(down.writes(), []);
    let joins = begun().learner("d").size(4).behind("d");
    assert_eq!(record(&joins), None);
    let mut slow = begun();
    slow.observed.upkeep.slow = true;
    assert_eq!(slow.writes(), []);
    for scene in [down, joins, slow] {
        assert!(
            scene.waits().contains(&Reason::DefragmentationWaits),
            "{:?}",
            scene.waits()
        );
    }
}

/// Regression: between the record and the call, the leadership may move, or a member may fail.
#[test]
fn invariant_19_recorded_defragmentation_is_deferred_if_member_fails_or_leads() {
    let recorded = || under_way(full(100, 20), &[("b", false)]);
    for scene in [recorded().leader("b"), recorded().down("c")] {
        assert_eq!(requests(&scene), Vec::<String>::new());
        assert_eq!(record(&scene).unwrap().members, []);
    }
}

/// Invariants 3 and 19: a member that is being defragmented does not count as healthy for the quorum.
#[test]
fn invariant_19_no_member_is_removed_during_defragmentation() {
    let mut busy = under_way(full(100, 20).claim_deleted("c"), &[("b", false)]);
    busy.observed.upkeep.call = Some(Call::Running);
    assert_eq!(busy.changes(), []);
    assert!(
        busy.waits().contains(&Reason::QuorumAtRisk),
        "{:?}",
        busy.waits()
    );
}

#[test]
fn failed_defragmentation_of_member_ends_the_run() {
    let in_progress = || under_way(full(100, 20), &[("b", false)]);
    let mut failed = in_progress();
    failed.observed.upkeep.call = Some(Call::Failed("no room".into()));
    let written = record(&failed).unwrap();
    assert_eq!(written.members[0].error.as_deref(), Some("no room"));
    let died = in_progress().not_running("b").terminating("b");
    let written = record(&died).unwrap();
    assert!(written.members[0].error.is_some());
    let mut after = full(100, 20);
    after.observed.upkeep.record = Some(written);
    assert!(record(&after).unwrap().completion_time.is_some());
}

/// From etcd 3.6 on, a member does not return its status during its defragmentation.
#[test]
fn defragmentation_waits_for_member_that_does_not_answer() {
    let in_progress = || under_way(full(100, 20), &[("b", false)]).down("b");
    for call in [None, Some(Call::Running), Some(Call::Done)] {
        let mut scene = in_progress();
        scene.observed.upkeep.call = call;
        assert_eq!((record(&scene), scene.changes()), (None, vec![]));
        assert!(scene.waits().contains(&Reason::Defragmenting));
    }
    let mut ever = in_progress();
    ever.observed.upkeep.record.as_mut().unwrap().members[0].start_time = time(0);
    let written = record(&ever).unwrap();
    assert_eq!(
        written.members[0].error.as_deref(),
        Some("the member stopped answering")
    );
}

#[test]
fn single_member_is_defragmented_without_leadership_transfer() {
    let mut scene = Scene::formed(&["a"]).durable();
    scene.desired.upkeep.quota = QUOTA;
    sized(&mut scene, "a", 100, 20);
    let scene = under_way(scene, &[]);
    assert_eq!(record(&scene).unwrap().members[0].name, "a");
}

// ---- defragmentation by share of free bytes and by schedule ----

#[test]
fn high_share_of_free_bytes_starts_defragmentation() {
    assert_eq!(three(90, 20).writes(), []);
    let mut scene = by_share(three(90, 80), 50);
    assert_eq!(scene.writes(), []);
    sized(&mut scene, "b", 90, 20);
    assert_eq!(record(&scene).unwrap().cause, Cause::Threshold);
    // The operator begins no second run within an hour, even if the share of free bytes is high.
    let mut over = run(Cause::Threshold, &[("b", true)]);
    over.completion_time = Some(time(950));
    scene.observed.upkeep.record = Some(over);
    assert_eq!(scene.writes(), []);
}

#[test]
fn defragmentation_runs_once_per_scheduled_time() {
    let mut scene = three(90, 20);
    // All scenes take place at 00:16:40 on 1 January 1970, which is shortly after the scheduled time 00:15.
    scene.desired.upkeep.defragmentation = Some(Defragmentation {
        schedule: Some("15 0 * * *".into()),
        ..Defragmentation::default()
    });
    assert_eq!(record(&scene).unwrap().cause, Cause::Schedule);
    let mut over = run(Cause::Schedule, &[("b", true)]);
    over.completion_time = Some(time(950));
    scene.observed.upkeep.record = Some(over);
    assert_eq!(
        scene.writes(),
        [],
        "the defragmentation for this scheduled time must not begin again"
    );
    let mut nothing = three(90, 90);
    nothing.desired = scene.desired;
    assert_eq!(
        nothing.writes(),
        [],
        "no space can be freed, so no defragmentation may start"
    );
}

// ---- replacement of corrupt members ----

#[test]
fn corrupt_member_is_replaced_before_alarm_is_disarmed() {
    let scene = alarmed(three(1, 1), AlarmKind::Corrupt, b'b'.into());
    assert_eq!(scene.changes(), [scene::remove("b")]);
    assert!(
        problem(&scene).contains("the operator replaces this member"),
        "{}",
        problem(&scene)
    );
    assert!(
        !scene
            .writes()
            .iter()
            .any(|write| matches!(write, Write::Disarm { .. }))
    );

    let removed = Scene::formed(&["a", "c"]).durable().size(3);
    let removed = alarmed(removed, AlarmKind::Corrupt, b'b'.into());
    let writes = removed.writes();
    assert!(
        writes
            .iter()
            .any(|write| matches!(write, Write::Disarm { .. })),
        "{writes:?}"
    );
    let leader = alarmed(three(1, 1), AlarmKind::Corrupt, b'a'.into());
    assert!(matches!(&leader.changes()[..], [Write::MoveLeader { .. }]));
}

#[test]
fn invariant_3_corrupt_member_is_kept_if_correct_data_is_unknown() {
    let down = alarmed(three(1, 1), AlarmKind::Corrupt, b'b'.into()).down("c");
    assert_eq!(down.changes(), []);
    let unknown = alarmed(three(1, 1), AlarmKind::Corrupt, 0);
    assert_eq!((unknown.changes(), unknown.writes()), (vec![], vec![]));
    assert!(problem(&unknown).contains("not which data is correct"));
    let mut most = three(1, 1);
    let alarm = |id: u8| Alarm {
        member: MemberId(id.into()),
        kind: AlarmKind::Corrupt,
    };
    most.observed.upkeep.alarms = Seen::Known(vec![alarm(b'a'), alarm(b'b')]);
    assert_eq!(most.changes(), []);
    let pair = alarmed(
        Scene::formed(&["a", "b"]).durable().reserved("d"),
        AlarmKind::Corrupt,
        b'b'.into(),
    );
    assert_eq!(pair.changes(), []);
    assert!(problem(&pair).contains("restore a backup"));
}
