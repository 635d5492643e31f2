//! Converts each request of a plan to a [`Write`], as the API server or etcd would read the request. The operator's own
//! functions parse the objects in the requests, so each round tests the operator's object builders.
//!
//! The deliberate mistakes of the model test (`mutation.rs`) change these [`Write`] values.

use std::collections::BTreeMap;

use api::cluster::BootstrapStatus;
use api::names;
use cluster::action::{
    Action, AuthChange, EtcdCall, Kind, Object, Passwords, Patch, Reference, Request, Resize,
    StatusRecord,
};
use cluster::plan::{Label, Start, State, name_of};
use cluster::snapshot::{Changed, Desired, Intent, Observed, Removal, RetentionNotes, Role};
use cluster::{action, observe, plan};
use etcd::MemberId;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use member::{Members, MetadataPatch, ResourcesPatch};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::writes::{AccessWrite, Change, Plan, RecoveryRecord, Step, Write};

pub(crate) fn read(sent: plan::Plan, desired: &Desired, observed: &Observed) -> Plan {
    let reader = Reader { desired, observed };
    let chain = |chain: &action::Chain| chain.iter().map(|action| reader.write(action)).collect();
    Plan {
        step: Step {
            chains: sent.step.chains.iter().map(chain).collect(),
            change: sent.step.change.map(|change| Change {
                chain: chain(&change.chain),
                via: change.via,
                planned_from: change.planned_from,
            }),
        },
        asks: sent.asks,
        next: sent.next,
        waiting_for: sent.waiting_for,
        problems: sent.problems,
        requeue: sent.requeue,
    }
}

struct Reader<'a> {
    desired: &'a Desired,
    observed: &'a Observed,
}

