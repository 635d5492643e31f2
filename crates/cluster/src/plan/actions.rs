//! Builds the actions for the writes that the phases request: the object, the patch or the call, with its
//! precondition. Pure, so a plan shows the exact requests.

mod patches;
mod records;
mod start;

use api::names;
use etcd::{Alarm, MemberId};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt;
use member::Members;

use crate::access::AccessWrite;
use crate::action::{Action, AuthChange, EtcdCall, Kind, Object, Passwords, Reference, Request};
use crate::certificates::CertificateWrite;
use crate::plan::{BLIND, Explanation, Plan};
use crate::snapshot::{Desired, Observed, Seen};
use crate::write::{Chain, Change, Step, Write};

pub(crate) use patches::unmark;

/// The input for objects: the spec in effect and the observed state.
#[derive(Clone, Copy)]
pub(crate) struct Builder<'a> {
    pub desired: &'a Desired,
    pub observed: &'a Observed,
    pub now: Timestamp,
}

impl Builder<'_> {
    /// Builds the plan with its actions. A chain that cannot be built is omitted, and the reason becomes a problem of
    /// the plan.
    pub(super) fn plan(&self, decided: Plan<Write>) -> Plan {
        let Plan {
            step,
            asks,
            next,
            waiting_for,
            mut problems,
            mut requeue,
        } = decided;
        let mut complete = true;
        let mut build = |chain: &Chain| match self.chain(chain) {
            Ok(actions) => Some(actions),
            Err(problem) => {
                complete = false;
                if !problems.contains(&problem) {
                    problems.push(problem);
                }
                None
            }
        };
        let chains = step.chains.iter().filter_map(&mut build).collect();
        let change = step.change.and_then(|change| {
            Some(Change {
                chain: build(&change.chain)?,
                via: change.via,
                planned_from: change.planned_from,
            })
        });
        let step = Step { chains, change };
        if !complete && step.is_empty() {
            requeue = requeue.max(BLIND);
        }
        Plan {
            step,
            asks,
            next,
            waiting_for,
            problems,
            requeue,
        }
    }

    /// Builds the actions of one chain.
    pub(crate) fn chain(&self, writes: &[Write]) -> Result<Chain<Action>, Explanation> {
        writes.iter().map(|write| self.action(write)).collect()
    }

    fn action(&self, write: &Write) -> Result<Action, Explanation> {
        let (point, event) = write.point_and_event();
        Ok(Action {
            point,
            text: write.to_string(),
            event,
            start: write.start(),
            request: self.request(write)?,
        })
    }

    fn request(&self, write: &Write) -> Result<Request, Explanation> {
        Ok(match write {
            Write::RecordIntent { .. }
            | Write::RecordClusterId { .. }
            | Write::RecordRecovery(_) => self.identity(write),
            Write::RecordTls { record, over } => records::tls(record, over),
            Write::RecordDefragmentation { record, over } => records::defragmentation(record, over),
            Write::ApplyHeadless => apply_service(member::headless_service(&self.members())),
            Write::ApplyClient { open } => self.client_service(*open),
            Write::ApplyBudget { quorum } => self.budget(*quorum),
            Write::DeleteBudget => self.delete_budget(),
            Write::Access(write) => self.access(*write),
            Write::Certificate(write) => certificate(write),
            Write::CreateService {
                member,
                started,
                closed,
            } => self.create_service(member, *started, *closed),
            Write::OpenService { member, uid } | Write::RepairService { member, uid } => {
                self.apply_service(member, uid)
            }
            Write::MarkService {
                member,
                started,
                over,
            } => patches::mark(member, *started, over.as_deref()),
            Write::RenewMark { member, over } => patches::mark_again(member, over, self.now),
            Write::DeleteService { member, uid } => delete(Kind::Service, member, uid),
            Write::CreateDisk(start) => Request::Create(self.volume_claim(start)?),
            Write::GrowDisk { member, uid, size } => patches::grow(member, uid, size),
            Write::NoteRemoval {
                member,
                over,
                removal,
            } => patches::note_removal(member, over, *removal),
            Write::NoteVersion {
                member,
                uid,
                version,
            } => patches::note_version(member, uid, version),
            Write::DeleteDisk { member, uid } => delete(Kind::VolumeClaim, member, uid),
            Write::CreatePod(start) => Request::Create(self.pod(start)?),
            Write::DeletePod { member, uid } => delete(Kind::Pod, member, uid),
            Write::PatchImage {
                member,
                uid,
                version,
                changed,
            } => self.patch_image((member, uid), version, changed)?,
            Write::SettleImage { member, uid } => patches::settle_image(member, uid),
            Write::PatchMetadata { member, uid, patch } => patches::metadata(member, uid, patch),
            Write::ResizePod { member, uid, patch } => patches::resize(member, uid, patch),
            Write::LabelPod(label) => self.label(Kind::Pod, label),
            Write::LabelDisk(label) => self.label(Kind::VolumeClaim, label),
            Write::AddMember { member, learner } => self.add_member(member, *learner),
            Write::UpdatePeerUrls { id, urls, .. } => update_peer_urls(*id, urls),
            Write::Promote { id, .. } => Request::Etcd(EtcdCall::Promote { id: *id }),
            Write::Remove { id, .. } => Request::Etcd(EtcdCall::Remove { id: *id }),
            Write::MoveLeader { from, id, .. } => move_leader(from, *id),
            Write::Downgrade { to } => Request::Etcd(EtcdCall::Downgrade { to: to.clone() }),
            Write::Defragment { member, recorded } => defragment(member, *recorded),
            Write::Compact { revision, via } => compact(*revision, via),
            Write::Disarm { alarm, via } => disarm(*alarm, via),
        })
    }

    /// The common part of the objects of all members. Only objects of a single member need the cluster ID.
    fn members(&self) -> Members<'_> {
        let intent = self.observed.intent.as_ref();
        self.members_of(intent.map_or("", |intent| intent.token.as_str()), None)
    }

    /// The same for a cluster with this token and ID.
    fn members_of<'b>(&'b self, token: &'b str, cluster_id: Option<&'b str>) -> Members<'b> {
        let object = &self.desired.object;
        // An object that was read always has a namespace.
        let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
        Members::of(object, namespace, token, cluster_id)
    }

    // ---- objects of the cluster ----

    fn client_service(&self, open: bool) -> Request {
        let mut members = self.members();
        members.cluster_id = open.then_some("");
        apply_service(member::client_service(&members))
    }

    fn budget(&self, quorum: usize) -> Request {
        // The smallest number of voters with this quorum.
        let voters = (quorum * 2).saturating_sub(1);
        let budget = member::disruption_budget(&self.members(), voters);
        Request::Apply(Object::DisruptionBudget(Box::new(budget)))
    }

    fn delete_budget(&self) -> Request {
        let name = names::disruption_budget(&self.observed.cluster);
        let uid = self.observed.shared.budget_uid.as_deref();
        delete(Kind::DisruptionBudget, &name, uid.unwrap_or_default())
    }

    fn access(&self, write: AccessWrite) -> Request {
        let auth = |change| {
            Request::Etcd(EtcdCall::Auth {
                change,
                via: self.answering_voters(),
            })
        };
        match write {
            AccessWrite::Record { others } => Request::Passwords(Passwords::Record { others }),
            AccessWrite::Forget => Request::Passwords(Passwords::Forget),
            AccessWrite::Enable => auth(AuthChange::Enable),
            AccessWrite::Disable => auth(AuthChange::Disable),
            AccessWrite::ChangePassword => auth(AuthChange::ChangePassword),
            AccessWrite::ApplyNetwork => {
                let policy = self.desired.object.spec.network_policy.clone();
                let policy = policy.unwrap_or_default();
                let operators = &self.desired.operators;
                let policy = member::network_policy(&self.members(), &policy, operators);
                Request::Apply(Object::NetworkPolicy(Box::new(policy)))
            }
            AccessWrite::DeleteNetwork => {
                let name = names::network_policy(&self.observed.cluster);
                let uid = self.observed.access.network_uid.as_deref();
                delete(Kind::NetworkPolicy, &name, uid.unwrap_or_default())
            }
        }
    }

    fn answering_voters(&self) -> Vec<String> {
        let answers = self.observed.statuses.iter();
        let voters = answers
            .filter(|(_, answer)| matches!(answer, Seen::Known(status) if !status.is_learner));
        voters.map(|(name, _)| name.clone()).collect()
    }

    // ---- the Service of a member ----

    fn create_service(&self, member: &str, started: bool, closed: bool) -> Request {
        let service = member::member_service(&self.members(), member);
        let mut service = member::without_second_port(service);
        if closed {
            service = member::closed(service);
        }
        if started {
            let annotations = service.annotations_mut();
            annotations.insert(names::ANNOTATION_STARTED.to_owned(), "true".to_owned());
        }
        Request::Create(Object::Service(Box::new(service)))
    }

    /// Includes the UID, so that a deleted Service is not recreated under a used name.
    fn apply_service(&self, member: &str, uid: &str) -> Request {
        let mut service = member::member_service(&self.members(), member);
        service.metadata.uid = Some(uid.to_owned());
        apply_service(service)
    }

    fn add_member(&self, member: &str, learner: bool) -> Request {
        let url = self.members().addresses().peer_url(member);
        Request::Etcd(EtcdCall::AddMember { url, learner })
    }
}

