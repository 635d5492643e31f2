//! Grants of etcd endpoints to namespaces. The NetworkPolicy of every cluster admits the operators, so an object of one
//! tenant could make an operator connect to the cluster of another tenant.
//!
//! Objects outside of the operator's own namespace may therefore name only endpoints that the administrator has granted
//! to their namespace (invariant 28). Performs no I/O.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use api::names::{CLIENT_PORT, cluster_of_member, is_cluster_name};

/// Matches every namespace or every host in a grant.
const ALL: &str = "*";

/// A grant: endpoints that one namespace or every namespace may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointGrant {
    namespace: String,
    hosts: Hosts,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Hosts {
    All,
    /// All DNS names that end with this text, which begins with a dot.
    Below(String),
    One(Host),
}

/// The host of a URL: a name in lower case, or an IP address.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Name(String),
    Address(IpAddr),
}

/// The error for a grant that cannot be parsed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not <namespace>=<host>[:<port>], such as team-a=etcd.example.com, team-a=*.example.com:12379 or \
     team-a=[fd00::7]; the port is 2379 by default"
)]
pub struct UnreadableGrant(String);

impl FromStr for EndpointGrant {
    type Err = UnreadableGrant;

    fn from_str(text: &str) -> Result<Self, UnreadableGrant> {
        let read = || {
            let (namespace, place) = text.split_once('=')?;
            let named = namespace == ALL || is_label(namespace);
            let (hosts, port) = match place.strip_prefix(ALL) {
                None => {
                    let (host, port) = host_and_port(place, CLIENT_PORT)?;
                    (Hosts::One(host), port)
                }
                Some(rest) => {
                    let (below, port) = split_port(rest, CLIENT_PORT)?;
                    match below.strip_prefix('.') {
                        None if below.is_empty() => (Hosts::All, port),
                        Some(parent) if is_name(parent) => (Hosts::Below(below.to_owned()), port),
                        _ => return None,
                    }
                }
            };
            named.then(|| Self {
                namespace: namespace.to_owned(),
                hosts,
                port,
            })
        };
        read().ok_or_else(|| UnreadableGrant(text.to_owned()))
    }
}

impl EndpointGrant {
    fn covers(&self, (host, port): &(Host, u16)) -> bool {
        let is_granted = match (&self.hosts, host) {
            (Hosts::All, _) => true,
            (Hosts::Below(ending), Host::Name(name)) => name.ends_with(ending),
            (Hosts::Below(_), Host::Address(_)) => false,
            (Hosts::One(granted), host) => granted == host,
        };
        is_granted && self.port == *port
    }
}

/// How an administrator grants endpoints, for messages to users.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantedBy {
    /// Name of the operator, such as `backup operator`.
    pub operator: &'static str,
    /// The flag with which an administrator grants endpoints.
    pub flag: &'static str,
    /// The chart value that sets this flag.
    pub value: &'static str,
}

/// The etcd endpoints that namespaces may name in objects of one operator.
#[derive(Clone, Debug, Default)]
pub struct EndpointGrants {
    by: GrantedBy,
    /// The operator's own namespace, which needs no grants. `None` means that no namespace needs grants.
    own: Option<String>,
    grants: Vec<EndpointGrant>,
}

impl EndpointGrants {
    /// Invariant 28: for every scope of the operator, every namespace except the operator's own needs grants.
    pub fn new(own: &str, by: GrantedBy, grants: Vec<EndpointGrant>) -> Self {
        Self {
            by,
            own: Some(own.to_owned()),
            grants,
        }
    }

    /// The rule for the objects of a namespace.
    pub fn of(&self, namespace: &str) -> EndpointRule {
        let Some(own) = self.own.as_deref() else {
            return EndpointRule::default();
        };
        let granted = self.grants.iter();
        let granted = granted.filter(|grant| [ALL, namespace].contains(&grant.namespace.as_str()));
        EndpointRule {
            limit: (own != namespace).then(|| Limit {
                by: self.by,
                namespace: namespace.to_owned(),
                granted: granted.cloned().collect(),
            }),
        }
    }
}

