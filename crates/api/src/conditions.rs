//! The types, reasons and changes of conditions.
//!
//! The functions of this module read no clock, because the caller passes the time.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::text::text_enum;

/// Declares an enum of reasons. The text of a reason is the name of its variant.
#[macro_export]
macro_rules! reasons {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$about:meta])* $variant:ident,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$about])* $variant,)+
        }

        impl $name {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The text of the reason in objects.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($variant),)+
                }
            }

            /// The reason with this text. `None` if this release does not know the text, for example because another
            /// release wrote it.
            pub fn parse(text: &str) -> Option<Self> {
                let mut all = Self::ALL.iter().copied();
                all.find(|reason| reason.as_str() == text)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.as_str())
            }
        }

        impl From<$name> for $crate::conditions::Reason {
            fn from(reason: $name) -> Self {
                Self::from(reason.as_str())
            }
        }
    };
}

text_enum! {
    /// Type of a condition.
    ConditionType {
        /// The state of the object matches its spec.
        Ready = "Ready",
        /// The operator is working towards the spec. The condition exists only while it is True.
        Reconciling = "Reconciling",
        /// The operator cannot continue until a user acts. The condition exists only while it is True.
        Stalled = "Stalled",
        /// A quorum of voters is healthy, so that the cluster serves linearizable reads.
        Available = "Available",
        /// The operator is working towards the spec.
        Progressing = "Progressing",
        /// A problem that the operator cannot repair, or must not repair without the user.
        Degraded = "Degraded",
        /// A lost member restarts, or the operator replaces it.
        Recovering = "Recovering",
        /// The operator is changing the number of members.
        Scaling = "Scaling",
        /// The operator is changing the etcd version.
        Upgrading = "Upgrading",
        /// Every field of the spec has an effect in this release.
        FieldsInEffect = "FieldsInEffect",
        /// The spec follows the project's recommendations, such as an odd size.
        Advisable = "Advisable",
        /// The newest backup of an EtcdBackup, or the restore of an EtcdRestore, is complete.
        Complete = "Complete",
        /// A backup or a restore has failed, and the operator does not retry it.
        Failed = "Failed",
        /// The certificates of a cluster with TLS are valid.
        TlsReady = "TLSReady",
        /// The stored backups of a scheduled EtcdBackup match its retention.
        RetentionApplied = "RetentionApplied",
        /// The last verification of an EtcdBackup was successful.
        Verified = "Verified",
        /// The newest backup of an EtcdBackup is copied to each store of `spec.copyTo`.
        Copied = "Copied",
        /// The agent of `spec.continuous` records all changes of the cluster without a long delay.
        Recording = "Recording",
    }
}

