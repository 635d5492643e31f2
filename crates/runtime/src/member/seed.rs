//! A seed member's pod: a member's pod with a container before etcd's that fetches a snapshot, from an object store or
//! from another member, and leaves the program `etcd-restore-operator` for etcd's own container. That one begins with
//! the program, which makes the data directory with the etcd image's own tool and then becomes etcd; where the directory
//! is there it becomes etcd at once. What the program does stands in the crate `restore`.
//!
//! One container more in a row would cost its start, and up to a second until the kubelet sees that the one before it
//! has ended.
//!
//! Pure: built from values, read from values. The restore operator makes seeds from backups, the cluster operator
//! makes one from the survivor of a lost quorum.

use std::path::PathBuf;

use api::names;
use api::version::EtcdVersion;
use etcd::{ClusterId, KeyHash};
use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, Pod, PodSpec, SecretVolumeSource, Volume, VolumeMount,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Member, Members, Role, Start, data_mount, pod};

/// Name of the container that fetches.
pub const FETCH: &str = "fetch";

/// Below what no mount of a user's may begin with.
const TOOLS: &str = "/var/etcd-tools";
const CLIENT_TLS: &str = "/run/seed/client-tls";
const PROGRAM: &str = "/var/etcd-tools/etcd-restore-operator";

/// The image the operators run from; its program prepares a seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorImage {
    /// The image.
    pub image: String,
    /// When it is pulled.
    pub pull_policy: Option<String>,
}

/// From where a seed's first container fetches: what depends on it in the pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Source {
    /// Arguments of `seed fetch`. They name places and Secrets and hold no credentials (invariant 14).
    pub arguments: Vec<String>,
    /// What the container needs to see.
    pub mounts: Vec<VolumeMount>,
    /// What the pod needs for that.
    pub volumes: Vec<Volume>,
}

impl Source {
    /// From a member that runs, over etcd's Maintenance API. The container refuses another cluster's member, and a
    /// snapshot older than `revision`.
    pub fn member(client_url: &str, cluster_id: ClusterId, revision: i64) -> Self {
        Self {
            arguments: vec![
                format!("--member={client_url}"),
                format!("--cluster-id={cluster_id}"),
                format!("--revision={revision}"),
            ],
            ..Self::default()
        }
    }

    /// The same, with the client certificate that the member asks for. Only the container that fetches sees it.
    #[must_use]
    pub fn with_identity(mut self, secret: &str) -> Self {
        let name = "seed-client-tls";
        self.arguments.push(format!("--client-tls={CLIENT_TLS}"));
        self.mounts.push(VolumeMount {
            name: name.to_owned(),
            mount_path: CLIENT_TLS.to_owned(),
            read_only: Some(true),
            ..VolumeMount::default()
        });
        self.volumes.push(Volume {
            name: name.to_owned(),
            secret: Some(SecretVolumeSource {
                secret_name: Some(secret.to_owned()),
                default_mode: Some(0o440),
                // The member must be able to start again long after the Secret was deleted.
                optional: Some(true),
                items: None,
            }),
            ..Volume::default()
        });
        self
    }
}

/// What a seed is made from.
#[derive(Clone, Debug)]
pub struct Seed<'a> {
    /// The member's name.
    pub member: &'a str,
    /// The version of the server, and of the tool that makes its data directory.
    pub version: &'a EtcdVersion,
    /// Where its data comes from.
    pub source: Source,
    /// By how much the revision is raised, with everything below marked as compacted; etcd 3.6 and later.
    pub bump_revision: Option<u64>,
}

/// What a snapshot is, as found by reading it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Contents {
    /// The revision an etcd that is started from it serves.
    pub revision: i64,
    /// Bytes of the snapshot.
    pub size: u64,
    /// SHA-256 of the snapshot, in hexadecimal.
    pub sha256: String,
    /// etcd's own hash of the keys, where it is known what an etcd that is started from it must answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<KeyHash>,
    /// The backup it was fetched from; absent if a member was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<Origin>,
}

/// The backup that a seed's data was made from, as recorded on the volume beside the data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Origin {
    /// The place, as SHA-256 of the block that names it, in hexadecimal: a termination message has little room.
    pub place: String,
    /// By how much its revision was raised; 0 if it was not.
    pub bump_revision: u64,
}

/// With what a seed's data directory is made: the first argument of `seed start`, as JSON. What follows it is etcd's
/// command, unchanged, so that whoever reads a pod's flags finds etcd's and no others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Making {
    /// The image's own etcdutl, or etcdctl before etcd 3.5.
    pub tool: PathBuf,
    /// Name of the seed member.
    pub name: String,
    /// Peer URL of the seed member.
    #[serde(rename = "peerURL")]
    pub peer_url: String,
    /// Token of the new cluster.
    pub token: String,
    /// By how much to raise the revision; everything below is marked as compacted. etcd 3.6 and later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bump_revision: Option<u64>,
}

