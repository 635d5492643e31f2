//! The flags of all three operators. Flags of coreos/etcd-operator v0.9.4 are accepted with one dash or two.

use std::ffi::OsString;
use std::net::SocketAddr;

use clap::{Args, Parser, ValueEnum};

use crate::endpoints::is_label;
use crate::scope::Scope;

/// The objects that a cluster-wide operator manages.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
#[value(rename_all = "PascalCase")]
pub enum ClusterScope {
    /// Objects with the annotation etcd.database.coreos.com/scope: clusterwide
    Annotated,
    /// All objects
    All,
}

/// Flags of every operator.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Common {
    /// Listen address of /healthz, /readyz and /metrics
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8080", value_parser = address)]
    pub listen_addr: SocketAddr,
    /// Create or update the operator's own CRD if RBAC allows it; otherwise wait for the CRD
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          action = clap::ArgAction::Set, value_parser = switch)]
    pub create_crd: bool,
    /// Manage objects in all namespaces. --scope selects the objects
    #[arg(long, value_name = "BOOL", default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          action = clap::ArgAction::Set, value_parser = switch)]
    pub cluster_wide: bool,
    /// Objects that the operator manages with --cluster-wide
    #[arg(
        long,
        value_enum,
        value_name = "SCOPE",
        ignore_case = true,
        default_value = "Annotated"
    )]
    pub scope: ClusterScope,
    /// Manage the objects of this namespace instead of the operator's own namespace. Repeat the flag for more
    /// namespaces
    #[arg(long, value_name = "NAMESPACE", value_parser = namespace)]
    pub watch_namespace: Vec<String>,
    /// Namespace of the operator's own pod
    #[arg(
        long,
        env = "MY_POD_NAMESPACE",
        value_name = "NAMESPACE",
        hide_env_values = true
    )]
    pub pod_namespace: Option<String>,
    /// Name of the operator's own pod, which identifies the operator in the leader election
    #[arg(long, env = "MY_POD_NAME", value_name = "NAME", hide_env_values = true)]
    pub pod_name: Option<String>,
    /// Name of the Lease for leader election; default: the name of the binary. Operators with different Leases run
    /// concurrently
    #[arg(long, value_name = "NAME")]
    pub lease_name: Option<String>,
    /// Log as JSON, one object per line. RUST_LOG sets the log filter; default: info,kube_runtime=warn
    #[arg(long, value_name = "BOOL", env = "LOG_JSON", default_value_t = false, num_args = 0..=1, require_equals = true,
          default_missing_value = "true", action = clap::ArgAction::Set, value_parser = switch)]
    pub log_json: bool,
    /// Send a trace of each reconcile to an OpenTelemetry collector (OTLP over gRPC), as in
    /// http://collector.observability.svc:4317
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// Accepted for old manifests; has no effect
    #[arg(long, hide = true, value_name = "DURATION")]
    pub gc_interval: Option<String>,
    /// Accepted for old manifests; has no effect
    #[arg(long, hide = true, value_name = "LEVEL", allow_hyphen_values = true)]
    pub chaos_level: Option<i32>,
}

/// The flag of an operator that several replicas can share.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// Divide the objects into this number of shards, which the replicas share. All replicas need the same number. With
    /// 1, one replica reconciles all objects, and the others are on standby
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub shards: u16,
}

impl Common {
    /// A warning for each flag that is set but has no effect.
    pub fn warnings(&self) -> Vec<&'static str> {
        let mut warnings = Vec::new();
        if self.gc_interval.is_some() {
            warnings.push("--gc-interval has no effect: Kubernetes garbage collection deletes the objects of a cluster");
        }
        if self.chaos_level.is_some() {
            warnings.push("--chaos-level has no effect: this operator does not kill members");
        }
        warnings
    }

    /// The scope that the flags select. `own` is the namespace of the operator.
    ///
    /// # Errors
    /// Fails if the flags contradict each other. The error contains the remedy.
    pub fn scope(&self, own: &str) -> Result<Scope, &'static str> {
        let listed = &self.watch_namespace;
        match (self.cluster_wide, self.scope) {
            (true, _) if !listed.is_empty() => Err(
                "--watch-namespace and --cluster-wide contradict each other: remove one of the two flags",
            ),
            (false, ClusterScope::All) => Err(
                "--scope=All has no effect without --cluster-wide: add --cluster-wide or remove --scope",
            ),
            (true, ClusterScope::Annotated) => Ok(Scope::Annotated),
            (true, ClusterScope::All) => Ok(Scope::All),
            (false, ClusterScope::Annotated) if listed.is_empty() => Ok(Scope::namespace(own)),
            (false, ClusterScope::Annotated) => {
                Ok(Scope::Namespaces(listed.iter().cloned().collect()))
            }
        }
    }
}

/// Parses the name of a namespace.
fn namespace(text: &str) -> Result<String, String> {
    if is_label(text) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "{text:?} is not the name of a namespace: use lowercase letters, digits and dashes"
    ))
}

/// Parses the arguments of the process. `--help`, `--version` and invalid arguments end the process.
pub fn parse<P: Parser>() -> P {
    P::parse_from(two_dashes(std::env::args_os()))
}

/// Adds a second dash to flags that begin with one dash, because existing Deployments use flags such as
/// `-cluster-wide`, which Go's flag package accepts.
fn two_dashes(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    args.into_iter()
        .map(|arg| match arg.to_str() {
            Some(text) if is_go_flag(text) => OsString::from(format!("-{text}")),
            _ => arg,
        })
        .collect()
}

fn is_go_flag(text: &str) -> bool {
    text.strip_prefix('-').is_some_and(|rest| {
        let name = rest.split('=').next().unwrap_or_default();
        name.len() > 1 && name.starts_with(|c: char| c.is_ascii_lowercase())
    })
}

