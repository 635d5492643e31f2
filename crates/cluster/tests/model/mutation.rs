//! Deliberate mistakes. The model must detect each of them. A mistake changes the planner's input, the plan, a request
//! or a precondition, but not the code of the planner.

use crate::writes::{Change, Write};
use cluster::plan::State;
use cluster::plan::{Data, Fate, VersionRules, View, plan};
use cluster::snapshot::{Cause, Desired, Ending, Observed, Seen};
use etcd::Members;
use jiff::Timestamp;

use crate::sent;
use crate::world::World;
use crate::writes::Plan;

#[path = "mutation/plans.rs"]
mod plans;

use plans::{
    delete_blindly, delete_disk_first, first_pod, is_out, planned_removal, promote_all,
    restart_first,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// A member is added before the dead member is removed.
    AddsBeforeRemoving,
    /// Dead members are removed without the quorum guard.
    RemovesWithoutQuorum,
    /// A missing answer counts as an empty member list.
    TakesUnknownForEmpty,
    /// Pods and PVCs are deleted while the member list is unknown.
    DeletesBlindly,
    /// A learner is promoted as soon as the list contains it.
    PromotesTooEarly,
    /// Members join as voters.
    AddsVoters,
    /// A second learner is promoted together with the first.
    ChangesTwoVotersAtOnce,
    /// A cluster without its status is bootstrapped again.
    BootstrapsWithoutStatus,
    /// A cluster without pods and disks is bootstrapped again.
    BootstrapsWithoutPods,
    /// A member without a pod is replaced although its disk exists.
    ReplacesMembersWithDisks,
    /// A member that has run before is started as a new member on an empty disk.
    StartsNewTwice,
    /// A bootstrap member that lost its disk is started again.
    RestartsEmptyFirstMembers,
    /// A leader is removed before it transfers the leadership.
    RemovesTheLeader,
    /// The bootstrap is recorded after the first pods are created.
    RecordsLate,
    /// A member is added before a Service with its name exists.
    AddsUnreserved,
    /// The pod is created before its Service gets the annotation `started`.
    MarksLate,
    /// A start does not renew an annotation `started` that another process set. A test in `model.rs` detects this.
    TrustsMarksOfOthers,
    /// The annotation `started` is removed although the pod may have been created.
    TakesMarksBackBlindly,
    /// A membership change is sent even if the member list has changed since the plan.
    ActsOnAChangedList,
    /// The local list of any member, which may be stale, counts as the list of the cluster.
    ReadsALocalList,
    /// Objects of another cluster are deleted.
    DeletesForeignObjects,
    /// The client Service gets endpoints before the cluster ID is recorded.
    LetsClientsInEarly,
    /// The status is written without a precondition.
    RecordsOverAnyVersion,
    /// A disk is deleted before its member is removed from etcd.
    DeletesDisksFirst,
    /// A removed member's name is used again.
    ReusesNames,
    /// Every plan generates the same names as the previous plan.
    DrawsTheSameNames,
    /// The data of a member that does not answer counts as damaged.
    TakesSilenceForDamage,
    /// A recovery starts without an approval.
    RecoversUnasked,
    /// A recovery continues from the survivor with the oldest data.
    RecoversFromTheLast,
    /// All pods with outdated settings are recreated at once.
    RollsAllAtOnce,
    /// A leader's pod is recreated before the leader transfers the leadership.
    RollsTheLeaderFirst,
    /// A pod with outdated settings is recreated while another member is down.
    RollsWhileAnotherIsDown,
    /// Members without a disk are stopped for hibernation.
    HibernatesWithoutDisks,
    /// The NOSPACE alarm is disarmed while the database is full.
    DisarmsFullDatabases,
    /// The CORRUPT alarm is disarmed before the corrupt member is removed from the cluster.
    DisarmsMembers,
    /// A member is defragmented while another member is down.
    DefragmentsWhileAnotherIsDown,
    /// The leader is defragmented before it transfers the leadership.
    DefragmentsTheLeader,
    /// The images of all members are changed at once.
    ChangesAllImages,
    /// The leader's image is changed before the leader transfers the leadership.
    ChangesTheLeadersImage,
    /// A pod is started with a version that the operator must refuse.
    SkipsAMinor,
    /// A pod on an existing disk starts with the version of the bootstrap instead of the recorded version.
    ForgetsTheNotedVersion,
    /// Members change their version without a backup, although the spec requires a backup.
    ChangesWithoutBackup,
    /// A member that was drained from the client Service does not become an endpoint again.
    LeavesMembersOut,
    /// All members are drained from the client Service at the same time.
    TakesAllOut,
    /// The operator changes a paused cluster.
    IgnoresThePause,
    /// The operator changes a cluster whose EtcdCluster is being deleted.
    ActsOnADeletedObject,
    /// Members are started and stopped although their certificates have problems.
    IgnoresCertificates,
    /// Volumes of another StorageClass are deleted, to be recreated.
    DeletesUnfitVolumes,
    /// All members on volumes of another StorageClass are removed at once.
    RemovesUnfitTogether,
    /// The operator bootstraps a cluster although pods of coreos/etcd-operator exist.
    BootstrapsBesideOldPods,
    /// All pods of coreos/etcd-operator are deleted at once, to be recreated.
    ReplacesOldPodsAtOnce,
    /// The operator bootstraps a new cluster instead of joining the existing cluster.
    BootstrapsInsteadOfJoining,
    /// External members are removed before enough members of the EtcdCluster are voters.
    RemovesTheirsEarly,
    /// A PVC counts as a usable volume although its volume is lost. A test in the module `volumes` must detect this
    /// mistake and `ForgetsGivenUpSeeds`.
    TakesLostVolumesForThere,
    /// The seed of an abandoned recovery continues to run while another seed exists.
    ForgetsGivenUpSeeds,
    /// Volumes of members that other software removed are deleted at once. A test in the module `removed` must detect
    /// this mistake, `ForgetsTheMajority` and `StartsEvidence`.
    TakesEvidenceForLeftovers,
    /// The operator ignores the record that other software removed a majority of the voters.
    ForgetsTheMajority,
    /// Members that other software removed are started again while no quorum answers.
    StartsEvidence,
    /// A learner that does not serve yet is promoted only because its container has started. A test in the module
    /// `joining` must detect this mistake and the following mistakes about members that do not serve yet.
    PromotesByThePast,
    /// A learner that does not serve yet is promoted although it has not caught up.
    PromotesBehind,
    /// A learner that has lost its leader is promoted because it had a leader before.
    PromotesTheCutOff,
    /// Any answer at the health address of a learner counts as an answer of that learner.
    TakesAnothersPulse,
    /// Membership changes are requested from a voter that does not serve yet.
    AsksJoining,
    /// Leadership moves to a voter that does not serve yet.
    LeadsByJoining,
    /// A voter that does not serve yet counts as healthy when a dead member is removed.
    RemovesByJoining,
    /// A new voter becomes an endpoint of the client Service as soon as it is promoted.
    LetsJoiningIn,
    /// Members start with TLS only, although they must accept TLS and plain text. A test in the module `missteps` must
    /// detect this mistake and the following mistakes about TLS.
    SkipsAStage,
    /// A reverted TLS change skips a stage.
    TurnsBackByAJump,
    /// The next TLS stage and its peer URLs are recorded before all members run with the current stage.
    SwitchesWithSomeBehind,
    /// The next TLS stage is recorded while a member is down.
    SwitchesWhileOneIsDown,
    /// The next TLS stage is recorded while members have peer URLs on which they will not listen.
    LeavesPeerUrls,
    /// All members are restarted at once for a TLS change.
    RestartsForTlsTogether,
    /// Clients change between plain text and TLS without a period in which the members accept both.
    LeadsClientsByALeap,
    /// Peer URLs use the second port before the members' Services have it.
    RedirectsBeforeThePort,
    /// Members get certificates of a CA that the other members do not trust yet. A test in the module `authorities`
    /// must detect this mistake and the following mistakes about CAs.
    IssuesUntrusted,
    /// The operator gets a certificate that the members do not accept yet.
    LocksItselfOut,
    /// A CA is retired before all members trust the next CA.
    RetiresEarly,
    /// The operator does not read which version last served the data on a volume. Tests in the module `served` must
    /// detect this mistake and `GoesBackUnproven`.
    ForgetsWhatServed,
    /// The recorded version of a silent member counts as proof that the next version has never run.
    GoesBackUnproven,
    /// The operator does not see that a downgrade is enabled. A test in the module `downgrade` must detect this mistake.
    OverlooksDowngrade,
    /// A plan from watch caches, which may be stale, is executed. A test in the module `stale` must detect this
    /// mistake.
    ActsOnCaches,
}

