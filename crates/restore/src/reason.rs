//! The reasons of conditions and Events of EtcdRestores.

/// A problem of an EtcdRestore.
pub type Trouble = runtime::Trouble<Reason>;

api::reasons! {
    /// Reason of a condition or an Event.
    pub enum Reason {
        /// The store or etcd denies access.
        AccessDenied,
        /// Every field of the spec is in effect.
        AllInEffect,
        /// The backup does not exist.
        BackupMissing,
        /// The bucket or the container does not exist.
        BucketMissing,
        /// The EtcdRestore was deleted before it was complete.
        Cancelled,
        /// A certificate or a private key cannot be read.
        CertificateUnreadable,
        /// The restore has locked the EtcdCluster.
        Claimed,
        /// The operator has created the EtcdCluster.
        ClusterCreated,
        /// The EtcdCluster exists, and the restore must not replace it.
        ClusterExists,
        /// The restored EtcdCluster was deleted.
        ClusterMissing,
        /// A copy of the backup is restored, because the backup cannot be read in the first store.
        CopyChosen,
        /// The CustomResourceDefinition is older than the operator.
        DefinitionOutdated,
        /// The EtcdRestore is a dry run, which only reports the revision of the requested point.
        DryRun,
        /// No member of the etcd cluster answers.
        EtcdUnreachable,
        /// The restore was abandoned. If this happened before the cutover, the existing cluster is unchanged.
        GivenUp,
        /// The cluster operator manages the EtcdCluster.
        HandedOver,
        /// The image of the seed's pod cannot be pulled.
        ImageNotFound,
        /// The restore is in progress.
        InProgress,
        /// The spec is rejected.
        InvalidSpec,
        /// A Secret lacks a key.
        KeyMissing,
        /// No recent backup exists, but the EtcdCluster requires one before its data is replaced.
        NoRecentBackup,
        /// The spec uses a field that this release does not support. Ignoring this field would be unsafe.
        NotSupported,
        /// The spec uses fields that this release ignores.
        NotYetInEffect,
        /// `spec.paused` of the EtcdCluster is true.
        Paused,
        /// The seed's pod does not start.
        PodNotStarting,
        /// The recorded changes do not contain the requested point.
        PointNotRecorded,
        /// The spec in the manifest of the backup sets fields that are not accepted from a store.
        RecordedSpecRefused,
        /// The seed replaces the members of the EtcdCluster.
        Replacing,
        /// The restored cluster serves.
        RestoreComplete,
        /// The restore has failed or requires manual action.
        RestoreFailed,
        /// The restore waits until a temporary problem ends.
        RestoreWaits,
        /// A Secret or one of its keys is missing.
        SecretMissing,
        /// The seed's pod has ended or is unusable, so the operator replaces it.
        SeedEnded,
        /// The seed member cannot be prepared.
        SeedFailed,
        /// The seed member serves the verified backup.
        SeedServes,
        /// The operator has created the seed's pod.
        SeedStarted,
        /// The content of the backup is not a valid snapshot.
        SnapshotUnreadable,
        /// A step failed; the message names the cause.
        StepFailed,
        /// No volume is created for the seed.
        StorageMissing,
        /// The store does not answer.
        StoreUnreachable,
        /// The restore is complete.
        Succeeded,
        /// The operator has not read the data yet.
        Unknown,
    }
}
