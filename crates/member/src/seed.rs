//! The pod of a seed: the first member of a new cluster, which starts from a snapshot. The restore operator creates a
//! seed from a backup, and the cluster operator from a surviving member after the loss of a quorum.
//!
//! An additional init container fetches the snapshot, and copies the program `etcd-restore-operator` to a shared
//! volume. The etcd container runs this program (crate `restore`). The program creates the data directory with the tool
//! in the etcd image, unless the directory exists, and then executes etcd (exec).
//!
//! A second init container for the data directory would delay the start by up to a second, because the kubelet detects
//! the end of a container late. This module performs no I/O.

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

mod store;

pub use store::{ENCRYPTION, REPLAY_REVISION, SHA256, SOURCE};

/// Name of the init container that fetches the snapshot.
pub const FETCH: &str = "fetch";

/// The mount path of the shared volume. Validation rejects mounts of users below this path.
const TOOLS: &str = "/var/etcd-tools";
const CLIENT_TLS: &str = "/run/seed/client-tls";
pub(crate) const PROGRAM: &str = "/var/etcd-tools/etcd-restore-operator";

/// The image of the operators, whose program prepares the data of a seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorImage {
    /// The image with its tag or digest.
    pub image: String,
    /// The pull policy of the image. `None` for the default of Kubernetes.
    pub pull_policy: Option<String>,
}

/// The parts of a seed's pod that depend on the source of the snapshot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Source {
    /// Arguments of `seed fetch`. They contain names of Secrets, but no credentials (invariant 14).
    pub arguments: Vec<String>,
    /// Volume mounts of the init container.
    pub mounts: Vec<VolumeMount>,
    /// The volumes for `mounts`.
    pub volumes: Vec<Volume>,
    /// The recorded changes that the seed replays after the snapshot. `None` for no changes.
    pub replay: Option<Replay>,
}

/// Recorded changes that a seed replays before it serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Replay {
    /// Name of the base in the store: the snapshot after which the changes were recorded.
    pub base: String,
    /// The revision at which the replay ends.
    pub revision: i64,
}

impl Source {
    /// Fetches the snapshot from a running member through the Maintenance API of etcd. The init container fails if the
    /// member has another cluster ID, or if the snapshot is older than `revision`.
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

    /// Adds the client certificate for the member. Only the init container mounts the certificate.
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
                // The Secret is optional, so that a seed with a fetched snapshot can restart after the Secret was
                // deleted.
                optional: Some(true),
                items: None,
            }),
            ..Volume::default()
        });
        self
    }
}

/// The seed member.
#[derive(Clone, Debug)]
pub struct Seed<'a> {
    /// The name of the seed.
    pub member: &'a str,
    /// The version of etcd, and of the tool that creates the data directory.
    pub version: &'a EtcdVersion,
    /// The source of the snapshot.
    pub source: Source,
    /// If set, the restore raises the revision by this number, and marks all older revisions as compacted. Requires
    /// etcd 3.6.
    pub bump_revision: Option<u64>,
}

/// The description of the snapshot in the report of the container `fetch`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Contents {
    /// The revision that etcd serves after the restore.
    pub revision: i64,
    /// Size of the snapshot in bytes.
    pub size: u64,
    /// SHA-256 of the snapshot, in hexadecimal.
    pub sha256: String,
    /// The hash of the keys (HashKV) that etcd must report after the restore. `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<KeyHash>,
    /// Number of keys that etcd must serve after the restore. `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<i64>,
    /// The backup with the snapshot. `None` if the snapshot is from a member.
    #[serde(default, rename = "of", skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// The provenance of a seed's data, which is stored on the volume next to the data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Origin {
    /// SHA-256 of the storage block of the backup, in hexadecimal. The block itself could exceed the maximum size of a
    /// termination message.
    #[serde(rename = "place")]
    pub location_hash: String,
    /// The number by which the restore has raised the revision, or 0.
    pub bump_revision: u64,
    /// True if the restore accepted only an encrypted backup. `None` for data from an earlier release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
    /// The revision up to which recorded changes are replayed after the backup. `None` for no changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replayed_revision: Option<i64>,
}

/// The settings for the data directory of a seed, which are the first argument of `seed start`, as JSON. The arguments
/// after it are the command of etcd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DataDirectorySettings {
    /// Path of etcdutl in the etcd image, or of etcdctl before etcd 3.5.
    pub tool: PathBuf,
    /// Name of the seed member.
    pub name: String,
    /// Peer URL of the seed member.
    #[serde(rename = "peerURL")]
    pub peer_url: String,
    /// Token of the new cluster.
    pub token: String,
    /// If set, the restore raises the revision by this number, and marks all older revisions as compacted. Requires
    /// etcd 3.6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bump_revision: Option<u64>,
    /// The recorded changes that are replayed before etcd serves. `None` for no changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<Replay>,
}

/// The termination message of the program in a seed's pod. After the program has executed etcd, the message is from
/// etcd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "camelCase")]
pub enum Report {
    /// The snapshot was fetched. Contains its description.
    Done(Contents),
    /// The program has failed.
    Failed {
        /// The reason for the condition.
        reason: String,
        /// The problem and its remedy, as a message for users.
        message: String,
    },
}

impl Report {
    /// Parses a termination message. `None` if the message is not from this program.
    pub fn read(message: &str) -> Option<Self> {
        serde_json::from_str(message).ok()
    }
}

