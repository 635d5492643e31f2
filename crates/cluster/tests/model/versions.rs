//! The versions in the model: of the pods, of the running processes, of the cluster, and in the spec.
//!
//! The cluster version rises when every member runs a later minor release, and falls only by a downgrade. A member does
//! not start if its release is older than the cluster version (`MustDetectDowngrade` in etcd). The operator must never
//! start a member that is more than one minor release newer than the cluster version.

use std::collections::BTreeMap;

use crate::writes::Write;
use api::cluster::ClusterChange;
use api::version::EtcdVersion;
use cluster::snapshot::{Changed, Observed, Pod, Role, Seen, Trouble};

use crate::etcd_model::Cluster;
use crate::invariants::demand;
use crate::others::is_elsewhere;
use crate::run::said;
use crate::world::{World, WorldPod, tell};
use crate::write::Answer;
use crate::writes::Plan;

type Minor = (u64, u64);

/// The versions that users set. The last version has no image.
const VERSIONS: [&str; 7] = [
    "3.4.40", "3.5.25", "3.5.35", "3.6.9", "3.6.16", "3.7.3", "3.6.999",
];
const MISSING: &str = "3.6.999";

#[derive(Clone, Debug, Default)]
pub(crate) struct Versions {
    /// `spec.version`; `None` if the user has not changed the first version of the run.
    wanted: Option<&'static str>,
    /// The etcd containers, by the UIDs of the pods. A container without an entry has the version with which its pod
    /// was created.
    pods: BTreeMap<u64, Image>,
    /// The versions recorded on PVCs, by the UIDs of the PVCs.
    disks: BTreeMap<u64, String>,
    /// The versions that last served the data, as recorded on PVCs, by the UIDs of the PVCs.
    served: BTreeMap<u64, String>,
    /// The cluster versions, by the token of the cluster.
    spoken: BTreeMap<String, Spoken>,
}

/// The image of a pod's etcd container.
#[derive(Clone, Debug)]
struct Image {
    version: String,
    /// The version of the running process; `None` if no process runs.
    runs: Option<String>,
    changed: Option<Changed>,
}

/// The versions that etcd records for a cluster.
#[derive(Clone, Debug)]
struct Spoken {
    version: Minor,
    /// The storage version of the disks.
    stored: Minor,
    downgrade: Option<Minor>,
}

fn minor(version: &str) -> Minor {
    EtcdVersion::parse(version).unwrap().minor()
}

fn text((major, minor): Minor) -> String {
    format!("{major}.{minor}.0")
}