/// The etcd endpoints that objects of one namespace may name. The default allows all endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointRule {
    limit: Option<Limit>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Limit {
    by: GrantedBy,
    namespace: String,
    granted: Vec<EndpointGrant>,
}

impl EndpointRule {
    /// Whether endpoints need a grant.
    pub fn is_limited(&self) -> bool {
        self.limit.is_some()
    }

    /// Checks that an operator may connect to a URL. The URL may be hostile, because it comes from an object or from an
    /// etcd response.
    ///
    /// # Errors
    /// Fails if no grant covers the URL. The error contains the remedy. The caller adds the field and the URL.
    pub fn check(&self, url: &str) -> Result<(), String> {
        let Some(limit) = &self.limit else {
            return Ok(());
        };
        let Limit {
            by,
            namespace,
            granted,
        } = limit;
        let Some(target) = target(url) else {
            return Err(
                "is not a URL with only a host and a port in lower case, such as http://etcd.example.com:2379: \
                 correct it"
                    .to_owned(),
            );
        };
        if granted.iter().any(|grant| grant.covers(&target)) {
            return Ok(());
        }
        let GrantedBy {
            operator,
            flag,
            value,
        } = by;
        let (host, port) = target;
        Err(format!(
            "is not granted to namespace {namespace}: ask the administrator to start the {operator} with \
             {flag}={namespace}={host}:{port} ({value} of the chart)"
        ))
    }

    /// Whether an operator may connect to a URL.
    pub fn allows(&self, url: &str) -> bool {
        self.check(url).is_ok()
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V4(address)) => write!(f, "{address}"),
            Self::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
        }
    }
}

/// The names of the EtcdClusters in `namespace` that can have a Service or a pod with exactly the DNS name in the URL.
/// Empty for an IP address, because it may later belong to another pod.
pub fn clusters_named(url: &str, namespace: &str) -> Vec<String> {
    let Some((Host::Name(host), CLIENT_PORT)) = target(url) else {
        return Vec::new();
    };
    let endings = [".svc", ".svc.cluster.local"];
    let mut endings = endings.iter().map(|ending| format!(".{namespace}{ending}"));
    let Some(inside) = endings.find_map(|ending| host.strip_suffix(&ending)) else {
        return Vec::new();
    };
    let labels: Vec<&str> = inside.split('.').collect();
    let candidates = match labels.as_slice() {
        [service] => vec![
            service.strip_suffix("-client"),
            cluster_of_member(service),
            Some(*service),
        ],
        [pod, cluster] => vec![cluster_of_member(pod).filter(|of| of == cluster)],
        _ => Vec::new(),
    };
    let named = candidates.into_iter().flatten();
    named
        .filter(|name| is_cluster_name(name))
        .map(str::to_owned)
        .collect()
}

/// The host and the port of a URL. `None` if other programs could find a different host in the URL.
fn target(url: &str) -> Option<(Host, u16)> {
    let (scheme, rest) = url.split_once("://")?;
    let usual = match scheme {
        "http" => 80,
        "https" => 443,
        _ => return None,
    };
    host_and_port(rest.strip_suffix('/').unwrap_or(rest), usual)
}

fn host_and_port(text: &str, usual: u16) -> Option<(Host, u16)> {
    if let Some(rest) = text.strip_prefix('[') {
        let (address, rest) = rest.split_once(']')?;
        let address: Ipv6Addr = address.parse().ok()?;
        let ("", port) = split_port(rest, usual)? else {
            return None;
        };
        return Some((Host::Address(address.into()), port));
    }
    let (host, port) = split_port(text, usual)?;
    if let Ok(address) = host.parse::<Ipv4Addr>() {
        return Some((Host::Address(address.into()), port));
    }
    is_name(host).then(|| (Host::Name(host.to_owned()), port))
}

