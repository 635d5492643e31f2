//! Scenarios for certificates. Each step applies the writes of a plan to the observed state, until the plan contains no
//! further write.

mod lost;

use std::collections::BTreeMap;
use std::time::Duration;

use api::names::{CertificateUse, certificate_secret};
use jiff::Timestamp;
use member::tls::Authorities;

use crate::authority::tests::rule;
use crate::authority::{Anchor, CaScope, Held, Leaf};
use crate::certificates::{CertificateWrite, Certificates};
use crate::clock::ApiServerClock;
use crate::plan::tests::scene::{Letters, Scene, at};
use crate::plan::tests::sent;
use crate::plan::tests::writes::{Plan, Write};
use crate::plan::{actions, plan};
use crate::reason::Reason;

pub(super) const MEMBERS: [&str; 3] = ["db-aaaaaaaaaa", "db-bbbbbbbbbb", "db-cccccccccc"];

/// A cluster with valid certificates, and how it changes with each plan.
pub(super) struct Story {
    pub(super) scene: Scene,
    now: Timestamp,
    drawn: u32,
    pub(super) told: Vec<CertificateWrite>,
}

pub(super) fn held(member: Option<&str>) -> Held {
    Held {
        uid: "secret".into(),
        resource_version: "1".into(),
        owned: true,
        marked: true,
        member: member.map(str::to_owned),
        certificate: None,
        next: None,
        trusts: BTreeMap::new(),
        trusts_until: None,
        rotated_for: None,
    }
}

/// An entry of a trust bundle. Its PEM, its name and its fingerprint are all the same text.
pub(super) fn anchor(text: &[u8]) -> (String, Anchor) {
    let anchor = Anchor {
        subject: text.to_vec(),
        not_after: Timestamp::MAX,
        pem: text.to_vec(),
    };
    (String::from_utf8(text.to_vec()).unwrap(), anchor)
}

impl Story {
    fn of(scene: Scene) -> Self {
        let mut scene = scene;
        scene.observed.certificates = Certificates {
            rule: Some(rule()),
            ..Certificates::default()
        };
        let (drawn, told) = (0, Vec::new());
        Self {
            scene,
            now: at(1000),
            drawn,
            told,
        }
    }

    /// A formed cluster with generated certificates.
    pub(super) fn formed(durable: bool) -> Self {
        let scene = Scene::formed(&MEMBERS);
        let scene = if durable { scene.durable() } else { scene };
        let mut story = Self::of(scene);
        story.settle();
        story.restart_all();
        story.settle();
        story.told.clear();
        story
    }

    pub(super) fn certificates(&mut self) -> &mut Certificates {
        &mut self.scene.observed.certificates
    }

    pub(super) fn plan(&self) -> Plan {
        let (desired, observed) = (&self.scene.desired, &self.scene.observed);
        sent::read(
            plan(desired, observed, &Letters, self.now),
            desired,
            observed,
        )
    }

    pub(super) fn writes(&self) -> Vec<Write> {
        self.plan().step.chains.concat()
    }

    pub(super) fn of_certificates(&self) -> Vec<CertificateWrite> {
        let is = |write| match write {
            Write::Certificate(write) => Some(write),
            _ => None,
        };
        self.writes().into_iter().filter_map(is).collect()
    }

    pub(super) fn deleted(&self) -> usize {
        let deletes = |write: &&Write| matches!(write, Write::DeletePod { .. });
        self.writes().iter().filter(deletes).count()
    }

    /// Applies plans until a plan contains no certificate write.
    pub(super) fn settle(&mut self) {
        for _ in 0..50 {
            let writes = self.of_certificates();
            if writes.is_empty() {
                return;
            }
            for write in writes {
                self.carry_out(&write);
                self.told.push(write);
            }
        }
        panic!("the plans never end: {:?}", self.of_certificates());
    }

    pub(super) fn restart(&mut self, member: &str) {
        let trust = self.certificates().trust();
        let authorities = self.certificates().authorities_now();
        let now = self.now;
        let noted = self.certificates().pods.entry(member.into()).or_default();
        (noted.trust, noted.certificates) = (trust, None);
        noted.authorities = authorities;
        let pod = self.scene.observed.pods.get_mut(member).unwrap();
        (pod.created, pod.difference.pod) = (now, None);
    }

