//! The planner's view of a cluster's TLS: whether the cluster uses TLS, and the problems of its certificates. Plain
//! data without keys.

use member::tls::Fault;

/// The TLS state of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// A text that names the source of the certificates; `None` without TLS.
    pub from: Option<String>,
    /// The problems of the certificates.
    pub faults: Vec<Fault>,
}

impl Tls {
    /// The problems that prevent the start of members. `formed`: true if the cluster has formed.
    pub fn in_the_way(&self, formed: bool) -> impl Iterator<Item = &Fault> {
        // Members of a formed cluster can start despite a problem of the operator's own certificate. Until the cluster
        // has formed, the operator needs this certificate to observe the members.
        let faults = self.faults.iter();
        faults.filter(move |fault| !formed || fault.concerns_members())
    }
}