/// Parses a boolean like Go's flag package.
fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("{text:?} is not a boolean: use true or false")),
    }
}

/// Parses a listen address. As in Go, `:8080` means port 8080 of all addresses.
fn address(text: &str) -> Result<SocketAddr, String> {
    let full = if text.starts_with(':') {
        format!("0.0.0.0{text}")
    } else {
        text.to_owned()
    };
    full.parse()
        .map_err(|_| format!("{text:?} is not an address with a port: use the form 0.0.0.0:8080"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        common: Common,
    }

    pub(crate) fn common(args: &[&str]) -> Common {
        let args = std::iter::once("etcd-operator")
            .chain(args.iter().copied())
            .map(OsString::from);
        Only::try_parse_from(two_dashes(args)).unwrap().common
    }

    #[test]
    fn operator_manages_own_namespace_and_creates_crd_by_default() {
        let common = common(&[]);
        assert!(common.create_crd && !common.cluster_wide);
        assert_eq!(common.listen_addr, "0.0.0.0:8080".parse().unwrap());
        assert!(common.warnings().is_empty());
    }

    #[test]
    fn flags_select_scope_of_operator() {
        let scope = |args: &[&str]| common(args).scope("own");
        assert_eq!(scope(&[]), Ok(Scope::namespace("own")));
        assert_eq!(scope(&["-cluster-wide"]), Ok(Scope::Annotated));
        let all = ["--cluster-wide", "--scope=All"];
        assert_eq!(scope(&all), Ok(Scope::All));
        assert_eq!(scope(&["--cluster-wide", "--scope=all"]), Ok(Scope::All));
        let listed = ["--watch-namespace=b", "--watch-namespace=a"];
        let names = ["a", "b"].map(str::to_owned);
        assert_eq!(scope(&listed), Ok(Scope::Namespaces(names.into())));
        // With --watch-namespace, the operator manages its own namespace only if the flag names it.
        let other = ["--watch-namespace=a", "--cluster-wide=false"];
        assert_eq!(scope(&other), Ok(Scope::namespace("a")));
    }

    #[test]
    fn contradicting_or_malformed_scope_flags_are_refused() {
        let refused = |args: &[&str]| common(args).scope("own").unwrap_err();
        let both = refused(&["--watch-namespace=a", "--cluster-wide"]);
        assert!(both.contains("remove one"), "{both}");
        let alone = refused(&["--scope=All"]);
        assert!(alone.contains("add --cluster-wide"), "{alone}");
        for wrong in [
            "--watch-namespace=",
            "--watch-namespace=a,b",
            "--watch-namespace=A",
            "--scope=Some",
        ] {
            assert!(
                Only::try_parse_from(["etcd-operator", wrong]).is_err(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn number_of_shards_is_limited() {
        #[derive(Parser)]
        struct Sharded {
            #[command(flatten)]
            sharding: Sharding,
        }
        let shards = |args: &[&str]| {
            let args = std::iter::once("etcd-operator").chain(args.iter().copied());
            Sharded::try_parse_from(args).map(|parsed| parsed.sharding.shards)
        };
        assert_eq!(shards(&[]).ok(), Some(1));
        assert_eq!(shards(&["--shards=64"]).ok(), Some(64));
        for wrong in ["--shards=0", "--shards=65", "--shards=many"] {
            assert!(shards(&[wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn flags_with_single_dash_and_address_without_host_are_accepted() {
        let old = common(&["-cluster-wide", "-create-crd=false", "-listen-addr=:9090"]);
        assert!(old.cluster_wide && !old.create_crd);
        assert_eq!(old.listen_addr, "0.0.0.0:9090".parse().unwrap());
        let ipv6 = common(&["--listen-addr=[fd00::7]:9090"]);
        assert_eq!(ipv6.listen_addr, "[fd00::7]:9090".parse().unwrap());
        assert_eq!(common(&["--cluster-wide=true"]), common(&["-cluster-wide"]));
    }

    #[test]
    fn every_flag_of_coreos_operator_v0_9_4_is_accepted() {
        for old in [
            "-listen-addr=0.0.0.0:8080",
            "-chaos-level=1",
            "-create-crd=true",
            "-gc-interval=10m0s",
            "-cluster-wide=false",
        ] {
            let (flag, value) = old.split_once('=').unwrap();
            common(&[old]);
            common(&[&format!("-{old}")]);
            // Go also accepts `-flag value` instead of `-flag=value`, except for a boolean flag.
            if !["-create-crd", "-cluster-wide"].contains(&flag) {
                common(&[flag, value]);
                common(&[&format!("-{flag}"), value]);
            }
        }
    }

    /// Go's flag package accepts these spellings of booleans.
    #[test]
    fn boolean_flags_accept_all_spellings_of_go() {
        for (text, on) in [
            ("1", true),
            ("t", true),
            ("T", true),
            ("TRUE", true),
            ("true", true),
            ("True", true),
            ("0", false),
            ("f", false),
            ("F", false),
            ("FALSE", false),
            ("false", false),
            ("False", false),
        ] {
            assert_eq!(
                common(&[&format!("-cluster-wide={text}")]).cluster_wide,
                on,
                "{text}"
            );
            assert_eq!(
                common(&[&format!("--create-crd={text}")]).create_crd,
                on,
                "{text}"
            );
        }
    }

    #[test]
    fn flags_without_effect_cause_warnings() {
        assert_eq!(
            common(&["--gc-interval=10m", "--chaos-level=-1"])
                .warnings()
                .len(),
            2
        );
        assert_eq!(common(&["-chaos-level", "-1"]).chaos_level, Some(-1));
    }
}
