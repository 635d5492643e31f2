//! How members talk to each other, and how that changes while they run.
//!
//! A member is dialled at its peer URL, which stands in etcd's list, and each peer listener either speaks TLS or does
//! not (`configurePeerListeners` in etcd's `server/embed/etcd.go`). So there is a second port, and the way from one to
//! the other leads over four stages. Whoever is at a stage and whoever is at the next have one listener in common:
//! members are started with the next stage when all peer URLs name that one. From the second stage on members have
//! certificates, and reach both kinds of URL.

use serde::{Deserialize, Serialize};

use crate::names::{PEER_PORT, SECOND_PEER_PORT};

/// A peer listener: whether it speaks TLS, and its port.
pub type PeerListener = (bool, u16);

/// How members talk to each other, in the order of the way from plain text to TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PeerStage {
    /// Without TLS.
    Plain,
    /// Without TLS on the usual port, with it on the second.
    PlainAndTls,
    /// With TLS on both ports.
    TlsTwice,
    /// With TLS.
    Tls,
}

impl PeerStage {
    /// All of them, in their order.
    pub const ALL: [Self; 4] = [Self::Plain, Self::PlainAndTls, Self::TlsTwice, Self::Tls];

    /// What a member listens on.
    pub fn listeners(self) -> &'static [PeerListener] {
        match self {
            Self::Plain => &[(false, PEER_PORT)],
            Self::PlainAndTls => &[(false, PEER_PORT), (true, SECOND_PEER_PORT)],
            Self::TlsTwice => &[(true, PEER_PORT), (true, SECOND_PEER_PORT)],
            Self::Tls => &[(true, PEER_PORT)],
        }
    }

    /// Where a new member is dialled. Every member at this stage and at those beside it listens there or can dial it.
    pub fn usual(self) -> PeerListener {
        (self >= Self::TlsTwice, PEER_PORT)
    }

    /// The listener that a stage and the one beside it have in common.
    pub fn shared_with(self, other: Self) -> Option<PeerListener> {
        let shared = |listener: &&PeerListener| other.listeners().contains(listener);
        self.listeners().iter().find(shared).copied()
    }

    /// The stage beside this one on the way to another; that one itself when it is reached.
    #[must_use]
    pub fn towards(self, other: Self) -> Self {
        let way = Self::ALL;
        let at = way
            .iter()
            .position(|stage| *stage == self)
            .unwrap_or_default();
        let next = match self.cmp(&other) {
            std::cmp::Ordering::Less => at + 1,
            std::cmp::Ordering::Equal => at,
            std::cmp::Ordering::Greater => at.saturating_sub(1),
        };
        way.get(next).copied().unwrap_or(other)
    }

    /// As a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Plain => "Plain",
            Self::PlainAndTls => "PlainAndTls",
            Self::TlsTwice => "TlsTwice",
            Self::Tls => "Tls",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_beside_each_other_share_one_listener_and_others_none() {
        for (at, stage) in PeerStage::ALL.into_iter().enumerate() {
            for (there, other) in PeerStage::ALL.into_iter().enumerate() {
                let shared = stage.shared_with(other);
                if at.abs_diff(there) == 1 {
                    assert!(shared.is_some(), "{stage:?} and {other:?}");
                }
                if at.abs_diff(there) == 3 {
                    assert_eq!(shared, None, "{stage:?} and {other:?}");
                }
            }
        }
    }

    #[test]
    fn a_new_member_listens_where_it_is_dialled_and_is_dialled_with_tls_only_by_who_can() {
        for stage in PeerStage::ALL {
            assert!(stage.listeners().contains(&stage.usual()));
            // The stage beside it, too, has certificates where it is dialled with TLS.
            let least = stage.towards(PeerStage::Plain);
            assert!(!stage.usual().0 || least > PeerStage::Plain);
        }
    }

    #[test]
    fn the_way_goes_over_every_stage_in_both_directions() {
        let on = [
            PeerStage::Plain,
            PeerStage::PlainAndTls,
            PeerStage::TlsTwice,
        ];
        let next: Vec<_> = on.map(|stage| stage.towards(PeerStage::Tls)).into();
        assert_eq!(next, PeerStage::ALL[1..]);
        assert_eq!(
            PeerStage::Tls.towards(PeerStage::Plain),
            PeerStage::TlsTwice
        );
        assert_eq!(
            PeerStage::PlainAndTls.towards(PeerStage::Plain),
            PeerStage::Plain
        );
        assert_eq!(PeerStage::Tls.towards(PeerStage::Tls), PeerStage::Tls);
    }
}
