//! Actions that create the pod and the PVC of a member.

use std::collections::BTreeSet;

use api::names;
use api::problem::Chain;
use api::version::{EtcdVersion, VersionError};
use etcd::ClusterId;
use k8s_openapi::api::core::v1::{PersistentVolumeClaimVolumeSource, Pod, Volume};
use kube::ResourceExt;
use member::{self, Member, Members, Seed, Source};

use super::{Builder, action};
use crate::action::{Action, Object, Request, StartPart, Undo};
use crate::plan::Explanation;
use crate::plan::view::name_of;
use crate::reason::Reason;
use crate::snapshot::{Role, Seen};

/// How a member's etcd starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// `--initial-cluster-state=new`: allowed only within the recorded bootstrap (invariant 6).
    New,
    /// `--initial-cluster-state=existing`, with all members in the list that etcd returned for the addition.
    Join,
    /// The member ran before, and its disk contains its data. If the data is missing, the member must not start.
    OnDisk,
    /// The member starts a new cluster with the data of the survivor that `status.recovery` names. The pod copies the
    /// data before etcd starts.
    FromSurvivor,
}

/// A member to start, with the properties of its PVC and its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// Name of the member, its pod, its PVC and its Service.
    pub member: String,
    /// How the member's etcd starts, and from which data.
    pub state: State,
    /// The members in `--initial-cluster`, including the member itself.
    pub initial: BTreeSet<String>,
    /// The role label of the pod.
    pub role: Role,
    /// True if the data is on a PVC.
    pub durable: bool,
    /// The etcd version of the member.
    pub version: String,
    /// The cluster token.
    pub token: String,
    /// The cluster ID; `None` until etcd has reported it.
    pub cluster_id: Option<ClusterId>,
}

/// How much a recovery increases the revision, as etcd recommends for restores. The recovered cluster therefore never
/// reuses a revision of the old cluster that a client has seen.
const LOST_REVISIONS: u64 = 1_000_000_000;

