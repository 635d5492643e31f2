//! Names of the image and of the files of a release, and links to documentation pages.

use crate::origin::Origin;

/// The properties of a release.
#[derive(Debug, Clone)]
pub(super) struct Release {
    pub(super) version: String,
    /// The registry and name of the image.
    pub(super) repository: String,
    /// The digest of the image (`sha256:...`). `None` if no registry has the image.
    pub(super) digest: Option<String>,
    pub(super) origin: Origin,
    /// The URL under which the files are published. `None` if unknown.
    pub(super) files: Option<String>,
    /// The names of the archives of the plugin.
    pub(super) plugins: Vec<String>,
}

impl Release {
    /// The registry, name and tag of the image.
    pub(super) fn image_name(&self) -> String {
        format!("{}:{}", self.repository, self.version)
    }

    /// The image in the pods of the operators, with the digest if known.
    pub(super) fn image(&self) -> String {
        let digest = self.digest.as_ref();
        let digest = digest.map_or(String::new(), |digest| format!("@{digest}"));
        format!("{}{digest}", self.image_name())
    }

    pub(super) fn image_archive(&self) -> String {
        format!("etcd-operator-image-{}.tar", self.version)
    }

    pub(super) fn chart(&self) -> String {
        format!("etcd-operator-{}.tgz", self.version)
    }

    pub(super) fn bundle(&self) -> String {
        format!("etcd-operator-bundle-{}.tgz", self.version)
    }

    /// The name of the plugin's archive for an architecture.
    pub(super) fn plugin(&self, architecture: &str) -> String {
        format!("kubectl-etcd-{}-linux-{architecture}.tar.gz", self.version)
    }

    pub(super) fn sbom(&self) -> String {
        format!("etcd-operator-{}.cdx.json", self.version)
    }

    /// A link to a documentation page, or its path if the URL or the commit of the source is unknown.
    pub(super) fn page(&self, path: &str) -> String {
        match (&self.origin.source, &self.origin.revision) {
            (Some(source), Some(revision)) => {
                format!("[{path}]({source}/blob/{revision}/{path})")
            }
            _ => format!("`{path}` in the source"),
        }
    }
}
