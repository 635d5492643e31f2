//! Scenarios of lost authorities: the Secret of an authority is deleted, emptied or replaced, alone or together with
//! other Secrets.

use std::time::Duration;

use api::names::{CertificateUse, certificate_secret};

use super::story::{MEMBERS, Story, anchor, held, is_of_certificates, issues, notifies, trusts};
use crate::authority::CaScope;
use crate::authority::tests::rule;
use crate::certificates::CertificateWrite;
use crate::plan::tests::writes::{Chain, Write};
use crate::reason::Reason;
use crate::snapshot::Seen;

fn retires(write: &Write) -> bool {
    matches!(write, Write::Certificate(CertificateWrite::Retire { .. }))
}

fn rejoins(write: &Write) -> bool {
    matches!(write, Write::Certificate(CertificateWrite::Rejoin { .. }))
}

impl Story {
    /// The name of the authority that signed the certificate of `owner`.
    fn issuer(&mut self, owner: &str, used: CertificateUse) -> Vec<u8> {
        let name = certificate_secret(owner, used);
        let leaf = self.certificates().secrets[&name].certificate.clone();
        leaf.unwrap().issuer
    }

    fn signs(&mut self, scope: CaScope) -> Vec<u8> {
        let leaf = self.authority(scope).certificate.clone();
        leaf.unwrap().subject
    }

    /// The member of the pod that the plan deletes. Fails if the plan deletes two pods.
    fn deletes(&self) -> Option<String> {
        let writes = self.writes();
        let mut members = writes.iter().filter_map(|write| match write {
            Write::DeletePod { member, .. } => Some(member.clone()),
            _ => None,
        });
        let first = members.next();
        assert_eq!(members.next(), None, "the plan deletes at most one pod");
        first
    }

    /// Removes all answers of etcd, as if no member accepted the operator's certificate.
    fn silent(&mut self) {
        self.scene.observed.statuses.clear();
        self.scene.observed.members = Seen::Unknown("bad certificate".into());
    }

    /// Makes the CA of this scope expire while the operator is not running. The operator then replaces the
    /// certificates.
    fn expires(&mut self, scope: CaScope) {
        let end = self.now().checked_add(Duration::from_mins(1)).unwrap();
        self.expire(scope, end);
        self.restart_all();
        self.later(120);
        self.settle();
    }

    fn restarts_one_by_one(&mut self) {
        for member in MEMBERS {
            assert_eq!(self.deletes().as_deref(), Some(member));
            self.comes_back(member);
            self.ready(member, false);
            assert_eq!(
                self.deletes(),
                None,
                "no other pod may be deleted while {member} is not ready"
            );
            self.ready(member, true);
            self.settle();
        }
        assert_eq!(self.deletes(), None);
    }

    fn ready(&mut self, member: &str, ready: bool) {
        let now = self.now();
        let pod = self.scene.observed.pods.get_mut(member).unwrap();
        (pod.ready, pod.unready_since) = (ready, (!ready).then_some(now));
    }

    /// Recreates the pod of a member, after the certificate writes that the plan sends before the pod.
    fn comes_back(&mut self, member: &str) {
        let pod = self.scene.observed.pods.remove(member).unwrap();
        let noted = self.certificates().pods.remove(member).unwrap();
        let begins = |chain: &Chain| {
            let is =
                |write: &Write| matches!(write, Write::CreatePod(start) if start.member == member);
            chain.iter().any(is)
        };
        let mut chains = self.plan().step.chains.into_iter();
        for write in chains.find(begins).unwrap() {
            if is_of_certificates(&write) {
                self.carry_out(&write);
                self.told.push(write);
            }
        }
        self.scene.observed.pods.insert(member.into(), pod);
        self.certificates().pods.insert(member.into(), noted);
        self.restart(member);
    }