    fn restart_all(&mut self) {
        for member in MEMBERS {
            self.restart(member);
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.now
    }

    pub(super) fn later(&mut self, seconds: u64) {
        self.now = self.now.checked_add(Duration::from_secs(seconds)).unwrap();
    }

    pub(super) fn draw(&mut self, validity: Duration, issuer: Option<Vec<u8>>) -> Leaf {
        self.drawn += 1;
        let name = format!("drawn {}", self.drawn);
        Leaf {
            not_before: self.now,
            not_after: self.now.checked_add(validity).unwrap(),
            issuer: issuer.unwrap_or_else(|| name.clone().into_bytes()),
            subject: name.clone().into_bytes(),
            names: [].into(),
            fingerprint: name,
            can_sign: true,
        }
    }

    pub(super) fn carry_out(&mut self, write: &CertificateWrite) {
        let long = rule().authority_validity;
        let version = format!("{}", self.drawn + 2);
        match write {
            CertificateWrite::Authority { scope, beside, .. } => {
                let signs = self.draw(long, None);
                let mut one = held(None);
                one.trusts = beside.iter().map(|pem| anchor(pem)).collect();
                one.trusts.extend([anchor(signs.fingerprint.as_bytes())]);
                one.trusts_until = Some(signs.not_after);
                (one.certificate, one.resource_version) = (Some(signs), version);
                one.rotated_for = rule().rotate;
                self.certificates().secrets.insert(scope.secret("db"), one);
            }
            CertificateWrite::Rejoin { scope, beside, .. } => {
                let one = self.authority(*scope);
                let own = [one.certificate.clone(), one.next.clone()].into_iter();
                let own = own.flatten().map(|leaf| leaf.fingerprint.into_bytes());
                one.trusts = beside
                    .iter()
                    .cloned()
                    .chain(own)
                    .map(|pem| anchor(&pem))
                    .collect();
                one.resource_version = version;
            }
            CertificateWrite::Prepare { scope, .. } => {
                let next = self.draw(long, None);
                let asked = self.certificates().rule.as_ref().unwrap().rotate.clone();
                let one = self.authority(*scope);
                one.trusts.extend([anchor(next.fingerprint.as_bytes())]);
                one.trusts_until = Some(next.not_after);
                (one.next, one.resource_version, one.rotated_for) = (Some(next), version, asked);
            }
            CertificateWrite::Switch { scope, .. } => {
                let one = self.authority(*scope);
                one.certificate = one.next.take();
                one.resource_version = version;
            }
            CertificateWrite::Retire { scope, .. } => {
                let one = self.authority(*scope);
                let signs = one.certificate.as_ref().unwrap().fingerprint.clone();
                one.trusts.retain(|print, _| *print == signs);
                one.resource_version = version;
            }
            CertificateWrite::Issue { owner, used, .. } => {
                let by = self.authority(CaScope::of(*used)).clone();
                let signs = by.certificate.clone().unwrap();
                let mut leaf = self.draw(rule().validity, Some(signs.subject));
                leaf.not_after = leaf.not_after.min(signs.not_after);
                leaf.names = rule().names(owner, *used).into_iter().collect();
                let mut one = held(owner.starts_with("db-").then_some(owner));
                (one.certificate, one.trusts) = (Some(leaf), by.trusts);
                self.certificates()
                    .secrets
                    .insert(certificate_secret(owner, *used), one);
            }
            CertificateWrite::Trust { owner, used, .. } => {
                let trusts = self.authority(CaScope::of(*used)).trusts.clone();
                let name = certificate_secret(owner, *used);
                self.certificates().secrets.get_mut(&name).unwrap().trusts = trusts;
            }
            CertificateWrite::Mark { secret, .. } => {
                let held = self.certificates().secrets.get_mut(secret).unwrap();
                (held.owned, held.marked) = (true, true);
            }
            CertificateWrite::Notify {
                member,
                certificates,
                authorities,
                ..
            } => {
                let noted = self.certificates().pods.entry(member.clone()).or_default();
                noted.certificates = Some(certificates.clone());
                let authorities = authorities.as_deref().map(Authorities::read);
                noted.authorities = authorities.or(noted.authorities.take());
            }
            CertificateWrite::Discard { secret, .. } => {
                self.certificates().secrets.remove(secret);
            }
        }
    }

    pub(super) fn authority(&mut self, scope: CaScope) -> &mut Held {
        self.certificates()
            .secrets
            .get_mut(&scope.secret("db"))
            .unwrap()
    }

    pub(super) fn outdated(&self) -> usize {
        let certificates = &self.scene.observed.certificates;
        let outdated = |member: &&&str| certificates.outdated(member).is_some();
        MEMBERS.iter().filter(outdated).count()
    }

    pub(super) fn count(&self, kind: fn(&CertificateWrite) -> bool) -> usize {
        self.told.iter().filter(|write| kind(write)).count()
    }
}

pub(super) fn issues(write: &CertificateWrite) -> bool {
    matches!(write, CertificateWrite::Issue { .. })
}

pub(super) fn trusts(write: &CertificateWrite) -> bool {
    matches!(write, CertificateWrite::Trust { .. })
}

#[test]
fn invariant_20_certificates_are_created_before_pod() {
    let mut story = Story::of(Scene::begun(&MEMBERS));
    for member in MEMBERS {
        story.scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).reserved(member);
    }
    let starts = |story: &Story| {
        let chains = story.plan().step.chains.into_iter();
        let with_pod = |writes: &Vec<Write>| {
            writes
                .iter()
                .any(|write| matches!(write, Write::CreatePod(_)))
        };
        chains.filter(with_pod).collect::<Vec<_>>()
    };
    assert!(
        starts(&story).is_empty(),
        "no pod is created before the authorities exist"
    );
    let made = story.of_certificates();
    assert_eq!(
        made.len(),
        2,
        "an authority for peers and for clients: {made:?}"
    );
    for write in made {
        story.carry_out(&write);
    }
    let chains = starts(&story);
    assert_eq!(chains.len(), 3);
    for chain in chains {
        let issued = chain
            .iter()
            .filter(|write| matches!(write, Write::Certificate(_)));
        assert_eq!(issued.count(), 2, "{chain:?}");
        assert!(
            matches!(chain.last(), Some(Write::CreatePod(_))),
            "{chain:?}"
        );
        let at = |is: fn(&Write) -> bool| chain.iter().position(is);
        assert!(
            at(|write| matches!(write, Write::Certificate(_)))
                < at(|write| matches!(write, Write::MarkService { .. })),
            "a rejected certificate leaves no start mark: {chain:?}"
        );
    }
}

