//! Changes of versions and pods while the cluster serves: one member at a time, with rollbacks.

use etcd::KeyHash;

use super::log;
use super::scene::{self, Scene};
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::{Changed, Disk, Pod, Seen, Trouble};

/// etcd 3.5 does not know this environment variable.
const SKIP_REVERSE_DNS: &str = "ETCD_PEER_SKIP_CLIENT_SAN_VERIFICATION";

/// A cluster whose members run the version `from`, and whose spec requests the version `to`.
pub(super) fn towards(from: &str, to: &str) -> Scene {
    Scene::formed(&["a", "b", "c"]).all_run(from).wants(to)
}

pub(super) fn patched(scene: &Scene) -> Vec<(String, String)> {
    let writes = scene.drained().writes().into_iter();
    writes
        .filter_map(|write| match write {
            Write::PatchImage {
                member, version, ..
            } => Some((member, version)),
            _ => None,
        })
        .collect()
}

pub(super) fn one(member: &str, version: &str) -> Vec<(String, String)> {
    vec![(member.to_owned(), version.to_owned())]
}

impl Scene {
    pub(super) fn all_run(mut self, version: &str) -> Self {
        for member in ["a", "b", "c"] {
            self = self.runs(member, version);
        }
        self
    }

    /// Sets this version as the version of the member's pod and of the member's answer.
    pub(super) fn runs(self, member: &str, version: &str) -> Self {
        self.made_for(member, version).answers_as(member, version)
    }

    pub(super) fn made_for(mut self, member: &str, version: &str) -> Self {
        let pod = self.observed.pods.get_mut(member).unwrap();
        pod.version = Some(version.to_owned());
        pod.image = format!("etcd:v{version}");
        if let Some(disk) = self.observed.disks.get_mut(member) {
            disk.version = Some(version.to_owned());
        }
        self
    }

    pub(super) fn answers_as(mut self, member: &str, version: &str) -> Self {
        if let Some(Seen::Known(status)) = self.observed.statuses.get_mut(member) {
            status.version = version.to_owned();
        }
        self
    }

    pub(super) fn wants(mut self, version: &str) -> Self {
        self.desired.version = version.to_owned();
        self.desired.image = format!("etcd:v{version}");
        self
    }

    /// Makes all members report equal hashes of their data.
    pub(super) fn compared(mut self) -> Self {
        for member in ["a", "b", "c"] {
            self = self.hash(member, 7);
        }
        self
    }

    pub(super) fn hash(mut self, member: &str, hash: u32) -> Self {
        let hash = KeyHash { hash, compacted: 0 };
        let hash = Seen::Known(Some(hash));
        self.observed.hashes.insert(member.to_owned(), hash);
        self
    }

    /// Records that the operator has changed the image of the member. The member has not become healthy since then.
    pub(super) fn changed(mut self, member: &str, from: &str, to: &str) -> Self {
        self = self.made_for(member, to);
        let pod = self.observed.pods.get_mut(member).unwrap();
        (pod.ready, pod.running) = (false, false);
        pod.changed = Some(Changed {
            from: from.to_owned(),
            restarts: 0,
            unreadable: false,
            image: None,
        });
        self.observed.statuses.remove(member);
        self
    }

    fn with_variable(mut self, name: &str) -> Self {
        for pod in self.observed.pods.values_mut() {
            pod.flags = [name.to_owned()].into();
        }
        self
    }

    /// Sets the log of this member far behind the logs of the other members.
    pub(super) fn lags(mut self, member: &str) -> Self {
        for (name, seen) in &mut self.observed.statuses {
            if let Seen::Known(status) = seen {
                let applied = if name == member { 50 } else { 10_000 };
                (status.raft_index, status.raft_applied_index) = (applied, applied);
            }
        }
        self
    }

    pub(super) fn problems(&self) -> Vec<Reason> {
        let problems = self.plan().problems.into_iter();
        problems.map(|problem| problem.reason).collect()
    }

    fn pod_of(&mut self, member: &str) -> &mut Pod {
        self.observed.pods.get_mut(member).unwrap()
    }

    fn disk_of(&mut self, member: &str) -> &mut Disk {
        self.observed.disks.get_mut(member).unwrap()
    }

    pub(super) fn image_missing(mut self, member: &str) -> Self {
        let pod = self.observed.pods.get_mut(member).unwrap();
        pod.trouble = Some(Trouble::Image("ImagePullBackOff".into()));
        self
    }
}

#[test]
fn rollout_compares_data_of_members_before_first_restart() {
    let scene = towards("3.5.35", "3.6.16");
    let plan = scene.plan();
    assert_eq!((plan.asks, patched(&scene)), (Some(100), vec![]));
    assert_eq!(patched(&scene.compared()), one("b", "3.6.16"));
}