impl Mutation {
    pub(crate) const ALL: [Self; 52] = [
        Self::IgnoresThePause,
        Self::ActsOnADeletedObject,
        Self::IgnoresCertificates,
        Self::DeletesUnfitVolumes,
        Self::RemovesUnfitTogether,
        Self::BootstrapsBesideOldPods,
        Self::ReplacesOldPodsAtOnce,
        Self::BootstrapsInsteadOfJoining,
        Self::RemovesTheirsEarly,
        Self::ChangesAllImages,
        Self::ChangesTheLeadersImage,
        Self::SkipsAMinor,
        Self::ForgetsTheNotedVersion,
        Self::ChangesWithoutBackup,
        Self::LeavesMembersOut,
        Self::TakesAllOut,
        Self::AddsBeforeRemoving,
        Self::RemovesWithoutQuorum,
        Self::TakesUnknownForEmpty,
        Self::DeletesBlindly,
        Self::PromotesTooEarly,
        Self::AddsVoters,
        Self::ChangesTwoVotersAtOnce,
        Self::BootstrapsWithoutStatus,
        Self::BootstrapsWithoutPods,
        Self::ReplacesMembersWithDisks,
        Self::StartsNewTwice,
        Self::RestartsEmptyFirstMembers,
        Self::RemovesTheLeader,
        Self::RecordsLate,
        Self::AddsUnreserved,
        Self::MarksLate,
        Self::TakesMarksBackBlindly,
        Self::ActsOnAChangedList,
        Self::ReadsALocalList,
        Self::DeletesForeignObjects,
        Self::LetsClientsInEarly,
        Self::RecordsOverAnyVersion,
        Self::DeletesDisksFirst,
        Self::ReusesNames,
        Self::DrawsTheSameNames,
        Self::TakesSilenceForDamage,
        Self::RecoversUnasked,
        Self::RecoversFromTheLast,
        Self::RollsAllAtOnce,
        Self::RollsTheLeaderFirst,
        Self::RollsWhileAnotherIsDown,
        Self::HibernatesWithoutDisks,
        Self::DisarmsFullDatabases,
        Self::DisarmsMembers,
        Self::DefragmentsWhileAnotherIsDown,
        Self::DefragmentsTheLeader,
    ];

