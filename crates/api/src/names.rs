//! Every name that ties objects together: group, labels, annotations, Service names, member names, URLs.
//!
//! Pure text. Nothing here may look anything up.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use crate::cluster::MemberAddress;

/// API group of the three kinds.
pub const GROUP: &str = "etcd.database.coreos.com";
/// The only API version.
pub const VERSION: &str = "v1beta2";

/// Label every object of a cluster carries, with [`APP`] as its value.
pub const LABEL_APP: &str = "app";
/// Value of [`LABEL_APP`].
pub const APP: &str = "etcd";
/// Label with the name of the `EtcdCluster`.
pub const LABEL_CLUSTER: &str = "etcd_cluster";
/// Label with the name of the member, on its pod, volume claim and Service.
pub const LABEL_MEMBER: &str = "etcd_node";
/// Label with the member's part in the quorum: [`ROLE_VOTER`], [`ROLE_BUSY`] or [`ROLE_LEARNER`].
pub const LABEL_ROLE: &str = "etcd.database.coreos.com/role";
/// Value of [`LABEL_ROLE`] for a member that votes. The disruption budget selects it.
pub const ROLE_VOTER: &str = "voter";
/// Value of [`LABEL_ROLE`] for a member that does not vote yet.
pub const ROLE_LEARNER: &str = "learner";
/// Value of [`LABEL_ROLE`] for a member that votes and that the client Service passes by, because it is about to stop
/// or is defragmented.
pub const ROLE_BUSY: &str = "busy";
/// Label with the end of the cluster token, on every pod. The client Service selects by it: a pod of another cluster
/// of the same name (an abandoned bootstrap, what was there before a restore) never serves clients.
pub const LABEL_TOKEN: &str = "etcd.database.coreos.com/token";
/// Label no pod has: in the client Service's selector until the cluster ID is recorded, so that the
/// Service has no endpoints before.
pub const LABEL_FORMED: &str = "etcd.database.coreos.com/formed";

/// Pod annotation that says nothing: it was set to have the kubelet look at the pod again at once.
pub const ANNOTATION_NUDGED: &str = "etcd.database.coreos.com/nudged";
/// Pod annotation with the time from which on the client Service has passed the member by ([`ROLE_BUSY`]).
pub const ANNOTATION_BUSY_SINCE: &str = "etcd.database.coreos.com/busy-since";
/// Pod annotation with the etcd version the pod was made for.
pub const ANNOTATION_VERSION: &str = "etcd.version";
/// Pod annotation with the image that was asked for, whatever a webhook made of it.
pub const ANNOTATION_IMAGE: &str = "etcd.database.coreos.com/image";
/// Pod annotation with the version that ran before its image was changed in place, and how often its container had been
/// started again by then; taken away when the member is back.
pub const ANNOTATION_CHANGED: &str = "etcd.database.coreos.com/image-changed";
/// Annotation with the cluster token, on every pod and volume claim.
pub const ANNOTATION_CLUSTER_TOKEN: &str = "etcd.database.coreos.com/cluster-token";
/// Annotation with the cluster ID once known, on every pod and volume claim.
pub const ANNOTATION_CLUSTER_ID: &str = "etcd.database.coreos.com/cluster-id";
/// Annotation on the volume claim of a first member: the names of all first members, separated by commas.
pub const ANNOTATION_FIRST_MEMBERS: &str = "etcd.database.coreos.com/first-members";
/// Annotation on a member's volume claim that says who removed the member from etcd: `operator`, set before the operator
/// removes the member; else the time at which the operator noticed that the member was missing from etcd's list, with
/// `/majority` behind it when a majority of the voters was missing.
pub const ANNOTATION_REMOVED: &str = "etcd.database.coreos.com/removed";
/// Annotation on a member's Service, set before a pod is made for the member: from then on a missing pod
/// may be a pod that was lost.
pub const ANNOTATION_STARTED: &str = "etcd.database.coreos.com/started";
/// Annotation on an `EtcdCluster` that belongs to a restore: the UID of the `EtcdRestore`.
pub const ANNOTATION_RESTORE: &str = "etcd.database.coreos.com/restore";
/// Annotation by which a person approves the recovery of an `EtcdCluster` that has lost its quorum: its cluster ID.
pub const ANNOTATION_RECOVER: &str = "etcd.database.coreos.com/recover";
/// Annotation on an `EtcdCluster` by which a person asks for new authorities of generated certificates: any text that was
/// not there before. The Secret of an authority carries the text it was made for.
pub const ANNOTATION_ROTATE_AUTHORITY: &str = "etcd.database.coreos.com/rotate-authority";
/// Pod annotation with a digest of the authorities its etcd trusts: it reads them when it starts.
pub const ANNOTATION_TRUST: &str = "etcd.database.coreos.com/trust";
/// Common name of the operators' generated certificate. Nobody else gets one of this name, so it may stand for a user of
/// etcd.
pub const OPERATOR_USER: &str = "etcd-operator";
/// Pod annotation with the authorities its etcd was started with, towards peers and towards clients: of static Secrets
/// what stands for each, of generated certificates the first sixteen digits of each fingerprint.
pub const ANNOTATION_AUTHORITIES: &str = "etcd.database.coreos.com/authorities";
/// Pod annotation with the `spec.TLS` the pod was made with.
pub const ANNOTATION_TLS: &str = "etcd.database.coreos.com/tls";
/// Pod annotation with a digest of the member's certificates. A change makes the kubelet look at the Secrets at once.
pub const ANNOTATION_CERTIFICATES: &str = "etcd.database.coreos.com/certificates";
/// Annotation on a new `EtcdCluster` that joins a cluster somebody else runs, and takes its place: that cluster's client
/// URLs, separated by commas.
pub const ANNOTATION_JOIN: &str = "etcd.database.coreos.com/join";
/// Finalizer of an `EtcdBackup` whose stored backups go with it.
pub const FINALIZER_STORED: &str = "etcd.database.coreos.com/stored-backups";
/// Finalizer of an `EtcdRestore` that may have claimed an `EtcdCluster`.
pub const FINALIZER_CLAIM: &str = "etcd.database.coreos.com/restore-claim";
/// Annotation that gives an object to the cluster-wide operators.
pub const ANNOTATION_SCOPE: &str = "etcd.database.coreos.com/scope";
/// The value of [`ANNOTATION_SCOPE`] the cluster-wide operators look for.
pub const SCOPE_CLUSTER_WIDE: &str = "clusterwide";

