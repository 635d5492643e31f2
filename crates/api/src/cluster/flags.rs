//! Which flags of etcd a user may set: by `spec.pod.extraArgs`, and by `spec.pod.etcdEnv`, from which etcd reads the same
//! flags. One list and one rule for both. Pure.

/// Flags of etcd that the operator sets itself: neither `extraArgs` nor `etcdEnv` may set them, also not with the prefix
/// `experimental-`. A name that ends in `*` stands for all that begin so. The rules of the schema repeat this list; a
/// test compares the two.
pub const OWNED_FLAGS: &[&str] = &[
    "name",
    "data-dir",
    "wal-dir",
    "config-file",
    "force-new-cluster",
    "initial-*",
    "listen-*",
    "advertise-client-urls",
    "discovery*",
    "cert-file",
    "key-file",
    "trusted-ca-file",
    "client-cert-auth",
    "auto-tls",
    "peer-cert-file",
    "peer-key-file",
    "peer-trusted-ca-file",
    "peer-client-cert-auth",
    "peer-auto-tls",
    "peer-skip-client-san-verification",
    "max-learners",
    "version",
];

/// Flags of etcd that have a field in `spec.etcd`. `extraArgs` may not set them. `etcdEnv` may, as in v1beta2, where the
/// field is not given.
pub const TYPED_FLAGS: &[&str] = &[
    "quota-backend-bytes",
    "auto-compaction-mode",
    "auto-compaction-retention",
    "heartbeat-interval",
    "election-timeout",
    "snapshot-count",
    "max-request-bytes",
];

/// The prefix of the variables from which etcd reads its flags.
const PREFIX: &str = "ETCD_";

/// The flag of etcd that an environment variable sets, without dashes; `None` for a variable from which etcd reads no
/// flag. `ETCD_FORCE_NEW_CLUSTER` sets `force-new-cluster`.
///
/// etcd looks up `ETCD_` and the name of each flag in upper case with `_` for `-`, in exactly this spelling
/// (`FlagToEnv` in etcd's `pkg/flags`).
pub fn flag_of_env(variable: &str) -> Option<String> {
    let name = variable.strip_prefix(PREFIX)?;
    let is_spelled = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    let spelled = !name.is_empty() && name.bytes().all(is_spelled);
    spelled.then(|| name.to_ascii_lowercase().replace('_', "-"))
}

/// Whether an argument of etcd's command line sets the flag, which is given without dashes.
pub fn is_flag(argument: &str, flag: &str) -> bool {
    let name = argument.strip_prefix("--");
    name.is_some_and(|name| name.split('=').next() == Some(flag))
}

/// Whether `extraArgs` may not hold this argument, and the remedy.
pub fn refused_argument(argument: &str) -> Option<&'static str> {
    let Some(flag) = argument.strip_prefix("--") else {
        return Some("write one flag in each item, as --flag=value");
    };
    let name = flag.split('=').next().unwrap_or_default();
    if is_owned(name) {
        Some("remove the flag, which the operator sets itself")
    } else if TYPED_FLAGS.contains(&stable(name)) {
        Some("use the field of spec.etcd instead")
    } else {
        None
    }
}

/// Whether `etcdEnv` may not hold a variable of this name, whatever its value, and the remedy.
pub fn refused_variable(variable: &str) -> Option<&'static str> {
    let flag = flag_of_env(variable)?;
    is_owned(&flag).then_some("remove the variable, whose flag is the operator's")
}

fn is_owned(flag: &str) -> bool {
    let name = stable(flag);
    OWNED_FLAGS
        .iter()
        .any(|owned| match owned.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == *owned,
        })
}

/// The name of a flag from the release on in which it is no experiment any more.
fn stable(flag: &str) -> &str {
    flag.strip_prefix("experimental-").unwrap_or(flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_the_flags_the_operator_owns() {
        for argument in [
            "--name=x",
            "--data-dir=/tmp",
            "--initial-cluster-state=new",
            "--listen-metrics-urls=http://0.0.0.0:1",
            "--peer-cert-file=x",
            "--experimental-max-learners=3",
            "--discovery-srv=x",
            "--quota-backend-bytes=1",
            "name=x",
        ] {
            assert!(refused_argument(argument).is_some(), "{argument}");
        }
    }

    #[test]
    fn lets_other_flags_pass() {
        for argument in [
            "--log-level=debug",
            "--enable-pprof",
            "--names=x",
            "--auth-token-ttl=5",
        ] {
            assert_eq!(refused_argument(argument), None, "{argument}");
        }
    }

    #[test]
    fn a_variable_is_read_as_etcd_reads_it() {
        let flag = |variable| flag_of_env(variable);
        assert_eq!(flag("ETCD_WAL_DIR").as_deref(), Some("wal-dir"));
        assert_eq!(
            flag("ETCD_FORCE_NEW_CLUSTER").as_deref(),
            Some("force-new-cluster")
        );
        // etcd looks none of these up.
        for variable in [
            "",
            "ETCD_",
            "ETCD",
            "WAL_DIR",
            "ETCD_wal_dir",
            "ETCD_Wal_Dir",
            "etcd_WAL_DIR",
            "ETCD_WAL-DIR",
            "ETCD_WAL_DIR ",
            " ETCD_WAL_DIR",
            "ETCDCTL_DATA_DIR",
            "XETCD_WAL_DIR",
        ] {
            assert_eq!(flag(variable), None, "{variable:?}");
        }
    }

    #[test]
    fn refuses_variables_of_the_flags_the_operator_owns() {
        for variable in [
            "ETCD_FORCE_NEW_CLUSTER",
            "ETCD_WAL_DIR",
            "ETCD_CONFIG_FILE",
            "ETCD_DISCOVERY",
            "ETCD_DISCOVERY_SRV",
            "ETCD_DISCOVERY_ENDPOINTS",
            "ETCD_INITIAL_CLUSTER",
            "ETCD_INITIAL_CLUSTER_STATE",
            "ETCD_DATA_DIR",
            "ETCD_NAME",
            "ETCD_LISTEN_CLIENT_HTTP_URLS",
            "ETCD_PEER_AUTO_TLS",
            "ETCD_MAX_LEARNERS",
            "ETCD_EXPERIMENTAL_MAX_LEARNERS",
        ] {
            assert!(refused_variable(variable).is_some(), "{variable}");
        }
    }

    #[test]
    fn lets_other_variables_pass() {
        for variable in [
            "ETCD_AUTO_COMPACTION_RETENTION",
            "ETCD_QUOTA_BACKEND_BYTES",
            "ETCD_LOG_LEVEL",
            "ETCD_FEATURE_GATES",
            "ETCD_NAMES",
            "ETCD_UNSUPPORTED_ARCH",
            "ETCD_VERIFY",
            "ETCDCTL_API",
            "ETCDCTL_DATA_DIR",
            "ETCD_data_dir",
            "GODEBUG",
            "GOGC",
            "NAME",
        ] {
            assert_eq!(refused_variable(variable), None, "{variable}");
        }
    }

    #[test]
    fn a_flag_is_known_on_the_command_line() {
        for argument in ["--wal-dir=/x", "--wal-dir"] {
            assert!(is_flag(argument, "wal-dir"), "{argument}");
        }
        for argument in ["--wal-dirs=/x", "wal-dir=/x", "--wal=wal-dir"] {
            assert!(!is_flag(argument, "wal-dir"), "{argument}");
        }
    }
}
