//! The quorum guard: before a step that could cost a voter, the planner checks here whether the other voters form a
//! quorum (invariant 3).

use std::collections::BTreeMap;
use std::fmt;

use etcd::MemberId;

/// The voters and their health. A healthy voter answers, reports a leader, and does not count as lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quorum {
    healthy: BTreeMap<MemberId, bool>,
}

/// The numbers of voters after an unsafe step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsafe {
    /// Number of healthy voters after the step.
    pub healthy: usize,
    /// Number of voters after the step.
    pub voters: usize,
}

impl fmt::Display for Unsafe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { healthy, voters } = *self;
        let needed = quorum_of(voters);
        write!(
            f,
            "{healthy} of {voters} voters would be healthy, and a quorum needs {needed}"
        )
    }
}

/// The size of a quorum of `voters` voters.
pub(crate) fn quorum_of(voters: usize) -> usize {
    voters / 2 + 1
}

impl Quorum {
    /// Creates the guard. For each voter, `voters` contains the ID, and true if the voter is healthy.
    pub fn new(voters: impl IntoIterator<Item = (MemberId, bool)>) -> Self {
        Self {
            healthy: voters.into_iter().collect(),
        }
    }

    /// The number of voters.
    pub fn voters(&self) -> usize {
        self.healthy.len()
    }

    /// The number of healthy voters.
    pub fn healthy(&self) -> usize {
        self.healthy.values().filter(|healthy| **healthy).count()
    }

    /// The numbers of voters after the removal of this voter; `None` if the removal is safe.
    pub fn unsafe_without(&self, voter: MemberId) -> Option<Unsafe> {
        let others = self.healthy.iter().filter(|(id, _)| **id != voter);
        let (mut healthy, mut voters) = (0, 0);
        for (_, is_healthy) in others {
            voters += 1;
            healthy += usize::from(*is_healthy);
        }
        // The removal of the last voter is unsafe, because no voter would remain.
        (voters == 0 || healthy < quorum_of(voters)).then_some(Unsafe { healthy, voters })
    }

    /// The numbers of voters after the addition of a healthy voter; `None` if the addition is safe.
    pub fn unsafe_with_one_more(&self) -> Option<Unsafe> {
        let (healthy, voters) = (self.healthy() + 1, self.voters() + 1);
        (healthy < quorum_of(voters)).then_some(Unsafe { healthy, voters })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quorum(healthy: &[bool]) -> Quorum {
        Quorum::new(
            healthy
                .iter()
                .enumerate()
                .map(|(at, healthy)| (MemberId(at as u64), *healthy)),
        )
    }

    #[test]
    fn invariant_3_voter_is_removed_only_if_other_healthy_voters_form_quorum() {
        let cases: [(&[bool], bool); 8] = [
            (&[true, true, true], true),
            (&[false, true, true], true),
            (&[true, false, true], false),
            (&[false, true], true),
            (&[true, false], false),
            (&[true], false),
            (&[false, false, true, true, true], true),
            (&[true, false, false, true, true], false),
        ];
        for (healthy, safe) in cases {
            assert_eq!(
                quorum(healthy).unsafe_without(MemberId(0)).is_none(),
                safe,
                "{healthy:?}"
            );
        }
    }

    #[test]
    fn refused_removal_reports_healthy_voters_and_quorum() {
        let why = quorum(&[true, false, true])
            .unsafe_without(MemberId(0))
            .unwrap();
        assert_eq!(
            why.to_string(),
            "1 of 2 voters would be healthy, and a quorum needs 2"
        );
    }

    #[test]
    fn invariant_3_voter_is_added_only_if_quorum_remains() {
        assert_eq!(quorum(&[true]).unsafe_with_one_more(), None);
        assert_eq!(quorum(&[true, true, false]).unsafe_with_one_more(), None);
        assert!(
            quorum(&[true, false, false])
                .unsafe_with_one_more()
                .is_some()
        );
    }
}