/// Port of the client URL.
pub const CLIENT_PORT: u16 = 2379;
/// Port of the peer URL.
pub const PEER_PORT: u16 = 2380;
/// Port on which members listen for each other, too, while the way they talk to each other changes.
pub const SECOND_PEER_PORT: u16 = 2382;
/// Port of the plain HTTP listener for health and metrics.
pub const METRICS_PORT: u16 = 2381;

/// Name of the etcd container in a member pod.
pub const CONTAINER_ETCD: &str = "etcd";
/// Name of the data volume in a member pod.
pub const VOLUME_DATA: &str = "etcd-data";
/// Name of the volume that carries tools into a seed pod.
pub const VOLUME_TOOLS: &str = "tools";
/// Where the data volume is mounted.
pub const DATA_MOUNT: &str = "/var/etcd";
/// etcd's data directory, below [`DATA_MOUNT`].
pub const DATA_DIR: &str = "/var/etcd/data";

/// Field manager of the cluster operator.
pub const MANAGER_CLUSTER: &str = "etcd-operator";
/// Field manager of the backup operator.
pub const MANAGER_BACKUP: &str = "etcd-backup-operator";
/// Field manager of the restore operator.
pub const MANAGER_RESTORE: &str = "etcd-restore-operator";

/// Longest name of an `EtcdCluster`: a member's Service name, `<cluster>-<suffix>`, has at most 63 characters.
pub const MAX_CLUSTER_NAME: usize = 63 - 1 - MEMBER_SUFFIX;
/// Length of the random end of a member's name.
pub const MEMBER_SUFFIX: usize = 10;

const SUFFIX_ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// Name of the headless Service of a cluster.
pub fn headless_service(cluster: &str) -> String {
    cluster.to_owned()
}

/// Name of the Service clients use.
pub fn client_service(cluster: &str) -> String {
    format!("{cluster}-client")
}

/// Name of the disruption budget of a cluster.
pub fn disruption_budget(cluster: &str) -> String {
    cluster.to_owned()
}

/// Name of the Secret with the passwords that the operator has set, or is about to set, for etcd's user `root`.
pub fn auth_secret(cluster: &str) -> String {
    format!("{cluster}-auth")
}

/// Name of the NetworkPolicy.
pub fn network_policy(cluster: &str) -> String {
    format!("{cluster}-members")
}

/// What a generated certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CertificateUse {
    /// A member towards other members.
    Peer,
    /// A member towards clients.
    Server,
    /// The operators towards the members.
    Operator,
    /// Clients of the user.
    Client,
}

impl CertificateUse {
    /// As a word, for names and labels.
    pub fn word(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Server => "server",
            Self::Operator => "operator",
            Self::Client => "client",
        }
    }
}

/// Name of the Secret with a generated certificate of `owner`: a member, or the cluster for its operators and clients.
pub fn certificate_secret(owner: &str, used: CertificateUse) -> String {
    format!("{owner}-{}-tls", used.word())
}

/// Name of the Secret with the authority that signs peers' certificates.
pub fn peer_authority_secret(cluster: &str) -> String {
    format!("{cluster}-peer-ca")
}

