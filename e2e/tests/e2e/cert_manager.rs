//! cert-manager issues the certificates of a cluster. The tests run the controllers of cert-manager as a child process,
//! which manages only the namespace of the test. At the end, the tests delete the CustomResourceDefinitions of
//! cert-manager.

/// Failpoints before the writes of certificates from cert-manager.
pub(crate) const CRASHES: &[&str] = &[
    "before-apply-certificate",
    "before-publish-certificate",
    "before-delete-certificate",
];

mod full;
