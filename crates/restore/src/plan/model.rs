//! Thousands of rounds of plan and act on a small model of Kubernetes, the kubelet, etcd and the cluster operator,
//! with crashes between every two writes, lost replies, unknown answers, lost pods, and people who interfere.

use proptest::prelude::*;

use super::*;
use crate::observed::Seed;

const UID: &str = "restore-uid";
const ID: &str = "00000000000000ab";
const BACKUP: i64 = 100;

/// What happens between two reconciles.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// One whole reconcile.
    Reconcile,
    /// A reconcile whose process ends before its write.
    CrashBefore,
    /// A reconcile whose process ends after its write and before its status.
    CrashAfter,
    /// A reconcile in which some read fails.
    Blind(u8),
    /// The kubelet and etcd make one step of progress.
    Kubelet,
    /// The cluster operator reports once.
    ClusterOperator,
    /// The seed's pod is lost, and with it what lay in the pod.
    LosePod,
    /// The backup cannot be read for now.
    StoreDown,
    /// The backup can be read.
    StoreUp,
    /// A client writes, if it can reach anything.
    ClientWrites,
    /// Somebody deletes the EtcdCluster; garbage collection takes what it owned.
    DeleteCluster,
    /// Somebody creates an EtcdCluster of that name, if there is none.
    StrangerCreates,
}

#[allow(
    clippy::struct_excessive_bools,
    reason = "what exists and what happened, one by one"
)]
#[derive(Clone, Debug, Default)]
struct ModelCluster {
    /// Whose it is, for the model's own checks only.
    stranger: bool,
    touched: bool,
    claim: bool,
    cluster_id: Option<String>,
    bootstrap: bool,
    available: bool,
    service: bool,
    volume: bool,
    pod: Option<ModelPod>,
    /// The verified data of the seed: on its volume, or in the pod.
    disk: bool,
    acknowledged: i64,
    /// Acknowledged writes that a restore threw away.
    lost_writes: bool,
}

#[derive(Clone, Debug, Default)]
struct ModelPod {
    prepared: bool,
    serving: bool,
}