    /// Checks all steps from the loss of an authority to the last certificate of the new authority, with rolling
    /// updates between the steps.
    fn replaced(&mut self, scope: CaScope, uses: &[(&str, CertificateUse)]) {
        let before = self.issuer(uses[0].0, uses[0].1);
        self.settle();
        assert_eq!(
            self.count(issues),
            0,
            "the new authority must not sign, because members would reject its certificates"
        );
        assert_eq!(self.count(trusts), uses.len());
        assert_eq!((self.outdated(), self.deleted()), (3, 0));
        let trusted = self.authority(scope).clone();
        assert!(trusted.trusts_issuer(&before), "{trusted:?}");
        for member in &MEMBERS[..2] {
            self.restart(member);
            self.settle();
            assert_eq!(
                self.count(issues),
                0,
                "the new authority must not sign while one member does not trust it"
            );
        }
        self.restart(MEMBERS[2]);
        self.settle();
        assert_eq!(self.count(issues), uses.len());
        let signs = self.signs(scope);
        assert_ne!(signs, before);
        for (owner, used) in uses {
            assert_eq!(self.issuer(owner, *used), signs);
        }
        assert_eq!(
            self.count(retires),
            0,
            "the old authority must stay while clients load their certificates"
        );
        self.later(rule().validity.as_secs() / 3 + 600);
        self.settle();
        assert_eq!(self.count(retires), 1);
        assert_eq!(self.outdated(), 3);
    }
}

fn of_peers() -> Vec<(&'static str, CertificateUse)> {
    MEMBERS.map(|member| (member, CertificateUse::Peer)).into()
}

fn of_clients() -> Vec<(&'static str, CertificateUse)> {
    let mut all: Vec<_> = MEMBERS
        .map(|member| (member, CertificateUse::Server))
        .into();
    all.push(("db", CertificateUse::Operator));
    all.push(("db", CertificateUse::Client));
    all
}

