//! Secrets of generated certificates are lost while members run. The Secrets of CAs, of members and of the operator are
//! deleted, emptied or replaced, one by one or all at once. Only runs with `Setup::authorities` contain these faults.
//!
//! A pod keeps its files after their Secret is lost, and etcd reads its trust bundle only when it starts. The model
//! partitions members that do not accept each other's certificates. A member does not answer an operator whose
//! certificate the member rejects.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::writes::Write;
use api::names::{CertificateUse, certificate_secret};
use cluster::authority::{Anchor, CaScope, Held, Leaf, Rule};
use cluster::certificates::{CertificateWrite, Certificates, Noted};
use cluster::snapshot::Observed;
use jiff::Timestamp;
use member::tls::Authorities;

use crate::event::{Dice, Event, Setup, draw};
use crate::invariants::demand;
use crate::mutation::Mutation;
use crate::others::Begun;
use crate::read::seconds;
use crate::story::{find, play_drawn};
use crate::world::{World, tell};
use crate::write::Answer;
use crate::writes::Plan;

const CIRCLES: [(CaScope, CertificateUse); 2] = [
    (CaScope::Peers, CertificateUse::Peer),
    (CaScope::Clients, CertificateUse::Server),
];
/// A validity that is so long that no certificate authority expires during a run.
const LONG: Duration = Duration::from_hours(100_000);

/// The files of a pod: the issuer of its certificate, and its trust bundle.
#[derive(Clone, Debug, Default)]
struct Files {
    issuer: Vec<u8>,
    bundle: BTreeSet<String>,
}

/// The Secrets with generated certificates, and the annotations and files of the pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pki {
    secrets: BTreeMap<String, Held>,
    /// The annotations of each pod, by the pod's UID.
    noted: BTreeMap<u64, Noted>,
    files: BTreeMap<(u64, CaScope), Files>,
    /// The trust bundle with which the etcd of each pod was started.
    loaded: BTreeMap<(u64, CaScope), BTreeSet<String>>,
    /// True if certificates were lost together with CAs, so that members may have no common CA.
    torn: bool,
}

fn rule() -> Rule {
    Rule {
        namespace: "ns".to_owned(),
        cluster: "db".to_owned(),
        domain: String::new(),
        peers: true,
        clients: true,
        // In the model, certificates do not expire. The validity determines only how much time clients have to load new
        // certificates: a third of the validity, one minute.
        validity: Duration::from_mins(3),
        authority_validity: LONG,
        server_names: Vec::new(),
        proxy: None,
        rotate: None,
    }
}

/// A CA whose PEM, name and fingerprint are the same text.
fn anchor(text: &[u8]) -> (String, Anchor) {
    let anchor = Anchor {
        subject: text.to_vec(),
        not_after: Timestamp::MAX,
        pem: text.to_vec(),
    };
    (String::from_utf8(text.to_vec()).unwrap(), anchor)
}

impl World {
    pub(crate) fn plays_authorities(&self) -> bool {
        self.setup.authorities
    }

    // ---- Secrets with certificates ----

    fn leaf(&mut self, issuer: Option<Vec<u8>>, names: Vec<String>) -> Leaf {
        let name = format!("made-{}", self.next());
        let now = seconds(self.now);
        Leaf {
            not_before: now - Duration::from_mins(5),
            not_after: now + LONG,
            issuer: issuer.unwrap_or_else(|| name.clone().into_bytes()),
            subject: name.clone().into_bytes(),
            names: names.into_iter().map(|name| name.to_lowercase()).collect(),
            fingerprint: name,
            can_sign: true,
        }
    }

    fn held(&mut self, certificate: Option<Leaf>, trusts: BTreeMap<String, Anchor>) -> Held {
        let version = self.next().to_string();
        Held {
            uid: version.clone(),
            resource_version: version,
            owned: true,
            marked: true,
            member: None,
            trusts_until: certificate.as_ref().map(|one| one.not_after),
            certificate,
            next: None,
            trusts,
            rotated_for: None,
        }
    }

