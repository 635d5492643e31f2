//! `EtcdCluster`: a cluster of etcd members.

mod access;
mod advice;
mod before_changes;
mod cert_manager;
mod check;
mod flags;
mod grpc_proxy;
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
pub use advice::Advice;
pub use before_changes::{
    BEFORE_CHANGES, BackupRequestStatus, BeforeChangeStatus, ClusterChange,
    DEFAULT_BEFORE_CHANGES_MAX_AGE_SECONDS, LastBackup, MAX_CLOCK_SKEW, backup_waiver,
    earliest_backup, how_to_waive_backup,
};
pub use cert_manager::{CertManagerTls, IssuedCertificate, IssuerRef, PrivateKeyOptions};
pub(crate) use check::{can_restore_from, validate_spec};
pub use check::{not_in_effect, unsafe_to_ignore, validate};
pub use flags::{
    OWNED_FLAGS, TYPED_FLAGS, flag_of_env, is_flag, refused_argument, refused_variable,
};
pub use grpc_proxy::{DEFAULT_PROXY_REPLICAS, GrpcProxy};
pub use options::{
    AutoCompactionMode, BootstrapMode, ClientServicePolicy, ClientServiceType, ClusterBackup,
    ClusterDeletionPolicy, DisruptionBudgetPolicy, EtcdFlag, EtcdOptions, MemberAddress,
    MemberReplacement, Recovery, RecoveryPolicy, ServicesPolicy,
};
pub use peers::{PeerListener, PeerStage};
pub use pod::{ImagePullPolicy, PodPolicy};
pub use status::{
    BootstrapStatus, CertificatesStatus, ClusterPhase, EtcdClusterStatus, LastError, MemberRole,
    MemberStatus, MembersStatus, RaftLogStatus, RecoveryApproval, RecoveryPhase, RecoveryStatus,
    ReplacedStatus, TlsStatus,
};
pub use tls::{GeneratedTls, KeyNames, MemberTls, StaticTls, TlsPolicy, peers_of};
pub use upkeep::{
    AlarmStatus, DEFAULT_MIN_FREE_BYTES, DEFAULT_QUOTA_BYTES, Defragmentation,
    DefragmentationCause, DefragmentationStatus, MemberDefragmentation, NoSpace, NoSpacePolicy,
    Upkeep,
};

use crate::duration::DurationText;
use crate::schema::is_false;
use crate::version::{DEFAULT_REPOSITORY, DEFAULT_VERSION, EtcdVersion};

/// The minimum of `spec.size`.
pub const MIN_SIZE: i32 = 1;
/// The maximum of `spec.size`.
pub const MAX_SIZE: i32 = 7;
/// The default of `spec.memberReplacement.after`, in seconds.
pub const DEFAULT_REPLACE_AFTER_SECONDS: u64 = 60;
/// The default of `spec.memberReplacement.keepVolumes`, in seconds.
pub const DEFAULT_KEEP_VOLUMES_SECONDS: u64 = 3600;
/// The default of `spec.recovery.keepVolumes`, in seconds.
pub const DEFAULT_KEEP_RECOVERED_SECONDS: u64 = 3600;
/// The default of `spec.recovery.after`, in seconds.
pub const DEFAULT_RECOVER_AFTER_SECONDS: u64 = 60;

