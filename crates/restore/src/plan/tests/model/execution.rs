//! Executes actions in the model, and checks that they are allowed.

use super::*;

impl World {
    /// Records that the operator writes to a cluster that a user has created. Invariant 9 forbids such writes.
    fn note_write_to_foreign_cluster(&mut self, action: &Action) {
        if !matches!(
            action,
            Action::Nothing
                | Action::RecordIntent { .. }
                | Action::RecordBackup(_)
                | Action::RecordRestored { .. }
                | Action::SetFinalizer(_)
                | Action::Abandon(_)
        ) && let Some(cluster) = &mut self.cluster
            && cluster.foreign
            && !matches!(action, Action::CreateCluster(_))
        {
            cluster.touched = true;
        }
    }

    pub(super) fn act(&mut self, action: &Action) {
        self.note_write_to_foreign_cluster(action);
        if let Action::SetFinalizer(set) = action {
            self.restore.metadata.finalizers = set.then(|| vec![FINALIZER_CLAIM.to_owned()]);
        }
        if matches!(action, Action::CreateCluster(_)) && self.cluster.is_none() {
            assert!(
                choice::recorded(&self.restore).is_some(),
                "the EtcdCluster is created before the backup is recorded (invariant 10)"
            );
            let stamp = self.stamp();
            self.cluster = Some(ModelCluster {
                lock: true,
                uid: stamp,
                version: stamp,
                ..ModelCluster::default()
            });
        }
        if let Some(mut cluster) = self.cluster.take() {
            self.with_seed(action, &mut cluster);
            self.with_lock(action, &mut cluster);
            self.cluster = Some(cluster);
        }
    }

    fn with_seed(&mut self, action: &Action, cluster: &mut ModelCluster) {
        let stamp = self.stamp();
        match action {
            Action::CreateService => {
                cluster.service.get_or_insert(stamp);
            }
            Action::CreatePvc => {
                cluster.volume.get_or_insert(stamp);
            }
            Action::CreatePod => {
                let mounted = cluster.volume.is_some() || !self.durable;
                assert!(
                    self.is_delayed || cluster.service.is_some() && mounted,
                    "the seed's pod is created before its Service or PVC"
                );
                let recorded = choice::recorded(&self.restore);
                let checks_sha256 = recorded.is_some_and(|it| it.sha256.is_some());
                let of = self.chosen(true);
                self.seeds_of.insert(of);
                cluster.pod.get_or_insert(ModelPod {
                    uid: stamp,
                    of,
                    checks_sha256,
                    // In a restore in place (`old` is not empty), the seed's pod is created without the labels of the
                    // cluster.
                    joined: cluster.old.is_empty(),
                    ..ModelPod::default()
                });
            }
            Action::ReplacePod(_) => {
                let replaced = cluster.pod.take().unwrap_or_default();
                let unfit = replaced.report_lost || Some(replaced.of) != self.recorded();
                assert!(
                    replaced.ended || unfit,
                    "a usable pod of the seed was replaced (invariant 9)"
                );
                assert!(
                    !replaced.joined || !cluster.has_cut_over(),
                    "a pod that clients could reach was replaced (invariant 9)"
                );
                cluster.disk &= self.durable;
            }
            Action::DiscardSeed => {
                assert!(
                    !cluster.has_cut_over(),
                    "the new cluster was deleted after the cutover"
                );
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

    fn with_lock(&mut self, action: &Action, cluster: &mut ModelCluster) {
        if matches!(
            action,
            Action::Lock | Action::RecordFormed { .. } | Action::ReleaseLock
        ) {
            cluster.version = self.stamp();
        }
        match action {
            Action::Lock => {
                assert!(
                    self.restore.metadata.finalizers.is_some(),
                    "the EtcdCluster is locked without a finalizer, so a deletion would leave the lock (invariant 10)"
                );
                assert!(
                    choice::recorded(&self.restore).is_some(),
                    "the EtcdCluster is locked before the backup is recorded (invariant 10)"
                );
                cluster.lock = true;
            }
            Action::Abandon(why) if why.reason == Reason::StorageMissing => {
                assert!(
                    !cluster.has_cut_over(),
                    "the restore is abandoned after the cutover because of missing storage (invariant 9)"
                );
            }
            Action::StopOldMembers(pods) => {
                assert!(
                    cluster.has_cut_over() && cluster.disk,
                    "the old members stop before the seed is verified (invariant 9)"
                );
                for (index, member) in cluster.old.iter_mut().enumerate() {
                    if pods.iter().any(|pod| pod.name == index.to_string())
                        && *member == OldMember::Running
                    {
                        *member = OldMember::Stopping;
                    }
                }
            }
            Action::RecordFormed { cluster_id } => {
                assert!(
                    cluster.disk,
                    "the cluster ID is recorded without verified data (invariant 9)"
                );
                cluster.cluster_id = Some(cluster_id.clone());
                cluster.bootstrap = true;
            }
            Action::ReleaseLock => {
                // Invariant 10: before the lock is removed, the status of the EtcdCluster contains the cluster ID and
                // the bootstrap record, which the cluster operator needs.
                assert!(
                    cluster.cluster_id.is_some() && cluster.bootstrap,
                    "the lock is released without a record of the new cluster"
                );
                let stopped = cluster.old.iter().all(|old| *old != OldMember::Running);
                assert!(
                    cluster.old.is_empty() || self.losses || stopped == cluster.has_cut_over(),
                    "the lock is released while no cluster runs, or while both clusters run"
                );
                assert!(
                    cluster.old.is_empty()
                        || !(self.durable && cluster.volume.is_some() && cluster.has_cut_over())
                        || cluster.disk
                        || in_place::is_aborted(&self.restore),
                    "the cluster is handed over with an empty volume"
                );
                cluster.lock = false;
            }
            _ => {}
        }
    }
}
