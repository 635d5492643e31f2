//! Why the proxies of a cluster could not be updated.

use std::time::Duration;

use runtime::apply;

/// Maximum time of one update of the proxies.
pub(crate) const DEADLINE: Duration = Duration::from_secs(10);

/// An update of the proxies that failed, possibly after some of its writes. A later reconcile repeats the update.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A Secret is missing, or the proxies cannot use its certificate.
    #[error("spec.grpcProxy: {0}")]
    Certificates(String),
    /// Another owner has an object with a name that the proxies need.
    #[error(
        "{kind} {name} belongs to another owner and is not changed: delete it, or, for a Service, set another name in \
         spec.grpcProxy.serviceName"
    )]
    Taken {
        /// The kind of the object.
        kind: String,
        /// The name of the object.
        name: String,
    },
    /// The API server rejected a read or could not be reached.
    #[error("cannot read {what}")]
    Read {
        /// The kind and the name of the object.
        what: String,
        /// The error of the Kubernetes client.
        #[source]
        source: Box<kube::Error>,
    },
    /// A write failed.
    #[error(transparent)]
    Write(#[from] apply::Error),
    /// The observation is too old for a write (invariant 11).
    #[error("the reads took longer than ten seconds, so the gRPC proxies were not changed")]
    Outdated,
    /// The whole update took too long.
    #[error("the API server did not answer within {} s", DEADLINE.as_secs())]
    TimedOut,
}

impl Error {
    /// The reason of the Event. It must not change between releases.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Certificates(_) => "GrpcProxyCertificateInvalid",
            Self::Taken { .. } => "GrpcProxyNameTaken",
            Self::Read { .. } | Self::Write(_) | Self::Outdated | Self::TimedOut => {
                "GrpcProxyFailed"
            }
        }
    }
}
