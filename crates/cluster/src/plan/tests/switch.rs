//! Switches TLS on and off while the members run. The operator may crash after every write.

use std::collections::BTreeMap;

use api::cluster::{PeerStage, TlsPolicy, TlsStatus, peers_of};
use etcd::{MemberId, Pulse};
use member::tls::{Fault, FaultKind, Purpose};

use super::scene::Scene;
use crate::plan::switch::listens;
use crate::plan::tests::writes::Write;
use crate::reason::Reason;
use crate::snapshot::Seen;
use crate::switch::{Next, Step, TlsMode, TlsRollout, next};

const MEMBERS: [&str; 3] = ["a", "b", "c"];
const PEERS: &str = r#"{"static":{"member":{"peerSecret":"p"}}}"#;
const BOTH: &str = r#"{"static":{"member":{"peerSecret":"p","serverSecret":"s"},"operatorSecret":"o"},"acceptPlaintext":true}"#;
const GENERATED: &str = r#"{"generated":{},"acceptPlaintext":true}"#;

fn policy(text: &str) -> Option<TlsPolicy> {
    serde_json::from_str(text).unwrap()
}

/// The state of a cluster during a TLS switch.
struct World {
    scene: Scene,
    record: Option<TlsStatus>,
    modes: BTreeMap<String, TlsMode>,
    wanted: Option<TlsPolicy>,
    faults: Vec<Fault>,
}

impl World {
    fn new(text: &str) -> Self {
        let policy = policy(text);
        let mode = TlsMode::of(policy.as_ref());
        let mut world = Self {
            scene: Scene::formed(&MEMBERS).durable(),
            record: None,
            modes: MEMBERS.map(|name| (name.to_owned(), mode)).into(),
            wanted: policy.clone(),
            faults: Vec::new(),
        };
        for name in MEMBERS {
            world.join(name, peers_of(policy.as_ref()));
        }
        world
    }

    /// Gives the member the peer URL with which a new member joins at this stage.
    fn join(&mut self, name: &str, stage: PeerStage) {
        let (tls, port) = stage.usual();
        let scheme = if tls { "https" } else { "http" };
        *self.urls(name) = vec![format!("{scheme}://{name}.ns.svc:{port}")];
    }

    fn urls(&mut self, name: &str) -> &mut Vec<String> {
        let Seen::Known(list) = &mut self.scene.observed.members else {
            panic!("the scene has no member list");
        };
        let mut members = list.members.iter_mut();
        let member = members.find(|member| member.name == name).unwrap();
        &mut member.peer_urls
    }

    /// The TLS settings with which members start: those in the status, or those of the spec if nothing is recorded.
    fn at(&self) -> Option<TlsPolicy> {
        match &self.record {
            Some(record) => record.policy(),
            None => self.wanted.clone(),
        }
    }

    fn snapshot(&mut self) {
        let at = self.at();
        let next = match next(at.as_ref(), self.wanted.as_ref()) {
            Ok(Next::Step(to)) => Some(Step {
                to,
                faults: self.faults.clone(),
            }),
            _ => None,
        };
        let recorded = self.record.is_some();
        self.scene.observed.tls_rollout = Some(TlsRollout {
            at,
            recorded,
            next,
            modes: self.modes.clone(),
            refused: None,
        });
    }

    /// The planned writes that change TLS settings or peer URLs.
    fn planned(&mut self) -> Vec<Write> {
        self.snapshot();
        let all = [self.scene.writes(), self.scene.changes()].concat();
        let ours = |write: &Write| {
            matches!(
                write,
                Write::RecordTls { .. } | Write::UpdatePeerUrls { .. }
            )
        };
        all.into_iter().filter(ours).collect()
    }

    fn take(&mut self, write: &Write) {
        match write {
            Write::RecordTls { record, over } => {
                assert_eq!(*over, self.scene.observed.resource_version);
                self.record = Some((**record).clone());
            }
            Write::UpdatePeerUrls { member, urls, .. } => *self.urls(member) = urls.clone(),
            other => panic!("{other}"),
        }
    }

    /// Names of the members whose pods run with outdated TLS settings.
    fn outdated(&self) -> Vec<String> {
        let at = TlsMode::of(self.at().as_ref());
        let others = self.modes.iter().filter(|(_, mode)| **mode != at);
        others.map(|(name, _)| name.clone()).collect()
    }