/// The operator creates the Service, with the start mark, before the certificates of the member. Without the Service,
/// it would delete these certificates as remains of a removed member.
#[test]
fn rejected_certificate_removes_start_mark() {
    let issue = actions::certificate(CertificateWrite::Issue {
        owner: "db-a".into(),
        used: CertificateUse::Peer,
        over: None,
        by: "1".into(),
    });
    let part = issue.start.unwrap();
    assert!(part.is_undone(true) && part.is_undone(false));
}

/// Invariant 20: if the operator's clock is far ahead, every CA seems to have expired.
#[test]
fn invariant_20_no_certificate_is_renewed_while_clocks_differ() {
    let year = 365 * 86_400;
    let mut story = Story::formed(true);
    story.later(20 * year);
    let replaces = |write: &CertificateWrite| matches!(write, CertificateWrite::Authority { .. });
    assert!(story.of_certificates().iter().any(replaces));
    let clock = |seconds: u64| jiff::SignedDuration::from_secs(i64::try_from(seconds).unwrap());
    story.scene.observed.clock = ApiServerClock(Some(-clock(20 * year)));
    let said = |story: &Story| {
        let problems = story.plan().problems.into_iter();
        let texts = problems.filter(|problem| problem.reason == Reason::ClocksDiffer);
        texts.map(|problem| problem.message).collect::<Vec<_>>()
    };
    assert_eq!(story.of_certificates(), []);
    assert_eq!((story.outdated(), story.deleted()), (0, 0));
    assert!(said(&story)[0].contains("ahead of the API server's"));
    story.scene.desired.invalid = Some("a mistake in the spec".into());
    assert_eq!(story.of_certificates(), []);
    assert_eq!(said(&story).len(), 1);
    // The API server's clock is ahead. By the operator's clock, no renewal is due.
    let mut story = Story::formed(true);
    story.scene.observed.clock = ApiServerClock(Some(clock(20 * year)));
    assert_eq!(story.of_certificates(), []);
    assert!(said(&story)[0].contains("behind the API server's"));
    // The clocks differ by less than the tolerance for certificates.
    story.scene.observed.clock = ApiServerClock(Some(-clock(200)));
    assert_eq!(said(&story), [] as [String; 0]);
    // Certificates whose renewal is due by both clocks are renewed.
    story.later(rule().validity.as_secs() / 4 * 3);
    assert!(story.of_certificates().iter().any(issues));
}

