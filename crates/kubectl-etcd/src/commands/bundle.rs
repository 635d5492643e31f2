//! `report`: writes a support bundle without Secrets. The command reads no Secrets, and redacts all other objects.

use std::fs::File;
use std::path::PathBuf;

use api::names;
use api::{EtcdBackup, EtcdRestore};
use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::LogParams;
use kube::{Resource, ResourceExt};
use serde::Serialize;

use super::{backup::suffix, events, logs, status};
use crate::access::Access;
use crate::cli::ReportArgs;
use crate::console::{note, say};
use crate::error::{Error, Result};
use crate::redact;
use crate::text::{Paint, bytes};
use crate::view::details;

pub(super) async fn run(access: &Access, args: &ReportArgs) -> Result<()> {
    let name = &args.cluster;
    let now = Timestamp::now();
    let cluster = access.cluster(name).await?;
    let mut bundle = Bundle::default();
    bundle.text(
        "about.txt",
        format!(
            "kubectl-etcd {}\nwritten {now}\nnamespace {}\ncluster {name}\n",
            env!("CARGO_PKG_VERSION"),
            access.namespace
        ),
    );
    bundle.objects("etcdcluster.yaml", &[cluster])?;
    match status::one(access, name, false).await {
        Ok(view) => bundle.text("status.txt", details(&view, true, now, Paint(false))),
        Err(error) => bundle.missing("status.txt", &error),
    }
    add_objects(access, name, &mut bundle).await?;
    match events::of_cluster(access, name).await {
        Ok(found) => bundle.text("events.txt", events::table(&found, now, Paint(false))),
        Err(error) => bundle.missing("events.txt", &error),
    }
    add_logs(access, args, &mut bundle).await;
    let file = args.file.clone().unwrap_or_else(|| {
        PathBuf::from(format!(
            "etcd-report-{}-{name}-{}.tar.gz",
            access.namespace,
            suffix(now)
        ))
    });
    let size = bundle.write(&file, now)?;
    say(&format!("{} ({})", file.display(), bytes(size)))?;
    say(
        "the report contains no Secret. Before you share the report, check its logs and specs for passwords",
    )
}

async fn add_objects(access: &Access, name: &str, bundle: &mut Bundle) -> Result<()> {
    let selector = names::cluster_selector(name);
    let backups = access.backups().await.map(|all| {
        let is_own = |one: &EtcdBackup| {
            one.spec
                .etcd_cluster
                .as_ref()
                .is_some_and(|target| target.name == name)
        };
        all.into_iter().filter(is_own).collect::<Vec<_>>()
    });
    bundle.listed("etcdbackups.yaml", backups)?;
    let restores = access.restores().await.map(|all| {
        let is_own = |one: &EtcdRestore| one.spec.etcd_cluster.name == name;
        all.into_iter().filter(is_own).collect::<Vec<_>>()
    });
    bundle.listed("etcdrestores.yaml", restores)?;
    bundle.listed("pods.yaml", access.list::<Pod>(&selector).await)?;
    bundle.listed(
        "persistentvolumeclaims.yaml",
        access.list::<PersistentVolumeClaim>(&selector).await,
    )?;
    bundle.listed("services.yaml", access.list::<Service>(&selector).await)?;
    bundle.listed(
        "poddisruptionbudgets.yaml",
        access.list::<PodDisruptionBudget>(&selector).await,
    )
}

async fn add_logs(access: &Access, args: &ReportArgs, bundle: &mut Bundle) {
    let params = |previous: bool, container: Option<&str>| LogParams {
        container: container.map(str::to_owned),
        previous,
        tail_lines: Some(args.tail),
        timestamps: true,
        ..LogParams::default()
    };
    let etcd = Some(names::CONTAINER_ETCD);
    for pod in access.pods(&args.cluster).await.unwrap_or_default() {
        let file = format!("logs/{}.log", pod.name_any());
        match logs::text(access, &pod, &params(false, etcd)).await {
            Ok(log) => bundle.log(&file, &log),
            Err(error) => bundle.missing(&file, &error),
        }
        // An error is ignored here, because a container that never restarted has no previous log.
        if let Ok(log) = logs::text(access, &pod, &params(true, etcd)).await {
            bundle.log(&format!("logs/{}-previous.log", pod.name_any()), &log);
        }
    }
    match logs::operator_pods(access, None).await {
        Ok(pods) => {
            for pod in pods {
                let file = format!("operators/{}.log", pod.name_any());
                match logs::text(access, &pod, &params(false, None)).await {
                    Ok(log) => bundle.log(&file, &log),
                    Err(error) => bundle.missing(&file, &error),
                }
            }
        }
        Err(error) => bundle.missing("operators", &error),
    }
}

