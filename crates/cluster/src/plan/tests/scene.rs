//! Builds observed states of a cluster for all scenarios. The names of members are letters, in order of age.

use std::collections::BTreeMap;
use std::time::Duration;

use api::EtcdCluster;
use api::cluster::{DEFAULT_QUOTA_BYTES, PodPolicy};
use etcd::{ClusterId, Member, MemberId, Members, Status};
use jiff::Timestamp;
use kube::ResourceExt;
use member::{OperatorImage, Operators};

use crate::action::{Action, Object, Request};
use crate::naming::Names;
use crate::plan::actions::Builder;
use crate::plan::plan;
use crate::plan::tests::sent;
use crate::plan::tests::writes::{Chain, Plan, Write};
use crate::reason::Reason;
use crate::snapshot::{
    Cause, Desired, Disk, Ending, Intent, Kept, Observed, Pod, Recovery, RecoveryRule, Removal,
    Role, Seen, Service, Shared, Trouble,
};
use crate::upkeep::{Upkeep, UpkeepRule};

mod faults;

pub(crate) const CLUSTER: ClusterId = ClusterId(0x00c0_ffee);

#[derive(Clone)]
pub(crate) struct Scene {
    pub(crate) desired: Desired,
    pub(crate) observed: Observed,
}

fn id(member: &str) -> MemberId {
    MemberId(u64::from(member.as_bytes()[0]))
}

pub(crate) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

impl Scene {
    /// A new EtcdCluster without objects.
    pub(crate) fn nothing(size: usize) -> Self {
        let desired = Desired {
            size,
            first: size,
            durable: false,
            claim: None,
            hibernate: false,
            upkeep: UpkeepRule {
                quota: DEFAULT_QUOTA_BYTES,
                only_reports: false,
                keep_revisions: None,
                defragmentation: None,
            },
            version: "3.6.16".into(),
            image: "etcd:v3.6.16".into(),
            spec_hash: "hash".into(),
            replace_after: Duration::from_mins(1),
            keep_volumes: Duration::from_mins(5),
            recovery: RecoveryRule {
                automatic: false,
                after: Duration::from_mins(1),
                keep_volumes: Duration::from_mins(1),
            },
            paused: false,
            budget: true,
            access: crate::access::AccessRule::default(),
            invalid: None,
            refused: None,
            object: object(),
            operators: Operators::default(),
        };
        let observed = Observed {
            cluster: "db".into(),
            resource_version: "1".into(),
            deleting: false,
            claimed_by: None,
            intent: None,
            cluster_id: None,
            reported_voters: [].into(),
            reported_version: None,
            pods: BTreeMap::new(),
            disks: BTreeMap::new(),
            services: BTreeMap::new(),
            strangers: Vec::new(),
            shared: Shared {
                headless: Kept::Missing,
                client: Kept::Missing,
                budget: Kept::Missing,
                budget_uid: None,
            },
            members: Seen::Unknown("no member runs".into()),
            join: Vec::new(),
            join_rule: runtime::endpoints::EndpointRule::default(),
            elsewhere: BTreeMap::new(),
            statuses: BTreeMap::new(),
            pulses: BTreeMap::new(),
            hashes: BTreeMap::new(),
            recovery: Recovery::default(),
            before_change: crate::snapshot::BeforeChange::default(),
            upkeep: Upkeep::default(),
            tls: crate::tls::Tls::default(),
            tls_rollout: None,
            certificates: crate::certificates::Certificates::default(),
            access: crate::access::Access::default(),
            clock: crate::clock::ApiServerClock::default(),
            operator_image: Seen::Known(OperatorImage {
                image: "operator".into(),
                pull_policy: None,
            }),
        };
        Self { desired, observed }
    }

    /// A cluster whose bootstrap members are recorded, but that has no object yet.
    pub(crate) fn begun(members: &[&str]) -> Self {
        let mut scene = Self::nothing(members.len());
        let members = members.iter().map(|&member| member.to_owned()).collect();
        scene.observed.intent = Some(Intent {
            token: "token".into(),
            members,
        });
        scene
    }

