//! Tests of the recorder.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::fixture::{BASE_REVISION, base, base_of, chain, limits, records, transaction};
use crate::verify::Verifier;

fn recorder() -> Recorder {
    Recorder::new(&base(), limits())
}

fn push(recorder: &mut Recorder, revision: i64) -> Result<Option<Sealed>, RecorderError> {
    recorder.push(Record::Transaction(transaction(revision)), Instant::now())
}

#[test]
fn recorded_segments_form_a_chain() {
    let mut recorder = recorder();
    let mut verifier = Verifier::new(&base());
    let mut expected = Vec::new();
    for revision in 11..40 {
        for record in records(revision) {
            expected.push(record.clone());
            assert_eq!(recorder.push(record, Instant::now()).unwrap(), None);
        }
        if revision % 7 == 0 {
            let sealed = recorder.seal().unwrap().unwrap();
            let segment = verifier.check(sealed.name, &sealed.object).unwrap();
            assert_eq!(segment.records, std::mem::take(&mut expected));
        }
    }
    assert_eq!(verifier.last(), 35);
    assert_eq!(recorder.last(), 39);
}

#[test]
fn full_segment_is_sealed_before_next_record() {
    let mut recorder = Recorder::new(
        &base(),
        Limits {
            bytes: 200,
            ..limits()
        },
    );
    let mut sealed = Vec::new();
    for revision in 11..31 {
        sealed.extend(push(&mut recorder, revision).unwrap());
    }
    sealed.extend(recorder.seal().unwrap());
    assert!(sealed.len() > 5, "{}", sealed.len());
    let mut verifier = Verifier::new(&base());
    for segment in &sealed {
        let decoded = verifier.check(segment.name, &segment.object).unwrap();
        assert!(decoded.header.body <= 200, "{}", decoded.header.body);
    }
    assert_eq!(verifier.last(), 30);
}

#[test]
fn record_larger_than_segment_limit_gets_own_segment() {
    let tiny = Limits {
        bytes: 1,
        ..limits()
    };
    let mut recorder = Recorder::new(&base(), tiny);
    assert_eq!(push(&mut recorder, 11).unwrap(), None);
    let first = push(&mut recorder, 12).unwrap().unwrap();
    assert_eq!((first.name.first, first.name.last), (11, 11));
}

#[test]
fn transactions_out_of_order_are_rejected() {
    let mut recorder = recorder();
    push(&mut recorder, 11).unwrap();
    for revision in [10, 11, 13] {
        let error = push(&mut recorder, revision).unwrap_err();
        let is_expected = matches!(
            error,
            RecorderError::OutOfOrder { expected: 12, found } if found == revision
        );
        assert!(is_expected, "{error}");
    }
    push(&mut recorder, 12).unwrap();
    assert_eq!(recorder.last(), 12);
}

#[test]
fn recorded_times_do_not_decrease_if_clock_is_set_back() {
    let mut recorder = recorder();
    for (revision, observed) in [(11, 9_000), (12, 500), (13, 9_001)] {
        let next = Transaction {
            observed,
            ..transaction(revision)
        };
        recorder
            .push(Record::Transaction(next), Instant::now())
            .unwrap();
    }
    let sealed = recorder.seal().unwrap().unwrap();
    let segment = Segment::decode(&sealed.object).unwrap();
    let times: Vec<i64> = segment
        .records
        .iter()
        .map(|record| match record {
            Record::Transaction(it) => it.observed,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(times, [9_000, 9_000, 9_001]);
}

#[test]
fn gap_ends_the_chain() {
    let mut recorder = recorder();
    push(&mut recorder, 11).unwrap();
    let sealed = recorder
        .end(GapReason::Compacted, 77, Instant::now())
        .unwrap();
    let [last] = sealed.as_slice() else {
        panic!("{sealed:?}");
    };
    let segment = Segment::decode(&last.object).unwrap();
    let Some(Record::Gap(gap)) = segment.records.last() else {
        panic!("{segment:?}");
    };
    assert_eq!((gap.after, gap.reason), (11, GapReason::Compacted));
    let error = push(&mut recorder, 12).unwrap_err();
    assert!(matches!(error, RecorderError::Ended { after: 11 }));
    let resumed = Recorder::resume(&base(), &segment, limits());
    assert!(matches!(resumed, Err(RecorderError::Ended { after: 11 })));
}

#[test]
fn recorder_resumes_only_after_last_segment_of_same_chain() {
    let stored = chain(&base(), 2, 3, 0);
    let mut verifier = Verifier::new(&base());
    let mut tip = None;
    for sealed in &stored {
        tip = Some(verifier.check(sealed.name, &sealed.object).unwrap());
    }
    let tip = tip.unwrap();
    let mut resumed = Recorder::resume(&base(), &tip, limits()).unwrap();
    assert_eq!(resumed.last(), BASE_REVISION + 6);
    push(&mut resumed, BASE_REVISION + 7).unwrap();
    let next = resumed.seal().unwrap().unwrap();
    let segment = verifier.check(next.name, &next.object).unwrap();
    // After a restart of the recorder, the observed times in the chain must not decrease.
    let Some(Record::Transaction(first)) = segment.records.first() else {
        panic!("{segment:?}");
    };
    assert_eq!(first.observed, 5_000_000);
    for other in [base_of(8, BASE_REVISION), base_of(7, 3)] {
        let resumed = Recorder::resume(&other, &tip, limits());
        assert!(matches!(resumed, Err(RecorderError::OtherChain)));
    }
}

#[test]
fn segment_is_due_one_interval_after_its_first_record() {
    let mut recorder = recorder();
    assert_eq!(recorder.deadline(), None);
    assert_eq!(recorder.seal().unwrap(), None);
    let begun = Instant::now();
    recorder
        .push(Record::Transaction(transaction(11)), begun)
        .unwrap();
    let later = begun + Duration::from_millis(500);
    recorder
        .push(Record::Transaction(transaction(12)), later)
        .unwrap();
    assert_eq!(recorder.deadline(), Some(begun + Duration::from_secs(1)));
    recorder.seal().unwrap().unwrap();
    assert_eq!(recorder.deadline(), None);
}

#[test]
fn leases_are_unknown_until_recorded() {
    let mut recorder = recorder();
    let next = transaction(11);
    assert_eq!(recorder.unknown_leases(&next), BTreeSet::from([9]));
    for record in records(11) {
        recorder.push(record, Instant::now()).unwrap();
    }
    assert_eq!(recorder.unknown_leases(&next), BTreeSet::new());
}
