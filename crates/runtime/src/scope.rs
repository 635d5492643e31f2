//! The scope of an operator: which objects it manages.

use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};

/// Annotation that assigns an object to the cluster-wide operator. Without it, a namespaced operator manages the object
/// (v1beta2).
pub const SCOPE_ANNOTATION: &str = api::names::ANNOTATION_SCOPE;
/// Value of the annotation that assigns an object to the cluster-wide operator.
pub const SCOPE_CLUSTER_WIDE: &str = api::names::SCOPE_CLUSTER_WIDE;

/// Which objects an operator manages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The objects in one namespace that do not have the scope annotation.
    Namespace(String),
    /// The objects in all namespaces whose scope annotation is `clusterwide`.
    Cluster,
}

impl Scope {
    /// The API for all objects that the operator may read.
    pub fn api<K>(&self, client: Client) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        match self {
            Self::Namespace(namespace) => Api::namespaced(client, namespace),
            Self::Cluster => Api::all(client),
        }
    }

    /// Whether this operator manages the object, by the rules of v1beta2.
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
