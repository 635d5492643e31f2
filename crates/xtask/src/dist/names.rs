//! The names that the files of a release use: the image reference and the addresses of documentation pages.

use crate::origin::Origin;

/// The properties of a release that several of its files contain.
#[derive(Debug, Clone)]
pub(super) struct Release {
    pub(super) version: String,
    /// The registry and the name of the image.
    pub(super) repository: String,
    /// The digest of the image (`sha256:...`). `None` if the image is not pushed to a registry.
    pub(super) digest: Option<String>,
    pub(super) origin: Origin,
    /// The address below which the files of the release are published. `None` if it is unknown.
    pub(super) files: Option<String>,
    /// The names of the archives of the plugin.
    pub(super) plugins: Vec<String>,
}

impl Release {
    /// The repository of the image with its tag.
    pub(super) fn image_name(&self) -> String {
        format!("{}:{}", self.repository, self.version)
    }

    /// The image reference for the pods of the operators. It contains the digest if the digest is known.
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

    /// The archive of the plugin `kubectl etcd` for an architecture.
    pub(super) fn plugin(&self, architecture: &str) -> String {
        format!("kubectl-etcd-{}-linux-{architecture}.tar.gz", self.version)
    }

    pub(super) fn sbom(&self) -> String {
        format!("etcd-operator-{}.cdx.json", self.version)
    }

    /// A reference to a page of the documentation: a link if the address of the source is known, otherwise the path.
    pub(super) fn page(&self, path: &str) -> String {
        match (&self.origin.source, &self.origin.revision) {
            (Some(source), Some(revision)) => {
                format!("[{path}]({source}/blob/{revision}/{path})")
            }
            _ => format!("`{path}` in the source"),
        }
    }
}
