//! The command line all three operators share. Flags of coreos/etcd-operator v0.9.4 are accepted as they were
//! written for it, with one dash or two. Parsing only: nothing is started here.

use std::ffi::OsString;
use std::net::SocketAddr;

use clap::{Args, Parser};

/// Flags every operator takes.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Common {
    /// Where /healthz, /readyz and /metrics are served
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8080", value_parser = address)]
    pub listen_addr: SocketAddr,
    /// Create or update the operator's own CRD where RBAC allows it; otherwise wait for it
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          action = clap::ArgAction::Set, value_parser = switch)]
    pub create_crd: bool,
    /// Take the objects of all namespaces that are annotated etcd.database.coreos.com/scope: clusterwide
    #[arg(long, value_name = "BOOL", default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          action = clap::ArgAction::Set, value_parser = switch)]
    pub cluster_wide: bool,
    /// The operator's own namespace
    #[arg(
        long,
        env = "MY_POD_NAMESPACE",
        value_name = "NAMESPACE",
        hide_env_values = true
    )]
    pub pod_namespace: Option<String>,
    /// The operator's own pod: its identity in the leader election
    #[arg(long, env = "MY_POD_NAME", value_name = "NAME", hide_env_values = true)]
    pub pod_name: Option<String>,
    /// The Lease of the leader election; the binary's name by default. Operators with different Leases act at the
    /// same time
    #[arg(long, value_name = "NAME")]
    pub lease_name: Option<String>,
    /// Log as JSON, one object a line. RUST_LOG filters what is logged: info (the default), debug, info,kube_client=warn
    #[arg(long, value_name = "BOOL", env = "LOG_JSON", default_value_t = false, num_args = 0..=1, require_equals = true,
          default_missing_value = "true", action = clap::ArgAction::Set, value_parser = switch)]
    pub log_json: bool,
    /// Accepted for old manifests; has no effect
    #[arg(long, hide = true, value_name = "DURATION")]
    pub gc_interval: Option<String>,
    /// Accepted for old manifests; has no effect
    #[arg(long, hide = true, value_name = "LEVEL", allow_hyphen_values = true)]
    pub chaos_level: Option<i32>,
}

impl Common {
    /// What to tell the user about flags that do nothing any more.
    pub fn warnings(&self) -> Vec<&'static str> {
        let mut warnings = Vec::new();
        if self.gc_interval.is_some() {
            warnings.push("--gc-interval has no effect: Kubernetes' garbage collection removes what a cluster owned");
        }
        if self.chaos_level.is_some() {
            warnings.push("--chaos-level has no effect: this operator harms no members");
        }
        warnings
    }
}

/// Parses the process's arguments; `--help`, `--version` and mistakes end the process.
pub fn parse<P: Parser>() -> P {
    P::parse_from(two_dashes(std::env::args_os()))
}

/// Go's flag package takes `-cluster-wide` for `--cluster-wide`, and old Deployments write it so.
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

/// As Go's flag package reads a switch.
fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// `:8080` means every address, as it does in Go.
fn address(text: &str) -> Result<SocketAddr, String> {
    let full = if text.starts_with(':') {
        format!("0.0.0.0{text}")
    } else {
        text.to_owned()
    };
    full.parse()
        .map_err(|_| format!("{text:?} is not an address and port such as 0.0.0.0:8080"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        common: Common,
    }

    fn common(args: &[&str]) -> Common {
        let args = std::iter::once("etcd-operator")
            .chain(args.iter().copied())
            .map(OsString::from);
        Only::try_parse_from(two_dashes(args)).unwrap().common
    }

    #[test]
    fn without_flags_one_namespace_is_served_and_the_crd_created() {
        let common = common(&[]);
        assert!(common.create_crd && !common.cluster_wide);
        assert_eq!(common.listen_addr, "0.0.0.0:8080".parse().unwrap());
        assert!(common.warnings().is_empty());
    }

    #[test]
    fn flags_are_accepted_as_old_deployments_write_them() {
        let old = common(&["-cluster-wide", "-create-crd=false", "-listen-addr=:9090"]);
        assert!(old.cluster_wide && !old.create_crd);
        assert_eq!(old.listen_addr, "0.0.0.0:9090".parse().unwrap());
        assert_eq!(common(&["--cluster-wide=true"]), common(&["-cluster-wide"]));
    }

    #[test]
    fn every_flag_of_v0_9_4_is_accepted() {
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
            // Go takes the value of a flag that is no switch as the next word, too.
            if !["-create-crd", "-cluster-wide"].contains(&flag) {
                common(&[flag, value]);
                common(&[&format!("-{flag}"), value]);
            }
        }
    }

    /// What Go's flag package takes for a boolean.
    #[test]
    fn switches_are_written_as_go_reads_them() {
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
    fn flags_without_effect_are_accepted_with_a_warning() {
        assert_eq!(
            common(&["--gc-interval=10m", "--chaos-level=-1"])
                .warnings()
                .len(),
            2
        );
        assert_eq!(common(&["-chaos-level", "-1"]).chaos_level, Some(-1));
    }
}
