//! A model of Kubernetes, the kubelet, etcd and the cluster operator. It runs thousands of reconciles with crashes,
//! failed reads, lost pods and changes by users.

use std::collections::BTreeSet;

use api::names::FINALIZER_CLAIM;
use k8s_openapi::jiff::SignedDuration;

use super::*;

mod delayed;
mod execution;
mod mistakes;
mod observation;
mod properties;
mod storage;

use mistakes::Mistake;
use observation::revision;

const UID: &str = "restore-uid";
const ID: &str = "ab";
const BACKUP: i64 = 100;
/// The cluster ID before a restore in place.
const OLD: &str = "cd";
const OLD_MEMBERS: usize = 3;

/// One step of the model.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A complete reconcile.
    Reconcile,
    /// A reconcile whose process crashes before the action.
    CrashBefore,
    /// A reconcile whose process crashes between the action and the write of the status.
    CrashAfter,
    /// A reconcile in which some reads fail. Each bit of the value stands for one read.
    Blind(u8),
    /// The kubelet and etcd take one step.
    Kubelet,
    /// The cluster operator writes the status of the EtcdCluster.
    ClusterOperator,
    /// The seed's pod is lost, and without a volume also its data.
    LosePod,
    /// The seed's pod ends, but its object remains. Without a volume, its data is lost.
    EndPod,
    /// Kubernetes stops creating volumes.
    NoStorage,
    /// The API server rejects every PVC.
    NoQuota,
    /// Kubernetes creates volumes, and the API server accepts PVCs. Ends `NoStorage` and `NoQuota`.
    Storage,
    /// The backup becomes unreadable.
    StoreDown,
    /// The backup becomes readable again.
    StoreUp,
    /// A newer backup is complete, and the spec names it.
    NewerBackup,
    /// Retention deletes all backups except the newest.
    Retention,
    /// A user changes `bumpRevision` in the spec.
    ChangeBump,
    /// The termination message of the seed's container `fetch` is lost.
    LoseMessage,
    /// A user deletes the seed's volume and its pod.
    LoseVolume,
    /// The pods of the old members are lost.
    LoseOld,
    /// A second operator process observes the current state, and is suspended.
    ReadDelayed,
    /// The second process plans and executes an action. It uses the EtcdRestore of `ReadDelayed` and the current state
    /// of all other objects.
    ActDelayed,
    /// The second process plans and executes an action from the objects that it observed in `ReadDelayed`.
    WriteDelayed,
    /// A client writes, if it can connect to a member.
    ClientWrites,
    /// A user deletes the EtcdCluster, and garbage collection deletes its objects.
    DeleteCluster,
    /// A user creates an EtcdCluster with the name of the target, if none exists.
    CreateForeign,
    /// A user deletes the EtcdRestore.
    DeleteRestore,
}

/// The number of a backup, and the `bumpRevision` of the restore.
type Data = (u32, i64);

/// A member of the replaced cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
enum OldMember {
    Running,
    Stopping,
    Deleted,
}

#[allow(
    clippy::struct_excessive_bools,
    reason = "each flag is an independent fact of the model"
)]
#[derive(Clone, Debug, Default)]
struct ModelCluster {
    /// True if a user has created the cluster. Only checks of the model read this field.
    foreign: bool,
    touched: bool,
    lock: bool,
    cluster_id: Option<String>,
    bootstrap: bool,
    available: bool,
    /// `uid` and `version` are the UID and the resourceVersion of the EtcdCluster.
    uid: u32,
    version: u32,
    /// `service` and `volume` are the UIDs of the seed's Service and PVC.
    service: Option<u32>,
    volume: Option<u32>,
    /// The UID of the seed's PVC if the PVC has a volume.
    bound: Option<u32>,
    pod: Option<ModelPod>,
    /// True if the seed has verified data, on its volume or in its pod.
    disk: bool,
    /// The backup from which the data of `disk` was restored.
    disk_of: Data,
    /// The members of the replaced cluster.
    old: Vec<OldMember>,
    acknowledged: i64,
    /// True if a restore has overwritten acknowledged writes.
    lost_writes: bool,
}

