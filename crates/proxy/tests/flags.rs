//! Every supported release of etcd knows the flags with which the operator starts its proxies. etcd does not start with
//! an unknown flag.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::process::{Command, Output};

use api::EtcdCluster;
use api::version::EtcdVersion;
use etcd::testing::Programs;
use serde_json::json;

/// The minor releases of etcd, with the versions for which proxies are built.
const RELEASES: [(&str, &str); 4] = [
    ("3.4", "3.4.23"),
    ("3.5", "3.5.35"),
    ("3.6", "3.6.16"),
    ("3.7", "3.7.3"),
];

/// The flags of a proxy with TLS and all options of `spec.grpcProxy`.
fn flags(version: &str) -> Vec<String> {
    let spec = json!({
        "TLS": { "generated": {} },
        "grpcProxy": { "namespacePrefix": "/team-a/" },
    });
    let cluster = EtcdCluster::new("db", serde_json::from_value(spec).unwrap());
    let proxy = cluster.spec.grpc_proxy.clone().unwrap();
    let flags = proxy::arguments(&cluster, &proxy, &EtcdVersion::parse(version).unwrap());
    for expected in ["--cert=", "--cert-file=", "--namespace=", "--metrics-addr="] {
        assert!(
            flags.iter().any(|flag| flag.starts_with(expected)),
            "{expected}"
        );
    }
    flags
}

/// Lets etcd read these flags. With `--help`, etcd exits after it has read them.
fn read(programs: &Programs, flags: &[String]) -> Output {
    let mut command = Command::new(&programs.etcd);
    command.args(flags).arg("--help");
    command.env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH);
    command.output().unwrap()
}

#[test]
fn every_release_knows_all_flags_of_proxies() {
    for (minor, version) in RELEASES {
        let programs = Programs::find(minor);
        let mut flags = flags(version);
        let output = read(&programs, &flags);
        assert!(output.status.success(), "etcd {minor}: {output:?}");
        flags.push("--unknown=true".to_owned());
        let output = read(&programs, &flags);
        assert!(!output.status.success(), "etcd {minor}: {output:?}");
    }
}