impl Builder<'_> {
    /// The last actions of a start: create the PVC (only for a member on a volume), and then the pod.
    pub(crate) fn create_volume_and_pod(&self, start: &Start) -> Result<Vec<Action>, Explanation> {
        let volume = start.durable.then(|| self.create_volume(start));
        volume.into_iter().chain([self.create_pod(start)]).collect()
    }

    /// Creates the PVC of a new member, without an Event. The action fails if the PVC exists.
    pub(crate) fn create_volume(&self, start: &Start) -> Result<Action, Explanation> {
        let claim = self.volume_claim(start)?;
        Ok(Action {
            start: Some(StartPart::Follow(Undo::IfNotDone)),
            ..action(
                "before-create-disk",
                None,
                format!("create the PersistentVolumeClaim of {}", start.member),
                Request::Create(claim),
            )
        })
    }

    /// Creates the pod of a member. The action fails if the pod exists.
    pub(crate) fn create_pod(&self, start: &Start) -> Result<Action, Explanation> {
        let pod = self.pod(start)?;
        // If the pod of a member with a PVC cannot be created, the annotation `started` stays on the Service, because a
        // later plan creates the pod.
        let part = match start.state {
            State::OnDisk if start.durable => Some(StartPart::Return(start.member.clone())),
            _ if start.durable => None,
            _ => Some(StartPart::Follow(Undo::IfNotDone)),
        };
        Ok(Action {
            start: part,
            ..action(
                "before-create-pod",
                Some((Reason::MemberStarted, "Start")),
                format!("create the pod of {}", start.member),
                Request::Create(pod),
            )
        })
    }

    fn volume_claim(&self, start: &Start) -> Result<Object, Explanation> {
        let cluster_id = start.cluster_id.map(|id| id.to_string());
        let members = self.members_of(&start.token, cluster_id.as_deref());
        let claim = member::volume_claim(&members, &start.member);
        let mut claim = claim.ok_or_else(|| {
            let text =
                "a new member needs a volume, but spec.pod.persistentVolumeClaimSpec is not set: set it";
            Explanation::new(Reason::InvalidSpec, text)
        })?;
        if self.desired.object.spec.retains_volumes() {
            // Invariant 35: a retained PVC has no owner, not even at its creation.
            claim.metadata.owner_references = None;
        }
        let image = self.image(start, &version_of(start)?);
        let annotations = claim.annotations_mut();
        annotations.insert(names::ANNOTATION_VERSION.to_owned(), start.version.clone());
        if image.contains('@') {
            annotations.insert(names::ANNOTATION_IMAGE.to_owned(), image);
        }
        if start.state == State::New {
            // The PVC of each first member records the names of all first members, so that these names survive the loss
            // of all pods and of the status.
            let first: Vec<&str> = start.initial.iter().map(String::as_str).collect();
            annotations.insert(names::ANNOTATION_FIRST_MEMBERS.to_owned(), first.join(","));
        }
        Ok(Object::VolumeClaim(Box::new(claim)))
    }

    fn pod(&self, start: &Start) -> Result<Object, Explanation> {
        let version = version_of(start)?;
        let cluster_id = start.cluster_id.map(|id| id.to_string());
        let members = self.members_of(&start.token, cluster_id.as_deref());
        let one = |start_of| Member {
            name: &start.member,
            version: &version,
            role: role_of(start.role),
            start: start_of,
        };
        let mut pod = match start.state {
            State::FromSurvivor => self.seed(start, &members, &version)?,
            State::New => {
                let first = start.initial.iter().cloned().collect();
                member::pod(&members, &one(member::Start::Bootstrap { members: first }))
            }
            State::Join => {
                let initial_cluster = self.initial_cluster(start, &members);
                member::pod(&members, &one(member::Start::Join { initial_cluster }))
            }
            State::OnDisk => member::pod(&members, &one(member::Start::OnDisk)),
        };
        member::set_image(&mut pod, self.image(start, &version));
        if start.durable {
            on_its_volume(&mut pod, &start.member);
        }
        self.note_trust(&mut pod);
        Ok(Object::Pod(Box::new(pod)))
    }

    /// The image of a member that starts. It is the first of these images that is known: the image that the member's
    /// PVC records for this version, the image in the spec, and the image of another member with this version.
    ///
    /// Invariant 26: for the version in the spec, the image on the PVC counts only if a ready pod has the same image,
    /// because an interrupted change or other software may have recorded an unused image. If a rollout has stopped, a
    /// member that loses its pod thus gets the former image, with which unchanged members run. For any other version,
    /// the image on the PVC always counts, because after a failed upgrade, the spec names only the image of the new
    /// version.
    fn image(&self, start: &Start, version: &EtcdVersion) -> String {
        let spec = &self.desired.object.spec;
        let is_same = |noted: &Option<String>| noted.as_ref() == Some(&start.version);
        let disk = self.observed.disks.get(&start.member);
        let recorded = disk.filter(|disk| is_same(&disk.version));
        let pods = || self.observed.pods.values();
        let of_others = || {
            let pod = pods().find(|pod| is_same(&pod.version));
            pod.map(|pod| pod.image.clone())
        };
        let is_of_spec = EtcdVersion::parse(&spec.version).is_ok_and(|own| own == *version);
        let runs = |image: &String| pods().any(|pod| pod.ready && pod.image == *image);
        recorded
            .and_then(|disk| disk.image.clone())
            .filter(|image| !is_of_spec || runs(image))
            .or_else(|| spec.image_for(version))
            .or_else(of_others)
            .unwrap_or_else(|| spec.image_of(version))
    }

    /// The value of `--initial-cluster`. The peer URLs come from etcd's member list, because etcd compares its flag
    /// with that list.
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

    /// Builds a pod that copies the data of the survivor named in the status.
    fn seed(
        &self,
        start: &Start,
        members: &Members<'_>,
        version: &EtcdVersion,
    ) -> Result<Pod, Explanation> {
        let no_recovery = |why: &str| no_seed(Reason::RecoveryFailed, why);
        let record = self.observed.recovery.record.as_ref();
        let record = record.ok_or_else(|| no_recovery("status.recovery is missing"))?;
        let from = record.from_cluster_id.parse::<ClusterId>();
        let from =
            from.map_err(|_| no_recovery("status.recovery.fromClusterID is not a cluster ID"))?;
        let operator = match &self.observed.operator_image {
            Seen::Known(image) => image,
            Seen::Unknown(why) => return Err(no_seed(Reason::OperatorImageUnknown, why)),
        };
        let url = members.addresses().client_url(&record.survivor);
        let mut source = Source::member(&url, from, record.revision);
        let tls = self.desired.object.spec.tls.as_ref();
        if let Some(secret) = tls.and_then(|tls| tls.operator_secret_of(members.cluster)) {
            source = source.with_identity(&secret);
        }
        let seed = Seed {
            member: &start.member,
            version,
            source,
            bump_revision: (version.minor() >= (3, 6)).then_some(LOST_REVISIONS),
        };
        Ok(member::seed_pod(members, seed, operator))
    }

    /// Annotates a pod with the certificate authorities that its etcd reads at the start.
    fn note_trust(&self, pod: &mut Pod) {
        let certificates = &self.observed.certificates;
        if let Some(trust) = certificates.trust() {
            let annotations = pod.annotations_mut();
            annotations.insert(names::ANNOTATION_TRUST.to_owned(), trust);
        }
        if let Some(authorities) = certificates.authorities_now() {
            let annotations = pod.annotations_mut();
            let authorities = authorities.to_string();
            annotations.insert(names::ANNOTATION_AUTHORITIES.to_owned(), authorities);
        }
    }
}

/// Mounts the member's existing PVC, even if the spec no longer asks for PVCs.
fn on_its_volume(pod: &mut Pod, member: &str) {
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

fn version_of(start: &Start) -> Result<EtcdVersion, Explanation> {
    EtcdVersion::parse(&start.version).map_err(|error| no_version(&start.member, &error))
}

/// The problem of a member whose etcd version cannot be parsed.
pub(super) fn no_version(member: &str, error: &VersionError) -> Explanation {
    let text = format!("cannot build the pod of {member}: {}", Chain(error));
    Explanation::new(Reason::InvalidSpec, text)
}

fn no_seed(reason: Reason, why: &str) -> Explanation {
    let text = format!("the seed of the recovery is not created: {why}");
    Explanation::new(reason, text)
}