#[allow(
    clippy::struct_excessive_bools,
    reason = "each flag is an independent fact of the model"
)]
#[derive(Clone, Debug, Default, PartialEq)]
struct ModelPod {
    /// The UID of the pod.
    uid: u32,
    /// The backup that the pod downloads.
    of: Data,
    /// True if the pod accepts only a snapshot with the recorded SHA-256.
    checks_sha256: bool,
    fetched: bool,
    /// True if the termination message of the pod's container `fetch` is lost.
    report_lost: bool,
    prepared: bool,
    serving: bool,
    /// True if the pod has the labels of the cluster.
    joined: bool,
    /// True if the pod has ended.
    ended: bool,
}

#[allow(
    clippy::struct_excessive_bools,
    reason = "each flag is an independent fact of the model"
)]
#[derive(Clone, Debug)]
struct World {
    restore: EtcdRestore,
    cluster: Option<ModelCluster>,
    durable: bool,
    good_backup: bool,
    store_up: bool,
    /// Whether Kubernetes creates volumes (`storage`), and whether the API server accepts PVCs (`quota`).
    storage: bool,
    quota: bool,
    /// `newest` and `oldest` are the numbers of the newest and the oldest existing backup.
    newest: u32,
    oldest: u32,
    /// The backups of all seeds so far. Only checks of the model read this field.
    seeds_of: BTreeSet<Data>,
    in_place: bool,
    /// A deliberate mistake of the operator, which the model must detect.
    mistake: Option<Mistake>,
    /// True if old members or the seed's volume were lost for another reason than the restore.
    losses: bool,
    /// True if backups have a manifest with the SHA-256.
    manifests: bool,
    /// The last number that was used as a UID or a resourceVersion.
    stamps: u32,
    /// The objects that the second operator process observed before it was suspended.
    delayed: Option<Box<World>>,
    /// True if the second process has executed an action.
    two: bool,
    /// True if the current action is an action of the second process.
    is_delayed: bool,
    /// True if the EtcdRestore does not exist any more.
    deleted: bool,
}

impl ModelCluster {
    /// True if all old members are running.
    fn is_old_complete(&self) -> bool {
        !self.old.is_empty() && self.old.iter().all(|member| *member == OldMember::Running)
    }

    fn has_cut_over(&self) -> bool {
        self.cluster_id.as_deref() == Some(ID)
    }
}

impl World {
    fn new(durable: bool, good_backup: bool) -> Self {
        let spec =
            r#"{"etcdCluster":{"name":"main"},"backupStorageType":"S3","s3":{"path":"b/k"}}"#;
        let mut restore = EtcdRestore::new("again", serde_json::from_str(spec).unwrap());
        restore.metadata.uid = Some(UID.into());
        restore.metadata.generation = Some(1);
        Self {
            restore,
            cluster: None,
            durable,
            good_backup,
            store_up: true,
            storage: true,
            quota: true,
            newest: 0,
            oldest: 0,
            seeds_of: BTreeSet::new(),
            in_place: false,
            mistake: None,
            losses: false,
            manifests: true,
            stamps: 0,
            delayed: None,
            two: false,
            is_delayed: false,
            deleted: false,
        }
    }

    /// A model of a restore in place.
    fn replacing(durable: bool, good_backup: bool) -> Self {
        let mut world = Self::new(durable, good_backup);
        world.in_place = true;
        world.restore.spec.overwrite = true;
        world.cluster = Some(ModelCluster {
            cluster_id: Some(OLD.into()),
            bootstrap: true,
            available: true,
            old: vec![OldMember::Running; OLD_MEMBERS],
            ..ModelCluster::default()
        });
        world
    }

