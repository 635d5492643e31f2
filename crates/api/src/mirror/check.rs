//! Validates an `EtcdMirror`. Performs no I/O.

use super::EtcdMirror;
use crate::problem::Problem;

/// The problems of the object. The schema rejects such objects, but an object may be older than the schema.
pub fn validate(mirror: &EtcdMirror) -> Vec<Problem> {
    let (source, destination) = (&mirror.spec.source, &mirror.spec.destination);
    let mut problems = Vec::new();
    match (source.etcd_endpoints.is_empty(), &source.etcd_cluster) {
        (true, None) => problems.push(Problem::new(
            "spec.source.etcdEndpoints",
            "is empty",
            "set at least one client URL such as http://example-client:2379, or set spec.source.etcdCluster.name",
        )),
        (false, Some(_)) => problems.push(Problem::new(
            "spec.source.etcdCluster",
            "is set together with spec.source.etcdEndpoints",
            "remove one of the two fields",
        )),
        _ => {}
    }
    if source.etcd_endpoints.iter().any(String::is_empty) {
        problems.push(Problem::new(
            "spec.source.etcdEndpoints",
            "contains an empty string",
            "use URLs such as http://example-client:2379",
        ));
    }
    let own = source.etcd_cluster.as_ref().map(|cluster| &cluster.name);
    if own == Some(&destination.etcd_cluster.name) {
        problems.push(Problem::new(
            "spec.destination.etcdCluster.name",
            "is the source too",
            "name another EtcdCluster, because a mirror cannot copy a cluster to itself",
        ));
    }
    if mirror
        .spec
        .destination_prefix()
        .starts_with(crate::names::MIRROR_RECORDS)
    {
        problems.push(Problem::new(
            "spec.destination.prefix",
            format!(
                "begins with {}, which contains the records of mirrors",
                crate::names::MIRROR_RECORDS
            ),
            "choose another prefix",
        ));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::fields;

    fn mirror(spec: &str) -> EtcdMirror {
        EtcdMirror::new("copy", serde_json::from_str(spec).unwrap())
    }

    #[test]
    fn each_invalid_field_of_stored_etcdmirror_is_reported() {
        for (spec, expected) in [
            (
                r#"{"source":{"etcdEndpoints":["http://a:2379"]},"destination":{"etcdCluster":{"name":"b"}}}"#,
                &[][..],
            ),
            (
                r#"{"source":{"etcdEndpoints":null},"destination":{"etcdCluster":{"name":"b"}}}"#,
                &["spec.source.etcdEndpoints"],
            ),
            (
                r#"{"source":{"etcdEndpoints":[""],"etcdCluster":{"name":"a"}},"destination":{"etcdCluster":{"name":"b"}}}"#,
                &["spec.source.etcdCluster", "spec.source.etcdEndpoints"],
            ),
            (
                r#"{"source":{"etcdCluster":{"name":"b"}},"destination":{"etcdCluster":{"name":"b"}}}"#,
                &["spec.destination.etcdCluster.name"],
            ),
            (
                r#"{"source":{"etcdCluster":{"name":"a"},"prefix":"etcd.database.coreos.com/mirror/x"},
                    "destination":{"etcdCluster":{"name":"b"}}}"#,
                &["spec.destination.prefix"],
            ),
        ] {
            assert_eq!(fields(&validate(&mirror(spec))), expected, "{spec}");
        }
    }

    #[test]
    fn destination_prefix_defaults_to_source_prefix() {
        for (spec, expected) in [
            (
                r#"{"source":{},"destination":{"etcdCluster":{"name":"b"}}}"#,
                ("", ""),
            ),
            (
                r#"{"source":{"prefix":"/a/"},"destination":{"etcdCluster":{"name":"b"}}}"#,
                ("/a/", "/a/"),
            ),
            (
                r#"{"source":{"prefix":"/a/"},"destination":{"etcdCluster":{"name":"b"},"prefix":""}}"#,
                ("/a/", ""),
            ),
        ] {
            let spec = mirror(spec).spec;
            let found = (spec.source_prefix(), spec.destination_prefix());
            assert_eq!(found, expected);
        }
    }
}
