//! The scope of an operator: the objects that it manages.

use std::collections::BTreeSet;

use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};

/// Annotation that assigns an object to the cluster-wide operator. An object without the annotation belongs to a
/// namespaced operator, as in coreos/etcd-operator.
pub const SCOPE_ANNOTATION: &str = api::names::ANNOTATION_SCOPE;
/// Value of the annotation that assigns an object to the cluster-wide operator.
pub const SCOPE_CLUSTER_WIDE: &str = api::names::SCOPE_CLUSTER_WIDE;

/// The objects that an operator manages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The objects without the scope annotation in these namespaces.
    Namespaces(BTreeSet<String>),
    /// The objects with the scope annotation `clusterwide`, in all namespaces.
    Annotated,
    /// All objects in all namespaces, with and without the scope annotation.
    All,
}

impl Scope {
    /// The scope of an operator for one namespace.
    pub fn namespace(name: &str) -> Self {
        Self::Namespaces(BTreeSet::from([name.to_owned()]))
    }

    /// The namespaces that the operator may read. `None` means all namespaces.
    pub fn namespaces(&self) -> Option<&BTreeSet<String>> {
        match self {
            Self::Namespaces(names) => Some(names),
            Self::Annotated | Self::All => None,
        }
    }

    /// The APIs for all objects that the operator may read: one API for each listed namespace, because the operator may
    /// have no rights in other namespaces.
    pub fn apis<K>(&self, client: &Client) -> Vec<Api<K>>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        let Some(namespaces) = self.namespaces() else {
            return vec![Api::all(client.clone())];
        };
        let one = |name: &String| Api::namespaced(client.clone(), name);
        namespaces.iter().map(one).collect()
    }

    /// Whether the operator manages objects in more than one namespace.
    pub fn is_shared(&self) -> bool {
        self.namespaces().is_none_or(|names| names.len() > 1)
    }

    /// Whether the operator manages the object, by the scope annotation of the object.
    pub fn takes<K: Resource>(&self, object: &K) -> bool {
        let annotation = object.annotations().get(SCOPE_ANNOTATION);
        match self {
            Self::Namespaces(_) => annotation.is_none(),
            Self::Annotated => annotation.is_some_and(|scope| scope == SCOPE_CLUSTER_WIDE),
            Self::All => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    fn takes(scope: &Scope, annotation: Option<&str>) -> bool {
        let mut object = ConfigMap::default();
        if let Some(annotation) = annotation {
            let annotations = object.annotations_mut();
            annotations.insert(SCOPE_ANNOTATION.into(), annotation.into());
        }
        scope.takes(&object)
    }

    #[test]
    fn scope_annotation_selects_managed_objects() {
        let list = Scope::Namespaces(["a", "b"].map(str::to_owned).into());
        // Each row has a scope and three results: for an object without the annotation, with the value `clusterwide`,
        // and with another value.
        for (scope, expected) in [
            (Scope::namespace("a"), [true, false, false]),
            (list, [true, false, false]),
            (Scope::Annotated, [false, true, false]),
            (Scope::All, [true, true, true]),
        ] {
            let found = [None, Some("clusterwide"), Some("other")];
            let found = found.map(|annotation| takes(&scope, annotation));
            assert_eq!(found, expected, "{scope:?}");
        }
    }

    #[tokio::test]
    async fn each_listed_namespace_is_watched_separately() {
        let config = kube::Config::new("http://localhost".parse().unwrap());
        let client = Client::try_from(config).unwrap();
        let urls = |scope: &Scope| -> Vec<String> {
            let apis = scope.apis::<ConfigMap>(&client);
            apis.iter()
                .map(|api| api.resource_url().to_owned())
                .collect()
        };
        let list = Scope::Namespaces(["b", "a"].map(str::to_owned).into());
        let below = |name: &str| format!("/api/v1/namespaces/{name}/configmaps");
        assert_eq!(urls(&list), [below("a"), below("b")]);
        assert_eq!(urls(&Scope::namespace("a")), [below("a")]);
        assert_eq!(urls(&Scope::Annotated), ["/api/v1/configmaps"]);
        assert_eq!(urls(&Scope::All), ["/api/v1/configmaps"]);
    }

    #[test]
    fn scope_is_shared_if_it_covers_several_namespaces() {
        assert!(!Scope::namespace("a").is_shared());
        assert!(Scope::Namespaces(["a", "b"].map(str::to_owned).into()).is_shared());
        assert!(Scope::Annotated.is_shared() && Scope::All.is_shared());
    }
}