    /// Returns a new unique number for a UID or a resourceVersion.
    fn stamp(&mut self) -> u32 {
        self.stamps += 1;
        self.stamps
    }

    fn write_status(&mut self, plan: &Plan) {
        self.restore.status = Some(crate::status::compute(&self.restore, plan, None, &epoch()));
    }

    fn kubelet(&mut self) {
        let (durable, good) = (self.durable, self.good_backup && self.store_up);
        let (oldest, storage) = (self.oldest, self.storage);
        let Some(cluster) = &mut self.cluster else {
            return;
        };
        if storage {
            cluster.bound = cluster.volume;
        }
        for member in &mut cluster.old {
            if *member == OldMember::Stopping {
                *member = OldMember::Deleted;
            }
        }
        let disk = cluster.disk;
        let Some(pod) = &mut cluster.pod else {
            // After the handover, the cluster operator creates a missing pod on the volume of the seed.
            if durable && disk && !cluster.lock && cluster.has_cut_over() {
                cluster.pod = Some(ModelPod {
                    fetched: true,
                    prepared: true,
                    joined: true,
                    ..ModelPod::default()
                });
            }
            return;
        };
        if pod.ended {
            // After the handover, the cluster operator deletes an ended pod whose data is on a volume.
            if durable && disk && !cluster.lock && cluster.has_cut_over() {
                cluster.pod = None;
            }
            return;
        }
        if pod.prepared {
            pod.serving = true;
        } else if !pod.fetched {
            let bound = cluster.volume.is_some() && cluster.bound == cluster.volume;
            pod.fetched = (!durable || bound) && (disk || (good && pod.of.0 >= oldest));
        } else {
            pod.prepared = true;
            if !disk && cluster.acknowledged > 0 {
                cluster.lost_writes = true;
            }
            if !disk {
                cluster.disk_of = pod.of;
            }
            cluster.disk = true;
        }
    }

    fn happen(&mut self, step: Step) {
        if self.deleted
            && matches!(
                step,
                Step::Reconcile | Step::CrashBefore | Step::CrashAfter | Step::Blind(_)
            )
        {
            return;
        }
        match step {
            Step::DeleteRestore => {
                self.restore.metadata.deletion_timestamp = Some(epoch());
                self.end_of_restore();
            }
            Step::Reconcile => self.reconcile(None, true, true),
            Step::CrashBefore => self.reconcile(None, false, false),
            Step::CrashAfter => self.reconcile(None, true, false),
            Step::Blind(mask) => self.reconcile(Some(mask), true, true),
            Step::Kubelet => self.kubelet(),
            Step::NoStorage => self.storage = false,
            Step::NoQuota => self.quota = false,
            Step::Storage => (self.storage, self.quota) = (true, true),
            Step::StoreDown => self.store_up = false,
            Step::StoreUp => self.store_up = true,
            Step::NewerBackup => self.newest += 1,
            Step::Retention => self.oldest = self.newest,
            Step::DeleteCluster => {
                // A user may change the spec, so the next EtcdCluster may be restored from another backup. Therefore
                // `seeds_of` forgets the backups of the earlier seeds.
                self.cluster = None;
                self.seeds_of.clear();
            }
            Step::ChangeBump => self.change_bump(),
            Step::LoseMessage => {
                let pod = self.cluster.as_mut().and_then(|it| it.pod.as_mut());
                if let Some(pod) = pod {
                    pod.report_lost |= pod.fetched;
                }
            }
            Step::LoseVolume => self.lose_volume(),
            Step::LoseOld => self.lose_old(),
            Step::ReadDelayed => self.read_delayed(),
            Step::ActDelayed => self.act_delayed(false),
            Step::WriteDelayed => self.act_delayed(true),
            Step::CreateForeign => {
                self.cluster.get_or_insert_with(|| ModelCluster {
                    foreign: true,
                    available: true,
                    cluster_id: Some("ff".into()),
                    ..ModelCluster::default()
                });
            }
            Step::ClusterOperator => {
                let version = self.stamp();
                if let Some(cluster) = self.cluster.as_mut().filter(|cluster| !cluster.foreign) {
                    let serves = cluster.pod.as_ref().is_some_and(|pod| pod.serving);
                    cluster.available = if cluster.has_cut_over() {
                        serves && !cluster.lock
                    } else {
                        cluster.is_old_complete()
                    };
                    // Without the lock and before the cutover, the seed is not a member, so the cluster operator
                    // deletes its Service and its volume.
                    if !cluster.lock && !cluster.has_cut_over() && self.in_place {
                        (cluster.service, cluster.volume) = (None, None);
                    }
                    cluster.version = version;
                }
            }
            Step::LosePod => self.lose_pod(),
            Step::EndPod => {
                if let Some(cluster) = &mut self.cluster
                    && let Some(pod) = cluster.pod.as_mut()
                {
                    (pod.ended, pod.serving) = (true, false);
                    cluster.disk &= self.durable;
                    cluster.available = false;
                }
            }
            Step::ClientWrites => {
                // Clients can write to the pod after the cutover if it serves and has the labels of the cluster
                // (`joined`), because Services select the pod by these labels.
                if let Some(cluster) = self
                    .cluster
                    .as_mut()
                    .filter(|cluster| cluster.has_cut_over())
                    && cluster
                        .pod
                        .as_ref()
                        .is_some_and(|pod| pod.serving && pod.joined)
                {
                    cluster.acknowledged += 1;
                }
            }
        }
        self.check();
    }

