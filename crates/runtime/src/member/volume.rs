//! The volume claim of a durable member: named like the member, kept for its life.

use api::names;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::Members;

/// The member's claim, or `None` when the cluster keeps its data in the pod (`emptyDir`).
pub fn volume_claim(members: &Members<'_>, member: &str) -> Option<PersistentVolumeClaim> {
    let mut spec = members
        .spec
        .pod
        .as_ref()?
        .persistent_volume_claim_spec
        .clone()?;
    // The API server demands one, and a member's disk has one user.
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
    use super::super::fixture::Fixture;
    use super::*;

    #[test]
    fn a_cluster_without_a_claim_spec_has_no_claims() {
        assert_eq!(volume_claim(&Fixture::default().members(), "db-a"), None);
    }

    #[test]
    fn a_claim_says_which_cluster_its_data_belongs_to() {
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
