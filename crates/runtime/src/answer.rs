//! What an answer of the API server means.

/// Whether the API server answered that there is no such object.
pub fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}
