//! Rolling updates. The operator changes running members one at a time: first the followers, and then the leader, after
//! it has transferred the leadership.
//!
//! For a new image, the operator patches the running pod, and the kubelet restarts the container in place. Other
//! changes need a new pod. A member without a volume is replaced: a learner joins first ([`outdated`]).
//!
//! The operator changes the next member only when all members serve, run the version of their pods, have caught up and
//! have the same data.

use std::time::Duration;

use api::cluster::ClusterChange;
use api::version::EtcdVersion;
use api::version::path::UpgradeDirection;
use etcd::MemberId;

use crate::action::Action;
use crate::clock::age;
use crate::plan::actions::{self, Builder};
use crate::plan::change::{decide, move_leader};
use crate::plan::compared::holds_the_same;
use crate::plan::versions::{self, Course, Downgrade};
use crate::plan::view::{Data, Fate, MemberState, View};
use crate::plan::{BLIND, Draft, Explanation, SHORTLY, backed_up, drain, pinned, raft_log};
use crate::reason::Reason;
use crate::snapshot::{Cause, Changed, Desired, Disk, Ending, Intent, Observed, Pod, Trouble};

/// A member that lags by at most this number of log entries has caught up. Clients write while the operator calls one
/// member after another, so the reported indexes always differ.
const CAUGHT_UP: u64 = 500;
/// Time for which a comparison of the members' data is valid.
const COMPARED: Duration = Duration::from_secs(5);
/// After this time, etcd's leader has certainly raised the cluster version, if all members run a later release.
const GOES_OVER: Duration = Duration::from_secs(10);
/// After this time, the operator reports that the rolling update waits for a member to recover.
const SLOW: Duration = Duration::from_mins(1);

/// The change that a member's pod needs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Need {
    /// The pod needs another image, for this version.
    Image(EtcdVersion),
    /// The member needs a new pod for this version. The text is the reason.
    Pod(EtcdVersion, String),
}

impl Need {
    fn version(&self) -> &EtcdVersion {
        match self {
            Self::Image(version) | Self::Pod(version, _) => version,
        }
    }
}

fn need(desired: &Desired, course: &Course, member: &MemberState) -> Option<Need> {
    let pod = member.pod.filter(|pod| pod.stays())?;
    if member.data != Data::There {
        return None;
    }
    let version = course.target.clone().or_else(|| versions::made_for(pod))?;
    let wanted = desired.object.spec.image_for(&version);
    let other_image = wanted.is_some_and(|image| image != pod.image);
    let fits = versions::fits(pod, &version);
    // If other settings of the pod change too, the operator first patches the new image into the existing pod: this
    // patch records the previous version on the pod, for a rollback. A new pod has no such record, and the record on
    // its volume is valid only until the new image has started (invariant 30).
    let other_release = versions::made_for(pod).is_some_and(|it| it.minor() != version.minor());
    let image_first = other_image && (!pod.durable || other_release && fits);
    if let Some(why) = &pod.difference.pod
        && !image_first
    {
        return Some(Need::Pod(version, why.clone()));
    }
    if !other_image {
        return None;
    }
    if fits {
        return Some(Need::Image(version));
    }
    let why = format!("etcd {version} does not know all settings of the existing pod");
    Some(Need::Pod(version, why))
}