impl Reader<'_> {
    fn write(&self, action: &Action) -> Write {
        let write = self.request(action);
        assert_eq!(action.start, write.start(), "{write}");
        write
    }

    fn request(&self, action: &Action) -> Write {
        let point = action.point;
        match &action.request {
            Request::Create(Object::Service(service)) => self.create_service(service),
            Request::Create(Object::VolumeClaim(claim)) => Write::CreateDisk(start_on(claim)),
            Request::Create(Object::Pod(pod)) => Write::CreatePod(self.start_in(pod)),
            Request::Apply(Object::Service(service)) => self.apply_service(service, point),
            Request::Apply(Object::DisruptionBudget(budget)) => {
                let spec = budget.spec.as_ref().unwrap();
                let Some(IntOrString::Int(quorum)) = spec.min_available else {
                    panic!("{budget:?}");
                };
                let quorum = usize::try_from(quorum).unwrap();
                Write::ApplyBudget { quorum }
            }
            Request::Apply(Object::NetworkPolicy(_)) => Write::Access(AccessWrite::ApplyNetwork),
            Request::Patch(patch) => patched(patch, point),
            Request::Resize(resize) => resized(resize),
            Request::Delete(reference) => deleted(reference),
            Request::Record(record) => self.recorded(record, point),
            Request::Finalizer(set) => Write::SetFinalizer {
                set: *set,
                over: self.observed.resource_version.clone(),
            },
            Request::Etcd(call) => self.called(call),
            Request::Certificate(write) => Write::Certificate(write.clone()),
            Request::Passwords(Passwords::Record { others }) => {
                Write::Access(AccessWrite::Record { others: *others })
            }
            Request::Passwords(Passwords::Forget) => Write::Access(AccessWrite::Forget),
            other => panic!("the operator never sends {other:?}"),
        }
    }

    fn create_service(&self, service: &Service) -> Write {
        let object = &self.desired.object;
        let members = Members::of(object, "ns", "", None);
        let uid = object.uid().unwrap();
        let seen = observe::member_service(&members, service, &uid).unwrap();
        assert!(seen.owned, "{service:?}");
        Write::CreateService {
            member: service.name_any(),
            started: seen.started,
            closed: seen.closed,
        }
    }

    fn apply_service(&self, service: &Service, point: &str) -> Write {
        let (name, cluster) = (service.name_any(), &self.observed.cluster);
        if name == names::headless_service(cluster) {
            return Write::ApplyHeadless;
        }
        if name == names::client_service(cluster) {
            let open = !member::is_closed(service);
            return Write::ApplyClient { open };
        }
        let uid = service.uid().unwrap();
        match point {
            "before-open-service" => Write::OpenService { member: name, uid },
            _ => Write::RepairService { member: name, uid },
        }
    }

    fn start_in(&self, pod: &Pod) -> Start {
        let seen = observe::pod(pod, &self.desired.object.spec, true);
        let spec = pod.spec.as_ref().unwrap();
        let fetches = spec
            .init_containers
            .as_ref()
            .is_some_and(|all| !all.is_empty());
        let member = pod.name_any();
        let alone = seen.initial.len() == 1 && seen.initial.contains(&member);
        let state = match (seen.joins, fetches) {
            (false, _) => State::New,
            (true, true) => State::FromSurvivor,
            (true, false) if alone => State::OnDisk,
            (true, false) => State::Join,
        };
        Start {
            member,
            state,
            initial: seen.initial,
            role: seen.role.unwrap(),
            durable: seen.durable,
            version: seen.version.unwrap(),
            token: seen.token.unwrap(),
            cluster_id: seen.cluster_id,
        }
    }

    fn recorded(&self, record: &StatusRecord, point: &str) -> Write {
        let (status, over) = (&record.status, record.over.clone());
        if point == "before-record-tls" {
            let record = Box::new(value(&status["TLS"]));
            return Write::RecordTls { record, over };
        }
        if point == "before-record-raft-log" {
            let record = serde_json::from_value(status["raftLog"].clone()).unwrap();
            return Write::RecordRaftLog { record, over };
        }
        if point == "before-record-before-change" {
            let record = serde_json::from_value(status["beforeChange"].clone()).unwrap();
            return Write::RecordBeforeChange { record, over };
        }
        if point == "before-record-defragmentation" {
            let record = Box::new(value(&status["defragmentation"]));
            return Write::RecordDefragmentation { record, over };
        }
        let bootstrap: BootstrapStatus = value(&status["bootstrap"]);
        let intent = Intent {
            token: bootstrap.token,
            members: bootstrap.members.into_iter().collect(),
        };
        let cluster_id = text(&status["clusterID"]).map(|id| id.parse().unwrap());
        match point {
            "before-record-intent" => Write::RecordIntent {
                intent,
                cluster_id,
                over,
            },
            "before-record-cluster-id" => {
                // Each status request contains all fields, so this request must contain the unchanged intent.
                assert_eq!(self.observed.intent.as_ref(), Some(&intent));
                let cluster_id = cluster_id.unwrap();
                Write::RecordClusterId { cluster_id, over }
            }
            _ => {
                let known = self.observed.intent.as_ref();
                let formed = (known != Some(&intent)).then(|| (intent, cluster_id.unwrap()));
                let recovery = &status["recovery"];
                Write::RecordRecovery(Box::new(RecoveryRecord {
                    recovery: (!recovery.is_null()).then(|| value(recovery)),
                    stale_approval: text(&status["staleApproval"]),
                    formed,
                    over,
                }))
            }
        }
    }

    fn called(&self, call: &EtcdCall) -> Write {
        match call.clone() {
            EtcdCall::AddMember { url, learner } => Write::AddMember {
                member: names::member_of_url(&url).unwrap().to_owned(),
                learner,
            },
            EtcdCall::UpdatePeerUrls { id, urls } => Write::UpdatePeerUrls {
                member: self.name_of(id),
                id,
                urls,
            },
            EtcdCall::Promote { id } => Write::Promote {
                member: self.name_of(id),
                id,
            },
            EtcdCall::Remove { member, id } => {
                assert_eq!(member, self.name_of(id));
                Write::Remove { member, id }
            }
            EtcdCall::MoveLeader { from, id } => Write::MoveLeader {
                from,
                to: self.name_of(id),
                id,
            },
            EtcdCall::Downgrade { to } => Write::Downgrade { to },
            EtcdCall::Defragment { member, recorded } => Write::Defragment { member, recorded },
            EtcdCall::Compact { revision, via } => Write::Compact { revision, via },
            EtcdCall::AppendEntries { member, until } => Write::AppendEntries { member, until },
            EtcdCall::Disarm { alarm, via } => Write::Disarm { alarm, via },
            EtcdCall::Auth { change, .. } => Write::Access(match change {
                AuthChange::Enable => AccessWrite::Enable,
                AuthChange::Disable => AccessWrite::Disable,
                AuthChange::ChangePassword => AccessWrite::ChangePassword,
            }),
        }
    }

    /// The name of a member in the list from which the plan was made.
    fn name_of(&self, id: MemberId) -> String {
        let list = self.observed.members.known().unwrap();
        let member = list.members.iter().find(|member| member.id == id);
        name_of(member.unwrap())
    }
}

fn start_on(claim: &PersistentVolumeClaim) -> Start {
    let seen = observe::disk(claim, true);
    let state = if seen.initial.is_empty() {
        State::Join
    } else {
        State::New
    };
    Start {
        member: claim.name_any(),
        state,
        initial: seen.initial,
        role: Role::Voter,
        durable: true,
        version: seen.version.unwrap(),
        token: seen.token.unwrap(),
        cluster_id: seen.cluster_id,
    }
}

