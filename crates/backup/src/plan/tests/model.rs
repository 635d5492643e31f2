//! Thousands of rounds on a model of the API server, the store and the process, with crashes between every two
//! writes, lost answers, stale reads and input that is missing for a while.

use std::collections::BTreeMap;

use api::EtcdBackup;
use api::backup::name::{self, Numbered};
use api::conditions::{ConditionType, find, is_true};
use api::manifest::manifest_key;
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use serde_json::json;

use crate::plan::attempts::MOST;
use crate::plan::{Action, Need, Verdict, intent, need, plan, rules};
use crate::reason::{Reason, Trouble};
use crate::retention::{read, surplus};
use crate::snapshot::{Kept, Listed, Moved, Pace, Place, Snapshot, Stored, Work};
use crate::status::status;

const PATH: &str = "key";

/// What happens in one round, besides the reconcile itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// The process dies before the step.
    CrashBeforeAct,
    /// The process dies after the step and before the status.
    CrashBeforeStatus,
    /// The process dies after the status.
    CrashAfterStatus,
    /// The status is written and the answer lost, or not written at all.
    StatusRefused,
    /// The reconcile sees the object as it was one write ago.
    Stale,
    /// A Secret, the bucket or the cluster is missing.
    InputMissing,
    /// The store or etcd fails during the transfer or the removal.
    TransferFails,
}

#[derive(Default)]
struct Process {
    transfer: Pace<Stored>,
    removal: Pace<Kept>,
    /// How far the transfer is: 0 reads etcd, 1 has committed the object, 2 has written the manifest.
    stage: u8,
    /// What the transfer writes, and what an earlier attempt left.
    begun: Option<Timestamp>,
    left: Option<String>,
    key: String,
    /// What the removal still deletes, in this order, and what it will say.
    deletions: Vec<String>,
    kept: Kept,
    /// When it was started.
    since: Option<Timestamp>,
}

struct World {
    object: EtcdBackup,
    before: EtcdBackup,
    now: Timestamp,
    process: Process,
    /// The snapshots by key, each with its revision.
    data: BTreeMap<String, i64>,
    /// The manifests by the key of their snapshot.
    manifests: BTreeMap<String, Stored>,
    revision: i64,
    transfers: usize,
    transfers_at_success: Option<usize>,
    begun: Option<Timestamp>,
    /// How many processes have died.
    crashes: i32,
}