#[test]
fn invariant_18_followers_are_updated_first_and_one_by_one() {
    let scene = towards("3.5.35", "3.6.16").compared();
    assert_eq!(patched(&scene), one("b", "3.6.16"));
    let away = towards("3.5.35", "3.6.16")
        .compared()
        .changed("b", "3.5.35", "3.6.16");
    assert_eq!(patched(&away), []);
    assert!(
        away.waits().contains(&Reason::MemberRestarting),
        "{:?}",
        away.waits()
    );
    // The next member is not updated yet: the container of `b` still has the old image, so etcd reports the old
    // version.
    let before = towards("3.5.35", "3.6.16").compared();
    let before = before.made_for("b", "3.6.16");
    assert_eq!(patched(&before), []);
    let back = before.answers_as("b", "3.6.16");
    assert_eq!(patched(&back), one("c", "3.6.16"));
}

#[test]
fn invariant_18_leader_is_updated_last_after_leadership_transfer() {
    let scene = towards("3.5.35", "3.6.16").compared();
    let scene = scene.runs("b", "3.6.16").runs("c", "3.6.16");
    let changes = scene.drained().changes();
    assert!(
        matches!(&changes[..], [Write::MoveLeader { from, to, .. }] if from == "a" && to != "a"),
        "{changes:?}"
    );
    assert_eq!(patched(&scene), []);
    assert_eq!(patched(&scene.leader("c")), one("a", "3.6.16"));
}

#[test]
fn invariant_18_no_member_is_updated_while_another_is_unhealthy() {
    let calm = || towards("3.5.35", "3.6.16").compared();
    for scene in [
        calm().down("c"),
        calm().without_pod("c"),
        calm().size(5),
        calm().learner("d"),
        calm().lags("c"),
    ] {
        assert_eq!(patched(&scene), [], "{:?}", scene.waits());
    }
}

/// etcd before 3.4 reports only one index, that of the last applied entry, as `raft_index`.
#[test]
fn single_raft_index_decides_rollout_before_etcd_3_4() {
    let logs = |of_c: u64| {
        let mut scene = towards("3.3.27", "3.4.23").compared();
        for pod in scene.observed.pods.values_mut() {
            pod.readyz = false;
        }
        for (name, seen) in &mut scene.observed.statuses {
            if let Seen::Known(status) = seen {
                status.raft_applied_index = 0;
                status.raft_index = if name == "c" { of_c } else { 10_000 };
            }
        }
        scene
    };
    assert_eq!(patched(&logs(10_000)), one("b", "3.4.23"));
    assert_eq!(patched(&logs(50)), []);
}

#[test]
fn differing_data_of_members_stops_rollout() {
    let scene = towards("3.5.35", "3.6.16").compared().hash("c", 8);
    assert_eq!(patched(&scene), []);
    assert!(scene.problems().contains(&Reason::DataDiffers));
}

#[test]
fn rollout_waits_for_hash_of_every_member() {
    let mut scene = towards("3.5.35", "3.6.16").compared();
    let unknown = Seen::Unknown("no answer".into());
    scene.observed.hashes.insert("c".into(), unknown);
    assert_eq!(patched(&scene), []);
    assert!(scene.waits().contains(&Reason::ComparingData));
}

#[test]
fn version_change_that_skips_required_version_is_rejected() {
    for (from, to) in [
        ("3.4.23", "3.6.16"),
        ("3.5.25", "3.6.16"),
        ("3.5.35", "3.4.23"),
    ] {
        let scene = towards(from, to).compared();
        assert_eq!(patched(&scene), [], "{from} {to}");
        assert_eq!(scene.problems(), [Reason::VersionRefused], "{from} {to}");
    }
}

#[test]
fn missing_image_stops_rollout_after_one_member() {
    let scene = towards("3.5.35", "3.6.99").compared();
    let scene = scene.changed("b", "3.5.35", "3.6.99").image_missing("b");
    assert_eq!(patched(&scene), []);
    assert!(
        scene.problems().contains(&Reason::UpgradeStopped),
        "{:?}",
        scene.problems()
    );
}

#[test]
fn corrected_version_is_applied_to_broken_member_first() {
    let scene = towards("3.5.35", "3.5.35").compared();
    let scene = scene.changed("b", "3.5.35", "3.6.99").image_missing("b");
    assert_eq!(patched(&scene), one("b", "3.5.35"));
    // If the user corrects the version to 3.6.16, the operator updates the broken member first too.
    let scene = towards("3.5.35", "3.6.16").compared();
    let scene = scene.changed("b", "3.5.35", "3.6.99").image_missing("b");
    assert_eq!(patched(&scene), one("b", "3.6.16"));
}

