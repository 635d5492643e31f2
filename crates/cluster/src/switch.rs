//! Changes the TLS settings while members run. This module computes the next step from the settings with which the
//! members were started to the settings in the spec.
//!
//! `status.TLS` records the settings before the first member starts with them, so that a cluster without pods returns
//! with the same settings. Connections between members change in the stages of [`PeerStage`]. Client connections change
//! in two steps: members first accept clients with and without TLS (`spec.TLS.acceptPlaintext`), and then only one
//! kind. The user triggers the second step, because only the user knows when all clients have changed.

use std::collections::BTreeMap;

use api::cluster::{PeerStage, TlsPolicy, TlsStatus, peers_of};
use member::tls::Fault;

/// Who issues the certificates of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// The user, in Secrets that the spec names.
    Others,
    /// The operator, with `spec.TLS.generated`.
    Operator,
    /// cert-manager, with `spec.TLS.certManager`.
    CertManager,
}

impl Maker {
    /// True if a change between the two sources needs stages in plain text, because members with generated certificates
    /// trust no other certificates.
    pub fn exchanges(self, other: Self) -> bool {
        self != other && (self == Self::Operator || other == Self::Operator)
    }
}

/// The clients that members accept: clients with TLS, clients without TLS, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// Clients connect without TLS.
    Plain,
    /// Clients connect with or without TLS.
    Both,
    /// Clients connect with TLS.
    Tls,
}

/// How members communicate with each other and with clients, and who issues their certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlsMode {
    /// The TLS stage of connections between members.
    pub peers: PeerStage,
    /// How members accept clients.
    pub clients: Clients,
    /// Who issues the certificates; `None` without TLS.
    pub maker: Option<Maker>,
}

impl TlsMode {
    /// The TLS mode of members that start with this policy.
    pub fn of(policy: Option<&TlsPolicy>) -> Self {
        let encrypts = |tls: &&TlsPolicy| tls.encrypts_peers() || tls.encrypts_clients();
        let maker = policy.filter(encrypts).map(|tls| {
            if tls.generated.is_some() {
                Maker::Operator
            } else if tls.cert_manager.is_some() {
                Maker::CertManager
            } else {
                Maker::Others
            }
        });
        let clients = match policy {
            Some(tls) if tls.insists_on_tls() => Clients::Tls,
            Some(tls) if tls.accepts_plaintext() => Clients::Both,
            _ => Clients::Plain,
        };
        Self {
            peers: peers_of(policy),
            clients,
            maker,
        }
    }

    /// The TLS mode as text, for a sentence with the subject "members".
    pub fn words(self) -> String {
        let peers = match self.peers {
            PeerStage::Plain => "accept peers without TLS",
            PeerStage::PlainAndTls => "accept peers without TLS and, on a second port, with TLS",
            PeerStage::TlsTwice => "accept peers with TLS on two ports",
            PeerStage::Tls => "accept peers with TLS only",
        };
        let clients = match self.clients {
            Clients::Plain => "accept clients without TLS",
            Clients::Both => "accept clients with and without TLS",
            Clients::Tls => "accept clients with TLS only",
        };
        format!("{peers}, and {clients}")
    }
}

/// The next step toward the TLS settings of the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant)] // A reconcile creates only one value of this type.
pub enum Next {
    /// No step is needed: members start with the settings of the spec, or with equivalent settings.
    There,
    /// Members must be started with this policy next.
    Step(Option<TlsPolicy>),
}

/// The next step from the settings of the running members to the spec. The error explains why the running members
/// cannot reach the settings of the spec.
pub fn next(at: Option<&TlsPolicy>, wanted: Option<&TlsPolicy>) -> Result<Next, String> {
    let (here, there) = (TlsMode::of(at), TlsMode::of(wanted));
    if here == there {
        return Ok(Next::There);
    }
    if let (Some(mine), Some(theirs)) = (here.maker, there.maker)
        && mine.exchanges(theirs)
    {
        return exchange((at, here), (wanted, there));
    }
    let leaps = matches!(
        (here.clients, there.clients),
        (Clients::Plain, Clients::Tls) | (Clients::Tls, Clients::Plain)
    );
    if leaps {
        let text = match there.clients {
            Clients::Plain => {
                "TLS for clients cannot be disabled in one step. The cluster keeps its settings. Restore spec.TLS with \
                 acceptPlaintext: true. When TLSReady is True, change all clients to http://. Then remove spec.TLS"
            }
            _ => {
                "TLS for clients cannot be enabled in one step. The cluster keeps its settings. Set \
                 spec.TLS.acceptPlaintext to true. When TLSReady is True, change all clients to https://. Then remove \
                 acceptPlaintext"
            }
        };
        return Err(text.to_owned());
    }
    let stage = here.peers.towards(there.peers);
    if stage == there.peers {
        return Ok(Next::Step(wanted.cloned()));
    }
    // An intermediate stage uses the settings with peer certificates, because members need these certificates: `wanted`
    // if its peer stage is TLS, and `at` otherwise.
    let base = if there.peers == PeerStage::Tls {
        wanted
    } else {
        at
    };
    Ok(Next::Step(at_stage(base, Some(stage))))
}