/// The files of a support bundle.
#[derive(Debug, Default)]
struct Bundle {
    files: Vec<(String, Vec<u8>)>,
    missing: Vec<String>,
}

impl Bundle {
    fn text(&mut self, name: &str, content: String) {
        self.files.push((name.to_owned(), content.into_bytes()));
    }

    fn log(&mut self, name: &str, log: &str) {
        let lines: Vec<String> = log.lines().map(redact::line).collect();
        self.text(name, lines.join("\n"));
    }

    /// Records that the file `name` is missing in the bundle, and why. The bundle still gets all other files.
    fn missing(&mut self, name: &str, error: &Error) {
        let line = format!("{name}: {}", error.chain());
        note(&format!("not in the report: {line}"));
        self.missing.push(line);
    }

    fn listed<K: Resource<DynamicType = ()> + Serialize>(
        &mut self,
        name: &str,
        objects: Result<Vec<K>>,
    ) -> Result<()> {
        match objects {
            Ok(objects) => self.objects(name, &objects),
            Err(error) => {
                self.missing(name, &error);
                Ok(())
            }
        }
    }

    fn objects<K: Resource<DynamicType = ()> + Serialize>(
        &mut self,
        name: &str,
        objects: &[K],
    ) -> Result<()> {
        let mut text = String::new();
        for one in objects {
            let mut value = serde_json::to_value(one).map_err(|_| Error::Format("JSON"))?;
            redact::object(&mut value);
            let yaml = serde_yaml_ng::to_string(&value).map_err(|_| Error::Format("YAML"))?;
            text.push_str("---\n");
            text.push_str(&yaml);
        }
        self.text(name, text);
        Ok(())
    }

    /// Writes the bundle as an archive to `path`, and returns the archive's size in bytes.
    fn write(mut self, path: &PathBuf, now: Timestamp) -> Result<u64> {
        if !self.missing.is_empty() {
            let missing = self.missing.join("\n");
            self.text("missing.txt", missing);
        }
        let failed = |source| Error::File {
            path: path.clone(),
            source,
        };
        let file = File::create_new(path).map_err(failed)?;
        let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
        for (name, content) in &self.files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_mtime(u64::try_from(now.as_second()).unwrap_or_default());
            archive
                .append_data(
                    &mut header,
                    format!("etcd-report/{name}"),
                    content.as_slice(),
                )
                .map_err(failed)?;
        }
        let file = archive
            .into_inner()
            .and_then(GzEncoder::finish)
            .map_err(failed)?;
        Ok(file.metadata().map_err(failed)?.len())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use api::EtcdCluster;

    use super::*;

    #[test]
    fn support_bundle_is_redacted_and_lists_missing_files() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.tar.gz");
        let mut bundle = Bundle::default();
        let cluster: EtcdCluster = serde_json::from_value(serde_json::json!({
            "apiVersion": "etcd.database.coreos.com/v1beta2", "kind": "EtcdCluster",
            "metadata": { "name": "main", "managedFields": [] },
            "spec": { "pod": { "etcdEnv": [{ "name": "X_PASSWORD", "value": "hunter2" }] } }
        }))
        .unwrap();
        bundle.objects("etcdcluster.yaml", &[cluster]).unwrap();
        bundle.log("logs/a.log", "a\n--auth-token=hunter2");
        bundle.missing("pods.yaml", &Error::refused("forbidden", ""));
        let size = bundle.write(&file, Timestamp::UNIX_EPOCH).unwrap();
        assert_eq!(size, std::fs::metadata(&file).unwrap().len());
        let mut found = Vec::new();
        let unpacked = flate2::read::GzDecoder::new(File::open(&file).unwrap());
        for entry in tar::Archive::new(unpacked).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            assert!(!text.contains("hunter2"), "{text}");
            found.push(entry.path().unwrap().display().to_string());
        }
        assert_eq!(
            found,
            [
                "etcd-report/etcdcluster.yaml",
                "etcd-report/logs/a.log",
                "etcd-report/missing.txt"
            ]
        );
        // The second `write` with the same path fails, because `report` never overwrites a file.
        assert!(
            Bundle::default()
                .write(&file, Timestamp::UNIX_EPOCH)
                .is_err()
        );
    }
}
