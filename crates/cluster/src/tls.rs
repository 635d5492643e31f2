//! What the planner sees of a cluster's TLS: whether it is used, and what is wrong with it. Plain data without any of
//! the material.

use member::tls::Fault;

/// A cluster's TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// What it takes its certificates from, in words; `None` without TLS.
    pub from: Option<String>,
    /// What is wrong with them.
    pub faults: Vec<Fault>,
}

impl Tls {
    /// What keeps members from being started, for a cluster that has formed or has not.
    pub fn in_the_way(&self, formed: bool) -> impl Iterator<Item = &Fault> {
        // The operator's own certificate keeps no member from serving; but a cluster that forms has to be seen.
        let faults = self.faults.iter();
        faults.filter(move |fault| !formed || fault.concerns_members())
    }
}