    /// A cluster whose objects exist and whose pods run, but whose etcd does not answer yet.
    pub(crate) fn starting(members: &[&str]) -> Self {
        let mut scene = Self::begun(members);
        for member in members {
            scene = scene
                .reserved(member)
                .marked(member)
                .pod(member, Role::Voter);
        }
        scene.observed.shared = Shared {
            headless: Kept::AsMade(()),
            client: Kept::AsMade(false),
            budget: Kept::AsMade(members.len() / 2 + 1),
            budget_uid: Some("budget".into()),
        };
        scene
    }

    /// A healthy cluster, in which the first member is the leader.
    pub(crate) fn formed(members: &[&str]) -> Self {
        let mut scene = Self::starting(members);
        scene.observed.shared.client = Kept::AsMade(true);
        scene.observed.cluster_id = Some(CLUSTER);
        scene.observed.members = Seen::Known(Members {
            cluster_id: CLUSTER,
            members: Vec::new(),
        });
        for member in members {
            scene.enlist(member, false, true);
            scene.answers(member);
            scene.observed.reported_voters.insert((*member).to_owned());
        }
        for pod in scene.observed.pods.values_mut() {
            pod.cluster_id = Some(CLUSTER);
        }
        scene.leader(members[0])
    }

    fn list(&mut self) -> &mut Vec<Member> {
        match &mut self.observed.members {
            Seen::Known(list) => &mut list.members,
            Seen::Unknown(_) => panic!("the scene has no member list"),
        }
    }

    fn enlist(&mut self, member: &str, is_learner: bool, joined: bool) {
        let client_urls = if joined {
            vec![format!("http://{member}.ns.svc:2379")]
        } else {
            vec![]
        };
        let name = if joined {
            member.to_owned()
        } else {
            String::new()
        };
        let peer_urls = vec![format!("http://{member}.ns.svc:2380")];
        let peer_urls = if member == "elsewhere" {
            vec!["http://10.0.0.7:2380".to_owned()]
        } else {
            peer_urls
        };
        self.list().push(Member {
            id: id(member),
            name,
            peer_urls,
            client_urls,
            is_learner,
        });
    }

    fn answers(&mut self, member: &str) {
        let status = Status {
            cluster_id: CLUSTER,
            member_id: id(member),
            version: "3.6.16".into(),
            leader: Some(id("a")),
            is_learner: false,
            revision: 100,
            raft_term: 2,
            raft_index: 100,
            raft_applied_index: 100,
            db_size: 0,
            db_size_in_use: 0,
            errors: Vec::new(),
            storage_version: None,
            downgrade: None,
        };
        self.observed
            .statuses
            .insert(member.into(), Seen::Known(status));
    }

    fn pod(mut self, member: &str, role: Role) -> Self {
        let pod = Pod {
            uid: format!("pod-{member}"),
            owned: true,
            token: Some("token".into()),
            cluster_id: self.observed.cluster_id,
            version: Some("3.6.16".into()),
            image: "etcd:v3.6.16".into(),
            changed: None,
            flags: ["ETCD_MAX_LEARNERS".to_owned()].into(),
            snapshot_count: None,
            readyz: true,
            spec_hash: Some("hash".into()),
            difference: member::Difference::default(),
            initial: [].into(),
            joins: false,
            durable: false,
            terminating: false,
            failed: false,
            addressed: true,
            running: true,
            running_since: Some(at(0)),
            ready: true,
            restarts: 0,
            role: Some(role),
            trouble: None,
            unready_since: None,
            lost_since: None,
            ending: None,
            node: None,
            created: at(i64::from(member.as_bytes()[0])),
        };
        self.observed.pods.insert(member.into(), pod);
        self
    }

    fn with_pod(mut self, member: &str, mend: impl FnOnce(&mut Pod)) -> Self {
        mend(self.observed.pods.get_mut(member).unwrap());
        self
    }

    pub(crate) fn size(mut self, size: usize) -> Self {
        self.desired.size = size;
        self
    }