text_enum! {
    /// Reason of a condition.
    Reason {
        /// The state matches the spec.
        AsDesired = "AsDesired",
        /// The operator has not reconciled the object yet, or does not know the state.
        Unknown_ = "Unknown",
        /// The spec is invalid. The message names the field and the remedy.
        InvalidSpec = "InvalidSpec",
        /// The spec has fields that this release accepts and ignores.
        NotYetInEffect = "NotYetInEffect",
        /// All fields of the spec have an effect.
        AllInEffect = "AllInEffect",
        /// The spec has a field that this release does not support and must not ignore.
        NotSupported = "NotSupported",
        /// The spec has an even number of members.
        EvenSize = "EvenSize",
        /// The spec has an etcd version that the project does not test.
        UntestedVersion = "UntestedVersion",
        /// The spec follows the project's recommendations.
        AsAdvised = "AsAdvised",
        /// `spec.paused` is set, so the operator does not change the cluster.
        Paused = "Paused",
        /// `spec.hibernate` is set, and no member runs.
        Hibernated = "Hibernated",
        /// `spec.hibernate` is set, and the operator is stopping the members.
        Hibernating = "Hibernating",
        /// A restore has locked the EtcdCluster.
        Restoring = "Restoring",
        /// The operator is starting the first members.
        Bootstrapping = "Bootstrapping",
        /// The cluster has formed and has a quorum.
        QuorumHealthy = "QuorumHealthy",
        /// The cluster has a quorum, but the client Service has no endpoint.
        NoEndpoint = "NoEndpoint",
        /// The cluster has no quorum.
        QuorumLost = "QuorumLost",
        /// The operator is adding members.
        AddingMembers = "AddingMembers",
        /// The operator is removing members.
        RemovingMembers = "RemovingMembers",
        /// A learner is catching up with the leader.
        LearnerCatchingUp = "LearnerCatchingUp",
        /// A member is down.
        MemberDown = "MemberDown",
        /// The operator is replacing a lost member.
        ReplacingMember = "ReplacingMember",
        /// A pod cannot start. The message contains the cause.
        PodNotStarting = "PodNotStarting",
        /// The kubelet cannot pull the image of the version.
        ImageNotFound = "ImageNotFound",
        /// A required volume is missing. The message contains the cause.
        StorageMissing = "StorageMissing",
        /// The last step of the operator failed. The message contains the cause.
        StepFailed = "StepFailed",
        /// The operator is working on the object.
        InProgress = "InProgress",
        /// The backup or the restore has not started.
        Pending = "Pending",
        /// The backup or the restore is complete.
        Succeeded = "Succeeded",
        /// The next backup is scheduled.
        Scheduled = "Scheduled",
        /// `suspend` is set, so the operator starts no new backups.
        Suspended = "Suspended",
        /// The certificates are valid.
        CertificatesHold = "CertificatesHold",
        /// The operator cannot read a TLS Secret.
        SecretUnreadable = "SecretUnreadable",
        /// A TLS Secret lacks a key.
        KeyMissing = "KeyMissing",
        /// The operator cannot parse a certificate or a private key.
        CertificateUnreadable = "CertificateUnreadable",
        /// A private key does not match its certificate.
        KeyMismatch = "KeyMismatch",
        /// The required certificate authority (CA) has not signed the certificate.
        UnknownAuthority = "UnknownAuthority",
        /// All CAs were replaced at once, but running members trust only the previous CAs.
        AuthorityReplaced = "AuthorityReplaced",
        /// A CA certificate has expired.
        AuthorityExpired = "AuthorityExpired",
        /// A certificate has expired.
        CertificateExpired = "CertificateExpired",
        /// A certificate is not valid yet.
        CertificateNotYetValid = "CertificateNotYetValid",
        /// The certificate may not be used for its purpose.
        WrongUsage = "WrongUsage",
        /// The certificate lacks names of the members.
        NameNotCovered = "NameNotCovered",
        /// A Secret or one of its keys is missing.
        SecretMissing = "SecretMissing",
        /// cert-manager is not installed, or the operator may not use its Certificates.
        CertManagerMissing = "CertManagerMissing",
        /// The issuer of cert-manager does not exist or is not ready.
        IssuerMissing = "IssuerMissing",
        /// cert-manager has not issued a certificate yet.
        CertificateNotIssued = "CertificateNotIssued",
        /// The bucket or the container does not exist.
        BucketMissing = "BucketMissing",
        /// The store rejected the credentials.
        AccessDenied = "AccessDenied",
        /// The operator could not connect to the store.
        StoreUnreachable = "StoreUnreachable",
        /// The operator could not connect to etcd.
        EtcdUnreachable = "EtcdUnreachable",
        /// The EtcdCluster in the spec does not exist.
        ClusterMissing = "ClusterMissing",
        /// The EtcdCluster to restore exists and has data.
        ClusterExists = "ClusterExists",
        /// The backup in the spec does not exist.
        BackupMissing = "BackupMissing",
        /// The checksum of the stored backup differs from the sent bytes.
        ChecksumMismatch = "ChecksumMismatch",
        /// The stored backup is not a readable snapshot.
        SnapshotUnreadable = "SnapshotUnreadable",
        /// The work exceeded its time limit.
        DeadlineExceeded = "DeadlineExceeded",
        /// Several attempts ended because the operator's process ended.
        AttemptsCutOff = "AttemptsCutOff",
        /// The seed of the restore failed. The message contains the cause.
        SeedFailed = "SeedFailed",
        /// The EtcdRestore was deleted before the restore was complete.
        Cancelled = "Cancelled",
        /// The installed CRD is older than the operator, and lacks a field that the operator must store.
        DefinitionOutdated = "DefinitionOutdated",
    }
}

/// The status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionStatus {
    /// The condition holds.
    True,
    /// The condition does not hold.
    False,
    /// The operator does not know whether the condition holds.
    Unknown,
}

impl ConditionStatus {
    /// The text of the status in objects.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl From<bool> for ConditionStatus {
    fn from(holds: bool) -> Self {
        if holds { Self::True } else { Self::False }
    }
}

