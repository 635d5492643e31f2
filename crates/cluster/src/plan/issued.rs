//! Certificates that cert-manager issues: writes the Certificates, and publishes the issued certificates in the Secrets
//! that members and clients mount. `member::issued` decides the steps of a change of the CA (invariant 20).

use std::time::Duration;

use member::issued::{IssuedWrite, Pair, Written};
use member::tls::{Authorities, FaultKind};

use crate::plan::Draft;
use crate::plan::actions::{self, Builder};
use crate::reason::Reason;
use crate::switch::{Maker, TlsMode};

/// Requeue delay while cert-manager issues a certificate. The operator does not watch Certificates.
const ISSUING: Duration = Duration::from_secs(3);

/// Writes and deletes Certificates, publishes the issued certificates, and reports problems.
pub(super) fn keep(build: Builder<'_>) -> Draft<'_> {
    let mut draft = publish(build);
    let Some(issuance) = &build.observed.certificates.issued else {
        return draft;
    };
    for pair in &issuance.pairs {
        report(pair, &mut draft);
        let denied = matches!(pair.problem, Some((FaultKind::CertManagerMissing, _)));
        if matches!(pair.written, Written::Missing | Written::Drifted) && !denied {
            draft.add(build.apply_certificate(&issuance.tls, &pair.of));
        }
    }
    if issuance.pairs.iter().any(|pair| pair.target.is_none()) {
        let text = "the operator publishes certificates when cert-manager has issued them";
        draft.wait(Reason::TLSNotReady, text, ISSUING);
    }
    for (name, uid) in &issuance.discarded {
        let (name, uid) = (name.clone(), uid.clone());
        draft.add(actions::issued(IssuedWrite::Discard { name, uid }));
    }
    draft
}

/// Publishes the certificates that cert-manager has issued, so that they do not expire while the spec is invalid.
pub(super) fn publish(build: Builder<'_>) -> Draft<'_> {
    let mut draft = Draft::new(build);
    let certificates = &build.observed.certificates;
    let Some(issuance) = &certificates.issued else {
        return draft;
    };
    let mut started: Vec<Option<&Authorities>> = Vec::new();
    if let Some(rollout) = &build.observed.tls_rollout {
        let at = TlsMode::of(rollout.at.as_ref());
        let mut modes = rollout.modes.values().chain([&at]);
        // During a change from or to cert-manager, `started` also contains the CAs of members with static certificates.
        if modes.any(|mode| mode.maker == Some(Maker::CertManager)) {
            let members = rollout.modes.iter();
            let users = members
                .filter(|(_, mode)| matches!(mode.maker, Some(Maker::CertManager | Maker::Others)));
            let noted = users.map(|(member, _)| certificates.pods.get(member));
            started.extend(noted.map(|noted| noted?.authorities.as_ref()));
        }
    }
    for action in build.publish(issuance, &started) {
        draft.add(action);
    }
    draft
}

/// Reports the problem of a certificate. Exceptions for members and operators: other phases report an unpublished
/// certificate as a fault of its Secret, and `CertificateNotIssued` is no problem while an earlier certificate is
/// published.
fn report(pair: &Pair, draft: &mut Draft) {
    let Some((code, text)) = &pair.problem else {
        return;
    };
    if pair.of.is_of_clients() || pair.target.is_some() && *code != FaultKind::CertificateNotIssued
    {
        draft.problem((*code).into(), text.clone());
    }
}
