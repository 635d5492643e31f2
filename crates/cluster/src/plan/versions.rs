//! Which version of etcd the members are to run, and whether etcd has been told of a way back.
//!
//! The rules of the path are those of [`api::version::path`]; here they meet what each member answers. Nothing is
//! changed here; `roll` changes the members, one at a time.

use api::version::EtcdVersion;
use api::version::path::{UpgradeDirection, direction};

use member::VARIABLE_MAX_LEARNERS;

use crate::plan::replaced;
use crate::plan::view::{MemberState, View, name_of};
use crate::snapshot::{Desired, Disk, Observed, Pod, Seen};

/// Where the members' version is to go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Course {
    /// What all members are to run; `None`: each goes on with what it runs.
    pub(crate) target: Option<EtcdVersion>,
    /// How they get there from the lowest version that runs.
    pub(crate) way: Option<UpgradeDirection>,
    /// Why they do not go where the spec says, and what to do about it.
    pub(crate) refused: Option<String>,
}

/// What etcd has been told, or is to be told, about going back by a minor release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Downgrade {
    /// Nothing.
    None,
    /// It has to be allowed first, to this version.
    Allow(String),
    /// It is allowed, and these words say what is not ready for it.
    Settling(String),
    /// It is allowed, and every member's disk can be read by the version before.
    Ready,
    /// It is allowed and not wanted any more.
    TakeBack,
}

/// The version a member runs: asked of the member; as long as it does not answer, what is known to have run last.
pub(super) fn runs(observed: &Observed, name: &str, pod: &Pod) -> Option<EtcdVersion> {
    let answer = observed.statuses.get(name).and_then(Seen::known);
    let answered = answer.and_then(|status| EtcdVersion::parse(&status.version).ok());
    let before = || {
        let changed = pod.changed.as_ref()?;
        EtcdVersion::parse(&changed.from).ok()
    };
    answered.or_else(before).or_else(|| made_for(pod))
}

/// The version a pod's image is of.
pub(super) fn made_for(pod: &Pod) -> Option<EtcdVersion> {
    pod.version
        .as_ref()
        .and_then(|version| EtcdVersion::parse(version).ok())
}

/// What the members run; as long as nobody knows who is a member, what the pods run.
fn running(observed: &Observed) -> Vec<EtcdVersion> {
    // What a restore has replaced ran what it ran, and so did a member that was removed.
    let ours = |pod: &Pod| !replaced::is_of_before(observed, pod.token.as_ref());
    let list = observed.members.known();
    let listed: Option<Vec<String>> = list.map(|list| list.members.iter().map(name_of).collect());
    let listed = listed.filter(|names| names.iter().any(|name| observed.pods.contains_key(name)));
    let is_member = |name: &String| listed.as_ref().is_none_or(|names| names.contains(name));
    let pods = observed.pods.iter();
    let pods = pods.filter(|(name, pod)| is_member(name) && ours(pod));
    // Members that somebody else runs and this cluster joins: whoever joins them has to start beside them.
    let elsewhere = observed.elsewhere.keys();
    let answers = elsewhere.filter_map(|name| observed.statuses.get(name)?.known());
    let answers = answers.filter_map(|status| EtcdVersion::parse(&status.version).ok());
    pods.filter_map(|(name, pod)| runs(observed, name, pod))
        .chain(answers)
        .collect()
}

/// The version the cluster runs, the lowest of its members'; without pods that of its disks.
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

/// Where the members' version is to go, from what they run and what the spec says.
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
    // A member of the next minor release is on its way there, or not back yet: it is let through either way, as the
    // cluster speaks what the lowest speaks. Of the lowest minor release each member has to be let go.
    let at_lowest = running.iter().filter(|one| one.minor() == lowest.minor());
    let ways: Result<Vec<UpgradeDirection>, String> =
        at_lowest.map(|one| direction(one, &wanted)).collect();
    let towards = match ways {
        Ok(ways) => ways.first().copied(),
        Err(why) => return refused(why),
    };
    let highest = running.iter().map(EtcdVersion::minor).max();
    if towards == Some(UpgradeDirection::Down) && highest > Some(lowest.minor()) {
        let (major, minor) = highest.unwrap_or_default();
        return refused(format!(
            "some members run etcd {major}.{minor} already: set spec.version to {lowest} or to a {major}.{minor} \
             release until all run the same"
        ));
    }
    Course {
        target: Some(wanted),
        way: towards,
        refused: None,
    }
}

