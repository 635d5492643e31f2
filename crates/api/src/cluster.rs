//! `EtcdCluster`: a cluster of etcd members.

mod access;
mod check;
mod flags;
mod join;
mod options;
mod peers;
mod pod;
mod status;
mod tls;
mod upkeep;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

pub use access::{Auth, NetworkAccess, ROOT_USER};
pub use check::{not_in_effect, unsafe_to_ignore, validate};
pub(crate) use check::{store_in_effect, validate_spec};
pub use flags::{
    OWNED_FLAGS, TYPED_FLAGS, flag_of_env, is_flag, refused_argument, refused_variable,
};
pub use options::{
    AutoCompactionMode, BootstrapMode, ClientServicePolicy, ClientServiceType, ClusterBackup,
    DisruptionBudgetPolicy, EtcdOptions, MemberAddress, MemberReplacement, Recovery,
    RecoveryPolicy, ServicesPolicy,
};
pub use peers::{PeerListener, PeerStage};
pub use pod::{ImagePullPolicy, PodPolicy};
pub use status::{
    BootstrapStatus, CertificatesStatus, ClusterPhase, EtcdClusterStatus, LastBackup, MemberRole,
    MemberStatus, MembersStatus, RecoveryApproval, RecoveryPhase, RecoveryStatus, ReplacedStatus,
    TlsStatus,
};
pub use tls::{GeneratedTls, KeyNames, MemberTls, StaticTls, TlsPolicy, peers_of};
pub use upkeep::{
    AlarmStatus, DEFAULT_MIN_FREE_BYTES, DEFAULT_QUOTA_BYTES, Defragmentation,
    DefragmentationCause, DefragmentationStatus, MemberDefragmentation, NoSpace, NoSpacePolicy,
    Upkeep,
};

use crate::duration::DurationText;
use crate::schema::is_false;
use crate::version::{DEFAULT_REPOSITORY, DEFAULT_VERSION};

/// Fewest members of a cluster.
pub const MIN_SIZE: i32 = 1;
/// Most members of a cluster.
pub const MAX_SIZE: i32 = 7;
/// How long a member may be down on a dead node before it is replaced, in seconds.
pub const DEFAULT_REPLACE_AFTER_SECONDS: u64 = 60;
/// How long the volume of a member is kept that someone else removed from etcd, unless the spec says otherwise.
pub const DEFAULT_KEEP_VOLUMES_SECONDS: u64 = 3600;
/// How long quorum must have been lost before a recovery acts without a person, in seconds.
pub const DEFAULT_RECOVER_AFTER_SECONDS: u64 = 60;

/// What an EtcdCluster should be.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "etcd.database.coreos.com",
    version = "v1beta2",
    kind = "EtcdCluster",
    plural = "etcdclusters",
    shortname = "etcd",
    namespaced,
    doc = "EtcdCluster is a cluster of etcd members.",
    status = "EtcdClusterStatus",
    derive = "PartialEq",
    scale(
        spec_replicas_path = ".spec.size",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Size", type_ = "integer", json_path = ".spec.size", description = "Wanted members"),
    printcolumn(name = "Members", type_ = "integer", json_path = ".status.size", description = "Members of the etcd cluster"),
    printcolumn(name = "Version", type_ = "string", json_path = ".status.currentVersion", description = "Version that runs"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Available",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Available\")].status",
        description = "Whether a quorum answers"
    ),
    printcolumn(
        name = "State",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Degraded\")].reason",
        description = "AsDesired, or what is wrong: the reason of the condition Degraded"
    ),
    printcolumn(name = "Leader", type_ = "string", json_path = ".status.leader", priority = 1),
    printcolumn(name = "Next", type_ = "string", json_path = ".status.nextStep", priority = 1),
    printcolumn(name = "Waiting for", type_ = "string", json_path = ".status.waitingFor", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("oldSelf.hasValue() || self.metadata.name.size() <= 52")
        .message("metadata.name must have at most 52 characters, since member names add 11 and Service names end at 63: choose a shorter name")
        .optional_old_self(true),
    validation = Rule::new("oldSelf.hasValue() || self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name must be a DNS-1035 label, since Services are named after it: use lower-case letters, digits and dashes, and begin with a letter")
        .optional_old_self(true)
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.hibernate) || !self.hibernate || (has(self.pod) && has(self.pod.persistentVolumeClaimSpec))",
    "spec.hibernate needs members with volumes, else stopping them loses the data: set spec.pod.persistentVolumeClaimSpec or remove spec.hibernate"
))]
#[x_kube(validation = (
    "!has(self.etcd) || !has(self.pod) || !has(self.pod.etcdEnv) || !self.pod.etcdEnv.exists(env, (env.name == 'ETCD_QUOTA_BACKEND_BYTES' && has(self.etcd.quotaBackendBytes)) || (env.name == 'ETCD_AUTO_COMPACTION_MODE' && has(self.etcd.autoCompactionMode)) || (env.name == 'ETCD_AUTO_COMPACTION_RETENTION' && has(self.etcd.autoCompactionRetention)) || (env.name == 'ETCD_HEARTBEAT_INTERVAL' && has(self.etcd.heartbeatInterval)) || (env.name == 'ETCD_ELECTION_TIMEOUT' && has(self.etcd.electionTimeout)) || (env.name == 'ETCD_SNAPSHOT_COUNT' && has(self.etcd.snapshotCount)) || (env.name == 'ETCD_MAX_REQUEST_BYTES' && has(self.etcd.maxRequestBytes)))",
    "spec.pod.etcdEnv may not set an option that spec.etcd sets, too: remove that variable"
))]
pub struct EtcdClusterSpec {
    /// Wanted number of members, 1 to 7. An odd number is advised: an even one tolerates no more failures
    /// than the odd one below it.
    #[serde(default = "default_size")]
    #[schemars(range(min = 1, max = 7))]
    #[x_kube(validation = ("self >= 1 && self <= 7", "spec.size must be 1 to 7: use 3 or 5, or 1 for tests"))]
    pub size: i32,
    /// Version of etcd, such as `3.7.3`. A leading `v` is accepted. 3.4 to 3.7 are supported and tested.
    #[serde(default = "default_version")]
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = (
        "self.matches('^v*[0-9]+\\\\.[0-9]+\\\\.[0-9]+(-[0-9A-Za-z.-]+)?$')",
        "spec.version must be a full version such as 3.7.3: give major, minor and patch number, not a tag such as latest"
    ))]
    pub version: String,
    /// Repository of the image, which is `<repository>:v<version>`.
    #[serde(default = "default_repository")]
    #[schemars(length(min = 1, max = 255))]
    pub repository: String,
    /// Change nothing, but go on reporting.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// How the first members are started: all together (`Parallel`), or one, which the others join (`Seed`).
    #[serde(default)]
    pub bootstrap: BootstrapMode,
    /// How members are reached: `Service` (a Service per member) or `Pod` (names of pods under the headless
    /// Service). Without it the operator chooses; it chooses `Service` unless given certificates only
    /// cover names of pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_address: Option<MemberAddress>,
    /// Stop all members and keep their volumes; false brings the same cluster back.
    #[serde(default, skip_serializing_if = "is_false")]
    pub hibernate: bool,
    /// The members' pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodPolicy>,
    /// TLS between members, clients and the operator.
    #[serde(default, rename = "TLS", skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsPolicy>,
    /// The Services of the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub services: Option<ServicesPolicy>,
    /// The PodDisruptionBudget of the voters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_disruption_budget: Option<DisruptionBudgetPolicy>,
    /// When a member that is down is replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_replacement: Option<MemberReplacement>,
    /// What happens when quorum is lost for good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
    /// Options of etcd itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdOptions>,
    /// Upkeep of the members' databases: what is done about full ones, and when they are defragmented.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upkeep: Option<Upkeep>,
    /// Credentials for a cluster with authentication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<Auth>,
    /// A NetworkPolicy for the members. Without it there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkAccess>,
    /// Keep the cluster backed up, by schedule and retention, to one place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<ClusterBackup>,
}