#[test]
fn rollback_is_allowed_if_one_member_never_ran_new_version() {
    // A rollback is still allowed, because the failed member `c` never ran the new version, so etcd has not raised the
    // cluster version.
    let scene = towards("3.6.16", "3.5.35").compared();
    let scene = scene.changed("c", "3.5.35", "3.6.16").image_missing("c");
    assert_eq!(patched(&scene), one("c", "3.5.35"));
    assert!(!scene.problems().contains(&Reason::VersionRefused));
}

#[test]
fn failed_sole_member_is_rolled_back_without_quorum() {
    let scene = Scene::formed(&["a"]).runs("a", "3.5.35").wants("3.5.35");
    let mut scene = scene.changed("a", "3.5.35", "3.5.99").image_missing("a");
    scene.observed.members = Seen::Unknown("no member answers".into());
    assert_eq!(patched(&scene), one("a", "3.5.35"));
    // A member without an image problem and without a failing container keeps its image.
    scene.observed.pods.get_mut("a").unwrap().trouble = None;
    assert_eq!(patched(&scene), []);
}

impl Scene {
    /// Recreates the pod of the member on the same volume. The image of the new pod cannot be pulled. No member
    /// answers.
    fn recreated_without_image(self, member: &str, served: &str, version: &str) -> Self {
        let mut scene = self.changed(member, served, version).image_missing(member);
        let pod = scene.pod_of(member);
        (pod.changed, pod.running_since) = (None, None);
        scene.disk_of(member).served = Some(served.to_owned());
        scene.observed.members = Seen::Unknown("no member answers".into());
        scene
    }
}

/// The only member cannot pull the image of the next minor release, and its pod was recreated. The volume shows that
/// the next release never ran.
#[test]
fn invariant_30_sole_member_is_rolled_back_to_version_that_served() {
    let scene = Scene::formed(&["a"]).durable().runs("a", "3.5.35");
    // Before the operator changes the image, it records on the PVC the version that served.
    let begins = scene.clone().wants("3.6.16").compared();
    let note = |served: Option<&str>, to: &str| Write::NoteVersion {
        member: "a".into(),
        uid: "disk-a".into(),
        version: to.into(),
        served: served.map(str::to_owned),
    };
    assert_eq!(
        begins.writes().first(),
        Some(&note(Some("3.5.35"), "3.6.16"))
    );

    let lost = scene.recreated_without_image("a", "3.5.35", "3.6.16");
    let back = lost.clone().wants("3.5.35");
    assert_eq!(patched(&back), one("a", "3.5.35"));
    assert_eq!(back.writes().first(), Some(&note(None, "3.5.35")));
    assert!(!back.problems().contains(&Reason::VersionRefused));
    // The member may change to another patch release of the minor release that served, or to another image of the next
    // minor release.
    assert_eq!(patched(&lost.clone().wants("3.5.40")), one("a", "3.5.40"));
    let next = lost.clone().wants("3.6.20");
    assert_eq!(patched(&next), one("a", "3.6.20"));
    assert_eq!(next.writes().first(), Some(&note(Some("3.5.35"), "3.6.20")));
    // The operator does not change to version 3.4, because a downgrade needs the permission of a running etcd.
    assert_eq!(patched(&lost.wants("3.4.40")), []);
}

/// The next minor release may have changed the data, so the operator must not roll the member back without etcd's
/// downgrade.
#[test]
fn invariant_30_member_is_not_rolled_back_if_next_version_may_have_run() {
    let lost = || {
        let scene = Scene::formed(&["a"]).durable().runs("a", "3.5.35");
        let scene = scene.recreated_without_image("a", "3.5.35", "3.6.16");
        scene.wants("3.5.35")
    };
    let edits: [fn(&mut Scene); 7] = [
        |scene| scene.pod_of("a").restarts = 1,
        |scene| scene.pod_of("a").running_since = Some(jiff::Timestamp::UNIX_EPOCH),
        |scene| scene.pod_of("a").trouble = Some(Trouble::Failing("exit code 1".into())),
        |scene| scene.disk_of("a").served = None,
        |scene| scene.disk_of("a").version = Some("3.6.9".into()),
        |scene| scene.disk_of("a").token = Some("other".into()),
        |scene| scene.disk_of("a").lost = true,
    ];
    assert_eq!(patched(&lost()), one("a", "3.5.35"));
    for (number, edit) in edits.into_iter().enumerate() {
        let mut scene = lost();
        edit(&mut scene);
        assert_eq!(patched(&scene), [], "edit {number}");
    }
    // The operator removes the record of the version that served, because version 3.6 may have run in this scene.
    let mut failing = lost().wants("3.6.20");
    failing.pod_of("a").trouble = Some(Trouble::Failing("exit code 1".into()));
    let writes = failing.writes();
    assert!(
        matches!(&writes[..], [Write::NoteVersion { served: None, .. }, ..]),
        "{writes:?}"
    );
}

