//! The pieces of advice in the condition `Advisable`.

use crate::text::text_enum;

text_enum! {
    /// Name of a piece of advice. It is also the reason of the condition `Advisable`.
    Advice {
        /// The version is not tested with this release.
        UntestedVersion = "UntestedVersion",
        /// The number of members is even.
        EvenSize = "EvenSize",
        /// Members have no volumes.
        NoVolumes = "NoVolumes",
        /// No backup of the cluster is known.
        NoBackup = "NoBackup",
        /// A database is larger than 80 % of its quota.
        QuotaNearlyFull = "QuotaNearlyFull",
        /// A certificate that the operator does not renew expires soon.
        CertificateExpiring = "CertificateExpiring",
        /// Several members run on the same node.
        SharedNode = "SharedNode",
        /// etcd does not compact old revisions.
        NoCompaction = "NoCompaction",
    }
}
