//! Plans verifications: each restores the newest backup in a separate pod. Performs no I/O.
//!
//! The operator records the start of a verification before it creates the pod (invariant 10). The name of the pod
//! depends on this record, so a new operator process finds the pod. The pod is deleted before its result is recorded.
//! If the operator process ends between the deletion and the record, the verification is repeated.

use std::time::Duration;

use api::EtcdBackup;
use api::backup::name::{self, Numbered};
use api::backup::{Verification, VerificationStatus};
use api::storage::StorageBlock;
use api::version::{DEFAULT_REPOSITORY, EtcdVersion};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt};
use member::verification::{VerificationPod, verification_pod};
use member::{OperatorImage, Source};
use runtime::schedule::Schedule;
use sha2::{Digest, Sha256};

use super::refusal::refusal;
use super::request;
use super::requeue::{INPUT_RETRY, until};
use crate::reason::{Reason, Trouble};
use crate::snapshot::VerificationInputs;
use crate::verification::{Failure, PodState, Proof};

mod window;

use window::opening;

/// Delay between two reads of the pod.
const POLL: Duration = Duration::from_secs(3);
/// A queued verification checks after this time whether another verification of the namespace has ended.
const TURN_RETRY: Duration = Duration::from_secs(15);
/// Delay of the next verification after the first failure. Each further failure doubles the delay.
const RETRY: SignedDuration = SignedDuration::from_mins(1);
const MAX_RETRY: SignedDuration = SignedDuration::from_hours(6);
/// The kubelet stops the pod at its time limit. The operator waits for this additional time, in case the kubelet does
/// not answer.
const GRACE: SignedDuration = SignedDuration::from_mins(2);
/// Number of hexadecimal digits of the digest in the name of a pod.
const NAME_DIGITS: usize = 20;

/// The action of the operator for a verification.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Step {
    /// No action in this reconcile.
    #[default]
    Nothing,
    /// Create the pod of the verification.
    Create(Box<Pod>),
    /// Delete the pod with this name, if the EtcdBackup owns it.
    Delete(String),
}

/// The state of the verification for the status.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum VerificationVerdict {
    /// No verification is due or running. The status keeps the result of the last verification.
    #[default]
    Unchanged,
    /// `spec.verification` is not set, so the status contains nothing about verifications.
    Off,
    /// The verification of the backup at this location starts.
    Starting(String),
    /// The verification waits. Contains the cause.
    Waiting(String),
    /// The verification of the backup at this location waits until another verification of the namespace has ended.
    Queued(String),
    /// The verification has succeeded: the backup can be restored.
    Verified(Proof),
    /// The verification has failed. Either the backup cannot be restored, or the attempt had no result.
    Failed(Failure),
}

/// The next step of the verification.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerificationPlan {
    /// The action of the operator.
    pub step: Step,
    /// The state for the status.
    pub verdict: VerificationVerdict,
    /// Time until the next reconcile. `None` waits for a change of the EtcdBackup.
    pub requeue: Option<Duration>,
}

impl VerificationPlan {
    fn new(step: Step, verdict: VerificationVerdict, requeue: Option<Duration>) -> Self {
        Self {
            step,
            verdict,
            requeue,
        }
    }

    fn wait(why: impl Into<String>, requeue: Duration) -> Self {
        let verdict = VerificationVerdict::Waiting(why.into());
        Self::new(Step::Nothing, verdict, Some(requeue))
    }
}

/// The data that the plan of a verification needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VerificationNeed {
    /// No data.
    Nothing,
    /// Whether the EtcdBackup may be verified now.
    Turn,
    /// The state of the pod with this name, whether the EtcdBackup may be verified now, and the images.
    Pod(String),
}

/// The data that [`plan`] needs at this time. If `observe` reads [`VerificationNeed::Turn`], it may give the turn of
/// the namespace to this EtcdBackup. Other EtcdBackups of the namespace then wait, so `Turn` is needed only if the
/// verification can start now.
pub(crate) fn need(backup: &EtcdBackup, now: Timestamp) -> VerificationNeed {
    let Some(settings) = settings(backup) else {
        return VerificationNeed::Nothing;
    };
    if let Some((record, started)) = running(backup) {
        return VerificationNeed::Pod(pod_name(backup, &record.location, started));
    }
    match begin(backup, settings, now) {
        Begin::Now => VerificationNeed::Turn,
        Begin::Never | Begin::At(_) | Begin::InWindow(_) => VerificationNeed::Nothing,
    }
}

