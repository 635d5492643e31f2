//! The etcd version to which the members change, and the state of a downgrade in etcd.
//!
//! The next version follows from the rules of [`api::version::path`] and the versions that the members report. This
//! module changes nothing; `roll` changes the members, one at a time.

use api::version::EtcdVersion;
use api::version::path::{UpgradeDirection, direction};

use member::{VARIABLE_MAX_LEARNERS, knows_variable};

use crate::plan::replaced;
use crate::plan::view::{View, name_of};
use crate::snapshot::{Desired, Disk, Observed, Pod, Trouble};

/// The planned change of the members' version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Course {
    /// The version to which all members change; `None` if each member keeps its version.
    pub(crate) target: Option<EtcdVersion>,
    /// The direction from the lowest running version to the version in the spec.
    pub(crate) direction: Option<UpgradeDirection>,
    /// Why the members cannot reach the version in the spec, and the remedy; `None` if they can.
    pub(crate) refused: Option<String>,
}

/// A downgrade to the previous minor release, as etcd reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Downgrade {
    /// No downgrade is in progress or desired.
    None,
    /// A downgrade to this version is needed, and etcd must enable it first.
    Allow(String),
    /// The downgrade is enabled, but not complete. The text says what the rolling update waits for.
    Settling(String),
    /// The downgrade is enabled, and the previous version can read the data of every member.
    Ready,
    /// The downgrade is enabled, but the spec no longer requires it.
    TakeBack,
}

/// The version that a member runs. It is the first of these versions that is known: the version in the member's answer,
/// the version before the last image change, the version that last served the data (invariant 30), and the version in
/// the pod's annotation.
pub(super) fn runs(observed: &Observed, name: &str, pod: &Pod) -> Option<EtcdVersion> {
    let answer = observed.answer(name);
    let answered = answer.and_then(|status| EtcdVersion::parse(&status.version).ok());
    let before = || {
        let changed = pod.changed.as_ref()?;
        EtcdVersion::parse(&changed.from).ok()
    };
    let served = || last_served(pod, observed.disks.get(name)?);
    let last = answered.or_else(before).or_else(served);
    last.or_else(|| made_for(pod))
}

/// Invariant 30: the version that last served the data of a member whose pod has never started, because its image
/// cannot be pulled. `None` if the version of the pod may have run and changed the data.
///
/// Only the PVC records this version: a recreated pod does not record it, and a cluster of one member has no other
/// source.
fn last_served(pod: &Pod, disk: &Disk) -> Option<EtcdVersion> {
    let has_started = pod.running || pod.running_since.is_some() || pod.restarts > 0;
    let is_missing = matches!(pod.trouble, Some(Trouble::Image(_)));
    let is_of_pod = disk.version == pod.version && disk.token == pod.token;
    if has_started || !is_missing || !is_of_pod || !disk.stays() || disk.is_evidence() {
        return None;
    }
    EtcdVersion::parse(disk.served.as_ref()?).ok()
}

/// The version to record on the PVC as the last that served the data, before the member changes to `next`. If the image
/// of a silent member cannot be pulled, the record on the PVC stays. `None` removes the record, because `next` itself
/// served the data, or the version of the pod may have run.
pub(super) fn served_before(
    observed: &Observed,
    (name, disk): (&str, &Disk),
    next: &str,
) -> Option<String> {
    let answer = observed.answer(name).map(|status| status.version.clone());
    let pod = observed.pods.get(name);
    let kept = || Some(last_served(pod?, disk)?.to_string());
    answer.or_else(kept).filter(|served| served != next)
}

/// The etcd version in the pod's annotation; `None` without a valid annotation.
pub(super) fn made_for(pod: &Pod) -> Option<EtcdVersion> {
    pod.version
        .as_ref()
        .and_then(|version| EtcdVersion::parse(version).ok())
}