    /// True if only runs with a second operator detect the mistake.
    pub(crate) fn needs_two(self) -> bool {
        matches!(self, Self::ActsOnAChangedList | Self::RecordsOverAnyVersion)
    }

    // ---- mistakes in the input of the planner ----

    pub(crate) fn read(self, world: &World, observed: &mut Observed) {
        match self {
            Self::TakesUnknownForEmpty => {
                if let (Seen::Unknown(_), Some(cluster_id)) =
                    (&observed.members, observed.cluster_id)
                {
                    observed.members = Seen::Known(Members {
                        cluster_id,
                        members: Vec::new(),
                    });
                }
            }
            Self::ReadsALocalList => {
                let token = observed
                    .intent
                    .as_ref()
                    .map_or("", |intent| intent.token.as_str());
                let names: Vec<String> = observed.pods.keys().cloned().collect();
                if let Some(list) = world.local_list(token, &names) {
                    observed.members = Seen::Known(list);
                }
            }
            Self::PromotesByThePast
            | Self::PromotesBehind
            | Self::PromotesTheCutOff
            | Self::TakesAnothersPulse => self.misreads_a_pulse(observed),
            Self::TakesSilenceForDamage => {
                let silent = observed
                    .statuses
                    .iter()
                    .filter(|(_, seen)| seen.known().is_none());
                for name in silent.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
                    if let Some(pod) = observed.pods.get_mut(&name) {
                        let at = Timestamp::MAX;
                        pod.ending = Some(Ending {
                            at,
                            cause: Cause::Data("silent".to_owned()),
                        });
                        pod.restarts = pod.restarts.max(9);
                        pod.unready_since = pod.unready_since.or(Some(Timestamp::UNIX_EPOCH));
                    }
                }
            }
            Self::DeletesForeignObjects => {
                let ours = observed.cluster_id;
                observed
                    .pods
                    .values_mut()
                    .for_each(|pod| pod.cluster_id = ours);
                observed
                    .disks
                    .values_mut()
                    .for_each(|disk| disk.cluster_id = ours);
            }
            Self::RecoversUnasked if observed.members.known().is_none() => {
                let cluster_id = observed.cluster_id;
                observed.recovery.approval = cluster_id.map(|id| id.to_string());
                observed.recovery.stale_approval = None;
            }
            Self::RecoversFromTheLast if observed.members.known().is_none() => {
                for seen in observed.statuses.values_mut() {
                    if let Seen::Known(status) = seen {
                        status.raft_index = u64::MAX - status.raft_index;
                    }
                }
            }
            _ => {}
        }
    }

    // ---- mistakes in plans ----

    pub(crate) fn plan(
        self,
        world: &mut World,
        desired: &Desired,
        observed: &Observed,
        now: Timestamp,
    ) -> Plan {
        let (desired, observed) = &self.overlooks(desired, observed);
        let names = world.unused_names();
        let sent = plan(desired, observed, &names, now);
        let mut planned = sent::read(sent, desired, observed);
        if self != Self::DrawsTheSameNames {
            world.use_names(&names);
        }
        // While the cluster is paused or is being deleted, or while a certificate is invalid, a check of the model
        // rejects nearly every write. A failed check would then not prove that the model detects the mistake, so the
        // plan stays correct.
        if desired.paused || observed.deleting || !observed.tls.faults.is_empty() {
            return planned;
        }
        self.mistakes_an_owner(world, (desired, observed, now), &mut planned);
        self.mistakes_a_wish((desired, observed, now), &mut planned);
        self.mistakes_a_version(desired, observed, &mut planned);
        if Self::ABOUT_TLS.contains(&self) {
            self.mistakes_a_switch(world, (desired, observed, now), &mut planned);
            return planned;
        }
        if Self::ABOUT_AUTHORITIES.contains(&self) {
            self.mistakes_an_authority(observed, &mut planned);
            return planned;
        }
        match self {
            Self::BootstrapsWithoutStatus | Self::BootstrapsWithoutPods => {
                self.bootstraps(world, (desired, observed), &mut planned);
            }
            Self::RestartsEmptyFirstMembers => restart_first(desired, observed, &mut planned),
            Self::DeletesBlindly => delete_blindly(observed, &mut planned),
            Self::LetsClientsInEarly => {
                let open = Write::ApplyClient { open: true };
                planned.step.chains.push(vec![open]);
            }
            _ => {
                if let Seen::Known(list) = &observed.members {
                    let view = View::new(list, (desired, observed, now));
                    self.changes(world, (desired, observed), &view, &mut planned);
                    self.counts_on_joining(&view, &mut planned);
                }
            }
        }
        planned
    }

    fn bootstraps(
        self,
        world: &mut World,
        (desired, observed): (&Desired, &Observed),
        planned: &mut Plan,
    ) {
        let lost = match self {
            Self::BootstrapsWithoutStatus => observed.intent.is_none(),
            _ => {
                observed.cluster_id.is_some()
                    && observed.pods.is_empty()
                    && observed.disks.is_empty()
            }
        };
        if lost {
            planned.step.chains = vec![vec![world.begin(desired, observed)]];
        }
    }

    /// Replaces the planned membership change by a wrong change.
    fn changes(
        self,
        world: &mut World,
        (desired, observed): (&Desired, &Observed),
        view: &View,
        planned: &mut Plan,
    ) {
        let lost = view
            .voters()
            .find(|member| matches!(member.fate, Fate::Lost(_)));
        let remove = |member: &cluster::plan::MemberState| Write::Remove {
            member: member.name.clone(),
            id: member.id(),
        };
        let reserved = || {
            let mut services = observed.services.iter();
            let free = services.find(|(name, service)| {
                !service.started
                    && !view.names().contains(*name)
                    && !observed.pods.contains_key(*name)
            });
            free.map(|(name, _)| name.clone())
        };
        let learner = VersionRules::new(observed, &desired.version).learners;
        let write = match self {
            Self::AddsBeforeRemoving => lost
                .and_then(|_| reserved())
                .map(|member| Write::AddMember { member, learner }),
            Self::RemovesWithoutQuorum => lost.map(remove),
            Self::PromotesTooEarly => view.learners().next().map(|member| Write::Promote {
                member: member.name.clone(),
                id: member.id(),
            }),
            Self::ReplacesMembersWithDisks => view
                .voters()
                .find(|member| member.pod.is_none() && member.data == Data::There)
                .map(remove),
            Self::RemovesTheLeader if planned_removal(planned) => view
                .voters()
                .find(|member| Some(member.id()) == view.leader)
                .map(remove),
            Self::AddsUnreserved if view.members.len() < desired.size => Some(Write::AddMember {
                member: world.member(),
                learner,
            }),
            Self::ReusesNames if view.members.len() < desired.size => {
                let used = observed.intent.iter().flat_map(|intent| &intent.members);
                let removed = used.filter(|name| !view.names().contains(*name)).min();
                removed.map(|member| Write::AddMember {
                    member: member.clone(),
                    learner,
                })
            }
            Self::DeletesDisksFirst => {
                delete_disk_first(observed, planned);
                None
            }
            Self::ChangesTwoVotersAtOnce => {
                promote_all(view, planned);
                None
            }
            _ => None,
        };
        if let Some(write) = write {
            let planned_from = view.list.clone();
            planned.step.change = Some(Change {
                chain: vec![write],
                via: view.via(None),
                planned_from,
            });
        }
    }

    // ---- mistakes in sent requests ----

    /// Changes the chains of the plan as this deliberate mistake requires.
    pub(crate) fn chains(self, mut chains: Vec<Vec<Write>>) -> Vec<Vec<Write>> {
        match self {
            Self::MarksLate => {
                for chain in &mut chains {
                    let marked = matches!(
                        chain.first(),
                        Some(Write::MarkService { started: true, .. })
                    );
                    if marked && chain.len() > 1 {
                        chain.rotate_left(1);
                    }
                }
            }
            Self::TrustsMarksOfOthers => {
                let again = |write: &Write| matches!(write, Write::RenewMark { .. });
                { &mut chains }
                    .iter_mut()
                    .for_each(|chain| chain.retain(|write| !again(write)));
            }
            Self::RecordsLate => {
                for chain in &mut chains {
                    if let [
                        Write::RecordIntent {
                            intent,
                            cluster_id: None,
                            ..
                        },
                    ] = &chain[..]
                    {
                        let first = intent.members.iter().map(|name| first_pod(intent, name));
                        let first: Vec<Write> = first.collect();
                        chain.splice(0..0, first);
                    }
                }
            }
            _ => {}
        }
        chains
    }

    /// Changes a sent write as this deliberate mistake requires.
    pub(crate) fn write(self, world: &World, write: &Write) -> Write {
        let mut write = write.clone();
        match (self, &mut write) {
            (
                Self::RecordsOverAnyVersion,
                Write::RecordIntent { over, .. } | Write::RecordClusterId { over, .. },
            ) => *over = world.object_version.to_string(),
            (Self::AddsVoters, Write::AddMember { learner, .. }) => *learner = false,
            (Self::LeavesMembersOut, Write::LabelPod(label)) => {
                let busy = world.pods.get(&label.member).map(|pod| pod.role);
                label.role = busy.filter(|role| is_out(*role)).or(label.role);
            }
            (Self::LetsJoiningIn, Write::LabelPod(label)) => self.lets_joining_in(world, label),
            (Self::StartsNewTwice, Write::CreatePod(start)) => start.state = State::New,
            (Self::ForgetsTheNotedVersion, Write::CreatePod(start))
                if start.state == State::OnDisk =>
            {
                world.setup.version.clone_into(&mut start.version);
            }
            _ => {}
        }
        write
    }
}
