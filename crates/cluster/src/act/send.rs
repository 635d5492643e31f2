//! Each write as one request.

use api::EtcdCluster;
use api::cluster::{BootstrapStatus, RecoveryStatus};
use api::names;
use api::version::EtcdVersion;
use etcd::ClusterId;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, Service, Volume,
};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Patch, PatchParams};
use kube::{Api, Resource, ResourceExt};
use runtime::apply::{self, Created, Deleted};
use runtime::member::{self, Member, Members, Seed, Source};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;

use crate::act::{Actor, Error, LONGEST};
use crate::observe::parse_cluster_id;
use crate::observed::{Intent, Observed, Role};
use crate::write::{Label, Start, State, Write};

/// Field manager of what only the status can say: token, first members, cluster ID. It is not that of the
/// report, so that no report, however old, can take them out.
const MANAGER_IDENTITY: &str = "etcd-operator-identity";

/// By how much the revision of a recovered cluster is raised: more than the lost members can have been ahead of the
/// survivor, so that no revision a client has seen means another write. What etcd advises for restores.
const LOST_REVISIONS: u64 = 1_000_000_000;

/// What only the status can say.
struct Identity {
    intent: Intent,
    cluster_id: Option<ClusterId>,
    recovery: Option<RecoveryStatus>,
    stale_approval: Option<String>,
}

/// How long a pod gets that is not worth waiting for, in seconds. Zero would be by force.
const HURRIED: u32 = 1;