impl World {
    fn new(timeout: Option<i64>, interval: i64) -> Self {
        let object: EtcdBackup = serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2",
            "kind": "EtcdBackup",
            "metadata": { "name": "b", "namespace": "n", "uid": "u", "generation": 1 },
            "spec": {
                "etcdEndpoints": ["http://c:2379"],
                "storageType": "S3",
                "s3": { "path": "bucket/key" },
                "backupPolicy": {
                    "timeoutInSecond": timeout,
                    "backupIntervalInSecond": interval,
                    "maxBackups": 2,
                },
            },
        }))
        .unwrap();
        Self {
            before: object.clone(),
            object,
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            process: Process::default(),
            data: BTreeMap::new(),
            manifests: BTreeMap::new(),
            revision: 10,
            transfers: 0,
            transfers_at_success: None,
            begun: None,
            crashes: 0,
        }
    }

    fn is_periodic(&self) -> bool {
        self.object.spec.is_periodic()
    }

    fn crash(&mut self) {
        self.crashes += 1;
        self.process = Process {
            since: Some(self.now),
            ..Process::default()
        };
    }

    /// As `transfer::written` looks at it; also what an attempt has left.
    fn place(&self, begun: Timestamp) -> (Place, Option<String>) {
        if !self.is_periodic() {
            let found = self.manifests.get(PATH).filter(|stored| {
                stored.created_at >= begun && self.data.get(PATH) == Some(&stored.revision)
            });
            return (found.cloned().map_or(Place::Free, Place::Written), None);
        }
        let mut left = None;
        for key in self.data.keys() {
            if name::parse(PATH, key).is_some_and(|parts| parts.time == begun) {
                match self.manifests.get(key) {
                    Some(stored) => return (Place::Written(stored.clone()), None),
                    None => left = Some(key.clone()),
                }
            }
        }
        (Place::Free, left)
    }

    fn reconcile(&mut self, fault: Fault) {
        let seen = if fault == Fault::Stale {
            self.before.clone()
        } else {
            self.object.clone()
        };
        let mut snapshot = Snapshot {
            transfer: self.process.transfer.clone(),
            removal: self.process.removal.clone(),
            since: self.process.since,
            ..Snapshot::default()
        };
        let missing = || Trouble::new(Reason::SecretMissing, "missing");
        match need(&seen, &snapshot, self.now) {
            Need::Nothing => {}
            Need::Place if fault == Fault::InputMissing => {
                snapshot.place = Place::Unknown(missing());
            }
            Need::Place => {
                let begun = intent(&seen).unwrap();
                (snapshot.place, self.process.left) = self.place(begun);
                self.process.begun = Some(begun);
            }
            Need::RemoveSurplus | Need::RemoveAll => {
                snapshot.obstacle = (fault == Fault::InputMissing).then(missing);
            }
        }
        let plan = plan(&seen, &snapshot, self.now);
        if fault == Fault::CrashBeforeAct {
            return self.crash();
        }
        self.act(&seen, plan.action);
        let desired = status(&seen, &plan, self.now);
        if fault == Fault::CrashBeforeStatus {
            return self.crash();
        }
        // A status is written only over the one it was made from.
        let conflict = seen.status != self.object.status;
        if fault != Fault::StatusRefused && !conflict {
            if seen.status.as_ref() != Some(&desired) {
                self.before = self.object.clone();
                self.object.status = Some(desired);
            }
            let told = matches!(
                plan.verdict,
                Verdict::Settled | Verdict::Succeeded(_) | Verdict::Failed(_) | Verdict::Tidied(_)
            );
            if told {
                self.forget();
            }
            if let Action::RecordAttempts(count) = plan.action {
                self.start(count);
            }
        }
        if fault == Fault::CrashAfterStatus {
            self.crash();
        }
        self.check();
    }

    fn forget(&mut self) {
        if !self.process.transfer.work.is_active() {
            self.process.transfer = Pace::default();
        }
        if !self.process.removal.work.is_active() {
            self.process.removal = Pace::default();
        }
    }

    /// As `workers::Workers` does it.
    fn start(&mut self, count: i32) {
        if self.process.transfer.work != Work::Called {
            return;
        }
        // Invariant 10: the API server holds the count before the first byte moves.
        let recorded = self.object.status.as_ref().unwrap();
        assert_eq!(recorded.unfinished_attempts, Some(count));
        self.transfers += 1;
        self.process.stage = 0;
        self.process.transfer.counted = Some(count);
        self.process.transfer.work = Work::Running(Moved::default());
    }

    fn act(&mut self, seen: &EtcdBackup, action: Action) {
        match action {
            Action::Nothing | Action::RecordAttempts(_) => {}
            Action::RecordIntent => self.forget(),
            Action::StartTransfer => {
                // Invariant 10: the API server holds the intent before the first byte moves.
                let recorded = self.object.status.as_ref().unwrap();
                assert!(intent(&self.object).is_some() || recorded.completion_time.is_some());
                assert!(intent(seen).is_some());
                self.process.transfer.work = Work::Called;
            }
            Action::AbandonTransfer => {
                self.process.transfer.work =
                    Work::Ended(Err(Trouble::new(Reason::StepFailed, "given up")));
            }
            Action::RemoveSurplus => self.begin_removal(seen),
            Action::SetFinalizer(_) | Action::RemoveAll | Action::DeleteBackup => {
                unreachable!("not asked for here")
            }
        }
    }

    /// As `removal::Removal` does it.
    fn begin_removal(&mut self, seen: &EtcdBackup) {
        let newest = seen.status.as_ref().unwrap().location.clone().unwrap();
        let newest = newest.strip_prefix("s3://bucket/").unwrap();
        let verified = name::parse(PATH, newest).unwrap();
        assert!(self.manifests.contains_key(newest) && self.data.contains_key(newest));
        let manifests: Vec<String> = self.manifests.keys().map(|key| manifest_key(key)).collect();
        let keys = self.data.keys().chain(&manifests);
        let listing = read(PATH, keys.map(String::as_str));
        let gone = surplus(&listing.backups, &rules(seen).unwrap(), verified, self.now);
        let mut deletions = Vec::new();
        for found in &gone {
            deletions.push(found.key.clone());
            deletions.push(manifest_key(&found.key));
        }
        deletions.extend(
            listing
                .orphans
                .iter()
                .filter(|found| found.parts < verified)
                .map(|found| found.key.clone()),
        );
        let kept = listing.backups.iter().filter(|found| !gone.contains(found));
        self.process.kept = Kept {
            backups: kept
                .map(|found| Listed {
                    location: format!("s3://bucket/{}", found.key),
                    parts: found.parts,
                })
                .collect(),
            deleted: gone.len(),
            everything: false,
        };
        deletions.reverse();
        self.process.deletions = deletions;
        self.process.removal.work = Work::Running(Moved::default());
    }

    /// Transfer and removal go one write further.
    fn work(&mut self, fault: Fault) {
        let later = self.now.checked_add(SignedDuration::from_secs(2)).ok();
        let cut_off = || Trouble::new(Reason::StoreUnreachable, "cut off");
        if matches!(self.process.removal.work, Work::Running(_)) {
            if fault == Fault::TransferFails {
                self.process.removal.work = Work::Ended(Err(cut_off()));
                self.process.removal.not_before = later;
            } else if let Some(key) = self.process.deletions.pop() {
                match key.strip_suffix(api::manifest::MANIFEST_SUFFIX) {
                    Some(of) => drop(self.manifests.remove(of)),
                    None => drop(self.data.remove(&key)),
                }
            } else {
                self.process.removal.work = Work::Ended(Ok(std::mem::take(&mut self.process.kept)));
            }
            self.check();
        }
        if matches!(self.process.transfer.work, Work::Running(_)) {
            if fault == Fault::TransferFails {
                self.process.transfer.work = Work::Ended(Err(cut_off()));
                self.process.transfer.not_before = later;
            } else {
                self.transfer();
            }
        }
    }

    fn transfer(&mut self) {
        self.process.stage += 1;
        if self.process.stage == 1 {
            self.revision += 1;
            self.process.key = if self.is_periodic() {
                let parts = Numbered {
                    time: self.process.begun.unwrap(),
                    revision: u64::try_from(self.revision).unwrap(),
                };
                let fresh = name::name(PATH, parts);
                self.process.left.take().unwrap_or(fresh)
            } else {
                PATH.to_owned()
            };
            self.data.insert(self.process.key.clone(), self.revision);
        } else {
            let key = self.process.key.clone();
            let stored = Stored {
                location: format!("s3://bucket/{key}"),
                etcd_version: "3.6.16".to_owned(),
                cluster_id: "aa".to_owned(),
                revision: self.data[&key],
                size: 1,
                sha256: String::new(),
                created_at: self.now,
            };
            self.manifests.insert(key, stored.clone());
            self.process.transfer.work = Work::Ended(Ok(stored));
        }
    }

    fn whole(&self) -> Vec<Numbered> {
        let whole = self
            .manifests
            .keys()
            .filter(|key| self.data.contains_key(*key));
        whole.filter_map(|key| name::parse(PATH, key)).collect()
    }

    fn check(&mut self) {
        let Some(status) = &self.object.status else {
            return;
        };
        let complete = is_true(&status.conditions, &ConditionType::Complete);
        let failed = is_true(&status.conditions, &ConditionType::Failed);
        assert!(!(complete && failed));
        // No more are counted than one that runs, and those that a process died of.
        let counted = status.unfinished_attempts.unwrap_or_default();
        assert!(counted <= self.crashes + 1, "{counted} of {}", self.crashes);
        let cut_off = find(&status.conditions, &ConditionType::Failed)
            .is_some_and(|failed| failed.reason == Reason::AttemptsCutOff.as_str());
        assert!(!cut_off || self.crashes >= MOST);
        if let Some(location) = &status.location {
            // Invariants 9 and 12: what is reported is in the store, manifest included, also while others go.
            let key = location.strip_prefix("s3://bucket/").unwrap();
            let manifest = &self.manifests[key];
            assert_eq!(status.etcd_revision, Some(manifest.revision));
            assert_eq!(self.data.get(key), Some(&manifest.revision));
        }
        if self.is_periodic() {
            let interval = self
                .object
                .spec
                .backup_policy
                .as_ref()
                .unwrap()
                .backup_interval_in_second;
            let begun = status.start_time.as_ref().map(|time| time.0);
            if let (Some(before), Some(now)) = (self.begun, begun)
                && before != now
            {
                let pause = now.duration_since(before).as_secs();
                assert!(pause >= interval.unwrap(), "the next began after {pause} s");
            }
            self.begun = begun;
            // One run makes one backup, however often it is begun.
            let mut times: Vec<Timestamp> = self.whole().iter().map(|parts| parts.time).collect();
            let all = times.len();
            times.dedup();
            assert_eq!(times.len(), all, "one run made two backups");
            return;
        }
        assert_eq!(status.succeeded, complete);
        if complete {
            let then = *self.transfers_at_success.get_or_insert(self.transfers);
            assert_eq!(
                then, self.transfers,
                "a backup that was complete was made again"
            );
        } else {
            assert!(
                self.transfers_at_success.is_none(),
                "success was taken back"
            );
        }
    }

    fn settled(&self) -> bool {
        self.object.status.as_ref().is_some_and(|status| {
            status.succeeded || is_true(&status.conditions, &ConditionType::Failed)
        })
    }

    fn round(&mut self, during_reconcile: Fault, during_work: Fault, seconds: i64) {
        self.reconcile(during_reconcile);
        self.work(during_work);
        self.now += SignedDuration::from_secs(seconds);
    }
}

