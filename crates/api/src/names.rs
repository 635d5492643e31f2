//! The names that connect objects: labels, annotations, finalizers, names of objects, and URLs.
//!
//! The functions of this module only build and parse texts.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use crate::cluster::MemberAddress;

/// API group of the six kinds.
pub const GROUP: &str = "etcd.database.coreos.com";
/// The only API version.
pub const VERSION: &str = "v1beta2";

/// Label of all objects of a cluster. Its value is [`APP`], or [`APP_GRPC_PROXY`] for the gRPC proxies.
pub const LABEL_APP: &str = "app";
/// Value of [`LABEL_APP`].
pub const APP: &str = "etcd";
/// Value of [`LABEL_APP`] for the gRPC proxies of a cluster. It is not [`APP`], because selectors with [`APP`] select
/// the members.
pub const APP_GRPC_PROXY: &str = "etcd-grpc-proxy";
/// Label with the name of the `EtcdCluster`.
pub const LABEL_CLUSTER: &str = "etcd_cluster";
/// Label with the name of the member, on its pod, PVC and Service.
pub const LABEL_MEMBER: &str = "etcd_node";
/// Label with the role of a pod: [`ROLE_VOTER`], [`ROLE_BUSY`] or [`ROLE_LEARNER`].
pub const LABEL_ROLE: &str = "etcd.database.coreos.com/role";
/// Value of [`LABEL_ROLE`] for voters, which the PodDisruptionBudget selects.
pub const ROLE_VOTER: &str = "voter";
/// Value of [`LABEL_ROLE`] for learners.
pub const ROLE_LEARNER: &str = "learner";
/// Value of [`LABEL_ROLE`] for a drained voter, which is about to stop or is being defragmented. The client Service
/// does not select this value.
pub const ROLE_BUSY: &str = "busy";
/// Pod label whose value is the end of the cluster token. The client Service selects this value. Pods of an earlier
/// etcd cluster with the same name have another token, so they never become endpoints.
pub const LABEL_TOKEN: &str = "etcd.database.coreos.com/token";
/// Label that no pod has. The client Service selects it until the status has a cluster ID, so that the Service has no
/// endpoints.
pub const LABEL_FORMED: &str = "etcd.database.coreos.com/formed";
/// Label of the agent of a continuous backup, on its Deployment and pod. Its value is the UID of the `EtcdBackup`.
pub const LABEL_BACKUP: &str = "etcd.database.coreos.com/backup-uid";