/// Changes the next member, or reports why the change waits. `busy`: another phase changes the members. The operator
/// then repairs only broken members, because the other phase may wait for them.
pub(super) fn next(view: &View, busy: bool, draft: &mut Draft) {
    let (desired, observed, now) = draft.build.inputs();
    let course = versions::course(desired, observed);
    if let Some(why) = &course.refused {
        let text = format!("the version is not changed: {why}");
        draft.problem(Reason::VersionRefused, text);
    }
    let needs: Vec<(&MemberState, Need)> = view
        .members
        .iter()
        .filter_map(|member| Some((member, need(desired, &course, member)?)))
        .collect();
    let downgrade = versions::downgrade(&course, observed);
    stopped(view, draft);
    raft_log::forget(&course, view, draft);
    let upgrades = needs.iter().any(changes_version);
    if !upgrades {
        backed_up::end(&ClusterChange::Upgrade, draft);
    }
    let waits = pinned::stops(view, draft);
    if downgrade == Downgrade::TakeBack {
        requests_downgrade(view, &downgrade, draft);
        return;
    }
    if waits || needs.is_empty() || repair(&course, &needs, draft) || busy || !at_rest(view, draft)
    {
        return;
    }
    // Invariant 32: if the spec requires a recent backup, no member changes its version before this backup exists.
    let what = format!("the change to etcd {}", desired.version);
    if upgrades && !backed_up::is_backed_up(&ClusterChange::Upgrade, &what, draft) {
        return;
    }
    if requests_downgrade(view, &downgrade, draft) {
        return;
    }
    if course.direction == Some(UpgradeDirection::Up) && !has_gone_over(view, draft) {
        return;
    }
    let by_turn = |(member, _): &&(&MemberState, Need)| {
        (Some(member.id()) == view.leader, member.name.clone())
    };
    let in_place = || needs.iter().filter(|(member, need)| touches(member, need));
    if !raft_log::is_prepared(
        in_place().map(|(member, need)| (*member, need.version())),
        draft,
    ) {
        return;
    }
    let Some((member, need)) = in_place().min_by_key(by_turn) else {
        return;
    };
    // A recently drained member needs no new comparison, because the operator compared the data of all members before
    // it drained this member.
    let compared = drain::is_out_since(now, member, COMPARED);
    if !compared && !holds_the_same(view, draft) {
        return;
    }
    if !drain::is_drained(view, member, draft) {
        return;
    }
    // Invariant 18: the operator changes the leader last. The leader first transfers its leadership, if possible to a
    // member that was already changed.
    if view.leader == Some(member.id()) {
        let able = view.voters().filter(|next| next.id() != member.id());
        let waits = |next: &&MemberState| needs.iter().any(|(other, _)| other.id() == next.id());
        if let Some(next) = able.min_by_key(waits) {
            move_leader(view, member, next, draft);
            return;
        }
    }
    // If the pod still has the annotation about its last image change, `stopped` deletes the annotation in this plan,
    // and the next change waits for the next plan.
    if member.pod.is_none_or(|pod| pod.changed.is_none()) {
        change(member, need, draft);
    }
}

/// True if the member needs another version than the version for which its pod was built.
fn changes_version((member, need): &(&MemberState, Need)) -> bool {
    member.pod.and_then(versions::made_for).as_ref() != Some(need.version())
}

/// True if the member stays and its pod is changed or recreated. False if a new member replaces it.
fn touches(member: &MemberState, need: &Need) -> bool {
    matches!(need, Need::Image(_)) || member.pod.is_some_and(|pod| pod.durable)
}

/// Reports changed members that have not recovered. For a recovered member, deletes the annotation `image-changed`.
fn stopped(view: &View, draft: &mut Draft) {
    let (_, observed, now) = draft.build.inputs();
    for member in view
        .members
        .iter()
        .filter(|member| member.fate == Fate::Stays)
    {
        let Some(pod) = member.pod.filter(|pod| pod.stays()) else {
            continue;
        };
        let Some(changed) = &pod.changed else {
            continue;
        };
        drain::keep(member, draft);
        let Some(why) = unsettled(observed, view, member) else {
            draft.add(actions::clear_image_change(&member.name, &pod.uid));
            continue;
        };
        let fails = matches!(pod.trouble, Some(Trouble::Image(_) | Trouble::Failing(_)));
        let slow = pod
            .unready_since
            .is_some_and(|since| age(since, now) > SLOW);
        let version = pod.version.as_deref().unwrap_or_default();
        if fails || slow {
            let from = changed.before();
            let text = format!(
                "{why}. The member was changed from {from} to {version}. The operator changes no other member until \
                 this member is healthy: correct spec.version, or set spec.version to {from} to roll back"
            );
            draft.problem(Reason::UpgradeStopped, text);
        } else {
            draft.wait(Reason::MemberRestarting, why, SHORTLY);
        }
    }
}

