//! Restarts of members that cannot connect: their certificate authorities have expired, or they have none in common.
//!
//! An authority that is lost together with certificates it has signed leaves a member, or the operator, with nothing
//! that the others accept: etcd reads its trust bundle only when it starts. The others are then started again with all
//! authorities, one at a time, whether a quorum answers or not. Only a member on a volume that stays is restarted, so
//! nothing that was acknowledged is lost; requests wait for one restart.

use std::time::Duration;

use api::names::CertificateUse;

use super::Keeper;
use crate::authority::{Circle, Leaf};
use crate::certificates::Noted;
use crate::plan::age::age;
use crate::plan::{BLIND, Draft, recovery, tls};
use crate::reason::Reason;
use crate::snapshot::{Disk, Pod, Seen};
use crate::write::Write;

/// How long a member that is not ready is waited for: longer than a start takes.
const RESTART: Duration = Duration::from_mins(1);

impl Keeper<'_> {
    /// Restarts members whose authorities have all expired: no member reaches another one any more, so no quorum can be
    /// asked and none is lost. Those on volumes are restarted concurrently.
    pub(super) fn start_again(&self, draft: &mut Draft) {
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
                    "the certificate authorities {member} was started with have run out, and it has no volume that \
                     stays, so that it cannot be started again without losing its data: restore the cluster from a backup, or \
                     give members volumes (spec.pod.persistentVolumeClaimSpec)"
                );
                draft.problem(Reason::AuthorityExpired, text);
                continue;
            }
            draft.say(format!(
                "start {member} again with new certificate authorities"
            ));
            restart(member, pod, draft);
        }
    }

    /// Restarts the next member that stands in the way of a connection. `adds`: a member was to be added, and the others
    /// would not accept it.
    pub(super) fn rejoin(&self, adds: bool, draft: &mut Draft) {
        // While TLS is switched, members also talk on listeners that have nothing to do with these certificates, and the
        // rolling update of the switch restarts them one at a time (invariants 18 and 23).
        let rollout = self.observed.tls_rollout.as_ref();
        if rollout.is_some_and(|rollout| rollout.under_way().is_some()) {
            return;
        }
        let apart = self.running().any(|(member, _)| self.is_apart(member));
        let locked_out = self.running().any(|(member, _)| self.locks_out(member));
        if apart || locked_out {
            // An operator that is not let in does not decide that no member answers; and members that do not let each
            // other in have lost nothing.
            tls::drop_recovery(self.observed, draft);
        }
        self.without_volumes(draft);
        // A restore or a recovery starts the members itself.
        if self.observed.claimed_by.is_some() || recovery::in_progress(self.observed).is_some() {
            return;
        }
        let needed = apart || locked_out || adds;
        if !needed || !self.is_ready() || starts_pods(draft) {
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
                "{member} is started with the certificate authorities of the others when {other} is ready"
            );
            draft.wait(Reason::AuthorityRotating, text, BLIND);
            return;
        }
        draft.say(format!(
            "start {member} again with the certificate authorities of the others"
        ));
        restart(member, pod, draft);
    }

    /// The member's data outlives its pod. A PVC that is being deleted, or has lost its volume, keeps nothing.
    fn is_on_volume(&self, member: &str, pod: &Pod) -> bool {
        let disk = self.observed.disks.get(member);
        pod.durable && disk.is_some_and(Disk::stays)
    }

    /// First a member that serves nobody: its restart costs nothing.
    fn next_to_restart(&self) -> Option<(&String, &Pod)> {
        let pods = self.observed.pods.iter();
        let helps = pods.filter(|(member, pod)| self.would_help(member, pod));
        helps.min_by_key(|(member, pod)| (pod.ready, *member))
    }

    /// Whether it trusts less than it should, and can be started again without losing anything.
    fn would_help(&self, member: &str, pod: &Pod) -> bool {
        let intent = self.observed.intent.as_ref();
        let ours = intent.is_some_and(|intent| pod.token.as_ref() == Some(&intent.token));
        ours && pod.stays()
            && self.is_on_volume(member, pod)
            && self.certificates.outdated(member).is_some()
    }

    /// It is not ready and soon will be; members that are cut off from others wait for those.
    fn is_returning(&self, member: &String, pod: &Pod) -> bool {
        if pod.terminating {
            return true;
        }
        let now = self.observed.clock.earlier(self.now);
        let since = pod.unready_since.unwrap_or(pod.created);
        let cut_off = pod.running && self.is_apart(member);
        !pod.ready && !pod.failed && !cut_off && age(since, now) < RESTART
    }

    /// A member that runs, is not ready and is cut off from another one that runs.
    fn is_apart(&self, member: &String) -> bool {
        let is_ready = |name: &String| self.observed.pods.get(name).is_some_and(|pod| pod.ready);
        let mut others = self.running().filter(|(other, _)| *other != member);
        others.any(|(other, _)| {
            let cut_off = !self.lets_in(member, other) || !self.lets_in(other, member);
            cut_off && !(is_ready(member) && is_ready(other))
        })
    }

    /// Whether a member accepts the peer certificate of another one. One whose Secret is lost shows what its pod holds,
    /// by an authority it was started with.
    fn lets_in(&self, member: &str, other: &str) -> bool {
        // Invariant 1: what a member trusts is unknown if its pod does not say it.
        if !self.rule.peers || self.certificates.started_with(member).is_none() {
            return true;
        }
        self.leaf_of(other, CertificateUse::Peer)
            .is_none_or(|leaf| {
                self.certificates
                    .accepts(member, Circle::Peers, &leaf.issuer)
            })
    }

    /// Whether a member does not accept the operator's own certificate, and gives it no answer.
    fn locks_out(&self, member: &str) -> bool {
        let answer = self.observed.statuses.get(member);
        let silent = answer.and_then(Seen::known).is_none();
        let own = self.leaf_of(&self.rule.cluster, CertificateUse::Operator);
        let refused = |leaf: &Leaf| {
            !self
                .certificates
                .accepts(member, Circle::Clients, &leaf.issuer)
        };
        let outdated = self.certificates.outdated(member).is_some();
        silent && outdated && self.rule.clients && own.is_some_and(refused)
    }

    fn leaf_of(&self, owner: &str, used: CertificateUse) -> Option<&Leaf> {
        self.certificates.leaf(owner, used)?.certificate.as_ref()
    }

    /// Members without volumes are followed by new ones, which those that run would not let in.
    fn without_volumes(&self, draft: &mut Draft) {
        let running = self.running().map(|(member, _)| member);
        if self.certificates.accepts_new_members(running) {
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
            "the peer certificate authority in Secret {} is not the one that {} trust, and without volumes they cannot be \
             started with the new one without losing data: put the Secret back if you have a copy, or back up the \
             cluster and restore it, while the certificates that members have are valid",
            Circle::Peers.secret(&self.rule.cluster),
            names.join(", ")
        );
        draft.problem(Reason::AuthorityLost, text);
    }
}

fn restart(member: &str, pod: &Pod, draft: &mut Draft) {
    draft.write(Write::DeletePod {
        member: member.to_owned(),
        uid: pod.uid.clone(),
    });
}

/// A pod is about to be made or deleted: the next member waits for that one.
fn starts_pods(draft: &Draft) -> bool {
    let starts = |write: &Write| matches!(write, Write::DeletePod { .. } | Write::CreatePod(_));
    let chains = draft.chains.iter().flatten().any(starts);
    let change = draft.change.as_ref();
    chains || change.is_some_and(|change| change.chain.iter().any(starts))
}
