//! The names of objects of a restore. They depend only on the EtcdRestore, so every operator process uses the same
//! names.

use api::EtcdRestore;
use api::names;
use api::restore::SeedStatus;
use member::seed_name;

/// The UID of the EtcdRestore, which is also the value of its restore lock.
pub fn uid(restore: &EtcdRestore) -> &str {
    restore.metadata.uid.as_deref().unwrap_or_default()
}

/// The name of the target EtcdCluster: the name in the spec, or the recorded name after the start of the restore.
pub fn target(restore: &EtcdRestore) -> &str {
    let seed = restore
        .status
        .as_ref()
        .and_then(|status| status.seed.as_ref());
    let recorded = seed.and_then(|seed| names::cluster_of_member(&seed.member));
    recorded.unwrap_or(&restore.spec.etcd_cluster.name)
}

/// The name of the seed member and the token of the new cluster. They contain the UID of the EtcdRestore, so they are
/// unique.
pub fn seed(restore: &EtcdRestore) -> SeedStatus {
    SeedStatus {
        member: seed_name(target(restore), uid(restore)),
        token: format!("restore-{}", uid(restore)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn restore(uid: &str) -> EtcdRestore {
        let spec =
            r#"{"etcdCluster":{"name":"main"},"backupStorageType":"S3","s3":{"path":"b/k"}}"#;
        let mut restore = EtcdRestore::new("again", serde_json::from_str(spec).unwrap());
        restore.metadata.uid = Some(uid.into());
        restore
    }

    /// Invariant 11: every operator process computes the same names.
    #[test]
    fn seed_name_and_token_are_unique_per_restore() {
        assert_eq!(seed(&restore("a")), seed(&restore("a")));
        assert_ne!(seed(&restore("a")).member, seed(&restore("b")).member);
        assert_ne!(seed(&restore("a")).token, seed(&restore("b")).token);
    }

    /// Invariant 10: after the start, a change of the cluster name in the spec has no effect.
    #[test]
    fn started_restore_ignores_changed_cluster_name() {
        let mut restore = restore("a");
        let begun = seed(&restore);
        restore.status.get_or_insert_default().seed = Some(begun.clone());
        restore.spec.etcd_cluster.name = "another".into();
        assert_eq!(target(&restore), "main");
        assert_eq!(seed(&restore), begun);
    }

    #[test]
    fn seed_name_has_format_of_member_names() {
        assert_eq!(
            names::cluster_of_member(&seed(&restore("a")).member),
            Some("main")
        );
    }
}
