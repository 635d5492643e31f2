//! Generated certificates: made before the first member, renewed in time, and their authorities replaced without
//! anybody being locked out.
//!
//! Nothing here depends on an answer of etcd, so that a cluster whose certificates have run out, which answers nobody,
//! gets new ones.
//!
//! An authority is replaced in four steps, each of which waits until the last has reached every member (invariant 20):
//! the next one is trusted beside the one that signs, and every member is started with both; the next one signs;
//! every certificate is made anew and clients are given time to take theirs; the one before is trusted no longer, and
//! every member is started once more.
//!
//! An authority that is lost is replaced in the same steps. The new one can sign at once, and does not before every
//! member trusts it: until then members keep the certificates they have, and only their trust bundles are written anew.
//! [`rejoin`] restarts members that cannot be reached by these steps: their authorities have expired or are not shared.

mod rejoin;
mod tell;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::names::CertificateUse;
use jiff::Timestamp;

use crate::authority::{Anchor, Circle, Held, Leaf, Rule, made_at};
use crate::certificates::{CertificateWrite, Certificates};
use crate::plan::{BLIND, Draft, STEADY};
use crate::reason::Reason;
use crate::snapshot::{Observed, Pod, Seen};
use crate::write::Write;

/// How long at least clients are given to take certificates by the new authority.
const SHORTEST_GRACE: Duration = Duration::from_mins(1);

/// What became of the writes of the other phases (`plan::conflicts`).
#[derive(Default)]
pub(super) struct Settled {
    /// The members that are started, with their certificates.
    pub(super) started: BTreeSet<String>,
    /// A member was to be added, and the others would not accept it.
    pub(super) adds: bool,
    /// Certificates are in the way of starts: no serving member is restarted.
    pub(super) held: bool,
}

/// Keeps the generated certificates of a cluster.
pub(super) struct Keeper<'a> {
    rule: &'a Rule,
    certificates: &'a Certificates,
    observed: &'a Observed,
    now: Timestamp,
}

/// Keeps the certificates. Those of members that are started are part of their start already.
pub(super) fn keep(
    observed: &Observed,
    keeper: Option<&Keeper>,
    settled: &Settled,
    draft: &mut Draft,
) {
    let rollout = observed.tls_rollout.as_ref();
    if let Some(why) = rollout.and_then(|rollout| rollout.refused.as_ref()) {
        draft.problem(Reason::TLSSwitchRefused, why.clone());
    }
    let Some(keeper) = keeper else {
        return;
    };
    for circle in keeper.rule.circles() {
        keeper.authority(circle, draft);
    }
    keeper.of_cluster(draft);
    for member in keeper.members() {
        if !settled.started.contains(&member) {
            for write in keeper.of_member(&member) {
                order(write, draft);
            }
        }
    }
    keeper.tell(draft);
    keeper.start_again(settled, draft);
    keeper.rejoin(settled, draft);
}

/// A mistake somewhere in the spec is no reason to let certificates run out: those that are there are made anew in time,
/// and nothing else is done.
pub(super) fn renew(observed: &Observed, now: Timestamp, draft: &mut Draft) {
    let Some(keeper) = Keeper::of(observed, now, draft) else {
        return;
    };
    for (owner, used) in &keeper.all() {
        let (owner, used) = (owner.as_str(), *used);
        let held = keeper.certificates.leaf(owner, used);
        let leaf = held.and_then(|held| held.certificate.as_ref());
        if leaf.is_some_and(|leaf| leaf.renewal() <= now)
            && let Some(write) = keeper.issue(owner, used)
        {
            order(write, draft);
        }
    }
    keeper.tell(draft);
}

fn order(write: CertificateWrite, draft: &mut Draft) {
    draft.write(Write::Certificate(write));
}

fn say(write: CertificateWrite, draft: &mut Draft) {
    draft.say(write.to_string());
    order(write, draft);
}

impl<'a> Keeper<'a> {
    /// `None` where the operator makes no certificates.
    pub(super) fn of(observed: &'a Observed, now: Timestamp, draft: &mut Draft) -> Option<Self> {
        let certificates = &observed.certificates;
        let rule = certificates.rule.as_ref()?;
        if let Some(text) = observed.clock.problem() {
            draft.problem(Reason::ClocksDiffer, text);
        }
        Some(Self {
            rule,
            certificates,
            observed,
            now: observed.clock.for_certificates(now),
        })
    }
}