fn deleted(Reference { kind, name, uid }: &Reference) -> Write {
    let (member, uid) = (name.clone(), uid.clone());
    match kind {
        Kind::Service => Write::DeleteService { member, uid },
        Kind::VolumeClaim => Write::DeleteDisk { member, uid },
        Kind::Pod => Write::DeletePod { member, uid },
        Kind::DisruptionBudget => Write::DeleteBudget,
        Kind::NetworkPolicy => Write::Access(AccessWrite::DeleteNetwork),
        Kind::Secret => Write::DeleteSecret {
            secret: member,
            uid,
        },
    }
}

fn resized(
    Resize {
        patch,
        accepted,
        rejected,
    }: &Resize,
) -> Write {
    let noted = |patch: &Patch| value(&patch.body["metadata"]["annotations"]);
    Write::ResizePod {
        member: patch.name.clone(),
        uid: precondition(patch, "uid"),
        patch: ResourcesPatch {
            resources: patch.body["spec"]["containers"][0]["resources"].clone(),
            taken: noted(accepted),
            refused: noted(rejected),
        },
    }
}

fn patched(patch: &Patch, point: &str) -> Write {
    let member = patch.name.clone();
    let noted = &patch.body["metadata"]["annotations"];
    let uid = || precondition(patch, "uid");
    let over = || precondition(patch, "resourceVersion");
    match point {
        "before-mark-service" => match text(&noted[names::ANNOTATION_STARTED]).as_deref() {
            mark @ (None | Some("true")) => Write::MarkService {
                member,
                started: mark.is_some(),
                over: Some(over()),
            },
            Some(_) => Write::RenewMark {
                member,
                over: over(),
            },
        },
        "before-note-removal" => Write::NoteRemoval {
            member,
            over: over(),
            removal: text(&noted[names::ANNOTATION_REMOVED]).map(|note| Removal::read(&note)),
        },
        "before-grow-disk" => Write::GrowDisk {
            member,
            uid: uid(),
            size: text(&patch.body["spec"]["resources"]["requests"]["storage"]).unwrap(),
        },
        "before-note-version" => Write::NoteVersion {
            member,
            uid: uid(),
            version: text(&noted[names::ANNOTATION_VERSION]).unwrap(),
            served: text(&noted[names::ANNOTATION_SERVED]),
        },
        "before-settle-image" => Write::SettleImage { member, uid: uid() },
        "before-patch-image" => Write::PatchImage {
            member,
            uid: uid(),
            version: text(&noted[names::ANNOTATION_VERSION]).unwrap(),
            changed: Changed::read(&text(&noted[names::ANNOTATION_CHANGED]).unwrap()).unwrap(),
        },
        "before-patch-metadata" => Write::PatchMetadata {
            member,
            uid: uid(),
            patch: MetadataPatch {
                labels: value(&patch.body["metadata"]["labels"]),
                annotations: value(noted),
            },
        },
        "before-tell-certificates" => Write::NotifyPod {
            member,
            uid: uid(),
            trust: text(&noted[names::ANNOTATION_TRUST]),
            authorities: text(&noted[names::ANNOTATION_AUTHORITIES]),
            certificates: text(&noted[names::ANNOTATION_CERTIFICATES]).unwrap(),
        },
        "before-label-pod" => Write::LabelPod(labelled(patch)),
        "before-label-disk" => Write::LabelDisk(labelled(patch)),
        _ => panic!("the model does not know the patch of {point}"),
    }
}

fn labelled(patch: &Patch) -> Label {
    let metadata = &patch.body["metadata"];
    let (labels, noted) = (&metadata["labels"], &metadata["annotations"]);
    let expected: BTreeMap<String, String> = names::member_labels("db", &patch.name);
    for (key, label) in expected {
        assert_eq!(text(&labels[&key]), Some(label), "{patch:?}");
    }
    let since = || text(&noted[names::ANNOTATION_BUSY_SINCE]).unwrap();
    let role = text(&labels[names::LABEL_ROLE]).map(|role| match role.as_str() {
        names::ROLE_VOTER => Role::Voter,
        names::ROLE_LEARNER => Role::Learner,
        _ => Role::Busy {
            since: since().parse().unwrap(),
        },
    });
    Label {
        member: patch.name.clone(),
        uid: precondition(patch, "uid"),
        role,
        token: text(&noted[names::ANNOTATION_CLUSTER_TOKEN]).unwrap(),
        cluster_id: text(&noted[names::ANNOTATION_CLUSTER_ID]).map(|id| id.parse().unwrap()),
        retention: noted.get(names::ANNOTATION_VOTERS).map(|voters| {
            let voters = text(voters);
            let voters = voters.iter().flat_map(|list| list.split(','));
            RetentionNotes {
                voters: voters.map(str::to_owned).collect(),
                tls: text(&noted[names::ANNOTATION_TLS]),
            }
        }),
    }
}

/// Invariant 11: every patch has a precondition.
fn precondition(patch: &Patch, key: &str) -> String {
    text(&patch.body["metadata"][key]).unwrap_or_else(|| panic!("no {key}: {patch:?}"))
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn value<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}