/// The pod of a seed. `members` contains the token of the new cluster.
pub fn seed_pod(members: &Members<'_>, seed: Seed<'_>, operator: &OperatorImage) -> Pod {
    let member = Member {
        name: seed.member,
        version: seed.version,
        role: Role::Voter,
        // Invariant 6: `--initial-cluster-state` is never `new`, because etcd must not form an empty cluster if the
        // restored data is missing.
        start: Start::OnDisk,
    };
    let mut pod = pod(members, &member);
    if let Some(spec) = pod.spec.as_mut() {
        let mut first = vec![fetch_container(spec, &seed, operator)];
        first.extend(spec.init_containers.take().unwrap_or_default());
        spec.init_containers = Some(first);
        if let Some(etcd) = spec.containers.first_mut() {
            start_with_program(etcd, members, &seed);
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
    let bump = seed
        .bump_revision
        .map(|bump| format!("--bump-revision={bump}"));
    let etcd = pod.containers.first().cloned().unwrap_or_default();
    Container {
        resources: etcd.resources,
        security_context: etcd.security_context,
        ..fetching(&seed.source, bump, operator)
    }
}

/// The container that fetches the snapshot, without resources and security context.
pub(crate) fn fetching(
    source: &Source,
    bump: Option<String>,
    operator: &OperatorImage,
) -> Container {
    let mut args = vec![
        "seed".to_owned(),
        "fetch".to_owned(),
        format!("--copy-to={PROGRAM}"),
    ];
    args.extend(source.arguments.iter().cloned());
    args.extend(bump);
    let mut mounts = vec![data_mount(), tools(false)];
    mounts.extend(source.mounts.iter().cloned());
    Container {
        name: FETCH.to_owned(),
        image: Some(operator.image.clone()),
        image_pull_policy: operator.pull_policy.clone(),
        command: Some(vec!["/usr/local/bin/etcd-restore-operator".to_owned()]),
        args: Some(args),
        volume_mounts: Some(mounts),
        termination_message_policy: Some("File".to_owned()),
        ..Container::default()
    }
}

/// Runs the program before etcd, in the etcd image. The tool that creates the data directory therefore has the version
/// of etcd.
fn start_with_program(etcd: &mut Container, members: &Members<'_>, seed: &Seed<'_>) {
    let settings = DataDirectorySettings {
        tool: tool(seed.version),
        name: seed.member.to_owned(),
        peer_url: members.addresses().peer_url(seed.member),
        token: members.token.to_owned(),
        bump_revision: seed.bump_revision,
        replay: seed.source.replay.clone(),
    };
    let mut args = vec![
        "seed".to_owned(),
        "start".to_owned(),
        serde_json::to_string(&settings).unwrap_or_default(),
    ];
    args.extend(etcd.command.take().unwrap_or_default());
    args.extend(etcd.args.take().unwrap_or_default());
    etcd.command = Some(vec![PROGRAM.to_owned()]);
    etcd.args = Some(args);
    etcd.volume_mounts.get_or_insert_default().push(tools(true));
}

/// The path of the tool in the etcd image that creates a data directory.
pub(crate) fn tool(version: &EtcdVersion) -> PathBuf {
    let path = if version.has_etcdutl() {
        "/usr/local/bin/etcdutl"
    } else {
        "/usr/local/bin/etcdctl"
    };
    path.into()
}

/// The mount of the shared volume with the program.
pub(crate) fn tools(read_only: bool) -> VolumeMount {
    VolumeMount {
        name: names::VOLUME_TOOLS.to_owned(),
        mount_path: TOOLS.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

/// The name of the seed of a restore. It depends only on the cluster name and the UID of the EtcdRestore, so every
/// operator process uses the same name.
pub fn seed_name(cluster: &str, restore: &str) -> String {
    let digest = Sha256::digest(restore);
    let mut random = [0; names::MEMBER_SUFFIX];
    random.copy_from_slice(&digest[..names::MEMBER_SUFFIX]);
    names::member_name(cluster, random)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

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

    fn settings(pod: &Pod) -> DataDirectorySettings {
        serde_json::from_str(&etcd_arguments(pod)[2]).unwrap()
    }

    #[test]
    fn seed_from_member_gets_url_cluster_id_and_revision() {
        let pod = built("3.6.16", None);
        assert_eq!(
            fetch_arguments(&pod)[3..],
            [
                "--member=http://db-b.prod.svc:2379",
                "--cluster-id=abc",
                "--revision=42"
            ]
        );
        assert_eq!(settings(&pod).token, "token");
    }

    /// The cluster operator reads flags from pods, so a seed has exactly the flags of any other member.
    #[test]
    fn seed_has_same_etcd_flags_as_ordinary_member() {
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
    fn seed_increases_revision_only_if_requested() {
        let with = built("3.6.16", Some(1_000));
        let fetch = fetch_arguments(&with);
        assert!(
            fetch.contains(&"--bump-revision=1000".to_owned()),
            "{fetch:?}"
        );
        assert_eq!(settings(&with).bump_revision, Some(1_000));
        let without = built("3.5.35", None);
        let all = [fetch_arguments(&without), etcd_arguments(&without)].concat();
        assert!(!all.iter().any(|one| one.contains("bump")), "{all:?}");
    }

    /// Invariant 20: only the container that connects to a member mounts a client certificate.
    #[test]
    fn only_fetch_container_mounts_client_certificate() {
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

    /// The spec in a manifest may be older than the validation, and contain variables of flags that the operator sets.
    #[test]
    fn seed_omits_variables_for_flags_that_operator_sets() {
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

    /// Invariant 6: if the restored data is missing, etcd does not start as an empty cluster.
    #[test]
    fn invariant_6_seed_never_starts_as_new_cluster() {
        let pod = built("3.6.16", None);
        let etcd = etcd_arguments(&pod);
        assert!(etcd.contains(&"--initial-cluster-state=existing".to_owned()));
    }
}