    fn authority(&self, scope: CaScope, version: &str) -> Option<Held> {
        let held = self.pki.secrets.get(&scope.secret("db"))?;
        let whole = held.resource_version == version && held.certificate.is_some();
        whole.then(|| held.clone())
    }

    /// Creates the Secret, or replaces the Secret whose resourceVersion is `over`.
    fn put(&mut self, name: String, over: Option<&str>, held: Held) -> Answer {
        let there = self.pki.secrets.get(&name);
        if there.map(|held| held.resource_version.as_str()) != over {
            return Answer::Failed;
        }
        self.pki.secrets.insert(name, held);
        Answer::Done(None)
    }

    pub(crate) fn write_certificate(&mut self, write: &Write) -> Answer {
        if !self.plays_authorities() {
            return Answer::Done(None);
        }
        let answer = match write {
            Write::Certificate(write) => self.certify(write),
            Write::NotifyPod { .. } => self.notify_pod(write),
            Write::DeleteSecret { secret, uid } => {
                let secrets = &mut self.pki.secrets;
                secrets.retain(|name, held| name != secret || held.uid != *uid);
                Some(Answer::Done(None))
            }
            _ => None,
        };
        answer.unwrap_or(Answer::Failed)
    }

    fn notify_pod(&mut self, write: &Write) -> Option<Answer> {
        let Write::NotifyPod {
            member,
            uid,
            trust,
            authorities,
            certificates,
        } = write
        else {
            return None;
        };
        let pod = self.pods.get(member)?;
        if pod.uid.to_string() != *uid {
            return None;
        }
        let noted = self.pki.noted.entry(pod.uid).or_default();
        noted.certificates = Some(certificates.clone());
        noted.trust = trust.clone().or(noted.trust.take());
        let authorities = authorities.as_deref().map(Authorities::read);
        noted.authorities = authorities.or(noted.authorities.take());
        Some(Answer::Done(None))
    }

    fn certify(&mut self, write: &CertificateWrite) -> Option<Answer> {
        let answer = match write {
            CertificateWrite::Authority {
                scope,
                extra_cas,
                over,
            } => {
                let made = self.leaf(None, Vec::new());
                let mut trusts: BTreeMap<_, _> = extra_cas.iter().map(|pem| anchor(pem)).collect();
                trusts.extend([anchor(&made.subject)]);
                let held = self.held(Some(made), trusts);
                self.put(scope.secret("db"), over.as_deref(), held)
            }
            CertificateWrite::Rejoin {
                scope,
                extra_cas,
                over,
            } => {
                let held = self.authority(*scope, over)?;
                let own = held.certificate.iter().chain(&held.next);
                let own = own.map(|leaf| leaf.subject.clone());
                let trusts = extra_cas.iter().cloned().chain(own);
                let trusts = trusts.map(|pem| anchor(&pem)).collect();
                let held = self.held(held.certificate, trusts);
                self.put(scope.secret("db"), Some(over), held)
            }
            CertificateWrite::Retire { scope, over } => {
                let held = self.authority(*scope, over)?;
                self.judge_retirement(*scope, &held);
                let signs = held.certificate.iter().map(|leaf| anchor(&leaf.subject));
                let held = self.held(held.certificate.clone(), signs.collect());
                self.put(scope.secret("db"), Some(over), held)
            }
            // The plans of the model never contain these writes, because no CA becomes due for a rotation.
            CertificateWrite::Prepare { .. } | CertificateWrite::Switch { .. } => return None,
            CertificateWrite::Issue {
                owner,
                used,
                over,
                by,
            } => {
                let by = self.authority(CaScope::of(*used), by)?;
                let signs = by.certificate?.subject;
                self.judge_issue(owner, *used, &signs);
                let leaf = self.leaf(Some(signs), rule().names(owner, *used));
                let mut held = self.held(Some(leaf), by.trusts);
                held.member = (owner != "db").then(|| owner.clone());
                self.put(certificate_secret(owner, *used), over.as_deref(), held)
            }
            CertificateWrite::Trust {
                owner,
                used,
                over,
                by,
            } => {
                let by = self.authority(CaScope::of(*used), by)?;
                let name = certificate_secret(owner, *used);
                let before = self.pki.secrets.get(&name)?.clone();
                let mut held = self.held(before.certificate, by.trusts);
                held.member = before.member;
                self.put(name, Some(over), held)
            }
            CertificateWrite::Mark { secret, over } => {
                let mut held = self.pki.secrets.get(secret)?.clone();
                held.marked = true;
                self.put(secret.clone(), Some(over), held)
            }
        };
        Some(answer)
    }