fn split_port(text: &str, usual: u16) -> Option<(&str, u16)> {
    let Some((host, port)) = text.split_once(':') else {
        return Some((text, usual));
    };
    // The port must consist of digits, because `parse` also accepts a sign, as in `+2379`.
    let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse::<u16>().ok();
    let port = port.filter(|port| *port > 0 && is_number)?;
    Some((host, port))
}

/// Whether a text is a DNS name in lower case. Rejects a name whose last label begins with a digit, such as `0x7f.1`,
/// because resolvers parse it as an IP address.
fn is_name(text: &str) -> bool {
    let is_numeric = |label: &str| label.starts_with(|first: char| first.is_ascii_digit());
    text.split('.').all(is_label) && !text.rsplit('.').next().is_some_and(is_numeric)
}

/// Whether a text is a DNS label in lower case, such as the name of a namespace.
pub(crate) fn is_label(label: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&label.len())
        && label.bytes().all(is_plain)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    const BY: GrantedBy = GrantedBy {
        operator: "backup operator",
        flag: "--etcd-endpoints",
        value: "backups.etcdEndpoints",
    };

    fn rule(grants: &[&str], namespace: &str) -> EndpointRule {
        let grants = grants.iter().map(|text| text.parse().unwrap()).collect();
        EndpointGrants::new("operators", BY, grants).of(namespace)
    }

    #[test]
    fn invariant_28_tenant_namespaces_need_a_grant_for_endpoints() {
        let url = "http://main-client.team-a.svc:2379";
        let refused = rule(&[], "team-b").check(url).unwrap_err();
        for part in [
            "namespace team-b",
            "backup operator",
            "--etcd-endpoints=team-b=main-client.team-a.svc:2379",
            "backups.etcdEndpoints",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        assert!(rule(&[], "operators").allows(url));
        assert!(!rule(&[], "operators").is_limited());
        // The grant that the error message above proposes must be sufficient.
        let granted = ["team-b=main-client.team-a.svc:2379"];
        assert!(rule(&granted, "team-b").allows(url));
        assert!(!rule(&granted, "team-c").allows(url));
    }

    #[test]
    fn endpoint_grant_covers_only_matching_host_and_port() {
        for (grant, url, allowed) in [
            ("b=etcd.example.com", "http://etcd.example.com:2379", true),
            ("b=etcd.example.com", "https://etcd.example.com:2379/", true),
            ("b=etcd.example.com", "http://etcd.example.com", false),
            ("b=etcd.example.com:80", "http://etcd.example.com", true),
            ("b=etcd.example.com:443", "https://etcd.example.com", true),
            ("b=etcd.example.com", "http://etcd.example.com:22379", false),
            (
                "b=etcd.example.com",
                "http://x.etcd.example.com:2379",
                false,
            ),
            ("b=*.example.com", "http://x.example.com:2379", true),
            ("b=*.example.com", "http://x.y.example.com:2379", true),
            ("b=*.example.com", "http://example.com:2379", false),
            ("b=*.example.com", "http://badexample.com:2379", false),
            (
                "b=*.example.com",
                "http://x.example.com.evil.org:2379",
                false,
            ),
            ("b=10.0.0.7", "http://10.0.0.7:2379", true),
            ("b=10.0.0.7", "http://10.0.0.8:2379", false),
            ("b=10.0.0.7", "http://[::ffff:10.0.0.7]:2379", false),
            ("b=[fd00::7]", "http://[fd00:0:0::7]:2379", true),
            ("b=[fd00::7]", "http://[fd00::8]:2379", false),
            ("b=*", "http://10.0.0.7:2379", true),
            ("b=*", "http://10.0.0.7:6443", false),
            ("*=10.0.0.7", "http://10.0.0.7:2379", true),
            ("c=10.0.0.7", "http://10.0.0.7:2379", false),
        ] {
            assert_eq!(rule(&[grant], "b").allows(url), allowed, "{grant} {url}");
        }
    }

    /// These texts are not URLs, or programs can find different hosts in them. Therefore not even a grant for all hosts
    /// covers them.
    const AMBIGUOUS: [&str; 27] = [
        "",
        "main-client.b.svc:2379",
        "http://",
        "http:///main-client.b.svc:2379",
        "HTTP://main-client.b.svc:2379",
        "ftp://main-client.b.svc:2379",
        "unix://main-client.b.svc:2379",
        "http://Main-client.b.svc:2379",
        "http://main-client.B.svc:2379",
        "http://main-client.b.svc.:2379",
        "http://main-client.b.svc.cluster.local.:2379",
        "http://main-client..b.svc:2379",
        "http://.main-client.b.svc:2379",
        "http://main-client.b.svc:2379@evil.example:2379",
        "http://user@main-client.b.svc:2379",
        "http://user:password@main-client.b.svc:2379",
        "http://evil.example:2379#main-client.b.svc",
        "http://evil.example:2379/main-client.b.svc",
        "http://evil.example:2379?main-client.b.svc",
        "http://main-client%2eb.svc:2379",
        "http://main-client.b.svc:+2379",
        "http://main-client.b.svc:0",
        "http://main-client.b.svc:2379:2379",
        "http://main-client.b.svc:2379\\@evil.example",
        "http://main-client.b.svc:2379 ",
        "http://[fe80::1%25eth0]:2379",
        "http://0x7f.1:2379",
    ];

    #[test]
    fn endpoint_grant_for_all_hosts_does_not_cover_ambiguous_urls() {
        let all = rule(&["*=*", "*=*:80", "*=*.svc"], "b");
        for url in AMBIGUOUS {
            let refused = all.check(url).expect_err(url);
            assert!(refused.contains("correct it"), "{url}: {refused}");
            assert!(clusters_named(url, "b").is_empty(), "{url}");
        }
        for number in ["http://2130706433:2379", "http://010.0.0.1:2379"] {
            assert!(!all.allows(number), "{number}");
        }
    }

    #[test]
    fn invariant_28_url_matches_only_exact_services_in_own_namespace() {
        let named = |url: &str| clusters_named(url, "b");
        for url in [
            "http://main-client.b.svc:2379",
            "https://main-client.b.svc:2379/",
            "http://main-client.b.svc.cluster.local:2379",
            "http://main-abcdefghjk.b.svc:2379",
            "http://main-abcdefghjk.main.b.svc:2379",
            "http://main-abcdefghjk.main.b.svc.cluster.local:2379",
            "http://main.b.svc:2379",
        ] {
            assert!(named(url).contains(&"main".to_owned()), "{url}");
        }
        for url in [
            "http://main-client.a.svc:2379",
            "http://main-client.a.svc.b.svc:2379",
            "http://main-client.b.svc.a.svc:2379",
            "http://main-client.b.svc.evil.example:2379",
            "http://main-client.b.svc.cluster.local.evil.example:2379",
            "http://main-client.b.svc.cluster.locals:2379",
            "http://main-client.b:2379",
            "http://main-client:2379",
            "http://main-client.xb.svc:2379",
            "http://b.svc:2379",
            "http://main-abcdefghjk.other.b.svc:2379",
            "http://x.main.b.svc:2379",
            "http://main-client.b.svc:2380",
            "http://main-client.b.svc",
            "http://10.0.0.7:2379",
            "http://[fd00::7]:2379",
            "http://localhost:2379",
        ] {
            assert!(named(url).is_empty(), "{url}: {:?}", named(url));
        }
    }

    #[test]
    fn malformed_endpoint_grants_are_rejected() {
        for text in [
            "",
            "team-a",
            "team-a=",
            "=10.0.0.7",
            "Team=10.0.0.7",
            "team-a=http://10.0.0.7:2379",
            "team-a=10.0.0.7:",
            "team-a=10.0.0.7:70000",
            "team-a=10.0.0.0/8",
            "team-a=fd00::7",
            "team-a=Etcd.example.com",
            "team-a=etcd.example.com.",
            "team-a=etcd.*.com",
            "team-a=*etcd.example.com",
            "team-a=*.",
            "team-a=**",
            "*",
        ] {
            assert!(text.parse::<EndpointGrant>().is_err(), "{text}");
        }
    }
}
