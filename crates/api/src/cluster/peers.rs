//! The stages in which the operator switches TLS between running members on or off.
//!
//! A peer listener either uses TLS or does not (`configurePeerListeners` in etcd's `server/embed/etcd.go`), and other
//! members connect to the URL in etcd's member list. A switch therefore needs a second port and four stages. Two
//! adjacent stages share one listener. When all peer URLs use this listener, the operator restarts the members in the
//! next stage. From the second stage on, members have certificates, and connect to peer URLs with and without TLS.

use serde::{Deserialize, Serialize};

use crate::names::{PEER_PORT, SECOND_PEER_PORT};

/// A peer listener: true if it uses TLS, and its port.
pub type PeerListener = (bool, u16);

/// A stage of a switch of TLS between members. TLS is switched on in this order, and switched off in reverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PeerStage {
    /// One listener, without TLS.
    Plain,
    /// Two listeners: without TLS on the first port, with TLS on the second port.
    PlainAndTls,
    /// Two listeners, both with TLS.
    TlsTwice,
    /// One listener, with TLS.
    Tls,
}

impl PeerStage {
    /// All stages in order.
    pub const ALL: [Self; 4] = [Self::Plain, Self::PlainAndTls, Self::TlsTwice, Self::Tls];

    /// The listeners of a member.
    pub fn listeners(self) -> &'static [PeerListener] {
        match self {
            Self::Plain => &[(false, PEER_PORT)],
            Self::PlainAndTls => &[(false, PEER_PORT), (true, SECOND_PEER_PORT)],
            Self::TlsTwice => &[(true, PEER_PORT), (true, SECOND_PEER_PORT)],
            Self::Tls => &[(true, PEER_PORT)],
        }
    }

    /// The listener in the peer URL of a new member. Members in this stage and in the adjacent stages can connect to
    /// it.
    pub fn usual(self) -> PeerListener {
        (self >= Self::TlsTwice, PEER_PORT)
    }

    /// The listener that this stage and `other` have in common. `None` if there is none.
    pub fn shared_with(self, other: Self) -> Option<PeerListener> {
        let shared = |listener: &&PeerListener| other.listeners().contains(listener);
        self.listeners().iter().find(shared).copied()
    }

    /// The next stage on the way from this stage to `other`. Returns `other` if the two stages are equal.
    #[must_use]
    pub fn towards(self, other: Self) -> Self {
        let stages = Self::ALL;
        let at = stages
            .iter()
            .position(|stage| *stage == self)
            .unwrap_or_default();
        let next = match self.cmp(&other) {
            std::cmp::Ordering::Less => at + 1,
            std::cmp::Ordering::Equal => at,
            std::cmp::Ordering::Greater => at.saturating_sub(1),
        };
        stages.get(next).copied().unwrap_or(other)
    }

    /// The name of the stage in `status.TLS.peers`.
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
    fn adjacent_tls_stages_share_a_listener() {
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
    fn new_member_uses_tls_only_if_previous_stage_has_certificates() {
        for stage in PeerStage::ALL {
            assert!(stage.listeners().contains(&stage.usual()));
            // `least` is the stage before `stage`. If new members use TLS in `stage`, then `least` is later than
            // `Plain`, so the existing members already have certificates.
            let least = stage.towards(PeerStage::Plain);
            assert!(!stage.usual().0 || least > PeerStage::Plain);
        }
    }

    #[test]
    fn tls_switch_passes_every_stage_in_both_directions() {
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