/// The versions of the members in etcd's list. If the list is unknown or names no pod, the versions of all pods.
fn running(observed: &Observed) -> Vec<EtcdVersion> {
    // Pods of a replaced cluster do not count, because a restore has created another cluster under the same name.
    let ours = |pod: &Pod| !replaced::is_of_before(observed, pod.token.as_ref());
    let list = observed.members.known();
    let listed: Option<Vec<String>> = list.map(|list| list.members.iter().map(name_of).collect());
    let listed = listed.filter(|names| names.iter().any(|name| observed.pods.contains_key(name)));
    let is_member = |name: &String| listed.as_ref().is_none_or(|names| names.contains(name));
    let pods = observed.pods.iter();
    let pods = pods.filter(|(name, pod)| is_member(name) && ours(pod));
    // External members count as well, because new members must be compatible with their versions.
    let elsewhere = observed.elsewhere.keys();
    let answers = elsewhere.filter_map(|name| observed.answer(name));
    let answers = answers.filter_map(|status| EtcdVersion::parse(&status.version).ok());
    pods.filter_map(|(name, pod)| runs(observed, name, pod))
        .chain(answers)
        .collect()
}

/// The version of the cluster. It is the first of these versions that is known: the lowest version of its members, the
/// lowest version recorded on its volumes, the version in the status, and the version in the spec.
pub(crate) fn current_version(desired: &Desired, observed: &Observed) -> String {
    let ours = |token: &Option<String>| !replaced::is_of_before(observed, token.as_ref());
    let disks = observed.disks.values();
    let disks = disks.filter(|disk| ours(&disk.token) && !disk.is_evidence());
    let disks = disks.filter_map(|disk| EtcdVersion::parse(disk.version.as_ref()?).ok());
    let reported = observed
        .reported_version
        .clone()
        .filter(|version| !version.is_empty());
    let spec = || desired.version.trim_start_matches('v').to_owned();
    running(observed)
        .into_iter()
        .min()
        .or_else(|| disks.min())
        .map(|version| version.to_string())
        .or(reported)
        .unwrap_or_else(spec)
}

/// Plans the version change, based on the running versions and the spec.
pub(crate) fn course(desired: &Desired, observed: &Observed) -> Course {
    let running = running(observed);
    let (Ok(wanted), Some(lowest)) = (EtcdVersion::parse(&desired.version), running.iter().min())
    else {
        return Course::default();
    };
    let refused = |why: String| Course {
        refused: Some(why),
        ..Course::default()
    };
    // During an upgrade or a downgrade, members run two minor releases, and the cluster version is the lower release. A
    // member with the higher release may keep it or return to the lower release, so only members with the lower release
    // need a check.
    let at_lowest = running.iter().filter(|one| one.minor() == lowest.minor());
    let directions: Result<Vec<UpgradeDirection>, String> =
        at_lowest.map(|one| direction(one, &wanted)).collect();
    let towards = match directions {
        Ok(directions) => directions.first().copied(),
        Err(why) => return refused(why),
    };
    let highest = running.iter().map(EtcdVersion::minor).max();
    if towards == Some(UpgradeDirection::Down) && highest > Some(lowest.minor()) {
        let (major, minor) = highest.unwrap_or_default();
        return refused(format!(
            "some members already run etcd {major}.{minor}: set spec.version to {lowest} or to a {major}.{minor} \
             release until all members run one version"
        ));
    }
    Course {
        target: Some(wanted),
        direction: towards,
        refused: None,
    }
}

/// The state of a downgrade by one minor release. After the operator has enabled the downgrade, etcd lowers the cluster
/// version and the storage version (`UpdateStorageVersionIfNeeded` in `server/etcdserver/version/monitor.go`).
pub(super) fn downgrade(course: &Course, observed: &Observed) -> Downgrade {
    let Some(target) = &course.target else {
        return Downgrade::None;
    };
    let wanted = target.minor();
    match enabled_downgrade(observed) {
        None if course.direction == Some(UpgradeDirection::Down) => {
            Downgrade::Allow(format!("{}.{}", wanted.0, wanted.1))
        }
        None => Downgrade::None,
        Some(allowed) if allowed < wanted => Downgrade::TakeBack,
        Some(allowed) if allowed > wanted => Downgrade::Settling(format!(
            "the downgrade to {}.{} is not complete",
            allowed.0, allowed.1
        )),
        Some(_) => {
            let newer = |version: &str| minor_of(version).is_some_and(|minor| minor > wanted);
            let lags = observed.answers().find(|(_, status)| {
                let disk = status.storage_version.as_ref();
                newer(&status.version) && disk.and_then(minor_of) != Some(wanted)
            });
            match lags {
                Some((name, _)) => Downgrade::Settling(format!(
                    "etcd converts the data of {name} for etcd {}.{}",
                    wanted.0, wanted.1
                )),
                None => Downgrade::Ready,
            }
        }
    }
}