fn apply_service(service: Service) -> Request {
    Request::Apply(Object::Service(Box::new(service)))
}

fn delete(kind: Kind, name: &str, uid: &str) -> Request {
    Request::Delete(Reference {
        kind,
        name: name.to_owned(),
        uid: uid.to_owned(),
    })
}

fn certificate(write: &CertificateWrite) -> Request {
    match write {
        CertificateWrite::Tell {
            member,
            uid,
            trust,
            authorities,
            certificates,
        } => patches::tell((member, uid), (trust, authorities), certificates),
        CertificateWrite::Discard { secret, uid } => delete(Kind::Secret, secret, uid),
        write => Request::Certificate(write.clone()),
    }
}

fn update_peer_urls(id: MemberId, urls: &[String]) -> Request {
    let urls = urls.to_vec();
    Request::Etcd(EtcdCall::UpdatePeerUrls { id, urls })
}

fn move_leader(from: &str, id: MemberId) -> Request {
    let from = from.to_owned();
    Request::Etcd(EtcdCall::MoveLeader { from, id })
}

fn defragment(member: &str, recorded: Timestamp) -> Request {
    let member = member.to_owned();
    Request::Etcd(EtcdCall::Defragment { member, recorded })
}

fn compact(revision: i64, via: &[String]) -> Request {
    let via = via.to_vec();
    Request::Etcd(EtcdCall::Compact { revision, via })
}

fn disarm(alarm: Alarm, via: &[String]) -> Request {
    let via = via.to_vec();
    Request::Etcd(EtcdCall::Disarm { alarm, via })
}