#[test]
fn valid_certificates_are_not_rewritten() {
    let story = Story::formed(true);
    assert_eq!(story.of_certificates(), []);
    assert_eq!((story.outdated(), story.deleted()), (0, 0));
}

#[test]
fn certificates_are_renewed_at_two_thirds_of_validity_without_restart() {
    let mut story = Story::formed(false);
    let life = rule().validity.as_secs();
    story.later(life / 2);
    assert_eq!(story.of_certificates(), []);
    story.later(life / 5);
    story.settle();
    assert_eq!(
        story.count(issues),
        8,
        "two certificates per member, one for the operators, one for clients"
    );
    let tells = |write: &CertificateWrite| matches!(write, CertificateWrite::Notify { .. });
    assert_eq!(story.count(tells), 3);
    assert_eq!(
        (story.outdated(), story.deleted()),
        (0, 0),
        "no member is restarted"
    );
}

/// `spec.paused` stops all changes. An invalid spec stops all changes except renewals.
#[test]
fn certificates_are_renewed_despite_invalid_spec() {
    let mut story = Story::formed(true);
    story.scene.desired.invalid = Some("spec.size is 0".into());
    assert_eq!(story.writes(), []);
    story.later(rule().validity.as_secs() * 3 / 4);
    let mut paused = story.scene.desired.clone();
    (paused.invalid, paused.paused) = (None, true);
    assert!(
        plan(&paused, &story.scene.observed, &Letters, story.now)
            .step
            .is_empty()
    );
    let of_certificates = |write: &Write| matches!(write, Write::Certificate(_));
    assert!(story.writes().iter().all(of_certificates));
    story.settle();
    assert_eq!(story.count(issues), 8);
    assert_eq!(story.writes(), []);
}

#[test]
fn expired_certificates_are_renewed_while_etcd_is_unreachable() {
    let mut story = Story::formed(false);
    story.later(2 * rule().validity.as_secs());
    story.scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).silent();
    story.settle();
    assert_eq!(story.count(issues), 8);
    assert_eq!(story.deleted(), 0);
}

#[test]
fn new_server_name_reissues_only_server_certificates() {
    let mut story = Story::formed(true);
    let rule = story.certificates().rule.as_mut().unwrap();
    rule.server_names.push("etcd.example.net".into());
    let writes = story.of_certificates();
    let servers = |write: &CertificateWrite| {
        matches!(
            write,
            CertificateWrite::Issue {
                used: CertificateUse::Server,
                ..
            }
        )
    };
    assert_eq!(writes.len(), 3);
    assert!(writes.iter().all(servers), "{writes:?}");
}

#[test]
fn invariant_20_authority_is_rotated_in_steps_across_all_members() {
    let mut story = Story::formed(true);
    story.certificates().rule.as_mut().unwrap().rotate = Some("now".into());
    story.settle();
    let switches = |write: &CertificateWrite| matches!(write, CertificateWrite::Switch { .. });
    let prepares = |write: &CertificateWrite| matches!(write, CertificateWrite::Prepare { .. });
    let retires = |write: &CertificateWrite| matches!(write, CertificateWrite::Retire { .. });
    assert_eq!(story.count(prepares), 2);
    assert_eq!(
        story.count(issues),
        0,
        "no certificate is issued again: the same authority signs"
    );
    assert_eq!(
        story.count(trusts),
        8,
        "every Secret trusts both authorities"
    );
    assert_eq!(
        story.outdated(),
        3,
        "each member must restart with both authorities"
    );
    for member in &MEMBERS[..2] {
        story.restart(member);
        story.settle();
        assert_eq!(
            story.count(switches),
            0,
            "one member does not trust the next authority yet"
        );
    }
    story.restart(MEMBERS[2]);
    story.settle();
    assert_eq!(story.count(switches), 2);
    assert_eq!(
        story.count(issues),
        8,
        "the new authority issues every certificate again"
    );
    assert_eq!(story.outdated(), 0);
    assert_eq!(
        story.count(retires),
        0,
        "clients get time to load their certificates"
    );
    story.later(rule().validity.as_secs() / 3 + 600);
    story.settle();
    assert_eq!(story.count(retires), 2);
    assert_eq!(
        story.outdated(),
        3,
        "each member must restart without the former authority"
    );
    story.restart_all();
    story.settle();
    assert_eq!((story.outdated(), story.count(prepares)), (0, 2));
    assert_eq!(story.of_certificates(), []);
}

