//! An operator that is late: it stood still after it had looked, and another one has led since. What the API server, or the
//! operator itself once it has looked again, makes of its step.

use super::*;

impl World {
    pub(super) fn read_late(&mut self) {
        self.late = None;
        self.late = Some(Box::new(self.clone()));
    }

    /// The step of an operator that has read the EtcdRestore some time ago, and the rest of the world now, or all of it then.
    /// What it writes into the EtcdRestore is refused, for that is another version by now.
    pub(super) fn act_late(&mut self, all: bool) {
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
            // It is taken back at once where nobody else would.
            (Action::Claim, Some(cluster)) if !held => cluster.claim = false,
            // What belongs to nobody is collected.
            (Action::CreateCluster(_), cluster) if self.gone => *cluster = None,
            _ => {}
        }
    }

    /// Whether anything becomes of a step that was planned by what was `read`.
    fn lets(&self, action: &Action, read: &Self) -> bool {
        if let Action::CreateCluster(_) = action {
            return self.cluster.is_none();
        }
        let (Some(now), Some(then)) = (&self.cluster, &read.cluster) else {
            return false;
        };
        // It is looked at once more before anything goes because of it.
        let recorded = choice::recorded(&read.restore) == choice::recorded(&self.restore);
        let is_where_it_was = now.uid == then.uid && now.claim && now.cluster_id == then.cluster_id;
        let anyway = self.mistake == Some(Mistake::TurnsLate);
        let seed_stays = now.pod == then.pod || anyway;
        match action {
            // What it was created for was this EtcdCluster.
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

    /// A pod that is made without a volume, beside members that run.
    fn is_wanted(&self, now: &ModelCluster, then: &ModelCluster) -> bool {
        let stopped = now.old.iter().all(|old| *old == OldMember::Gone);
        self.durable || !then.has_turned() || !stopped
    }
}

/// That of the seed's pod.
fn uid(cluster: &ModelCluster) -> Option<u32> {
    cluster.pod.as_ref().map(|pod| pod.uid)
}

/// By what was seen of it.
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
