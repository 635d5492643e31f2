//! Generated certificates. The operator creates them before the first member, renews them in time, and rotates their
//! certificate authorities (CAs) without locking out a member or a client.
//!
//! This module needs no answer from etcd, because a cluster with expired certificates answers no request and must get
//! new certificates.
//!
//! The rotation of a CA has four steps. Each step starts only after the previous step has reached every member
//! (invariant 20):
//! 1. Members trust the next CA in addition to the signing CA. Every member is restarted with both.
//! 2. The next CA becomes the signing CA.
//! 3. All certificates are reissued. Clients get time to load their new certificates.
//! 4. Members no longer trust the former CA. Every member is restarted again.
//!
//! A lost CA is replaced in the same steps. The new CA does not sign before every member trusts it. Until then, members
//! keep their certificates, and only their trust bundles are rewritten. [`rejoin`] restarts the members that these
//! steps cannot reach, because the CAs of these members have expired or differ.

mod notify;
mod rejoin;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::names::CertificateUse;
use jiff::Timestamp;

use crate::authority::{Anchor, CaScope, Held, Leaf, Rule, made_at};
use crate::certificates::{CertificateWrite, Certificates};
use crate::clock::age;
use crate::plan::actions::{self, Builder};
use crate::plan::view::is_known;
use crate::plan::{BLIND, Draft, STEADY};
use crate::reason::Reason;
use crate::snapshot::{Observed, Pod, Seen};

pub(super) use rejoin::wait_for_certificates;

/// Clients have at least this time to load certificates of the new CA.
const SHORTEST_GRACE: Duration = Duration::from_mins(1);

/// What the other phases of this plan do, as computed by `plan::conflicts::settle`.
#[derive(Default)]
pub(super) struct Settled {
    /// Members that another phase starts. That phase's actions include their certificates.
    pub(super) started: BTreeSet<String>,
    /// True if the addition of a member was removed from the plan, because the other members would reject the new
    /// member.
    pub(super) adds: bool,
    /// True if no member can start with the current certificates. The operator then restarts no serving member.
    pub(super) held: bool,
    /// True if another phase creates or deletes a pod.
    pub(super) touches_pods: bool,
}

/// Maintains the generated certificates of a cluster.
pub(super) struct Keeper<'a> {
    rule: &'a Rule,
    certificates: &'a Certificates,
    observed: &'a Observed,
    now: Timestamp,
}

/// Maintains all certificates, except the certificates of members in `settled.started`.
pub(super) fn keep<'a>(
    build: Builder<'a>,
    keeper: Option<&Keeper>,
    settled: &Settled,
) -> Draft<'a> {
    let mut draft = Draft::new(build);
    if keeper.is_some() {
        report_clocks(&mut draft);
    }
    let rollout = build.observed.tls_rollout.as_ref();
    if let Some(why) = rollout.and_then(|rollout| rollout.refused.as_ref()) {
        draft.problem(Reason::TLSSwitchRefused, why.clone());
    }
    let Some(keeper) = keeper else {
        return draft;
    };
    for scope in keeper.rule.scopes() {
        keeper.authority(scope, &mut draft);
    }
    keeper.of_cluster(&mut draft);
    for member in keeper.members() {
        if !settled.started.contains(&member) {
            for write in keeper.of_member(&member) {
                order(write, &mut draft);
            }
        }
    }
    keeper.notify(&mut draft);
    let restarts = keeper.start_again(settled, &mut draft);
    keeper.rejoin(settled, restarts, &mut draft);
    draft
}