    /// Deletes, empties or replaces one Secret or all Secrets.
    pub(crate) fn lose_secret(&mut self, which: u8) {
        let (how, what) = (which % 3, which / 3 % 16);
        let members = self.pods.keys().cloned().collect::<Vec<_>>();
        let member = members.get(usize::from(which) % members.len().max(1));
        let names: Vec<String> = match (what, member) {
            (0..6, _) => vec![CaScope::Peers.secret("db")],
            (6..10, _) => vec![CaScope::Clients.secret("db")],
            (10, _) => CIRCLES.map(|(scope, _)| scope.secret("db")).into(),
            (11, _) => vec![certificate_secret("db", CertificateUse::Operator)],
            (12 | 13, Some(member)) => {
                vec![certificate_secret(
                    member,
                    CIRCLES[usize::from(what) - 12].1,
                )]
            }
            _ => self.pki.secrets.keys().cloned().collect(),
        };
        for name in names {
            let Some(before) = self.pki.secrets.remove(&name) else {
                continue;
            };
            let is_authority = name.ends_with("-ca");
            self.pki.torn |= !is_authority;
            tell!(
                self,
                "Secret {name} is lost: {}",
                ["deleted", "emptied", "replaced"][usize::from(how)]
            );
            if how == 0 {
                continue;
            }
            let mut held = self.held(None, BTreeMap::new());
            held.member = before.member;
            if how == 2 {
                let foreign = self.leaf(None, Vec::new());
                held.trusts = [anchor(&foreign.subject)].into();
                held.certificate = Some(if is_authority {
                    foreign
                } else {
                    self.leaf(Some(foreign.subject), Vec::new())
                });
            }
            self.pki.secrets.insert(name, held);
        }
    }

    // ---- annotations of pods ----

    /// Sets the annotations about certificates on a pod that this operator creates.
    pub(crate) fn note_trust(&mut self, uid: u64) {
        if self.plays_authorities() {
            let noted = self.switch.sender.noted.clone();
            self.pki.noted.insert(uid, noted);
        }
    }

    /// The kubelet mounts the content of the Secrets. A mounted file stays after its Secret is lost. Returns false if
    /// a file was never available.
    pub(crate) fn mounts(&mut self, name: &str) -> bool {
        if !self.plays_authorities() {
            return true;
        }
        let uid = self.pods[name].uid;
        CIRCLES.iter().all(|(scope, used)| {
            let held = self.pki.secrets.get(&certificate_secret(name, *used));
            let whole = held.and_then(|held| Some((held, held.certificate.as_ref()?)));
            if let Some((held, leaf)) = whole {
                let files = Files {
                    issuer: leaf.issuer.clone(),
                    bundle: held.trusts.keys().cloned().collect(),
                };
                self.pki.files.insert((uid, *scope), files);
            }
            self.pki.files.contains_key(&(uid, *scope))
        })
    }

    /// The starting etcd of this member reads its trust bundle.
    pub(crate) fn loads(&mut self, name: &str) {
        let uid = self.pods[name].uid;
        for (scope, _) in CIRCLES {
            if let Some(files) = self.pki.files.get(&(uid, scope)) {
                self.pki.loaded.insert((uid, scope), files.bundle.clone());
            }
        }
    }

    /// True if the member has a leader, which the readiness probe requires.
    pub(crate) fn has_leader(&self, name: &str) -> bool {
        let data = self.data(name);
        let cluster = data.and_then(|data| Some((data, self.clusters.get(&data.token)?)));
        !self.plays_authorities()
            || cluster.is_some_and(|(data, cluster)| {
                let process = cluster.running.get(&data.member);
                process.is_some_and(|process| cluster.leader(process.group).is_some())
            })
    }