impl Default for EtcdClusterSpec {
    fn default() -> Self {
        Self {
            size: default_size(),
            version: default_version(),
            repository: default_repository(),
            paused: false,
            bootstrap: BootstrapMode::default(),
            member_address: None,
            hibernate: false,
            pod: None,
            tls: None,
            services: None,
            pod_disruption_budget: None,
            member_replacement: None,
            recovery: None,
            etcd: None,
            upkeep: None,
            auth: None,
            network_policy: None,
            backup: None,
        }
    }
}

impl EtcdClusterSpec {
    /// Whether members keep their data on volumes of their own.
    pub fn is_durable(&self) -> bool {
        self.pod
            .as_ref()
            .is_some_and(|pod| pod.persistent_volume_claim_spec.is_some())
    }

    /// How members are reached.
    pub fn member_address(&self) -> MemberAddress {
        self.member_address
            .clone()
            .unwrap_or(MemberAddress::Service)
    }

    /// `spec.pod.ClusterDomain`, or an empty text.
    pub fn cluster_domain(&self) -> &str {
        self.pod
            .as_ref()
            .and_then(|pod| pod.cluster_domain.as_deref())
            .unwrap_or_default()
    }

    /// Whether the voters get a PodDisruptionBudget.
    pub fn has_disruption_budget(&self) -> bool {
        self.pod_disruption_budget
            .as_ref()
            .is_none_or(|budget| budget.enabled)
    }

    /// Whether the members get a NetworkPolicy.
    pub fn has_network_policy(&self) -> bool {
        self.network_policy
            .as_ref()
            .is_some_and(|access| access.enabled)
    }

    /// How long a member may be down on a dead node before it is replaced.
    pub fn replace_after(&self) -> std::time::Duration {
        self.member_replacement
            .as_ref()
            .and_then(|replacement| replacement.after.as_ref())
            .and_then(DurationText::parse)
            .unwrap_or(std::time::Duration::from_secs(
                DEFAULT_REPLACE_AFTER_SECONDS,
            ))
    }

    /// How long the volume of a member is kept that someone else removed from etcd.
    pub fn keep_volumes(&self) -> std::time::Duration {
        self.member_replacement
            .as_ref()
            .and_then(|replacement| replacement.keep_volumes.as_ref())
            .and_then(DurationText::parse)
            .unwrap_or(std::time::Duration::from_secs(DEFAULT_KEEP_VOLUMES_SECONDS))
    }

    /// Whether a lost quorum is recovered without a person.
    pub fn recovers_automatically(&self) -> bool {
        let policy = self
            .recovery
            .as_ref()
            .and_then(|recovery| recovery.policy.as_ref());
        policy == Some(&RecoveryPolicy::Automatic)
    }

    /// How long quorum must have been lost before a recovery acts without a person.
    pub fn recover_after(&self) -> std::time::Duration {
        self.recovery
            .as_ref()
            .and_then(|recovery| recovery.after.as_ref())
            .and_then(DurationText::parse)
            .unwrap_or(std::time::Duration::from_secs(
                DEFAULT_RECOVER_AFTER_SECONDS,
            ))
    }
}

impl EtcdCluster {
    /// The conditions of the status, or none.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| status.conditions.as_slice())
    }
}

fn default_size() -> i32 {
    3
}

fn default_version() -> String {
    DEFAULT_VERSION.to_owned()
}

fn default_repository() -> String {
    DEFAULT_REPOSITORY.to_owned()
}