/// Renews the existing certificates, so that they do not expire while the spec is invalid. Makes no other change.
pub(super) fn renew(build: Builder<'_>) -> Draft<'_> {
    let mut draft = Draft::new(build);
    let Some(keeper) = Keeper::of(build) else {
        return draft;
    };
    report_clocks(&mut draft);
    for (owner, used) in &keeper.all() {
        let (owner, used) = (owner.as_str(), *used);
        let held = keeper.certificates.leaf(owner, used);
        let leaf = held.and_then(|held| held.certificate.as_ref());
        if leaf.is_some_and(|leaf| leaf.renewal() <= build.now)
            && let Some(write) = keeper.issue(owner, used)
        {
            order(write, &mut draft);
        }
    }
    keeper.notify(&mut draft);
    draft
}

fn report_clocks(draft: &mut Draft) {
    if let Some(text) = draft.build.observed.clock.problem() {
        draft.problem(Reason::ClocksDiffer, text);
    }
}

fn order(write: CertificateWrite, draft: &mut Draft) {
    draft.add(actions::certificate(write));
}

fn say(write: CertificateWrite, draft: &mut Draft) {
    draft.say(write.to_string());
    order(write, draft);
}

impl<'a> Keeper<'a> {
    /// Returns `None` if the operator generates no certificates.
    pub(super) fn of(build: Builder<'a>) -> Option<Self> {
        let observed = build.observed;
        let certificates = &observed.certificates;
        Some(Self {
            rule: certificates.rule.as_ref()?,
            certificates,
            observed,
            now: observed.clock.for_certificates(build.now),
        })
    }
}

impl Keeper<'_> {
    /// The names of a restore's seed and of the members with a pod or a Secret.
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

    /// True if neither etcd's list nor the recorded bootstrap names the member, and it has no Kubernetes object. False
    /// while the list is unknown.
    fn is_gone(&self, member: &str) -> bool {
        let observed = self.observed;
        let Seen::Known(list) = &observed.members else {
            return false;
        };
        let listed = list.members.iter().any(|one| {
            let mut urls = one.peer_urls.iter();
            one.name == member || urls.any(|url| api::names::member_of_url(url) == Some(member))
        });
        let forming = observed.cluster_id.is_none() && observed.is_first_member(member);
        !listed && !forming && !is_known(observed, member)
    }

    /// Maintains one CA: creates it if it is missing, and rotates it before it expires.
    fn authority(&self, scope: CaScope, draft: &mut Draft) {
        let Some(held) = self.certificates.authority(scope) else {
            self.create(scope, None, draft);
            return;
        };
        let over = held.resource_version.clone();
        if !held.owned {
            let text = format!(
                "Secret {} belongs to another owner, but the operator stores a generated certificate authority under this name: delete this Secret, or move its data to a Secret with another name",
                scope.secret(&self.rule.cluster)
            );
            draft.problem(Reason::SecretNotOurs, text);
            return;
        }
        if !held.marked {
            let secret = scope.secret(&self.rule.cluster);
            order(CertificateWrite::Mark { secret, over }, draft);
            return;
        }
        let usable = held
            .certificate
            .as_ref()
            .filter(|signs| signs.not_after > self.now);
        let Some(signs) = usable else {
            self.create(scope, Some(over), draft);
            return;
        };
        if let Some(extra_cas) = self.incomplete(scope, held) {
            say(
                CertificateWrite::Rejoin {
                    scope,
                    extra_cas,
                    over,
                },
                draft,
            );
            return;
        }
        if held.next.is_some() {
            if self.reached_all(scope, held) {
                say(CertificateWrite::Switch { scope, over }, draft);
            } else {
                let text = format!(
                    "members are restarted with the next {} certificate authority",
                    scope.word()
                );
                draft.wait(Reason::AuthorityRotating, text, BLIND);
            }
            return;
        }
        if held.trusts.len() > 1 {
            self.retire(scope, held, draft);
            return;
        }
        let asked = self.rule.rotate.is_some() && self.rule.rotate != held.rotated_for;
        if signs.renewal() <= self.now || asked {
            say(CertificateWrite::Prepare { scope, over }, draft);
        }
    }

    /// Creates a CA. The existing CAs stay trusted until every member trusts the new CA.
    fn create(&self, scope: CaScope, over: Option<String>, draft: &mut Draft) {
        let extra_cas = self.trusted_already(scope);
        let write = CertificateWrite::Authority {
            scope,
            extra_cas,
            over,
        };
        say(write, draft);
    }

    fn retire(&self, scope: CaScope, held: &Held, draft: &mut Draft) {
        let Some(signs) = &held.certificate else {
            return;
        };
        let over = held.resource_version.clone();
        let mut newest = signs.not_before;
        let mut made = true;
        for (owner, used) in self.all_of(scope) {
            let leaf = self.certificates.leaf(&owner, used);
            match leaf.and_then(|leaf| leaf.certificate.as_ref()) {
                Some(one) if one.issuer == signs.subject => newest = newest.max(made_at(one)),
                _ => made = false,
            }
        }
        // Invariant 20: the former CA is removed after all members trust the new CA and have certificates from it.
        if !made || !self.reached_all(scope, held) {
            let text = format!(
                "members are restarted with the new {} certificate authority, and the operator reissues all certificates",
                scope.word()
            );
            draft.wait(Reason::AuthorityRotating, text, BLIND);
            return;
        }
        let notified = self
            .observed
            .pods
            .keys()
            .all(|member| self.is_notified(member));
        let grace = (self.rule.validity / 3).max(SHORTEST_GRACE);
        let at = newest.checked_add(grace).unwrap_or(Timestamp::MAX);
        if notified && at <= self.now {
            say(CertificateWrite::Retire { scope, over }, draft);
            return;
        }
        let left = age(self.now, at);
        let text = format!(
            "the former {} certificate authority is trusted until {at}, so that clients can load their new \
             certificates",
            scope.word()
        );
        draft.wait(Reason::AuthorityRotating, text, left.clamp(BLIND, STEADY));
    }

    /// All certificates that the cluster needs, by owner and use.
    fn all(&self) -> Vec<(String, CertificateUse)> {
        let of_members = self.members().into_iter().flat_map(|member| {
            let uses = self.rule.uses_of_member();
            uses.map(move |used| (member.clone(), used))
        });
        let own = self.rule.uses_of_cluster();
        let own = own.map(|used| (self.rule.cluster.clone(), used));
        of_members.chain(own).collect()
    }

    /// All certificates that the cluster needs from one CA.
    fn all_of(&self, scope: CaScope) -> impl Iterator<Item = (String, CertificateUse)> {
        let all = self.all().into_iter();
        all.filter(move |(_, used)| CaScope::of(*used) == scope)
    }

    /// The existing Secrets with certificates from one CA.
    fn leaves(&self, scope: CaScope) -> Vec<&Held> {
        self.all_of(scope)
            .filter_map(|(owner, used)| self.certificates.leaf(&owner, used))
            .collect()
    }

    /// The valid CAs in the trust bundles of the existing Secrets. Expired CAs are left out, because no member accepts
    /// their certificates.
    fn trusted_already(&self, scope: CaScope) -> Vec<Vec<u8>> {
        let leaves = self.leaves(scope);
        let all = leaves.iter().flat_map(|leaf| &leaf.trusts);
        let valid = all.filter(|(_, anchor)| anchor.not_after > self.now);
        let distinct: BTreeMap<&String, &Anchor> = valid.collect();
        let pem = distinct.into_values().map(|anchor| anchor.pem.clone());
        pem.collect()
    }

    /// The CAs that the trust bundle must contain in addition to its signing CA and its next CA. `None` if the bundle
    /// contains these two CAs and the issuer of every certificate in use. A bundle without one of them shows that the
    /// Secret of the CA was replaced.
    fn incomplete(&self, scope: CaScope, held: &Held) -> Option<Vec<Vec<u8>>> {
        let own = [held.certificate.as_ref(), held.next.as_ref()].into_iter();
        let own: Vec<&String> = own.flatten().map(|leaf| &leaf.fingerprint).collect();
        let leaves = self.leaves(scope);
        let in_use = leaves.iter().filter_map(|secret| {
            let leaf = secret.certificate.as_ref()?;
            let lacks = leaf.not_after > self.now && !held.trusts_issuer(&leaf.issuer);
            let mut named = secret.trusts.iter();
            named.find(|(print, anchor)| {
                let valid = lacks && anchor.not_after > self.now;
                valid && anchor.subject == leaf.issuer && self.is_trusted(scope, print)
            })
        });
        let in_use: BTreeMap<&String, &Anchor> = in_use.collect();
        let whole = own.iter().all(|print| held.trusts.contains_key(*print));
        if whole && in_use.is_empty() {
            return None;
        }
        // If `in_use` is not empty, the Secret of the CA was replaced. The former CAs in the certificate Secrets
        // (`known`) then stay trusted if they are valid, because clients need time to load their new certificates.
        let known = leaves.iter().flat_map(|secret| &secret.trusts);
        let known = known.filter(|(print, anchor)| {
            let replaced = !in_use.is_empty() && anchor.not_after > self.now;
            replaced && self.is_trusted(scope, print)
        });
        let extra_cas: BTreeMap<&String, &Anchor> = held.trusts.iter().chain(known).collect();
        let extra_cas = extra_cas
            .into_iter()
            .filter(|(print, _)| !own.contains(print));
        Some(extra_cas.map(|(_, anchor)| anchor.pem.clone()).collect())
    }

    /// True if a pod was started with this CA, or if the CAs of a pod are unknown. False without pods.
    fn is_trusted(&self, scope: CaScope, fingerprint: &str) -> bool {
        self.observed.pods.keys().any(|member| {
            let unknown = self.certificates.started_with(member).is_none();
            unknown || self.certificates.trusts(member, scope, fingerprint)
        })
    }

    /// The signing CA. `None` if the trust bundle in its Secret is incomplete, or its certificate has expired.
    fn signer(&self, scope: CaScope) -> Option<(&Held, &Leaf)> {
        let held = self.certificates.signer(scope)?;
        let signs = held.certificate.as_ref()?;
        let valid = signs.not_after > self.now;
        (valid && self.incomplete(scope, held).is_none()).then_some((held, signs))
    }

    /// The members whose etcd may be running.
    fn running(&self) -> impl Iterator<Item = (&String, &Pod)> {
        let pods = self.observed.pods.iter();
        pods.filter(|(_, pod)| pod.running && !pod.failed)
    }

    /// Invariant 20: true if the Secret of every certificate has the complete trust bundle of this CA, and every pod
    /// was started with that bundle and is ready.
    fn reached_all(&self, scope: CaScope, held: &Held) -> bool {
        let in_secrets = self
            .leaves(scope)
            .iter()
            .all(|leaf| leaf.trusts == held.trusts);
        let pods = self.observed.pods.iter();
        // Only the bundle of this scope is compared, because the CA Secret of the other scope may be missing.
        let mut started = pods.map(|(member, pod)| {
            let with = &self.certificates;
            pod.stays() && pod.ready && with.started_with_bundle(member, scope, held)
        });
        in_secrets && started.all(|one| one)
    }

    /// The change that the Secret of a certificate needs now; `None` if it needs no change, or if the change must wait.
    fn issue(&self, owner: &str, used: CertificateUse) -> Option<CertificateWrite> {
        let scope = CaScope::of(used);
        let (authority, signs) = self.signer(scope)?;
        let by = authority.resource_version.clone();
        let write = |over: Option<String>| CertificateWrite::Issue {
            owner: owner.to_owned(),
            used,
            over,
            by: by.clone(),
        };
        // Invariant 20: the operator issues a new certificate for a running member only when every running member would
        // accept it. Until then, a member without its Secret continues with the certificate files in its pod.
        let accepted = || {
            let runs = self.running().any(|(member, _)| member == owner);
            let running = self.running().map(|(member, _)| member);
            !runs || self.certificates.all_accept_signer(scope, running)
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
            // An expired certificate is replaced at once, because no member accepts it.
            true
        } else if authority.trusts_issuer(&leaf.issuer) {
            self.reached_all(scope, authority)
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

    /// Issues the certificates that belong to no member: those of the operator, of clients and of gRPC proxies.
    fn of_cluster(&self, draft: &mut Draft) {
        for used in self.rule.uses_of_cluster() {
            if let Some(write) = self.issue(&self.rule.cluster, used) {
                order(write, draft);
            }
        }
    }

    /// True if every CA can sign, so that any member can start.
    pub(super) fn is_ready(&self) -> bool {
        let mut scopes = self.rule.scopes();
        scopes.all(|scope| self.signer(scope).is_some())
    }

    /// True if every running member would accept the certificates of a new member.
    pub(super) fn accepts_new_members(&self) -> bool {
        let running = self.running().map(|(member, _)| member);
        self.certificates.accepts_new_members(running)
    }

    /// The Secrets with the certificates of a member.
    pub(super) fn held_of(&self, member: &str) -> impl Iterator<Item = (&String, &Held)> {
        let held = self.certificates.secrets.iter();
        held.filter(move |(_, held)| held.owned && held.member.as_deref() == Some(member))
    }
}

#[cfg(test)]
mod tests;