/// Name of the Secret with the authority that signs the members' certificates towards clients, and the clients'.
pub fn client_authority_secret(cluster: &str) -> String {
    format!("{cluster}-client-ca")
}

/// A member's name from its cluster and ten random bytes, which the caller draws.
/// The name is also that of the pod, the volume claim and the Service.
pub fn member_name(cluster: &str, random: [u8; MEMBER_SUFFIX]) -> String {
    let suffix =
        random.map(|byte| char::from(SUFFIX_ALPHABET[usize::from(byte) % SUFFIX_ALPHABET.len()]));
    format!("{cluster}-{}", suffix.iter().collect::<String>())
}

/// The cluster a member's name belongs to, or `None` when it is not a member's name.
/// Names of coreos/etcd-operator before 0.8.3 (`<cluster>-0000`) are not recognised: use the label.
pub fn cluster_of_member(member: &str) -> Option<&str> {
    let (cluster, suffix) = member.rsplit_once('-')?;
    let known =
        suffix.len() == MEMBER_SUFFIX && suffix.bytes().all(|byte| SUFFIX_ALPHABET.contains(&byte));
    (known && is_cluster_name(cluster)).then_some(cluster)
}

/// Whether `name` can be the name of an `EtcdCluster`: a DNS-1035 label of at most [`MAX_CLUSTER_NAME`].
pub fn is_cluster_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    name.len() <= MAX_CLUSTER_NAME
        && bytes.first().is_some_and(u8::is_ascii_lowercase)
        && bytes.last().is_some_and(|byte| *byte != b'-')
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-')
}

/// The member named by the host of a peer or client URL: its first label.
pub fn member_of_url(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    if rest.starts_with('[') {
        return None; // An IPv6 address names nobody.
    }
    let host = rest.split(['/', ':']).next()?;
    let label = host.split('.').next()?;
    (!label.is_empty() && label.parse::<u8>().is_err()).then_some(label)
}

/// Labels every object of a cluster carries.
pub fn cluster_labels(cluster: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        (LABEL_APP.to_owned(), APP.to_owned()),
        (LABEL_CLUSTER.to_owned(), cluster.to_owned()),
    ])
}

/// Labels of the pod, volume claim and Service of one member, without its role.
pub fn member_labels(cluster: &str, member: &str) -> BTreeMap<String, String> {
    let mut labels = cluster_labels(cluster);
    labels.insert(LABEL_MEMBER.to_owned(), member.to_owned());
    labels
}

/// The value of [`LABEL_TOKEN`]: the end of a token, which is the part that differs, as far as a label may hold it.
pub fn token_label(token: &str) -> &str {
    let begin = token.len().saturating_sub(63);
    let end = token.get(begin..).unwrap_or_default();
    end.trim_matches(|letter: char| !letter.is_ascii_alphanumeric())
}

/// The label selector of all objects of a cluster, as text. `status.selector` holds it.
pub fn cluster_selector(cluster: &str) -> String {
    format!("{LABEL_APP}={APP},{LABEL_CLUSTER}={cluster}")
}

/// Whether a label key belongs to the operator, so that `spec.pod.labels` may not set it.
pub fn is_reserved_label(key: &str) -> bool {
    key == LABEL_APP || key.starts_with("etcd_") || key.starts_with("etcd.database.coreos.com/")
}

/// Whether an annotation key belongs to the operator.
pub fn is_reserved_annotation(key: &str) -> bool {
    key == ANNOTATION_VERSION || key.starts_with("etcd.database.coreos.com/")
}

/// How the members of one cluster are reached. All URLs come from here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Namespace of the cluster.
    pub namespace: String,
    /// Name of the `EtcdCluster`.
    pub cluster: String,
    /// Whether a member is reached through its own Service or by its pod's name.
    pub member: MemberAddress,
    /// `spec.pod.ClusterDomain`: empty, or the domain with or without its leading dot.
    pub cluster_domain: String,
    /// Whether peers speak TLS.
    pub peer_tls: bool,
    /// Whether clients speak TLS.
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

    /// The peer URL of a member that listens like this: with TLS or without, and on which port.
    pub fn peer_url_on(&self, member: &str, (tls, port): (bool, u16)) -> String {
        format!("{}://{}:{port}", scheme(tls), self.host(member))
    }

    /// The client URL of a member.
    pub fn client_url(&self, member: &str) -> String {
        format!(
            "{}://{}:{CLIENT_PORT}",
            scheme(self.client_tls),
            self.host(member)
        )
    }

    /// Where a member is asked at an address; an IPv6 one stands in brackets. Certificates are made for names: after
    /// `#` stands the one the member's is checked against.
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
        let Self {
            namespace, cluster, ..
        } = self;
        let service = client_service(cluster);
        format!(
            "{}://{service}.{namespace}.svc{}:{CLIENT_PORT}",
            scheme(self.client_tls),
            self.domain()
        )
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
mod tests {
    use super::*;

