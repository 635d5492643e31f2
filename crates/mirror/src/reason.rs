//! The reasons of conditions and Events of EtcdMirrors.

/// A problem of an EtcdMirror.
pub type Trouble = runtime::Trouble<Reason>;

api::reasons! {
    /// Reason of a condition or an Event.
    pub enum Reason {
        /// etcd denies access.
        AccessDenied,
        /// An EtcdCluster does not exist or cannot be read.
        ClusterMissing,
        /// The mirror refuses to copy, for example because another mirror writes to the same keys.
        Conflict,
        /// The mirror copies all keys for the first time.
        Copying,
        /// A copy of all keys is complete.
        CopyComplete,
        /// A copy of all keys has begun.
        CopyStarted,
        /// The destination rejects a transaction.
        DestinationRejects,
        /// The destination does not answer.
        DestinationUnreachable,
        /// The namespace has no grant for an endpoint.
        EndpointNotGranted,
        /// The spec is rejected.
        InvalidSpec,
        /// The mirror was deleted, and the destination contains the source at the last checkpoint.
        Promoted,
        /// The mirror was deleted before all keys were copied, or while a transaction was applied in part.
        PromotedIncomplete,
        /// The checkpoint cannot be deleted.
        ReleaseFailed,
        /// The mirror copies all keys again.
        Resyncing,
        /// A Secret or one of its keys is missing.
        SecretMissing,
        /// The source is another cluster, or an earlier state of the same cluster.
        SourceReplaced,
        /// The source does not answer.
        SourceUnreachable,
        /// The mirror connects to both clusters.
        Starting,
        /// A step of the operator failed; the message contains the cause.
        StepFailed,
        /// The destination is behind the source.
        Syncing,
        /// The operator runs its maximum number of mirrors.
        TooManyMirrors,
        /// A transaction of the source is applied in several parts.
        TransactionSplit,
        /// The destination contains all changes of the source.
        UpToDate,
    }
}
