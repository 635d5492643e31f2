//! Random EtcdBackups. An API server without validation may store such objects, for example with the CRD of
//! coreos/etcd-operator. The planner must return a plan and a status for each of them.

use proptest::prelude::*;

use super::*;

fn text() -> impl Strategy<Value = Value> {
    prop_oneof![
        3 => Just(json!("")),
        3 => prop::sample::select(vec![
            "S3", "PVC", "Local", "bucket/key", "bucket", "/", "//", "..", "@daily", "* * * * *", "0 0 30 2 *", "Etc/UTC",
            "1h", "-1h", "99999999999999999999h", "zstd", "Delete", "2026-01-01T00:00:00Z",
        ])
        .prop_map(|text| json!(text)),
        2 => ".{0,20}".prop_map(|text| json!(text)),
    ]
}

fn number(max: i64) -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(-1),
        Just(0),
        Just(1),
        Just(max),
        Just(-max),
        -100..100_i64
    ]
    .prop_map(|number| json!(number))
}

/// The JSON pointer of a field, and a random value for the field.
fn field() -> impl Strategy<Value = (&'static str, Value)> {
    let texts = prop::sample::select(vec![
        "/spec/storageType",
        "/spec/compression",
        "/spec/deletionPolicy",
        "/spec/s3/path",
        "/spec/s3/endpoint",
        "/spec/s3/awsSecret",
        "/spec/etcdEndpoints/0",
        "/spec/etcdCluster/name",
        "/spec/clientTLSSecret",
        "/spec/backupPolicy/schedule",
        "/spec/backupPolicy/timeZone",
        "/spec/backupPolicy/maxAge",
        "/status/location",
    ]);
    let wide = prop::sample::select(vec![
        "/spec/backupPolicy/backupIntervalInSecond",
        "/spec/backupPolicy/maxBackups",
        "/spec/backupPolicy/timeoutInSecond",
        "/spec/backupPolicy/startingDeadlineSeconds",
        "/status/progress/totalBytes",
        "/metadata/generation",
    ]);
    let narrow = prop::sample::select(vec![
        "/spec/ttlSecondsAfterFinished",
        "/spec/backupPolicy/retention/keepHourly",
        "/spec/backupPolicy/retention/keepMonthly",
        "/status/unfinishedAttempts",
    ]);
    let times = prop::sample::select(vec![
        "/status/startTime",
        "/status/completionTime",
        "/status/lastSuccessDate",
        "/metadata/creationTimestamp",
        "/metadata/deletionTimestamp",
    ]);
    let time = prop::sample::select(vec![
        "0001-01-01T00:00:00Z",
        "1970-01-01T00:00:00Z",
        "2027-01-15T08:00:00Z",
        "9999-12-30T00:00:00Z",
    ]);
    let removed = prop::sample::select(vec![
        "/spec/s3",
        "/spec/backupPolicy",
        "/spec/etcdEndpoints",
    ]);
    prop_oneof![
        4 => (texts, text()),
        4 => (wide, number(i64::MAX)),
        1 => (narrow, number(i64::from(i32::MAX))),
        2 => (times, time.prop_map(|time| json!(time))),
        1 => (removed, Just(Value::Null)),
        1 => (Just("/status/succeeded"), any::<bool>().prop_map(|holds| json!(holds))),
    ]
}

/// Sets the value at a JSON pointer, and creates missing parent objects.
fn put(object: &mut Value, pointer: &str, value: Value) {
    let mut at = object;
    for part in pointer.split('/').skip(1) {
        at = if part.parse::<usize>().is_ok() {
            *at = json!([null]);
            &mut at[0]
        } else {
            if !at.is_object() {
                *at = json!({});
            }
            &mut at[part]
        };
    }
    *at = value;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn planner_never_panics_on_parsable_etcdbackup(
        fields in prop::collection::vec(field(), 0..8),
        work in prop::sample::select(vec![0, 1, 2, 3, 4, 5, 6]),
        second in prop::sample::select(vec![0, 5, 100_000, -100_000]),
    ) {
        let mut object = serde_json::to_value(fresh()).unwrap();
        for (pointer, value) in fields {
            put(&mut object, pointer, value);
        }
        // An object that cannot be parsed is skipped, because the controller only reports it and never plans it.
        let Ok(backup) = serde_json::from_value::<EtcdBackup>(object) else {
            return Ok(());
        };
        let total = Some(u64::MAX);
        let moved = Moved { bytes: u64::MAX, total };
        let mut snapshot = match work {
            0 => Snapshot::default(),
            1 => known(Work::Running(moved), Destination::NotRead),
            2 => known(Work::Ended(Ok(stored())), Destination::NotRead),
            3 => known(Work::Ended(Err(refused())), Destination::Unknown(refused())),
            4 => known(Work::Ready, Destination::NotRead),
            5 => known(Work::Idle, Destination::Free),
            _ => known(Work::Idle, Destination::Complete(stored())),
        };
        if second > 0 {
            snapshot.removal.work = Work::Ended(Err(refused()));
        }
        need(&backup, &snapshot, at(second));
        let plan = plan(&backup, &snapshot, at(second));
        notices(&backup, &plan);
        let next = after(backup, &plan, at(second));
        // The EtcdBackup with its new status can be parsed and planned.
        let read: EtcdBackup = serde_json::from_value(serde_json::to_value(&next).unwrap()).unwrap();
        super::plan(&read, &Snapshot::default(), at(second + 1));
        // Invariant 15: the plan starts no backup for a rejected spec.
        if crate::plan::refusal(&read).is_some() {
            prop_assert!(!matches!(plan.action, Action::StartTransfer | Action::RecordIntent), "{plan:?}");
        }
    }
}
