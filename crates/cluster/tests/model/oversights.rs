//! Deliberate mistakes about changes by users (pause, deletion, volumes), and about clusters that this operator did not
//! start.

use crate::writes::{Change, Write};
use cluster::plan::{Data, View};
use cluster::snapshot::{Desired, Observed, Pod, Seen};
use jiff::Timestamp;

use crate::mutation::Mutation;
use crate::world::World;
use crate::writes::Plan;

impl Mutation {
    /// Removes the information that this deliberate mistake withholds from the planner.
    pub(crate) fn overlooks(self, desired: &Desired, observed: &Observed) -> (Desired, Observed) {
        let (mut desired, mut observed) = (desired.clone(), observed.clone());
        match self {
            Self::IgnoresThePause => desired.paused = false,
            Self::ChangesWithoutBackup => desired.object.spec.backup = None,
            Self::ActsOnADeletedObject => observed.deleting = false,
            Self::IgnoresCertificates => observed.tls.faults.clear(),
            _ if Self::ABOUT_TLS.contains(&self) => self.overlooks_a_switch(&mut observed),
            Self::TakesEvidenceForLeftovers | Self::ForgetsTheMajority | Self::StartsEvidence => {
                self.mistakes_a_removal(&mut observed);
            }
            Self::ForgetsWhatServed | Self::GoesBackUnproven => {
                self.mistakes_a_served_version(&mut observed);
            }
            Self::OverlooksDowngrade => Self::overlooks_a_downgrade(&mut observed),
            _ => self.mistakes_a_volume(&mut observed),
        }
        (desired, observed)
    }

    /// Adds the writes of this deliberate mistake to the plan.
    pub(crate) fn mistakes_an_owner(
        self,
        world: &mut World,
        (desired, observed, now): (&Desired, &Observed, Timestamp),
        planned: &mut Plan,
    ) {
        let untold = observed.pods.values().all(|pod| pod.token.is_none());
        let unrecorded = observed.intent.is_none() && observed.cluster_id.is_none();
        let begins = match self {
            Self::BootstrapsBesideOldPods => unrecorded && untold && !observed.pods.is_empty(),
            Self::BootstrapsInsteadOfJoining => unrecorded && !observed.join.is_empty(),
            _ => false,
        };
        if begins {
            planned.step.chains = vec![vec![world.begin(desired, observed)]];
            return;
        }
        let (Seen::Known(list), false) = (&observed.members, desired.hibernate) else {
            return;
        };
        let view = View::new(list, (desired, observed, now));
        let wanted = desired.claim.as_ref();
        let class = wanted.and_then(|claim| claim.class.as_ref());
        let unfit = view.voters().filter(|member| {
            let disk = member.disk.filter(|disk| !disk.terminating);
            disk.is_some_and(|disk| disk.claim.class.as_ref() != class)
        });
        let theirs = view
            .voters()
            .find(|member| member.data == Data::Elsewhere && member.joined());
        let remove = |member: &cluster::plan::MemberState| Write::Remove {
            member: member.name.clone(),
            id: member.id(),
        };
        let old = |pod: &&Pod| pod.spec_hash.is_none() && pod.stays();
        let removals: Vec<Write> = match self {
            Self::DeletesUnfitVolumes => {
                let disks = unfit.filter_map(|member| Some((member.name.clone(), member.disk?)));
                let deletions = disks.map(|(member, disk)| Write::DeleteDisk {
                    member,
                    uid: disk.uid.clone(),
                });
                let chains = deletions.map(|write| vec![write]);
                planned.step.chains.extend(chains);
                return;
            }
            Self::ReplacesOldPodsAtOnce => {
                let members = view
                    .voters()
                    .filter_map(|member| Some((member, member.pod.filter(old)?)));
                let deletions = members.map(|(member, pod)| Write::DeletePod {
                    member: member.name.clone(),
                    uid: pod.uid.clone(),
                });
                let chains = deletions.map(|write| vec![write]);
                planned.step.chains.extend(chains);
                return;
            }
            Self::RemovesUnfitTogether => unfit.map(remove).collect(),
            Self::RemovesTheirsEarly if !observed.join.is_empty() => {
                theirs.map(remove).into_iter().collect()
            }
            _ => return,
        };
        if !removals.is_empty() {
            planned.step.change = Some(Change {
                chain: removals,
                via: view.via(None),
                planned_from: view.list.clone(),
            });
        }
    }
}
