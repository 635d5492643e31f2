//! The pods and volume claims of members, from what the plan said of them.

use api::names;
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, Volume,
};
use kube::ResourceExt;
use member::{self, Member, Members, Seed, Source};

use crate::execute::{Actor, Error};
use crate::plan::name_of;
use crate::snapshot::Role;
use crate::write::{Start, State};

/// By how much the revision of a recovered cluster is raised: more than the lost members can have been ahead of the
/// survivor, so that no revision a client has seen means another write. What etcd advises for restores.
const LOST_REVISIONS: u64 = 1_000_000_000;

impl Actor<'_> {
    /// The builder's input for this cluster.
    pub(in crate::execute) fn members(&self) -> Members<'_> {
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

    pub(super) fn claim(&self, start: &Start) -> Option<PersistentVolumeClaim> {
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

    pub(super) async fn pod(&self, start: &Start) -> Result<Pod, Error> {
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
                initial_cluster: self.initial_cluster(start, &members),
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
        self.note_trust(&mut pod);
        Ok(pod)
    }

    /// The list a member joins, at the addresses etcd knows: it compares the two, and those of a cluster that began
    /// elsewhere are of another form.
    fn initial_cluster(&self, start: &Start, members: &Members<'_>) -> String {
        let addresses = members.addresses();
        let listed = self.observed.members.known();
        let listed = listed.map_or(&[][..], |list| list.members.as_slice());
        let entry = |name: &String| {
            let known = listed.iter().find(|member| name_of(member) == *name);
            let urls = known.map(|member| member.peer_urls.clone());
            let urls = urls.unwrap_or_else(|| vec![addresses.peer_url(name)]);
            let entries = urls.iter().map(|url| format!("{name}={url}"));
            entries.collect::<Vec<_>>()
        };
        let entries: Vec<String> = start.initial.iter().flat_map(entry).collect();
        entries.join(",")
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
        let from = record.from_cluster_id.parse().ok();
        let from = from.ok_or_else(|| missing("status.recovery.fromClusterID is no cluster ID"))?;
        let operator = self.image.get().await.map_err(Error::Missing)?;
        let url = members.addresses().client_url(&record.survivor);
        let mut source = Source::member(&url, from, record.revision);
        let tls = self.cluster.spec.tls.as_ref();
        if let Some(secret) = tls.and_then(|tls| tls.operator_secret_of(members.cluster)) {
            source = source.with_identity(&secret);
        }
        let seed = Seed {
            member: &start.member,
            version,
            source,
            bump_revision: (version.minor() >= (3, 6)).then_some(LOST_REVISIONS),
        };
        let mut pod = member::seed_pod(members, seed, operator);
        if start.durable {
            on_its_disk(&mut pod, &start.member);
        }
        self.note_trust(&mut pod);
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

pub(super) fn role_of(role: Role) -> member::Role {
    match role {
        Role::Voter | Role::Busy { .. } => member::Role::Voter,
        Role::Learner => member::Role::Learner,
    }
}
