//! A delayed operator process: it was suspended after an observation, and another process has been the leader since.
//! The model decides whether the API server, or a check of the process itself, accepts its action.

use super::*;

impl World {
    pub(super) fn read_delayed(&mut self) {
        self.late = None;
        self.late = Some(Box::new(self.clone()));
    }

    /// The action of a process that has read the EtcdRestore earlier, and the other objects now or also earlier
    /// (`all`). Its writes to the EtcdRestore are rejected, because the resourceVersion has changed.
    pub(super) fn act_delayed(&mut self, all: bool) {
        let Some(mut read) = self.late.clone() else {
            return;
        };
        if !all {
            let restore = read.restore.clone();
            *read = Self {
                restore,
                late: None,
                ..self.clone()
            };
        }
        self.two = true;
        let action = plan(&read.restore, &read.observe(None)).action;
        if !self.lets(&action, &read) {
            return;
        }
        self.is_late = true;
        let record = std::mem::replace(&mut self.restore, read.restore.clone());
        match (&action, &mut self.cluster, &read.cluster) {
            (Action::DiscardSeed, Some(cluster), Some(seen)) => discard(cluster, seen),
            _ => self.act(&action),
        }
        self.restore = record;
        self.is_late = false;
        let held = !self.gone && self.restore.metadata.finalizers.is_some();
        match (&action, &mut self.cluster) {
            // Without a finalizer the process removes the lock at once.
            (Action::Claim, Some(cluster)) if !held => cluster.claim = false,
            // Garbage collection deletes a cluster without an owner.
            (Action::CreateCluster(_), cluster) if self.gone => *cluster = None,
            _ => {}
        }
    }

    /// Whether an action that was planned from `read` is accepted.
    fn lets(&self, action: &Action, read: &Self) -> bool {
        if let Action::CreateCluster(_) = action {
            return self.cluster.is_none();
        }
        let (Some(now), Some(then)) = (&self.cluster, &read.cluster) else {
            return false;
        };
        // The process reads these objects again before it deletes anything.
        let recorded = choice::recorded(&read.restore) == choice::recorded(&self.restore);
        let is_where_it_was = now.uid == then.uid && now.claim && now.cluster_id == then.cluster_id;
        let anyway = self.mistake == Some(Mistake::TurnsLate);
        let seed_stays = now.pod == then.pod || anyway;
        match action {
            // The owner reference names this EtcdCluster.
            Action::CreateService | Action::CreateClaim => now.uid == then.uid,
            Action::StopFormer(_) => now.uid == then.uid && seed_stays,
            Action::CreatePod => {
                let anyway = self.mistake == Some(Mistake::CreatesLate);
                now.uid == then.uid && (anyway || is_where_it_was && self.is_wanted(now, then))
            }
            Action::Claim | Action::ReleaseClaim => now.version == then.version,
            Action::RecordFormed { .. } => now.version == then.version && seed_stays,
            Action::Join => now.pod == then.pod,
            Action::ClearPod(_) => !self.gone && recorded && now.pod == then.pod,
            Action::DiscardSeed => {
                let gives_up = in_place::gives_up(&read.restore);
                let goes_on = !self.gone && recorded && now.pod == then.pod;
                is_where_it_was && (gives_up || goes_on)
            }
            _ => false,
        }
    }

    /// Whether a pod without a volume is still needed, because old members run.
    fn is_wanted(&self, now: &ModelCluster, then: &ModelCluster) -> bool {
        let stopped = now.old.iter().all(|old| *old == OldMember::Gone);
        self.durable || !then.has_turned() || !stopped
    }
}

/// The UID of the seed's pod.
fn uid(cluster: &ModelCluster) -> Option<u32> {
    cluster.pod.as_ref().map(|pod| pod.uid)
}

/// Deletes the observed objects of the seed.
fn discard(cluster: &mut ModelCluster, seen: &ModelCluster) {
    if uid(cluster) == uid(seen) {
        cluster.pod = None;
    }
    if cluster.volume == seen.volume {
        cluster.volume = None;
        cluster.disk &= cluster.pod.is_some();
    }
    if cluster.service == seen.service {
        cluster.service = None;
    }
}
