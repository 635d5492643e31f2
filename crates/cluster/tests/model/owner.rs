//! Changes by users, except changes of the size and the version: a user pauses the operator, deletes the EtcdCluster,
//! changes the volumes, or breaks a Secret with certificates. This file also contains pods that reach the phase
//! `Failed`.

use crate::writes::Write;
use cluster::snapshot::{Claim, Observed, Seen};
use member::tls::{Fault, FaultKind, Purpose};

use crate::event::Event;
use crate::invariants::demand;
use crate::others::is_elsewhere;
use crate::run::said;
use crate::world::{Power, World, WorldDisk, tell};
use crate::write::Answer;
use crate::writes::Plan;

/// The StorageClass and the size that a PVC requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Volume {
    class: u8,
    size: u64,
}

impl Default for Volume {
    fn default() -> Self {
        Self { class: 0, size: 2 }
    }
}

impl Volume {
    pub(crate) fn claim(self) -> Claim {
        let bytes = self.size << 30;
        Claim {
            class: Some(format!("class-{}", self.class)),
            requested: Some(bytes),
            text: format!("{}Gi", self.size),
            capacity: Some(bytes),
            resizing: None,
        }
    }

    /// True if the volume cannot change to `wanted` in place: it would have to shrink or to change its StorageClass.
    pub(crate) fn is_unfit_for(self, wanted: Self) -> bool {
        self.class != wanted.class || self.size > wanted.size
    }
}

impl World {
    pub(crate) fn owner_does(&mut self, event: Event) {
        match event {
            Event::Pause => {
                self.wishes.paused = !self.wishes.paused;
                self.object_version += 1;
                tell!(self, "the operator is paused: {}", self.wishes.paused);
            }
            Event::Volumes(which) => {
                self.wishes.volume = Volume {
                    class: which / 3 % 2,
                    size: 1 + u64::from(which % 3),
                };
                self.object_version += 1;
                tell!(
                    self,
                    "the user wants other volumes: {:?}",
                    self.wishes.volume
                );
            }
            Event::SpoilSecret(which) => {
                self.faults.member_secret |= which % 3 != 1;
                self.faults.operator_secret |= which % 3 != 0;
                tell!(
                    self,
                    "certificates become invalid: of members {}, of the operator {}",
                    self.faults.member_secret,
                    self.faults.operator_secret
                );
            }
            Event::DeleteCluster => self.delete_cluster(),
            _ => {}
        }
    }

    /// Deletes the EtcdCluster. Does nothing if external members exist, because the remaining objects would look like
    /// those of a new cluster. Does nothing if a PVC of another cluster exists, or if the retained volumes would not
    /// identify the cluster.
    fn delete_cluster(&mut self) {
        let foreign = self.disks.values().any(|disk| disk.token == "another");
        if self.setup.retains && !self.can_be_recreated() {
            return;
        }
        // In a run with backups, the user deletes the EtcdCluster once, after the operator has set the finalizer.
        if self.setup.backs_up && (self.deleting || !self.guarded) {
            return;
        }
        if self.intent.is_none() || foreign || self.pods.keys().any(|name| is_elsewhere(name)) {
            return;
        }
        (self.deleting, self.deleted_at) = (true, self.now);
        self.object_version += 1;
        tell!(
            self,
            "a user deletes the EtcdCluster, and the garbage collector deletes its children"
        );
    }

    /// The garbage collector deletes the children of a deleted EtcdCluster one by one. Afterwards, a user creates a
    /// new EtcdCluster of the same name.
    pub(crate) fn collect_garbage(&mut self) {
        if !self.deleting || self.guarded || self.api_is_away() {
            return;
        }
        if let Some(pod) = self.pods.values_mut().find(|pod| pod.ends_in.is_none()) {
            pod.ends_in = Some(1);
            return;
        }
        if let Some(name) = self.services.keys().next().cloned() {
            self.services.remove(&name);
        }
        let (retains, backs_up) = (self.setup.retains, self.setup.backs_up);
        for disk in self.disks.values_mut() {
            let is_retained = retains || (backs_up && !self.adopted.contains(&disk.uid));
            disk.terminating |= !is_retained;
        }
        let pods = &self.pods;
        self.disks
            .retain(|name, disk| pods.contains_key(name) || !disk.terminating);
        let is_over = |disk: &WorldDisk| retains || (backs_up && !disk.terminating);
        let is_deleted = self.disks.values().all(is_over);
        if self.pods.is_empty() && is_deleted && self.services.is_empty() {
            self.be_born_again();
        }
    }

    fn be_born_again(&mut self) {
        let fresh = Self::new(&self.setup);
        self.deleting = false;
        self.lives += 1;
        (self.intent, self.cluster_id, self.others) = (None, None, None);
        (self.recovery, self.shared) = (fresh.recovery, fresh.shared);
        (self.client_token, self.wishes.record) = (None, None);
        self.reported_voters.clear();
        self.named_before.clear();
        // The late writes are dropped: an operator process executes no plan that is older than ten seconds, and the
        // garbage collector deletes the objects that such a plan creates for the deleted EtcdCluster.
        self.late.clear();
        if self.setup.backs_up {
            // The garbage collector keeps the PVCs of earlier clusters (no owner reference), so a user deletes them.
            self.disks.clear();
            self.adopted.clear();
            self.wishes.before_change = None;
        }
        if self.setup.retains {
            // The retained volumes keep the data, so the new cluster must contain every acknowledged write.
            self.forget(false);
        } else {
            self.memory.forget_all();
            self.want_first_version();
            self.begin_tls_anew();
        }
        self.object_version += 1;
        tell!(
            self,
            "the EtcdCluster is deleted, and a new one with the same name is created"
        );
    }