/// The minor release of the downgrade that etcd has enabled.
pub(super) fn enabled_downgrade(observed: &Observed) -> Option<(u64, u64)> {
    let mut answers = observed.answers();
    answers.find_map(|(_, status)| minor_of(status.downgrade.as_ref()?))
}

/// The major and the minor number of a version such as `3.5` or `3.5.0`.
fn minor_of(text: impl AsRef<str>) -> Option<(u64, u64)> {
    let mut numbers = text.as_ref().trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next()?, numbers.next()?);
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The etcd version for a new member: the lowest version that a member runs. Exception: while a member is being
/// replaced because its pod must be recreated, new members get the target version of the rolling update.
pub(super) fn joining(desired: &Desired, observed: &Observed, view: &View) -> String {
    let follows = view
        .members
        .iter()
        .any(|member| member.followed && member.leaves());
    let course = course(desired, observed);
    // Before a downgrade, etcd must permit the target version.
    let settled = course.direction != Some(UpgradeDirection::Down)
        || downgrade(&course, observed) == Downgrade::Ready;
    let target = course.target.filter(|_| follows && settled);
    target.map_or_else(
        || current_version(desired, observed),
        |version| version.to_string(),
    )
}

/// The version recorded on a volume or, without a record, the version of the cluster.
pub(super) fn noted(desired: &Desired, observed: &Observed, disk: Option<&Disk>) -> String {
    let noted = disk.and_then(|disk| disk.version.as_ref());
    let noted = noted.and_then(|version| EtcdVersion::parse(version).ok());
    noted.map_or_else(
        || current_version(desired, observed),
        |version| version.to_string(),
    )
}

/// True if the container of a running pod can restart with the image of this version: the version supports the
/// readiness probe of the pod, which is immutable. If the pod has a volume, the version must also know the variables of
/// the pod. A pod without a volume restarts even if etcd ignores a variable: its member cannot be replaced, because no
/// new member can join during a downgrade.
pub(super) fn fits(pod: &Pod, version: &EtcdVersion) -> bool {
    let probe = !pod.readyz || version.has_readyz();
    let mut settings = pod.flags.iter();
    probe && (!pod.durable || settings.all(|name| knows_variable(version, name)))
}

/// The features that every member supports: the features of the lowest running version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionRules {
    /// True if members join as learners (etcd 3.4 and later).
    pub learners: bool,
    /// True if several members may join as learners at the same time (etcd 3.6 and later, started with
    /// `--max-learners`).
    pub several_learners: bool,
}

impl VersionRules {
    /// Computes the rules from the answers of the members or, if no member answers, from the version `fallback`.
    pub fn new(observed: &Observed, fallback: &str) -> Self {
        let lowest = observed
            .answers()
            .filter_map(|(_, status)| minor(&status.version))
            .min()
            .or_else(|| minor(fallback))
            .unwrap_or((3, 6));
        // Each member compares the number of learners with the limit in its own flags (`ValidateConfigurationChange` in
        // etcd). A member that was started with an older release has no such flag, and accepts only one learner.
        let raises_limit = |pod: &Pod| pod.flags.contains(VARIABLE_MAX_LEARNERS);
        Self {
            learners: lowest >= (3, 4),
            several_learners: lowest >= (3, 6)
                && observed.pods.values().all(raises_limit)
                && observed.elsewhere.is_empty(),
        }
    }
}

/// The major and the minor number of a complete version.
pub(super) fn minor(version: &str) -> Option<(u64, u64)> {
    Some(EtcdVersion::parse(version).ok()?.minor())
}
