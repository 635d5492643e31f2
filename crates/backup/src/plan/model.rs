//! Thousands of rounds on a model of the API server, the store and the process, with crashes between every two
//! writes, lost answers, stale reads and input that is missing for a while.

use api::EtcdBackup;
use api::conditions::{ConditionType, Reason, is_true};
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use serde_json::json;

use super::{Step, needs_place, plan};
use crate::observed::{Moved, Observed, Place, Stored, Trouble, Work};
use crate::status::status;

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
    /// The store or etcd fails during the transfer.
    TransferFails,
}

#[derive(Default)]
struct Process {
    work: Work,
    not_before: Option<Timestamp>,
    /// How far the transfer is: 0 reads etcd, 1 has committed the object, 2 has written the manifest.
    stage: u8,
}

struct World {
    object: EtcdBackup,
    before: EtcdBackup,
    now: Timestamp,
    process: Process,
    /// The snapshot that lies at the key, by its revision.
    data: Option<i64>,
    manifest: Option<Stored>,
    revision: i64,
    transfers: usize,
    transfers_at_success: Option<usize>,
}

impl World {
    fn new(timeout: Option<i64>) -> Self {
        let object: EtcdBackup = serde_json::from_value(json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2",
            "kind": "EtcdBackup",
            "metadata": { "name": "b", "namespace": "n", "uid": "u", "generation": 1 },
            "spec": {
                "etcdEndpoints": ["http://c:2379"],
                "storageType": "S3",
                "s3": { "path": "bucket/key" },
                "backupPolicy": { "timeoutInSecond": timeout },
            },
        }))
        .unwrap();
        Self {
            before: object.clone(),
            object,
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            process: Process::default(),
            data: None,
            manifest: None,
            revision: 10,
            transfers: 0,
            transfers_at_success: None,
        }
    }

    fn crash(&mut self) {
        self.process = Process::default();
    }

    fn place(&self, object: &EtcdBackup, fault: Fault) -> Place {
        if fault == Fault::InputMissing {
            return Place::Unknown(Trouble::new(Reason::SecretMissing, "missing"));
        }
        let begun = super::intent(object).unwrap();
        match &self.manifest {
            Some(stored) if stored.created_at >= begun && self.data == Some(stored.revision) => {
                Place::Written(stored.clone())
            }
            _ => Place::Free,
        }
    }

    fn reconcile(&mut self, fault: Fault) {
        let seen = if fault == Fault::Stale {
            self.before.clone()
        } else {
            self.object.clone()
        };
        let mut observed = Observed {
            work: self.process.work.clone(),
            not_before: self.process.not_before,
            place: Place::NotAsked,
        };
        if needs_place(&seen, &observed, self.now) {
            observed.place = self.place(&seen, fault);
        }
        let plan = plan(&seen, &observed, self.now);
        if fault == Fault::CrashBeforeAct {
            return self.crash();
        }
        self.act(&seen, plan.step);
        let desired = status(&seen, &plan, self.now);
        if fault == Fault::CrashBeforeStatus {
            return self.crash();
        }
        // A status is written only over the one it was made from.
        let conflict = seen.status != self.object.status;
        if fault != Fault::StatusRefused && !conflict && seen.status.as_ref() != Some(&desired) {
            self.before = self.object.clone();
            self.object.status = Some(desired);
        }
        if fault == Fault::CrashAfterStatus {
            self.crash();
        }
        self.check();
    }

    fn act(&mut self, seen: &EtcdBackup, step: Step) {
        match step {
            Step::Nothing => {}
            Step::RecordIntent => {
                if matches!(self.process.work, Work::Ended(_)) {
                    self.process = Process::default();
                }
            }
            Step::Begin => {
                // Invariant 10: the API server holds the intent before the first byte moves.
                assert!(
                    super::intent(&self.object).is_some()
                        || self.object.status.as_ref().unwrap().succeeded
                );
                assert!(super::intent(seen).is_some());
                self.transfers += 1;
                self.process.stage = 0;
                self.process.work = Work::Running(Moved::default());
            }
            Step::Abandon => {
                self.process.work = Work::Ended(Err(Trouble::new(Reason::StepFailed, "given up")));
            }
        }
    }

    /// The transfer goes one write further.
    fn transfer(&mut self, fault: Fault) {
        if !matches!(self.process.work, Work::Running(_)) {
            return;
        }
        if fault == Fault::TransferFails {
            let trouble = Trouble::new(Reason::StoreUnreachable, "cut off");
            self.process.work = Work::Ended(Err(trouble));
            self.process.not_before = self.now.checked_add(SignedDuration::from_secs(2)).ok();
            return;
        }
        self.process.stage += 1;
        if self.process.stage == 1 {
            self.revision += 1;
            self.data = Some(self.revision);
        } else {
            let stored = Stored {
                location: "s3://bucket/key".to_owned(),
                etcd_version: "3.6.16".to_owned(),
                cluster_id: "aa".to_owned(),
                revision: self.data.unwrap(),
                size: 1,
                sha256: String::new(),
                created_at: self.now,
            };
            self.manifest = Some(stored.clone());
            self.process.work = Work::Ended(Ok(stored));
        }
    }

    fn check(&mut self) {
        let Some(status) = &self.object.status else {
            return;
        };
        let complete = is_true(&status.conditions, &ConditionType::Complete);
        let failed = is_true(&status.conditions, &ConditionType::Failed);
        assert_eq!(status.succeeded, complete);
        assert!(!(complete && failed));
        if complete {
            // Invariant 12: what is reported is in the store, manifest included.
            let manifest = self.manifest.as_ref().unwrap();
            assert_eq!(status.etcd_revision, Some(manifest.revision));
            assert_eq!(self.data, Some(manifest.revision));
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

    fn pass(&mut self, seconds: i64) {
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Invariants 10 and 12 hold after each step, and it ends when the faults stop.
    #[test]
    fn converges_whatever_goes_wrong_meanwhile(
        rounds in prop::collection::vec((faults(), faults(), 0_i64..5), 0..40),
        timeout in prop::option::of(prop_oneof![Just(0_i64), 20_i64..100]),
    ) {
        let mut world = World::new(timeout);
        for (during_reconcile, during_transfer, seconds) in rounds {
            world.reconcile(during_reconcile);
            world.transfer(during_transfer);
            world.pass(seconds);
        }
        for _ in 0..20 {
            world.reconcile(Fault::None);
            world.transfer(Fault::None);
            world.pass(2);
        }
        prop_assert!(world.settled(), "{:?}", world.object.status);
        if timeout == Some(0) {
            prop_assert!(world.object.status.as_ref().unwrap().succeeded);
        }
    }

    /// A crash after the manifest costs no second transfer.
    #[test]
    fn a_transfer_that_was_complete_is_adopted(crash_after in 2_usize..8) {
        let mut world = World::new(None);
        for round in 0..20 {
            let fault = if round == crash_after { Fault::CrashBeforeAct } else { Fault::None };
            world.reconcile(fault);
            if fault == Fault::None { world.transfer(Fault::None) }
            world.pass(1);
            if world.manifest.is_some() && round < crash_after && !world.settled() {
                world.crash();
            }
        }
        prop_assert!(world.object.status.as_ref().unwrap().succeeded);
        if world.manifest.is_some() && crash_after >= 4 {
            prop_assert_eq!(world.transfers, 1);
        }
    }
}