/// Applies the spec at once to a member that does not serve, because this costs no availability. The member changes to
/// another minor release only if its pod was already built for that release.
fn repair(course: &Course, needs: &[(&MemberState, Need)], draft: &mut Draft) -> bool {
    let mut repaired = false;
    for (member, need) in needs {
        let failed = |pod: &Pod| pod.changed.is_some() || pod.trouble.is_some();
        let down = |pod: &&Pod| !member.serves() && !pod.ready && failed(pod);
        // A member that is about to be replaced (`Fate::Leaves`) is repaired too, because the replacement waits until
        // all voters are healthy. A lost member is not repaired.
        let Some(pod) = member.pod.filter(down).filter(|_| !member.is_lost()) else {
            continue;
        };
        let version = need.version();
        let is_there = versions::made_for(pod).is_some_and(|made| made.minor() == version.minor());
        let within = matches!(course.direction, None | Some(UpgradeDirection::Within));
        if touches(member, need) && (within || is_there) {
            change(member, need, draft);
            repaired = true;
        }
    }
    repaired
}

/// Invariants 3 and 18: every other member must serve and have caught up before the next member is changed, so that the
/// quorum survives the restart.
fn at_rest(view: &View, draft: &mut Draft) -> bool {
    let (desired, observed, _) = draft.build.inputs();
    let wait = |what: String, draft: &mut Draft| {
        let text = format!("the operator changes the next member when {what}");
        draft.wait(Reason::RollWaits, text, BLIND);
        false
    };
    if let Some(member) = view.learners().next() {
        return wait(format!("{} is a voter", member.name), draft);
    }
    if view.members.len() != desired.size {
        return wait(format!("the cluster has {} members", desired.size), draft);
    }
    if let Some(member) = view
        .members
        .iter()
        .find(|member| member.fate != Fate::Stays)
    {
        return wait(format!("{} has been replaced", member.name), draft);
    }
    let mut members = view.members.iter();
    if let Some(why) = members.find_map(|member| unsettled(observed, view, member)) {
        let text = format!("the operator changes the next member later: {why}");
        draft.wait(Reason::RollWaits, text, SHORTLY);
        return false;
    }
    true
}

/// Why a member has not completed its last change; `None` if it has.
fn unsettled(observed: &Observed, view: &View, member: &MemberState) -> Option<String> {
    let name = &member.name;
    let Some(pod) = member.pod else {
        return Some(format!("{name} has no pod"));
    };
    let Some(answer) = observed.answer(name).filter(|_| member.is_healthy()) else {
        let why = match (&member.health, &pod.trouble) {
            (_, Some(trouble)) => trouble.message(),
            (crate::plan::Health::Unhealthy(why), None) => why,
            _ => "the member is lost",
        };
        return Some(format!("{name} does not serve: {why}"));
    };
    if let Some(changed) = &pod.changed
        && pod.restarts <= changed.restarts
    {
        return Some(format!("the container of {name} is restarting"));
    }
    if !pod.ready || !pod.stays() {
        return Some(format!("{name} is not ready"));
    }
    let runs = EtcdVersion::parse(&answer.version).ok();
    let made = versions::made_for(pod);
    if let (Some(runs), Some(made)) = (&runs, made)
        && *runs != made
    {
        return Some(format!(
            "{name} runs etcd {runs}, but its pod specifies {made}"
        ));
    }
    let indices = |member: &MemberState| Some(observed.answer(&member.name)?.raft_index);
    let newest = view.voters().filter_map(indices).max().unwrap_or_default();
    // etcd before 3.4 reports a single index: the index of the last applied entry (`apply` in its `server.go`).
    let applied = match runs {
        Some(runs) if runs.minor() < (3, 4) => answer.raft_index,
        _ => answer.raft_applied_index,
    };
    (applied + CAUGHT_UP < newest)
        .then(|| format!("{name} has applied {applied} of {newest} log entries"))
}

