//! Compares existing objects with the objects that the operator would build. The operator does not send an object that
//! is equal to the existing object.

use api::names;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{Resource, ResourceExt};
use member::{Members, contains};
use serde::Serialize;

use crate::ownership::is_of_others;
use crate::snapshot::{Kept, Shared};

/// Compares an existing object with the objects in `made`. Returns the state of the object in `made` that matches the
/// existing object and satisfies `is_same`.
fn compare<K: Resource + Serialize, T>(
    there: Option<&K>,
    (cluster, uid): (&str, &str),
    made: impl IntoIterator<Item = (T, K)>,
    is_same: impl Fn(&K, &K) -> bool,
) -> Kept<T> {
    let Some(there) = there else {
        return Kept::Missing;
    };
    if is_of_others(there.meta(), cluster, uid) {
        return Kept::Others;
    }
    let mut made = made.into_iter();
    let found = made.find(|(_, made)| is_same(there, made) && contains(there, made));
    found.map_or(Kept::Drifted, |(state, _)| Kept::AsMade(state))
}

/// The state of the objects that belong to the whole cluster: the two Services and the PodDisruptionBudget.
pub(crate) fn shared(
    members: &Members,
    services: &[Service],
    budget: Option<&PodDisruptionBudget>,
    uid: &str,
) -> Shared {
    let of = (members.cluster, uid);
    let named = |name: &str| services.iter().find(|service| service.name_any() == name);
    let headless = member::headless_service(members);
    let there = named(&headless.name_any());
    let headless = compare(there, of, [((), headless)], |_, _| true);
    let there = named(&names::client_service(members.cluster));
    // The selectors must be equal, because a Service with an additional label in its selector would select no pod.
    let selector = |service: &Service| service.spec.as_ref().and_then(|spec| spec.selector.clone());
    let is_same = |there: &Service, made: &Service| {
        selector(there) == selector(made) && member::has_same_policy(made, there)
    };
    let states = [true, false].map(|open| (open, client_service(members, open)));
    let client = compare(there, of, states, is_same);
    Shared {
        headless,
        client,
        budget: compare(budget, of, budget_made(members, budget), |_, _| true),
        budget_uid: budget.and_then(ResourceExt::uid),
    }
}

/// Builds the client Service. If `open` is false, the Service has no endpoints.
pub(crate) fn client_service(members: &Members, open: bool) -> Service {
    // `member::client_service` builds a Service with endpoints if `cluster_id` is set; the value does not matter.
    let cluster_id = open.then_some("");
    member::client_service(&Members {
        cluster_id,
        ..members.clone()
    })
}

/// Builds the PodDisruptionBudget with the `minAvailable` of the existing object.
fn budget_made(
    members: &Members,
    there: Option<&PodDisruptionBudget>,
) -> Option<(usize, PodDisruptionBudget)> {
    let min = there?.spec.as_ref()?.min_available.clone();
    let Some(IntOrString::Int(min)) = min else {
        return None;
    };
    let min = usize::try_from(min).unwrap_or_default();
    Some((min, member::disruption_budget(members, min)))
}

/// Compares the NetworkPolicy. The whole spec must be equal, because an additional peer would admit more clients.
pub(crate) fn network(
    members: &Members,
    there: Option<&NetworkPolicy>,
    made: NetworkPolicy,
    uid: &str,
) -> Kept<()> {
    let is_same = |there: &NetworkPolicy, made: &NetworkPolicy| there.spec == made.spec;
    compare(there, (members.cluster, uid), [((), made)], is_same)
}
