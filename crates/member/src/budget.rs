//! The PodDisruptionBudget of a cluster, which prevents evictions that would leave fewer voters than a quorum.

use api::names;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::Members;

/// The number of voters that a cluster of `voters` voters needs for a quorum.
pub fn quorum(voters: usize) -> usize {
    voters / 2 + 1
}

/// The PodDisruptionBudget that keeps `quorum` voters. It selects no learners, because they do not vote. It selects
/// voters with the role label `busy`, because they vote although the client Service does not select them.
pub fn disruption_budget(members: &Members<'_>, quorum: usize) -> PodDisruptionBudget {
    let by_role = LabelSelectorRequirement {
        key: names::LABEL_ROLE.to_owned(),
        operator: "In".to_owned(),
        values: Some(
            [names::ROLE_BUSY, names::ROLE_VOTER]
                .map(String::from)
                .into(),
        ),
    };
    let name = names::disruption_budget(members.cluster);
    PodDisruptionBudget {
        metadata: members.metadata(name, names::cluster_labels(members.cluster)),
        spec: Some(PodDisruptionBudgetSpec {
            // Invariant 3: Kubernetes evicts a pod only if `quorum` of the selected pods stay healthy.
            min_available: Some(IntOrString::Int(i32::try_from(quorum).unwrap_or(i32::MAX))),
            selector: Some(LabelSelector {
                match_labels: Some(names::cluster_labels(members.cluster)),
                match_expressions: Some(vec![by_role]),
            }),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    /// Invariant 3: the budget keeps a quorum for each cluster size.
    #[test]
    fn disruption_budget_keeps_quorum_of_voters() {
        for (voters, kept) in [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 4)] {
            let budget = disruption_budget(&Fixture::default().members(), quorum(voters));
            assert_eq!(
                budget.spec.unwrap().min_available,
                Some(IntOrString::Int(kept)),
                "{voters}"
            );
        }
    }

    #[test]
    fn disruption_budget_selects_only_voters_of_its_cluster() {
        let spec = disruption_budget(&Fixture::default().members(), quorum(3))
            .spec
            .unwrap();
        let selector = spec.selector.unwrap();
        let selected = selector.match_labels.unwrap();
        assert_eq!(selected["etcd_cluster"], "db");
        assert_eq!(selected["app"], "etcd");
        let roles = &selector.match_expressions.unwrap()[0];
        assert_eq!(roles.key, "etcd.database.coreos.com/role");
        let values = roles.values.clone().unwrap_or_default();
        assert_eq!(
            values,
            ["busy", "voter"],
            "a busy voter must count as a voter"
        );
    }
}