    /// Checks invariant 23: each member listens at its listed peer URL, and every other member can connect to it.
    fn judge(&mut self) {
        let modes = self.modes.clone();
        let at = peers_of(self.at().as_ref());
        for name in MEMBERS {
            for url in self.urls(name).clone() {
                let stage = modes[name].peers;
                assert!(
                    listens(stage, &url),
                    "{name}, {stage:?}, does not listen at {url}"
                );
                // A restart at this moment would start the member in the recorded TLS stage. The member must listen at
                // this URL in that stage too.
                assert!(
                    listens(at, &url),
                    "{name} would not listen at {url} after a restart as {at:?}"
                );
                for (other, mode) in &modes {
                    let knows = mode.maker == modes[name].maker && mode.peers > PeerStage::Plain;
                    let dials = !url.starts_with("https") || knows;
                    assert!(dials, "{other}, {:?}, cannot connect to {url}", mode.peers);
                }
            }
        }
    }
}

/// A pseudorandom number.
fn drawn(seed: &mut u64) -> usize {
    *seed = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*seed >> 33).unwrap()
}

/// Between any two writes, members restart in any order, some members are replaced, and the spec may change again. The
/// cluster must still reach the final spec.
#[test]
fn invariant_23_members_listen_at_listed_peer_urls() {
    for mut seed in 0..400_u64 {
        let (from, to) = match seed % 4 {
            0 => ("null", BOTH),
            1 => (PEERS, "null"),
            2 => (BOTH, GENERATED),
            _ => (GENERATED, BOTH),
        };
        let mut world = World::new(from);
        let mut turns = drawn(&mut seed) % 4;
        for round in 0.. {
            assert!(round < 400, "the TLS change does not end");
            world.judge();
            if round == 1 {
                world.wanted = policy(to);
            }
            if round > 1 && turns > 0 && drawn(&mut seed).is_multiple_of(5) {
                turns -= 1;
                let other = if world.wanted == policy(to) { from } else { to };
                world.wanted = policy(other);
            }
            let outdated = world.outdated();
            if !outdated.is_empty() && drawn(&mut seed).is_multiple_of(2) {
                let name = outdated[drawn(&mut seed) % outdated.len()].clone();
                let at = world.at();
                if drawn(&mut seed).is_multiple_of(2) {
                    world.join(&name, peers_of(at.as_ref()));
                }
                world.modes.insert(name, TlsMode::of(at.as_ref()));
                continue;
            }
            let writes = world.planned();
            if let Some(write) = writes.first() {
                world.take(write);
            } else if round > 1 && outdated.is_empty() && turns == 0 {
                assert_eq!(world.at(), world.wanted);
                break;
            }
        }
    }
}

/// The first write of a switch records the TLS settings, so that the switch continues after a crash.
#[test]
fn tls_settings_are_recorded_before_they_change() {
    let mut world = World::new("null");
    let record = TlsStatus::new("token", None);
    let writes = world.planned();
    assert!(
        matches!(&writes[..], [Write::RecordTls { record: planned, .. }] if **planned == record),
        "{writes:?}"
    );
    world.record = Some(record);
    assert_eq!(world.planned(), []);
}

#[test]
fn tls_switch_waits_for_valid_certificates() {
    let mut world = World::new("null");
    world.record = Some(TlsStatus::new("token", None));
    world.wanted = policy(BOTH);
    world.faults = vec![Fault {
        purpose: Purpose::Peer,
        code: FaultKind::SecretMissing,
        message: "Secret p is not there".into(),
    }];
    assert_eq!(world.planned(), []);
    assert_eq!(world.scene.plan().problems[0].reason, Reason::SecretMissing);
    assert!(world.scene.waits().contains(&Reason::TLSSwitching));
    world.faults.clear();
    assert!(matches!(world.planned()[..], [Write::RecordTls { .. }]));
}

#[test]
fn tls_switch_waits_for_unhealthy_and_joining_members() {
    let begun = || {
        let mut world = World::new("null");
        world.record = Some(TlsStatus::new("token", None));
        world.wanted = policy(PEERS);
        world
    };
    assert_eq!(begun().planned().len(), 1);
    let mut down = begun();
    down.scene = down.scene.down("b");
    assert_eq!(down.planned(), []);
    let mut unknown = begun();
    unknown.modes.remove("c");
    assert_eq!(unknown.planned(), []);
    let mut grows = begun();
    grows.scene = grows.scene.size(5).reserved("d").reserved("e");
    grows.snapshot();
    assert_ne!(grows.scene.changes(), []);
    assert_eq!(grows.planned(), []);
}

