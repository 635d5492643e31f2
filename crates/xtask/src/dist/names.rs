//! The names of a release: image, files, pages.

use crate::origin::Origin;

/// The facts that all files of a release share.
#[derive(Debug, Clone)]
pub(super) struct Release {
    pub(super) version: String,
    /// Registry and name of the image.
    pub(super) repository: String,
    /// Digest of the image, if a registry is going to serve it: `sha256:...`.
    pub(super) digest: Option<String>,
    pub(super) origin: Origin,
}

impl Release {
    /// The image by its tag.
    pub(super) fn image_name(&self) -> String {
        format!("{}:{}", self.repository, self.version)
    }

    /// The image as the pods of the operators name it.
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

    pub(super) fn sbom(&self) -> String {
        format!("etcd-operator-{}.cdx.json", self.version)
    }

    /// A page of the documentation: a link if the source has an address.
    pub(super) fn page(&self, path: &str) -> String {
        match (&self.origin.source, &self.origin.revision) {
            (Some(source), Some(revision)) => {
                format!("[{path}]({source}/blob/{revision}/{path})")
            }
            _ => format!("`{path}` in the source"),
        }
    }
}
