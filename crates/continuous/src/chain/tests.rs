//! Tests of finding the chain of a base.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::fixture::{BASE_REVISION, base, base_of, chain};

fn names(count: usize, tag: i64) -> Vec<SegmentName> {
    let sealed = chain(&base(), count, 2, tag);
    sealed.iter().map(|sealed| sealed.name).collect()
}

fn find(names: &[SegmentName]) -> Chain {
    Chain::find(base().name, names)
}

#[test]
fn chain_is_found_in_reversed_and_in_empty_listing() {
    let expected = names(4, 0);
    let mut listed = expected.clone();
    listed.reverse();
    let chain = find(&listed);
    assert_eq!(chain.segments, expected);
    assert_eq!((chain.branches, chain.faults), (vec![], vec![]));
    assert_eq!(chain.last, BASE_REVISION + 8);
    let empty = find(&[]);
    assert_eq!(empty.last, BASE_REVISION);
    assert_eq!((empty.segments, empty.faults), (vec![], vec![]));
}

#[test]
fn chain_ends_before_missing_segment() {
    let mut listed = names(4, 0);
    listed.remove(1);
    let chain = find(&listed);
    assert_eq!(chain.segments, listed[..1]);
    let fault = ChainFault::Missing {
        after: 12,
        next: 15,
    };
    assert_eq!(chain.faults, [fault]);
    let name = base().name;
    assert_eq!(chain.check(name, 12), Ok(()));
    assert_eq!(chain.check(name, 10), Ok(()));
    let error = chain.check(name, 13).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("between the revisions 12 and 15")
    );
    assert!(matches!(
        chain.check(name, 9),
        Err(RangeError::BeforeBase { .. })
    ));
}

#[test]
fn duplicate_segment_is_reported_and_used_once() {
    let mut listed = names(3, 0);
    let expected = listed.clone();
    listed.push(listed[1]);
    let chain = find(&listed);
    assert_eq!(chain.segments, expected);
    assert_eq!(chain.faults, [ChainFault::Duplicate(expected[1])]);
}

#[test]
fn chain_uses_longest_branch_of_concurrent_recorders() {
    let (short, long) = (names(2, 1), names(3, 2));
    for listed in [[short.clone(), long.clone()], [long.clone(), short.clone()]] {
        let chain = find(&listed.concat());
        assert_eq!(chain.segments, long);
        let mut branches = chain.branches.clone();
        branches.sort();
        assert_eq!(branches, short);
        assert_eq!(chain.faults, []);
    }
    // If two branches have the same last revision and the same length, the branch whose last segment has the smaller
    // name is used.
    let (one, other) = (names(2, 1), names(2, 2));
    let expected = if one[1] < other[1] { &one } else { &other };
    assert_eq!(
        &find(&[one.clone(), other.clone()].concat()).segments,
        expected
    );
}

#[test]
fn overlapping_segment_is_reported() {
    let mut listed = names(2, 0);
    let overlapping = SegmentName {
        first: 12,
        last: 14,
        previous: listed[0].digest,
        digest: base_of(1, 1).digest.short(),
    };
    listed.push(overlapping);
    let chain = find(&listed);
    assert_eq!(chain.segments, listed[..2]);
    let fault = ChainFault::Overlapping {
        name: overlapping,
        last: 12,
    };
    assert_eq!(chain.faults, [fault]);
}

#[test]
fn segment_of_another_base_is_reported() {
    let mut listed = names(3, 0);
    let foreign = chain(&base_of(8, BASE_REVISION), 2, 2, 0);
    listed.extend(foreign.iter().map(|sealed| sealed.name));
    let chain = find(&listed);
    assert_eq!(chain.segments, listed[..3]);
    assert_eq!(chain.faults, [ChainFault::Unlinked(foreign[0].name)]);
}

#[test]
fn search_for_chain_ends_if_segments_form_circle() {
    let (a, b) = (base_of(1, 1).digest.short(), base_of(2, 2).digest.short());
    let circle = [(a, b), (b, a)].map(|(previous, digest)| SegmentName {
        first: 11,
        last: 10,
        previous,
        digest,
    });
    assert_eq!(find(&circle).faults.len(), 1);
    let own = base().digest.short();
    let circle = [(own, a), (a, own)].map(|(previous, digest)| SegmentName {
        first: 11,
        last: 10,
        previous,
        digest,
    });
    assert_eq!(find(&circle).segments.len(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any segments may be missing. The search does not panic, and the revisions of the chain are consecutive.
    #[test]
    fn chain_of_incomplete_listing_is_consecutive_and_reports_faults(
        keep in proptest::collection::vec(any::<bool>(), 10),
        tags in proptest::collection::vec(0_i64..2, 2),
    ) {
        let all: Vec<SegmentName> = tags.iter().flat_map(|tag| names(5, *tag)).collect();
        let listed: Vec<SegmentName> = all
            .into_iter()
            .zip(keep)
            .filter_map(|(name, keep)| keep.then_some(name))
            .collect();
        let chain = find(&listed);
        let mut last = (base().digest.short(), BASE_REVISION);
        for segment in &chain.segments {
            prop_assert_eq!((segment.previous, segment.first), (last.0, last.1 + 1));
            last = (segment.digest, segment.last);
        }
        prop_assert_eq!(chain.last, last.1);
        let newest = listed.iter().map(|name| name.last).max().unwrap_or(BASE_REVISION);
        // A chain that does not reach the newest segment must report a fault.
        prop_assert!(chain.last == newest || !chain.faults.is_empty());
    }
}