/// Desired state of an EtcdCluster.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "etcd.database.coreos.com",
    version = "v1beta2",
    kind = "EtcdCluster",
    plural = "etcdclusters",
    shortname = "etcd",
    category = "etcds",
    namespaced,
    doc = "EtcdCluster is a cluster of etcd members.",
    status = "EtcdClusterStatus",
    derive = "PartialEq",
    scale(
        spec_replicas_path = ".spec.size",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Size", type_ = "integer", json_path = ".spec.size", description = "Desired number of members"),
    printcolumn(name = "Healthy", type_ = "integer", json_path = ".status.healthyMembers", description = "Healthy members"),
    printcolumn(name = "Version", type_ = "string", json_path = ".status.currentVersion", description = "Running version"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether the actual state of the cluster matches the spec"
    ),
    printcolumn(
        name = "State",
        type_ = "string",
        json_path = ".status.state",
        description = "Ready, or the reason why the condition Ready is false"
    ),
    printcolumn(
        name = "Available",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Available\")].status",
        description = "Whether a quorum of members is healthy",
        priority = 1
    ),
    printcolumn(name = "Members", type_ = "integer", json_path = ".status.size", description = "Members of the etcd cluster", priority = 1),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase", priority = 1),
    printcolumn(name = "Leader", type_ = "string", json_path = ".status.leader", priority = 1),
    printcolumn(name = "Next", type_ = "string", json_path = ".status.nextStep", priority = 1),
    printcolumn(name = "Waiting for", type_ = "string", json_path = ".status.waitingFor", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("oldSelf.hasValue() || self.metadata.name.size() <= 52")
        .message("metadata.name must have at most 52 characters, because member names add 11 and Service names have at most 63: choose a shorter name")
        .optional_old_self(true),
    validation = Rule::new("oldSelf.hasValue() || self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name must be a DNS-1035 label, because Service names contain it: use lowercase letters, digits and dashes, and begin with a letter")
        .optional_old_self(true)
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = (
    "!has(self.hibernate) || !self.hibernate || (has(self.pod) && has(self.pod.persistentVolumeClaimSpec))",
    "spec.hibernate needs members with volumes, because members without volumes lose their data when they stop: set spec.pod.persistentVolumeClaimSpec or remove spec.hibernate"
))]
#[x_kube(validation = (
    "!has(self.image) || !has(self.repository) || self.repository == 'quay.io/coreos/etcd'",
    "spec.image replaces spec.repository, because it contains a repository: remove spec.repository or spec.image"
))]
#[x_kube(validation = (
    "!has(self.deletionPolicy) || self.deletionPolicy != 'RetainVolumes' || (has(self.pod) && has(self.pod.persistentVolumeClaimSpec))",
    "spec.deletionPolicy RetainVolumes needs members with volumes: set spec.pod.persistentVolumeClaimSpec or remove spec.deletionPolicy"
))]
#[x_kube(validation = (
    "!has(self.deletionPolicy) || self.deletionPolicy != 'BackupThenDelete' || has(self.backup)",
    "spec.deletionPolicy BackupThenDelete needs a store for the backup: set spec.backup or remove spec.deletionPolicy"
))]
#[x_kube(validation = (
    "!has(self.grpcProxy) || has(self.grpcProxy.clientSecret) == (has(self.TLS) && has(self.TLS.static) && has(self.TLS.static.member) && has(self.TLS.static.member.serverSecret) && self.TLS.static.member.serverSecret != '')",
    "spec.grpcProxy.clientSecret is only for static certificates: set clientSecret and serverSecret if spec.TLS.static.member.serverSecret is set, else remove both"
))]
#[x_kube(validation = (
    "!has(self.etcd) || !has(self.pod) || !has(self.pod.etcdEnv) || !self.pod.etcdEnv.exists(env, (env.name == 'ETCD_QUOTA_BACKEND_BYTES' && has(self.etcd.quotaBackendBytes)) || (env.name == 'ETCD_AUTO_COMPACTION_MODE' && has(self.etcd.autoCompactionMode)) || (env.name == 'ETCD_AUTO_COMPACTION_RETENTION' && has(self.etcd.autoCompactionRetention)) || (env.name == 'ETCD_HEARTBEAT_INTERVAL' && has(self.etcd.heartbeatInterval)) || (env.name == 'ETCD_ELECTION_TIMEOUT' && has(self.etcd.electionTimeout)) || (env.name == 'ETCD_SNAPSHOT_COUNT' && has(self.etcd.snapshotCount)) || (env.name == 'ETCD_MAX_REQUEST_BYTES' && has(self.etcd.maxRequestBytes)) || (env.name == 'ETCD_MAX_TXN_OPS' && has(self.etcd.maxTxnOps)))",
    "spec.pod.etcdEnv may not set an option that spec.etcd sets: remove that variable"
))]
pub struct EtcdClusterSpec {
    /// Number of members, from 1 to 7. Use an odd number, because one more member does not increase the number of
    /// failures that the cluster tolerates.
    #[serde(default = "default_size")]
    #[schemars(range(min = 1, max = 7))]
    #[x_kube(validation = ("self >= 1 && self <= 7", "spec.size must be 1 to 7: use 3 or 5, or 1 for tests"))]
    pub size: i32,
    /// Version of etcd, such as `3.7.3`, with or without a leading `v`. The operator supports 3.4 to 3.7.
    #[serde(default = "default_version")]
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = (
        "self.matches('^v*[0-9]+\\\\.[0-9]+\\\\.[0-9]+(-[0-9A-Za-z.-]+)?$')",
        "spec.version must be a full version such as 3.7.3: use major, minor and patch number, not a tag such as latest"
    ))]
    pub version: String,
    /// Repository of the etcd image. The operator uses the image `<repository>:v<version>`.
    #[serde(default = "default_repository")]
    #[schemars(length(min = 1, max = 255))]
    pub repository: String,
    /// Image of etcd with a digest: `NAME@sha256:DIGEST` or `NAME:TAG@sha256:DIGEST`. It must contain the release in
    /// `spec.version`, so change both fields together. If set, `spec.repository` must not be set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(validation = (
        "self.matches('^[a-zA-Z0-9][a-zA-Z0-9._:/-]*@sha256:[0-9a-f]{64}$')",
        "spec.image must end with a digest of 64 hexadecimal digits: use NAME@sha256:DIGEST or NAME:TAG@sha256:DIGEST"
    ))]
    pub image: Option<String>,
    /// If true, the operator does not change the cluster. It still updates the status.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// `Parallel`: the first members start at the same time. `Seed`: one member starts first, and the others join one
    /// by one.
    #[serde(default)]
    pub bootstrap: BootstrapMode,
    /// Host names of members. `Service`: each member has a Service. `Pod`: the host names are pod names under the
    /// headless Service. If not set, the operator uses `Service`, or `Pod` if the static certificates have only pod
    /// names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_address: Option<MemberAddress>,
    /// If true, the operator stops all members and keeps their volumes. If set back to false, the members start again
    /// with their data.
    #[serde(default, skip_serializing_if = "is_false")]
    pub hibernate: bool,
    /// If true, the API server rejects the deletion of this EtcdCluster and of its namespace. This requires the two
    /// ValidatingAdmissionPolicies of the Helm chart.
    #[serde(default, skip_serializing_if = "is_false")]
    pub protected: bool,
    /// What happens to the data of the members when this EtcdCluster is deleted. `Delete`: Kubernetes deletes the
    /// volumes. `RetainVolumes`: the volumes stay, and a new EtcdCluster of the same name continues the cluster.
    /// `BackupThenDelete`: Kubernetes deletes the volumes after a backup with the settings of `spec.backup`. The
    /// default is `Delete`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<ClusterDeletionPolicy>,
    /// Pods of the members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodPolicy>,
    /// TLS between members, clients and the operator.
    #[serde(default, rename = "TLS", skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsPolicy>,
    /// Services of the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub services: Option<ServicesPolicy>,
    /// PodDisruptionBudget of the voters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_disruption_budget: Option<DisruptionBudgetPolicy>,
    /// Settings for the replacement of members that are down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_replacement: Option<MemberReplacement>,
    /// Settings for the recovery after a permanent loss of the quorum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
    /// Options of etcd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdOptions>,
    /// Maintenance of the databases: defragmentation, and full databases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upkeep: Option<Upkeep>,
    /// Credentials of the operators for a cluster with authentication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<Auth>,
    /// NetworkPolicy of the members. If not set, the operator creates no NetworkPolicy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkAccess>,
    /// gRPC proxies of etcd between clients and members. If not set, the operator creates no proxies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grpc_proxy: Option<Box<GrpcProxy>>,
    /// Scheduled backups of the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<ClusterBackup>,
    /// Names of advice that the condition `Advisable` does not report, such as `NoBackup`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub silenced_advice: Vec<Advice>,
}

