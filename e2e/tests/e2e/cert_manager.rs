//! cert-manager issues the certificates of a cluster. The tests run its controllers as a process of the test, for one
//! namespace, and delete its CustomResourceDefinitions at the end.

/// Failpoints before the writes of certificates from cert-manager.
pub(crate) const CRASHES: &[&str] = &[
    "before-apply-certificate",
    "before-publish-certificate",
    "before-delete-certificate",
];

mod full;