impl Keeper<'_> {
    /// The members there is anything of.
    fn members(&self) -> BTreeSet<String> {
        let pods = self.observed.pods.keys().cloned();
        let held = self.certificates.secrets.values();
        let held = held.filter_map(|secret| secret.member.clone());
        let gone = |name: &String| self.is_gone(name);
        let seed = self.certificates.seed.clone();
        pods.chain(held)
            .filter(|name| !gone(name))
            .chain(seed)
            .collect()
    }

    /// Nothing is there of this member, and it is in no list.
    fn is_gone(&self, member: &str) -> bool {
        let observed = self.observed;
        let first = observed.intent.as_ref();
        let Seen::Known(list) = &observed.members else {
            return false;
        };
        let listed = list.members.iter().any(|one| {
            let mut urls = one.peer_urls.iter();
            one.name == member || urls.any(|url| api::names::member_of_url(url) == Some(member))
        });
        let forming = observed.cluster_id.is_none()
            && first.is_some_and(|intent| intent.members.contains(member));
        !listed
            && !forming
            && !observed.pods.contains_key(member)
            && !observed.disks.contains_key(member)
            && !observed.services.contains_key(member)
    }

    /// One authority: made where there is none, replaced in time.
    fn authority(&self, circle: Circle, draft: &mut Draft) {
        let Some(held) = self.certificates.authority(circle) else {
            // What is trusted already stays trusted until everybody trusts the new one.
            let beside = self.trusted_already(circle);
            say(
                CertificateWrite::Authority {
                    circle,
                    beside,
                    over: None,
                },
                draft,
            );
            return;
        };
        let over = held.resource_version.clone();
        if !held.owned {
            let text = format!(
                "Secret {} is somebody else's: delete or rename it, its name is needed for an authority of generated \
                 certificates",
                circle.secret(&self.rule.cluster)
            );
            draft.problem(Reason::SecretNotOurs, text);
            return;
        }
        if !held.marked {
            let secret = circle.secret(&self.rule.cluster);
            order(CertificateWrite::Mark { secret, over }, draft);
            return;
        }
        let usable = held
            .certificate
            .as_ref()
            .filter(|signs| signs.not_after > self.now);
        let Some(signs) = usable else {
            let beside = self.trusted_already(circle);
            say(
                CertificateWrite::Authority {
                    circle,
                    beside,
                    over: Some(over),
                },
                draft,
            );
            return;
        };
        if let Some(beside) = self.incomplete(circle, held) {
            say(
                CertificateWrite::Rejoin {
                    circle,
                    beside,
                    over,
                },
                draft,
            );
            return;
        }
        if held.next.is_some() {
            if self.reached_all(circle, held) {
                say(CertificateWrite::Switch { circle, over }, draft);
            } else {
                let text = format!(
                    "every member is started with the next {} authority",
                    circle.word()
                );
                draft.wait(Reason::AuthorityRotating, text, BLIND);
            }
            return;
        }
        if held.trusts.len() > 1 {
            self.retire(circle, held, draft);
            return;
        }
        let asked = self.rule.rotate.is_some() && self.rule.rotate != held.rotated_for;
        if signs.renewal() <= self.now || asked {
            say(CertificateWrite::Prepare { circle, over }, draft);
        }
    }

    fn retire(&self, circle: Circle, held: &Held, draft: &mut Draft) {
        let Some(signs) = &held.certificate else {
            return;
        };
        let over = held.resource_version.clone();
        let mut newest = signs.not_before;
        let mut made = true;
        for (owner, used) in self.all_of(circle) {
            let leaf = self.certificates.leaf(&owner, used);
            match leaf.and_then(|leaf| leaf.certificate.as_ref()) {
                Some(one) if one.issuer == signs.subject => newest = newest.max(made_at(one)),
                _ => made = false,
            }
        }
        // Invariant 20: nothing is retired before every member that runs was started with its successor.
        if !made || !self.reached_all(circle, held) {
            let text = format!(
                "every member is started with the new {} authority, and every certificate is made by it",
                circle.word()
            );
            draft.wait(Reason::AuthorityRotating, text, BLIND);
            return;
        }
        let told = self.observed.pods.keys().all(|member| self.is_told(member));
        let grace = (self.rule.validity / 3).max(SHORTEST_GRACE);
        let at = newest.checked_add(grace).unwrap_or(Timestamp::MAX);
        if told && at <= self.now {
            say(CertificateWrite::Retire { circle, over }, draft);
            return;
        }
        let left = Duration::try_from(at.duration_since(self.now)).unwrap_or_default();
        let text = format!(
            "the {} authority before is trusted until {at}, so that clients can take their new certificates",
            circle.word()
        );
        draft.wait(Reason::AuthorityRotating, text, left.clamp(BLIND, STEADY));
    }

    /// Every certificate there is to be: whose it is, and what for.
    fn all(&self) -> Vec<(String, CertificateUse)> {
        let of_members = self.members().into_iter().flat_map(|member| {
            let uses = self.rule.uses_of_member();
            uses.map(move |used| (member.clone(), used))
        });
        let own = self.uses_of_cluster();
        let own = own.map(|used| (self.rule.cluster.clone(), used));
        of_members.chain(own).collect()
    }

    /// The same of one authority.
    fn all_of(&self, circle: Circle) -> impl Iterator<Item = (String, CertificateUse)> {
        let all = self.all().into_iter();
        all.filter(move |(_, used)| Circle::of(*used) == circle)
    }

    /// The Secrets with certificates of one authority, as far as they are there.
    fn leaves(&self, circle: Circle) -> Vec<&Held> {
        self.all_of(circle)
            .filter_map(|(owner, used)| self.certificates.leaf(&owner, used))
            .collect()
    }

    fn uses_of_cluster(&self) -> impl Iterator<Item = CertificateUse> {
        let clients = self.rule.clients;
        let uses = [CertificateUse::Operator, CertificateUse::Client];
        uses.into_iter().filter(move |_| clients)
    }

    /// What certificates' Secrets trust, apart from authorities that have run out: nobody can be told of a new one in
    /// steps by them, as no connection can be made any more.
    fn trusted_already(&self, circle: Circle) -> Vec<Vec<u8>> {
        let leaves = self.leaves(circle);
        let all = leaves.iter().flat_map(|leaf| &leaf.trusts);
        let valid = all.filter(|(_, anchor)| anchor.not_after > self.now);
        let distinct: BTreeMap<&String, &Anchor> = valid.collect();
        let pem = distinct.into_values().map(|anchor| anchor.pem.clone());
        pem.collect()
    }

    /// What an authority's bundle is to hold beside the one that signs and the next one, if it lacks one of these or
    /// one that certificates in use were signed by: the Secret was replaced.
    fn incomplete(&self, circle: Circle, held: &Held) -> Option<Vec<Vec<u8>>> {
        let own = [held.certificate.as_ref(), held.next.as_ref()].into_iter();
        let own: Vec<&String> = own.flatten().map(|leaf| &leaf.fingerprint).collect();
        let leaves = self.leaves(circle);
        let in_use = leaves.iter().filter_map(|secret| {
            let leaf = secret.certificate.as_ref()?;
            let lacks = leaf.not_after > self.now && !held.trusts_issuer(&leaf.issuer);
            let mut named = secret.trusts.iter();
            named.find(|(print, anchor)| {
                let valid = lacks && anchor.not_after > self.now;
                valid && anchor.subject == leaf.issuer && self.is_trusted(circle, print)
            })
        });
        let in_use: BTreeMap<&String, &Anchor> = in_use.collect();
        let whole = own.iter().all(|print| held.trusts.contains_key(*print));
        if whole && in_use.is_empty() {
            return None;
        }
        // Those before stay trusted as long as clients are given time.
        let known = leaves.iter().flat_map(|secret| &secret.trusts);
        let known = known.filter(|(print, anchor)| {
            let replaced = !in_use.is_empty() && anchor.not_after > self.now;
            replaced && self.is_trusted(circle, print)
        });
        let beside: BTreeMap<&String, &Anchor> = held.trusts.iter().chain(known).collect();
        let beside = beside.into_iter().filter(|(print, _)| !own.contains(print));
        Some(beside.map(|(_, anchor)| anchor.pem.clone()).collect())
    }

    /// A pod was started with this authority, or may have been. Where there is no pod, no member has to be told.
    fn is_trusted(&self, circle: Circle, fingerprint: &str) -> bool {
        self.observed.pods.keys().any(|member| {
            let unknown = self.certificates.started_with(member).is_none();
            unknown || self.certificates.trusts(member, circle, fingerprint)
        })
    }

    /// The authority that signs, while its Secret holds all it has to.
    fn signer(&self, circle: Circle) -> Option<(&Held, &Leaf)> {
        let held = self.certificates.signer(circle)?;
        let signs = held.certificate.as_ref()?;
        let valid = signs.not_after > self.now;
        (valid && self.incomplete(circle, held).is_none()).then_some((held, signs))
    }

    /// The members whose etcd may run.
    fn running(&self) -> impl Iterator<Item = (&String, &Pod)> {
        let pods = self.observed.pods.iter();
        pods.filter(|(_, pod)| pod.running && !pod.failed)
    }

    /// Invariant 20: whom an authority is to be trusted by has been started with it: every certificate's Secret names
    /// it, and every pod was made after that.
    fn reached_all(&self, circle: Circle, held: &Held) -> bool {
        let in_secrets = self
            .leaves(circle)
            .iter()
            .all(|leaf| leaf.trusts == held.trusts);
        let pods = self.observed.pods.iter();
        // By what it noted about this authority alone: the other one may be lost at the moment.
        let mut started = pods.map(|(member, pod)| {
            let with = &self.certificates;
            pod.stays() && pod.ready && with.started_with_bundle(member, circle, held)
        });
        in_secrets && started.all(|one| one)
    }

    /// What a certificate's Secret needs now.
    fn issue(&self, owner: &str, used: CertificateUse) -> Option<CertificateWrite> {
        let circle = Circle::of(used);
        let (authority, signs) = self.signer(circle)?;
        let by = authority.resource_version.clone();
        let write = |over: Option<String>| CertificateWrite::Issue {
            owner: owner.to_owned(),
            used,
            over,
            by: by.clone(),
        };
        // Invariant 20: a member that runs goes on with the files it has, which stay in its pod when their Secret is
        // lost, until every member accepts what is signed now.
        let accepted = || {
            let runs = self.running().any(|(member, _)| member == owner);
            let running = self.running().map(|(member, _)| member);
            !runs || self.certificates.all_accept_signer(circle, running)
        };
        let Some(held) = self.certificates.leaf(owner, used) else {
            return accepted().then(|| write(None));
        };
        let over = held.resource_version.clone();
        if !held.owned {
            return None;
        }
        if !held.marked {
            let secret = api::names::certificate_secret(owner, used);
            return Some(CertificateWrite::Mark { secret, over });
        }
        let Some(leaf) = &held.certificate else {
            return accepted().then(|| write(Some(over)));
        };
        let remade = if leaf.issuer == signs.subject {
            let wanted = self.rule.names(owner, used);
            let covers = |name: &String| leaf.names.contains(&name.to_ascii_lowercase());
            let due = leaf.renewal() <= self.now && leaf.not_after < signs.not_after;
            due || !wanted.iter().all(covers)
        } else if leaf.not_after <= self.now {
            // It is worth nothing.
            true
        } else if authority.trusts_issuer(&leaf.issuer) {
            self.reached_all(circle, authority)
        } else {
            accepted()
        };
        if remade {
            return Some(write(Some(over)));
        }
        (held.trusts != authority.trusts).then(|| CertificateWrite::Trust {
            owner: owner.to_owned(),
            used,
            over,
            by,
        })
    }

    pub(super) fn of_member(&self, member: &str) -> Vec<CertificateWrite> {
        let uses = self.rule.uses_of_member();
        uses.filter_map(|used| self.issue(member, used)).collect()
    }

    /// The operators' certificate, and the clients'.
    fn of_cluster(&self, draft: &mut Draft) {
        for used in self.uses_of_cluster() {
            if let Some(write) = self.issue(&self.rule.cluster, used) {
                order(write, draft);
            }
        }
    }

    /// Every authority can sign, so every member can be started.
    pub(super) fn is_ready(&self) -> bool {
        let mut circles = self.rule.circles();
        circles.all(|circle| self.signer(circle).is_some())
    }

    /// Every member that runs would accept the certificates of a new one.
    pub(super) fn accepts_new_members(&self) -> bool {
        let running = self.running().map(|(member, _)| member);
        self.certificates.accepts_new_members(running)
    }

    /// The Secrets with certificates of a member.
    pub(super) fn held_of(&self, member: &str) -> impl Iterator<Item = (&String, &Held)> {
        let held = self.certificates.secrets.iter();
        held.filter(move |(_, held)| held.owned && held.member.as_deref() == Some(member))
    }
}

#[cfg(test)]
mod tests;