impl Default for EtcdClusterSpec {
    fn default() -> Self {
        Self {
            size: default_size(),
            version: default_version(),
            repository: default_repository(),
            image: None,
            paused: false,
            bootstrap: BootstrapMode::default(),
            member_address: None,
            hibernate: false,
            protected: false,
            deletion_policy: None,
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
            grpc_proxy: None,
            backup: None,
            silenced_advice: Vec::new(),
        }
    }
}

impl EtcdClusterSpec {
    /// True if members have volumes.
    pub fn is_durable(&self) -> bool {
        self.pod
            .as_ref()
            .is_some_and(|pod| pod.persistent_volume_claim_spec.is_some())
    }

    /// The image in the spec for members of this version: `spec.image`, or `<repository>:v<version>` without it. `None`
    /// if `spec.image` is for another version.
    pub fn image_for(&self, version: &EtcdVersion) -> Option<String> {
        let Some(image) = &self.image else {
            return Some(version.image(&self.repository));
        };
        let own = EtcdVersion::parse(&self.version);
        own.is_ok_and(|own| own == *version).then(|| image.clone())
    }

    /// Like [`Self::image_for`], but with `<repository>:v<version>` if `spec.image` is for another version.
    pub fn image_of(&self, version: &EtcdVersion) -> String {
        self.image_for(version)
            .unwrap_or_else(|| version.image(&self.repository))
    }

