//! The disruption budget: a drain never takes the voters below their quorum.

use api::names;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::Members;

/// How many of `voters` make a quorum.
pub fn quorum(voters: usize) -> usize {
    voters / 2 + 1
}

/// The budget for a cluster of `voters` voters. Learners are not counted: losing one costs no quorum.
pub fn disruption_budget(members: &Members<'_>, voters: usize) -> PodDisruptionBudget {
    let mut selected = names::cluster_labels(members.cluster);
    selected.insert(names::LABEL_ROLE.to_owned(), names::ROLE_VOTER.to_owned());
    let name = names::disruption_budget(members.cluster);
    PodDisruptionBudget {
        metadata: members.metadata(name, names::cluster_labels(members.cluster)),
        spec: Some(PodDisruptionBudgetSpec {
            // Invariant 3, towards evictions.
            min_available: Some(IntOrString::Int(
                i32::try_from(quorum(voters)).unwrap_or(i32::MAX),
            )),
            selector: Some(LabelSelector {
                match_labels: Some(selected),
                ..LabelSelector::default()
            }),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Fixture;
    use super::*;

    /// Invariant 3.
    #[test]
    fn the_budget_keeps_a_quorum_of_voters() {
        for (voters, kept) in [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 4)] {
            let budget = disruption_budget(&Fixture::default().members(), voters);
            assert_eq!(
                budget.spec.unwrap().min_available,
                Some(IntOrString::Int(kept)),
                "{voters}"
            );
        }
    }

    #[test]
    fn the_budget_counts_voters_of_its_own_cluster_only() {
        let spec = disruption_budget(&Fixture::default().members(), 3)
            .spec
            .unwrap();
        let selected = spec.selector.unwrap().match_labels.unwrap();
        assert_eq!(selected["etcd.database.coreos.com/role"], "voter");
        assert_eq!(selected["etcd_cluster"], "db");
        assert_eq!(selected["app"], "etcd");
    }
}
