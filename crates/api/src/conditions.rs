//! Conditions: types, reasons, and the function that sets a condition.
//!
//! The functions do not read a clock. The caller passes the time.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::text::text_enum;

/// Declares an enum of reasons for conditions, Events and metrics. The text of each reason is the name of its variant.
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
            /// release has written it.
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
        /// The actual state matches the spec.
        Ready = "Ready",
        /// The operator is working towards the spec. An object has this condition only while the status is True.
        Reconciling = "Reconciling",
        /// The operator cannot continue until a user acts. An object has this condition only while the status is True.
        Stalled = "Stalled",
        /// The cluster answers linearizable reads: a quorum of voters is healthy.
        Available = "Available",
        /// The operator is working towards the spec. Otherwise, the status is False.
        Progressing = "Progressing",
        /// The operator found a problem that it cannot repair, or must not repair without a user.
        Degraded = "Degraded",
        /// A lost member is restarting, or the operator is replacing it.
        Recovering = "Recovering",
        /// The operator is changing the number of members.
        Scaling = "Scaling",
        /// The operator is changing the version of etcd.
        Upgrading = "Upgrading",
        /// Every field of the spec takes effect in this release.
        FieldsInEffect = "FieldsInEffect",
        /// The spec follows the project's recommendations: an odd size, a tested version.
        Advisable = "Advisable",
        /// The newest backup of an EtcdBackup, or the restore of an EtcdRestore, is complete.
        Complete = "Complete",
        /// A backup or a restore has failed, and the operator does not retry it.
        Failed = "Failed",
        /// The certificates of a cluster with TLS are valid.
        TlsReady = "TLSReady",
        /// The stored backups of a periodic backup match its retention policy.
        RetentionApplied = "RetentionApplied",
        /// The newest verification of an EtcdBackup has restored its backup.
        Verified = "Verified",
    }
}

