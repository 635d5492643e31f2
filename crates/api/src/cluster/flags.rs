//! The etcd flags that users must not set in `spec.pod.extraArgs` and `spec.pod.etcdEnv`. Both fields reject the flags
//! that the operator sets, because etcd also reads flags from environment variables. Performs no I/O.

/// Flags that the operator sets, so users must not set them in `extraArgs` and `etcdEnv`, also with the prefix
/// `experimental-`. A trailing `*` matches any suffix. The CEL rules of the schema contain the same list, and a test
/// compares the two lists.
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

/// Flags that are fields of `spec.etcd`. Users must not set them in `extraArgs`. As in coreos/etcd-operator, users may
/// set the variables of these flags in `etcdEnv`, unless the field is set.
pub const TYPED_FLAGS: &[&str] = &[
    "quota-backend-bytes",
    "auto-compaction-mode",
    "auto-compaction-retention",
    "heartbeat-interval",
    "election-timeout",
    "snapshot-count",
    "max-request-bytes",
    "max-txn-ops",
];

/// The prefix of the environment variables from which etcd reads flags.
const PREFIX: &str = "ETCD_";

/// The flag that an environment variable sets, without dashes: `ETCD_FORCE_NEW_CLUSTER` sets `force-new-cluster`.
/// `None` if etcd does not read the variable.
///
/// The variable of a flag is `ETCD_` and the name of the flag in upper case, with `_` instead of `-`. etcd accepts no
/// other spelling (`FlagToEnv` in etcd's `pkg/flags`).
pub fn flag_of_env(variable: &str) -> Option<String> {
    let name = variable.strip_prefix(PREFIX)?;
    let is_spelled = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    let spelled = !name.is_empty() && name.bytes().all(is_spelled);
    spelled.then(|| name.to_ascii_lowercase().replace('_', "-"))
}

/// True if a command line argument sets this flag. `flag` has no dashes.
pub fn is_flag(argument: &str, flag: &str) -> bool {
    let name = argument.strip_prefix("--");
    name.is_some_and(|name| name.split('=').next() == Some(flag))
}

/// The remedy if `extraArgs` must not have this argument. `None` if the argument is allowed.
pub fn refused_argument(argument: &str) -> Option<&'static str> {
    let Some(flag) = argument.strip_prefix("--") else {
        return Some("write one flag in each item, as --flag=value");
    };
    let name = flag.split('=').next().unwrap_or_default();
    if is_owned(name) {
        Some("remove the flag, because the operator sets it")
    } else if TYPED_FLAGS.contains(&stable(name)) {
        Some("use the field of spec.etcd instead")
    } else {
        None
    }
}

/// The remedy if `etcdEnv` must not have this variable. `None` if the variable is allowed.
pub fn refused_variable(variable: &str) -> Option<&'static str> {
    let flag = flag_of_env(variable)?;
    is_owned(&flag).then_some("remove the variable, because the operator sets the flag")
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

/// The flag without the prefix `experimental-`.
fn stable(flag: &str) -> &str {
    flag.strip_prefix("experimental-").unwrap_or(flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extra_arguments_with_reserved_flags_are_rejected() {
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
    fn extra_arguments_with_unreserved_flags_are_allowed() {
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
    fn only_uppercase_etcd_variables_set_flags() {
        let flag = |variable| flag_of_env(variable);
        assert_eq!(flag("ETCD_WAL_DIR").as_deref(), Some("wal-dir"));
        assert_eq!(
            flag("ETCD_FORCE_NEW_CLUSTER").as_deref(),
            Some("force-new-cluster")
        );
        // These variables correspond to no flag of etcd.
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
    fn environment_variables_of_reserved_flags_are_rejected() {
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
    fn environment_variables_of_unreserved_flags_are_allowed() {
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
    fn command_line_argument_is_matched_by_whole_flag_name() {
        for argument in ["--wal-dir=/x", "--wal-dir"] {
            assert!(is_flag(argument, "wal-dir"), "{argument}");
        }
        for argument in ["--wal-dirs=/x", "wal-dir=/x", "--wal=wal-dir"] {
            assert!(!is_flag(argument, "wal-dir"), "{argument}");
        }
    }
}
