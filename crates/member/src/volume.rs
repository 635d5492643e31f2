//! The PersistentVolumeClaim (PVC) of a member. It has the name of the member.

use api::names;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::Members;

/// The PVC of a member. `None` if the cluster stores its data in the pod (`emptyDir`).
pub fn volume_claim(members: &Members<'_>, member: &str) -> Option<PersistentVolumeClaim> {
    let mut spec = members
        .spec
        .pod
        .as_ref()?
        .persistent_volume_claim_spec
        .clone()?;
    // The API server requires an access mode. `ReadWriteOnce` suffices, because only one pod uses the volume.
    spec.access_modes
        .get_or_insert_with(|| vec!["ReadWriteOnce".to_owned()]);
    let mut metadata = members.metadata(
        member.to_owned(),
        names::member_labels(members.cluster, member),
    );
    metadata.annotations = Some(members.identity_annotations());
    Some(PersistentVolumeClaim {
        metadata,
        spec: Some(spec),
        status: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    #[test]
    fn member_without_pvc_spec_gets_no_pvc() {
        assert_eq!(volume_claim(&Fixture::default().members(), "db-a"), None);
    }

    #[test]
    fn pvc_has_annotations_of_cluster_and_requested_storage_class() {
        let fixture = Fixture::durable();
        let claim = volume_claim(&fixture.members(), "db-aaaaaaaaaa").unwrap();
        assert_eq!(claim.metadata.name.as_deref(), Some("db-aaaaaaaaaa"));
        let annotations = claim.metadata.annotations.unwrap();
        assert_eq!(
            annotations["etcd.database.coreos.com/cluster-token"],
            "token"
        );
        assert_eq!(annotations["etcd.database.coreos.com/cluster-id"], "abc");
        assert_eq!(claim.metadata.labels.unwrap()["etcd_node"], "db-aaaaaaaaaa");
        let spec = claim.spec.unwrap();
        assert_eq!(spec.storage_class_name.as_deref(), Some("fast"));
        assert_eq!(spec.access_modes, Some(vec!["ReadWriteOnce".to_owned()]));
    }
}
