//! A model of the API server, the store and the operator process. It runs thousands of reconciles with random faults,
//! such as crashes, stale reads and missing inputs.

use std::collections::BTreeMap;

use api::EtcdBackup;
use api::backup::name::{self, Numbered};
use api::conditions::{ConditionType, find, is_true};
use api::manifest::manifest_key;
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use serde_json::json;

use crate::plan::attempts::MAX_UNFINISHED;
use crate::plan::{Action, Need, Verdict, intent, need, plan, rules};
use crate::reason::{Reason, Trouble};
use crate::retention::{read, surplus};
use crate::snapshot::{
    Destination, Listed, Moved, RemovalResult, Snapshot, Stored, Work, WorkState,
};
use crate::status::status;

const PATH: &str = "key";

/// The fault in one round of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// The process crashes before it executes the action.
    CrashBeforeAct,
    /// The process crashes between the action and the write of the status.
    CrashBeforeStatus,
    /// The process crashes after the write of the status.
    CrashAfterStatus,
    /// The API server rejects the write of the status.
    StatusRejected,
    /// The reconcile reads the EtcdBackup without its last write.
    Stale,
    /// A Secret, the bucket or the cluster is missing.
    InputMissing,
    /// The store or etcd fails during the transfer or the removal.
    TransferFails,
}

#[derive(Default)]
struct Process {
    transfer: WorkState<Stored>,
    removal: WorkState<RemovalResult>,
    /// The progress of the transfer. 0: it reads from etcd, 1: the object is committed, 2: the manifest is written.
    stage: u8,
    begun: Option<Timestamp>,
    /// The key of an object that an earlier attempt stored without a manifest.
    leftover: Option<String>,
    key: String,
    /// The keys that the removal has not deleted yet. The last key is deleted next.
    deletions: Vec<String>,
    /// The result that the removal returns at its end.
    result: RemovalResult,
    /// The time at which the operator process started.
    since: Option<Timestamp>,
}

struct World {
    object: EtcdBackup,
    /// The EtcdBackup before its last write.
    stale: EtcdBackup,
    now: Timestamp,
    process: Process,
    /// The revisions of the stored snapshots, by key.
    data: BTreeMap<String, i64>,
    /// The stored manifests, by the key of their snapshot.
    manifests: BTreeMap<String, Stored>,
    revision: i64,
    transfers: usize,
    transfers_at_success: Option<usize>,
    begun: Option<Timestamp>,
    /// Number of crashes of the operator process.
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
            stale: object.clone(),
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

    /// Models `transfer::earlier_attempt`: returns the result of earlier attempts, and the key of their incomplete
    /// object.
    fn destination(&self, begun: Timestamp) -> (Destination, Option<String>) {
        if !self.is_periodic() {
            let found = self.manifests.get(PATH).filter(|stored| {
                stored.created_at >= begun && self.data.get(PATH) == Some(&stored.revision)
            });
            let found = found.cloned();
            return (found.map_or(Destination::Free, Destination::Complete), None);
        }
        let mut leftover = None;
        for key in self.data.keys() {
            if name::parse(PATH, key).is_some_and(|parts| parts.time == begun) {
                match self.manifests.get(key) {
                    Some(stored) => return (Destination::Complete(stored.clone()), None),
                    None => leftover = Some(key.clone()),
                }
            }
        }
        (Destination::Free, leftover)
    }

