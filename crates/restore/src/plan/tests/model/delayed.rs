//! A second operator process, which was suspended after an observation and then executes an action. The model decides
//! whether the API server and the checks of the process accept the action.

use super::*;

impl World {
    pub(super) fn read_delayed(&mut self) {
        self.delayed = None;
        self.delayed = Some(Box::new(self.clone()));
    }

    /// Plans and executes an action of the second process with the EtcdRestore that it observed. If `all` is true, it
    /// also uses its old observation of all other objects. The API server rejects writes to the EtcdRestore, because
    /// its resourceVersion has changed.
    pub(super) fn act_delayed(&mut self, all: bool) {
        let Some(mut read) = self.delayed.clone() else {
            return;
        };
        if !all {
            let restore = read.restore.clone();
            *read = Self {
                restore,
                delayed: None,
                ..self.clone()
            };
        }
        self.two = true;
        let action = plan(&read.restore, &read.observe(None)).action;
        if !self.accepts(&action, &read) {
            return;
        }
        self.is_delayed = true;
        let record = std::mem::replace(&mut self.restore, read.restore.clone());
        match (&action, &mut self.cluster, &read.cluster) {
            (Action::DiscardSeed, Some(cluster), Some(read)) => discard(cluster, read),
            _ => self.act(&action),
        }
        self.restore = record;
        self.is_delayed = false;
        let has_finalizer = !self.deleted && self.restore.metadata.finalizers.is_some();
        match (&action, &mut self.cluster) {
            // If the EtcdRestore has no finalizer, the delayed process sets the lock and removes it at once.
            (Action::Lock, Some(cluster)) if !has_finalizer => cluster.lock = false,
            // Kubernetes deletes an EtcdCluster whose owner, the EtcdRestore, does not exist.
            (Action::CreateCluster(_), cluster) if self.deleted => *cluster = None,
            _ => {}
        }
    }

    /// Returns whether the API server and the checks of the process accept an action that was planned from `read`.
    fn accepts(&self, action: &Action, read: &Self) -> bool {
        if let Action::CreateCluster(_) = action {
            return self.cluster.is_none();
        }
        let (Some(now), Some(then)) = (&self.cluster, &read.cluster) else {
            return false;
        };
        // Before some actions, the process reads the EtcdRestore and the EtcdCluster again. `recorded` is true if the
        // recorded backup is unchanged. `is_where_it_was` is true if the EtcdCluster, its lock and its cluster ID are
        // unchanged.
        let recorded = choice::recorded(&read.restore) == choice::recorded(&self.restore);
        let is_where_it_was = now.uid == then.uid && now.lock && now.cluster_id == then.cluster_id;
        let anyway = self.mistake == Some(Mistake::CutsOverDelayed);
        let seed_stays = now.pod == then.pod || anyway;
        match action {
            // The Service and the PVC name the UID of the EtcdCluster in an owner reference. If this EtcdCluster no
            // longer exists, Kubernetes deletes the two objects, so the model rejects the action.
            Action::CreateService | Action::CreatePvc => now.uid == then.uid,
            Action::StopOldMembers(_) => now.uid == then.uid && seed_stays,
            Action::CreatePod => {
                let anyway = self.mistake == Some(Mistake::CreatesDelayed);
                now.uid == then.uid && (anyway || is_where_it_was && self.needs_seed(now, then))
            }
            Action::Lock | Action::ReleaseLock => now.version == then.version,
            Action::RecordFormed { .. } => now.version == then.version && seed_stays,
            Action::Join => now.pod == then.pod,
            Action::ReplacePod(_) => !self.deleted && recorded && now.pod == then.pod,
            Action::DiscardSeed => {
                let gives_up = in_place::is_aborted(&read.restore);
                let goes_on = !self.deleted && recorded && now.pod == then.pod;
                is_where_it_was && (gives_up || goes_on)
            }
            _ => false,
        }
    }

    /// True if the cluster still needs a pod of the seed. After the cutover, a pod without a volume is needed only
    /// until all old members are deleted.
    fn needs_seed(&self, now: &ModelCluster, then: &ModelCluster) -> bool {
        let stopped = now.old.iter().all(|old| *old == OldMember::Deleted);
        self.durable || !then.has_cut_over() || !stopped
    }
}

fn uid(cluster: &ModelCluster) -> Option<u32> {
    cluster.pod.as_ref().map(|pod| pod.uid)
}

/// Deletes the seed's pod, PVC and Service. An object whose UID has changed since the observation `read` is kept.
fn discard(cluster: &mut ModelCluster, read: &ModelCluster) {
    if uid(cluster) == uid(read) {
        cluster.pod = None;
    }
    if cluster.volume == read.volume {
        cluster.volume = None;
        cluster.disk &= cluster.pod.is_some();
    }
    if cluster.service == read.service {
        cluster.service = None;
    }
}