/// The record of the served version is removed when the next version serves, and not while the previous container
/// still runs.
#[test]
fn invariant_30_version_record_is_removed_when_next_version_serves() {
    let mut scene = Scene::formed(&["a"]).durable().runs("a", "3.6.16");
    scene = scene.wants("3.6.16");
    scene.disk_of("a").served = Some("3.5.35".into());
    let ends = Write::NoteVersion {
        member: "a".into(),
        uid: "disk-a".into(),
        version: "3.6.16".into(),
        served: None,
    };
    assert_eq!(scene.writes(), [ends]);
    assert_eq!(scene.answers_as("a", "3.5.35").writes(), []);
}

#[test]
fn image_change_record_is_cleared_after_restart_of_member() {
    let mut scene = towards("3.6.16", "3.6.16");
    let pod = scene.observed.pods.get_mut("b").unwrap();
    pod.changed = Some(Changed {
        from: "3.5.35".into(),
        restarts: 0,
        unreadable: false,
        image: None,
    });
    assert!(scene.writes().is_empty(), "{:?}", scene.writes());
    scene.observed.pods.get_mut("b").unwrap().restarts = 1;
    assert!(matches!(&scene.writes()[..], [Write::SettleImage { member, .. }] if member == "b"));
}

// ---- downgrades ----

/// The minor release of a planned downgrade; `Some(None)` if the plan cancels a downgrade.
#[expect(
    clippy::option_option,
    reason = "the inner None means that the plan cancels a downgrade"
)]
fn downgrade(scene: &Scene) -> Option<Option<String>> {
    scene.changes().into_iter().find_map(|write| match write {
        Write::Downgrade { to } => Some(to),
        _ => None,
    })
}

impl Scene {
    pub(super) fn allowed(mut self, version: &str, storage: &str) -> Self {
        for seen in self.observed.statuses.values_mut() {
            if let Seen::Known(status) = seen {
                status.downgrade = Some(version.to_owned());
                status.storage_version = Some(storage.to_owned());
            }
        }
        self
    }
}

#[test]
fn minor_downgrade_is_enabled_in_etcd_before_members_change() {
    let scene = towards("3.7.3", "3.6.16").compared();
    assert_eq!(downgrade(&scene), Some(Some("3.6".to_owned())));
    assert_eq!(patched(&scene), []);
    let settling = scene.allowed("3.6", "3.7.0");
    assert_eq!((downgrade(&settling), patched(&settling)), (None, vec![]));
    let ready = settling.allowed("3.6", "3.6.0");
    assert_eq!(patched(&ready), one("b", "3.6.16"));
}

#[test]
fn downgrade_is_canceled_in_etcd_if_spec_reverts_version() {
    let scene = towards("3.6.16", "3.6.16").allowed("3.5", "3.5.0");
    assert_eq!(downgrade(&scene), Some(None));
}

#[test]
fn downgrade_changes_images_of_existing_pods() {
    let scene = towards("3.6.16", "3.5.35").allowed("3.5", "3.5.0");
    assert_eq!(patched(&scene.compared()), one("b", "3.5.35"));
}

/// etcd 3.5 does not know `SKIP_REVERSE_DNS`, and the variables of a running pod cannot change.
#[test]
fn downgrade_recreates_pods_that_have_newer_variables() {
    let scene = Scene::formed(&["a", "b", "c"]).durable().all_run("3.6.16");
    let scene = scene.wants("3.5.35").with_variable(SKIP_REVERSE_DNS);
    let scene = scene.allowed("3.5", "3.5.0").compared();
    let writes = scene.drained().writes();
    assert!(
        matches!(&writes[..], [Write::NoteVersion { member, version, .. }, Write::DeletePod { member: pod, .. }]
            if member == "b" && pod == "b" && version == "3.5.35"),
        "{writes:?}"
    );
}

/// A member without a volume would have to be replaced to remove the variable. No new member can join during the
/// downgrade, so the operator only changes the image.
#[test]
fn downgrade_without_volumes_keeps_pods_with_unknown_variables() {
    let scene = towards("3.6.16", "3.5.35").with_variable(SKIP_REVERSE_DNS);
    let scene = scene.allowed("3.5", "3.5.0");
    assert_eq!(patched(&scene.compared()), one("b", "3.5.35"));
}