    pub(crate) fn leader(mut self, member: &str) -> Self {
        for seen in self.observed.statuses.values_mut() {
            if let Seen::Known(status) = seen {
                status.leader = Some(id(member));
            }
        }
        self
    }

    pub(crate) fn version(mut self, version: &str) -> Self {
        for seen in self.observed.statuses.values_mut() {
            if let Seen::Known(status) = seen {
                status.version = version.into();
            }
        }
        self
    }

    pub(crate) fn asks_for_volumes(mut self) -> Self {
        self.desired.durable = true;
        self.desired.object.spec.pod = Some(with_volumes());
        self
    }

    /// Puts the data of every member on a PVC.
    pub(crate) fn durable(mut self) -> Self {
        self = self.asks_for_volumes();
        for (member, pod) in &mut self.observed.pods {
            pod.durable = true;
            let disk = disk(member, self.observed.cluster_id);
            self.observed.disks.insert(member.clone(), disk);
        }
        self
    }

    /// Adds the member's Service, without the annotation `started`.
    pub(crate) fn reserved(mut self, member: &str) -> Self {
        let service = Service {
            uid: format!("service-{member}"),
            resource_version: "5".into(),
            owned: true,
            started: false,
            renewed: false,
            drifted: false,
            closed: false,
            created: at(i64::from(member.as_bytes()[0])),
        };
        self.observed.services.insert(member.into(), service);
        self
    }

    pub(crate) fn marked(mut self, member: &str) -> Self {
        self.observed.services.get_mut(member).unwrap().started = true;
        self
    }

    /// Adds the member to etcd's list as a learner that has never started.
    pub(crate) fn added(mut self, member: &str) -> Self {
        self.enlist(member, true, false);
        self
    }

    /// Adds a learner that runs and has caught up.
    pub(crate) fn learner(mut self, member: &str) -> Self {
        self = self
            .reserved(member)
            .marked(member)
            .pod(member, Role::Learner);
        self.enlist(member, true, true);
        self.answers(member);
        self
    }

    pub(crate) fn behind(mut self, member: &str) -> Self {
        if let Some(Seen::Known(status)) = self.observed.statuses.get_mut(member) {
            status.raft_applied_index = 50;
        }
        self
    }

    /// Adds a pod and a Service of a member that is not in etcd's list.
    pub(crate) fn leftover(self, member: &str) -> Self {
        self.reserved(member)
            .marked(member)
            .pod(member, Role::Voter)
    }

    /// Sets the creation time of all pods to 100 s before the plan.
    pub(crate) fn aged(mut self) -> Self {
        for pod in self.observed.pods.values_mut() {
            pod.created = at(900);
        }
        self
    }

    /// The same scene two seconds after the plan has drained its members.
    pub(crate) fn drained(&self) -> Self {
        let mut scene = self.clone();
        for write in self.writes() {
            if let Write::LabelPod(label) = write
                && let Some(Role::Busy { .. }) = label.role
                && let Some(pod) = scene.observed.pods.get_mut(&label.member)
            {
                pod.role = Some(Role::Busy { since: at(998) });
            }
        }
        scene
    }

    pub(crate) fn plan(&self) -> Plan {
        sent::read(self.built(), &self.desired, &self.observed)
    }

    /// The plan as the planner returns it.
    pub(crate) fn built(&self) -> crate::plan::Plan {
        plan(&self.desired, &self.observed, &Letters, at(1000))
    }

    /// Builds actions for this state.
    pub(crate) fn build(&self) -> Builder<'_> {
        Builder {
            desired: &self.desired,
            observed: &self.observed,
            now: at(1000),
        }
    }

    /// All writes to Kubernetes, chain by chain.
    pub(crate) fn writes(&self) -> Vec<Write> {
        self.plan().step.chains.concat()
    }

    /// The membership change, without the record on the PVC that precedes a removal.
    pub(crate) fn changes(&self) -> Vec<Write> {
        let mut writes = self.all_changes();
        writes.retain(|write| !matches!(write, Write::NoteRemoval { .. }));
        writes
    }

    /// The membership change, with the record on the PVC that precedes a removal.
    pub(crate) fn all_changes(&self) -> Vec<Write> {
        let change = self.plan().step.change;
        change.map(|change| change.chain).unwrap_or_default()
    }

    pub(crate) fn waits(&self) -> Vec<Reason> {
        self.plan()
            .waiting_for
            .iter()
            .map(|waiting| waiting.reason)
            .collect()
    }
}