/// The way back by a minor release leads through etcd: it lowers the cluster's version and what lies on the disks
/// first (`UpdateStorageVersionIfNeeded` in `server/etcdserver/version/monitor.go`), and ends the downgrade by itself
/// when all members run the version before.
pub(super) fn downgrade(course: &Course, observed: &Observed) -> Downgrade {
    let Some(target) = &course.target else {
        return Downgrade::None;
    };
    let answers = || {
        observed
            .statuses
            .iter()
            .filter_map(|(name, seen)| Some((name, seen.known()?)))
    };
    let allowed = answers().find_map(|(_, status)| minor_of(status.downgrade.as_ref()?));
    let wanted = target.minor();
    match allowed {
        None if course.way == Some(UpgradeDirection::Down) => {
            Downgrade::Allow(format!("{}.{}", wanted.0, wanted.1))
        }
        None => Downgrade::None,
        Some(allowed) if allowed < wanted => Downgrade::TakeBack,
        Some(allowed) if allowed > wanted => Downgrade::Settling(format!(
            "the downgrade to {}.{} has not ended yet",
            allowed.0, allowed.1
        )),
        Some(_) => {
            let newer = |version: &str| minor_of(version).is_some_and(|minor| minor > wanted);
            let lags = answers().find(|(_, status)| {
                let disk = status.storage_version.as_ref();
                newer(&status.version) && disk.and_then(minor_of) != Some(wanted)
            });
            match lags {
                Some((name, _)) => Downgrade::Settling(format!(
                    "etcd makes the disk of {name} one that {}.{} can read",
                    wanted.0, wanted.1
                )),
                None => Downgrade::Ready,
            }
        }
    }
}

/// Major and minor number of `3.5` and of `3.5.0`.
fn minor_of(text: impl AsRef<str>) -> Option<(u64, u64)> {
    let mut numbers = text.as_ref().trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next()?, numbers.next()?);
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The version a new member is started with: the lowest that runs, which every other one can serve beside. One that
/// takes the place of a member whose pod cannot change to the target gets the target.
pub(super) fn joining(desired: &Desired, observed: &Observed, view: &View) -> String {
    let follows = view.seats.iter().any(|seat| seat.followed && seat.leaves());
    let course = course(desired, observed);
    // Back by a minor release nobody joins before etcd lets the members go there.
    let settled = course.way != Some(UpgradeDirection::Down)
        || downgrade(&course, observed) == Downgrade::Ready;
    let target = course.target.filter(|_| follows && settled);
    target.map_or_else(
        || current_version(desired, observed),
        |version| version.to_string(),
    )
}

/// The version a member gets its pod back with: the one its disk was used by last, which nobody but `roll` changes.
pub(super) fn returning(desired: &Desired, observed: &Observed, seat: &MemberState) -> String {
    noted(desired, observed, seat.disk)
}

/// The version noted on a disk.
pub(super) fn noted(desired: &Desired, observed: &Observed, disk: Option<&Disk>) -> String {
    let noted = disk.and_then(|disk| disk.version.as_ref());
    let noted = noted.and_then(|version| EtcdVersion::parse(version).ok());
    noted.map_or_else(
        || current_version(desired, observed),
        |version| version.to_string(),
    )
}

/// Whether the container of a pod can be started again with the image of another version: the flags it has, which no
/// running pod changes, are known to that version, and the readiness probe is answered.
pub(super) fn fits(pod: &Pod, version: &EtcdVersion) -> bool {
    let has = |flag: &str| pod.flags.contains(flag);
    let learners = !has(MAX_LEARNERS_FLAG) || version.has_max_learners();
    let metrics = !has("--listen-metrics-urls") || version.minor() >= (3, 3);
    let probe = !pod.readyz || version.has_readyz();
    learners && metrics && probe
}

/// How pods of the first release said how many learners may join at once.
const MAX_LEARNERS_FLAG: &str = "--max-learners";

/// Whether the member lets in several learners at once, from 3.6 on.
pub(super) fn takes_several_learners(pod: &Pod) -> bool {
    pod.flags.contains(MAX_LEARNERS_FLAG) || pod.flags.contains(VARIABLE_MAX_LEARNERS)
}

/// What the etcd version the cluster runs allows; the lowest of the members' counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionRules {
    /// Members join as learners (3.4 and later).
    pub learners: bool,
    /// Several learners at once (3.6 and later, started with `--max-learners`).
    pub several_learners: bool,
}

impl VersionRules {
    /// From what the members answer, or the version they were made for.
    pub fn new(observed: &Observed, fallback: &str) -> Self {
        let answered = observed
            .statuses
            .values()
            .filter_map(Seen::known)
            .map(|status| status.version.as_str());
        let lowest = answered
            .filter_map(minor)
            .min()
            .or_else(|| minor(fallback))
            .unwrap_or((3, 6));
        // Each member applies the limit of its own flag to what the others have agreed upon
        // (`ValidateConfigurationChange` in etcd); a member that began with an older release has none.
        Self {
            learners: lowest >= (3, 4),
            several_learners: lowest >= (3, 6)
                && observed.pods.values().all(takes_several_learners)
                && observed.elsewhere.is_empty(),
        }
    }
}

fn minor(version: &str) -> Option<(u64, u64)> {
    let version = semver::Version::parse(version.trim_start_matches('v')).ok()?;
    Some((version.major, version.minor))
}