/// Pod annotation with the time at which the pod was drained ([`ROLE_BUSY`]).
pub const ANNOTATION_BUSY_SINCE: &str = "etcd.database.coreos.com/busy-since";
/// Pod annotation with the etcd version for which the pod was created.
pub const ANNOTATION_VERSION: &str = "etcd.version";
/// Annotation of a PVC with the etcd version that last served its data. It exists while the pod changes to another
/// version, until that version has served.
pub const ANNOTATION_SERVED: &str = "etcd.database.coreos.com/served-version";
/// Pod annotation with the image that the operator requested. A webhook may have changed the image in the pod. A PVC
/// has this annotation too, if the image of its version ([`ANNOTATION_VERSION`]) has a digest.
pub const ANNOTATION_IMAGE: &str = "etcd.database.coreos.com/image";
/// Pod annotation for a change of the image in place: the previous version, and the number of restarts of the container
/// before the change. The operator removes the annotation when the member is healthy again.
pub const ANNOTATION_CHANGED: &str = "etcd.database.coreos.com/image-changed";
/// Annotation of pods and PVCs with the cluster token.
pub const ANNOTATION_CLUSTER_TOKEN: &str = "etcd.database.coreos.com/cluster-token";
/// Annotation of pods and PVCs with the cluster ID. It is missing until the status has a cluster ID.
pub const ANNOTATION_CLUSTER_ID: &str = "etcd.database.coreos.com/cluster-id";
/// Annotation of the PVCs of the first members with the names of all first members, separated by commas.
pub const ANNOTATION_FIRST_MEMBERS: &str = "etcd.database.coreos.com/first-members";
/// Annotation of a member's PVC with the names of all voters, separated by commas. Only PVCs that stay after the
/// deletion of their EtcdCluster have it.
pub const ANNOTATION_VOTERS: &str = "etcd.database.coreos.com/voters";
/// Annotation of the PVC of a removed member. The value is `operator` if the operator removes the member. If another
/// client has removed the member, the value is the time at which the operator noticed the removal, with the suffix
/// `/majority` if a majority of voters was removed.
pub const ANNOTATION_REMOVED: &str = "etcd.database.coreos.com/removed";
/// Annotation of a member's Service, set before the operator creates the member's pod. If it is set and the pod is
/// missing, the pod may have been lost.
pub const ANNOTATION_STARTED: &str = "etcd.database.coreos.com/started";
/// Annotation that locks an `EtcdCluster` for a restore. Its value is the UID of the `EtcdRestore`.
pub const ANNOTATION_RESTORE: &str = "etcd.database.coreos.com/restore";
/// Annotation of an `EtcdCluster` that has lost its quorum. A user approves the recovery by setting it to the cluster
/// ID.
pub const ANNOTATION_RECOVER: &str = "etcd.database.coreos.com/recover";
/// Annotation of an `EtcdCluster`. A user requests new generated CAs by changing its value. The Secret of each CA
/// records the value at the time when the operator created the CA.
pub const ANNOTATION_ROTATE_AUTHORITY: &str = "etcd.database.coreos.com/rotate-authority";
/// Annotation that waives the backup before one change or before the deletion. On an `EtcdCluster`, the value is
/// [`crate::cluster::backup_waiver`]. On an `EtcdRestore`, the value is `Restore`.
pub const ANNOTATION_SKIP_BACKUP: &str = "etcd.database.coreos.com/skip-backup";
/// Annotation of a scheduled `EtcdBackup` that requests a backup now. Its value is the time of the request. A backup
/// that completes at this time or later fulfills the request.
pub const ANNOTATION_BACKUP_REQUESTED: &str = "etcd.database.coreos.com/backup-requested";
/// Pod annotation with a digest of the CAs that etcd trusts. etcd reads CAs only when it starts.
pub const ANNOTATION_TRUST: &str = "etcd.database.coreos.com/trust";
/// Common name of the operators' generated certificate. No other generated certificate has this name, so only the
/// operators can authenticate as the etcd user with this name.
pub const OPERATOR_USER: &str = "etcd-operator";
/// Pod annotation with the CAs that etcd has trusted since its start. With static Secrets, a CA is identified by its
/// subject and public key, so a reissued CA counts as the same CA. Generated CAs are identified by the first sixteen
/// digits of their fingerprint. A Secret with a certificate from cert-manager has this annotation too, with the CAs of
/// its certificate.
pub const ANNOTATION_AUTHORITIES: &str = "etcd.database.coreos.com/authorities";
/// Pod annotation with the value of `spec.TLS` for which the pod was created. A PVC that stays after the deletion of
/// its EtcdCluster also has it.
pub const ANNOTATION_TLS: &str = "etcd.database.coreos.com/tls";
/// Pod annotation with a digest of the certificates of the member or of the gRPC proxy. A changed value makes the
/// kubelet read the Secrets of a member at once, and replaces the pod of a proxy.
pub const ANNOTATION_CERTIFICATES: &str = "etcd.database.coreos.com/certificates";
/// Annotation of a new `EtcdCluster` that joins an existing etcd cluster and takes it over. Its value is the client
/// URLs of the existing cluster, separated by commas.
pub const ANNOTATION_JOIN: &str = "etcd.database.coreos.com/join";
/// Annotation of a Secret with a certificate from cert-manager: the time at which the operator has last changed the
/// trust bundle, or the CA of the certificate.
pub const ANNOTATION_PUBLISHED: &str = "etcd.database.coreos.com/published";
/// Finalizer of an `EtcdBackup` with the deletion policy `Delete`. The operator removes it after it has deleted the
/// stored backups.
pub const FINALIZER_STORED: &str = "etcd.database.coreos.com/stored-backups";
/// Finalizer that coreos/etcd-operator set on periodic `EtcdBackup` objects. This project does not set it, and it
/// protects no data.
pub const FINALIZER_COREOS_PERIODIC: &str = "backup-operator-periodic";
/// Finalizer of an `EtcdCluster` with the deletion policy `BackupThenDelete`. The operator removes it after the backup.
pub const FINALIZER_BACKUP: &str = "etcd.database.coreos.com/backup-before-deletion";
/// Finalizer with which the garbage collector deletes the dependents of an object before the object (foreground
/// deletion).
pub const FINALIZER_FOREGROUND: &str = "foregroundDeletion";
/// Finalizer of an `EtcdRestore` that may have locked an `EtcdCluster`.
pub const FINALIZER_CLAIM: &str = "etcd.database.coreos.com/restore-claim";
/// Finalizer of an `EtcdMirror` that may have a checkpoint in its destination. The operator removes the finalizer after
/// it has deleted the checkpoint.
pub const FINALIZER_MIRROR: &str = "etcd.database.coreos.com/mirror";
/// Prefix of the keys in a destination that contain the checkpoints and the registry of mirrors. Mirrors do not copy
/// keys with this prefix.
pub const MIRROR_RECORDS: &str = "etcd.database.coreos.com/mirror/";
/// Annotation of an `EtcdMirror` whose source was replaced. A user approves the new source with the value `<cluster ID
/// of the source>/<last copied revision>`. The operator then copies all keys again.
pub const ANNOTATION_ACCEPT_SOURCE: &str = "etcd.database.coreos.com/accept-source";
/// Finalizer of an `EtcdRole` or `EtcdUser` that may own a role or a user in etcd.
pub const FINALIZER_ACCESS: &str = "etcd.database.coreos.com/access";
/// Annotation of the Lease of an operator with shards: the replicas that share the shards.
pub const ANNOTATION_REPLICAS: &str = "etcd.database.coreos.com/replicas";
/// Label of the Lease of a shard. Its value is the name of the operator's Lease.
pub const LABEL_SHARD_OF: &str = "etcd.database.coreos.com/shard-of";
/// Annotation of objects that the cluster-wide operators manage.
pub const ANNOTATION_SCOPE: &str = "etcd.database.coreos.com/scope";
/// Value of [`ANNOTATION_SCOPE`] for the cluster-wide operators.
pub const SCOPE_CLUSTER_WIDE: &str = "clusterwide";