/// Regression: a learner without a connection still answers clients, and reports its last known leader.
#[test]
fn invariant_23_tls_switch_waits_for_disconnected_learner() {
    let mut world = World::new("null");
    world.record = Some(TlsStatus::new("token", None));
    world.wanted = policy(PEERS);
    world.scene = world.scene.clone().size(4).learner("d");
    world.modes.insert("d".to_owned(), TlsMode::of(None));
    let leader = world.scene.observed.leader();
    let mut pulse = Pulse {
        member_id: MemberId(u64::from(b'd')),
        has_leader: true,
        raft_applied_index: 100,
        peers: leader.into_iter().collect(),
    };
    let mut says = |pulse: &Pulse| {
        let pulses = &mut world.scene.observed.pulses;
        pulses.insert("d".to_owned(), pulse.clone());
        let planned = world.planned();
        (
            world.scene.waits().contains(&Reason::LearnerCutOff),
            planned,
        )
    };
    // The learner is connected to the leader. The plan promotes the learner, so the next TLS stage waits.
    assert_eq!(says(&pulse), (false, vec![]));
    pulse.peers.clear();
    assert_eq!(says(&pulse), (true, vec![]));
}

/// Regression: the seed of a recovery lost its pod before its TLS settings were recorded, and restarted with the
/// settings of a newer spec. The learners could not connect to the listed peer URL of the seed.
#[test]
fn invariant_23_wrong_peer_url_of_restarted_seed_is_corrected() {
    let mut world = World::new("null");
    world.record = Some(TlsStatus::new("token", None));
    assert_eq!(world.planned(), []);
    let urls = |listed: &str| vec![listed.to_owned()];
    for listed in ["https://b.ns.svc:2380", "https://b.ns.svc:2382"] {
        *world.urls("b") = urls(listed);
        let writes = world.planned();
        let [Write::UpdatePeerUrls { member, urls, .. }] = &writes[..] else {
            panic!("{listed}: {writes:?}");
        };
        assert_eq!(
            (member.as_str(), urls.as_slice()),
            ("b", &["http://b.ns.svc:2380".to_owned()][..])
        );
        // The operator does not change the peer URL of `b` while `b` does not serve, or runs with other TLS settings
        // than the recorded settings.
        let mut down = World::new("null");
        down.record.clone_from(&world.record);
        *down.urls("b") = vec![listed.to_owned()];
        down.scene = down.scene.down("b");
        assert_eq!(down.planned(), []);
        let mode = TlsMode::of(policy(PEERS).as_ref());
        world.modes.insert("b".to_owned(), mode);
        assert_eq!(world.planned(), []);
        world.modes.insert("b".to_owned(), TlsMode::of(None));
    }
    // The operator keeps this peer URL, because a person has set it.
    *world.urls("b") = urls("http://b.example.com:12380");
    assert_eq!(world.planned(), []);
}

/// Members connect to a changed URL at once, so their Service must already have the second port.
#[test]
fn tls_switch_changes_peer_urls_one_by_one_after_service_ports() {
    let stage = |stage| {
        policy(PEERS).map(|tls| TlsPolicy {
            peer_stage: Some(stage),
            ..tls
        })
    };
    let mut world = World::new(PEERS);
    for name in MEMBERS {
        world.join(name, PeerStage::Plain);
    }
    let at = stage(PeerStage::PlainAndTls);
    world.record = Some(TlsStatus::new("token", at.as_ref()));
    world.modes = MEMBERS
        .map(|name| (name.to_owned(), TlsMode::of(at.as_ref())))
        .into();
    let drifts = |world: &mut World, drifted| {
        let service = world.scene.observed.services.get_mut("b").unwrap();
        service.drifted = drifted;
    };
    drifts(&mut world, true);
    assert_eq!(world.planned(), []);
    drifts(&mut world, false);
    for name in MEMBERS {
        let writes = world.planned();
        let [Write::UpdatePeerUrls { member, urls, .. }] = &writes[..] else {
            panic!("{writes:?}");
        };
        assert_eq!(member, name);
        assert_eq!(*urls, [format!("https://{name}.ns.svc:2382")]);
        world.take(&writes[0]);
    }
    let next = TlsStatus::new("token", stage(PeerStage::TlsTwice).as_ref());
    assert!(matches!(&world.planned()[..], [Write::RecordTls { record, .. }] if **record == next));
}