fn scopes() -> [(CaScope, Vec<(&'static str, CertificateUse)>); 2] {
    [
        (CaScope::Peers, of_peers()),
        (CaScope::Clients, of_clients()),
    ]
}

#[test]
fn invariant_20_deleted_authority_is_replaced_in_steps() {
    for (scope, uses) in scopes() {
        let mut story = Story::formed(true);
        story.certificates().secrets.remove(&scope.secret("db"));
        assert_eq!(story.deleted(), 0);
        story.replaced(scope, &uses);
    }
}

#[test]
fn invariant_20_emptied_authority_secret_is_replaced_in_steps() {
    for (scope, uses) in scopes() {
        let mut story = Story::formed(true);
        *story.authority(scope) = held(None);
        story.replaced(scope, &uses);
    }
}

#[test]
fn invariant_20_externally_replaced_authority_signs_after_all_members_trust_it() {
    for (scope, uses) in scopes() {
        let mut story = Story::formed(true);
        let foreign = story.draw(rule().authority_validity, None);
        let one = story.authority(scope);
        one.trusts = [anchor(foreign.fingerprint.as_bytes())].into();
        one.certificate = Some(foreign.clone());
        story.replaced(scope, &uses);
        assert_eq!(story.count(rejoins), 1);
        assert_eq!(story.signs(scope), foreign.subject);
    }
}

#[test]
fn authority_missing_in_its_own_trust_bundle_is_added() {
    let mut story = Story::formed(true);
    let before = story.authority(CaScope::Peers).trusts.clone();
    story.authority(CaScope::Peers).trusts.clear();
    story.settle();
    assert_eq!(story.count(rejoins), 1);
    assert_eq!(story.authority(CaScope::Peers).trusts, before);
    assert_eq!((story.told.len(), story.outdated()), (1, 0));
}

/// Other software replaced the certificate and the CA in a member's Secret. The operator does not trust that CA.
#[test]
fn foreign_certificate_is_replaced_and_its_issuer_not_trusted() {
    let mut story = Story::formed(true);
    let foreign = story.draw(rule().authority_validity, None);
    let leaf = story.draw(rule().validity, Some(foreign.subject.clone()));
    let name = certificate_secret(MEMBERS[0], CertificateUse::Peer);
    let secret = story.certificates().secrets.get_mut(&name).unwrap();
    secret.certificate = Some(leaf);
    secret.trusts = [anchor(foreign.fingerprint.as_bytes())].into();
    story.settle();
    assert_eq!((story.count(issues), story.count(rejoins)), (1, 0));
    assert_eq!(story.authority(CaScope::Peers).trusts.len(), 1);
    assert_eq!((story.outdated(), story.deleted()), (0, 0));
}

#[test]
fn invariant_20_member_restarts_with_existing_certificate_after_authority_loss() {
    let mut story = Story::formed(true);
    let before = story.signs(CaScope::Peers);
    story.certificates().secrets.remove("db-peer-ca");
    story.settle();
    story.comes_back(MEMBERS[1]);
    assert_eq!(story.count(issues), 0);
    assert_eq!(story.issuer(MEMBERS[1], CertificateUse::Peer), before);
    assert_eq!(story.outdated(), 2);
}

/// A running member continues with the certificate files in its pod, which the other members accept.
#[test]
fn invariant_20_lost_certificate_is_reissued_after_members_trust_new_authority() {
    let mut story = Story::formed(true);
    let name = certificate_secret(MEMBERS[0], CertificateUse::Peer);
    story.certificates().secrets.remove(&name);
    story.certificates().secrets.remove("db-peer-ca");
    story.settle();
    assert_eq!(story.count(issues), 0);
    for member in [MEMBERS[1], MEMBERS[2]] {
        story.restart(member);
        story.settle();
        assert_eq!(story.count(issues), 0);
    }
    story.comes_back(MEMBERS[0]);
    assert_eq!(story.count(issues), 1);
    story.settle();
    assert_eq!(story.count(issues), 3);
}

#[test]
fn lost_certificate_is_reissued_at_once_if_authority_exists() {
    let mut story = Story::formed(true);
    story.ready(MEMBERS[2], false);
    let name = certificate_secret(MEMBERS[0], CertificateUse::Peer);
    story.certificates().secrets.remove(&name);
    story.settle();
    assert_eq!((story.count(issues), story.outdated()), (1, 0));
}

/// Until they are restarted, the members reject the operator's new certificate, and would reject new peer certificates.
#[test]
fn invariant_20_loss_of_all_secrets_restarts_members_one_by_one() {
    let mut story = Story::formed(true);
    story.certificates().secrets.clear();
    story.silent();
    story.settle();
    assert_eq!(
        story.count(issues),
        2,
        "the plan must issue only the certificates of the operator and of clients"
    );
    let mut restarted = Vec::new();
    for _ in MEMBERS {
        let member = story.deletes().unwrap();
        let pod = story.scene.observed.pods.get_mut(&member).unwrap();
        pod.terminating = true;
        assert_eq!(story.deletes(), None, "{member} is terminating");
        let pod = story.scene.observed.pods.get_mut(&member).unwrap();
        pod.terminating = false;
        story.comes_back(&member);
        let pod = story.scene.observed.pods.get_mut(&member).unwrap();
        pod.running = false;
        story.ready(&member, false);
        story.settle();
        assert_eq!(story.deletes(), None, "{member} is starting");
        let pod = story.scene.observed.pods.get_mut(&member).unwrap();
        pod.running = true;
        restarted.push(member);
        let together = restarted.len() >= 2;
        for member in MEMBERS {
            let again = restarted.iter().any(|one| one == member);
            story.ready(member, again == together);
        }
        story.settle();
    }
    restarted.sort();
    assert_eq!(restarted, MEMBERS);
    assert_eq!((story.outdated(), story.deletes()), (0, None));
    assert_eq!(story.count(issues), 2 + 2 * MEMBERS.len());
}

#[test]
fn lost_client_authority_restarts_members_one_by_one() {
    let mut story = Story::formed(true);
    let own = certificate_secret("db", CertificateUse::Operator);
    story.certificates().secrets.remove(&own);
    story.certificates().secrets.remove("db-client-ca");
    story.settle();
    assert_eq!(
        story.deletes(),
        None,
        "the members answer the operator, so no pod may be deleted"
    );
    story.silent();
    story.restarts_one_by_one();
}

/// Invariant 18 (rolling updates): members accept their peers, so a quorum may serve clients with open connections.
#[test]
fn invariant_18_expired_client_authority_restarts_members_one_by_one() {
    let mut story = Story::formed(true);
    story.expires(CaScope::Clients);
    assert_eq!(
        story.deletes(),
        None,
        "the members answer the operator, so no pod may be deleted"
    );
    story.silent();
    story.restarts_one_by_one();
}

/// If the CAs for peers have expired, members accept no connection from each other. The operator assumes the same if
/// the Secret of these CAs is lost.
#[test]
fn expired_peer_authority_restarts_members_together() {
    let mut story = Story::formed(true);
    story.expires(CaScope::Peers);
    story.silent();
    assert_eq!(story.deleted(), 3);
    let mut story = Story::formed(true);
    story.expires(CaScope::Clients);
    let of_peers = |name: &String| name.contains("-peer");
    story
        .certificates()
        .secrets
        .retain(|name, _| !of_peers(name));
    story.silent();
    story.settle();
    assert_eq!(story.deleted(), 3);
}

#[test]
fn lost_authority_restarts_no_member_without_volume() {
    for all in [true, false] {
        let mut story = Story::formed(false);
        if all {
            story.certificates().secrets.clear();
            story.silent();
        } else {
            story.certificates().secrets.remove("db-peer-ca");
        }
        story.settle();
        assert_eq!((story.deletes(), story.outdated()), (None, 3));
        let problems = story.plan().problems;
        let lost = |reason| problems.iter().any(|one| one.reason == reason);
        assert!(lost(Reason::AuthorityLost), "{problems:?}");
        for member in MEMBERS {
            story.ready(member, false);
        }
        assert_eq!(story.deletes(), None);
    }
}

/// The steps of one authority do not depend on the Secret of the other authority.
#[test]
fn invariant_20_loss_of_second_authority_skips_no_rotation_step() {
    let mut story = Story::formed(true);
    story.certificates().secrets.remove("db-client-ca");
    story.settle();
    story.restart(MEMBERS[0]);
    story.settle();
    *story.authority(CaScope::Peers) = held(None);
    story.settle();
    assert_eq!(story.count(issues), 0);
}

/// The old authority stays trusted until every member was started with the new authority, even if other faults occur.
#[test]
fn invariant_20_old_authority_stays_until_all_members_trust_new_one() {
    let mut story = Story::formed(true);
    story.certificates().secrets.remove("db-peer-ca");
    story.settle();
    for member in &MEMBERS[..2] {
        story.restart(member);
        story.settle();
    }
    story.later(rule().validity.as_secs());
    story.settle();
    assert_eq!(story.count(retires), 0);
    assert!(
        story.count(issues) > 0,
        "expired certificates must be issued again"
    );
}

#[test]
fn authority_secret_of_another_owner_restarts_no_member() {
    let mut story = Story::formed(true);
    let foreign = story.draw(rule().authority_validity, None);
    let one = story.authority(CaScope::Peers);
    one.trusts = [anchor(foreign.fingerprint.as_bytes())].into();
    (one.certificate, one.owned) = (Some(foreign), false);
    story.settle();
    assert_eq!(story.told, []);
    assert_eq!((story.outdated(), story.deletes()), (0, None));
    let problems = story.plan().problems;
    assert!(
        problems
            .iter()
            .any(|one| one.reason == Reason::SecretNotOurs)
    );
}

/// If the annotation is missing, the operator finds the authorities of a pod by their digest.
#[test]
fn deleted_annotation_with_authorities_is_restored() {
    let mut story = Story::formed(true);
    for noted in story.certificates().pods.values_mut() {
        noted.authorities = None;
    }
    story.settle();
    assert_eq!((story.count(notifies), story.told.len()), (3, 3));
    let noted = story.certificates().pods[MEMBERS[0]].authorities.clone();
    let now = story.certificates().authorities_now();
    assert!(now.is_some() && noted == now);
    assert_eq!(story.outdated(), 0);
}