impl World {
    pub(crate) fn wanted_version(&self) -> &'static str {
        self.versions.wanted.unwrap_or(self.setup.version)
    }

    /// The user sets another version. Does nothing before the cluster has formed: a version change would recreate the
    /// bootstrap members, which other tests cover.
    pub(crate) fn want_version(&mut self, which: u8) {
        if self.cluster_id.is_none() {
            return;
        }
        let wanted = VERSIONS[usize::from(which) % VERSIONS.len()];
        self.versions.wanted = Some(wanted);
        self.object_version += 1;
        tell!(self, "the user wants etcd {wanted}");
    }

    /// The user notices a problem, and sets a version that every member can run.
    pub(crate) fn want_what_runs(&mut self) {
        let recorded = self.intent.as_ref().map(|intent| intent.token.clone());
        let spoken = recorded.as_ref();
        let spoken = spoken.and_then(|token| self.versions.spoken.get(token));
        let Some(spoken) = spoken.filter(|_| self.versions.wanted.is_some()) else {
            // While the cluster version is unknown, the user withdraws only the version `MISSING`, which has no image.
            self.versions.wanted = self.versions.wanted.filter(|wanted| *wanted != MISSING);
            return;
        };
        // If a member waits for a missing image during a downgrade, the user sets a version that has an image, of the
        // minor release that this member ran before. Without such a member, the version is of etcd's minor release.
        let ours = |pod: &&WorldPod| Some(&pod.start.token) == recorded.as_ref();
        let images = self.pods.values().filter(ours).map(|pod| self.image(pod));
        let from = { images }.find_map(|image| image.changed.filter(|_| image.version == MISSING));
        let ran = from.and_then(|changed| EtcdVersion::parse(&changed.from).ok());
        let ran = ran.filter(|_| spoken.downgrade.is_some());
        let wanted = ran.map_or(spoken.version, |version| version.minor());
        let first = self.setup.version;
        let fits = |version: &&str| minor(version) == wanted && *version != MISSING;
        let mut all = VERSIONS.into_iter().chain([first]);
        self.versions.wanted = all.rfind(fits);
    }

    /// A new EtcdCluster requests a version that has an image.
    pub(crate) fn want_first_version(&mut self) {
        self.versions.wanted = None;
    }

    fn image(&self, pod: &WorldPod) -> Image {
        let known = self.versions.pods.get(&pod.uid).cloned();
        known.unwrap_or_else(|| Image {
            version: pod.start.version.clone(),
            runs: None,
            changed: None,
        })
    }

    fn image_mut(&mut self, name: &str) -> &mut Image {
        let pod = &self.pods[name];
        let (uid, image) = (pod.uid, self.image(pod));
        self.versions.pods.entry(uid).or_insert(image)
    }

    /// The version of a member's process.
    fn runs(&self, name: &str) -> Option<String> {
        let pod = self.pods.get(name).filter(|pod| pod.running)?;
        self.image(pod).runs
    }

    // ---- restarts by the kubelet ----

    /// The kubelet restarts a container whose image was changed, in the same pod.
    pub(crate) fn ends_for_its_image(&mut self, name: &str) -> bool {
        let pod = &self.pods[name];
        let image = self.image(pod);
        let differs = image
            .runs
            .as_ref()
            .is_some_and(|runs| *runs != image.version);
        if !pod.running || !differs {
            return false;
        }
        let now = self.now;
        self.image_mut(name).runs = None;
        let pod = self.pods.get_mut(name).unwrap();
        pod.running = false;
        pod.starts_in = 1;
        let shown = &mut pod.shown;
        (shown.ready, shown.running_since, shown.unready_since) = (false, None, now);
        shown.restarts += 1;
        tell!(
            self,
            "the kubelet stops the container of {name} for another image"
        );
        true
    }

    /// True if the image of the pod does not exist, so that its container cannot start.
    pub(crate) fn has_no_image(&mut self, name: &str, hears: bool) -> bool {
        let pod = &self.pods[name];
        let waits = !pod.running && self.image(pod).version == MISSING;
        let now = self.now;
        let shown = &mut self.pods.get_mut(name).unwrap().shown;
        if waits && hears && std::mem::take(&mut shown.ready) {
            (shown.running_since, shown.unready_since) = (None, now);
        }
        waits
    }

    /// True if etcd does not start because the cluster version is newer.
    pub(crate) fn is_too_old(&mut self, name: &str) -> bool {
        let pod = &self.pods[name];
        if pod.running {
            return false;
        }
        let (token, version) = (pod.start.token.clone(), self.image(pod).version);
        let Some(spoken) = self.versions.spoken.get(&token) else {
            return false;
        };
        let (spoken, has) = (spoken.version, minor(&version));
        // The checks do not apply to external members, and to removed members, which exit after each start. They do not
        // apply if `memory.second` is true, because a pod may then start late, after the cluster has changed.
        let removed = self.data(name).is_some_and(|data| data.removed);
        let harmless = self.memory.second || is_elsewhere(name) || removed;
        demand!(
            self,
            harmless || has >= spoken,
            "invariants 18 and 30: {name} starts with etcd {version}, and the cluster version is {spoken:?}"
        );
        demand!(
            self,
            harmless || has.1 <= spoken.1 + 1,
            "invariant 18: {name} starts with etcd {version}, but the cluster version is {spoken:?}: a minor release is skipped"
        );
        has < spoken
    }

    /// True if etcd rejects new members, because a downgrade is enabled (`allowedVersionRange` in `cluster_util.go`).
    pub(crate) fn rejects_new_members(&self, token: &str) -> bool {
        let spoken = self.versions.spoken.get(token);
        spoken.is_some_and(|spoken| spoken.downgrade.is_some())
    }

    pub(crate) fn note_what_runs(&mut self, name: &str) {
        let version = self.image(&self.pods[name]).version;
        let token = self.pods[name].start.token.clone();
        let spoken = minor(&version);
        self.versions.spoken.entry(token).or_insert(Spoken {
            version: spoken,
            stored: spoken,
            downgrade: None,
        });
        self.image_mut(name).runs = Some(version);
    }

    // ---- the cluster version of etcd ----

    /// The leader reads the members' versions and sets the cluster version.
    pub(crate) fn agree_on_a_version(&mut self, token: &str, cluster: &Cluster) {
        let members = cluster.members();
        let runs = members.values().map(|member| self.runs(&member.name));
        let runs: Option<Vec<Minor>> = runs.map(|runs| runs.map(|it| minor(&it))).collect();
        let lowest = runs.as_ref().and_then(|all| all.iter().min().copied());
        let Some(spoken) = self.versions.spoken.get_mut(token) else {
            return;
        };
        if cluster.serving().is_none() {
            return;
        }
        spoken.stored = spoken.version;
        match (spoken.downgrade, lowest) {
            (Some(to), Some(lowest)) => {
                spoken.version = to;
                if lowest == to && runs.iter().flatten().all(|one| *one == to) {
                    spoken.downgrade = None;
                }
            }
            (None, Some(lowest)) if lowest > spoken.version => spoken.version = lowest,
            _ => {}
        }
    }

    pub(crate) fn allow_downgrade(&mut self, to: Option<&str>) -> Answer {
        let token = self.intent.as_ref().map(|intent| intent.token.clone());
        let spoken = token.and_then(|token| self.versions.spoken.get_mut(&token));
        let Some(spoken) = spoken else {
            return Answer::Failed;
        };
        let to = to.map(|to| minor(&format!("{to}.0")));
        let is_before = |to: Minor| to.1 + 1 == spoken.version.1;
        if to.is_some_and(|to| !is_before(to)) {
            return Answer::Failed;
        }
        spoken.downgrade = to;
        Answer::Done(None)
    }

    /// The number of learners that all members accept: the lowest limit of any member.
    pub(crate) fn most_learners(&self) -> usize {
        let all = self.pods.keys().filter_map(|name| self.runs(name));
        let several = all.map(|runs| minor(&runs)).min() >= Some((3, 6));
        if several { 7 } else { 1 }
    }

    pub(crate) fn knows_learners(&self) -> bool {
        let all = self.pods.keys().filter_map(|name| self.runs(name));
        all.map(|runs| minor(&runs)).min() >= Some((3, 4))
    }

    // ---- writes to the API server ----

    pub(crate) fn change_version(&mut self, write: &Write) -> Answer {
        match write {
            Write::PatchImage {
                member,
                uid,
                version,
                changed,
            } => {
                let pod = self.pods.get(member);
                if pod.is_none_or(|pod| pod.uid.to_string() != *uid) {
                    return Answer::Failed;
                }
                let image = self.image_mut(member);
                image.version.clone_from(version);
                image.changed = Some(changed.clone());
            }
            Write::SettleImage { member, uid } => {
                let pod = self.pods.get(member);
                if pod.is_none_or(|pod| pod.uid.to_string() != *uid) {
                    return Answer::Failed;
                }
                self.image_mut(member).changed = None;
            }
            Write::NoteVersion {
                member,
                uid,
                version,
                served,
            } => {
                let disk = self.disks.get(member);
                let Some(disk) = disk.filter(|disk| disk.uid.to_string() == *uid) else {
                    return Answer::Failed;
                };
                let disk = disk.uid;
                self.versions.disks.insert(disk, version.clone());
                match served.clone() {
                    Some(served) => self.versions.served.insert(disk, served),
                    None => self.versions.served.remove(&disk),
                };
            }
            _ => return Answer::Failed,
        }
        Answer::Done(None)
    }

    pub(crate) fn note_disk(&mut self, member: &str, version: &str) {
        let uid = self.disks[member].uid;
        self.versions.disks.insert(uid, version.to_owned());
    }

    // ---- observation of images and versions ----

    pub(crate) fn show_image(&self, pod: &WorldPod, seen: &mut Pod) {
        let Image {
            version, changed, ..
        } = self.image(pod);
        seen.image = format!("etcd:v{version}");
        if version == MISSING && !seen.running {
            seen.trouble = Some(Trouble::Image("ImagePullBackOff".to_owned()));
        }
        seen.version = Some(version);
        seen.changed = changed;
    }

    pub(crate) fn see_versions(&self, observed: &mut Observed) {
        for (name, seen) in &mut observed.disks {
            let uid = self.disks.get(name).map(|disk| disk.uid);
            let noted = uid.and_then(|uid| self.versions.disks.get(&uid));
            seen.version = noted.cloned().or(seen.version.take());
            seen.served = uid.and_then(|uid| self.versions.served.get(&uid)).cloned();
        }
        let token = observed.intent.as_ref().map(|intent| &intent.token);
        let spoken = token.and_then(|token| self.versions.spoken.get(token));
        for (name, seen) in &mut observed.statuses {
            let (Seen::Known(status), Some(runs)) = (seen, self.runs(name)) else {
                continue;
            };
            let tells = minor(&runs) >= (3, 6);
            status.version = runs;
            if let Some(spoken) = spoken.filter(|_| tells) {
                status.storage_version = Some(text(spoken.stored));
                status.downgrade = spoken.downgrade.map(text);
            }
        }
    }

    // ---- checks of invariants 18 and 22 ----

    /// Checks invariant 18: the plan stops at most one running container, and only while every other voter serves with
    /// the version of its pod. The plan stops the leader's container only if no other member can become leader.
    pub(crate) fn judge_roll(&mut self, plan: &Plan) {
        let Some(cluster) = self.recorded().cloned() else {
            return;
        };
        let mut ended = Vec::new();
        for write in plan.step.chains.iter().flatten() {
            if let Write::PatchImage { member, .. } = write
                && self.runs(member).is_some()
            {
                ended.push(member.clone());
            }
        }
        demand!(
            self,
            ended.len() <= 1,
            "invariant 18: {ended:?} are changed at once: {}",
            said(plan)
        );
        let Some(name) = ended.pop() else {
            return;
        };
        let own = cluster.by_name(&name);
        let others = cluster.voters().filter(|(id, _)| Some(**id) != own);
        let others: Vec<(u64, String)> = others.map(|(id, one)| (*id, one.name.clone())).collect();
        let whole = |(id, name): &&(u64, String)| {
            let pod = self.pods.get(name);
            let same = pod.is_some_and(|pod| {
                let image = self.image(pod);
                image.runs.as_ref() == Some(&image.version) && pod.shown.ready
            });
            same && cluster.is_up(*id)
        };
        let not = others.iter().find(|other| !whole(other)).cloned();
        demand!(
            self,
            not.is_none() || own.is_some_and(|id| !cluster.is_up(id)),
            "invariant 18: {name} is changed while {not:?} is not healthy: {}",
            said(plan)
        );
        let leads = own.and_then(|id| cluster.running.get(&id));
        let leads = leads.is_some_and(|process| process.leads.is_some());
        demand!(
            self,
            !leads || others.is_empty(),
            "invariant 18: the leader {name} is changed before a leadership transfer: {}",
            said(plan)
        );
    }

    /// Checks invariant 32: a serving member changes its version only after a backup of the recorded cluster.
    pub(crate) fn judge_backup(&mut self, plan: &Plan) {
        let Some(cluster) = self.recorded().cloned() else {
            return;
        };
        let id = self.cluster_id.map(|id| id.to_string());
        let record = self.wishes.before_change.as_ref();
        let has_backup = record.is_some_and(|record| {
            record.change == ClusterChange::Upgrade
                && Some(&record.cluster_id) == id.as_ref()
                && record.completion_time.is_none()
                && record.backup.is_some()
        });
        for write in plan.step.chains.iter().flatten() {
            let Write::PatchImage {
                member, version, ..
            } = write
            else {
                continue;
            };
            let is_up = cluster.by_name(member).is_some_and(|id| cluster.is_up(id));
            let pod = self.pods.get(member);
            let serves = is_up && pod.is_some_and(|pod| pod.shown.ready);
            let changes = self.runs(member).is_some_and(|runs| runs != *version);
            demand!(
                self,
                has_backup || !serves || !changes,
                "invariant 32: {member} changes to {version} without a recorded backup: {}",
                said(plan)
            );
        }
    }

    /// True if every member runs the desired version, and no member is drained from the client Service.
    pub(crate) fn runs_what_is_wanted(&self) -> bool {
        let wanted = self.wanted_version();
        let Some(cluster) = self.recorded() else {
            return false;
        };
        let mut names = cluster.members().values().map(|member| &member.name);
        // Invariant 22: no member may stay drained from the client Service.
        let is_out = |name: &String| {
            let pod = self.pods.get(name);
            pod.is_some_and(|pod| matches!(pod.role, Role::Busy { .. }))
        };
        names.all(|name| self.runs(name).as_deref() == Some(wanted) && !is_out(name))
    }
}
