//! Converts the spec in effect to the planner's type. Performs no I/O.

use api::EtcdClusterSpec;
use api::cluster::{BootstrapMode, unsafe_to_ignore, validate};
use api::problem::summary;
use api::version::EtcdVersion;
use member::{Operators, spec_hash};

use crate::access::AccessRule;
use crate::plan::effective::Effective;
use crate::quantity::bytes;
use crate::snapshot::{Claim, Desired, RecoveryRule};
use crate::upkeep::UpkeepRule;

/// Converts the spec in effect. `invalid` contains the problems of the spec, because an EtcdCluster that was stored
/// under an older schema may be invalid.
pub fn desired(effective: &Effective, operators: &Operators) -> Desired {
    let cluster = effective.cluster();
    let spec = &cluster.spec;
    let problems = validate(cluster);
    let size = usize::try_from(spec.size).unwrap_or_default();
    let dangerous = unsafe_to_ignore(spec);
    let version = EtcdVersion::parse(&spec.version);
    Desired {
        size,
        first: if spec.bootstrap == BootstrapMode::Seed {
            1
        } else {
            size
        },
        durable: spec.is_durable(),
        claim: claim(spec),
        hibernate: spec.hibernate,
        upkeep: UpkeepRule {
            quota: spec.quota_bytes(),
            only_reports: spec.only_reports_no_space(),
            keep_revisions: spec.revisions_kept(),
            defragmentation: spec.defragmentation().cloned(),
        },
        image: version
            .as_ref()
            .map(|version| spec.image_of(version))
            .unwrap_or_default(),
        version: version.map_or_else(|_| spec.version.clone(), |version| version.to_string()),
        spec_hash: spec_hash(spec),
        replace_after: spec.replace_after(),
        keep_volumes: spec.keep_volumes(),
        recovery: RecoveryRule {
            automatic: spec.recovers_automatically(),
            after: spec.recover_after(),
            keep_volumes: spec.keep_recovered_volumes(),
        },
        paused: spec.paused,
        budget: spec.has_disruption_budget(),
        access: AccessRule {
            auth: spec.auth.as_ref().and_then(|auth| auth.enabled),
            secret: spec.auth.as_ref().map(|auth| auth.secret.clone()),
            network: spec.has_network_policy(),
        },
        invalid: (!problems.is_empty()).then(|| summary(&problems)),
        refused: (!dangerous.is_empty()).then(|| summary(&dangerous)),
        object: cluster.clone(),
        operators: operators.clone(),
    }
}

/// The PVC properties that the spec requests for members; `None` if members have no PVC.
fn claim(spec: &EtcdClusterSpec) -> Option<Claim> {
    let claim = spec.pod.as_ref()?.persistent_volume_claim_spec.as_ref()?;
    let requests = claim.resources.as_ref()?.requests.as_ref()?;
    let storage = requests.get("storage")?;
    Some(Claim {
        class: claim.storage_class_name.clone(),
        requested: bytes(storage),
        text: storage.0.clone(),
        capacity: None,
        resizing: None,
    })
}

#[cfg(test)]
mod tests {
    use api::EtcdCluster;

    use super::*;

    /// An older CustomResourceDefinition accepts `ETCD_FORCE_NEW_CLUSTER`, so the operator must reject the spec.
    #[test]
    fn spec_with_reserved_etcd_variable_is_invalid() {
        let spec = r#"{"pod":{"etcdEnv":[{"name":"ETCD_FORCE_NEW_CLUSTER","value":"true"}]}}"#;
        let cluster = EtcdCluster::new("db", serde_json::from_str(spec).unwrap());
        let invalid = desired(&Effective::as_written(cluster), &Operators::default())
            .invalid
            .unwrap();
        for words in [
            "spec.pod.etcdEnv",
            "ETCD_FORCE_NEW_CLUSTER",
            "remove the variable",
        ] {
            assert!(invalid.contains(words), "{invalid}");
        }
    }
}
