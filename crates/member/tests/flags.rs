//! Runs real etcd programs with the flags and variables of member pods of other versions. etcd does not start with an
//! unknown flag, and ignores an unknown variable.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::process::{Command, Output};

use api::EtcdCluster;
use api::version::EtcdVersion;
use etcd::testing::Programs;
use member::{Member, Members, Role, Start, etcd_arguments, knows_variable};
use serde_json::json;

/// The minor releases of etcd, with the versions for which pods are built.
const RELEASES: [(&str, &str); 4] = [
    ("3.4", "3.4.23"),
    ("3.5", "3.5.35"),
    ("3.6", "3.6.16"),
    ("3.7", "3.7.3"),
];

/// The flags of a member with TLS and all options of `spec.etcd`.
fn flags(version: &str) -> Vec<String> {
    let spec = json!({
        "size": 3,
        "TLS": { "generated": {} },
        "etcd": {
            "quotaBackendBytes": 2_147_483_648_i64, "autoCompactionMode": "periodic",
            "autoCompactionRetention": "1h", "heartbeatInterval": "100ms", "electionTimeout": "1s",
            "snapshotCount": 10_000, "maxRequestBytes": 2_097_152, "maxTxnOps": 256,
        },
    });
    let cluster = EtcdCluster::new("db", serde_json::from_value(spec).unwrap());
    let member = Member {
        name: "db-aaaaaaaaaa",
        version: &EtcdVersion::parse(version).unwrap(),
        role: Role::Voter,
        start: Start::OnDisk,
    };
    let flags = etcd_arguments(&Members::of(&cluster, "default", "token", None), &member);
    for expected in ["--peer-cert-file=", "--cert-file=", "--max-txn-ops=256"] {
        assert!(
            flags.iter().any(|flag| flag.starts_with(expected)),
            "{expected}"
        );
    }
    flags
}

/// Lets etcd read these flags. With `--version`, etcd exits after it has read them.
fn read(programs: &Programs, flags: &[String]) -> Output {
    let mut command = Command::new(&programs.etcd);
    command.args(flags).arg("--version");
    command.env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH);
    command.output().unwrap()
}

/// The image of a running pod may change to another release, but the flags of the pod stay.
#[test]
fn every_release_knows_all_flags_of_members() {
    for (minor, _) in RELEASES {
        let programs = Programs::find(minor);
        for (_, made_for) in RELEASES {
            let output = read(&programs, &flags(made_for));
            assert!(
                output.status.success(),
                "etcd {minor}, pod for {made_for}: {output:?}"
            );
        }
        let unknown = read(&programs, &["--unknown=true".to_owned()]);
        assert!(!unknown.status.success(), "etcd {minor}");
    }
}

/// The variables that turn off the reverse DNS check of peers.
const VARIABLES: [&str; 2] = [
    "ETCD_PEER_SKIP_CLIENT_SAN_VERIFICATION",
    "ETCD_EXPERIMENTAL_PEER_SKIP_CLIENT_SAN_VERIFICATION",
];

#[test]
fn etcd_ignores_variable_of_other_release() {
    for (minor, version) in RELEASES {
        let programs = Programs::find(minor);
        let parsed = EtcdVersion::parse(version).unwrap();
        for variable in VARIABLES {
            let mut command = Command::new(&programs.etcd);
            command.env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH);
            // etcd reads its variables, and then exits because of the invalid election timeout.
            command.args(["--heartbeat-interval=100", "--election-timeout=100"]);
            let output = command.env(variable, "true").output().unwrap();
            let text = [output.stderr, output.stdout].concat();
            let text = String::from_utf8_lossy(&text);
            assert!(text.contains("election-timeout"), "etcd {version}: {text}");
            let unknown = text
                .lines()
                .any(|line| line.contains("unrecognized") && line.contains(variable));
            assert_eq!(
                unknown,
                !knows_variable(&parsed, variable),
                "etcd {version}: {variable}: {text}"
            );
        }
    }
}
