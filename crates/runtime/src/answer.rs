//! Classifies responses of the API server.

/// Whether the API server reports that the object does not exist (404).
pub fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}
