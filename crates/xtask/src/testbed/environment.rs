//! The environment variables with the addresses and credentials of a running testbed.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::Dns;
use super::addresses::IpFamily;
use super::control::stores;
use super::state::State;
use crate::programs::Programs;

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Env {
    pub(crate) kubeconfig: PathBuf,
    /// The folder with kubectl, helm, etcdctl and other programs.
    pub(crate) bin: PathBuf,
    pub(crate) run_folder: PathBuf,
    pub(crate) s3_endpoint: String,
    pub(crate) s3_access_key: String,
    pub(crate) s3_secret_key: String,
    pub(crate) s3_region: String,
    pub(crate) gcs_endpoint: String,
    pub(crate) abs_endpoint: String,
    pub(crate) etcd_versions: Vec<String>,
    pub(crate) nodes: Vec<String>,
    pub(crate) dns: Dns,
    pub(crate) ip_family: IpFamily,
    /// Version of Kubernetes, without the leading `v`.
    pub(crate) kubernetes: String,
    pub(crate) pods: String,
    pub(crate) services: String,
}

impl Env {
    pub(super) fn of(run_folder: &Path, state: &State, programs: &Programs) -> Self {
        let addresses = state.addresses();
        Self {
            ip_family: addresses.family,
            kubernetes: programs.kubernetes.clone(),
            kubeconfig: run_folder.join("kubeconfig"),
            bin: programs.bin.clone(),
            run_folder: run_folder.to_path_buf(),
            s3_endpoint: addresses.url("http", stores::S3_PORT),
            s3_access_key: state.s3_access_key.clone(),
            s3_secret_key: state.s3_secret_key.clone(),
            s3_region: stores::S3_REGION.into(),
            gcs_endpoint: addresses.url("http", stores::GCS_PORT),
            abs_endpoint: format!(
                "{}/{}",
                addresses.url("http", stores::ABS_PORT),
                stores::ABS_ACCOUNT
            ),
            etcd_versions: programs.etcd_versions.clone(),
            nodes: (0..state.nodes)
                .map(|index| format!("node-{index}"))
                .collect(),
            dns: state.dns,
            pods: addresses.pods_network(),
            services: addresses.services_network(),
        }
    }

    /// The environment variables for programs that use the testbed.
    pub(crate) fn vars(&self) -> Vec<(String, String)> {
        let path = std::env::var("PATH").unwrap_or_default();
        let direct = [
            self.pods.as_str(),
            self.services.as_str(),
            ".svc",
            "127.0.0.1",
            "localhost",
        ]
        .join(",");
        let own: [(&str, String); 17] = [
            ("KUBECONFIG", self.kubeconfig.display().to_string()),
            ("PATH", with_first(&self.bin.display().to_string(), &path)),
            ("NO_PROXY", direct.clone()),
            ("no_proxy", direct),
            ("E2E_S3_ENDPOINT", self.s3_endpoint.clone()),
            ("E2E_S3_ACCESS_KEY", self.s3_access_key.clone()),
            ("E2E_S3_SECRET_KEY", self.s3_secret_key.clone()),
            ("E2E_S3_REGION", self.s3_region.clone()),
            ("E2E_GCS_ENDPOINT", self.gcs_endpoint.clone()),
            ("E2E_ABS_ENDPOINT", self.abs_endpoint.clone()),
            ("E2E_ABS_ACCOUNT", stores::ABS_ACCOUNT.to_owned()),
            ("E2E_ABS_KEY", stores::ABS_KEY.to_owned()),
            ("E2E_BUCKET", stores::BUCKET.to_owned()),
            ("E2E_ETCD_VERSIONS", self.etcd_versions.join(",")),
            ("E2E_DNS", self.dns.to_string()),
            ("E2E_IP_FAMILY", self.ip_family.name().to_owned()),
            ("E2E_NODES", self.nodes.join(",")),
        ];
        own.into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}

/// `path` with `dir` as its first entry. An existing entry `dir` is removed.
fn with_first(dir: &str, path: &str) -> String {
    let rest = path
        .split(':')
        .filter(|part| *part != dir && !part.is_empty());
    std::iter::once(dir)
        .chain(rest)
        .collect::<Vec<_>>()
        .join(":")
}

/// Shell lines that export these variables.
pub(crate) fn exports(vars: &[(String, String)]) -> String {
    let line = |(name, value): &(String, String)| {
        format!("export {name}='{}'\n", value.replace('\'', r"'\''"))
    };
    vars.iter().map(line).collect::<Vec<_>>().concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_of_testbed_programs_is_first_in_path_variable() {
        assert_eq!(with_first("/x", "/a:/x:/b"), "/x:/a:/b");
        assert_eq!(with_first("/x", ""), "/x");
    }

    #[test]
    fn quotes_in_exported_values_are_escaped() {
        let text = exports(&[("A".into(), "it's".into())]);
        assert_eq!(text, "export A='it'\\''s'\n");
    }
}
