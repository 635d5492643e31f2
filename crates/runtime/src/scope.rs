//! Which objects an operator takes.

use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};

/// The annotation by which a cluster-wide operator and namespaced ones share a Kubernetes cluster (v1beta2).
pub const SCOPE_ANNOTATION: &str = api::names::ANNOTATION_SCOPE;
/// The annotation's value that hands an object to the cluster-wide operator.
pub const SCOPE_CLUSTER_WIDE: &str = api::names::SCOPE_CLUSTER_WIDE;

/// Which objects an operator takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those of one namespace that carry no scope annotation.
    Namespace(String),
    /// Those of all namespaces whose scope annotation says `clusterwide`.
    Cluster,
}

impl Scope {
    /// The API over everything the operator may see.
    pub fn api<K>(&self, client: Client) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        match self {
            Self::Namespace(namespace) => Api::namespaced(client, namespace),
            Self::Cluster => Api::all(client),
        }
    }

    /// Whether the object is this operator's, by v1beta2's rule.
    pub fn takes<K: Resource>(&self, object: &K) -> bool {
        let annotation = object
            .annotations()
            .get(SCOPE_ANNOTATION)
            .map(String::as_str);
        match self {
            Self::Namespace(_) => annotation.is_none(),
            Self::Cluster => annotation == Some(SCOPE_CLUSTER_WIDE),
        }
    }
}