fn at_stage(policy: Option<&TlsPolicy>, peer_stage: Option<PeerStage>) -> Option<TlsPolicy> {
    policy.cloned().map(|policy| TlsPolicy {
        peer_stage,
        ..policy
    })
}

/// The next step of a change from or to generated certificates. Members use plain text with each other during the
/// change, because generated certificates and other certificates do not trust each other. For the same reason, the
/// change fails unless clients may use plain text before and after it.
fn exchange(
    (at, here): (Option<&TlsPolicy>, TlsMode),
    (wanted, there): (Option<&TlsPolicy>, TlsMode),
) -> Result<Next, String> {
    if here.clients == Clients::Tls || there.clients == Clients::Tls {
        return Err(
            "clients cannot change between generated and other certificates in one step, because the two sets do \
             not trust each other. The cluster keeps its settings. Restore spec.TLS with acceptPlaintext: true. When \
             TLSReady is True, change all clients to http://. Then set the other certificates with acceptPlaintext: \
             true. When TLSReady is True again, change all clients to https:// and remove acceptPlaintext"
                .to_owned(),
        );
    }
    let staged = |policy, stage| Next::Step(at_stage(policy, Some(stage)));
    let back = here.peers.towards(PeerStage::Plain);
    Ok(match here.peers {
        PeerStage::Plain if there.peers == PeerStage::Plain => Next::Step(wanted.cloned()),
        PeerStage::Plain => staged(wanted, PeerStage::PlainAndTls),
        _ if back == PeerStage::Plain => Next::Step(at.and_then(TlsPolicy::without_peers)),
        _ => staged(at, back),
    })
}

/// The TLS settings with which members were started, from the status, the pods and the PVCs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Started {
    /// The record in the status of the EtcdCluster; `None` if none exists.
    pub record: Option<TlsStatus>,
    /// The TLS policy with which each pod was built, by the pod's name.
    pub made: BTreeMap<String, Option<TlsPolicy>>,
    /// The mode that the flags of each pod's etcd show, by the pod's name.
    pub modes: BTreeMap<String, TlsMode>,
}

/// Progress of a TLS change: the current settings of members and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsRollout {
    /// The TLS policy with which members start now.
    pub at: Option<TlsPolicy>,
    /// True if the status records the settings `at`.
    pub recorded: bool,
    /// The next step; `None` if the members run with the settings of the spec, or cannot reach these settings.
    pub next: Option<Step>,
    /// The mode of each member, by name. Only members whose pod shows the mode are included.
    pub modes: BTreeMap<String, TlsMode>,
    /// Why running members cannot reach the settings of the spec; `None` if they can.
    pub refused: Option<String>,
}

/// The next step of a TLS change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The TLS policy with which members start in this step.
    pub to: Option<TlsPolicy>,
    /// Problems of the certificates in `to`. While there are problems, no member starts with this policy.
    pub faults: Vec<Fault>,
}

impl TlsRollout {
    /// Computes the progress of a change from the settings of the running members. `wanted` is the policy in the spec.
    pub fn of(started: &Started, wanted: Option<&TlsPolicy>) -> Self {
        // A peer stage in the spec is ignored, because only the operator decides the stage.
        let wanted = at_stage(wanted, None);
        let Started {
            record,
            made,
            modes,
        } = started;
        let to = TlsMode::of(wanted.as_ref());
        let as_wanted = |policy: &Option<TlsPolicy>| TlsMode::of(policy.as_ref()) == to;
        let record = record.as_ref().map(TlsStatus::policy);
        let mut at = match &record {
            Some(record) => record.clone(),
            None if made.is_empty() || made.values().any(as_wanted) => wanted.clone(),
            None => made.values().next().cloned().flatten(),
        };
        let (next, refused) = match next(at.as_ref(), wanted.as_ref()) {
            Ok(Next::There) => {
                at = wanted;
                (None, None)
            }
            Ok(Next::Step(to)) => (Some(to), None),
            Err(why) => (None, Some(why)),
        };
        Self {
            recorded: record.is_some_and(|record| record == at),
            next: next.map(|to| Step {
                to,
                faults: Vec::new(),
            }),
            modes: modes.clone(),
            refused,
            at,
        }
    }

    /// The members that do not run with the settings `at` yet.
    pub fn waits_for(&self) -> Vec<&str> {
        let at = TlsMode::of(self.at.as_ref());
        let others = self.modes.iter().filter(|(_, mode)| **mode != at);
        others.map(|(name, _)| name.as_str()).collect()
    }