#[derive(Clone, Debug)]
struct World {
    restore: EtcdRestore,
    cluster: Option<ModelCluster>,
    durable: bool,
    good_backup: bool,
    store_up: bool,
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
        }
    }

    fn observe(&self, blind: Option<u8>) -> Observed {
        let hidden = |what: u8| blind.is_some_and(|mask| mask & (1 << what) != 0);
        let mut observed = Observed {
            cluster: Cluster::Absent,
            source: if self.store_up {
                Source::Ready(Box::default())
            } else {
                Source::Unavailable(Trouble::new(Reason::StoreUnreachable, "down"))
            },
            seed: Seed::not_asked(),
            serving: Serving::NotAsked,
        };
        if let Some(cluster) = &self.cluster {
            observed.cluster = Cluster::Present(Box::new(ClusterFacts {
                claim: cluster.claim.then(|| UID.to_owned()),
                cluster_id: cluster.cluster_id.clone(),
                available: cluster.available,
                durable: self.durable,
                problems: vec![],
            }));
            observed.seed = self.seed(cluster, &hidden);
            observed.serving = match &cluster.pod {
                Some(pod) if pod.serving && !hidden(3) => Serving::Serves {
                    cluster_id: ID.into(),
                    revision: BACKUP + cluster.acknowledged,
                },
                _ => Serving::Unknown("no answer".into()),
            };
        }
        if hidden(0) {
            observed.cluster = Cluster::Unknown("timeout".into());
        }
        observed
    }

    fn seed(&self, cluster: &ModelCluster, hidden: &dyn Fn(u8) -> bool) -> Seed {
        let child = |there: bool, what: u8| match (hidden(what), there) {
            (true, _) => Child::Unknown("timeout".into()),
            (false, true) => Child::Present,
            (false, false) => Child::Absent,
        };
        let pod = match &cluster.pod {
            _ if hidden(2) => Pod::Unknown("timeout".into()),
            None => Pod::Absent,
            Some(pod) => Pod::Present(PodFacts {
                trouble: (!self.good_backup && !pod.prepared)
                    .then(|| Trouble::new(Reason::SnapshotUnreadable, "sha256 differs")),
                restored: pod.prepared.then_some(BACKUP),
            }),
        };
        Seed {
            service: child(cluster.service, 1),
            claim: child(cluster.volume, 1),
            pod,
        }
    }

    fn act(&mut self, step: &Step) {
        // Invariant 9: what a stranger owns is never written to.
        if !matches!(
            step,
            Step::Nothing | Step::RecordIntent(_) | Step::RecordRestored { .. }
        ) && let Some(cluster) = &mut self.cluster
            && cluster.stranger
            && !matches!(step, Step::CreateCluster(_))
        {
            cluster.touched = true;
        }
        match (step, &mut self.cluster) {
            (Step::CreateCluster(_), None) => {
                self.cluster = Some(ModelCluster {
                    claim: true,
                    ..ModelCluster::default()
                });
            }
            (Step::CreateService, Some(cluster)) => cluster.service = true,
            (Step::CreateClaim, Some(cluster)) => cluster.volume = true,
            (Step::CreatePod, Some(cluster)) => {
                assert!(
                    cluster.service && (cluster.volume || !self.durable),
                    "a pod before what it needs"
                );
                cluster.pod.get_or_insert_default();
            }
            (Step::RecordFormed { cluster_id }, Some(cluster)) => {
                cluster.cluster_id = Some(cluster_id.clone());
                cluster.bootstrap = true;
            }
            (Step::ReleaseClaim, Some(cluster)) => {
                // Invariant 10: what the cluster operator needs is in the status before the claim goes.
                assert!(
                    cluster.cluster_id.is_some() && cluster.bootstrap,
                    "released without a record"
                );
                cluster.claim = false;
            }
            _ => {}
        }
    }

    fn write_status(&mut self, plan: &Plan) {
        let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
            k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
        );
        self.restore.status = Some(crate::status::compute(&self.restore, plan, None, &now));
    }

    fn kubelet(&mut self) {
        let (durable, good) = (self.durable, self.good_backup && self.store_up);
        let Some(cluster) = &mut self.cluster else {
            return;
        };
        let disk = cluster.disk;
        let Some(pod) = &mut cluster.pod else {
            // The cluster operator puts the member back on its disk once the cluster is its own.
            if durable && disk && !cluster.claim && cluster.cluster_id.is_some() {
                cluster.pod = Some(ModelPod {
                    prepared: true,
                    serving: false,
                });
            }
            return;
        };
        if pod.prepared {
            pod.serving = true;
        } else if disk || good {
            pod.prepared = true;
            if !disk && cluster.acknowledged > 0 {
                cluster.lost_writes = true;
            }
            cluster.disk = true;
        }
    }

    fn happen(&mut self, fate: Fate) {
        match fate {
            Fate::Reconcile => self.reconcile(None, true, true),
            Fate::CrashBefore => self.reconcile(None, false, false),
            Fate::CrashAfter => self.reconcile(None, true, false),
            Fate::Blind(mask) => self.reconcile(Some(mask), true, true),
            Fate::Kubelet => self.kubelet(),
            Fate::StoreDown => self.store_up = false,
            Fate::StoreUp => self.store_up = true,
            Fate::DeleteCluster => self.cluster = None,
            Fate::StrangerCreates => {
                self.cluster.get_or_insert_with(|| ModelCluster {
                    stranger: true,
                    available: true,
                    cluster_id: Some("ff".into()),
                    ..ModelCluster::default()
                });
            }
            Fate::ClusterOperator => {
                if let Some(cluster) = self.cluster.as_mut().filter(|cluster| !cluster.stranger) {
                    let serves = cluster.pod.as_ref().is_some_and(|pod| pod.serving);
                    cluster.available = serves && !cluster.claim && cluster.cluster_id.is_some();
                }
            }
            Fate::LosePod => {
                if let Some(cluster) = self
                    .cluster
                    .as_mut()
                    .filter(|cluster| cluster.pod.is_some())
                {
                    cluster.pod = None;
                    cluster.disk &= self.durable;
                    cluster.available = false;
                }
            }
            Fate::ClientWrites => {
                // The client Service has endpoints once the cluster ID is recorded.
                if let Some(cluster) = self
                    .cluster
                    .as_mut()
                    .filter(|cluster| cluster.cluster_id.is_some())
                    && cluster.pod.as_ref().is_some_and(|pod| pod.serving)
                {
                    cluster.acknowledged += 1;
                }
            }
        }
        self.check();
    }

    fn reconcile(&mut self, blind: Option<u8>, write: bool, status: bool) {
        let plan = plan(&self.restore, &self.observe(blind));
        if write {
            self.act(&plan.step);
        }
        if status {
            let before = self.succeeded();
            self.write_status(&plan);
            if self.succeeded() && !before {
                self.check_success();
            }
        }
    }

    fn succeeded(&self) -> bool {
        self.restore
            .status
            .as_ref()
            .is_some_and(|status| status.succeeded)
    }

    /// What `succeeded` means, at the moment it is first said.
    fn check_success(&self) {
        let cluster = self.cluster.as_ref().expect("succeeded without a cluster");
        assert!(
            self.good_backup,
            "succeeded with a backup that cannot be read"
        );
        assert!(!cluster.stranger, "succeeded with a stranger's cluster");
        assert!(
            cluster.pod.as_ref().is_some_and(|pod| pod.serving),
            "succeeded without serving"
        );
        let status = self.restore.status.as_ref().unwrap();
        assert_eq!(status.restored_revision, Some(BACKUP));
        assert_eq!(status.cluster_id.as_deref(), cluster.cluster_id.as_deref());
    }

    fn check(&self) {
        let Some(cluster) = &self.cluster else { return };
        assert!(
            !cluster.touched,
            "a stranger's cluster was touched (invariant 9)"
        );
        assert!(
            !cluster.lost_writes,
            "acknowledged writes were restored over"
        );
        if !self.good_backup && !cluster.stranger {
            assert!(
                cluster.cluster_id.is_none(),
                "an unreadable backup was handed over"
            );
        }
        if !cluster.claim && !cluster.stranger {
            assert!(
                cluster.cluster_id.is_some(),
                "released without a cluster ID (invariant 10)"
            );
        }
    }

    /// Nothing goes wrong any more; says whether the restore settled.
    fn calm_down(&mut self) {
        self.store_up = true;
        for _ in 0..40 {
            self.happen(Fate::Reconcile);
            self.happen(Fate::Kubelet);
            self.happen(Fate::ClusterOperator);
        }
    }
}

