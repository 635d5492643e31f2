//! The advice in the condition `Advisable`.

use crate::text::text_enum;

text_enum! {
    /// Name of an advice, which is also a reason of the condition `Advisable`.
    Advice {
        /// The etcd version is not tested with this release.
        UntestedVersion = "UntestedVersion",
        /// The number of members is even.
        EvenSize = "EvenSize",
        /// Members have no volumes.
        NoVolumes = "NoVolumes",
        /// No backup of the cluster is known.
        NoBackup = "NoBackup",
        /// A database exceeds 80 % of its quota.
        QuotaNearlyFull = "QuotaNearlyFull",
        /// A certificate from a Secret of the user expires soon.
        CertificateExpiring = "CertificateExpiring",
        /// Several members run on the same node.
        SharedNode = "SharedNode",
        /// etcd does not compact old revisions.
        NoCompaction = "NoCompaction",
    }
}