fn faults() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => Just(Fault::None),
        1 => Just(Fault::CrashBeforeAct),
        1 => Just(Fault::CrashBeforeStatus),
        1 => Just(Fault::CrashAfterStatus),
        1 => Just(Fault::StatusRefused),
        1 => Just(Fault::Stale),
        1 => Just(Fault::InputMissing),
        1 => Just(Fault::TransferFails),
    ]
}

/// Without it such a backup is begun for ever, and whatever else is transferred ends each time.
#[test]
fn a_transfer_that_takes_its_operator_with_it_is_given_up() {
    for interval in [0, 100_000] {
        let mut world = World::new(None, interval);
        for _ in 0..200 {
            world.reconcile(Fault::None);
            if matches!(world.process.transfer.work, Work::Running(_)) {
                world.crash();
                // As long as a kubelet waits.
                world.now += SignedDuration::from_mins(5);
            }
            world.now += SignedDuration::from_secs(1);
        }
        let status = world.object.status.as_ref().unwrap();
        let failed = find(&status.conditions, &ConditionType::Failed).unwrap();
        assert_eq!(
            (failed.status.as_str(), failed.reason.as_str()),
            ("True", "AttemptsCutOff")
        );
        assert_eq!(world.transfers, usize::try_from(MOST).unwrap());
        assert!(status.completion_time.is_some());
        assert_eq!(status.unfinished_attempts, None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Invariants 10 and 12 hold after each step, and it ends when the faults stop.
    #[test]
    fn converges_whatever_goes_wrong_meanwhile(
        rounds in prop::collection::vec((faults(), faults(), 0_i64..5), 0..40),
        timeout in prop::option::of(prop_oneof![Just(0_i64), 20_i64..100]),
    ) {
        let mut world = World::new(timeout, 0);
        for (during_reconcile, during_work, seconds) in rounds {
            world.round(during_reconcile, during_work, seconds);
        }
        for _ in 0..20 {
            world.round(Fault::None, Fault::None, 2);
        }
        prop_assert!(world.settled(), "{:?}", world.object.status);
        if timeout == Some(0) && world.crashes < MOST {
            prop_assert!(world.object.status.as_ref().unwrap().succeeded);
        }
    }

    /// A crash after the manifest costs no second transfer.
    #[test]
    fn a_transfer_that_was_complete_is_adopted(crash_after in 2_usize..8, interval in prop_oneof![Just(0_i64), Just(500)]) {
        let mut world = World::new(None, interval);
        for round in 0..20 {
            let fault = if round == crash_after { Fault::CrashBeforeAct } else { Fault::None };
            world.reconcile(fault);
            if fault == Fault::None { world.work(Fault::None) }
            world.now += SignedDuration::from_secs(1);
            if !world.manifests.is_empty() && round < crash_after && !world.settled() {
                world.crash();
            }
        }
        prop_assert!(world.object.status.as_ref().unwrap().succeeded);
        if !world.manifests.is_empty() && crash_after >= 5 {
            prop_assert_eq!(world.transfers, 1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Invariants 9, 10 and 12 hold after each step of a backup that is made again and again; when the faults stop,
    /// backups go on and no more are kept than wanted, and nothing is left of those that went.
    #[test]
    fn a_periodic_backup_goes_on_whatever_goes_wrong_meanwhile(
        rounds in prop::collection::vec((faults(), faults(), 0_i64..20), 0..120),
        timeout in prop::option::of(prop_oneof![Just(0_i64), 20_i64..100]),
        interval in 20_i64..80,
    ) {
        let mut world = World::new(timeout, interval);
        for (during_reconcile, during_work, seconds) in rounds {
            world.round(during_reconcile, during_work, seconds);
        }
        let calm = world.now;
        for _ in 0..400 {
            world.round(Fault::None, Fault::None, 1);
        }
        prop_assert!(world.begun.unwrap() > calm, "none was begun since");
        // One more than is kept while the next has just been written.
        let kept = world.whole().len();
        prop_assert!((2..=3).contains(&kept), "{kept} are kept: {:?}", world.data);
        let orphans = world.manifests.keys().filter(|key| !world.data.contains_key(*key)).count();
        prop_assert!(orphans == 0 || world.process.removal.work.is_active());
        prop_assert!(world.object.status.as_ref().unwrap().last_success_date.is_some());
    }

    /// Invariant 9 with a pause between two that is shorter than one takes: backups go on, and no more are kept than
    /// wanted.
    #[test]
    fn retention_does_not_starve_when_a_backup_takes_longer_than_its_interval(
        rounds in prop::collection::vec((faults(), faults(), 0_i64..20), 0..60),
        seconds in 2_i64..90,
    ) {
        let mut world = World::new(Some(0), 1);
        for (during_reconcile, during_work, seconds) in rounds {
            world.round(during_reconcile, during_work, seconds);
        }
        let calm = world.now;
        for _ in 0..400 {
            world.round(Fault::None, Fault::None, seconds);
        }
        let last = world.begun.unwrap();
        prop_assert!(last > calm, "none was begun since");
        prop_assert!(world.now.duration_since(last).as_secs() <= 20 * seconds + 60, "they do not go on");
        let kept = world.whole().len();
        prop_assert!((2..=4).contains(&kept), "{kept} are kept: {:?}", world.data);
    }
}
