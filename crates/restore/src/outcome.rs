//! Converts errors of requests into problems that the status reports. Performs no I/O.

use api::EtcdRestore;
use api::problem::Chain;
use k8s_openapi::jiff::Timestamp;
use runtime::apply;
use runtime::outcome::Failure;

use crate::plan::Plan;
use crate::plan::missing_storage::pvc_rejected;
use crate::reason::{Reason, Trouble};
use crate::snapshot::Snapshot;

/// Texts in errors of the admission plugins `resourcequota` and `limitranger` about storage.
const NO_STORAGE: [&str; 2] = ["exceeded quota", "storage usage per PersistentVolumeClaim"];

/// The failure of a request.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API server rejected the request or could not be reached.
    #[error("a request to the API server failed")]
    Write(#[from] apply::Error),
    /// A precondition of the request is not met.
    #[error("{0}")]
    Missing(String),
    /// The observation is older than ten seconds, because the process was suspended or the API server was slow.
    #[error(
        "the observation took longer than {} seconds, so the operator repeats it: the API server or etcd responds slowly, or the operator has too little CPU",
        apply::FRESH.as_secs()
    )]
    TooOld,
    /// The EtcdRestore could not be read.
    #[error("the EtcdRestore cannot be read")]
    Read(#[source] kube::Error),
    /// The status was not written.
    #[error("the status cannot be written")]
    Status(#[source] apply::Error),
}

impl Failure for Error {
    fn reason(&self) -> &'static str {
        match self {
            Self::Write(error) | Self::Status(error) => error.reason(),
            Self::Missing(_) => "Missing",
            Self::TooOld => "Conflict",
            Self::Read(error) => apply::kube_reason(error),
        }
    }
}

impl Error {
    /// True if an object has changed since it was read, or if the observation is too old. The next reconcile repeats
    /// the step.
    pub(crate) fn is_outdated(&self) -> bool {
        match self {
            Self::Write(error) | Self::Status(error) => error.is_conflict() || error.is_missing(),
            Self::TooOld => true,
            Self::Missing(_) | Self::Read(_) => false,
        }
    }

    /// Converts the error into the problem that the status reports.
    pub(crate) fn trouble(&self) -> Trouble {
        if let Self::Write(error) = self
            && let Some(trouble) = no_storage(error)
        {
            return trouble;
        }
        let reason = match self {
            Self::TooOld => Reason::InProgress,
            Self::Write(_) | Self::Missing(_) | Self::Read(_) | Self::Status(_) => {
                Reason::StepFailed
            }
        };
        Trouble::new(reason, Chain(self).to_string())
    }
}

/// If a quota or limit range rejects the PVC, returns a plan that reports this problem. Removes the error, so that the
/// controller does not back off.
pub(crate) fn replan_without_storage(
    restore: &EtcdRestore,
    snapshot: &Snapshot,
    (plan, executed): (Plan, Result<(), Error>),
    now: Timestamp,
) -> (Plan, Result<(), Error>) {
    let trouble = executed.as_ref().err().map(Error::trouble);
    match trouble.filter(|trouble| trouble.reason == Reason::StorageMissing) {
        Some(trouble) => (pvc_rejected(restore, snapshot, trouble, now), Ok(())),
        None => (plan, executed),
    }
}

/// The problem if a quota or limit range rejects the seed's PersistentVolumeClaim. `None` for other errors.
fn no_storage(error: &apply::Error) -> Option<Trouble> {
    let apply::Error::Api {
        verb: "create",
        kind,
        source,
        ..
    } = error
    else {
        return None;
    };
    let kube::Error::Api(status) = source.as_ref() else {
        return None;
    };
    let text = status.message.as_str();
    let is_rejected = kind == "PersistentVolumeClaim"
        && status.code == 403
        && NO_STORAGE.iter().any(|part| text.contains(part));
    is_rejected.then(|| {
        let message = format!(
            "no storage for the seed: the API server rejects its PersistentVolumeClaim: {text}. Raise the quota or the limit \
             of the namespace, delete unused PersistentVolumeClaims, or request less storage in spec.pod.persistentVolumeClaimSpec \
             of the EtcdCluster (for a new cluster: in spec.etcdCluster.template of a new EtcdRestore)"
        );
        Trouble::new(Reason::StorageMissing, message)
    })
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn rejected(verb: &'static str, kind: &str, code: u16, text: &str) -> apply::Error {
        apply::Error::Api {
            verb,
            kind: kind.to_owned(),
            name: "main-aaaaaaaaaa".to_owned(),
            source: Box::new(kube::Error::Api(Box::new(
                Status::failure(text, "Forbidden").with_code(code),
            ))),
        }
    }

    #[test]
    fn exceeded_storage_quota_is_reported_as_missing_storage() {
        let quota = "persistentvolumeclaims \"main-aaaaaaaaaa\" is forbidden: exceeded quota: few, requested: \
                     persistentvolumeclaims=1, used: persistentvolumeclaims=3, limited: persistentvolumeclaims=3";
        let limit = "persistentvolumeclaims \"main-aaaaaaaaaa\" is forbidden: maximum storage usage per \
                     PersistentVolumeClaim is 1Gi, but request is 2Gi";
        let pvc = "PersistentVolumeClaim";
        for text in [quota, limit] {
            let trouble = no_storage(&rejected("create", pvc, 403, text)).unwrap();
            assert_eq!(trouble.reason, Reason::StorageMissing);
            for part in [
                text,
                "spec.pod.persistentVolumeClaimSpec",
                "Raise the quota",
            ] {
                assert!(trouble.message.contains(part), "{}", trouble.message);
            }
        }
        // None of these errors proves that storage is missing. For example, a permission is missing, or the API server
        // has not computed the quota yet.
        let rights = "persistentvolumeclaims is forbidden: User \"a\" cannot create resource \"persistentvolumeclaims\"";
        let unknown = "status unknown for quota: few, resources: persistentvolumeclaims";
        for other in [
            rejected("create", pvc, 403, rights),
            rejected("create", pvc, 403, unknown),
            rejected("create", "Pod", 403, quota),
            rejected("delete", pvc, 403, quota),
            rejected("create", pvc, 500, quota),
        ] {
            assert!(no_storage(&other).is_none(), "{other:?}");
        }
    }
}