    // ---- trust between members ----

    fn accepts(&self, uid: u64, scope: CaScope, issuer: &[u8]) -> bool {
        let loaded = self.pki.loaded.get(&(uid, scope));
        loaded.is_some_and(|all| all.iter().any(|one| one.as_bytes() == issuer))
    }

    /// True if `member` accepts the certificate of `other`.
    fn lets_in(&self, member: &str, other: &str) -> bool {
        let uid = |name: &str| self.pods.get(name).map(|pod| pod.uid);
        let (Some(member), Some(other)) = (uid(member), uid(other)) else {
            return false;
        };
        let files = self.pki.files.get(&(other, CaScope::Peers));
        files.is_some_and(|files| self.accepts(member, CaScope::Peers, &files.issuer))
    }

    /// True if each of the two members accepts the certificate of the other.
    pub(crate) fn have_authorities_in_common(&self, one: &str, other: &str) -> bool {
        !self.plays_authorities() || self.lets_in(one, other) && self.lets_in(other, one)
    }

    /// True if the member and the operator accept each other's certificates.
    pub(crate) fn lets_operator_in(&self, name: &str) -> bool {
        if !self.plays_authorities() {
            return true;
        }
        let own = certificate_secret("db", CertificateUse::Operator);
        let own = self.pki.secrets.get(&own);
        let own = own.and_then(|held| Some((held, held.certificate.as_ref()?)));
        let (Some((held, leaf)), Some(pod)) = (own, self.pods.get(name)) else {
            return false;
        };
        let files = self.pki.files.get(&(pod.uid, CaScope::Clients));
        self.accepts(pod.uid, CaScope::Clients, &leaf.issuer)
            && files.is_some_and(|files| held.trusts_issuer(&files.issuer))
    }

    /// True if certificates were lost together with their CAs, so that members may need to restart at the same time.
    pub(crate) fn is_torn(&self) -> bool {
        self.pki.torn
    }

    pub(crate) fn see_authorities(&self, observed: &mut Observed) {
        if !self.plays_authorities() {
            return;
        }
        let noted = observed.pods.iter().map(|(name, pod)| {
            let noted = self.pki.noted.get(&pod.uid.parse().unwrap());
            (name.clone(), noted.cloned().unwrap_or_default())
        });
        let certificates = Certificates {
            rule: Some(rule()),
            pods: noted.collect(),
            secrets: self.pki.secrets.clone(),
            ..Certificates::default()
        };
        for (name, pod) in &mut observed.pods {
            if let Some(why) = certificates.outdated(name) {
                pod.difference.pod.get_or_insert(why);
            }
        }
        observed.certificates = certificates;
    }

    // ---- checks of invariant 20 ----

    fn running(&self) -> Vec<(String, u64)> {
        let pods = self.pods.iter().filter(|(_, pod)| pod.running);
        pods.map(|(name, pod)| (name.clone(), pod.uid)).collect()
    }

    /// Checks that every member that accepted the previous certificate accepts the new certificate.
    fn judge_issue(&mut self, owner: &str, used: CertificateUse, by: &[u8]) {
        let scope = CaScope::of(used);
        let before = match self.pods.get(owner) {
            Some(pod) if !pod.running => None,
            Some(pod) => self.pki.files.get(&(pod.uid, scope)).cloned(),
            None => {
                let held = self.pki.secrets.get(&certificate_secret(owner, used));
                let leaf = held.and_then(|held| held.certificate.as_ref());
                leaf.map(|leaf| Files {
                    issuer: leaf.issuer.clone(),
                    ..Files::default()
                })
            }
        };
        let Some(before) = before.filter(|_| used != CertificateUse::Client) else {
            return;
        };
        let refused = self.running().into_iter().find(|(name, uid)| {
            let accepted = self.accepts(*uid, scope, &before.issuer);
            name != owner && accepted && !self.accepts(*uid, scope, by)
        });
        demand!(
            self,
            refused.is_none(),
            "invariant 20: the {} certificate of {owner} is signed by a CA that {refused:?} does not trust",
            used.word()
        );
    }