/// Port of the client URL.
pub const CLIENT_PORT: u16 = 2379;
/// Port of the peer URL.
pub const PEER_PORT: u16 = 2380;
/// The second peer port, which members use while TLS between members is switched on or off.
pub const SECOND_PEER_PORT: u16 = 2382;
/// Port of the HTTP listener for health and metrics.
pub const METRICS_PORT: u16 = 2381;

/// Name of the etcd container.
pub const CONTAINER_ETCD: &str = "etcd";
/// Name of the volume with the data.
pub const VOLUME_DATA: &str = "etcd-data";
/// Name of the volume with the tools in the pod of a seed.
pub const VOLUME_TOOLS: &str = "tools";
/// Mount path of the data volume.
pub const DATA_MOUNT: &str = "/var/etcd";
/// The data directory of etcd, below [`DATA_MOUNT`].
pub const DATA_DIR: &str = "/var/etcd/data";

/// Field manager of the cluster operator.
pub const MANAGER_CLUSTER: &str = "etcd-operator";
/// Field manager of the backup operator.
pub const MANAGER_BACKUP: &str = "etcd-backup-operator";
/// Field manager of the restore operator.
pub const MANAGER_RESTORE: &str = "etcd-restore-operator";

/// Maximum length of the name of an `EtcdCluster`. Kubernetes limits names of Services to 63 characters, and the
/// Service of a member is named `<cluster>-<suffix>`.
pub const MAX_CLUSTER_NAME: usize = 63 - 1 - MEMBER_SUFFIX;
/// Length of the random suffix in the name of a member.
pub const MEMBER_SUFFIX: usize = 10;

const SUFFIX_ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// Name of the headless Service of a cluster.
pub fn headless_service(cluster: &str) -> String {
    cluster.to_owned()
}

/// Name of the client Service of a cluster.
pub fn client_service(cluster: &str) -> String {
    format!("{cluster}-client")
}

/// Name of the PodDisruptionBudget of a cluster.
pub fn disruption_budget(cluster: &str) -> String {
    cluster.to_owned()
}

