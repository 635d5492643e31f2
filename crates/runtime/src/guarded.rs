//! Objects in the watch cache. An object that cannot be parsed does not end the watch. The cache omits data that no
//! operator uses.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use serde::{Deserialize, Deserializer};

/// A parsed object, or the error of its parser. `metadata.managedFields` is removed, because it takes several times the
/// memory of all other fields.
#[derive(Clone, Debug)]
pub struct Guarded<K>(pub Result<K, InvalidObject>);

impl<'de, K: Resource + Deserialize<'de>> Deserialize<'de> for Guarded<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut object = Self(DeserializeGuard::deserialize(deserializer)?.0);
        object.meta_mut().managed_fields = None;
        Ok(object)
    }
}

impl<K: Resource> Resource for Guarded<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(of: &K::DynamicType) -> Cow<'_, str> {
        K::kind(of)
    }

    fn group(of: &K::DynamicType) -> Cow<'_, str> {
        K::group(of)
    }

    fn version(of: &K::DynamicType) -> Cow<'_, str> {
        K::version(of)
    }

    fn plural(of: &K::DynamicType) -> Cow<'_, str> {
        K::plural(of)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0
            .as_ref()
            .map_or_else(|invalid| &invalid.metadata, K::meta)
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0
            .as_mut()
            .map_or_else(|invalid| &mut invalid.metadata, K::meta_mut)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use kube::ResourceExt;
    use serde_json::json;

    use super::*;

    #[test]
    fn cached_objects_have_no_managed_fields() {
        let object = |spec: serde_json::Value| {
            let managed = json!([{ "manager": "kubectl", "operation": "Apply", "fieldsV1": { "f:spec": {} } }]);
            let metadata =
                json!({ "name": "db", "resourceVersion": "7", "managedFields": managed });
            serde_json::from_value::<Guarded<Pod>>(json!({ "metadata": metadata, "spec": spec }))
                .unwrap()
        };
        let (readable, invalid) = (
            object(json!({ "containers": [] })),
            object(json!({ "containers": 3 })),
        );
        assert!(readable.0.is_ok() && invalid.0.is_err());
        for one in [readable, invalid] {
            assert_eq!(one.name_any(), "db");
            assert_eq!(one.resource_version().as_deref(), Some("7"));
            assert!(one.meta().managed_fields.is_none());
        }
    }
}
