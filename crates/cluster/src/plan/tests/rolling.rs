//! Versions and pods that change while the cluster serves: one member at a time, and the way back.

use etcd::KeyHash;

use super::scene::{self, Scene};
use crate::reason::Reason;
use crate::snapshot::{Cause, Changed, Seen, Trouble};
use crate::write::Write;

/// A cluster that runs this version, and whose spec says another one.
fn towards(from: &str, to: &str) -> Scene {
    Scene::formed(&["a", "b", "c"]).all_run(from).wants(to)
}

fn patched(scene: &Scene) -> Vec<(String, String)> {
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

fn one(member: &str, version: &str) -> Vec<(String, String)> {
    vec![(member.to_owned(), version.to_owned())]
}

impl Scene {
    fn all_run(mut self, version: &str) -> Self {
        for member in ["a", "b", "c"] {
            self = self.runs(member, version);
        }
        self
    }

    /// The member's pod is made for this version, and it answers with it.
    fn runs(self, member: &str, version: &str) -> Self {
        self.made_for(member, version).answers_as(member, version)
    }

    fn made_for(mut self, member: &str, version: &str) -> Self {
        let pod = self.observed.pods.get_mut(member).unwrap();
        pod.version = Some(version.to_owned());
        pod.image = format!("etcd:v{version}");
        if let Some(disk) = self.observed.disks.get_mut(member) {
            disk.version = Some(version.to_owned());
        }
        self
    }

    fn answers_as(mut self, member: &str, version: &str) -> Self {
        if let Some(Seen::Known(status)) = self.observed.statuses.get_mut(member) {
            status.version = version.to_owned();
        }
        self
    }

    fn wants(mut self, version: &str) -> Self {
        self.desired.version = version.to_owned();
        self.desired.image = format!("etcd:v{version}");
        self
    }

    /// The plan has asked for the members' hashes, and all are the same.
    pub(super) fn compared(mut self) -> Self {
        for member in ["a", "b", "c"] {
            self = self.hash(member, 7);
        }
        self
    }

    fn hash(mut self, member: &str, hash: u32) -> Self {
        let hash = KeyHash { hash, compacted: 0 };
        let hash = Seen::Known(Some(hash));
        self.observed.hashes.insert(member.to_owned(), hash);
        self
    }

    /// Its image was changed, and it has not come back from that.
    fn changed(mut self, member: &str, from: &str, to: &str) -> Self {
        self = self.made_for(member, to);
        let pod = self.observed.pods.get_mut(member).unwrap();
        (pod.ready, pod.running) = (false, false);
        pod.changed = Some(Changed {
            from: from.to_owned(),
            restarts: 0,
            unreadable: false,
        });
        self.observed.statuses.remove(member);
        self
    }

    /// Its pods were made with a flag that 3.5 does not know.
    fn of_the_first_release(mut self) -> Self {
        for pod in self.observed.pods.values_mut() {
            pod.flags = ["--max-learners".to_owned()].into();
        }
        self
    }

    /// The others have gone far ahead.
    fn lags(mut self, member: &str) -> Self {
        for (name, seen) in &mut self.observed.statuses {
            if let Seen::Known(status) = seen {
                let applied = if name == member { 50 } else { 10_000 };
                (status.raft_index, status.raft_applied_index) = (applied, applied);
            }
        }
        self
    }

    fn problems(&self) -> Vec<Reason> {
        let problems = self.plan().problems.into_iter();
        problems.map(|problem| problem.reason).collect()
    }

    fn image_missing(mut self, member: &str) -> Self {
        let pod = self.observed.pods.get_mut(member).unwrap();
        pod.trouble = Some(Trouble::Image("ImagePullBackOff".into()));
        self
    }
}

#[test]
fn the_data_are_compared_before_a_member_is_changed() {
    let scene = towards("3.5.35", "3.6.16");
    let plan = scene.plan();
    assert_eq!((plan.asks, patched(&scene)), (Some(100), vec![]));
    assert_eq!(patched(&scene.compared()), one("b", "3.6.16"));
}

/// Invariant 18.
#[test]
fn invariant_18_followers_go_first_and_one_at_a_time() {
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
    // It answers with its old version until its container is ended.
    let before = towards("3.5.35", "3.6.16").compared();
    let before = before.made_for("b", "3.6.16");
    assert_eq!(patched(&before), []);
    let back = before.answers_as("b", "3.6.16");
    assert_eq!(patched(&back), one("c", "3.6.16"));
}

/// Invariant 18.
#[test]
fn invariant_18_the_leader_hands_over_and_is_the_last() {
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

/// Invariant 18.
#[test]
fn invariant_18_nobody_is_changed_while_another_member_is_not_as_it_should_be() {
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

#[test]
fn members_with_different_data_stop_everything() {
    let scene = towards("3.5.35", "3.6.16").compared().hash("c", 8);
    assert_eq!(patched(&scene), []);
    assert!(scene.problems().contains(&Reason::DataDiffers));
}

#[test]
fn a_member_that_gives_no_hash_is_waited_for() {
    let mut scene = towards("3.5.35", "3.6.16").compared();
    let unknown = Seen::Unknown("no answer".into());
    scene.observed.hashes.insert("c".into(), unknown);
    assert_eq!(patched(&scene), []);
    assert!(scene.waits().contains(&Reason::ComparingData));
}

#[test]
fn no_version_is_skipped_and_no_floor_is_missed() {
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
fn a_bad_image_stops_everything_after_one_member_and_says_so() {
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
fn setting_the_version_back_reaches_the_broken_member_first() {
    let scene = towards("3.5.35", "3.5.35").compared();
    let scene = scene.changed("b", "3.5.35", "3.6.99").image_missing("b");
    assert_eq!(patched(&scene), one("b", "3.5.35"));
    // And a corrected version likewise.
    let scene = towards("3.5.35", "3.6.16").compared();
    let scene = scene.changed("b", "3.5.35", "3.6.99").image_missing("b");
    assert_eq!(patched(&scene), one("b", "3.6.16"));
}

#[test]
fn the_last_member_that_did_not_come_back_takes_the_others_back_with_it() {
    // Its old version is known, so the cluster cannot have gone over to the next one.
    let scene = towards("3.6.16", "3.5.35").compared();
    let scene = scene.changed("c", "3.5.35", "3.6.16").image_missing("c");
    assert_eq!(patched(&scene), one("c", "3.5.35"));
    assert!(!scene.problems().contains(&Reason::VersionRefused));
}

#[test]
fn a_cluster_of_one_with_a_bad_image_is_taken_back_in_the_dark() {
    let scene = Scene::formed(&["a"]).runs("a", "3.5.35").wants("3.5.35");
    let mut scene = scene.changed("a", "3.5.35", "3.5.99").image_missing("a");
    scene.observed.members = Seen::Unknown("no member answers".into());
    assert_eq!(patched(&scene), one("a", "3.5.35"));
    // One that is merely silent is left alone.
    scene.observed.pods.get_mut("a").unwrap().trouble = None;
    assert_eq!(patched(&scene), []);
}

#[test]
fn a_member_that_is_back_is_noted_as_such() {
    let mut scene = towards("3.6.16", "3.6.16");
    let pod = scene.observed.pods.get_mut("b").unwrap();
    pod.changed = Some(Changed {
        from: "3.5.35".into(),
        restarts: 0,
        unreadable: false,
    });
    assert!(scene.writes().is_empty(), "{:?}", scene.writes());
    scene.observed.pods.get_mut("b").unwrap().restarts = 1;
    assert!(matches!(&scene.writes()[..], [Write::SettleImage { member, .. }] if member == "b"));
}

// ---- the way back by etcd's own downgrade ----

/// Allowed, or taken back.
#[expect(clippy::option_option, reason = "as the write has it")]
fn downgrade(scene: &Scene) -> Option<Option<String>> {
    scene.changes().into_iter().find_map(|write| match write {
        Write::Downgrade { to } => Some(to),
        _ => None,
    })
}

impl Scene {
    fn allowed(mut self, version: &str, storage: &str) -> Self {
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
fn etcd_is_told_before_members_go_back_by_a_minor_release() {
    let scene = towards("3.7.3", "3.6.16").compared();
    assert_eq!(downgrade(&scene), Some(Some("3.6".to_owned())));
    assert_eq!(patched(&scene), []);
    let settling = scene.allowed("3.6", "3.7.0");
    assert_eq!((downgrade(&settling), patched(&settling)), (None, vec![]));
    let ready = settling.allowed("3.6", "3.6.0");
    assert_eq!(patched(&ready), one("b", "3.6.16"));
}

#[test]
fn a_downgrade_that_is_not_wanted_any_more_is_taken_back() {
    let scene = towards("3.6.16", "3.6.16").allowed("3.5", "3.5.0");
    assert_eq!(downgrade(&scene), Some(None));
}

#[test]
fn the_way_back_is_in_place_as_well() {
    let scene = towards("3.6.16", "3.5.35").allowed("3.5", "3.5.0");
    assert_eq!(patched(&scene.compared()), one("b", "3.5.35"));
}

/// Flags are not changed in place: 3.5 does not know `--max-learners`.
#[test]
fn a_pod_whose_flags_the_version_does_not_know_is_made_again_on_its_disk() {
    let scene = Scene::formed(&["a", "b", "c"]).durable();
    let scene = scene
        .all_run("3.6.16")
        .wants("3.5.35")
        .of_the_first_release();
    let scene = scene.allowed("3.5", "3.5.0").compared();
    let writes = scene.drained().writes();
    assert!(
        matches!(&writes[..], [Write::NoteVersion { member, version, .. }, Write::DeletePod { member: pod, .. }]
            if member == "b" && pod == "b" && version == "3.5.35"),
        "{writes:?}"
    );
}

#[test]
fn a_pod_without_a_disk_is_followed_by_a_learner_before_it_goes() {
    let scene = towards("3.6.16", "3.5.35").of_the_first_release();
    let scene = scene.allowed("3.5", "3.5.0").compared();
    let writes = scene.writes();
    assert!(
        !writes
            .iter()
            .any(|write| matches!(write, Write::DeletePod { .. }))
    );
    // A Service for the one that follows; nobody is removed.
    assert!(scene.changes().is_empty(), "{:?}", scene.changes());
    assert!(
        writes
            .iter()
            .any(|write| matches!(write, Write::CreateService { .. })),
        "{writes:?}"
    );
    let next = scene.reserved("d").changes();
    assert!(
        matches!(&next[..], [Write::AddMember { member, learner: true }] if member == "d"),
        "{next:?}"
    );
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
fn a_setting_that_needs_a_new_pod_rolls_the_same_way() {
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

/// A pod made with a version that cannot be had knows of no other: a cluster of one could not be taken back.
#[test]
fn another_minor_release_comes_before_a_new_pod() {
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
    // What cannot be had of the same release is gone back from in any pod.
    let scene = differ(towards("3.5.25", "3.5.35"));
    assert_eq!(
        (patched(&scene), deleted(&scene)),
        (vec![], vec!["b".into()])
    );
}

#[test]
fn a_repository_of_another_name_is_another_image() {
    let mut scene = Scene::formed(&["a", "b", "c"]).compared();
    scene.desired.repository = "registry.local/etcd".into();
    assert_eq!(patched(&scene), one("b", "3.6.16"));
}

#[test]
fn learners_join_one_at_a_time_where_a_member_has_no_flag_for_more() {
    let scene = Scene::formed(&["a", "b", "c"]).size(5);
    let scene = scene.reserved("d").reserved("e");
    assert_eq!(scene.changes().len(), 2);
    let mut scene = scene;
    scene.observed.pods.get_mut("b").unwrap().flags.clear();
    assert_eq!(scene.changes().len(), 1);
}

/// Found by the model: set back between the end of the old container and the start of the new one, nothing was
/// counted as a restart afterwards.
#[test]
fn a_member_that_is_set_back_before_it_started_is_not_waited_for_forever() {
    let scene = towards("3.6.16", "3.6.16").changed("b", "3.6.16", "3.7.3");
    let writes = scene.writes();
    let back = writes.iter().find_map(|write| match write {
        Write::PatchImage { changed, .. } => Some(changed.restarts),
        _ => None,
    });
    assert_eq!(back, Some(-1));
}

/// Found by the model: a member that is waited for by everything else has to be mended first.
#[test]
fn a_broken_member_is_set_back_while_another_one_is_missing() {
    let scene = Scene::formed(&["a", "b", "c"])
        .all_run("3.5.35")
        .wants("3.5.35");
    let scene = scene.changed("b", "3.5.35", "3.6.99").image_missing("b");
    let scene = scene.size(4).reserved("d");
    assert!(
        scene.waits().contains(&Reason::VoterNotHealthy),
        "{:?}",
        scene.waits()
    );
    assert_eq!(patched(&scene), one("b", "3.5.35"));
}

/// Found by the model: nobody is replaced while one is down, and the one that is down has to be replaced as well.
#[test]
fn a_broken_member_that_is_to_be_replaced_is_set_back_first() {
    let scene = towards("3.5.35", "3.5.35").compared().durable();
    let mut scene = scene.changed("b", "3.5.35", "3.6.99").image_missing("b");
    let slow = crate::snapshot::Claim {
        class: Some("slow".into()),
        requested: Some(1),
        text: "1".into(),
        capacity: Some(1),
        resizing: None,
    };
    for disk in scene.observed.disks.values_mut() {
        disk.claim.class = Some("fast".into());
    }
    scene.desired.claim = Some(slow);
    assert!(
        scene.waits().contains(&Reason::QuorumAtRisk),
        "{:?}",
        scene.waits()
    );
    assert_eq!(patched(&scene), one("b", "3.5.35"));
}

/// Found by the model: what a member ran that was removed is no version of the cluster.
#[test]
fn what_a_removed_member_ran_opens_no_way_back() {
    let scene = towards("3.5.35", "3.4.23").compared();
    let scene = scene.leftover("z");
    let mut scene = scene.changed("z", "3.4.23", "3.5.35");
    scene.observed.pods.get_mut("z").unwrap().terminating = true;
    assert_eq!(patched(&scene), []);
    assert!(scene.problems().contains(&Reason::VersionRefused));
}

/// Found on real members: 3.7 does not start in a cluster that still speaks 3.5, though all run 3.6.
#[test]
fn invariant_18_the_cluster_speaks_a_release_before_it_is_left() {
    let mut scene = towards("3.6.16", "3.7.3").compared();
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

/// Found by the model: data that cannot be read is not mended by the image, and the member would be waited for for ever.
#[test]
fn a_member_that_was_set_back_and_cannot_read_its_data_is_replaced() {
    let broken = |from: &str| {
        let scene = towards("3.6.16", "3.6.16").changed("b", from, "3.6.16");
        scene.crashes("b", Cause::Data("walpb: crc mismatch".into()), 2, 20)
    };
    assert_eq!(broken("3.5.35").changes(), [], "the way back may be shut");
    // No release of the same minor reads it otherwise.
    assert_eq!(broken("3.6.9").changes(), [scene::remove("b")]);
    assert_eq!(broken("3.6.16").changes(), [scene::remove("b")]);
}

/// Found by the model: its data was damaged before it was set back, to the minor release that the others run.
#[test]
fn a_member_whose_data_neither_of_two_minor_releases_can_read_is_replaced() {
    let damaged = || Cause::Data("walpb: crc mismatch".into());
    let scene = towards("3.5.35", "3.5.35").runs("b", "3.6.16");
    let scene = scene.crashes("b", damaged(), 1, 20);
    // The image is put right all the same: it may be what cannot read the data.
    assert_eq!(patched(&scene), one("b", "3.5.35"));
    let noted = |scene: &Scene| {
        let writes = scene.writes();
        writes.iter().find_map(|write| match write {
            Write::PatchImage { changed, .. } => Some(changed.unreadable),
            _ => None,
        })
    };
    assert_eq!(noted(&scene), Some(true));
    let failed = |cause: Cause| {
        let scene = towards("3.5.35", "3.5.35").runs("b", "3.6.16");
        noted(&scene.crashes("b", cause, 1, 20))
    };
    assert_eq!(failed(Cause::Failed("exit code 1".into())), Some(false));
    let set_back = |unreadable: bool, restarts: i32| {
        let mut scene = towards("3.5.35", "3.5.35").changed("b", "3.6.16", "3.5.35");
        let pod = scene.observed.pods.get_mut("b").unwrap();
        let changed = pod.changed.as_mut().unwrap();
        (changed.restarts, changed.unreadable) = (1, unreadable);
        scene.crashes("b", damaged(), restarts, 20).changes()
    };
    assert_eq!(set_back(true, 4), [], "it has read it twice at most");
    assert_eq!(set_back(true, 5), [scene::remove("b")]);
    assert_eq!(set_back(false, 9), [], "it may be the image");
}

/// What ended last is told until the next one has ended: that one is the old image's, while the new one starts.
#[test]
fn a_member_that_is_set_back_is_not_replaced_for_what_the_image_before_said() {
    let damaged = || Cause::Data("its database cannot be read".into());
    let scene = towards("3.5.35", "3.5.35").runs("b", "3.6.16");
    let scene = scene.crashes("b", damaged(), 1, 20);
    let writes = scene.writes();
    let noted = writes.iter().find_map(|write| match write {
        Write::PatchImage { changed, .. } => Some(changed.clone()),
        _ => None,
    });
    let noted = noted.unwrap();
    assert!(noted.unreadable);
    let started = |restarts: i32| {
        let scene = towards("3.5.35", "3.5.35").changed("b", "3.6.16", "3.5.35");
        let mut scene = scene.crashes("b", damaged(), restarts, 20);
        let pod = scene.observed.pods.get_mut("b").unwrap();
        pod.changed = Some(noted.clone());
        (pod.running, pod.trouble) = (true, None);
        scene.changes()
    };
    assert_eq!(started(2), [], "the first start of the new image");
    // The kubelet had begun the next start of the old one before it heard of the change.
    assert_eq!(started(3), [], "the first start of the new image");
    assert_eq!(started(4), [scene::remove("b")]);
}

/// Both are written beside each other: the note about the next change would be taken away, or that of the last one be
/// taken over.
#[test]
fn a_member_that_has_come_back_is_noted_as_such_before_it_is_changed_again() {
    let noted = |changed: Option<Changed>| {
        let mut scene = towards("3.5.35", "3.5.30").compared().drained();
        let pod = scene.observed.pods.get_mut("b").unwrap();
        (pod.restarts, pod.changed) = (4, changed);
        scene
    };
    let scene = noted(Some(Changed {
        from: "3.6.16".into(),
        restarts: 1,
        unreadable: true,
    }));
    let writes = scene.writes();
    let settles =
        |write: &Write| matches!(write, Write::SettleImage { member, .. } if member == "b");
    assert!(writes.iter().any(settles), "{writes:?}");
    assert_eq!(patched(&scene), []);
    assert_eq!(patched(&noted(None)), one("b", "3.5.30"));
}

/// What an image cannot read that a member was changed to says nothing of what ran before.
#[test]
fn a_member_that_another_image_keeps_away_is_set_back_and_not_replaced() {
    let damaged = Cause::Data("walpb: crc mismatch".into());
    let scene = towards("3.5.35", "3.6.17").changed("b", "3.5.35", "3.6.16");
    let scene = scene.crashes("b", damaged, 2, 20);
    let writes = scene.writes();
    let noted = writes.iter().find_map(|write| match write {
        Write::PatchImage {
            version, changed, ..
        } => Some((version.as_str(), changed.unreadable)),
        _ => None,
    });
    assert_eq!(noted, Some(("3.6.17", false)));
}

/// Found by the model: a learner is changed only when it has failed already, so it does not wait for another image.
#[test]
fn a_learner_that_fails_as_before_with_another_image_is_replaced() {
    let failed = |scene: Scene, member: &str, seconds: i64| {
        let cause = Cause::Failed("exit code 1".into());
        scene.crashes(member, cause, 5, seconds).changes()
    };
    let learner = |from: &str| {
        let scene = towards("3.5.25", "3.5.35").size(4).learner("d");
        scene.changed("d", from, "3.5.35")
    };
    assert_eq!(failed(learner("3.5.25"), "d", 59), []);
    assert_eq!(failed(learner("3.5.25"), "d", 60), [scene::remove("d")]);
    // No voter runs what it was made for.
    assert_eq!(failed(learner("3.5.26"), "d", 60), []);
    // A voter is put right by setting the version back.
    let voter = towards("3.5.25", "3.5.35").changed("b", "3.5.25", "3.5.35");
    assert_eq!(failed(voter, "b", 60), []);
}