/// The termination message of a seed's program. Where it goes on as etcd it leaves none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "camelCase")]
pub enum Report {
    /// It worked.
    Done(Contents),
    /// It did not.
    Failed {
        /// The condition's reason.
        reason: String,
        /// What and how to put it right.
        message: String,
    },
}

impl Report {
    /// Reads a termination message; `None` for one that another program wrote.
    pub fn read(message: &str) -> Option<Self> {
        serde_json::from_str(message).ok()
    }
}

/// The pod of a seed member. `members` carries the token of the cluster that begins with it.
pub fn seed_pod(members: &Members<'_>, seed: Seed<'_>, operator: &OperatorImage) -> Pod {
    let member = Member {
        name: seed.member,
        version: seed.version,
        role: Role::Voter,
        // Never `new`: without the restored data etcd must not come up as an empty cluster (invariant 6).
        start: Start::OnDisk,
    };
    let mut pod = pod(members, &member);
    if let Some(spec) = pod.spec.as_mut() {
        let mut first = vec![fetch_container(spec, &seed, operator)];
        first.extend(spec.init_containers.take().unwrap_or_default());
        spec.init_containers = Some(first);
        if let Some(etcd) = spec.containers.first_mut() {
            begin_with_the_program(etcd, members, &seed);
        }
        let volumes = spec.volumes.get_or_insert_default();
        volumes.push(Volume {
            name: names::VOLUME_TOOLS.to_owned(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        });
        volumes.extend(seed.source.volumes);
    }
    pod
}

fn fetch_container(pod: &PodSpec, seed: &Seed<'_>, operator: &OperatorImage) -> Container {
    let source = &seed.source;
    let mut args = vec![
        "seed".to_owned(),
        "fetch".to_owned(),
        format!("--copy-to={PROGRAM}"),
    ];
    args.extend(source.arguments.iter().cloned());
    args.extend(
        seed.bump_revision
            .map(|bump| format!("--bump-revision={bump}")),
    );
    let mut mounts = vec![data_mount(), tools(false)];
    mounts.extend(source.mounts.iter().cloned());
    let etcd = pod.containers.first().cloned().unwrap_or_default();
    Container {
        name: FETCH.to_owned(),
        image: Some(operator.image.clone()),
        image_pull_policy: operator.pull_policy.clone(),
        command: Some(vec!["/usr/local/bin/etcd-restore-operator".to_owned()]),
        args: Some(args),
        volume_mounts: Some(mounts),
        resources: etcd.resources,
        security_context: etcd.security_context,
        termination_message_policy: Some("File".to_owned()),
        ..Container::default()
    }
}

/// The same image as the server: the same minor version's tool makes its data directory.
fn begin_with_the_program(etcd: &mut Container, members: &Members<'_>, seed: &Seed<'_>) {
    let tool = if seed.version.has_etcdutl() {
        "/usr/local/bin/etcdutl"
    } else {
        "/usr/local/bin/etcdctl"
    };
    let making = Making {
        tool: tool.into(),
        name: seed.member.to_owned(),
        peer_url: members.addresses().peer_url(seed.member),
        token: members.token.to_owned(),
        bump_revision: seed.bump_revision,
    };
    let mut args = vec![
        "seed".to_owned(),
        "start".to_owned(),
        serde_json::to_string(&making).unwrap_or_default(),
    ];
    args.extend(etcd.command.take().unwrap_or_default());
    args.extend(etcd.args.take().unwrap_or_default());
    etcd.command = Some(vec![PROGRAM.to_owned()]);
    etcd.args = Some(args);
    etcd.volume_mounts.get_or_insert_default().push(tools(true));
}

fn tools(read_only: bool) -> VolumeMount {
    VolumeMount {
        name: names::VOLUME_TOOLS.to_owned(),
        mount_path: TOOLS.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

/// The name of the seed member a restore makes: it follows from the restore's UID, so that two processes, or one after a
/// crash, choose the same.
pub fn seed_name(cluster: &str, restore: &str) -> String {
    let digest = Sha256::digest(restore);
    let mut random = [0; names::MEMBER_SUFFIX];
    random.copy_from_slice(&digest[..names::MEMBER_SUFFIX]);
    names::member_name(cluster, random)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Fixture;
    use super::*;

    fn built(version: &str, bump_revision: Option<u64>) -> Pod {
        built_of(&Fixture::durable().version(version), bump_revision)
    }

    fn built_of(fixture: &Fixture, bump_revision: Option<u64>) -> Pod {
        let members = fixture.members();
        let seed = Seed {
            member: "db-aaaaaaaaaa",
            version: &fixture.version,
            source: Source::member("http://db-b.prod.svc:2379", ClusterId(0xabc), 42),
            bump_revision,
        };
        let operator = OperatorImage {
            image: "operator:1".into(),
            pull_policy: None,
        };
        seed_pod(&members, seed, &operator)
    }

    fn fetch_arguments(pod: &Pod) -> Vec<String> {
        let spec = pod.spec.as_ref().unwrap();
        let first = &spec.init_containers.as_ref().unwrap()[0];
        first.args.clone().unwrap()
    }

    fn etcd_arguments(pod: &Pod) -> Vec<String> {
        pod.spec.as_ref().unwrap().containers[0]
            .args
            .clone()
            .unwrap()
    }

    fn making(pod: &Pod) -> Making {
        serde_json::from_str(&etcd_arguments(pod)[2]).unwrap()
    }

    #[test]
    fn a_seed_from_a_member_is_told_whom_to_ask_and_what_to_refuse() {
        let pod = built("3.6.16", None);
        assert_eq!(
            fetch_arguments(&pod)[3..],
            [
                "--member=http://db-b.prod.svc:2379",
                "--cluster-id=abc",
                "--revision=42"
            ]
        );
        assert_eq!(making(&pod).token, "token");
    }

    /// What the cluster operator reads of a member's flags it finds in a seed's, and nothing else.
    #[test]
    fn a_seed_becomes_the_member_that_any_other_pod_of_it_is() {
        let fixture = Fixture::durable();
        let member = Member {
            name: "db-aaaaaaaaaa",
            version: &fixture.version,
            role: Role::Voter,
            start: Start::OnDisk,
        };
        let ordinary = pod(&fixture.members(), &member).spec.unwrap();
        let ordinary = &ordinary.containers[0];
        let seed = built(&fixture.version.to_string(), None).spec.unwrap();
        assert_eq!(seed.containers.len(), 1);
        assert_eq!(seed.init_containers.unwrap().len(), 1);
        let seed = &seed.containers[0];
        let command = [
            ordinary.command.clone().unwrap(),
            ordinary.args.clone().unwrap(),
        ];
        assert_eq!(seed.args.as_ref().unwrap()[3..], command.concat());
        assert!(!seed.args.as_ref().unwrap()[..3].concat().contains("--"));
        assert_eq!(seed.command, Some(vec![PROGRAM.to_owned()]));
        assert_eq!((&seed.image, &seed.env), (&ordinary.image, &ordinary.env));
        let mut mounts = ordinary.volume_mounts.clone().unwrap();
        mounts.push(tools(true));
        assert_eq!(seed.volume_mounts, Some(mounts));
    }

    #[test]
    fn the_revision_is_raised_where_that_is_asked_for() {
        let with = built("3.6.16", Some(1_000));
        let fetch = fetch_arguments(&with);
        assert!(
            fetch.contains(&"--bump-revision=1000".to_owned()),
            "{fetch:?}"
        );
        assert_eq!(making(&with).bump_revision, Some(1_000));
        let without = built("3.5.35", None);
        let all = [fetch_arguments(&without), etcd_arguments(&without)].concat();
        assert!(!all.iter().any(|one| one.contains("bump")), "{all:?}");
    }

    /// Invariant 20: what a member asks of its clients is shown to it, and to nobody else.
    #[test]
    fn only_the_container_that_fetches_from_a_member_sees_the_client_certificate() {
        let fixture = Fixture::durable();
        let from = Source::member("https://db-b.prod.svc:2379", ClusterId(1), 1);
        let seed = Seed {
            member: "db-aaaaaaaaaa",
            version: &fixture.version,
            source: from.with_identity("operator"),
            bump_revision: None,
        };
        let operator = OperatorImage {
            image: "operator:1".into(),
            pull_policy: None,
        };
        let spec = seed_pod(&fixture.members(), seed, &operator).spec.unwrap();
        let mut all = spec.init_containers.unwrap();
        all.extend(spec.containers);
        for container in all {
            let mounts = container.volume_mounts.unwrap_or_default();
            let mounted = mounts.iter().any(|mount| mount.mount_path == CLIENT_TLS);
            assert_eq!(mounted, container.name == FETCH, "{}", container.name);
        }
    }

    /// A recorded spec may be older than the rule that refuses it.
    #[test]
    fn a_seed_gets_no_variable_of_an_owned_flag() {
        let json = r#"{"pod":{"etcdEnv":[{"name":"ETCD_FORCE_NEW_CLUSTER","value":"true"},{"name":"GOGC","value":"50"}]}}"#;
        let spec = built_of(&Fixture::with(json), None).spec.unwrap();
        let all = spec.init_containers.into_iter().flatten();
        let variables = all.chain(spec.containers).filter_map(|one| one.env);
        let names: Vec<String> = variables.flatten().map(|one| one.name).collect();
        assert!(names.contains(&"GOGC".to_owned()), "{names:?}");
        assert!(
            !names.contains(&"ETCD_FORCE_NEW_CLUSTER".to_owned()),
            "{names:?}"
        );
    }

    /// Invariant 6: without the restored data etcd does not come up as an empty cluster.
    #[test]
    fn invariant_6_a_seed_from_a_member_is_never_started_as_a_new_cluster() {
        let pod = built("3.6.16", None);
        let etcd = etcd_arguments(&pod);
        assert!(etcd.contains(&"--initial-cluster-state=existing".to_owned()));
    }
}