impl Actor<'_> {
    /// Sends one write. `via` are the client URLs of the members to ask. A Service's new version is returned.
    pub(super) async fn write(
        &self,
        write: &Write,
        via: &[String],
    ) -> Result<Option<String>, Error> {
        if self.since.elapsed() > LONGEST {
            return Err(Error::TooOld);
        }
        match write {
            Write::RecordIntent {
                intent,
                cluster_id,
                over,
            } => {
                let record = Identity {
                    intent: intent.clone(),
                    cluster_id: *cluster_id,
                    ..self.identity()
                };
                self.record(record, over).await
            }
            Write::RecordClusterId { cluster_id, over } => {
                let record = Identity {
                    cluster_id: Some(*cluster_id),
                    ..self.identity()
                };
                self.record(record, over).await
            }
            Write::RecordRecovery(record) => {
                let mut identity = self.identity();
                if let Some((intent, cluster_id)) = &record.formed {
                    identity.intent = intent.clone();
                    identity.cluster_id = Some(*cluster_id);
                }
                identity.recovery.clone_from(&record.recovery);
                identity.stale_approval.clone_from(&record.stale_approval);
                self.record(identity, &record.over).await
            }
            Write::ApplyHeadless => self.apply(&member::headless_service(&self.members())).await,
            Write::ApplyClient { open } => {
                let mut members = self.members();
                members.cluster_id = open.then_some("");
                self.apply(&member::client_service(&members)).await
            }
            // The smallest number of voters with this quorum.
            Write::ApplyBudget { quorum } => {
                self.apply(&member::disruption_budget(
                    &self.members(),
                    (quorum * 2).saturating_sub(1),
                ))
                .await
            }
            Write::DeleteBudget => {
                let api: Api<PodDisruptionBudget> = self.api();
                let name = names::disruption_budget(&self.cluster.name_any());
                match api
                    .get_opt(&name)
                    .await
                    .map_err(|source| failed("read", "PodDisruptionBudget", &name, source))?
                {
                    Some(seen) => self.removed(apply::delete(&api, &seen, None).await?, &name),
                    None => Ok(None),
                }
            }
            Write::CreateService {
                member,
                started,
                closed,
            } => {
                let mut service = member::member_service(&self.members(), member);
                if *closed {
                    service = member::closed(service);
                }
                if *started {
                    service
                        .annotations_mut()
                        .insert(names::ANNOTATION_STARTED.to_owned(), "true".to_owned());
                }
                self.create(&service).await
            }
            // With its UID: a Service that is gone by now is not made anew under a name that was used.
            Write::OpenService { member, uid } | Write::RepairService { member, uid } => {
                let mut service = member::member_service(&self.members(), member);
                service.metadata.uid = Some(uid.clone());
                self.apply(&service).await
            }
            Write::MarkService {
                member,
                started,
                over,
            } => self.mark(member, *started, over.as_deref()).await,
            Write::DeleteService { member, uid } => self.delete::<Service>(member, uid, None).await,
            Write::CreateDisk(start) => match self.claim(start) {
                Some(claim) => self.create(&claim).await,
                None => Ok(None),
            },
            Write::DeleteDisk { member, uid } => {
                self.delete::<PersistentVolumeClaim>(member, uid, None)
                    .await
            }
            Write::CreatePod(start) => self.create(&self.pod(start).await?).await,
            Write::DeletePod { member, uid } => self.delete::<Pod>(member, uid, None).await,
            Write::HurryPod { member, uid } => self.delete::<Pod>(member, uid, Some(HURRIED)).await,
            Write::LabelPod(label) => self.label::<Pod>(label).await,
            Write::LabelDisk(label) => self.label::<PersistentVolumeClaim>(label).await,
            Write::AddMember { .. }
            | Write::Promote { .. }
            | Write::Remove { .. }
            | Write::MoveLeader { .. } => self.change_members(write, via).await.map(|()| None),
        }
    }

    async fn change_members(&self, write: &Write, via: &[String]) -> Result<(), Error> {
        let answer = match write {
            Write::AddMember { member, learner } => {
                let url = self.members().addresses().peer_url(member);
                match self.etcd.add_member(via, &[url], *learner).await {
                    // An earlier addition whose answer was lost.
                    Err(etcd::Error::PeerUrlExists) => Ok(()),
                    answer => answer.map(|_| ()),
                }
            }
            Write::Promote { id, .. } => self.etcd.promote_member(via, *id).await,
            Write::Remove { id, .. } => match self.etcd.remove_member(via, *id).await {
                Err(etcd::Error::MemberNotFound) => Ok(()),
                answer => answer,
            },
            Write::MoveLeader { from, id, .. } => {
                self.etcd.move_leader(&self.client_url(from), *id).await
            }
            _ => Ok(()),
        };
        answer.map_err(|source| Error::Etcd {
            what: write.to_string(),
            source,
        })
    }

    /// The builder's input for this cluster.
    pub(super) fn members(&self) -> Members<'_> {
        let status = self.cluster.status.as_ref();
        let cluster_id = status.and_then(|status| status.cluster_id.as_deref());
        let token = self
            .observed
            .intent
            .as_ref()
            .map_or("", |intent| intent.token.as_str());
        self.members_of(token, cluster_id)
    }

    /// The same for a member of a cluster with this token and ID.
    fn members_of<'b>(&'b self, token: &'b str, cluster_id: Option<&'b str>) -> Members<'b> {
        // The namespace of an object that was read is always there.
        let namespace = self
            .cluster
            .metadata
            .namespace
            .as_deref()
            .unwrap_or_default();
        Members::of(self.cluster, namespace, token, cluster_id)
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(
            self.client.clone(),
            &self.cluster.namespace().unwrap_or_default(),
        )
    }

    /// What is recorded now. A record is always written whole: what its manager leaves out is taken out.
    fn identity(&self) -> Identity {
        let Observed {
            intent,
            cluster_id,
            recovery,
            ..
        } = self.observed;
        Identity {
            intent: intent.clone().unwrap_or_else(no_intent),
            cluster_id: *cluster_id,
            recovery: recovery.record.clone(),
            stale_approval: recovery.stale_approval.clone(),
        }
    }

    /// Invariant 10, and invariant 11: written only over the version that was read.
    async fn record(&self, identity: Identity, over: &str) -> Result<Option<String>, Error> {
        let Identity {
            intent,
            cluster_id,
            recovery,
            stale_approval,
        } = identity;
        let bootstrap = BootstrapStatus {
            token: intent.token,
            members: intent.members.into_iter().collect(),
        };
        let name = self.cluster.name_any();
        let mut status = json!({ "bootstrap": bootstrap });
        if let Some(id) = cluster_id {
            status["clusterID"] = json!(id.to_string());
        }
        if let Some(recovery) = recovery {
            status["recovery"] = json!(recovery);
        }
        if let Some(approval) = stale_approval {
            status["staleApproval"] = json!(approval);
        }
        let body = json!({
            "apiVersion": EtcdCluster::api_version(&()),
            "kind": EtcdCluster::kind(&()),
            "metadata": { "name": name, "uid": self.cluster.uid(), "resourceVersion": over },
            "status": status,
        });
        let params = PatchParams::apply(MANAGER_IDENTITY).force();
        let written = self
            .api::<EtcdCluster>()
            .patch_status(&name, &params, &Patch::Apply(&body))
            .await;
        written
            .map(|_| None)
            .map_err(|source| patched("EtcdCluster", &name, source))
    }

    async fn apply<K>(&self, object: &K) -> Result<Option<String>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Serialize
            + DeserializeOwned
            + Clone
            + Debug,
    {
        let applied = apply::apply(&self.api(), names::MANAGER_CLUSTER, object).await?;
        Ok(applied.resource_version())
    }

    async fn create<K>(&self, object: &K) -> Result<Option<String>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Serialize
            + DeserializeOwned
            + Clone
            + Debug,
    {
        match apply::create(&self.api(), names::MANAGER_CLUSTER, object).await? {
            Created::New(created) if K::kind(&()) == "Service" => Ok(created.resource_version()),
            Created::New(_) => Ok(None),
            Created::Exists => Err(Error::Exists {
                what: what::<K>(&object.name_any()),
            }),
        }
    }

    async fn delete<K>(
        &self,
        name: &str,
        uid: &str,
        grace_seconds: Option<u32>,
    ) -> Result<Option<String>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + DeserializeOwned
            + Clone
            + Debug
            + Default,
    {
        let mut seen = K::default();
        seen.meta_mut().name = Some(name.to_owned());
        seen.meta_mut().uid = Some(uid.to_owned());
        let api = self.api::<K>();
        self.removed(apply::delete(&api, &seen, grace_seconds).await?, name)
    }

    fn removed(&self, deleted: Deleted, name: &str) -> Result<Option<String>, Error> {
        match deleted {
            Deleted::Accepted | Deleted::Gone => Ok(None),
            Deleted::Changed => Err(Error::Changed {
                what: format!("{name} in {}", self.cluster.name_any()),
            }),
        }
    }

    async fn mark(
        &self,
        member: &str,
        started: bool,
        over: Option<&str>,
    ) -> Result<Option<String>, Error> {
        let value = if started { json!("true") } else { Value::Null };
        let mut metadata = json!({ "annotations": { names::ANNOTATION_STARTED: value } });
        if let Some(over) = over {
            metadata["resourceVersion"] = json!(over);
        }
        self.merge::<Service>(member, metadata).await
    }

    async fn label<K>(&self, label: &Label) -> Result<Option<String>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + DeserializeOwned
            + Clone
            + Debug,
    {
        let mut annotations = json!({ names::ANNOTATION_CLUSTER_TOKEN: label.token });
        if let Some(id) = label.cluster_id {
            annotations[names::ANNOTATION_CLUSTER_ID] = json!(id.to_string());
        }
        let mut metadata = json!({
            "uid": label.uid,
            "annotations": annotations,
            "ownerReferences": [apply::owner_reference(self.cluster)],
        });
        if let Some(role) = label.role {
            let token = names::token_label(&label.token);
            metadata["labels"] =
                json!({ names::LABEL_ROLE: role_of(role).label(), names::LABEL_TOKEN: token });
        }
        self.merge::<K>(&label.member, metadata).await.map(|_| None)
    }

    async fn merge<K>(&self, name: &str, metadata: Value) -> Result<Option<String>, Error>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + DeserializeOwned
            + Clone
            + Debug,
    {
        let params = PatchParams {
            field_manager: Some(names::MANAGER_CLUSTER.to_owned()),
            ..PatchParams::default()
        };
        let patch = json!({ "metadata": metadata });
        let patched_object = self
            .api::<K>()
            .patch(name, &params, &Patch::Merge(&patch))
            .await;
        patched_object
            .map(|object| object.resource_version())
            .map_err(|source| patched(&K::kind(&()), name, source))
    }

    fn claim(&self, start: &Start) -> Option<PersistentVolumeClaim> {
        let cluster_id = start.cluster_id.map(|id| id.to_string());
        let members = self.members_of(&start.token, cluster_id.as_deref());
        let mut claim = member::volume_claim(&members, &start.member)?;
        let annotations = claim.annotations_mut();
        annotations.insert(names::ANNOTATION_VERSION.to_owned(), start.version.clone());
        if start.state == State::New {
            // A first member's disk tells who the others were, also when pods and status are lost.
            let first: Vec<&str> = start.initial.iter().map(String::as_str).collect();
            annotations.insert(names::ANNOTATION_FIRST_MEMBERS.to_owned(), first.join(","));
        }
        Some(claim)
    }

    async fn pod(&self, start: &Start) -> Result<Pod, Error> {
        let version = EtcdVersion::parse(&start.version).map_err(|source| Error::Version {
            member: start.member.clone(),
            source,
        })?;
        let cluster_id = start.cluster_id.map(|id| id.to_string());
        let members = self.members_of(&start.token, cluster_id.as_deref());
        let how = match start.state {
            State::FromSurvivor => return self.seed(start, &members, &version).await,
            State::New => member::Start::Bootstrap {
                members: start.initial.iter().cloned().collect(),
            },
            State::Join => member::Start::Join {
                initial_cluster: members
                    .addresses()
                    .initial_cluster(start.initial.iter().map(String::as_str)),
            },
            State::OnDisk => member::Start::OnDisk,
        };
        let one = Member {
            name: &start.member,
            version: &version,
            role: role_of(start.role),
            start: how,
        };
        let mut pod = member::pod(&members, &one);
        if start.durable {
            on_its_disk(&mut pod, &start.member);
        }
        Ok(pod)
    }

    /// A pod that takes its data from the survivor the status names.
    async fn seed(
        &self,
        start: &Start,
        members: &Members<'_>,
        version: &EtcdVersion,
    ) -> Result<Pod, Error> {
        let missing = |why: &str| Error::Missing(why.to_owned());
        let record = self.observed.recovery.record.as_ref();
        let record = record.ok_or_else(|| missing("no recovery is recorded"))?;
        let from = parse_cluster_id(&record.from_cluster_id);
        let from = from.ok_or_else(|| missing("status.recovery.fromClusterID is no cluster ID"))?;
        let operator = self.image.get().await.map_err(Error::Missing)?;
        let url = members.addresses().client_url(&record.survivor);
        let seed = Seed {
            member: &start.member,
            version,
            source: Source::member(&url, from, record.revision),
            bump_revision: (version.minor() >= (3, 6)).then_some(LOST_REVISIONS),
        };
        let mut pod = member::seed_pod(members, seed, operator);
        if start.durable {
            on_its_disk(&mut pod, &start.member);
        }
        Ok(pod)
    }
}

