//! Switching TLS while members run: what they are started with, and what comes next on the way to what the spec asks
//! for. Pure, and plain data without any of the material.
//!
//! What members are started with is recorded in the status (`status.TLS`) before the first is started with it, so a
//! cluster without pods comes back as it was, and any process goes on from there. Between members the way leads over
//! the stages of [`PeerStage`]. Towards clients it has two steps, and who takes the second is the user, who alone knows
//! when all clients have changed: members accept both (`spec.TLS.acceptPlaintext`), then one.

use std::collections::BTreeMap;

use api::cluster::{PeerStage, TlsPolicy, TlsStatus, peers_of};
use member::tls::Fault;

/// Who makes the certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// Somebody else; they are in Secrets.
    Others,
    /// The operator.
    Operator,
}

/// How clients get in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// Without TLS.
    Plain,
    /// With TLS or without.
    Both,
    /// With TLS.
    Tls,
}

/// How members talk, to each other and to clients, and by whose certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// To each other.
    pub peers: PeerStage,
    /// To clients.
    pub clients: Clients,
    /// By whose certificates; `None` without TLS.
    pub maker: Option<Maker>,
}

impl Way {
    /// The way of members that are started with this.
    pub fn of(policy: Option<&TlsPolicy>) -> Self {
        let encrypts = |tls: &&TlsPolicy| tls.encrypts_peers() || tls.encrypts_clients();
        let maker = policy.filter(encrypts).map(|tls| match tls.generated {
            Some(_) => Maker::Operator,
            None => Maker::Others,
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

    /// In words, of members.
    pub fn words(self) -> String {
        let peers = match self.peers {
            PeerStage::Plain => "talk to each other without TLS",
            PeerStage::PlainAndTls => {
                "listen for each other without TLS and, on a second port, with it"
            }
            PeerStage::TlsTwice => "listen for each other with TLS on two ports",
            PeerStage::Tls => "talk TLS to each other",
        };
        let clients = match self.clients {
            Clients::Plain => "let clients in without TLS",
            Clients::Both => "let clients in with TLS and without",
            Clients::Tls => "let clients in with TLS alone",
        };
        format!("{peers} and {clients}")
    }
}

/// What comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing: members are started with what the spec asks for, or with what says the same.
    There,
    /// Members are to be started with this.
    Step(Option<TlsPolicy>),
}

/// What comes next on the way from what members are started with to what the spec asks for; why nothing does, where
/// members that run cannot be brought there.
pub fn next(at: Option<&TlsPolicy>, wanted: Option<&TlsPolicy>) -> Result<Next, String> {
    let (here, there) = (Way::of(at), Way::of(wanted));
    if here == there {
        return Ok(Next::There);
    }
    if let (Some(mine), Some(theirs)) = (here.maker, there.maker)
        && mine != theirs
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
                "TLS towards clients cannot be switched off at once: give spec.TLS back with acceptPlaintext: true, \
                 change all clients when TLSReady is True, and take spec.TLS away then; the cluster goes on as it was"
            }
            _ => {
                "TLS towards clients cannot be switched on at once: set spec.TLS.acceptPlaintext to true, change all \
                 clients when TLSReady is True, and take acceptPlaintext away then; the cluster goes on as it was"
            }
        };
        return Err(text.to_owned());
    }
    let stage = here.peers.towards(there.peers);
    if stage == there.peers {
        return Ok(Next::Step(wanted.cloned()));
    }
    // The certificates are those of the side that has some.
    let base = if there.peers == PeerStage::Tls {
        wanted
    } else {
        at
    };
    Ok(Next::Step(base.cloned().map(|policy| TlsPolicy {
        peer_stage: Some(stage),
        ..policy
    })))
}

/// From static certificates to generated ones, or back. Neither trust the others, so members go back to plain text
/// between each other first, and clients use it meanwhile.
fn exchange(
    (at, here): (Option<&TlsPolicy>, Way),
    (wanted, there): (Option<&TlsPolicy>, Way),
) -> Result<Next, String> {
    if here.clients == Clients::Tls || there.clients == Clients::Tls {
        return Err(
            "clients cannot be brought from static to generated certificates, or back, at once, because neither trust \
             the others: give spec.TLS back with acceptPlaintext: true, change all clients to http:// when TLSReady \
             is True, give the other certificates with acceptPlaintext: true then, and when TLSReady is True again \
             change all clients to https:// and take acceptPlaintext away; the cluster goes on as it was"
                .to_owned(),
        );
    }
    let staged = |policy: Option<&TlsPolicy>, stage| {
        Next::Step(policy.cloned().map(|policy| TlsPolicy {
            peer_stage: Some(stage),
            ..policy
        }))
    };
    let back = here.peers.towards(PeerStage::Plain);
    Ok(match here.peers {
        PeerStage::Plain if there.peers == PeerStage::Plain => Next::Step(wanted.cloned()),
        PeerStage::Plain => staged(wanted, PeerStage::PlainAndTls),
        _ if back == PeerStage::Plain => Next::Step(at.and_then(TlsPolicy::without_peers)),
        _ => staged(at, back),
    })
}

/// What members were started with, as the status and the pods say it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Started {
    /// What the status records of this cluster.
    pub record: Option<TlsStatus>,
    /// What pods were made with, by name.
    pub made: BTreeMap<String, Option<TlsPolicy>>,
    /// How the etcd of pods was told to talk, by name.
    pub ways: BTreeMap<String, Way>,
}