/// Name of the Secret in which the operator records the passwords of the etcd user `root`.
pub fn auth_secret(cluster: &str) -> String {
    format!("{cluster}-auth")
}

/// Name of the NetworkPolicy of a cluster.
pub fn network_policy(cluster: &str) -> String {
    format!("{cluster}-members")
}

/// Name of the Deployment, the PodDisruptionBudget and the NetworkPolicy of the gRPC proxies. Their Service has the
/// same name by default.
pub fn grpc_proxy(cluster: &str) -> String {
    format!("{cluster}-proxy")
}

/// The purpose of a generated certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CertificateUse {
    /// A member's certificate for connections to and from other members.
    Peer,
    /// A member's certificate for connections from clients.
    Server,
    /// Client certificate of the operators.
    Operator,
    /// Client certificate for the user's clients.
    Client,
    /// Certificate of the gRPC proxies, for connections to members and from clients.
    Proxy,
}

impl CertificateUse {
    /// The purpose as a word in names and labels.
    pub fn word(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Server => "server",
            Self::Operator => "operator",
            Self::Client => "client",
            Self::Proxy => "proxy",
        }
    }
}

/// Name of the Secret with a generated certificate. `owner` is the member, or the cluster for certificates of
/// operators and clients.
pub fn certificate_secret(owner: &str, used: CertificateUse) -> String {
    format!("{owner}-{}-tls", used.word())
}

/// Name of the Secret with the CA for members.
pub fn peer_authority_secret(cluster: &str) -> String {
    format!("{cluster}-peer-ca")
}

/// Name of the Secret with the CA for server and client certificates.
pub fn client_authority_secret(cluster: &str) -> String {
    format!("{cluster}-client-ca")
}

/// The name of a member: the name of the cluster, and a suffix from the ten bytes in `random`. The pod, the PVC and the
/// Service of the member have the same name.
pub fn member_name(cluster: &str, random: [u8; MEMBER_SUFFIX]) -> String {
    let suffix =
        random.map(|byte| char::from(SUFFIX_ALPHABET[usize::from(byte) % SUFFIX_ALPHABET.len()]));
    format!("{cluster}-{}", suffix.iter().collect::<String>())
}

/// The name of the cluster in the name of a member. `None` for other texts, also for names of coreos/etcd-operator
/// before 0.8.3 (`<cluster>-0000`). For such members, use [`LABEL_CLUSTER`].
pub fn cluster_of_member(member: &str) -> Option<&str> {
    let (cluster, suffix) = member.rsplit_once('-')?;
    let known =
        suffix.len() == MEMBER_SUFFIX && suffix.bytes().all(|byte| SUFFIX_ALPHABET.contains(&byte));
    (known && is_cluster_name(cluster)).then_some(cluster)
}

/// True for a valid name of an `EtcdCluster`: a DNS-1035 label of at most [`MAX_CLUSTER_NAME`] characters.
pub fn is_cluster_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    name.len() <= MAX_CLUSTER_NAME
        && bytes.first().is_some_and(u8::is_ascii_lowercase)
        && bytes.last().is_some_and(|byte| *byte != b'-')
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-')
}

/// The name of the member in a peer or client URL, which is the first label of the host name. `None` for an IP
/// address.
pub fn member_of_url(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    if rest.starts_with('[') {
        return None; // An IPv6 address contains no member name.
    }
    let host = rest.split(['/', ':']).next()?;
    let label = host.split('.').next()?;
    (!label.is_empty() && label.parse::<u8>().is_err()).then_some(label)
}

/// Labels of every object of a cluster.
pub fn cluster_labels(cluster: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        (LABEL_APP.to_owned(), APP.to_owned()),
        (LABEL_CLUSTER.to_owned(), cluster.to_owned()),
    ])
}

/// Labels of the gRPC proxies of a cluster, on their pods and on all their objects.
pub fn grpc_proxy_labels(cluster: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        (LABEL_APP.to_owned(), APP_GRPC_PROXY.to_owned()),
        (LABEL_CLUSTER.to_owned(), cluster.to_owned()),
    ])
}

/// Labels of a member's pod, PVC and Service, without [`LABEL_ROLE`].
pub fn member_labels(cluster: &str, member: &str) -> BTreeMap<String, String> {
    let mut labels = cluster_labels(cluster);
    labels.insert(LABEL_MEMBER.to_owned(), member.to_owned());
    labels
}

