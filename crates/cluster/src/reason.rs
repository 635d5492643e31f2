//! All reasons of conditions and Events. The names never change, because alerts and scripts match on them.
//!
//! To add a reason, add a line to the list of its kind. Document a problem in docs/troubleshooting.md, or in
//! docs/tls.md if it concerns a TLS Secret. `cargo test -p xtask tidy` checks this.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use member::tls::FaultKind;
use runtime::apply::{self, ApiFailure};

macro_rules! lists_of_reasons {
    ($($(#[$meta:meta])* $list:ident { $($name:ident,)+ })+) => {
        api::reasons! {
            /// The reason in a condition or an Event.
            #[expect(missing_docs, reason = "the name of a variant is the reason, and the message of the condition explains it")]
            pub enum Reason {
                $($($name,)+)+
            }
        }

        impl Reason {
            $($(#[$meta])* pub const $list: &'static [Self] = &[$(Self::$name,)+];)+
        }
    };
}

lists_of_reasons! {
    /// A problem that a user must resolve. The condition `Degraded` is true, and the Event is a warning.
    PROBLEMS {
        AuthSecret,
        AuthUser,
        AuthorityExpired,
        AuthorityLost,
        ClocksDiffer,
        ContainerFailing,
        Corrupt,
        DataDiffers,
        EtcdAccessDenied,
        ForeignCluster,
        ForeignMember,
        ForeignObjects,
        HibernationRefused,
        IdentityUnknown,
        ImageNotAvailable,
        InvalidSchedule,
        InvalidSpec,
        JoinRefused,
        JoinsWithVote,
        NameTaken,
        NoRecentBackup,
        NoSpace,
        NotYetInEffect,
        OperatorImageUnknown,
        OutOfMemory,
        PodNotStarting,
        QuorumLost,
        RecoveryFailed,
        RecoveryRefused,
        SecretNotOurs,
        StorageMissing,
        SurvivorLost,
        TLSSwitchRefused,
        Unschedulable,
        UpgradeStopped,
        VersionMismatch,
        VersionRefused,
        VolumeLost,
        VolumesKept,
    }
    /// A problem of a TLS Secret, reported like the reasons in `PROBLEMS`.
    TLS_FAULTS {
        AuthorityReplaced,
        CertManagerMissing,
        CertificateExpired,
        CertificateNotIssued,
        CertificateNotYetValid,
        CertificateUnreadable,
        IssuerMissing,
        KeyMismatch,
        KeyMissing,
        NameNotCovered,
        SecretMissing,
        SecretUnreadable,
        UnknownAuthority,
        WrongUsage,
    }
    /// A reason for which the operator waits, reported in the condition `Progressing` and in `status.waitingFor`.
    WAITS {
        AdoptionWaits,
        AuthLeftOn,
        AuthorityMissing,
        AuthorityRotating,
        AwaitingBackup,
        BootstrapAbandoned,
        Bootstrapping,
        Compacting,
        ComparingData,
        DefragmentationWaits,
        Defragmenting,
        Deleting,
        DowngradeSettling,
        FirstMemberLost,
        Hibernated,
        Hibernating,
        JoinWaits,
        LeadingClientsAway,
        LearnerCatchingUp,
        LearnerCutOff,
        LearnerStarting,
        MemberJoining,
        MemberRestarting,
        MemberUnhealthy,
        NoMemberToRemove,
        NoQuorum,
        OneLearnerAtATime,
        Paused,
        QuorumAtRisk,
        ResizeDeferred,
        Resizing,
        Restoring,
        RollWaits,
        SeedStarting,
        StrangersPresent,
        TLSNotReady,
        TLSSwitching,
        VersionSettling,
        VolumeGrowing,
        VoterNotHealthy,
        VoterStarting,
        VotersConnecting,
    }
    /// The reason of a condition that describes a state.
    STATES {
        AddingMembers,
        AllInEffect,
        AsAdvised,
        AsDesired,
        CertificatesHold,
        EvenSize,
        InProgress,
        MemberDown,
        NoBackup,
        NoCompaction,
        NoEndpoint,
        NoVolumes,
        QuorumHealthy,
        QuotaNearlyFull,
        Ready,
        Recovering,
        RemovingMembers,
        ReplacingMember,
        Scaling,
        SharedNode,
        StepFailed,
        Switching,
        UntestedVersion,
        Updating,
        Upgrading,
    }
    /// An action of the operator or a change of the cluster, reported as an Event.
    CHANGES {
        AlarmDisarmed,
        AuthDisabled,
        AuthEnabled,
        AuthorityCreated,
        AuthorityPrepared,
        AuthorityRejoined,
        AuthorityRetired,
        AuthoritySwitched,
        Available,
        BackupPresent,
        BackupRequested,
        BackupWaived,
        BootstrapBegun,
        CertificateExpiring,
        CertificateIssued,
        CertificateRenewed,
        ClientServiceApplied,
        ClientServiceOpened,
        ClusterFormed,
        ClusterRecorded,
        Compacted,
        DefragmentationBegun,
        DefragmentationFailed,
        DeletionContinues,
        DisruptionBudgetApplied,
        DisruptionBudgetDeleted,
        DowngradeAllowed,
        DowngradeTakenBack,
        HeadlessServiceApplied,
        Healthy,
        LeaderMoved,
        LogPrepared,
        MemberAdded,
        MemberDefragmented,
        MemberPromoted,
        MemberRemoved,
        MemberServiceCreated,
        MemberServiceDeleted,
        MemberStarted,
        MemberVersionChanged,
        NetworkPolicyApplied,
        NetworkPolicyDeleted,
        PasswordChanged,
        PeerUrlChanged,
        PodDeleted,
        PodPatched,
        PodResized,
        RecoveryBegun,
        RecoveryCancelled,
        RecoveryComplete,
        Resumed,
        ServiceRepaired,
        TLSRecorded,
        Unavailable,
        VolumeClaimDeleted,
        VolumeClaimGrown,
        VolumeKept,
    }
    /// A failed reconcile. The Event is a warning, and the metric of failed reconciles has the reason as a label.
    FAILURES {
        ApiServerError,
        ApiServerUnreachable,
        CertificateNotMade,
        Conflict,
        Defect,
        DefinitionOutdated,
        EtcdError,
        EtcdRefused,
        EtcdTls,
        EtcdUnreachable,
        Forbidden,
        Missing,
        NotFound,
        Refused,
        Throttled,
        VolumeNotGrown,
    }
}

impl Reason {
    /// True if the operator waits because the next step is impossible or would do harm. Such a wait causes a warning
    /// Event.
    pub fn warns_of_wait(self) -> bool {
        matches!(
            self,
            Self::QuorumAtRisk
                | Self::NoMemberToRemove
                | Self::FirstMemberLost
                | Self::StrangersPresent
                | Self::BootstrapAbandoned
        )
    }

    /// True if the operator waits for a compaction, a defragmentation or a comparison of the data. These activities run
    /// even while the cluster matches its spec.
    pub fn is_upkeep(self) -> bool {
        matches!(
            self,
            Self::Compacting
                | Self::ComparingData
                | Self::Defragmenting
                | Self::DefragmentationWaits
        )
    }

    /// True if `spec.hibernate` has stopped the cluster or is stopping it.
    pub fn is_hibernation(self) -> bool {
        matches!(self, Self::Hibernated | Self::Hibernating)
    }

    /// True if the reason of the condition says that the cluster is hibernating or hibernated.
    pub fn is_of_hibernation(condition: &Condition) -> bool {
        Self::parse(&condition.reason).is_some_and(Self::is_hibernation)
    }

    /// True if etcd has rejected a call or has not answered it.
    pub fn is_from_etcd(self) -> bool {
        matches!(
            self,
            Self::EtcdAccessDenied
                | Self::EtcdError
                | Self::EtcdRefused
                | Self::EtcdTls
                | Self::EtcdUnreachable
        )
    }
}

impl From<FaultKind> for Reason {
    fn from(kind: FaultKind) -> Self {
        match kind {
            FaultKind::AuthorityExpired => Self::AuthorityExpired,
            FaultKind::AuthorityReplaced => Self::AuthorityReplaced,
            FaultKind::CertManagerMissing => Self::CertManagerMissing,
            FaultKind::CertificateExpired => Self::CertificateExpired,
            FaultKind::CertificateNotIssued => Self::CertificateNotIssued,
            FaultKind::CertificateNotYetValid => Self::CertificateNotYetValid,
            FaultKind::CertificateUnreadable => Self::CertificateUnreadable,
            FaultKind::IssuerMissing => Self::IssuerMissing,
            FaultKind::KeyMismatch => Self::KeyMismatch,
            FaultKind::KeyMissing => Self::KeyMissing,
            FaultKind::NameNotCovered => Self::NameNotCovered,
            FaultKind::SecretMissing => Self::SecretMissing,
            FaultKind::SecretUnreadable => Self::SecretUnreadable,
            FaultKind::UnknownAuthority => Self::UnknownAuthority,
            FaultKind::WrongUsage => Self::WrongUsage,
        }
    }
}

impl From<&kube::Error> for Reason {
    fn from(error: &kube::Error) -> Self {
        match ApiFailure::of(error) {
            ApiFailure::Forbidden => Self::Forbidden,
            ApiFailure::NotFound => Self::NotFound,
            ApiFailure::Conflict => Self::Conflict,
            ApiFailure::Refused => Self::Refused,
            ApiFailure::Throttled => Self::Throttled,
            ApiFailure::ApiServerError => Self::ApiServerError,
            ApiFailure::ApiServerUnreachable => Self::ApiServerUnreachable,
        }
    }
}

impl From<&apply::Error> for Reason {
    fn from(error: &apply::Error) -> Self {
        match error {
            apply::Error::Serialise { .. } => Self::Defect,
            apply::Error::Definition { .. } => Self::DefinitionOutdated,
            apply::Error::Api { source, .. } => Self::from(&**source),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    fn all() -> Vec<&'static str> {
        Reason::ALL.iter().map(|reason| reason.as_str()).collect()
    }

    /// Appends all source files of this crate except this file.
    fn sources(folder: &Path, texts: &mut String) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, texts);
            } else if !path.ends_with("reason.rs") {
                texts.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }

    fn words_after(text: &str, before: &str) -> BTreeSet<String> {
        let rests = text.split(before).skip(1);
        let word = |rest: &str| rest.chars().take_while(char::is_ascii_alphabetic).collect();
        rests.map(word).collect()
    }

    #[test]
    fn reason_names_are_unique_and_camel_case() {
        let names = all();
        let unique: BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
        for name in names {
            let letters = name.chars().all(|one| one.is_ascii_alphanumeric());
            assert!(letters && name.starts_with(char::is_uppercase), "{name}");
        }
    }

    #[test]
    fn every_reason_is_used_and_every_problem_reason_is_listed() {
        let mut text = String::new();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        sources(&root.join("src"), &mut text);
        let mut used = words_after(&text, "Reason::");
        // The conversions in this file name reasons as `Self::`, which `words_after` does not find.
        let own = fs::read_to_string(root.join("src/reason.rs")).unwrap();
        let (_, converted) = own.split_once("From<FaultKind> for Reason").unwrap();
        used.extend(words_after(converted, "Self::"));
        for name in all() {
            assert!(used.contains(name), "no code uses the reason {name}");
        }
        let text: String = text.split_whitespace().collect();
        let problems = words_after(&text, "problem(Reason::");
        assert!(problems.len() > 30, "{problems:?}");
        for problem in problems {
            let listed = |one: &Reason| one.as_str() == problem;
            assert!(Reason::PROBLEMS.iter().any(listed), "{problem}");
        }
    }

    #[test]
    fn errors_of_api_server_become_reasons_of_same_name() {
        for code in [400, 401, 403, 404, 409, 422, 429, 500] {
            let status = kube::core::Status::failure("no", "Reason").with_code(code);
            let error = kube::Error::Api(Box::new(status));
            assert_eq!(Reason::from(&error).as_str(), apply::kube_reason(&error));
        }
        let unreachable = kube::Error::LinesCodecMaxLineLengthExceeded;
        assert_eq!(Reason::from(&unreachable), Reason::ApiServerUnreachable);
    }
}
