//! The reasons of conditions and Events of EtcdBackups.

/// A problem of an EtcdBackup.
pub type Trouble = runtime::Trouble<Reason>;

api::reasons! {
    /// Reason of a condition or an Event.
    pub enum Reason {
        /// The store or etcd denies access.
        AccessDenied,
        /// Every field of the spec is in effect.
        AllInEffect,
        /// Each retention rule is met, or no backup is in progress.
        AsDesired,
        /// Too many attempts ended without a result, because the operator process ended.
        AttemptsCutOff,
        /// The transfer of a backup starts.
        BackupBegun,
        /// The newest backup is copied to a store of `spec.copyTo`.
        BackupCopied,
        /// The newest backup is missing in the store, or differs from the backup that was written.
        BackupMissing,
        /// A backup is complete.
        BackupSucceeded,
        /// A verification has restored the newest backup.
        BackupVerified,
        /// The retention rules have removed backups.
        BackupsRemoved,
        /// The bucket, the container or the PersistentVolumeClaim does not exist.
        BucketMissing,
        /// The certificate of the store is not verified.
        CertificateNotChecked,
        /// Changes between two bases (snapshots) of a continuous backup are missing in the store.
        ChangesMissing,
        /// The snapshot or the stored object does not match its checksum or size.
        ChecksumMismatch,
        /// The clocks of the operator and of the API server differ by more than an hour.
        ClocksDiffer,
        /// The EtcdCluster does not exist or cannot be read.
        ClusterMissing,
        /// A backup cannot be copied to a store of `spec.copyTo`, or old copies cannot be removed.
        CopyFailed,
        /// The newest backup is being copied.
        Copying,
        /// The deadline passed before the backup was complete.
        DeadlineExceeded,
        /// The administrator has not granted an endpoint to the namespace.
        EndpointNotGranted,
        /// No member of the etcd cluster answers.
        EtcdUnreachable,
        /// The EtcdCluster hibernates, so it has no pods.
        Hibernated,
        /// The image of the pod cannot be pulled.
        ImageNotFound,
        /// A backup is in progress.
        InProgress,
        /// The spec is rejected.
        InvalidSpec,
        /// The EtcdBackup of an EtcdCluster or the Deployment of the agent cannot be created, because an object of
        /// another owner has its name.
        NameTaken,
        /// The spec uses a field that has no effect in this release. Ignoring this field would be unsafe.
        NotSupported,
        /// The spec uses fields that have no effect in this release.
        NotYetInEffect,
        /// The backup or the agent has not started.
        Pending,
        /// The pod that mounts the PersistentVolumeClaim, or the pod of the agent, does not start.
        PodNotStarting,
        /// The agent records all changes without a long delay.
        Recording,
        /// The agent does not store new changes in time.
        RecordingDelayed,
        /// Stored backups cannot be removed.
        RemovalFailed,
        /// The EtcdCluster is being restored.
        Restoring,
        /// The next backup is scheduled.
        Scheduled,
        /// A Secret or one of its keys is missing.
        SecretMissing,
        /// The snapshot cannot be read.
        SnapshotUnreadable,
        /// A step failed; the message names the cause.
        StepFailed,
        /// The store does not answer.
        StoreUnreachable,
        /// The backup is complete.
        Succeeded,
        /// `spec.backupPolicy.suspend` is true.
        Suspended,
        /// The transfer makes too little progress.
        TooSlow,
        /// The newest backup cannot be restored.
        VerificationFailed,
        /// A verification ended without a result.
        VerificationInconclusive,
        /// The newest backup is being verified.
        Verifying,
    }
}

impl Reason {
    /// The reason of the Event that reports a condition with this reason.
    pub(crate) fn of_event(self) -> Self {
        match self {
            Self::Hibernated | Self::ImageNotFound | Self::PodNotStarting => Self::StepFailed,
            reason => reason,
        }
    }

    /// True if this is the reason of a rejected spec.
    pub(crate) fn is_refusal(self) -> bool {
        matches!(self, Self::InvalidSpec | Self::NotSupported)
    }
}