/// The content of a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Type of the condition.
    pub kind: ConditionType,
    /// The status of the condition.
    pub status: ConditionStatus,
    /// The reason, as one word in PascalCase.
    pub reason: Reason,
    /// The message, as a sentence. For a problem, it names the field and the remedy.
    pub message: String,
}

impl Finding {
    /// Creates the content of a condition.
    pub fn new(
        kind: ConditionType,
        status: impl Into<ConditionStatus>,
        reason: Reason,
        message: impl Into<String>,
    ) -> Self {
        Self {
            kind,
            status: status.into(),
            reason,
            message: message.into(),
        }
    }
}

/// The maximum length of a message in bytes. Longer messages are truncated.
pub const MAX_MESSAGE: usize = 32 * 1024;

/// Sets a condition, and keeps the order of the list. The transition time changes only with the status. Returns true if
/// the condition has changed.
pub fn set(
    conditions: &mut Vec<Condition>,
    finding: &Finding,
    observed_generation: Option<i64>,
    now: &Time,
) -> bool {
    let mut message = finding.message.clone();
    message.truncate(message.floor_char_boundary(MAX_MESSAGE));
    let old = conditions
        .iter()
        .position(|condition| condition.type_ == finding.kind.as_str());
    let since = old
        .map(|index| &conditions[index])
        .filter(|condition| condition.status == finding.status.as_str())
        .map_or_else(
            || now.clone(),
            |condition| condition.last_transition_time.clone(),
        );
    let new = Condition {
        type_: finding.kind.as_str().to_owned(),
        status: finding.status.as_str().to_owned(),
        reason: finding.reason.as_str().to_owned(),
        message,
        observed_generation,
        last_transition_time: since,
    };
    match old {
        Some(index) if conditions[index] == new => false,
        Some(index) => {
            conditions[index] = new;
            true
        }
        None => {
            conditions.push(new);
            true
        }
    }
}

/// The condition of this type. `None` if it does not exist.
pub fn find<'a>(conditions: &'a [Condition], kind: &ConditionType) -> Option<&'a Condition> {
    conditions
        .iter()
        .find(|condition| condition.type_ == kind.as_str())
}

/// True if the condition of this type has the status `True`.
pub fn is_true(conditions: &[Condition], kind: &ConditionType) -> bool {
    find(conditions, kind).is_some_and(|condition| condition.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Time {
        Time(k8s_openapi::jiff::Timestamp::from_second(seconds).unwrap())
    }

    fn available(holds: bool, message: &str) -> Finding {
        Finding::new(
            ConditionType::Available,
            holds,
            Reason::QuorumHealthy,
            message,
        )
    }

    #[test]
    fn transition_time_is_kept_until_condition_status_changes() {
        let mut conditions = Vec::new();
        assert!(set(
            &mut conditions,
            &available(true, "a"),
            Some(1),
            &at(10)
        ));
        assert!(set(
            &mut conditions,
            &available(true, "b"),
            Some(2),
            &at(20)
        ));
        assert_eq!(conditions[0].last_transition_time, at(10));
        assert_eq!(conditions[0].message, "b");
        assert_eq!(conditions[0].observed_generation, Some(2));
        assert!(set(
            &mut conditions,
            &available(false, "b"),
            Some(2),
            &at(30)
        ));
        assert_eq!(conditions[0].last_transition_time, at(30));
        assert_eq!(conditions.len(), 1);
    }

    #[test]
    fn condition_update_returns_whether_condition_changed() {
        let mut conditions = Vec::new();
        assert!(set(
            &mut conditions,
            &available(true, "a"),
            Some(1),
            &at(10)
        ));
        assert!(!set(
            &mut conditions,
            &available(true, "a"),
            Some(1),
            &at(20)
        ));
        assert!(is_true(&conditions, &ConditionType::Available));
        assert!(!is_true(&conditions, &ConditionType::Degraded));
    }

    #[test]
    fn long_condition_message_is_truncated_between_characters() {
        let mut conditions = Vec::new();
        set(
            &mut conditions,
            &available(true, &"\u{e9}".repeat(MAX_MESSAGE)),
            None,
            &at(0),
        );
        assert_eq!(conditions[0].message.len(), MAX_MESSAGE);
    }

    #[test]
    fn condition_reasons_and_types_are_pascal_case() {
        for text in ConditionType::KNOWN.iter().chain(Reason::KNOWN) {
            assert!(text.starts_with(|c: char| c.is_ascii_uppercase()), "{text}");
            assert!(text.chars().all(|c| c.is_ascii_alphanumeric()), "{text}");
        }
    }
}