/// Invariant 18: no minor release is skipped. etcd's leader raises the cluster version some seconds after all members
/// run a later release (`monitorVersionInterval` in etcd's server). From etcd 3.6 on, the members' storage version
/// shows this. Before 3.6, the operator waits for longer than that interval.
fn has_gone_over(view: &View, draft: &mut Draft) -> bool {
    let (_, observed, now) = draft.build.inputs();
    let answers = view.members.iter().filter_map(|member| {
        let status = observed.answer(&member.name)?;
        Some((member, status, EtcdVersion::parse(&status.version).ok()?))
    });
    let answers: Vec<_> = answers.collect();
    let lowest = answers.iter().map(|(_, _, version)| version.minor()).min();
    for (member, status, version) in &answers {
        if Some(version.minor()) != lowest {
            continue;
        }
        let (major, minor) = version.minor();
        let stored = status.storage_version.as_ref();
        let follows = stored.is_none_or(|it| it.starts_with(&format!("{major}.{minor}.")));
        let since = member.pod.and_then(|pod| pod.running_since);
        let young = since.is_some_and(|since| age(since, now) < GOES_OVER);
        if !follows || (stored.is_none() && young) {
            let name = &member.name;
            let text = format!(
                "{name} has just started: etcd must first raise the cluster version to {major}.{minor}"
            );
            draft.wait(Reason::VersionSettling, text, SHORTLY);
            return false;
        }
    }
    true
}

/// Before members change to the previous minor release, requests the downgrade from etcd, or waits for it. Returns true
/// if the rolling update must wait.
fn requests_downgrade(view: &View, downgrade: &Downgrade, draft: &mut Draft) -> bool {
    let (to, said) = match downgrade {
        Downgrade::None | Downgrade::Ready => return false,
        Downgrade::Settling(why) => {
            draft.wait(Reason::DowngradeSettling, why.clone(), SHORTLY);
            return true;
        }
        Downgrade::Allow(to) => (
            Some(to.clone()),
            format!("enable the downgrade of etcd to {to}"),
        ),
        Downgrade::TakeBack => (None, "cancel the downgrade of etcd".to_owned()),
    };
    decide(view, vec![actions::downgrade(to)], None, said, draft)
}

/// Changes one member. The version is first recorded on the member's volume, so that the member starts with this
/// version even if the change is interrupted.
fn change(member: &MemberState, need: &Need, draft: &mut Draft) {
    let Some(pod) = member.pod else {
        return;
    };
    let version = need.version();
    let change = match need {
        Need::Image(_) => change_image((&member.name, pod), version, draft),
        Need::Pod(_, why) => {
            draft.say(format!("recreate the pod of {} ({why})", member.name));
            Ok(actions::delete_pod(&member.name, &pod.uid))
        }
    };
    with_note((&member.name, member.disk), version, change, draft);
}

/// Adds the change of a member to the plan. An action before the change records the version and the image on the PVC.
/// If the spec has no image for the version, the member keeps its version, so the image of its pod is recorded.
fn with_note(
    (member, disk): (&str, Option<&Disk>),
    version: &EtcdVersion,
    change: Result<Action, Explanation>,
    draft: &mut Draft,
) {
    let image = draft.build.desired.object.spec.image_for(version);
    let image = image.or_else(|| Some(draft.build.observed.pods.get(member)?.image.clone()));
    let image = image.filter(|image| image.contains('@'));
    let version = version.to_string();
    let is_noted = |disk: &Disk| disk.version.as_ref() == Some(&version) && disk.image == image;
    let disk = disk.filter(|disk| !disk.terminating && !is_noted(disk));
    let noted = disk.map(|disk| {
        let served = versions::served_before(draft.build.observed, (member, disk), &version);
        let next = (version.as_str(), image.as_deref());
        actions::note_version((member, &disk.uid), next, served.as_deref())
    });
    draft.try_chain(change.map(|change| noted.into_iter().chain([change]).collect()));
}