/// etcd rejects new members during a downgrade.
#[test]
fn downgrade_is_canceled_in_etcd_before_member_is_added() {
    let scene = towards("3.6.16", "3.5.35").size(4).reserved("d");
    let next = scene.changes();
    assert!(
        matches!(&next[..], [Write::AddMember { member, learner: true }] if member == "d"),
        "{next:?}"
    );
    assert_eq!(downgrade(&scene.allowed("3.5", "3.5.0")), Some(None));
}

fn deleted(scene: &Scene) -> Vec<String> {
    let writes = scene.drained().writes().into_iter();
    let pods = writes.filter_map(|write| match write {
        Write::DeletePod { member, .. } => Some(member),
        _ => None,
    });
    pods.collect()
}

#[test]
fn changed_pod_settings_recreate_pods_one_by_one() {
    let mut scene = Scene::formed(&["a", "b", "c"]).durable().compared();
    for pod in scene.observed.pods.values_mut() {
        pod.difference.pod = Some("its pod was made for another spec.etcd".into());
    }
    assert_eq!(deleted(&scene), ["b"]);
    let away = scene.without_pod("b");
    assert_eq!(deleted(&away), [""; 0]);
    assert!(
        away.writes()
            .iter()
            .any(|write| scene::makes_pod(write, "b"))
    );
}

/// A pod whose image is changed in place records its former version for a rollback, and a recreated pod does not. If
/// the new version has no image, the operator could not roll back a recreated pod.
#[test]
fn minor_upgrade_changes_image_before_pod_is_recreated() {
    let differ = |mut scene: Scene| {
        for pod in scene.observed.pods.values_mut() {
            pod.difference.pod = Some("its pod was made for another spec.etcd".into());
        }
        scene.durable().compared()
    };
    let scene = differ(towards("3.5.35", "3.6.16"));
    assert_eq!(
        (patched(&scene), deleted(&scene)),
        (one("b", "3.6.16"), vec![])
    );
    let scene = differ(towards("3.6.16", "3.6.16"));
    assert_eq!(
        (patched(&scene), deleted(&scene)),
        (vec![], vec!["b".into()])
    );
    // Within one minor release, the operator recreates the pod without changing its image first, because a rollback
    // within a minor release is always possible.
    let scene = differ(towards("3.5.25", "3.5.35"));
    assert_eq!(
        (patched(&scene), deleted(&scene)),
        (vec![], vec!["b".into()])
    );
}

#[test]
fn changed_repository_in_spec_changes_image_of_members() {
    let mut scene = Scene::formed(&["a", "b", "c"]).compared();
    scene.desired.object.spec.repository = "registry.local/etcd".into();
    assert_eq!(patched(&scene), one("b", "3.6.16"));
}

#[test]
fn learners_join_one_by_one_without_max_learners_flag() {
    let scene = Scene::formed(&["a", "b", "c"]).size(5);
    let scene = scene.reserved("d").reserved("e");
    assert_eq!(scene.changes().len(), 2);
    let mut scene = scene;
    scene.observed.pods.get_mut("b").unwrap().flags.clear();
    assert_eq!(scene.changes().len(), 1);
}

/// Regression: the operator counted the version of a removed member as a version of the cluster.
#[test]
fn version_of_removed_member_does_not_allow_downgrade() {
    let scene = towards("3.5.35", "3.4.23").compared();
    let scene = scene.leftover("z");
    let mut scene = scene.changed("z", "3.4.23", "3.5.35");
    scene.observed.pods.get_mut("z").unwrap().terminating = true;
    assert_eq!(patched(&scene), []);
    assert!(scene.problems().contains(&Reason::VersionRefused));
}

/// Regression: etcd 3.7 does not start while the cluster version is 3.5, even if all members run etcd 3.6.
#[test]
fn invariant_18_upgrade_to_next_minor_release_waits_for_cluster_version() {
    let mut scene = log::prepared(towards("3.6.16", "3.7.3")).compared();
    let stored = |scene: &mut Scene, version: &str| {
        for seen in scene.observed.statuses.values_mut() {
            if let Seen::Known(status) = seen {
                status.storage_version = Some(version.to_owned());
            }
        }
    };
    stored(&mut scene, "3.5.0");
    assert_eq!(patched(&scene), []);
    assert!(scene.waits().contains(&Reason::VersionSettling));
    stored(&mut scene, "3.6.0");
    assert_eq!(patched(&scene), one("b", "3.7.3"));
}