    fn reconcile(&mut self, fault: Fault) {
        let observed = if fault == Fault::Stale {
            self.stale.clone()
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
        match need(&observed, &snapshot, self.now) {
            Need::Nothing | Need::Clock => {}
            Need::Destination if fault == Fault::InputMissing => {
                snapshot.destination = Destination::Unknown(missing());
            }
            Need::Destination => {
                let begun = intent(&observed).unwrap();
                (snapshot.destination, self.process.leftover) = self.destination(begun);
                self.process.begun = Some(begun);
            }
            Need::RemoveSurplus | Need::RemoveAll => {
                snapshot.obstacle = (fault == Fault::InputMissing).then(missing);
            }
        }
        let plan = plan(&observed, &snapshot, self.now);
        if fault == Fault::CrashBeforeAct {
            return self.crash();
        }
        self.act(&observed, plan.action);
        let desired = status(&observed, &plan, self.now);
        if fault == Fault::CrashBeforeStatus {
            return self.crash();
        }
        // The operator writes the status with the observed resourceVersion, so the API server rejects the write if the
        // object has changed.
        let conflict = observed.status != self.object.status;
        if fault != Fault::StatusRejected && !conflict {
            if observed.status.as_ref() != Some(&desired) {
                self.stale = self.object.clone();
                self.object.status = Some(desired);
            }
            let is_final = matches!(
                plan.verdict,
                Verdict::Unchanged
                    | Verdict::Succeeded(_)
                    | Verdict::Failed(_)
                    | Verdict::RetentionApplied(_)
            );
            if is_final {
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
            self.process.transfer = WorkState::default();
        }
        if !self.process.removal.work.is_active() {
            self.process.removal = WorkState::default();
        }
    }

    /// Models `Workers::start`.
    fn start(&mut self, count: i32) {
        if self.process.transfer.work != Work::Ready {
            return;
        }
        // Invariant 10: the status counts the attempt before its transfer starts.
        let recorded = self.object.status.as_ref().unwrap();
        assert_eq!(recorded.unfinished_attempts, Some(count));
        self.transfers += 1;
        self.process.stage = 0;
        self.process.transfer.recorded_count = Some(count);
        self.process.transfer.work = Work::Running(Moved::default());
    }

    fn act(&mut self, observed: &EtcdBackup, action: Action) {
        match action {
            Action::Nothing | Action::RecordAttempts(_) => {}
            Action::RecordIntent => self.forget(),
            Action::StartTransfer => {
                // Invariant 10: the status contains the start of the backup before its transfer starts.
                let recorded = self.object.status.as_ref().unwrap();
                assert!(intent(&self.object).is_some() || recorded.completion_time.is_some());
                assert!(intent(observed).is_some());
                self.process.transfer.work = Work::Ready;
            }
            Action::AbandonTransfer => {
                self.process.transfer.work =
                    Work::Ended(Err(Trouble::new(Reason::StepFailed, "canceled")));
            }
            Action::RemoveSurplus => self.begin_removal(observed),
            Action::SetFinalizer(_) | Action::RemoveAll | Action::DeleteBackup => {
                unreachable!("the spec has no deletionPolicy and no TTL")
            }
        }
    }

    fn begin_removal(&mut self, observed: &EtcdBackup) {
        let newest = observed.status.as_ref().unwrap().location.clone().unwrap();
        let newest = newest.strip_prefix("s3://bucket/").unwrap();
        let verified = name::parse(PATH, newest).unwrap();
        assert!(self.manifests.contains_key(newest) && self.data.contains_key(newest));
        let manifests: Vec<String> = self.manifests.keys().map(|key| manifest_key(key)).collect();
        let keys = self.data.keys().chain(&manifests);
        let listing = read(PATH, keys.map(String::as_str));
        let rules = rules(observed).unwrap();
        let removed = surplus(&listing.backups, &rules, verified, self.now);
        let mut deletions = Vec::new();
        for found in &removed {
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
        let kept = listing
            .backups
            .iter()
            .filter(|found| !removed.contains(found));
        self.process.result = RemovalResult {
            backups: kept
                .map(|found| Listed {
                    location: format!("s3://bucket/{}", found.key),
                    parts: found.parts,
                })
                .collect(),
            deleted: removed.len(),
            everything: false,
        };
        deletions.reverse();
        self.process.deletions = deletions;
        self.process.removal.work = Work::Running(Moved::default());
    }

    /// Advances the transfer and the removal by one write.
    fn work(&mut self, fault: Fault) {
        let later = self.now.checked_add(SignedDuration::from_secs(2)).ok();
        let failure = || Trouble::new(Reason::StoreUnreachable, "unreachable");
        if matches!(self.process.removal.work, Work::Running(_)) {
            if fault == Fault::TransferFails {
                self.process.removal.work = Work::Ended(Err(failure()));
                self.process.removal.not_before = later;
            } else if let Some(key) = self.process.deletions.pop() {
                match key.strip_suffix(api::manifest::MANIFEST_SUFFIX) {
                    Some(backup) => drop(self.manifests.remove(backup)),
                    None => drop(self.data.remove(&key)),
                }
            } else {
                let result = std::mem::take(&mut self.process.result);
                self.process.removal.work = Work::Ended(Ok(result));
            }
            self.check();
        }
        if matches!(self.process.transfer.work, Work::Running(_)) {
            if fault == Fault::TransferFails {
                self.process.transfer.work = Work::Ended(Err(failure()));
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
                let new = name::name(PATH, parts);
                self.process.leftover.take().unwrap_or(new)
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
                keys: None,
                encryption_key: None,
                created_at: self.now,
            };
            self.manifests.insert(key, stored.clone());
            self.process.transfer.work = Work::Ended(Ok(stored));
        }
    }

    fn complete(&self) -> Vec<Numbered> {
        let complete = self
            .manifests
            .keys()
            .filter(|key| self.data.contains_key(*key));
        complete.filter_map(|key| name::parse(PATH, key)).collect()
    }

    fn check(&mut self) {
        let Some(status) = &self.object.status else {
            return;
        };
        let complete = is_true(&status.conditions, &ConditionType::Complete);
        let failed = is_true(&status.conditions, &ConditionType::Failed);
        assert!(!(complete && failed));
        // Each crash leaves at most one unfinished attempt, and one attempt may be running.
        let counted = status.unfinished_attempts.unwrap_or_default();
        assert!(
            counted <= self.crashes + 1,
            "{counted} attempts, {} crashes",
            self.crashes
        );
        let exhausted = find(&status.conditions, &ConditionType::Failed)
            .is_some_and(|failed| failed.reason == Reason::AttemptsCutOff.as_str());
        assert!(!exhausted || self.crashes >= MAX_UNFINISHED);
        if let Some(location) = &status.location {
            // Invariants 9 and 12: the store contains the reported backup and its manifest, even during a removal.
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
            if let (Some(last), Some(now)) = (self.begun, begun)
                && last != now
            {
                let pause = now.duration_since(last).as_secs();
                assert!(
                    pause >= interval.unwrap(),
                    "the next backup started after only {pause} s"
                );
            }
            self.begun = begun;
            // Each scheduled run results in at most one backup, even after several attempts.
            let complete = self.complete();
            let mut times: Vec<Timestamp> = complete.iter().map(|parts| parts.time).collect();
            let all = times.len();
            times.dedup();
            assert_eq!(
                times.len(),
                all,
                "one scheduled time resulted in two backups"
            );
            return;
        }
        assert_eq!(status.succeeded, complete);
        if complete {
            let at_success = *self.transfers_at_success.get_or_insert(self.transfers);
            assert_eq!(at_success, self.transfers, "a complete backup was repeated");
        } else {
            assert!(
                self.transfers_at_success.is_none(),
                "the status no longer reports the success"
            );
        }
    }

    fn has_outcome(&self) -> bool {
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
        1 => Just(Fault::StatusRejected),
        1 => Just(Fault::Stale),
        1 => Just(Fault::InputMissing),
        1 => Just(Fault::TransferFails),
    ]
}

/// Each attempt crashes the operator. Without the limit of unfinished attempts, the operator would repeat this backup
/// forever, and each crash would interrupt all other transfers.
#[test]
fn backup_fails_if_its_transfer_repeatedly_crashes_operator() {
    for interval in [0, 100_000] {
        let mut world = World::new(None, interval);
        for _ in 0..200 {
            world.reconcile(Fault::None);
            if matches!(world.process.transfer.work, Work::Running(_)) {
                world.crash();
                // The kubelet delays the restart of a crashed container by at most five minutes.
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
        assert_eq!(world.transfers, usize::try_from(MAX_UNFINISHED).unwrap());
        assert!(status.completion_time.is_some());
        assert_eq!(status.unfinished_attempts, None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Invariants 10 and 12 hold after each step. When no more faults happen, the backup succeeds or fails.
    #[test]
    fn backup_reaches_final_state_after_faults_stop(
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
        prop_assert!(world.has_outcome(), "{:?}", world.object.status);
        if timeout == Some(0) && world.crashes < MAX_UNFINISHED {
            prop_assert!(world.object.status.as_ref().unwrap().succeeded);
        }
    }

    /// A crash after the write of the manifest causes no second transfer.
    #[test]
    fn complete_backup_is_adopted_after_crash(crash_after in 2_usize..8, interval in prop_oneof![Just(0_i64), Just(500)]) {
        let mut world = World::new(None, interval);
        for round in 0..20 {
            let fault = if round == crash_after { Fault::CrashBeforeAct } else { Fault::None };
            world.reconcile(fault);
            if fault == Fault::None { world.work(Fault::None) }
            world.now += SignedDuration::from_secs(1);
            if !world.manifests.is_empty() && round < crash_after && !world.has_outcome() {
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

    /// Invariants 9, 10 and 12 hold after each step of a periodic EtcdBackup. When no more faults happen, backups
    /// continue, the retention rules are applied, and every manifest has its snapshot.
    #[test]
    fn periodic_backups_continue_after_faults(
        rounds in prop::collection::vec((faults(), faults(), 0_i64..20), 0..120),
        timeout in prop::option::of(prop_oneof![Just(0_i64), 20_i64..100]),
        interval in 20_i64..80,
    ) {
        let mut world = World::new(timeout, interval);
        for (during_reconcile, during_work, seconds) in rounds {
            world.round(during_reconcile, during_work, seconds);
        }
        let faults_end = world.now;
        for _ in 0..400 {
            world.round(Fault::None, Fault::None, 1);
        }
        prop_assert!(world.begun.unwrap() > faults_end, "no backup started after the faults");
        // The retention rules keep two backups. A third backup exists if the newest backup is stored, but the rules
        // were not applied yet.
        let kept = world.complete().len();
        prop_assert!((2..=3).contains(&kept), "{kept} backups are kept: {:?}", world.data);
        let orphans = world.manifests.keys().filter(|key| !world.data.contains_key(*key)).count();
        prop_assert!(orphans == 0 || world.process.removal.work.is_active());
        prop_assert!(world.object.status.as_ref().unwrap().last_success_date.is_some());
    }

    /// Invariant 9: if each backup takes longer than the interval, backups continue and the retention rules are
    /// applied.
    #[test]
    fn retention_runs_if_backups_take_longer_than_interval(
        rounds in prop::collection::vec((faults(), faults(), 0_i64..20), 0..60),
        seconds in 2_i64..90,
    ) {
        let mut world = World::new(Some(0), 1);
        for (during_reconcile, during_work, seconds) in rounds {
            world.round(during_reconcile, during_work, seconds);
        }
        let faults_end = world.now;
        for _ in 0..400 {
            world.round(Fault::None, Fault::None, seconds);
        }
        let last = world.begun.unwrap();
        prop_assert!(last > faults_end, "no backup started after the faults");
        prop_assert!(world.now.duration_since(last).as_secs() <= 20 * seconds + 60, "no further backup started");
        let kept = world.complete().len();
        prop_assert!((2..=4).contains(&kept), "{kept} backups are kept: {:?}", world.data);
    }
}