/// The time at which the next verification may start. Other verifications of the namespace may delay it further.
enum Begin {
    /// No verification is needed.
    Never,
    /// The verification is due at this later time.
    At(Timestamp),
    /// The verification is due, and waits until its window opens. `None` if the window never opens again.
    InWindow(Option<Timestamp>),
    /// The verification may start.
    Now,
}

fn begin(backup: &EtcdBackup, settings: &Verification, now: Timestamp) -> Begin {
    let Some(due) = due(backup, now) else {
        return Begin::Never;
    };
    if due > now {
        return Begin::At(due);
    }
    // If an upgrade or another change of the cluster waits for this verification, the verification may start outside
    // its window.
    if request::wants_verification(backup) {
        return Begin::Now;
    }
    match opening(settings.window.as_ref(), now) {
        Some(time) if time <= now => Begin::Now,
        time => Begin::InWindow(time),
    }
}

/// Plans the next step of the verification of an EtcdBackup.
pub(crate) fn plan(
    backup: &EtcdBackup,
    inputs: &VerificationInputs,
    now: Timestamp,
) -> VerificationPlan {
    if backup.spec.verification.is_none() {
        return plan_off(backup);
    }
    let Some(settings) = settings(backup) else {
        return VerificationPlan::default();
    };
    let Some((record, started)) = running(backup) else {
        return plan_start(backup, settings, inputs, now);
    };
    let name = pod_name(backup, &record.location, started);
    let ended = |result: &Result<Proof, Failure>| {
        let verdict = match result {
            Ok(proof) => VerificationVerdict::Verified(proof.clone()),
            Err(failure) => VerificationVerdict::Failed(failure.clone()),
        };
        VerificationPlan::new(Step::Delete(name.clone()), verdict, Some(Duration::ZERO))
    };
    let limit = SignedDuration::from_secs(settings.timeout_seconds().into()) + GRACE;
    let overdue = now.duration_since(started) > limit;
    let too_long = |why: &str| {
        let because = if why.is_empty() {
            String::new()
        } else {
            format!(": {why}")
        };
        Err(Failure {
            damaged: false,
            message: format!(
                "the verification has not ended within {} s{because}; raise spec.verification.timeoutSeconds, or \
                 resolve the cause of the delay",
                settings.timeout_seconds()
            ),
        })
    };
    match &inputs.pod {
        PodState::Ended(result) => ended(result),
        PodState::Starting(why) if overdue => ended(&too_long(why)),
        PodState::Running | PodState::Missing if overdue => ended(&too_long("")),
        PodState::Starting(why) if why.is_empty() => VerificationPlan::wait(RUNNING, POLL),
        PodState::Starting(why) => VerificationPlan::wait(why, POLL),
        PodState::Running => VerificationPlan::wait(RUNNING, POLL),
        PodState::Foreign => VerificationPlan::wait(
            format!(
                "pod {name} has the name of the verification's pod, but another owner: delete the pod"
            ),
            TURN_RETRY,
        ),
        PodState::Unknown(why) => VerificationPlan::wait(why, INPUT_RETRY),
        PodState::NotRead => VerificationPlan::wait(RUNNING, INPUT_RETRY),
        // The pod was deleted before it reported a result, and a newer backup exists now. The newest backup is
        // verified, and not the older backup in `record`.
        PodState::Missing if location(backup) != Some(record.location.as_str()) => {
            let location = location(backup).unwrap_or_default().to_owned();
            let verdict = VerificationVerdict::Starting(location);
            VerificationPlan::new(Step::Nothing, verdict, Some(Duration::ZERO))
        }
        PodState::Missing if !inputs.has_turn => VerificationPlan::wait(QUEUED, TURN_RETRY),
        PodState::Missing => match built(backup, settings, inputs, name) {
            Ok(pod) => VerificationPlan::new(
                Step::Create(Box::new(pod)),
                VerificationVerdict::Waiting(RUNNING.to_owned()),
                Some(POLL),
            ),
            Err(trouble) => VerificationPlan::wait(trouble.message, INPUT_RETRY),
        },
    }
}