    fn addresses(member: MemberAddress, cluster_domain: &str) -> Addresses {
        Addresses {
            namespace: "prod".into(),
            cluster: "main".into(),
            member,
            cluster_domain: cluster_domain.into(),
            peer_tls: false,
            client_tls: true,
        }
    }

    #[test]
    fn a_member_name_tells_its_cluster() {
        let name = member_name("main-db", [0, 1, 2, 25, 26, 35, 36, 255, 7, 8]);
        assert_eq!(name, "main-db-abcz09adhi");
        assert_eq!(cluster_of_member(&name), Some("main-db"));
        assert!(is_cluster_name(&"x".repeat(52)));
        assert!(member_name(&"x".repeat(52), [0; 10]).len() <= 63);
    }

    #[test]
    fn names_that_are_not_members_are_not_taken_for_members() {
        for name in [
            "main",
            "main-0000",
            "main-ABCDEFGHIJ",
            "-abcdefghij",
            "1a-abcdefghij",
            "",
        ] {
            assert_eq!(cluster_of_member(name), None, "{name}");
        }
    }

    #[test]
    fn cluster_names_are_dns_1035_labels_of_at_most_52() {
        for good in ["a", "a1", "a-b", &"x".repeat(52)] {
            assert!(is_cluster_name(good), "{good}");
        }
        for bad in ["", "1a", "-a", "a-", "A", "a.b", "a_b", &"x".repeat(53)] {
            assert!(!is_cluster_name(bad), "{bad}");
        }
    }

    #[test]
    fn urls_follow_the_member_address_and_the_domain() {
        let service = addresses(MemberAddress::Service, "");
        assert_eq!(service.peer_url("main-x"), "http://main-x.prod.svc:2380");
        assert_eq!(service.client_url("main-x"), "https://main-x.prod.svc:2379");
        assert_eq!(service.service_url(), "https://main-client.prod.svc:2379");
        for domain in [".cluster.local", "cluster.local", "cluster.local."] {
            let pod = addresses(MemberAddress::Pod, domain);
            assert_eq!(
                pod.peer_url("main-x"),
                "http://main-x.main.prod.svc.cluster.local:2380"
            );
        }
        assert_eq!(
            service.initial_cluster(["a", "b"]),
            "a=http://a.prod.svc:2380,b=http://b.prod.svc:2380"
        );
    }

    #[test]
    fn a_token_is_told_apart_by_the_end_of_it_that_a_label_can_hold() {
        assert_eq!(token_label("db-00ff"), "db-00ff");
        let long = format!("{}-0123456789abcdef", "x".repeat(52));
        assert_eq!(token_label(&long).len(), 63);
        assert!(token_label(&long).ends_with("-0123456789abcdef"));
        let dashed = format!("{}-0123456789abcdef", "-".repeat(52));
        assert_eq!(token_label(&dashed), "0123456789abcdef");
    }

    #[test]
    fn an_address_becomes_a_url_with_brackets_where_it_is_ipv6() {
        let addresses = addresses(MemberAddress::Service, "");
        let plain = Addresses {
            client_tls: false,
            ..addresses.clone()
        };
        let at = |addresses: &Addresses, address: &str| {
            addresses.client_url_at(address.parse().unwrap(), "main-x")
        };
        assert_eq!(at(&plain, "10.0.0.7"), "http://10.0.0.7:2379");
        assert_eq!(at(&plain, "fd00::7"), "http://[fd00::7]:2379");
        // Which name the certificate must have there.
        assert_eq!(
            at(&addresses, "10.0.0.7"),
            "https://10.0.0.7:2379#main-x.prod.svc"
        );
    }

    #[test]
    fn the_member_is_read_back_from_its_url() {
        let both = [
            addresses(MemberAddress::Service, ""),
            addresses(MemberAddress::Pod, ".x"),
        ];
        for form in both {
            assert_eq!(member_of_url(&form.peer_url("main-x")), Some("main-x"));
        }
        assert_eq!(member_of_url("http://10.0.0.1:2380"), None);
        assert_eq!(member_of_url("http://[fd00::7]:2380"), None);
        assert_eq!(member_of_url("nonsense"), None);
    }

    #[test]
    fn the_operators_own_labels_and_annotations_are_reserved() {
        for key in ["app", "etcd_cluster", "etcd_node", "etcd_x", LABEL_ROLE] {
            assert!(is_reserved_label(key), "{key}");
        }
        assert!(!is_reserved_label("team") && !is_reserved_label("apps"));
        assert!(
            is_reserved_annotation("etcd.version") && is_reserved_annotation(ANNOTATION_CLUSTER_ID)
        );
        assert!(!is_reserved_annotation("prometheus.io/scrape"));
    }
}