    fn change_bump(&mut self) {
        let spec = &mut self.restore.spec;
        spec.mark_compacted = !spec.mark_compacted;
        spec.bump_revision = spec.mark_compacted.then_some(1000);
        self.restore.metadata.generation = self.restore.metadata.generation.map(|it| it + 1);
    }

    fn lose_pod(&mut self) {
        let cluster = self.cluster.as_mut();
        if let Some(cluster) = cluster.filter(|cluster| cluster.pod.is_some()) {
            cluster.pod = None;
            cluster.disk &= self.durable;
            cluster.available = false;
        }
    }

    fn lose_volume(&mut self) {
        let durable = self.durable;
        if let Some(cluster) = self
            .cluster
            .as_mut()
            .filter(|it| durable && it.volume.is_some())
        {
            (cluster.pod, cluster.volume, cluster.disk) = (None, None, false);
            cluster.available = false;
            self.losses = true;
        }
    }

    fn lose_old(&mut self) {
        if let Some(cluster) = self.cluster.as_mut().filter(|it| !it.old.is_empty()) {
            cluster.old.fill(OldMember::Deleted);
            cluster.available &= cluster.has_cut_over();
            self.losses = true;
        }
    }

    fn reconcile(&mut self, blind: Option<u8>, write: bool, status: bool) {
        let snapshot = self.observe(blind);
        // All problems were reported at `epoch()`. Five minutes later, their time limits have passed.
        let now = epoch().0 + SignedDuration::from_mins(5);
        let mut plan = plan_at(&self.restore, &snapshot, now);
        self.mistake_about_storage(&snapshot, &mut plan);
        let stopped = |it: &ModelCluster| {
            it.has_cut_over()
                && !it.old.is_empty()
                && it.old.iter().all(|it| *it == OldMember::Deleted)
        };
        if self.mistake == Some(Mistake::TreatsVolumeAsData)
            && matches!(plan.action, Action::CreatePod | Action::ReplacePod(_))
            && self.cluster.as_ref().is_some_and(stopped)
        {
            plan.action = Action::ReleaseLock;
        }
        if write {
            if !self.quota && matches!(plan.action, Action::CreatePvc) {
                let none = Trouble::new(Reason::StorageMissing, "exceeded quota");
                plan = missing_storage::pvc_rejected(&self.restore, &snapshot, none, now);
            }
            self.act(&plan.action);
            if let Action::SetFinalizer(_) = plan.action {
                self.end_of_restore();
                return;
            }
        }
        if status {
            let before = self.succeeded();
            self.write_status(&plan);
            if self.succeeded() && !before {
                self.check_success();
            }
        }
    }

