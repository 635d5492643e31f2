//! The planner's view of a cluster's TLS: whether it is used, and the problems of its certificates. Plain data without
//! key material.

use member::tls::Fault;

/// A cluster's TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// The source of the certificates as text; `None` without TLS.
    pub from: Option<String>,
    /// The problems of the certificates.
    pub faults: Vec<Fault>,
}

impl Tls {
    /// The problems that keep members from being started. `formed`: whether the cluster has formed.
    pub fn in_the_way(&self, formed: bool) -> impl Iterator<Item = &Fault> {
        // The operator's own certificate keeps no member from serving. But the operator must observe a cluster that
        // forms.
        let faults = self.faults.iter();
        faults.filter(move |fault| !formed || fault.concerns_members())
    }
}