/// Plans the start of the next verification.
fn plan_start(
    backup: &EtcdBackup,
    settings: &Verification,
    inputs: &VerificationInputs,
    now: Timestamp,
) -> VerificationPlan {
    match begin(backup, settings, now) {
        Begin::Never => VerificationPlan::default(),
        Begin::At(time) => VerificationPlan {
            requeue: Some(until(time, now)),
            ..VerificationPlan::default()
        },
        Begin::InWindow(Some(time)) => VerificationPlan::wait(
            format!("the verification waits for spec.verification.window, which opens at {time}"),
            until(time, now),
        ),
        Begin::InWindow(None) => VerificationPlan::wait(CLOSED, until(Timestamp::MAX, now)),
        Begin::Now => {
            let location = location(backup).unwrap_or_default().to_owned();
            let (verdict, requeue) = if inputs.has_turn {
                (VerificationVerdict::Starting(location), Duration::ZERO)
            } else {
                (VerificationVerdict::Queued(location), TURN_RETRY)
            };
            VerificationPlan::new(Step::Nothing, verdict, Some(requeue))
        }
    }
}

const CLOSED: &str =
    "spec.verification.window does not open again: correct its schedule, or remove the window";
/// The message in the status for a queued verification.
pub(crate) const QUEUED: &str = "another backup of this namespace is being verified: this verification starts afterwards. To \
                      verify both at the same time, set spec.verification.allowConcurrent";
const RUNNING: &str = "the backup is being restored in a separate pod";

/// Ends the verification after `spec.verification` was removed.
fn plan_off(backup: &EtcdBackup) -> VerificationPlan {
    let Some(status) = &backup.status else {
        return VerificationPlan::default();
    };
    if status.verification.is_none() && status.last_verified.is_none() {
        return VerificationPlan::default();
    }
    let step = running(backup).map_or(Step::Nothing, |(record, started)| {
        Step::Delete(pod_name(backup, &record.location, started))
    });
    VerificationPlan::new(step, VerificationVerdict::Off, None)
}

/// The verification settings. `None` if the EtcdBackup is not verified, is being deleted or has a rejected spec.
fn settings(backup: &EtcdBackup) -> Option<&Verification> {
    let settings = backup.spec.verification.as_deref()?;
    let live = backup.metadata.deletion_timestamp.is_none();
    (live && refusal(backup).is_none()).then_some(settings)
}

fn record(backup: &EtcdBackup) -> Option<&VerificationStatus> {
    backup.status.as_ref()?.verification.as_ref()
}

/// The running verification and its start time.
pub(crate) fn running(backup: &EtcdBackup) -> Option<(&VerificationStatus, Timestamp)> {
    let record = record(backup)?;
    Some((record, record.start_time.as_ref()?.0))
}

/// The location of the newest complete backup.
fn location(backup: &EtcdBackup) -> Option<&str> {
    backup.status.as_ref()?.location.as_deref()
}

/// The time at which the verification of the newest backup is due. `None` if no backup exists, or if no verification
/// is needed.
fn due(backup: &EtcdBackup, now: Timestamp) -> Option<Timestamp> {
    let settings = backup.spec.verification.as_ref()?;
    let status = backup.status.as_ref()?;
    let newest = location(backup)?;
    let last = status.last_verified.as_ref();
    let begins = match &settings.schedule {
        None => {
            let verified = last.is_some_and(|last| last.location == newest);
            (!verified).then_some(now)?
        }
        Some(text) => {
            let schedule = Schedule::parse(text, settings.time_zone.as_deref()).ok()?;
            let requested = request::wants_verification(backup).then_some(now);
            let created = backup.metadata.creation_timestamp.as_ref();
            let last = last.and_then(|last| last.time.as_ref()).or(created)?;
            requested.or_else(|| schedule.next_after(last.0))?
        }
    };
    let failed = record(backup).filter(|record| record.location == newest);
    let retry = failed.and_then(|record| {
        let pause = retry_pause(record.failures?);
        record.last_failure_time.as_ref()?.0.checked_add(pause).ok()
    });
    Some(retry.map_or(begins, |retry| retry.max(begins)))
}