    /// The TLS change in progress, as text; `None` without a change.
    pub fn under_way(&self) -> Option<String> {
        let at = TlsMode::of(self.at.as_ref());
        let waits = self.waits_for();
        if !waits.is_empty() {
            let (words, waits) = (at.words(), waits.join(", "));
            return Some(format!(
                "members are restarted so that they {words}; still to be restarted: {waits}"
            ));
        }
        let next = self.next.as_ref()?;
        let to = TlsMode::of(next.to.as_ref()).words();
        Some(format!(
            "all members {}; in the next stage they {to}",
            at.words()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEERS: &str = r#"{"static":{"member":{"peerSecret":"p"}}}"#;
    const BOTH: &str = r#"{"static":{"member":{"peerSecret":"p","serverSecret":"s"},"operatorSecret":"o"},"acceptPlaintext":true}"#;
    const ALL: &str =
        r#"{"static":{"member":{"peerSecret":"p","serverSecret":"s"},"operatorSecret":"o"}}"#;
    const GENERATED_PEERS: &str = r#"{"generated":{"client":false}}"#;
    const GENERATED: &str = r#"{"generated":{},"acceptPlaintext":true}"#;
    const ISSUED: &str = r#"{"certManager":{"issuerRef":{"name":"ca"}}}"#;
    const ISSUED_BOTH: &str =
        r#"{"certManager":{"issuerRef":{"name":"ca"}},"acceptPlaintext":true}"#;

    fn policy(text: &str) -> Option<TlsPolicy> {
        serde_json::from_str(text).unwrap()
    }

    /// The peer stages of the change from the policy `from` to the policy `to`, including the last stage.
    fn mode(from: &str, to: &str) -> Vec<PeerStage> {
        let (mut at, to) = (policy(from), policy(to));
        let mut stages = Vec::new();
        while let Next::Step(step) = next(at.as_ref(), to.as_ref()).unwrap() {
            stages.push(peers_of(step.as_ref()));
            assert!(
                stages.len() < 8,
                "the TLS change has too many stages: {stages:?}"
            );
            at = step;
        }
        assert_eq!(at, to);
        stages
    }

    #[test]
    fn tls_is_enabled_and_disabled_in_stages() {
        use PeerStage::{Plain, PlainAndTls, Tls, TlsTwice};
        for tls in [PEERS, BOTH, GENERATED, ISSUED_BOTH] {
            assert_eq!(mode("null", tls), [PlainAndTls, TlsTwice, Tls], "{tls}");
            assert_eq!(mode(tls, "null"), [TlsTwice, PlainAndTls, Plain], "{tls}");
        }
        for (from, to) in [
            (BOTH, GENERATED),
            (GENERATED, BOTH),
            (PEERS, GENERATED_PEERS),
            (GENERATED, ISSUED_BOTH),
            (ISSUED_BOTH, GENERATED),
        ] {
            let over = [TlsTwice, PlainAndTls, Plain, PlainAndTls, TlsTwice, Tls];
            assert_eq!(mode(from, to), over, "{from} to {to}");
        }
        assert_eq!(mode(BOTH, ALL), [Tls]);
        assert_eq!(mode(ALL, BOTH), [Tls]);
        assert_eq!(mode(ALL, ALL), []);
        // Static certificates and certificates of cert-manager can have a common CA.
        assert_eq!(mode(ALL, ISSUED), [Tls]);
        assert_eq!(mode(ISSUED, ALL), [Tls]);
    }

    #[test]
    fn reverted_tls_change_returns_stage_by_stage() {
        let wanted = policy(BOTH);
        let mut at = None;
        for stage in [PeerStage::PlainAndTls, PeerStage::TlsTwice] {
            let Next::Step(step) = next(at.as_ref(), wanted.as_ref()).unwrap() else {
                panic!("the change to TLS has no next step");
            };
            at = step;
            assert_eq!(peers_of(at.as_ref()), stage);
            let back = next(at.as_ref(), None).unwrap();
            let Next::Step(back) = back else {
                panic!("the reverted change has no next step")
            };
            assert_eq!(peers_of(back.as_ref()), stage.towards(PeerStage::Plain));
        }
    }

    #[test]
    fn client_tls_change_in_one_step_is_refused() {
        for (from, to) in [("null", ALL), (ALL, "null"), (PEERS, ALL), (ALL, PEERS)] {
            let why = next(policy(from).as_ref(), policy(to).as_ref()).unwrap_err();
            assert!(why.contains("acceptPlaintext"), "{why}");
        }
        for (from, to) in [(GENERATED, ALL), (ALL, GENERATED), (GENERATED, ISSUED)] {
            let why = next(policy(from).as_ref(), policy(to).as_ref()).unwrap_err();
            assert!(
                why.contains("between generated and other certificates"),
                "{why}"
            );
        }
    }

    #[test]
    fn equivalent_tls_settings_need_no_change() {
        for (one, other) in [
            ("null", "{}"),
            (
                r#"{"generated":{}}"#,
                r#"{"generated":{"certificateDuration":"5m"}}"#,
            ),
            ("null", r#"{"acceptPlaintext":true}"#),
            (
                ISSUED,
                r#"{"certManager":{"issuerRef":{"name":"other"},"clients":["app"]}}"#,
            ),
        ] {
            let next = next(policy(one).as_ref(), policy(other).as_ref());
            assert_eq!(next, Ok(Next::There), "{one} {other}");
        }
    }
}