    /// Removes the EtcdRestore and the objects that it owns, if it has a deletion timestamp and no finalizer.
    fn end_of_restore(&mut self) {
        let has_finalizer = self.restore.metadata.finalizers.is_some();
        if self.restore.metadata.deletion_timestamp.is_none() || has_finalizer || self.deleted {
            return;
        }
        self.deleted = true;
        if let Some(cluster) = self.cluster.as_ref().filter(|cluster| cluster.lock) {
            assert!(
                cluster.old.is_empty() && !cluster.has_cut_over(),
                "the EtcdRestore was deleted, but its lock remains on a complete cluster"
            );
            self.cluster = None;
        }
    }

    fn succeeded(&self) -> bool {
        self.restore
            .status
            .as_ref()
            .is_some_and(|status| status.succeeded)
    }

    /// Checks the model when the restore first reports success.
    fn check_success(&self) {
        let cluster = self
            .cluster
            .as_ref()
            .expect("success is reported without a cluster");
        assert!(
            self.good_backup,
            "success is reported, but the backup cannot be read"
        );
        assert!(
            !cluster.foreign,
            "success is reported for a cluster that a user created"
        );
        assert!(
            cluster.pod.as_ref().is_some_and(|pod| pod.serving),
            "success is reported, but the seed does not serve"
        );
        let status = self.restore.status.as_ref().unwrap();
        assert_eq!(status.restored_revision, Some(revision(cluster.disk_of)));
        assert_eq!(status.cluster_id.as_deref(), cluster.cluster_id.as_deref());
    }

    fn check(&self) {
        assert!(
            self.two || self.seeds_of.len() < 2,
            "one restore created seeds from different backups (invariant 10)"
        );
        let Some(cluster) = &self.cluster else { return };
        assert!(
            !cluster.touched,
            "a cluster that a user created was changed (invariant 9)"
        );
        assert!(!cluster.lost_writes, "acknowledged writes were overwritten");
        if !self.good_backup && !cluster.foreign {
            assert!(
                !cluster.has_cut_over(),
                "a cluster was handed over, but its backup is unreadable"
            );
        }
        let joined = cluster.pod.as_ref().is_some_and(|pod| pod.joined);
        if cluster.has_cut_over() && cluster.disk && joined && !in_place::is_aborted(&self.restore)
        {
            assert_eq!(
                Some(cluster.disk_of),
                self.recorded(),
                "the data of the cluster is not from the recorded backup (invariants 10 and 11)"
            );
        }
        let before = cluster.old.iter().any(|old| *old != OldMember::Deleted);
        let after = cluster.pod.as_ref().is_some_and(|pod| pod.joined);
        assert!(
            !(before && after),
            "clients can reach two clusters (invariant 17)"
        );
        if self.durable && !cluster.old.is_empty() && !self.losses {
            assert!(
                cluster.is_old_complete() || cluster.disk,
                "the old cluster is incomplete, and the new cluster is not verified (invariant 9)"
            );
        }
        if !cluster.lock && !cluster.foreign {
            assert!(
                cluster.cluster_id.is_some(),
                "the lock was released before the cluster ID was recorded (invariant 10)"
            );
        }
    }

    /// Ends all faults, and runs reconciles until the restore has ended.
    fn end_faults(&mut self) {
        self.store_up = true;
        self.happen(Step::Storage);
        self.run_to_end();
    }

    fn run_to_end(&mut self) {
        for _ in 0..40 {
            self.happen(Step::Reconcile);
            self.happen(Step::Kubelet);
            self.happen(Step::ClusterOperator);
        }
    }
}

fn epoch() -> k8s_openapi::apimachinery::pkg::apis::meta::v1::Time {
    k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH)
}
