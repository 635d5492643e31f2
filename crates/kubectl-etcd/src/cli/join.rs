//! The arguments of `join`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::{Consent, Waiting};

/// Arguments of `join`.
#[derive(Debug, Args)]
pub struct JoinArgs {
    /// Name of the new EtcdCluster.
    pub cluster: String,
    /// Client URLs of the existing etcd, separated by commas [default: the annotation in the file].
    #[arg(long, value_name = "URLS", value_delimiter = ',')]
    pub endpoints: Vec<String>,
    /// File with the manifest of the new EtcdCluster, in YAML or JSON. Use a file for TLS, authentication and every
    /// setting that has no option.
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["etcd_version", "size", "storage", "storage_class"])]
    pub file: Option<PathBuf>,
    /// Version that the existing etcd runs, such as 3.6.16.
    #[arg(long, value_name = "VERSION")]
    pub etcd_version: Option<String>,
    /// Number of the new members [default: 3].
    #[arg(long, value_name = "MEMBERS")]
    pub size: Option<i32>,
    /// Size of the volume of each new member, such as 10Gi. Without this option, the new members have no volumes.
    #[arg(long, value_name = "SIZE")]
    pub storage: Option<String>,
    /// StorageClass of the volumes [default: the default StorageClass].
    #[arg(long, value_name = "STORAGECLASS", requires = "storage")]
    pub storage_class: Option<String>,
    /// End the move: check that no old member is left, and remove the annotation.
    #[arg(long, conflicts_with_all = ["endpoints", "file", "etcd_version", "size", "storage", "wait"])]
    pub finish: bool,
    /// Options `--yes` and `--dry-run`.
    #[command(flatten)]
    pub consent: Consent,
    /// Options `--wait` and `--timeout`.
    #[command(flatten)]
    pub waiting: Waiting,
}
