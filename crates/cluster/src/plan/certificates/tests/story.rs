//! A cluster whose certificates the planner issues and renews over time.

use super::*;

pub(super) const MEMBERS: [&str; 3] = ["db-aaaaaaaaaa", "db-bbbbbbbbbb", "db-cccccccccc"];

/// A cluster with valid certificates, whose state changes with each applied plan.
pub(super) struct Story {
    pub(super) scene: Scene,
    pub(super) now: Timestamp,
    drawn: u32,
    /// The expiry times that a test has set, by the fingerprint of the certificate.
    ends: BTreeMap<String, Timestamp>,
    pub(super) told: Vec<Write>,
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
    pub(super) fn of(scene: Scene) -> Self {
        let mut scene = scene;
        scene.observed.certificates = Certificates {
            rule: Some(rule()),
            ..Certificates::default()
        };
        Self {
            scene,
            now: at(1000),
            drawn: 0,
            ends: BTreeMap::new(),
            told: Vec::new(),
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

    pub(super) fn of_certificates(&self) -> Vec<Write> {
        let mut writes = self.writes();
        writes.retain(is_of_certificates);
        writes
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
        panic!(
            "the plans still write certificates: {:?}",
            self.of_certificates()
        );
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

    pub(super) fn restart_all(&mut self) {
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
        let not_after = self.now.checked_add(validity).unwrap();
        self.ends.insert(name.clone(), not_after);
        Leaf {
            not_before: self.now,
            not_after,
            issuer: issuer.unwrap_or_else(|| name.clone().into_bytes()),
            subject: name.clone().into_bytes(),
            names: [].into(),
            fingerprint: name,
            can_sign: true,
        }
    }

    /// The entry of a trust bundle for a generated CA, with the expiry that a test has set.
    fn drawn_anchor(&self, pem: &[u8]) -> (String, Anchor) {
        let (print, mut entry) = anchor(pem);
        entry.not_after = self.ends.get(&print).copied().unwrap_or(entry.not_after);
        (print, entry)
    }

    /// Sets the expiry of the CAs of this scope, and of their certificates, to this time.
    pub(super) fn expire(&mut self, scope: CaScope, end: Timestamp) {
        let prints: Vec<String> = self.authority(scope).trusts.keys().cloned().collect();
        for print in &prints {
            self.ends.insert(print.clone(), end);
        }
        for held in self.certificates().secrets.values_mut() {
            let mut found = false;
            for (print, entry) in &mut held.trusts {
                if prints.contains(print) {
                    (entry.not_after, found) = (end, true);
                }
            }
            if !found {
                continue;
            }
            let leaf = held.certificate.as_mut().unwrap();
            leaf.not_after = leaf.not_after.min(end);
            held.trusts_until = held.trusts_until.map(|_| end);
        }
    }

    pub(super) fn carry_out(&mut self, write: &Write) {
        match write {
            Write::Certificate(write) => self.write_secret(write),
            Write::NotifyPod {
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
            Write::DeleteSecret { secret, .. } => {
                self.certificates().secrets.remove(secret);
            }
            other => panic!("not a write of certificates: {other}"),
        }
    }

    fn write_secret(&mut self, write: &CertificateWrite) {
        let long = rule().authority_validity;
        let version = format!("{}", self.drawn + 2);
        match write {
            CertificateWrite::Authority {
                scope, extra_cas, ..
            } => {
                let signs = self.draw(long, None);
                let mut one = held(None);
                let own = signs.fingerprint.as_bytes();
                let bundle = extra_cas.iter().map(Vec::as_slice).chain([own]);
                one.trusts = bundle.map(|pem| self.drawn_anchor(pem)).collect();
                one.trusts_until = Some(signs.not_after);
                (one.certificate, one.resource_version) = (Some(signs), version);
                one.rotated_for = rule().rotate;
                self.certificates().secrets.insert(scope.secret("db"), one);
            }
            CertificateWrite::Rejoin {
                scope, extra_cas, ..
            } => {
                let one = self.authority(*scope);
                let own = [one.certificate.clone(), one.next.clone()].into_iter();
                let own = own.flatten().map(|leaf| leaf.fingerprint.into_bytes());
                let bundle = extra_cas.iter().cloned().chain(own);
                let trusts = bundle.map(|pem| self.drawn_anchor(&pem)).collect();
                let one = self.authority(*scope);
                (one.trusts, one.resource_version) = (trusts, version);
            }
            CertificateWrite::Prepare { scope, .. } => {
                let next = self.draw(long, None);
                let asked = self.certificates().rule.as_ref().unwrap().rotate.clone();
                let entry = self.drawn_anchor(next.fingerprint.as_bytes());
                let one = self.authority(*scope);
                one.trusts.extend([entry]);
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
                let in_effect = self.certificates().rule.clone().unwrap_or_else(rule);
                leaf.names = in_effect.names(owner, *used).into_iter().collect();
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

    pub(super) fn count(&self, kind: fn(&Write) -> bool) -> usize {
        self.told.iter().filter(|write| kind(write)).count()
    }
}

pub(super) fn issues(write: &Write) -> bool {
    matches!(write, Write::Certificate(CertificateWrite::Issue { .. }))
}

pub(super) fn trusts(write: &Write) -> bool {
    matches!(write, Write::Certificate(CertificateWrite::Trust { .. }))
}

pub(super) fn notifies(write: &Write) -> bool {
    matches!(write, Write::NotifyPod { .. })
}

pub(super) fn is_of_certificates(write: &Write) -> bool {
    matches!(
        write,
        Write::Certificate(_) | Write::NotifyPod { .. } | Write::DeleteSecret { .. }
    )
}
