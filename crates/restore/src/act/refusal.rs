//! What a refusal of the API server says of the seed. Pure.

use api::conditions::Reason;
use runtime::apply;

use crate::observed::Trouble;

/// The words of a quota and of a limit of the namespace (`resourcequota` and `limitranger` in kubernetes' plugin/admission).
const NO_STORAGE: [&str; 2] = ["exceeded quota", "storage usage per PersistentVolumeClaim"];

/// Why there may be no volume claim for the seed.
pub(super) fn no_storage(error: &apply::Error) -> Option<Trouble> {
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
    let says = status.message.as_str();
    let is = kind == "PersistentVolumeClaim"
        && status.code == 403
        && NO_STORAGE.iter().any(|words| says.contains(words));
    is.then(|| {
        let message = format!(
            "no storage for the seed: the API server refuses its volume claim: {says}; raise the quota or the limit of the \
             namespace, free what is not needed, or ask for less in spec.pod.persistentVolumeClaimSpec of the EtcdCluster \
             (for a new one: in spec.etcdCluster.template, in a new EtcdRestore)"
        );
        Trouble::new(Reason::StorageMissing, message)
    })
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn refused(verb: &'static str, kind: &str, code: u16, says: &str) -> apply::Error {
        apply::Error::Api {
            verb,
            kind: kind.to_owned(),
            name: "main-aaaaaaaaaa".to_owned(),
            source: Box::new(kube::Error::Api(Box::new(
                Status::failure(says, "Forbidden").with_code(code),
            ))),
        }
    }

    #[test]
    fn a_volume_claim_that_a_quota_or_a_limit_refuses_is_told_from_other_refusals() {
        let quota = "persistentvolumeclaims \"main-aaaaaaaaaa\" is forbidden: exceeded quota: few, requested: \
                     persistentvolumeclaims=1, used: persistentvolumeclaims=3, limited: persistentvolumeclaims=3";
        let limit = "persistentvolumeclaims \"main-aaaaaaaaaa\" is forbidden: maximum storage usage per \
                     PersistentVolumeClaim is 1Gi, but request is 2Gi";
        let claim = "PersistentVolumeClaim";
        for says in [quota, limit] {
            let trouble = no_storage(&refused("create", claim, 403, says)).unwrap();
            assert_eq!(trouble.reason, Reason::StorageMissing);
            for part in [
                says,
                "spec.pod.persistentVolumeClaimSpec",
                "raise the quota",
            ] {
                assert!(trouble.message.contains(part), "{}", trouble.message);
            }
        }
        // Rights that are missing, and a quota nobody has counted for yet, are waited for as before.
        let rights = "persistentvolumeclaims is forbidden: User \"a\" cannot create resource \"persistentvolumeclaims\"";
        let unknown = "status unknown for quota: few, resources: persistentvolumeclaims";
        for other in [
            refused("create", claim, 403, rights),
            refused("create", claim, 403, unknown),
            refused("create", "Pod", 403, quota),
            refused("delete", claim, 403, quota),
            refused("create", claim, 500, quota),
        ] {
            assert!(no_storage(&other).is_none(), "{other:?}");
        }
    }
}
