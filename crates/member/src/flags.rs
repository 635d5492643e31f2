//! Builds the command line of etcd for each version, and reads options from the command line of a pod.
//!
//! The flag names are from etcd 3.5.35, 3.6.16 and 3.7.3.

use api::cluster::{EtcdOptions, TlsPolicy};
use api::names::{CLIENT_PORT, DATA_DIR, METRICS_PORT};
use api::version::EtcdVersion;
use k8s_openapi::api::core::v1::Container;

use super::pod::tls::{SKIP_REVERSE_DNS, SKIP_REVERSE_DNS_EXPERIMENTAL};
use super::{Member, Members, Start, initial_cluster_of_names};

/// Maximum number of learners in etcd 3.6 and later. It equals the size of the largest cluster, and never changes,
/// because a change would restart every member.
pub const MAX_LEARNERS: u8 = 7;
/// The environment variable for [`MAX_LEARNERS`]. etcd can read each flag from a variable.
pub const VARIABLE_MAX_LEARNERS: &str = "ETCD_MAX_LEARNERS";

/// The arguments of the etcd container, without the program.
pub fn etcd_arguments(members: &Members<'_>, member: &Member<'_>) -> Vec<String> {
    let addresses = members.addresses();
    let name = member.name;
    let (peer_url, client_url) = (addresses.peer_url(name), addresses.client_url(name));
    let mut arguments = vec![
        format!("--name={name}"),
        format!("--data-dir={DATA_DIR}"),
        // The listeners use the address 0.0.0.0, with which Go listens on IPv4 and IPv6 (ADR 27).
        format!("--listen-peer-urls={}", peer_listeners(members)),
        format!("--listen-client-urls={}", client_listeners(members)),
        format!("--initial-advertise-peer-urls={peer_url}"),
        format!("--advertise-client-urls={client_url}"),
    ];
    arguments.extend(start_arguments(members, member));
    arguments.extend(version_arguments(member.version));
    arguments.extend(crate::pod::tls::arguments(members, member));
    if let Some(options) = &members.spec.etcd {
        arguments.extend(option_arguments(options));
    }
    arguments.extend(extra_arguments(members));
    arguments
}

/// The value of `--snapshot-count` of a container. `None` if it is not set or not a number.
pub fn snapshot_count(container: &Container) -> Option<u64> {
    etcd_option(container, "snapshot-count")?.parse().ok()
}

/// The value of an etcd option, from its flag or its variable. A flag has priority over its variable, and the last flag
/// has priority over earlier flags. The flag and its value may be separate arguments.
pub fn etcd_option<'a>(container: &'a Container, name: &str) -> Option<&'a str> {
    let command = container.command.iter().chain(&container.args).flatten();
    let words: Vec<&str> = command.map(String::as_str).collect();
    let value = |(index, word): (usize, &&'a str)| {
        let word = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
        match word.strip_prefix(name)? {
            "" => words.get(index + 1).copied(),
            rest => rest.strip_prefix('='),
        }
    };
    let flag = words.iter().enumerate().filter_map(value).next_back();
    let variable = || {
        let variable = format!("ETCD_{}", name.to_uppercase().replace('-', "_"));
        let mut variables = container.env.iter().flatten();
        variables.find(|one| one.name == variable)?.value.as_deref()
    };
    flag.or_else(variable)
}

fn scheme(tls: bool) -> &'static str {
    if tls { "https" } else { "http" }
}

fn peer_listeners(members: &Members<'_>) -> String {
    let all = members.peers().listeners().iter();
    let urls = all.map(|(tls, port)| format!("{}://0.0.0.0:{port}", scheme(*tls)));
    urls.collect::<Vec<_>>().join(",")
}

/// The listen URLs for clients. Plaintext and TLS can share a port, because etcd distinguishes them by the first bytes
/// of a connection (`serve` in `server/embed/serve.go`).
fn client_listeners(members: &Members<'_>) -> String {
    let url = |tls| format!("{}://0.0.0.0:{CLIENT_PORT}", scheme(tls));
    match &members.spec.tls {
        Some(tls) if tls.accepts_plaintext() => [false, true].map(url).join(","),
        tls => url(tls.as_ref().is_some_and(TlsPolicy::insists_on_tls)),
    }
}

fn start_arguments(members: &Members<'_>, member: &Member<'_>) -> Vec<String> {
    let token = format!("--initial-cluster-token={}", members.token);
    let (state, initial_cluster) = match &member.start {
        Start::Bootstrap { members: first } => ("new", initial_cluster_of_names(members, first)),
        Start::Join { initial_cluster } => ("existing", initial_cluster.clone()),
        // Invariant 6: with the state `existing`, etcd without data must ask another member for the member list. The
        // initial cluster names no other member, so etcd fails to start, and forms no new cluster.
        Start::OnDisk => (
            "existing",
            initial_cluster_of_names(members, &[member.name.to_owned()]),
        ),
    };
    vec![
        format!("--initial-cluster={initial_cluster}"),
        format!("--initial-cluster-state={state}"),
        token,
    ]
}