text_enum! {
    /// Reason of a condition.
    Reason {
        /// The actual state matches the spec.
        AsDesired = "AsDesired",
        /// The operator has not reconciled the object yet, or cannot determine the state.
        Unknown_ = "Unknown",
        /// The spec is invalid: the message names the field and the remedy.
        InvalidSpec = "InvalidSpec",
        /// The spec uses fields that this release accepts and ignores.
        NotYetInEffect = "NotYetInEffect",
        /// All fields of the spec are in effect.
        AllInEffect = "AllInEffect",
        /// The spec uses a field that this release does not support and cannot safely ignore.
        NotSupported = "NotSupported",
        /// The spec has an even number of members.
        EvenSize = "EvenSize",
        /// The spec has a version that the project does not test.
        UntestedVersion = "UntestedVersion",
        /// The spec follows the project's recommendations.
        AsAdvised = "AsAdvised",
        /// The operator changes nothing, because `spec.paused` is set.
        Paused = "Paused",
        /// `spec.hibernate` is set: no member runs, the operator keeps the volumes.
        Hibernated = "Hibernated",
        /// The operator is stopping the members, because `spec.hibernate` is set.
        Hibernating = "Hibernating",
        /// A restore holds the lock of the EtcdCluster.
        Restoring = "Restoring",
        /// The operator is starting the first members.
        Bootstrapping = "Bootstrapping",
        /// The cluster has formed and a quorum answers.
        QuorumHealthy = "QuorumHealthy",
        /// A quorum answers, but the client Service has no endpoint.
        NoEndpoint = "NoEndpoint",
        /// No quorum of voters answers.
        QuorumLost = "QuorumLost",
        /// The operator is adding members.
        AddingMembers = "AddingMembers",
        /// The operator is removing members.
        RemovingMembers = "RemovingMembers",
        /// A learner is catching up with the leader.
        LearnerCatchingUp = "LearnerCatchingUp",
        /// A member is down.
        MemberDown = "MemberDown",
        /// The operator is replacing a dead member.
        ReplacingMember = "ReplacingMember",
        /// A member's pod cannot start: the message states the cause.
        PodNotStarting = "PodNotStarting",
        /// The image of the version cannot be pulled.
        ImageNotFound = "ImageNotFound",
        /// A required volume is missing: the message states the cause.
        StorageMissing = "StorageMissing",
        /// The operator's last step failed: the message states the cause.
        StepFailed = "StepFailed",
        /// The operator is working on the object.
        InProgress = "InProgress",
        /// The backup or the restore has not begun.
        Pending = "Pending",
        /// The backup or the restore is complete.
        Succeeded = "Succeeded",
        /// The next backup is scheduled.
        Scheduled = "Scheduled",
        /// The operator makes no new backups: `suspend` is set.
        Suspended = "Suspended",
        /// The certificates are valid.
        CertificatesHold = "CertificatesHold",
        /// A TLS Secret cannot be read.
        SecretUnreadable = "SecretUnreadable",
        /// A TLS Secret lacks a key.
        KeyMissing = "KeyMissing",
        /// A certificate or a private key cannot be read.
        CertificateUnreadable = "CertificateUnreadable",
        /// A private key does not match its certificate.
        KeyMismatch = "KeyMismatch",
        /// A certificate is not signed by the certificate authority (CA) that must sign it.
        UnknownAuthority = "UnknownAuthority",
        /// All CAs were replaced in one step, while members still run that trust the previous CAs.
        AuthorityReplaced = "AuthorityReplaced",
        /// A CA certificate has expired.
        AuthorityExpired = "AuthorityExpired",
        /// A certificate has expired.
        CertificateExpired = "CertificateExpired",
        /// A certificate is not valid yet.
        CertificateNotYetValid = "CertificateNotYetValid",
        /// The key usage of a certificate does not allow its purpose.
        WrongUsage = "WrongUsage",
        /// The names of a certificate do not cover the members.
        NameNotCovered = "NameNotCovered",
        /// A Secret, or a key in it, is missing.
        SecretMissing = "SecretMissing",
        /// The bucket or container does not exist.
        BucketMissing = "BucketMissing",
        /// The store refused the credentials.
        AccessDenied = "AccessDenied",
        /// The store could not be reached.
        StoreUnreachable = "StoreUnreachable",
        /// No endpoint of the etcd cluster answered.
        EtcdUnreachable = "EtcdUnreachable",
        /// The referenced EtcdCluster does not exist.
        ClusterMissing = "ClusterMissing",
        /// The target cluster exists and has data.
        ClusterExists = "ClusterExists",
        /// The referenced backup does not exist.
        BackupMissing = "BackupMissing",
        /// The stored bytes differ from the bytes that were sent.
        ChecksumMismatch = "ChecksumMismatch",
        /// The stored backup cannot be read as a snapshot.
        SnapshotUnreadable = "SnapshotUnreadable",
        /// The work did not complete before its deadline.
        DeadlineExceeded = "DeadlineExceeded",
        /// The operator process ended during each of several attempts.
        AttemptsCutOff = "AttemptsCutOff",
        /// The seed member could not be prepared: the message states the cause.
        SeedFailed = "SeedFailed",
        /// The EtcdRestore was deleted before the restore was complete.
        Cancelled = "Cancelled",
        /// The installed CRD is older than the operator and lacks a field that the operator must record.
        DefinitionOutdated = "DefinitionOutdated",
    }
}

/// Status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionStatus {
    /// The condition holds.
    True,
    /// The condition does not hold.
    False,
    /// The operator cannot determine whether the condition holds.
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

/// The content of a condition to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Type of the condition.
    pub kind: ConditionType,
    /// Whether the condition holds.
    pub status: ConditionStatus,
    /// The cause, as one word in PascalCase.
    pub reason: Reason,
    /// The cause, as a sentence. For a problem, it contains the field and the remedy.
    pub message: String,
}

impl Finding {
    /// Creates the content of a condition of the type `kind`.
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

/// Maximum length of a condition's message in bytes. Longer messages are cut off.
pub const MAX_MESSAGE: usize = 32 * 1024;

/// Sets a condition in the list and keeps the order of the list. The transition time changes only if the status
/// changes. Returns whether the condition has changed.
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

/// The condition of this type. `None` if the list does not contain it.
pub fn find<'a>(conditions: &'a [Condition], kind: &ConditionType) -> Option<&'a Condition> {
    conditions
        .iter()
        .find(|condition| condition.type_ == kind.as_str())
}

/// Whether the condition of this type exists and has the status `True`.
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
    fn setting_condition_returns_whether_it_changed() {
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