/// A member that has a disk keeps it, whatever the spec says by now.
fn on_its_disk(pod: &mut Pod, member: &str) {
    let volumes = pod
        .spec
        .iter_mut()
        .flat_map(|spec| spec.volumes.iter_mut().flatten());
    for volume in volumes.filter(|volume| volume.name == names::VOLUME_DATA) {
        *volume = Volume {
            name: names::VOLUME_DATA.to_owned(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: member.to_owned(),
                read_only: None,
            }),
            ..Volume::default()
        };
    }
}

fn role_of(role: Role) -> member::Role {
    match role {
        Role::Voter => member::Role::Voter,
        Role::Learner => member::Role::Learner,
    }
}

fn no_intent() -> Intent {
    Intent {
        token: String::new(),
        members: std::collections::BTreeSet::new(),
    }
}

fn what<K: Resource<DynamicType = ()>>(name: &str) -> String {
    format!("{} {name}", K::kind(&()))
}

fn failed(verb: &'static str, kind: &str, name: &str, source: kube::Error) -> Error {
    Error::Api(apply::Error::Api {
        verb,
        kind: kind.to_owned(),
        name: name.to_owned(),
        source: Box::new(source),
    })
}

/// A patch over another version, or of another object of the same name, is a lost race.
fn patched(kind: &str, name: &str, source: kube::Error) -> Error {
    match source {
        kube::Error::Api(status) if status.code == 409 || status.code == 404 => Error::Changed {
            what: format!("{kind} {name}"),
        },
        source => failed("patch", kind, name, source),
    }
}
