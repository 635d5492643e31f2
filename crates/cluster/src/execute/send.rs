//! Each write as one request.

mod access;
mod build;
mod certificates;
mod membership;
mod patch;
mod record;
mod settings;
mod switch;
mod upkeep;
mod versions;

use api::names;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Resource, ResourceExt};
use runtime::apply::{self, Created, Deleted};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;

use crate::execute::{Actor, Error, LONGEST};
use crate::write::Write;

impl Actor<'_> {
    /// Sends one write. `via` are the client URLs of the members to ask. A Service's new version is returned.
    pub(super) async fn write(
        &self,
        write: &Write,
        via: &[String],
    ) -> Result<Option<String>, Error> {
        self.in_time()?;
        match write {
            Write::RecordIntent { .. }
            | Write::RecordClusterId { .. }
            | Write::RecordRecovery(_) => self.record(write).await,
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
            Write::DeleteBudget => self.delete_budget().await,
            Write::Access(write) => self.access(*write).await,
            Write::CreateService { .. }
            | Write::OpenService { .. }
            | Write::RepairService { .. }
            | Write::MarkService { .. }
            | Write::RenewMark { .. }
            | Write::DeleteService { .. } => self.member_service(write).await,
            Write::CreateDisk(start) => match self.claim(start) {
                Some(claim) => self.create(&claim).await,
                None => Ok(None),
            },
            Write::RecordTls { record, over } => self.record_tls(record, over).await,
            Write::GrowDisk { .. }
            | Write::RecordDefragmentation { .. }
            | Write::Defragment { .. }
            | Write::Compact { .. }
            | Write::Disarm { .. } => self.keep_up(write).await,
            Write::DeleteDisk { member, uid } => {
                self.delete::<PersistentVolumeClaim>(member, uid).await
            }
            Write::CreatePod(start) => {
                let pod = self.pod(start).await?;
                // A seed's asks for the operator's image first, for as long as it takes.
                self.in_time()?;
                self.create(&pod).await
            }
            Write::DeletePod { member, uid } => self.delete::<Pod>(member, uid).await,
            Write::PatchImage { .. } | Write::SettleImage { .. } | Write::NoteVersion { .. } => {
                self.change_version(write).await
            }
            Write::NoteRemoval {
                member,
                over,
                removal,
            } => self.note_removal(member, over, *removal).await,
            Write::PatchMetadata { .. } | Write::ResizePod { .. } => {
                self.change_in_place(write).await
            }
            Write::Certificate(write) => self.certificate(write).await,
            Write::LabelPod(label) => self.label::<Pod>(label).await,
            Write::LabelDisk(label) => self.label::<PersistentVolumeClaim>(label).await,
            Write::AddMember { .. }
            | Write::UpdatePeerUrls { .. }
            | Write::Promote { .. }
            | Write::Remove { .. }
            | Write::MoveLeader { .. }
            | Write::Downgrade { .. } => self.change_members(write, via).await.map(|()| None),
        }
    }

    /// Invariant 11.
    fn in_time(&self) -> Result<(), Error> {
        if self.since.elapsed() > LONGEST {
            return Err(Error::TooOld);
        }
        Ok(())
    }

    /// Takes the mark back that this chain has set, however old the look is by now: only over the version that the same
    /// chain wrote. As long as a Service is marked and there is nothing of its member, nobody else starts that member, or
    /// marks it once more before (a seed, the second of two voters), so the mark's going says what is true (invariant 6)
    /// whoever leads by then.
    pub(super) async fn take_back(&self, undo: &Write) -> Result<(), Error> {
        match undo {
            Write::MarkService {
                member,
                started: false,
                over: Some(over),
            } => self.mark(member, false, Some(over)).await.map(drop),
            _ => Ok(()),
        }
    }

    async fn delete_budget(&self) -> Result<Option<String>, Error> {
        let api: Api<PodDisruptionBudget> = self.api();
        let name = names::disruption_budget(&self.cluster.name_any());
        match api
            .get_opt(&name)
            .await
            .map_err(|source| failed("read", "PodDisruptionBudget", &name, source))?
        {
            // One that is somebody else's by now is left alone.
            Some(seen) if !self.is_of_others(seen.meta()) => {
                self.removed(apply::delete(&api, &seen, None).await?, &name)
            }
            _ => Ok(None),
        }
    }

    fn is_of_others(&self, metadata: &ObjectMeta) -> bool {
        let uid = self.cluster.uid().unwrap_or_default();
        crate::observe::is_of_others(metadata, &self.cluster.name_any(), &uid)
    }

    /// A write to the Service of one member.
    async fn member_service(&self, write: &Write) -> Result<Option<String>, Error> {
        match write {
            Write::CreateService {
                member,
                started,
                closed,
            } => {
                let service = member::member_service(&self.members(), member);
                let mut service = member::without_second_port(service);
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
            Write::RenewMark { member, over } => self.renew_mark(member, over).await,
            Write::DeleteService { member, uid } => self.delete::<Service>(member, uid).await,
            _ => Ok(None),
        }
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

    async fn delete<K>(&self, name: &str, uid: &str) -> Result<Option<String>, Error>
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
        self.removed(apply::delete(&api, &seen, None).await?, name)
    }

    fn removed(&self, deleted: Deleted, name: &str) -> Result<Option<String>, Error> {
        match deleted {
            Deleted::Accepted | Deleted::Gone => Ok(None),
            Deleted::Changed => Err(Error::Changed {
                what: format!("{name} in {}", self.cluster.name_any()),
            }),
        }
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
