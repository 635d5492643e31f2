//! `spec.deletionPolicy: BackupThenDelete`: a user deletes the EtcdCluster, and the deletion waits for a backup
//! (invariant 41). After the deletion, a user creates the EtcdCluster again.

use api::EtcdCluster;
use api::cluster::{ClusterChange, ClusterDeletionPolicy};
use api::names::FINALIZER_BACKUP;
use cluster::snapshot::Removal;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::event::{Dice, Event, Setup, draw};
use crate::invariants::demand;
use crate::others::Begun;
use crate::read::seconds;
use crate::story::play_drawn;
use crate::world::World;
use crate::write::Answer;

impl World {
    /// True if the EtcdCluster is being deleted and needs no backup anymore.
    pub(crate) fn may_be_deleted(&self) -> bool {
        let record = self.wishes.before_change.as_ref();
        let pods = self.pods.values().map(|pod| pod.cluster_id);
        let mut marks = pods.chain(self.disks.values().map(|disk| disk.cluster_id));
        let is_marked = marks.any(|id| id.is_some());
        let is_backed_up = match self.cluster_id.map(|id| id.to_string()) {
            Some(id) => record.is_some_and(|record| {
                record.change == ClusterChange::Deletion
                    && record.cluster_id == id
                    && record.has_passed()
            }),
            None => self.intent.is_some() && !is_marked,
        };
        self.setup.backs_up && self.deleting && is_backed_up
    }

    /// The EtcdCluster with the spec in effect.
    pub(crate) fn object_in_effect(&self) -> EtcdCluster {
        let mut object = self.object.clone();
        if !self.setup.backs_up {
            return object;
        }
        let metadata = &mut object.metadata;
        metadata.deletion_timestamp = self.deleting.then(|| Time(seconds(self.deleted_at)));
        metadata.finalizers = self.guarded.then(|| vec![FINALIZER_BACKUP.to_owned()]);
        if self.may_be_deleted() {
            object.spec.deletion_policy = Some(ClusterDeletionPolicy::Delete);
        }
        object
    }

    pub(crate) fn set_finalizer(&mut self, set: bool, over: &str) -> Answer {
        // The API server accepts no new finalizer for an object that is being deleted.
        if over != self.object_version.to_string() || (set && self.deleting) {
            return Answer::Failed;
        }
        if !set && self.memory.fresh {
            self.judge_release();
        }
        self.object_version += 1;
        self.guarded = set;
        Answer::Done(None)
    }

    /// Invariant 41: the deletion continues only after the backup, or if no data is left. After the backup, the
    /// EtcdCluster must own its PVCs, so that no volume stays.
    fn judge_release(&mut self) {
        let mut pods = self.pods.values();
        let mut disks = self.disks.values();
        let is_left = pods.any(|pod| pod.ends_in.is_none() && !pod.ended)
            || disks.any(|disk| !disk.terminating && !disk.lost);
        let may_be_deleted = self.may_be_deleted();
        demand!(
            self,
            may_be_deleted || !is_left,
            "invariant 41: the deletion continues without a backup"
        );
        let token = self.intent.as_ref().map(|intent| &intent.token);
        let would_stay = self.disks.iter().find(|(name, disk)| {
            let pod = self.pods.get(*name).and_then(|pod| pod.cluster_id);
            let mut marks = [pod, disk.cluster_id].into_iter().flatten();
            let is_own = Some(&disk.token) == token && marks.all(|id| Some(id) == self.cluster_id);
            let is_evidence = matches!(disk.removal, Some(Removal::ByOthers { .. }));
            is_own && !is_evidence && !self.adopted.contains(&disk.uid)
        });
        let would_stay = would_stay.map(|(name, _)| name.clone());
        demand!(
            self,
            !may_be_deleted || would_stay.is_none(),
            "invariant 41: the volume of {would_stay:?} would stay after the deletion"
        );
    }
}

/// Generates a run from the seed: an ordinary run on volumes, in which the EtcdCluster is deleted several times.
fn drawn(seed: u64) -> (Setup, Vec<Event>) {
    let (setup, mut events) = draw(4 * seed + 1, false);
    let setup = Setup {
        durable: true,
        backs_up: true,
        version: "3.6.16",
        begun: Begun::Here,
        ..setup
    };
    let mut dice = Dice::new(seed ^ 0x0041);
    events.truncate(usize::from(dice.small(30)));
    let pass = |dice: &mut Dice, most: u8| {
        [Event::Round, Event::Tick].repeat(usize::from(dice.small(most)))
    };
    events.push(Event::Heal);
    events.extend(pass(&mut dice, 40));
    for _ in 0..=dice.small(3) {
        events.push(Event::DeleteCluster);
        for _ in 0..=dice.small(4) {
            events.push(match dice.below(5) {
                0 => Event::DeletePods,
                1 => Event::LoseReply {
                    after: dice.small(12),
                },
                2 => Event::Crash {
                    after: dice.small(12),
                },
                3 => Event::LosePod(dice.byte()),
                _ => Event::Round,
            });
            events.extend(pass(&mut dice, 6));
        }
        events.extend(pass(&mut dice, 30));
    }
    (setup, events)
}

const ROUNDS: usize = 20_000;

#[test]
fn invariant_41_deletion_waits_for_backup_despite_faults() {
    play_drawn(drawn, ROUNDS);
}
