//! Notifies pods of new certificates. Also restores the annotations that record the certificate authorities (CAs) with
//! which pods were started.

use crate::authority::made_at;
use crate::plan::{Draft, actions};

use super::Keeper;

impl Keeper<'_> {
    pub(super) fn is_notified(&self, member: &str) -> bool {
        let told = self
            .certificates
            .pods
            .get(member)
            .and_then(|noted| noted.certificates.as_ref());
        let told = told.is_some() && told == self.certificates.notification(member).as_ref();
        // `silent` is true if the pod has the annotation with the trust digest, but no annotation with the CAs.
        let noted = self.certificates.pods.get(member);
        let silent =
            noted.is_some_and(|noted| noted.trust.is_some() && noted.authorities.is_none());
        if noted.is_some_and(|noted| noted.trust.is_none()) && self.is_up_to_date(member) {
            return false;
        }
        told && !(silent && self.certificates.started_with(member).is_some())
    }

    /// True if the annotations of a pod show that it was started with the current CAs.
    fn is_up_to_date(&self, member: &str) -> bool {
        let noted = self.certificates.pods.get(member);
        let noted = noted.and_then(|noted| noted.authorities.as_ref());
        noted.is_some() && noted == self.certificates.authorities_now().as_ref()
    }

    pub(super) fn notify(&self, draft: &mut Draft) {
        let pods = self.observed.pods.iter().filter(|(_, pod)| pod.stays());
        for (member, pod) in pods.filter(|(member, _)| !self.is_notified(member)) {
            let Some(certificates) = self.certificates.notification(member) else {
                continue;
            };
            let noted = self.certificates.pods.get(member);
            let unknown = noted.is_some_and(|noted| noted.trust.is_none());
            // The pod was started with the CAs in its certificate Secrets if the certificates are older than the pod (a
            // restore creates them first). A pod that does not run yet starts with these CAs.
            let after = self.is_up_to_date(member)
                || self.rule.uses_of_member().all(|used| {
                    let held = self.certificates.leaf(member, used);
                    let leaf = held.and_then(|held| held.certificate.as_ref());
                    leaf.is_some_and(|leaf| made_at(leaf) < pod.created || !pod.running)
                });
            let trust = self.certificates.trust().filter(|_| unknown && after);
            let started = match &trust {
                Some(_) => self.certificates.authorities_now(),
                None => self.certificates.started_with(member),
            };
            let noted = noted.and_then(|noted| noted.authorities.as_ref());
            let authorities = started.filter(|_| noted.is_none());
            draft.add(actions::notify_pod(
                (member, &pod.uid),
                (trust.as_ref(), authorities.as_ref()),
                &certificates,
            ));
        }
    }
}