fn fates(people: bool) -> impl Strategy<Value = Vec<Fate>> {
    let one = prop_oneof![
        12 => Just(Fate::Reconcile),
        3 => Just(Fate::CrashBefore),
        4 => Just(Fate::CrashAfter),
        4 => any::<u8>().prop_map(Fate::Blind),
        8 => Just(Fate::Kubelet),
        4 => Just(Fate::ClusterOperator),
        3 => Just(Fate::ClientWrites),
        1 => Just(Fate::StoreDown),
        2 => Just(Fate::StoreUp),
        2 => Just(Fate::LosePod),
        1 => Just(Fate::DeleteCluster),
        1 => Just(Fate::StrangerCreates),
    ];
    let kept = move |fate| match fate {
        Fate::DeleteCluster | Fate::StrangerCreates if !people => Fate::Reconcile,
        fate => fate,
    };
    prop::collection::vec(one.prop_map(kept), 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    /// Invariants 1, 9, 10 and 11 hold after every step, whatever happens.
    #[test]
    fn invariant_9_nothing_of_anybodys_is_destroyed(durable: bool, good: bool, fates in fates(true)) {
        let mut world = World::new(durable, good);
        for fate in fates {
            world.happen(fate);
        }
        world.calm_down();
    }

    /// Without people in its way, and with a disk that survives its pod, it comes to its end.
    #[test]
    fn a_durable_restore_completes_when_the_faults_stop(fates in fates(false)) {
        let mut world = World::new(true, true);
        for fate in fates {
            world.happen(fate);
        }
        world.calm_down();
        prop_assert!(world.succeeded(), "{:?} {:?}", world.restore.status, world.cluster);
    }

    /// A restore into pods completes as long as the seed is not lost after the handover began.
    #[test]
    fn a_restore_without_volumes_completes_unless_its_only_copy_is_lost(fates in fates(false)) {
        let mut world = World::new(false, true);
        let mut lost = false;
        for fate in fates {
            let formed = world.cluster.as_ref().is_some_and(|cluster| cluster.cluster_id.is_some());
            lost |= matches!(fate, Fate::LosePod) && formed;
            world.happen(fate);
        }
        world.calm_down();
        prop_assert!(world.succeeded() || lost, "{:?} {:?}", world.restore.status, world.cluster);
    }

    /// An unreadable backup never completes, and never hands anything over.
    #[test]
    fn an_unreadable_backup_never_succeeds(durable: bool, fates in fates(true)) {
        let mut world = World::new(durable, false);
        for fate in fates {
            world.happen(fate);
        }
        world.calm_down();
        prop_assert!(!world.succeeded());
    }
}

#[test]
fn a_quiet_restore_completes_in_a_dozen_rounds() {
    let mut world = World::new(true, true);
    let mut rounds = 0;
    while !world.succeeded() {
        rounds += 1;
        assert!(rounds < 14, "{:?}", world.restore.status);
        world.happen(Fate::Reconcile);
        world.happen(Fate::Kubelet);
        world.happen(Fate::ClusterOperator);
    }
}
