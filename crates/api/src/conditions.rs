//! Conditions: their types, their reasons, and how one is set.
//!
//! Time is passed in; nothing here reads a clock.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::text::text_enum;

text_enum! {
    /// Type of a condition.
    ConditionType {
        /// The cluster answers linearizable reads: a quorum of voters is healthy.
        Available = "Available",
        /// The operator is working towards the spec.
        Progressing = "Progressing",
        /// Something is wrong that the operator cannot or may not put right by itself.
        Degraded = "Degraded",
        /// A lost member is being put back or replaced.
        Recovering = "Recovering",
        /// The number of members is being changed.
        Scaling = "Scaling",
        /// The version is being changed.
        Upgrading = "Upgrading",
        /// Every field of the spec has its effect in this release.
        FieldsInEffect = "FieldsInEffect",
        /// The spec follows the project's advice: an odd size, a tested version.
        Advisable = "Advisable",
        /// A backup or a restore is done.
        Complete = "Complete",
        /// A backup or a restore has failed for good.
        Failed = "Failed",
        /// The certificates of a cluster with TLS hold.
        TlsReady = "TLSReady",
        /// What is kept of a periodic backup is what its policy says.
        RetentionApplied = "RetentionApplied",
    }
}

text_enum! {
    /// Reason of a condition.
    Reason {
        /// All is as the spec wants it.
        AsDesired = "AsDesired",
        /// The operator has not looked at the object yet, or cannot know.
        Unknown_ = "Unknown",
        /// The spec is refused: the message names the field and the remedy.
        InvalidSpec = "InvalidSpec",
        /// The spec uses fields this release accepts and ignores.
        NotYetInEffect = "NotYetInEffect",
        /// All fields of the spec are in effect.
        AllInEffect = "AllInEffect",
        /// The spec uses a field that must not be ignored and has no effect in this release.
        NotSupported = "NotSupported",
        /// An even number of members.
        EvenSize = "EvenSize",
        /// A version the project does not test.
        UntestedVersion = "UntestedVersion",
        /// The spec follows the project's advice.
        AsAdvised = "AsAdvised",
        /// `spec.paused` is set.
        Paused = "Paused",
        /// `spec.hibernate` is set: no member runs, the volumes stay.
        Hibernated = "Hibernated",
        /// `spec.hibernate` is set: the members are being stopped.
        Hibernating = "Hibernating",
        /// The object belongs to a restore.
        Restoring = "Restoring",
        /// The first members are being started.
        Bootstrapping = "Bootstrapping",
        /// The cluster has formed and a quorum answers.
        QuorumHealthy = "QuorumHealthy",
        /// A quorum answers, and the client Service leads to no member.
        NoEndpoint = "NoEndpoint",
        /// No quorum of voters answers.
        QuorumLost = "QuorumLost",
        /// Members are being added.
        AddingMembers = "AddingMembers",
        /// Members are being removed.
        RemovingMembers = "RemovingMembers",
        /// A learner is catching up with the leader.
        LearnerCatchingUp = "LearnerCatchingUp",
        /// A member is down.
        MemberDown = "MemberDown",
        /// A dead member is being replaced.
        ReplacingMember = "ReplacingMember",
        /// A member's pod cannot start: the message says why.
        PodNotStarting = "PodNotStarting",
        /// The image of the version cannot be pulled.
        ImageNotFound = "ImageNotFound",
        /// There is no volume for what needs one: the message says what is missing.
        StorageMissing = "StorageMissing",
        /// The operator's last step failed: the message says why.
        StepFailed = "StepFailed",
        /// Work is under way.
        InProgress = "InProgress",
        /// Work has not begun.
        Pending = "Pending",
        /// The work is done.
        Succeeded = "Succeeded",
        /// The next backup has its time.
        Scheduled = "Scheduled",
        /// No new backups are made: `suspend` is set.
        Suspended = "Suspended",
        /// The certificates hold.
        CertificatesHold = "CertificatesHold",
        /// A TLS Secret cannot be read.
        SecretUnreadable = "SecretUnreadable",
        /// A TLS Secret lacks a key.
        KeyMissing = "KeyMissing",
        /// A certificate or a private key cannot be read.
        CertificateUnreadable = "CertificateUnreadable",
        /// A private key is not that of its certificate.
        KeyMismatch = "KeyMismatch",
        /// A certificate was not signed by the authority that is asked about it.
        UnknownAuthority = "UnknownAuthority",
        /// The authorities were replaced by others in one step, while members run that trust the ones before.
        AuthorityReplaced = "AuthorityReplaced",
        /// An authority has expired.
        AuthorityExpired = "AuthorityExpired",
        /// A certificate has expired.
        CertificateExpired = "CertificateExpired",
        /// A certificate is not valid yet.
        CertificateNotYetValid = "CertificateNotYetValid",
        /// A certificate may not be used for what it is needed for.
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
        /// The stored bytes are not those that were sent.
        ChecksumMismatch = "ChecksumMismatch",
        /// The stored backup cannot be read as a snapshot.
        SnapshotUnreadable = "SnapshotUnreadable",
        /// The deadline passed before the work was done.
        DeadlineExceeded = "DeadlineExceeded",
        /// Attempt after attempt ended with the operator that made it.
        AttemptsCutOff = "AttemptsCutOff",
        /// The seed member could not be prepared: the message says why.
        SeedFailed = "SeedFailed",
        /// The object was deleted before it was done.
        Cancelled = "Cancelled",
        /// The definition (CRD) is older than the operator and does not know what it has to record.
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
    /// Nobody can say.
    Unknown,
}

impl ConditionStatus {
    /// The text in the object.
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

/// What a condition should say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Type of the condition.
    pub kind: ConditionType,
    /// Whether it holds.
    pub status: ConditionStatus,
    /// Why, in one word.
    pub reason: Reason,
    /// Why, for people: the field and the remedy where something is wrong.
    pub message: String,
}

impl Finding {
    /// A finding.
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

/// Longest message of a condition, in bytes.
pub const MAX_MESSAGE: usize = 32 * 1024;

/// Sets a condition, in place. The transition time changes only when the status does. The order of the
/// list is kept. Returns whether anything changed.
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

/// The condition of a type, if it is there.
pub fn find<'a>(conditions: &'a [Condition], kind: &ConditionType) -> Option<&'a Condition> {
    conditions
        .iter()
        .find(|condition| condition.type_ == kind.as_str())
}

/// Whether the condition of a type is there and holds.
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
    fn keeps_the_transition_time_until_the_status_flips() {
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
    fn says_whether_anything_changed() {
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
    fn cuts_a_message_that_is_too_long_between_characters() {
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
    fn reasons_and_types_are_pascal_case() {
        for text in ConditionType::KNOWN.iter().chain(Reason::KNOWN) {
            assert!(text.starts_with(|c: char| c.is_ascii_uppercase()), "{text}");
            assert!(text.chars().all(|c| c.is_ascii_alphanumeric()), "{text}");
        }
    }
}