/// The delay after this number of failures.
fn retry_pause(failures: i32) -> SignedDuration {
    let doubled = u32::try_from(failures - 1).unwrap_or_default().min(10);
    (RETRY * 2_i32.pow(doubled)).min(MAX_RETRY)
}

/// The name of the pod. The name depends only on `status.verification`, so a second operator process finds the pod of
/// the first process (invariant 11).
fn pod_name(backup: &EtcdBackup, location: &str, started: Timestamp) -> String {
    let uid = backup.uid().unwrap_or_default();
    let digest = hex::encode(Sha256::digest(format!("{uid}\n{location}\n{started}")));
    format!("etcd-verify-{}", &digest[..NAME_DIGITS])
}

fn built(
    backup: &EtcdBackup,
    settings: &Verification,
    inputs: &VerificationInputs,
    name: String,
) -> Result<Pod, Trouble> {
    let unusable = |why: &str| Trouble::new(Reason::StepFailed, why.to_owned());
    let status = backup
        .status
        .as_ref()
        .ok_or_else(|| unusable("there is no backup"))?;
    let version = status.etcd_version.as_deref().unwrap_or_default();
    let version = EtcdVersion::parse(version).map_err(|_| {
        unusable("this backup cannot be verified, because the status does not contain its etcd version: the operator \
                  verifies the next backup")
    })?;
    let image: &OperatorImage = inputs
        .image
        .as_ref()
        .ok_or_else(|| unusable("the image of the operators is not known yet"))?;
    let block = block_at(backup, location(backup).unwrap_or_default())?;
    let image_of = |repository: &str| version.image(repository);
    let etcd_image = match (&settings.repository, &inputs.etcd_image) {
        (Some(repository), _) => image_of(repository),
        (None, Some(pinned)) => pinned.clone(),
        (None, None) => image_of(inputs.repository.as_deref().unwrap_or(DEFAULT_REPOSITORY)),
    };
    let mut source = Source::store(&block, &version, status.sha256.as_deref());
    // `status.encryption_key`, and not `spec.encryption`, shows whether the newest backup is encrypted: the spec may
    // have changed since this backup.
    match (&status.encryption_key, &backup.spec.encryption) {
        (Some(_), Some(encryption)) => source = source.encrypted(&encryption.secret),
        (Some(key), None) => {
            return Err(Trouble::new(
                Reason::InvalidSpec,
                format!(
                    "the newest backup is encrypted with the key {:?} (ID {}), but spec.encryption is not set: set it to \
                     verify this backup, or wait for the next backup",
                    key.name, key.id
                ),
            ));
        }
        (None, _) => {}
    }
    Ok(verification_pod(VerificationPod {
        name,
        namespace: backup.namespace().unwrap_or_default(),
        owner: backup.owner_ref(&()).unwrap_or_default(),
        version: &version,
        image: etcd_image,
        source,
        settings,
        operator: image,
    }))
}

/// The storage block of the spec, with the path of the backup at `location`.
fn block_at(backup: &EtcdBackup, location: &str) -> Result<StorageBlock, Trouble> {
    let spec = &backup.spec;
    let source = spec
        .blocks()
        .select(&spec.storage_type, "spec", "storageType")
        .map_err(|problem| Trouble::new(Reason::InvalidSpec, problem.to_string()))?;
    let block = StorageBlock::from(source);
    let path = block.path_in(location).map(str::to_owned);
    let message = || {
        format!(
            "the backup {location} cannot be verified, because it is not in the PVC of spec.pvc: the operator \
                 verifies the next backup"
        )
    };
    let path = path.ok_or_else(|| Trouble::new(Reason::StepFailed, message()))?;
    Ok(block.at(path))
}

/// The name of the newest verified backup, which retention keeps. `None` without verifications, or if this backup is
/// not at the path of the spec.
pub(super) fn verified(backup: &EtcdBackup) -> Option<Numbered> {
    settings(backup)?;
    let last = backup.status.as_ref()?.last_verified.as_ref()?;
    let spec = &backup.spec;
    let source = spec
        .blocks()
        .select(&spec.storage_type, "spec", "storageType");
    let block = StorageBlock::from(source.ok()?);
    name::parse(block.source().path(), block.path_in(&last.location)?)
}

#[cfg(test)]
mod tests;