    /// Checks that every running member was started with the next CA before the current CA is retired.
    fn judge_retirement(&mut self, scope: CaScope, held: &Held) {
        let signs = held.certificate.as_ref().map(|leaf| leaf.subject.clone());
        let signs = signs.unwrap_or_default();
        let behind = self.running().into_iter();
        let behind = { behind }.find(|(_, uid)| !self.accepts(*uid, scope, &signs));
        demand!(
            self,
            behind.is_none(),
            "invariant 20: a CA is retired before {behind:?} was started with the next CA"
        );
    }
}

impl Mutation {
    pub(crate) const ABOUT_AUTHORITIES: [Self; 3] = [
        Self::IssuesUntrusted,
        Self::LocksItselfOut,
        Self::RetiresEarly,
    ];

    /// Deliberate mistakes: a certificate of the new CA is issued before members trust that CA, or the old CA is
    /// retired too early.
    pub(crate) fn mistakes_an_authority(self, observed: &Observed, planned: &mut Plan) {
        for writes in &mut planned.step.chains {
            for write in writes {
                let Write::Certificate(CertificateWrite::Trust {
                    owner,
                    used,
                    over,
                    by,
                }) = write
                else {
                    continue;
                };
                let issues = match self {
                    Self::IssuesUntrusted => *used == CertificateUse::Peer,
                    Self::LocksItselfOut => *used == CertificateUse::Operator,
                    _ => false,
                };
                if issues {
                    *write = Write::Certificate(CertificateWrite::Issue {
                        owner: owner.clone(),
                        used: *used,
                        over: Some(over.clone()),
                        by: by.clone(),
                    });
                }
            }
        }
        if self == Self::RetiresEarly {
            for (scope, _) in CIRCLES {
                let held = observed.certificates.signer(scope);
                if let Some(held) = held.filter(|held| held.trusts.len() > 1) {
                    let over = held.resource_version.clone();
                    let retire = CertificateWrite::Retire { scope, over };
                    let writes = vec![Write::Certificate(retire)];
                    planned.step.chains.push(writes);
                }
            }
        }
    }
}

fn fault(dice: &mut Dice) -> Event {
    match dice.below(10) {
        0 => Event::Crash {
            after: dice.small(12),
        },
        1 => Event::LoseReply {
            after: dice.small(12),
        },
        2 => Event::Delay {
            after: dice.small(12),
            ticks: dice.small(10),
        },
        3 => Event::Refuse {
            after: dice.small(12),
        },
        4 => Event::LookSlowly {
            ticks: dice.small(4),
        },
        5 => Event::LosePod(dice.byte()),
        6 => Event::DeletePod(dice.byte()),
        7 => Event::ApiAway {
            ticks: dice.small(6),
        },
        _ => Event::LoseSecret(dice.byte()),
    }
}

fn drawn(seed: u64) -> (Setup, Vec<Event>) {
    let (setup, _) = draw(seed, false);
    let mut dice = Dice::new(!seed);
    let setup = Setup {
        size: 1 + 2 * usize::try_from(dice.below(3)).unwrap(),
        durable: true,
        local: false,
        version: "3.6.16",
        begun: Begun::Here,
        silent: false,
        authorities: true,
        ..setup
    };
    let pass = |rounds: u64| (0..rounds).flat_map(|_| [Event::Round, Event::Tick]);
    let mut events: Vec<Event> = pass(12).collect();
    for _ in 0..dice.below(16) {
        events.push(Event::LoseSecret(dice.byte()));
        for _ in 0..dice.below(4) {
            events.extend(pass(dice.below(5)));
            events.push(fault(&mut dice));
        }
        events.extend(pass(dice.below(30)));
    }
    (setup, events)
}

const ROUNDS: usize = 20_000;

/// Invariants 3, 18 and 20: after the loss of its CAs, the cluster keeps its quorum while members restart and get new
/// certificates.
#[test]
fn loss_of_certificate_authorities_keeps_invariants() {
    play_drawn(drawn, ROUNDS);
}

#[test]
fn model_detects_every_mistake_about_certificate_authorities() {
    find(&Mutation::ABOUT_AUTHORITIES, drawn, ROUNDS);
}
