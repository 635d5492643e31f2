//! Executes actions in the model, and checks that they are allowed.

use super::*;

impl World {
    /// Invariant 9: a foreign cluster is never changed.
    fn note_write_to_foreign_cluster(&mut self, action: &Action) {
        if !matches!(
            action,
            Action::Nothing
                | Action::RecordIntent { .. }
                | Action::RecordBackup(_)
                | Action::RecordRestored { .. }
                | Action::Guard(_)
                | Action::Abandon(_)
        ) && let Some(cluster) = &mut self.cluster
            && cluster.stranger
            && !matches!(action, Action::CreateCluster(_))
        {
            cluster.touched = true;
        }
    }

    pub(super) fn act(&mut self, action: &Action) {
        self.note_write_to_foreign_cluster(action);
        if let Action::Guard(set) = action {
            self.restore.metadata.finalizers = set.then(|| vec![FINALIZER_CLAIM.to_owned()]);
        }
        if matches!(action, Action::CreateCluster(_)) && self.cluster.is_none() {
            assert!(
                choice::recorded(&self.restore).is_some(),
                "made of a backup that is not recorded (invariant 10)"
            );
            let stamp = self.stamp();
            self.cluster = Some(ModelCluster {
                claim: true,
                uid: stamp,
                version: stamp,
                ..ModelCluster::default()
            });
        }
        if let Some(mut cluster) = self.cluster.take() {
            self.with_seed(action, &mut cluster);
            self.with_claim(action, &mut cluster);
            self.cluster = Some(cluster);
        }
    }

    fn with_seed(&mut self, action: &Action, cluster: &mut ModelCluster) {
        let stamp = self.stamp();
        match action {
            Action::CreateService => {
                cluster.service.get_or_insert(stamp);
            }
            Action::CreateClaim => {
                cluster.volume.get_or_insert(stamp);
            }
            Action::CreatePod => {
                let mounted = cluster.volume.is_some() || !self.durable;
                assert!(
                    self.is_late || cluster.service.is_some() && mounted,
                    "a pod before what it needs"
                );
                let vouched = choice::recorded(&self.restore).is_some_and(|it| it.sha256.is_some());
                let of = self.chosen(true);
                self.seeds_of.insert(of);
                cluster.pod.get_or_insert(ModelPod {
                    uid: stamp,
                    of,
                    vouched,
                    // Next to old members the pod has no labels of the cluster.
                    joined: cluster.old.is_empty(),
                    ..ModelPod::default()
                });
            }
            Action::ClearPod(_) => {
                let cleared = cluster.pod.take().unwrap_or_default();
                let unfit = cleared.silent || Some(cleared.of) != self.recorded();
                assert!(
                    cleared.ended || unfit,
                    "a seed that lives was cleared away (invariant 9)"
                );
                assert!(
                    !cleared.joined || !cluster.has_turned(),
                    "a seed that clients could find was cleared away (invariant 9)"
                );
                cluster.disk &= self.durable;
            }
            Action::DiscardSeed => {
                assert!(!cluster.has_turned(), "the new cluster was discarded");
                (cluster.pod, cluster.service, cluster.volume, cluster.disk) =
                    (None, None, None, false);
            }
            Action::Join => {
                if let Some(pod) = &mut cluster.pod {
                    pod.joined = true;
                }
            }
            _ => {}
        }
    }

    fn with_claim(&mut self, action: &Action, cluster: &mut ModelCluster) {
        if matches!(
            action,
            Action::Claim | Action::RecordFormed { .. } | Action::ReleaseClaim
        ) {
            cluster.version = self.stamp();
        }
        match action {
            Action::Claim => {
                assert!(
                    self.restore.metadata.finalizers.is_some(),
                    "claimed, and a deletion would leave the claim (invariant 10)"
                );
                assert!(
                    choice::recorded(&self.restore).is_some(),
                    "claimed for a backup that is not recorded (invariant 10)"
                );
                cluster.claim = true;
            }
            Action::Abandon(why) if why.reason == Reason::StorageMissing => {
                assert!(
                    !cluster.has_turned(),
                    "given up after the turn, for want of storage (invariant 9)"
                );
            }
            Action::StopFormer(pods) => {
                assert!(
                    cluster.has_turned() && cluster.disk,
                    "stopped before the replacement is verified (invariant 9)"
                );
                for (index, member) in cluster.old.iter_mut().enumerate() {
                    if pods.iter().any(|pod| pod.name == index.to_string())
                        && *member == OldMember::Runs
                    {
                        *member = OldMember::Stops;
                    }
                }
            }
            Action::RecordFormed { cluster_id } => {
                assert!(cluster.disk, "recorded without verified data (invariant 9)");
                cluster.cluster_id = Some(cluster_id.clone());
                cluster.bootstrap = true;
            }
            Action::ReleaseClaim => {
                // Invariant 10: the status contains everything that the cluster operator needs before the lock is
                // released.
                assert!(
                    cluster.cluster_id.is_some() && cluster.bootstrap,
                    "released without a record"
                );
                let stopped = cluster.old.iter().all(|old| *old != OldMember::Runs);
                assert!(
                    cluster.old.is_empty() || self.losses || stopped == cluster.has_turned(),
                    "released between two clusters"
                );
                assert!(
                    cluster.old.is_empty()
                        || !(self.durable && cluster.volume.is_some() && cluster.has_turned())
                        || cluster.disk
                        || in_place::gives_up(&self.restore),
                    "handed over with a volume that nothing is on"
                );
                cluster.claim = false;
            }
            _ => {}
        }
    }
}
