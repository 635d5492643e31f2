//! Restarts members that other members or the operator cannot reach, because certificate authorities (CAs) of these
//! members have expired or are missing.
//!
//! etcd reads its trust bundle only at its start. The operator therefore restarts such members with all CAs, one at a
//! time, with or without a quorum. It restarts only members on volumes that are not being deleted, so no acknowledged
//! write is lost.

use std::time::Duration;

use api::names::CertificateUse;

use super::{Keeper, Settled};
use crate::authority::{CaScope, Leaf};
use crate::certificates::Noted;
use crate::clock::age;
use crate::plan::{BLIND, Draft, STEADY, actions};
use crate::reason::Reason;
use crate::snapshot::{Disk, Pod};

/// How long the operator waits for a restarted member before it restarts the next. A normal start takes less time.
const RESTART: Duration = Duration::from_mins(1);

impl Keeper<'_> {
    /// Restarts members whose CAs for peers, or whose CAs for clients, have all expired. Members without a volume are
    /// only reported. Returns true if the plan restarts a member.
    ///
    /// Members with expired CAs for peers accept no new connection from each other, so the quorum is lost soon, and all
    /// members are restarted concurrently. With expired CAs for clients only, a quorum may still serve open
    /// connections, so [`Self::rejoin`] or a rolling update restarts the members one at a time.
    pub(super) fn start_again(&self, settled: &Settled, draft: &mut Draft) -> bool {
        let mut restarts = false;
        for (member, pod) in self.observed.pods.iter().filter(|(_, pod)| pod.stays()) {
            let noted = self.certificates.pods.get(member);
            let ended = noted.and_then(Noted::trusts_until);
            let renewed =
                self.certificates.outdated(member).is_some() && self.of_member(member).is_empty();
            if ended.is_none_or(|ended| ended > self.now) || !renewed {
                continue;
            }
            if !self.is_on_volume(member, pod) {
                let text = format!(
                    "the certificate authorities with which {member} was started have expired. {member} has no \
                     volume, so a restart would lose its data: restore the cluster from a backup. Only members with \
                     volumes (spec.pod.persistentVolumeClaimSpec) can restart with their data"
                );
                draft.problem(Reason::AuthorityExpired, text);
                continue;
            }
            if self.restarts_one_by_one(member, pod) {
                continue;
            }
            if settled.holds(pod) {
                wait_for_certificates(draft);
                continue;
            }
            draft.say(format!("restart {member} with new certificate authorities"));
            draft.add(actions::delete_pod(member, &pod.uid));
            restarts = true;
        }
        restarts
    }

    /// Invariant 18: true if another function restarts this member alone, because the member still accepts connections
    /// from its peers. A rolling update restarts a member that answers the operator. [`Self::rejoin`] restarts a member
    /// that rejects the operator.
    fn restarts_one_by_one(&self, member: &str, pod: &Pod) -> bool {
        let trusts_peers = || {
            let certificates = self.certificates;
            certificates.trusts_valid(member, CaScope::Peers, self.now)
        };
        let answers = || self.observed.answer(member).is_some();
        let rejoins = || self.is_ready() && self.cuts_off() && self.would_help(member, pod);
        !self.is_replaced() && (!self.rule.peers || trusts_peers()) && (answers() || rejoins())
    }

    /// True if a restore or a recovery is in progress, which starts all members with the current CAs.
    fn is_replaced(&self) -> bool {
        self.observed.claimed_by.is_some() || self.observed.recovery.in_progress().is_some()
    }

    /// True if a TLS switch is in progress. The rolling update of the switch restarts the members one at a time
    /// (invariants 18 and 23), so [`Self::rejoin`] restarts no member.
    fn is_switching(&self) -> bool {
        let rollout = self.observed.tls_rollout.as_ref();
        rollout.is_some_and(|rollout| rollout.under_way().is_some())
    }

    /// True if certificates prevent connections between members, or from the operator to a member.
    pub(in crate::plan) fn cuts_off(&self) -> bool {
        let cut_off = |member: &String| self.is_apart(member) || self.locks_out(member);
        !self.is_switching() && self.running().any(|(member, _)| cut_off(member))
    }

    /// Restarts the next member that lacks a CA. `restarts`: the plan already restarts another member.
    pub(super) fn rejoin(&self, settled: &Settled, restarts: bool, draft: &mut Draft) {
        if self.is_switching() {
            return;
        }
        self.without_volumes(draft);
        if self.is_replaced() {
            return;
        }
        let needed = settled.adds || self.cuts_off();
        if !needed || !self.is_ready() || settled.touches_pods || restarts {
            return;
        }
        let Some((member, pod)) = self.next_to_restart() else {
            return;
        };
        let others = self
            .observed
            .pods
            .iter()
            .filter(|(name, _)| *name != member);
        let mut returning = others.filter(|(name, pod)| self.is_returning(name, pod));
        if let Some((other, _)) = returning.next() {
            let text = format!(
                "when {other} is ready, the operator restarts {member} with the authorities of the other members"
            );
            draft.wait(Reason::AuthorityRotating, text, BLIND);
            return;
        }
        if settled.holds(pod) {
            wait_for_certificates(draft);
            return;
        }
        draft.say(format!(
            "restart {member} with the certificate authorities of the other members"
        ));
        draft.add(actions::delete_pod(member, &pod.uid));
    }

    /// True if the member's data outlives its pod. False if the PVC is being deleted or has lost its volume.
    fn is_on_volume(&self, member: &str, pod: &Pod) -> bool {
        let disk = self.observed.disks.get(member);
        pod.durable && disk.is_some_and(Disk::stays)
    }

    /// The member to restart next. Members with unready pods come first, because their restart interrupts no client.
    fn next_to_restart(&self) -> Option<(&String, &Pod)> {
        let pods = self.observed.pods.iter();
        let helps = pods.filter(|(member, pod)| self.would_help(member, pod));
        helps.min_by_key(|(member, pod)| (pod.ready, *member))
    }

    /// True if the member lacks a CA that it should trust, and a restart would lose no data.
    fn would_help(&self, member: &str, pod: &Pod) -> bool {
        let intent = self.observed.intent.as_ref();
        let ours = intent.is_some_and(|intent| pod.token.as_ref() == Some(&intent.token));
        ours && pod.stays()
            && self.is_on_volume(member, pod)
            && self.certificates.outdated(member).is_some()
    }

    /// True if the member is not ready, but is expected to become ready soon. False if other members reject the member,
    /// because a restart of those members must come first.
    fn is_returning(&self, member: &String, pod: &Pod) -> bool {
        if pod.terminating {
            return true;
        }
        let now = self.observed.clock.earlier(self.now);
        let since = pod.unready_since.unwrap_or(pod.created);
        let cut_off = pod.running && self.is_apart(member);
        !pod.ready && !pod.failed && !cut_off && age(since, now) < RESTART
    }

    /// True if certificates prevent a connection between this member and another running member, and at least one of
    /// the two members is not ready.
    fn is_apart(&self, member: &String) -> bool {
        let is_ready = |name: &String| self.observed.pods.get(name).is_some_and(|pod| pod.ready);
        let mut others = self.running().filter(|(other, _)| *other != member);
        others.any(|(other, _)| {
            let cut_off = !self.lets_in(member, other) || !self.lets_in(other, member);
            cut_off && !(is_ready(member) && is_ready(other))
        })
    }

    /// True if `member` accepts the peer certificate of `other`, or if the Secret with this certificate is lost.
    fn lets_in(&self, member: &str, other: &str) -> bool {
        // Invariant 1: if `started_with` is `None`, the CAs of `member` are unknown, so `member` may accept `other`.
        if !self.rule.peers || self.certificates.started_with(member).is_none() {
            return true;
        }
        self.leaf_of(other, CertificateUse::Peer)
            .is_none_or(|leaf| {
                self.certificates
                    .accepts(member, CaScope::Peers, &leaf.issuer)
            })
    }

    /// True if the member does not answer, and would reject the operator's certificate.
    fn locks_out(&self, member: &str) -> bool {
        let silent = self.observed.answer(member).is_none();
        let own = self.leaf_of(&self.rule.cluster, CertificateUse::Operator);
        let refused = |leaf: &Leaf| {
            !self
                .certificates
                .accepts(member, CaScope::Clients, &leaf.issuer)
        };
        let outdated = self.certificates.outdated(member).is_some();
        silent && outdated && self.rule.clients && own.is_some_and(refused)
    }

    fn leaf_of(&self, owner: &str, used: CertificateUse) -> Option<&Leaf> {
        self.certificates.leaf(owner, used)?.certificate.as_ref()
    }

    /// Reports members without volumes that need new CAs. Such a member must be replaced instead of restarted, but the
    /// running members would reject the replacement.
    fn without_volumes(&self, draft: &mut Draft) {
        if self.accepts_new_members() {
            return;
        }
        let running = self.running().filter(|(member, pod)| {
            let stays = self.is_on_volume(member, pod);
            let noted = self.certificates.pods.get(*member);
            let ends = noted.and_then(Noted::trusts_until);
            let valid = ends.is_none_or(|ends| ends > self.now);
            !stays && valid && self.certificates.outdated(member).is_some()
        });
        let names: Vec<&str> = running.map(|(member, _)| member.as_str()).collect();
        if names.is_empty() {
            return;
        }
        let text = format!(
            "the peer certificate authority in Secret {} is not trusted by {}. A restart would correct this, but these \
             members have no volumes and would lose their data: restore the Secret from a copy. Or, before the \
             certificates of these members expire, back up the cluster and restore the backup",
            CaScope::Peers.secret(&self.rule.cluster),
            names.join(", ")
        );
        draft.problem(Reason::AuthorityLost, text);
    }
}

impl Settled {
    /// True if the pod must not be restarted: its member serves clients, and could not start with the current
    /// certificates.
    fn holds(&self, pod: &Pod) -> bool {
        self.held && pod.ready && pod.stays()
    }
}

pub(in crate::plan) fn wait_for_certificates(draft: &mut Draft) {
    let text = "no member is started or restarted until the certificates are valid";
    draft.wait(Reason::TLSNotReady, text, STEADY);
}