    /// True if the PVCs of the members have no owner reference, so that the volumes stay when the EtcdCluster is
    /// deleted. With `BackupThenDelete`, the PVCs get an owner reference after the backup.
    pub fn retains_volumes(&self) -> bool {
        self.backs_up_before_deletion()
            || self.deletion_policy == Some(ClusterDeletionPolicy::RetainVolumes)
    }

    /// `spec.memberAddress`. The default is `Service`.
    pub fn member_address(&self) -> MemberAddress {
        self.member_address
            .clone()
            .unwrap_or(MemberAddress::Service)
    }

    /// `spec.pod.ClusterDomain`. The default is an empty text.
    pub fn cluster_domain(&self) -> &str {
        self.pod
            .as_ref()
            .and_then(|pod| pod.cluster_domain.as_deref())
            .unwrap_or_default()
    }

    /// True if the cluster has a PodDisruptionBudget.
    pub fn has_disruption_budget(&self) -> bool {
        self.pod_disruption_budget
            .as_ref()
            .is_none_or(|budget| budget.enabled)
    }

    /// True if the cluster has a NetworkPolicy.
    pub fn has_network_policy(&self) -> bool {
        self.network_policy
            .as_ref()
            .is_some_and(|access| access.enabled)
    }

    /// The time for which a member may be down on a lost node before the operator replaces the member.
    pub fn replace_after(&self) -> std::time::Duration {
        self.member_replacement
            .as_ref()
            .and_then(|replacement| replacement.after.as_ref())
            .and_then(DurationText::parse)
            .unwrap_or(std::time::Duration::from_secs(
                DEFAULT_REPLACE_AFTER_SECONDS,
            ))
    }

    /// The time for which the operator keeps the volume of a member that a user or other software has removed from
    /// etcd.
    pub fn keep_volumes(&self) -> std::time::Duration {
        self.member_replacement
            .as_ref()
            .and_then(|replacement| replacement.keep_volumes.as_ref())
            .and_then(DurationText::parse)
            .unwrap_or(std::time::Duration::from_secs(DEFAULT_KEEP_VOLUMES_SECONDS))
    }

    /// True if the operator recovers a lost quorum without an approval.
    pub fn recovers_automatically(&self) -> bool {
        let policy = self
            .recovery
            .as_ref()
            .and_then(|recovery| recovery.policy.as_ref());
        policy == Some(&RecoveryPolicy::Automatic)
    }

    /// The time for which the operator keeps the old volumes after a recovery.
    pub fn keep_recovered_volumes(&self) -> std::time::Duration {
        self.recovery
            .as_ref()
            .and_then(|recovery| recovery.keep_volumes.as_ref())
            .and_then(DurationText::parse)
            .unwrap_or(std::time::Duration::from_secs(
                DEFAULT_KEEP_RECOVERED_SECONDS,
            ))
    }

    /// The time for which the quorum must be lost before a recovery without an approval starts.
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
    /// The conditions in the status. Empty without a status.
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