fn disk(member: &str, cluster_id: Option<ClusterId>) -> Disk {
    Disk {
        resource_version: "1".into(),
        removal: None,
        uid: format!("disk-{member}"),
        owned: true,
        token: Some("token".into()),
        cluster_id,
        version: Some("3.6.16".into()),
        image: None,
        served: None,
        initial: [].into(),
        retention: crate::snapshot::RetentionNotes::default(),
        terminating: false,
        lost: false,
        claim: crate::snapshot::Claim::default(),
    }
}

/// Names of new members: the first is `n`, the next is `o`, and so on.
pub(crate) struct Letters;

impl Names for Letters {
    fn member(&self, index: u64) -> String {
        char::from(b'n' + u8::try_from(index).unwrap()).to_string()
    }

    fn token(&self, _: u64) -> String {
        "new".into()
    }
}

/// The number of bootstrap members that the plan records, and the resourceVersion precondition of the record.
pub(crate) fn begun(chains: &[Chain]) -> Option<(usize, &str)> {
    chains.iter().flatten().find_map(|write| match write {
        Write::RecordIntent {
            intent,
            cluster_id: None,
            over,
        } if intent.token == Letters.token(0) => Some((intent.members.len(), over.as_str())),
        _ => None,
    })
}

/// For each new Service that the plan creates for a future member: true if the Service has no endpoints yet.
pub(crate) fn reserved(chains: &[Chain]) -> Vec<bool> {
    let writes = chains.iter().flatten();
    let closed = writes.filter_map(|write| match write {
        Write::CreateService {
            started: false,
            closed,
            ..
        } => Some(*closed),
        _ => None,
    });
    closed.collect()
}

pub(crate) fn begins_recovery(scene: &Scene) -> bool {
    let known = scene.observed.recovery.record.as_ref();
    scene.writes().iter().any(|write| match write {
        Write::RecordRecovery(record) => record.begins(known),
        _ => false,
    })
}

pub(crate) fn remove(member: &str) -> Write {
    Write::Remove {
        member: member.into(),
        id: id(member),
    }
}

pub(crate) fn promote(member: &str) -> Write {
    Write::Promote {
        member: member.into(),
        id: id(member),
    }
}

pub(crate) fn delete_pod(member: &str) -> Write {
    Write::DeletePod {
        member: member.into(),
        uid: format!("pod-{member}"),
    }
}

pub(crate) fn delete_disk(member: &str) -> Write {
    Write::DeleteDisk {
        member: member.into(),
        uid: format!("disk-{member}"),
    }
}

pub(crate) fn makes_pod(write: &Write, member: &str) -> bool {
    matches!(write, Write::CreatePod(start) if start.member == member)
}

/// The pod settings of members with volumes.
fn with_volumes() -> PodPolicy {
    let spec = serde_json::json!({ "persistentVolumeClaimSpec": { "accessModes": ["ReadWriteOnce"],
        "resources": { "requests": { "storage": "1Gi" } } } });
    serde_json::from_value(spec).unwrap()
}

/// An EtcdCluster without volumes.
fn object() -> EtcdCluster {
    let spec = serde_json::json!({ "size": 3, "version": "3.6.16", "repository": "etcd" });
    let mut object = EtcdCluster::new("db", serde_json::from_value(spec).unwrap());
    object.metadata.namespace = Some("prod".into());
    object.metadata.uid = Some("uid".into());
    object
}

pub(crate) fn creates_pod(action: &Action, member: &str) -> bool {
    matches!(&action.request, Request::Create(Object::Pod(pod)) if pod.name_any() == member)
}

pub(crate) fn is_service(write: &Write, member: &str) -> bool {
    matches!(write, Write::CreateService { member: of, .. } if of == member)
}
