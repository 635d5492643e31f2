//! Observes the model. The result has the types of a real observation, and the production code compares the pods with
//! the recorded backup.

use api::storage::StorageBlock;
use member::Origin;

use super::*;
use crate::observe::provenance::{self, FetchArguments};
use crate::snapshot::{OldMembers, Seed};

impl World {
    pub(super) fn observe(&self, blind: Option<u8>) -> Snapshot {
        let hidden = |what: u8| blind.is_some_and(|mask| mask & (1 << what) != 0);
        let mut snapshot = Snapshot {
            cluster: Cluster::Absent,
            source: match self.store_up {
                true if self.chosen(false).0 >= self.oldest => Source::Ready(Box::default()),
                true => Source::Unavailable(Trouble::new(Reason::BackupMissing, "missing")),
                false => Source::Unavailable(Trouble::new(Reason::StoreUnreachable, "down")),
            },
            found: Some(self.backup(self.newest)),
            ..Snapshot::not_read()
        };
        if let Some(cluster) = &self.cluster {
            snapshot.cluster = Cluster::Present(Box::new(ClusterFacts {
                uid: "cluster-uid".into(),
                paused: false,
                lock: cluster.lock.then(|| UID.to_owned()),
                cluster_id: cluster.cluster_id.clone(),
                available: cluster.available,
                durable: self.durable,
                ..ClusterFacts::default()
            }));
            snapshot.seed = self.seed(cluster, &hidden);
            snapshot.old_members = if hidden(4) {
                OldMembers::Unknown("timeout".into())
            } else {
                OldMembers::Known(old_members(&cluster.old))
            };
            snapshot.serving = match &cluster.pod {
                Some(pod) if pod.serving && !hidden(3) => Serving::Serves {
                    cluster_id: ID.into(),
                    revision: revision(cluster.disk_of) + cluster.acknowledged,
                },
                _ => Serving::Unknown("no answer".into()),
            };
        }
        if hidden(0) {
            snapshot.cluster = Cluster::Unknown("timeout".into());
        }
        snapshot
    }

    fn seed(&self, cluster: &ModelCluster, hidden: &dyn Fn(u8) -> bool) -> Seed {
        let child = |exists: bool, what: u8| match (hidden(what), exists) {
            (true, _) => Child::Unknown("timeout".into()),
            (false, true) => Child::Present,
            (false, false) => Child::Absent,
        };
        let pod = match &cluster.pod {
            _ if hidden(2) => Pod::Unknown("timeout".into()),
            None => Pod::Absent,
            Some(pod) => Pod::Present(
                self.compared(
                    cluster,
                    pod,
                    PodFacts {
                        life: match (pod.ended, hidden(5)) {
                            (false, _) => Life::Active,
                            (true, true) => Life::EndedRecently,
                            (true, false) => Life::Ended,
                        },
                        trouble: self
                            .no_storage(cluster, hidden(6))
                            .or_else(|| self.fetch_trouble(pod)),
                        recent: hidden(5),
                        report_lost: pod.fetched
                            && pod.report_lost
                            && self.mistake != Some(Mistake::ExpectsReport),
                        restored: (pod.fetched && !pod.report_lost)
                            .then_some(revision(data_of(cluster, pod))),
                        verified: pod.serving && !pod.report_lost,
                        joined: pod.joined,
                        ..PodFacts::default()
                    },
                ),
            ),
        };
        Seed {
            service: child(cluster.service.is_some(), 1),
            pvc: child(cluster.volume.is_some(), 1),
            pod,
        }
    }

    fn fetch_trouble(&self, pod: &ModelPod) -> Option<Trouble> {
        if pod.fetched {
            return None;
        }
        if pod.of.0 < self.oldest {
            return Some(Trouble::new(Reason::BackupMissing, "missing"));
        }
        let bad = Trouble::new(Reason::SnapshotUnreadable, "sha256 differs");
        (!self.good_backup).then_some(bad)
    }

    /// The recorded backup, if any.
    pub(super) fn recorded(&self) -> Option<Data> {
        let chosen = choice::recorded(&self.restore)?;
        let number = chosen.source.source().path().parse().ok()?;
        Some((number, chosen.bump_revision))
    }

    /// Compares the arguments and the report of the pod with the recorded backup.
    fn compared(&self, cluster: &ModelCluster, pod: &ModelPod, mut facts: PodFacts) -> PodFacts {
        let Some(chosen) = choice::recorded(&self.restore) else {
            return facts;
        };
        let required = pod.checks_sha256.then(|| sha256(pod.of.0));
        let arguments = FetchArguments {
            source: block(pod.of.0),
            text: "",
            sha256: required.as_deref(),
            encryption_secret: None,
            bump_revision: pod.of.1,
            replay_revision: None,
        };
        if pod.fetched && !pod.report_lost {
            let (number, bump) = data_of(cluster, pod);
            facts.sha256 = Some(sha256(number));
            facts.origin = (self.mistake != Some(Mistake::OmitsOrigin)).then(|| Origin {
                location_hash: choice::fingerprint(&block(number)),
                bump_revision: u64::try_from(bump).unwrap(),
                encrypted: Some(false),
                replayed_revision: None,
            });
        }
        provenance::compare_arguments(chosen, &arguments, &mut facts);
        if self.mistake == Some(Mistake::NeverCompares) {
            facts.other_backup = None;
        }
        facts
    }

    fn backup(&self, number: u32) -> ChosenBackup {
        ChosenBackup {
            sha256: self.manifests.then(|| sha256(number)),
            ..choice::chosen_from(&self.restore, block(number))
        }
    }

    /// The backup and the `bumpRevision` for an observation: those of the record, or else the newest backup and the
    /// value in the spec.
    pub(super) fn chosen(&self, locked: bool) -> Data {
        let ignores_record = self.mistake == Some(Mistake::ChoosesAgain);
        let record = choice::valid_record(&self.restore, locked).filter(|_| !ignores_record);
        let spec = self.restore.spec.bump_revision.unwrap_or_default();
        let bump = match record {
            Some(_) if self.mistake != Some(Mistake::UsesBumpOfSpec) => {
                choice::bump_revision(&self.restore).map_or(0, |by| i64::try_from(by).unwrap())
            }
            _ => spec,
        };
        let number = record.and_then(|chosen| chosen.source.source().path().parse().ok());
        (number.unwrap_or(self.newest), bump)
    }
}

/// The revision after the restore of a backup. Each newer backup contains one more write.
pub(super) fn revision((backup, bump): Data) -> i64 {
    BACKUP + i64::from(backup) + bump
}

/// The backup whose data the seed contains.
pub(super) fn data_of(cluster: &ModelCluster, pod: &ModelPod) -> Data {
    if cluster.disk {
        cluster.disk_of
    } else {
        pod.of
    }
}

fn block(number: u32) -> StorageBlock {
    let block = format!(r#"{{"s3":{{"path":"{number}"}}}}"#);
    serde_json::from_str(&block).unwrap()
}

fn sha256(number: u32) -> String {
    format!("{number:02x}")
}

fn old_members(old: &[OldMember]) -> Vec<OldPod> {
    let existing = old.iter().enumerate();
    let existing = existing.filter(|(_, member)| **member != OldMember::Deleted);
    let pods = existing.map(|(index, member)| OldPod {
        name: index.to_string(),
        uid: index.to_string(),
        terminating: *member == OldMember::Stopping,
        ready: true,
    });
    pods.collect()
}