#[test]
fn lost_authority_is_trusted_alongside_its_successor() {
    let mut story = Story::formed(true);
    let before = story.authority(CaScope::Peers).trusts.clone();
    story.certificates().secrets.remove("db-peer-ca");
    let writes = story.of_certificates();
    let [
        CertificateWrite::Authority {
            scope: CaScope::Peers,
            beside,
            over: None,
        },
    ] = &*writes
    else {
        panic!("{writes:?}");
    };
    assert_eq!(beside.len(), before.len());
    assert_eq!(story.deleted(), 0);
}

#[test]
fn expired_authorities_restart_members_with_volumes() {
    let mut story = Story::formed(true);
    story.later(rule().authority_validity.as_secs() + 60);
    story.scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).silent();
    assert_eq!(
        story.deleted(),
        0,
        "the certificates are renewed before any restart"
    );
    story.settle();
    assert_eq!(story.deleted(), 3);
    assert!(
        story
            .plan()
            .problems
            .iter()
            .all(|one| one.reason != Reason::AuthorityExpired)
    );
}

#[test]
fn expired_authorities_restart_no_member_without_volume() {
    let mut story = Story::formed(false);
    story.later(rule().authority_validity.as_secs() + 60);
    story.scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).silent();
    story.settle();
    assert_eq!(story.deleted(), 0);
    assert!(
        story
            .plan()
            .problems
            .iter()
            .any(|one| one.reason == Reason::AuthorityExpired)
    );
}

/// Invariant 18: while generated certificates replace static ones, members restart one at a time.
#[test]
fn invariant_18_replaced_static_authorities_restart_no_members_together() {
    for durable in [true, false] {
        let mut story = Story::formed(durable);
        for noted in story.certificates().pods.values_mut() {
            noted.trust = Some("of-others@0".to_owned());
        }
        story.settle();
        assert_eq!(story.deleted(), 0);
        let problems = story.plan().problems;
        assert!(
            problems
                .iter()
                .all(|one| one.reason != Reason::AuthorityExpired)
        );
    }
}

#[test]
fn expired_authorities_restart_no_member_with_deleted_or_lost_volume() {
    let mut story = Story::formed(true);
    story.later(rule().authority_validity.as_secs() + 60);
    let scene = std::mem::replace(&mut story.scene, Scene::nothing(3)).silent();
    let members: Vec<String> = scene.observed.disks.keys().cloned().collect();
    let [first, second, _] = &*members else {
        panic!("{members:?}");
    };
    story.scene = scene.claim_deleted(first).volume_lost(second);
    story.settle();
    assert_eq!(story.deleted(), 1);
}

#[test]
fn certificate_secret_of_another_owner_is_unchanged() {
    let mut story = Story::of(Scene::begun(&MEMBERS));
    let mut theirs = held(None);
    theirs.owned = false;
    story
        .certificates()
        .secrets
        .insert("db-peer-ca".into(), theirs);
    let writes = story.of_certificates();
    assert!(writes.iter().all(|write| matches!(
        write,
        CertificateWrite::Authority {
            scope: CaScope::Clients,
            ..
        }
    )));
    assert!(
        story
            .plan()
            .problems
            .iter()
            .any(|one| one.reason == Reason::SecretNotOurs)
    );
}

#[test]
fn restore_seed_gets_certificates_before_it_is_a_member() {
    let mut story = Story::formed(true);
    story.scene.observed.claimed_by = Some("restore".into());
    story.certificates().seed = Some("db-ssssssssss".into());
    let writes = story.of_certificates();
    let is = |write: &CertificateWrite| matches!(write, CertificateWrite::Issue { owner, .. } if owner == "db-ssssssssss");
    assert_eq!(writes.len(), 2);
    assert!(writes.iter().all(is), "{writes:?}");
}