fn version_arguments(version: &EtcdVersion) -> Vec<String> {
    let mut arguments = Vec::new();
    if has_metrics_listener(version) {
        arguments.push(format!(
            "--listen-metrics-urls=http://0.0.0.0:{METRICS_PORT}"
        ));
    }
    if version.minor() == (3, 4) {
        // Only etcd 3.4 needs these flags, because pre-vote and the zap logger are the defaults since etcd 3.5.
        arguments.push("--pre-vote=true".to_owned());
        arguments.push("--logger=zap".to_owned());
    }
    arguments
}

/// True if etcd has the flag `--listen-metrics-urls`, which exists since 3.3.
pub(super) fn has_metrics_listener(version: &EtcdVersion) -> bool {
    version.minor() >= (3, 3)
}

/// True if etcd of this version knows the environment variable `name`. Every name counts as known, except the two
/// variables for reverse DNS in pods with TLS. etcd ignores an unknown variable.
pub fn knows_variable(version: &EtcdVersion, name: &str) -> bool {
    match name {
        SKIP_REVERSE_DNS => version.has_stable_flag_names(),
        SKIP_REVERSE_DNS_EXPERIMENTAL => ((3, 4)..=(3, 6)).contains(&version.minor()),
        _ => true,
    }
}

fn option_arguments(options: &EtcdOptions) -> impl Iterator<Item = String> {
    let flags = options.flags().into_iter();
    flags.map(|option| format!("--{}={}", option.flag, option.value))
}