/// How far a change of TLS is: what members are started with, and what comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsRollout {
    /// What members are started with.
    pub at: Option<TlsPolicy>,
    /// That stands in the status.
    pub recorded: bool,
    /// What comes next, if anything does.
    pub next: Option<Step>,
    /// How the members talk whose pods say it, by name.
    pub ways: BTreeMap<String, Way>,
    /// Why members that run cannot be brought to what the spec asks for.
    pub refused: Option<String>,
}

/// What members are to be started with next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// That.
    pub to: Option<TlsPolicy>,
    /// What is wrong with its certificates: nobody is started with them before that is put right.
    pub faults: Vec<Fault>,
}

impl TlsRollout {
    /// From what members were started with; `wanted` is what the spec asks for.
    pub fn of(started: &Started, wanted: Option<&TlsPolicy>) -> Self {
        // The stage is the operator's, whatever the spec says.
        let wanted = wanted.cloned().map(|tls| TlsPolicy {
            peer_stage: None,
            ..tls
        });
        let Started { record, made, ways } = started;
        let to = Way::of(wanted.as_ref());
        let as_wanted = |policy: &Option<TlsPolicy>| Way::of(policy.as_ref()) == to;
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
            ways: ways.clone(),
            refused,
            at,
        }
    }

    /// The members that are not started again yet with what they are to be started with.
    pub fn waits_for(&self) -> Vec<&str> {
        let at = Way::of(self.at.as_ref());
        let others = self.ways.iter().filter(|(_, way)| **way != at);
        others.map(|(name, _)| name.as_str()).collect()
    }

    /// Whether the way members talk is being changed; in words.
    pub fn under_way(&self) -> Option<String> {
        let at = Way::of(self.at.as_ref());
        let waits = self.waits_for();
        if !waits.is_empty() {
            let (words, waits) = (at.words(), waits.join(", "));
            return Some(format!(
                "members are started again so that they {words}; still to come: {waits}"
            ));
        }
        let next = self.next.as_ref()?;
        let to = Way::of(next.to.as_ref()).words();
        Some(format!("all members {}; next they {to}", at.words()))
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

    fn policy(text: &str) -> Option<TlsPolicy> {
        serde_json::from_str(text).unwrap()
    }

    /// The stages on the way, and where it ends.
    fn way(from: &str, to: &str) -> Vec<PeerStage> {
        let (mut at, to) = (policy(from), policy(to));
        let mut stages = Vec::new();
        while let Next::Step(step) = next(at.as_ref(), to.as_ref()).unwrap() {
            stages.push(peers_of(step.as_ref()));
            assert!(stages.len() < 8, "no end: {stages:?}");
            at = step;
        }
        assert_eq!(at, to);
        stages
    }

    #[test]
    fn tls_is_switched_on_and_off_stage_by_stage() {
        use PeerStage::{Plain, PlainAndTls, Tls, TlsTwice};
        for tls in [PEERS, BOTH, GENERATED] {
            assert_eq!(way("null", tls), [PlainAndTls, TlsTwice, Tls], "{tls}");
            assert_eq!(way(tls, "null"), [TlsTwice, PlainAndTls, Plain], "{tls}");
        }
        for (from, to) in [
            (BOTH, GENERATED),
            (GENERATED, BOTH),
            (PEERS, GENERATED_PEERS),
        ] {
            let over = [TlsTwice, PlainAndTls, Plain, PlainAndTls, TlsTwice, Tls];
            assert_eq!(way(from, to), over, "{from} to {to}");
        }
        assert_eq!(way(BOTH, ALL), [Tls]);
        assert_eq!(way(ALL, BOTH), [Tls]);
        assert_eq!(way(ALL, ALL), []);
    }

    #[test]
    fn a_switch_that_is_taken_back_midway_turns_around() {
        let wanted = policy(BOTH);
        let mut at = None;
        for stage in [PeerStage::PlainAndTls, PeerStage::TlsTwice] {
            let Next::Step(step) = next(at.as_ref(), wanted.as_ref()).unwrap() else {
                panic!("it is not there yet");
            };
            at = step;
            assert_eq!(peers_of(at.as_ref()), stage);
            let back = next(at.as_ref(), None).unwrap();
            let Next::Step(back) = back else {
                panic!("it is not back yet")
            };
            assert_eq!(peers_of(back.as_ref()), stage.towards(PeerStage::Plain));
        }
    }

    #[test]
    fn clients_are_never_left_without_a_way_both_sides_speak() {
        for (from, to) in [("null", ALL), (ALL, "null"), (PEERS, ALL), (ALL, PEERS)] {
            let why = next(policy(from).as_ref(), policy(to).as_ref()).unwrap_err();
            assert!(why.contains("acceptPlaintext"), "{why}");
        }
        for (from, to) in [(GENERATED, ALL), (ALL, GENERATED)] {
            let why = next(policy(from).as_ref(), policy(to).as_ref()).unwrap_err();
            assert!(why.contains("static to generated"), "{why}");
        }
    }

    #[test]
    fn other_words_for_the_same_are_no_switch() {
        for (one, other) in [
            ("null", "{}"),
            (
                r#"{"generated":{}}"#,
                r#"{"generated":{"certificateDuration":"5m"}}"#,
            ),
            ("null", r#"{"acceptPlaintext":true}"#),
        ] {
            let next = next(policy(one).as_ref(), policy(other).as_ref());
            assert_eq!(next, Ok(Next::There), "{one} {other}");
        }
    }
}
