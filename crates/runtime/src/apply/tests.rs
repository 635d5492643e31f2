//! Tests of the writes to the API server.

use super::*;

#[test]
fn field_missing_in_crd_is_reported_with_remedy() {
    fn rejected_for<K: Resource<DynamicType = ()>>(message: &str) -> Error {
        let status = Status::failure(message, "").with_code(500).boxed();
        failed::<K>("apply", "x", kube::Error::Api(status))
    }
    let rejected = rejected_for::<api::EtcdRestore>;
    let rejection = "failed to create typed patch object (prod/x; g/v1, Kind=Pod): .status.backup: field not \
                     declared in schema";
    let error = rejected(rejection);
    assert_eq!(error.reason(), DEFINITION_OUTDATED);
    let text = error.to_string();
    assert!(text.contains("docs/install.md"), "{text}");
    assert!(
        text.ends_with(": .status.backup: field not declared in schema"),
        "{text}"
    );
    assert_eq!(
        rejected("etcdserver: request timed out").reason(),
        "ApiServerError"
    );
    // Service and PodDisruptionBudget are not kinds of this project, so the same rejection does not mean that a CRD of
    // this project is outdated.
    let error = rejected_for::<k8s_openapi::api::core::v1::Service>(rejection);
    assert_eq!(error.reason(), "ApiServerError");
    let error = rejected_for::<k8s_openapi::api::policy::v1::PodDisruptionBudget>(rejection);
    assert_eq!(error.reason(), "ApiServerError");
}