fn change_image(
    (member, pod): (&str, &Pod),
    to: &EtcdVersion,
    draft: &mut Draft,
) -> Result<Action, Explanation> {
    draft.say(format!("restart {member} with etcd {to}"));
    let (desired, observed, _) = draft.build.inputs();
    let from = versions::runs(observed, member, pod);
    // Without an answer, the new record keeps the image of the last record: the current image may never have run.
    let last = pod.changed.as_ref();
    let last = last.filter(|_| observed.answer(member).is_none());
    let is_pinned = desired.object.spec.image.is_some() || pod.image.contains('@');
    let changed = Changed {
        from: from.map(|from| from.to_string()).unwrap_or_default(),
        // If no container runs, Kubernetes may not count the first start with the new image as a restart, so the
        // recorded count is one lower.
        restarts: pod.restarts - i32::from(!pod.running),
        unreadable: is_unreadable(pod),
        image: last
            .and_then(|changed| changed.image.clone())
            .or_else(|| is_pinned.then(|| pod.image.clone())),
    };
    let version = to.to_string();
    draft
        .build
        .change_image((member, &pod.uid), &version, &changed)
}

/// True if the version for which the pod was built could not read the data. Ignores versions that were patched into the
/// pod later, because their image may be the cause.
fn is_unreadable(pod: &Pod) -> bool {
    let says_so = |ending: &Ending| matches!(ending.cause, Cause::Data(_));
    let noted = match &pod.changed {
        Some(changed) => changed.unreadable,
        None => pod.ending.as_ref().is_some_and(says_so),
    };
    noted && !pod.ready
}

/// The next member to replace, and the reason: its pod must be recreated, and has the only copy of its data. The result
/// stays the same until the replacement is complete, because it depends only on the members.
pub(super) fn outdated(
    (desired, observed): (&Desired, &Observed),
    members: &[MemberState],
    leader: Option<MemberId>,
) -> Option<(MemberId, String)> {
    let course = versions::course(desired, observed);
    let needs: Vec<(&MemberState, Need)> = members
        .iter()
        .filter_map(|member| Some((member, need(desired, &course, member)?)))
        .collect();
    let ready = matches!(
        versions::downgrade(&course, observed),
        Downgrade::None | Downgrade::Ready
    );
    // No member is replaced while images must change, because the operator changes images in place first.
    let images = needs.iter().any(|(_, need)| matches!(need, Need::Image(_)));
    // Invariant 32: a replacement that also changes the member's version waits for the backup that the spec requires.
    let waits = needs.iter().any(changes_version)
        && !backed_up::has_passed(desired, observed, &ClusterChange::Upgrade);
    let waits = waits || pinned::mismatch(desired, observed, members).is_some();
    if !ready || images || waits {
        return None;
    }
    let all = needs.into_iter().filter(|(member, need)| {
        member.votes() && member.joined() && member.serves() && !touches(member, need)
    });
    let first = all.min_by_key(|(member, _)| (Some(member.id()) == leader, member.id()));
    first.and_then(|(member, need)| match need {
        Need::Pod(_, why) => Some((member.id(), why)),
        Need::Image(_) => None,
    })
}

/// Repairs a bad image while no quorum answers. In a cluster of one or two members, a single bad image ends the quorum,
/// and a rollback must still reach that member.
pub(super) fn in_the_dark<'a>(build: Builder<'a>, intent: &Intent) -> Draft<'a> {
    let (desired, observed, _) = build.inputs();
    let mut draft = Draft::new(build);
    let course = versions::course(desired, observed);
    let Some(target) = &course.target else {
        return draft;
    };
    let image = desired.object.spec.image_of(target);
    let fails = |pod: &Pod| matches!(pod.trouble, Some(Trouble::Image(_) | Trouble::Failing(_)));
    let ours = |pod: &Pod| pod.token.as_ref() == Some(&intent.token);
    for (name, pod) in &observed.pods {
        let broken = fails(pod) && !pod.ready && pod.stays() && ours(pod);
        let is_there = versions::made_for(pod).is_some_and(|made| made.minor() == target.minor());
        let broken = broken && (course.direction == Some(UpgradeDirection::Within) || is_there);
        if !broken || pod.image == image || !versions::fits(pod, target) {
            continue;
        }
        if course.direction == Some(UpgradeDirection::Down) {
            continue;
        }
        let change = change_image((name, pod), target, &mut draft);
        with_note((name, observed.disks.get(name)), target, change, &mut draft);
    }
    draft
}