/// The value of [`LABEL_TOKEN`]: the last 63 characters of the token, because tokens differ at their end and labels
/// are limited to 63 characters.
pub fn token_label(token: &str) -> &str {
    let begin = token.len().saturating_sub(63);
    let end = token.get(begin..).unwrap_or_default();
    end.trim_matches(|letter: char| !letter.is_ascii_alphanumeric())
}

/// The label selector of all objects of a cluster.
pub fn cluster_selector(cluster: &str) -> String {
    format!("{LABEL_APP}={APP},{LABEL_CLUSTER}={cluster}")
}

/// True for label keys of the operator, which `spec.pod.labels` must not contain.
pub fn is_reserved_label(key: &str) -> bool {
    key == LABEL_APP || key.starts_with("etcd_") || key.starts_with("etcd.database.coreos.com/")
}

/// True for annotation keys of the operator, which `spec.pod.annotations` must not contain.
pub fn is_reserved_annotation(key: &str) -> bool {
    key == ANNOTATION_VERSION || key.starts_with("etcd.database.coreos.com/")
}

/// Builds the URLs of the members of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Namespace of the cluster.
    pub namespace: String,
    /// Name of the `EtcdCluster`.
    pub cluster: String,
    /// The form of the members' host names.
    pub member: MemberAddress,
    /// `spec.pod.ClusterDomain`: empty, or a domain with or without a leading dot.
    pub cluster_domain: String,
    /// True if members use TLS between each other.
    pub peer_tls: bool,
    /// True if members use TLS for clients.
    pub client_tls: bool,
}

impl Addresses {
    /// The host name of a member.
    pub fn host(&self, member: &str) -> String {
        let Self {
            namespace, cluster, ..
        } = self;
        match self.member {
            MemberAddress::Pod => format!("{member}.{cluster}.{namespace}.svc{}", self.domain()),
            MemberAddress::Service | MemberAddress::Unknown(_) => {
                format!("{member}.{namespace}.svc{}", self.domain())
            }
        }
    }

    /// The peer URL of a member.
    pub fn peer_url(&self, member: &str) -> String {
        format!(
            "{}://{}:{PEER_PORT}",
            scheme(self.peer_tls),
            self.host(member)
        )
    }

    /// The client URL of a member.
    pub fn client_url(&self, member: &str) -> String {
        format!(
            "{}://{}:{CLIENT_PORT}",
            scheme(self.client_tls),
            self.host(member)
        )
    }

    /// The client URL of a member at an IP address. With TLS, `#` and the host name follow, because the client checks
    /// the host name in the certificate.
    pub fn client_url_at(&self, address: IpAddr, member: &str) -> String {
        let at = SocketAddr::new(address, CLIENT_PORT);
        let url = format!("{}://{at}", scheme(self.client_tls));
        if self.client_tls {
            format!("{url}#{}", self.host(member))
        } else {
            url
        }
    }

    /// The URL of the client Service.
    pub fn service_url(&self) -> String {
        self.url_of(&client_service(&self.cluster))
    }

    /// The client URL of a Service in the namespace of the cluster.
    pub fn url_of(&self, service: &str) -> String {
        let host = self.host_of(service);
        format!("{}://{host}:{CLIENT_PORT}", scheme(self.client_tls))
    }

    /// The host name of a Service in the namespace of the cluster.
    pub fn host_of(&self, service: &str) -> String {
        format!("{service}.{}.svc{}", self.namespace, self.domain())
    }

    /// The value of `--initial-cluster` for these members.
    pub fn initial_cluster<'a>(&self, members: impl IntoIterator<Item = &'a str>) -> String {
        let parts: Vec<String> = members
            .into_iter()
            .map(|member| format!("{member}={}", self.peer_url(member)))
            .collect();
        parts.join(",")
    }

    fn domain(&self) -> String {
        let bare = self.cluster_domain.trim_matches('.');
        if bare.is_empty() {
            String::new()
        } else {
            format!(".{bare}")
        }
    }
}

fn scheme(tls: bool) -> &'static str {
    if tls { "https" } else { "http" }
}

#[cfg(test)]
mod tests;
