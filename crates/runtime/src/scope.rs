//! The scope of an operator: the objects that it manages.

use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};

/// Annotation that assigns an object to the cluster-wide operator or to a namespaced one (v1beta2).
pub const SCOPE_ANNOTATION: &str = api::names::ANNOTATION_SCOPE;
/// Value of the annotation that assigns an object to the cluster-wide operator.
pub const SCOPE_CLUSTER_WIDE: &str = api::names::SCOPE_CLUSTER_WIDE;

/// The objects that an operator manages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Objects of one namespace without the scope annotation.
    Namespace(String),
    /// Objects of all namespaces with the scope annotation `clusterwide`.
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

    /// True if the object belongs to this operator by the rule of v1beta2.
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
