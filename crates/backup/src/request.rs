//! Creates an EtcdBackup from a file, for CronJobs. Needs only the right to create EtcdBackups.

use std::path::{Path, PathBuf};

use api::EtcdBackup;
use api::problem::Chain;
use clap::Args;
use kube::api::{DynamicObject, PostParams};
use kube::core::ApiResource;
use kube::{Api, Client, ResourceExt};

/// Arguments of the command `request`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Request {
    /// Name of the EtcdBackup. If an EtcdBackup of this name exists, nothing is created: use the name of the Job, so
    /// that a Job that is retried makes one backup
    #[arg(value_name = "NAME")]
    name: String,
    /// File with the manifest of the EtcdBackup, as YAML or JSON. metadata.name in it is replaced
    #[arg(long, value_name = "FILE", default_value = "/manifests/backup.yaml")]
    manifest: PathBuf,
}

/// Creates the EtcdBackup. Returns true if this function or an earlier attempt has created it.
pub(crate) async fn run(arguments: &Request) -> bool {
    match create(arguments).await {
        Ok(message) => {
            tracing::info!("{message}");
            true
        }
        Err(message) => {
            tracing::error!("{message}");
            false
        }
    }
}

async fn create(arguments: &Request) -> Result<String, String> {
    let object = read(&arguments.manifest, &arguments.name)?;
    let client = Client::try_default()
        .await
        .map_err(|error| format!("cannot create the Kubernetes client: {}", Chain(&error)))?;
    let own = client.default_namespace().to_owned();
    let namespace = object.namespace().unwrap_or(own);
    let kind = ApiResource::erase::<EtcdBackup>(&());
    let backups = Api::<DynamicObject>::namespaced_with(client, &namespace, &kind);
    let name = &arguments.name;
    match backups.create(&PostParams::default(), &object).await {
        Ok(_) => Ok(format!("EtcdBackup {namespace}/{name} is created")),
        Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => Ok(format!(
            "EtcdBackup {namespace}/{name} exists: an earlier attempt has created it"
        )),
        Err(error) => Err(format!(
            "EtcdBackup {namespace}/{name} cannot be created: {}",
            Chain(&error)
        )),
    }
}

/// Reads the manifest, and sets the name of the object. Unknown fields are kept, so that the API server can reject
/// them.
fn read(path: &Path, name: &str) -> Result<DynamicObject, String> {
    let file = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        format!("cannot read {file}: {error}; name the manifest with --manifest")
    })?;
    let mut object: DynamicObject = serde_yaml_ng::from_str(&text)
        .map_err(|error| format!("{file} is not the manifest of an object: {error}"))?;
    let kind = ApiResource::erase::<EtcdBackup>(&());
    let types = object.types.as_ref();
    if types.is_none_or(|types| types.kind != kind.kind || types.api_version != kind.api_version) {
        return Err(format!(
            "{file} is not an EtcdBackup: set apiVersion: {} and kind: {}",
            kind.api_version, kind.kind
        ));
    }
    object.metadata.generate_name = None;
    object.metadata.name = Some(name.to_owned());
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<DynamicObject, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("backup.yaml");
        std::fs::write(&path, text).unwrap();
        read(&path, "nightly-1")
    }

    #[test]
    fn etcdbackup_from_manifest_keeps_fields_and_gets_job_name() {
        let text = "apiVersion: etcd.database.coreos.com/v1beta2\nkind: EtcdBackup\n\
                    metadata: {generateName: nightly-, labels: {a: b}}\nspec: {storageType: S3, later: 1}\n";
        let object = read_text(text).unwrap();
        assert_eq!(object.name_any(), "nightly-1");
        assert_eq!(object.metadata.generate_name, None);
        assert_eq!(object.labels()["a"], "b");
        assert_eq!(object.data["spec"]["later"], 1);
    }

    #[test]
    fn manifest_of_another_kind_is_rejected() {
        for text in [
            "apiVersion: v1\nkind: Pod\nmetadata: {}\n",
            "metadata: {}\n",
            "[",
        ] {
            let message = read_text(text).unwrap_err();
            assert!(message.contains("backup.yaml"), "{message}");
        }
        let missing = read(Path::new("/nowhere/backup.yaml"), "a").unwrap_err();
        assert!(missing.contains("--manifest"), "{missing}");
    }
}