    /// A pod reaches the phase `Failed`, because Kubernetes evicts it or a kubelet rejects it. The pod object remains.
    pub(crate) fn end_for_good(&mut self, name: &str) {
        let now = self.now;
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        (pod.ended, pod.running) = (true, false);
        let shown = &mut pod.shown;
        (shown.ready, shown.running_since, shown.unready_since) = (false, None, now);
        tell!(self, "the pod of {name} has failed permanently");
    }

    /// Adds the problems of the certificates to the observation. Returns `true` if the operator cannot call any member.
    pub(crate) fn see_certificates(&self, observed: &mut Observed) -> bool {
        let fault = |purpose| Fault {
            purpose,
            code: FaultKind::CertificateExpired,
            message: "it has expired".to_owned(),
        };
        let faults = &self.faults;
        let member = faults.member_secret.then(|| fault(Purpose::Peer));
        let operator = faults.operator_secret.then(|| fault(Purpose::Operator));
        observed.tls.faults = member.into_iter().chain(operator).collect();
        if faults.operator_secret {
            observed.members = Seen::Unknown("the certificate has expired".to_owned());
        }
        faults.operator_secret
    }

    pub(crate) fn grow_disk(&mut self, member: &str, uid: &str, text: &str) -> Answer {
        let disk = self.disks.get_mut(member);
        let Some(disk) = disk.filter(|disk| disk.uid.to_string() == *uid) else {
            return Answer::Failed;
        };
        let size: u64 = text.trim_end_matches("Gi").parse().unwrap();
        if size < disk.volume.size {
            self.broke(format!("the volume of {member} would have to shrink"));
            return Answer::Failed;
        }
        disk.volume.size = size;
        Answer::Done(None)
    }

    /// True if the volume of the member cannot change to the desired volume in place.
    pub(crate) fn has_unfit_volume(&self, name: &str) -> bool {
        let disk = self.disks.get(name);
        disk.is_some_and(|disk| disk.volume.is_unfit_for(self.wishes.volume))
    }

    /// True if the volumes of all members have the desired StorageClass and size.
    pub(crate) fn has_wanted_volumes(&self) -> bool {
        let members = self
            .recorded()
            .into_iter()
            .flat_map(|all| all.members().values());
        let mut disks = members.filter_map(|member| self.disks.get(&member.name));
        disks.all(|disk| disk.volume == self.wishes.volume)
    }

    // ---- checks of forbidden writes ----

    /// Checks the writes to a cluster that is paused, is being deleted, or has invalid certificates: a paused or
    /// deleted cluster does not change, and invalid certificates cause no start, stop or removal of a member. If the
    /// world changed during the observation (not `atomic`), the check covers only members that the operator has seen
    /// serving, because the operator may count other members as lost for another reason.
    pub(crate) fn judge_owner(&mut self, observed: &Observed, plan: &Plan, atomic: bool) {
        // Invariant 41: the operator keeps the members running until the backup before the deletion is complete.
        let is_held = observed.deleting && self.setup.backs_up;
        let still = !is_held && (observed.deleting || self.wishes.paused);
        demand!(
            self,
            !still || plan.step.is_empty(),
            "a paused or deleted cluster is changed: {}",
            said(plan)
        );
        let faults = &observed.tls.faults;
        let known = observed.recovery.record.as_ref();
        let begin = |write: &Write| match write {
            Write::RecordRecovery(record) => record.begins(known),
            _ => false,
        };
        let begins = plan.step.chains.iter().flatten().any(begin);
        demand!(
            self,
            faults.is_empty() || !begins,
            "invariant 20: a recovery begins, although invalid certificates are the reason for the missing answers: {}",
            said(plan)
        );
        if observed
            .tls
            .in_the_way(observed.cluster_id.is_some())
            .next()
            .is_none()
        {
            return;
        }
        let writes = plan.step.chains.iter().flatten();
        let changes = plan.step.change.iter().flat_map(|change| &change.chain);
        let serves = |member: &String| {
            if is_elsewhere(member) {
                return !self.ours_are_enough();
            }
            let seen = observed.pods.get(member);
            let seen = seen.is_some_and(|pod| pod.ready && pod.stays());
            let pod = self.pods.get(member).filter(|_| atomic || seen);
            pod.is_some_and(|pod| {
                let there = pod.ends_in.is_none() && !pod.ended;
                pod.shown.ready && there && self.power(pod) == Power::On
            })
        };
        let hibernates = self.wishes.hibernate;
        let wrong = writes.chain(changes).find(|write| match write {
            Write::CreatePod(_) | Write::AddMember { .. } | Write::PatchImage { .. } => true,
            Write::DeletePod { member, .. } => serves(member) && !hibernates,
            Write::Remove { member, .. } => serves(member),
            _ => false,
        });
        let wrong = wrong.map(ToString::to_string);
        demand!(
            self,
            wrong.is_none(),
            "invariant 20: {wrong:?} while certificates are invalid"
        );
    }
}
