//! Tests of the verification of a chain.
#![allow(clippy::unwrap_used)]

use std::time::Instant;

use super::*;
use crate::fixture::{BASE_REVISION, base, base_of, chain, limits};
use crate::record::GapReason;
use crate::recorder::Recorder;
use crate::segment::Sealed;

fn check(verifier: &mut Verifier, sealed: &Sealed) -> Result<i64, VerifyError> {
    let segment = verifier.check(sealed.name, &sealed.object)?;
    Ok(segment.header.last)
}

fn first_error(sealed: &[&Sealed]) -> VerifyError {
    let mut verifier = Verifier::new(&base());
    let mut results = sealed.iter().map(|sealed| check(&mut verifier, sealed));
    results.find_map(Result::err).unwrap()
}

#[test]
fn segments_of_valid_chain_pass_verification_in_order() {
    let mut verifier = Verifier::new(&base());
    for sealed in chain(&base(), 3, 2, 0) {
        assert_eq!(check(&mut verifier, &sealed), Ok(sealed.name.last));
    }
    assert_eq!(verifier.last(), BASE_REVISION + 6);
}

#[test]
fn each_fault_of_chain_has_its_own_error() {
    let own = chain(&base(), 4, 2, 0);
    let other = chain(&base(), 4, 2, 1);
    let [a, b, c, _] = own.as_slice() else {
        unreachable!()
    };
    let missing = first_error(&[a, c]);
    assert!(matches!(missing, VerifyError::Missing { last: 12, .. }));
    let duplicate = first_error(&[a, b, b]);
    assert!(matches!(duplicate, VerifyError::Duplicate { .. }));
    let reordered = first_error(&[a, b, a]);
    assert!(matches!(
        reordered,
        VerifyError::Overlapping { last: 14, .. }
    ));
    let branch = first_error(&[a, &other[1]]);
    assert!(matches!(branch, VerifyError::NotLinked { .. }));
    let foreign = chain(&base_of(8, BASE_REVISION), 1, 2, 0);
    let foreign = first_error(&[&foreign[0]]);
    assert!(matches!(
        foreign,
        VerifyError::ForeignCluster {
            expected: 7,
            found: 8,
            ..
        }
    ));
    let older = chain(&base_of(7, 8), 2, 2, 0);
    let older = first_error(&[&older[1]]);
    assert!(matches!(older, VerifyError::OtherBase { found: 8, .. }));
    let swapped = Sealed {
        name: a.name,
        ..b.clone()
    };
    let swapped = first_error(&[&swapped]);
    assert!(matches!(swapped, VerifyError::Misnamed { .. }));
    let truncated = Sealed {
        object: a.object.slice(..a.object.len() - 1),
        ..a.clone()
    };
    let truncated = first_error(&[&truncated]);
    assert!(matches!(
        truncated,
        VerifyError::Invalid {
            error: SegmentError::Truncated { .. },
            ..
        }
    ));
}

#[test]
fn failed_check_leaves_verifier_unchanged() {
    let own = chain(&base(), 2, 2, 0);
    let mut verifier = Verifier::new(&base());
    assert!(check(&mut verifier, &own[1]).is_err());
    assert_eq!(check(&mut verifier, &own[0]), Ok(12));
    assert_eq!(check(&mut verifier, &own[1]), Ok(14));
}

#[test]
fn segment_after_gap_is_rejected() {
    let mut recorder = Recorder::new(&base(), limits());
    let ended = recorder
        .end(GapReason::Compacted, 1, Instant::now())
        .unwrap();
    let mut verifier = Verifier::new(&base());
    assert_eq!(check(&mut verifier, &ended[0]), Ok(BASE_REVISION));
    // The segment `after` continues the segment with the gap, so the check of `after` must fail.
    let tip = Segment {
        records: Vec::new(),
        ..Segment::decode(&ended[0].object).unwrap()
    };
    let mut other = Recorder::resume(&base(), &tip, limits()).unwrap();
    let next = crate::record::Record::Transaction(crate::fixture::transaction(11));
    other.push(next, Instant::now()).unwrap();
    let after = other.seal().unwrap().unwrap();
    let error = check(&mut verifier, &after).unwrap_err();
    assert_eq!(error, VerifyError::AfterGap { name: after.name });
}