/// The flags in the spec, without flags that the operator sets. Validation now rejects such flags, but older objects
/// may contain them.
fn extra_arguments(members: &Members<'_>) -> Vec<String> {
    let extra = members
        .spec
        .pod
        .as_ref()
        .map(|pod| pod.extra_args.as_slice())
        .unwrap_or_default();
    extra
        .iter()
        .filter(|argument| api::cluster::refused_argument(argument).is_none())
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    fn has(arguments: &[String], argument: &str) -> bool {
        arguments.iter().any(|a| a == argument)
    }

    fn names_flag(arguments: &[String], flag: &str) -> bool {
        arguments.iter().any(|a| a.split('=').next() == Some(flag))
    }

    #[test]
    fn initial_cluster_of_first_member_lists_all_first_members() {
        let arguments = Fixture::default().arguments();
        assert!(has(&arguments, "--initial-cluster-state=new"));
        assert!(has(&arguments, "--initial-cluster-token=token"));
        assert!(has(
            &arguments,
            "--initial-cluster=db-aaaaaaaaaa=http://db-aaaaaaaaaa.prod.svc:2380,\
             db-bbbbbbbbbb=http://db-bbbbbbbbbb.prod.svc:2380"
        ));
        assert!(has(
            &arguments,
            "--initial-advertise-peer-urls=http://db-aaaaaaaaaa.prod.svc:2380"
        ));
        assert!(has(
            &arguments,
            "--advertise-client-urls=http://db-aaaaaaaaaa.prod.svc:2379"
        ));
    }

    #[test]
    fn joining_member_uses_initial_cluster_from_member_add() {
        let arguments = Fixture::default()
            .start(Start::Join {
                initial_cluster: "a=b,c=d".into(),
            })
            .arguments();
        assert!(has(&arguments, "--initial-cluster=a=b,c=d"));
        assert!(has(&arguments, "--initial-cluster-state=existing"));
    }

    #[test]
    fn etcd_option_is_read_from_flag_or_variable() {
        for (words, variable, expected) in [
            (vec!["--snapshot-count=500"], None, Some(500)),
            (vec!["--snapshot-count", "500"], None, Some(500)),
            (vec!["-snapshot-count=500"], Some("7"), Some(500)),
            (
                vec!["--snapshot-count=5", "--snapshot-count=500"],
                None,
                Some(500),
            ),
            (vec!["--snapshot-counts=500"], Some("7"), Some(7)),
            (vec!["--snapshot-count=many"], None, None),
            (vec!["--name=db"], None, None),
        ] {
            let container: Container = serde_json::from_value(serde_json::json!({
                "name": "etcd",
                "command": ["/usr/local/bin/etcd"],
                "args": words,
                "env": [{ "name": "ETCD_SNAPSHOT_COUNT", "value": variable }],
            }))
            .unwrap();
            assert_eq!(snapshot_count(&container), expected, "{words:?}");
        }
    }

    /// Invariant 6: without its data, a member whose initial cluster contains only itself does not start.
    #[test]
    fn initial_cluster_of_restarted_member_lists_only_itself() {
        let arguments = Fixture::default().start(Start::OnDisk).arguments();
        assert!(has(
            &arguments,
            "--initial-cluster=db-aaaaaaaaaa=http://db-aaaaaaaaaa.prod.svc:2380"
        ));
        assert!(has(&arguments, "--initial-cluster-state=existing"));
    }

    #[test]
    fn advertised_url_depends_on_member_address_and_cluster_domain() {
        let pod = r#"{"memberAddress":"Pod","pod":{"ClusterDomain":".cluster.local"}}"#;
        let arguments = Fixture::with(pod).arguments();
        let url = "--advertise-client-urls=http://db-aaaaaaaaaa.db.prod.svc.cluster.local:2379";
        assert!(has(&arguments, url), "{arguments:?}");
    }

    /// For the address 0.0.0.0, Go listens on both IP families, or only on IPv6 if the host has no IPv4
    /// (`favoriteAddrFamily` in `net`). Members advertise host names, so the arguments work with IPv4, IPv6 and dual
    /// stack.
    #[test]
    fn etcd_arguments_work_with_both_ip_families() {
        let arguments = Fixture::default().arguments();
        for flag in ["peer", "client", "metrics"] {
            let listens = format!("--listen-{flag}-urls=http://0.0.0.0:");
            assert!(
                arguments.iter().any(|one| one.starts_with(&listens)),
                "{flag}"
            );
        }
        let advertised = arguments.iter().filter(|one| one.contains("advertise"));
        assert!(advertised.clone().count() == 2);
        for argument in advertised {
            let url = argument.split_once('=').unwrap().1;
            assert_eq!(
                api::names::member_of_url(url),
                Some("db-aaaaaaaaaa"),
                "{argument}"
            );
        }
    }

    #[test]
    fn etcd_flags_depend_on_version() {
        // Each row contains the version, true if etcd gets the flag for pre-vote, and true if etcd gets the metrics
        // listener.
        for (version, pre_vote, metrics) in [
            ("3.2.13", false, false),
            ("3.4.37", true, true),
            ("3.5.35", false, true),
            ("3.6.16", false, true),
            ("3.7.3", false, true),
        ] {
            let arguments = Fixture::default().version(version).arguments();
            assert!(!names_flag(&arguments, "--max-learners"), "{version}");
            assert_eq!(names_flag(&arguments, "--pre-vote"), pre_vote, "{version}");
            assert_eq!(
                names_flag(&arguments, "--listen-metrics-urls"),
                metrics,
                "{version}"
            );
        }
    }

    #[test]
    fn fields_of_spec_etcd_become_flags_in_units_of_etcd() {
        let arguments = Fixture::with(
            r#"{"etcd":{"quotaBackendBytes":8589934592,"autoCompactionMode":"periodic","autoCompactionRetention":"30m",
                "heartbeatInterval":"200ms","electionTimeout":"2s","snapshotCount":5000,"maxRequestBytes":2097152,"maxTxnOps":1024}}"#,
        )
        .arguments();
        for flag in [
            "--quota-backend-bytes=8589934592",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=30m",
            "--heartbeat-interval=200",
            "--election-timeout=2000",
            "--snapshot-count=5000",
            "--max-request-bytes=2097152",
            "--max-txn-ops=1024",
        ] {
            assert!(has(&arguments, flag), "{flag}");
        }
    }

    #[test]
    fn extra_arguments_never_override_operator_flags() {
        let extra = r#"{"pod":{"extraArgs":["--log-level=debug","--name=other","--initial-cluster-state=new"]}}"#;
        let arguments = Fixture::with(extra).arguments();
        assert_eq!(arguments.last().unwrap(), "--log-level=debug");
        assert!(!has(&arguments, "--name=other"));
    }

    /// Invariant 23: in every stage of a switch of TLS between members, a member listens at the URL that it advertises.
    #[test]
    fn member_listens_at_advertised_url_in_every_tls_stage() {
        let with = |stage: &str, accepts: bool| {
            Fixture::with(&format!(
                r#"{{"TLS":{{"static":{{"member":{{"peerSecret":"p","serverSecret":"s"}},"operatorSecret":"o"}},
                    "acceptPlaintext":{accepts}{stage}}}}}"#
            ))
            .arguments()
        };
        let opened = with(r#","peerStage":"PlainAndTls""#, true);
        for flag in [
            "--listen-peer-urls=http://0.0.0.0:2380,https://0.0.0.0:2382",
            "--listen-client-urls=http://0.0.0.0:2379,https://0.0.0.0:2379",
            "--initial-advertise-peer-urls=http://db-aaaaaaaaaa.prod.svc:2380",
            "--advertise-client-urls=http://db-aaaaaaaaaa.prod.svc:2379",
            "--peer-client-cert-auth=true",
            "--client-cert-auth=true",
        ] {
            assert!(has(&opened, flag), "{flag}: {opened:?}");
        }
        let twice = with(r#","peerStage":"TlsTwice""#, true);
        for flag in [
            "--listen-peer-urls=https://0.0.0.0:2380,https://0.0.0.0:2382",
            "--initial-advertise-peer-urls=https://db-aaaaaaaaaa.prod.svc:2380",
        ] {
            assert!(has(&twice, flag), "{flag}: {twice:?}");
        }
        let complete = with("", false);
        for flag in [
            "--listen-peer-urls=https://0.0.0.0:2380",
            "--listen-client-urls=https://0.0.0.0:2379",
        ] {
            assert!(has(&complete, flag), "{flag}: {complete:?}");
        }
    }
}
