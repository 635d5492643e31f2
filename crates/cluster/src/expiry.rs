//! The expiry of a cluster's certificates, and the time at which the operator reports it.
//!
//! The operator reports an expiry in three stages: 30 days, 7 days and 1 day in advance. For a short-lived certificate,
//! each stage begins later, at a fraction of the validity, so that the certificate is not reported all the time.
//! Generated certificates are reported only if their renewal is overdue.

use std::collections::BTreeMap;
use std::time::Duration;

use api::cluster::CertificatesStatus;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use member::certificate::{Certificate, certificates};
use member::tls::{ClusterTls, Purpose};

use crate::authority::{Held, TLS_CERTIFICATE, renewal};
use crate::clock::age;

/// The validity of a certificate that the cluster or the operator uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expiry {
    /// Name of the certificate's Secret.
    pub secret: String,
    /// The key of the certificate in the Secret.
    pub key: &'static str,
    /// Start of the validity.
    pub not_before: Timestamp,
    /// End of the validity.
    pub not_after: Timestamp,
    /// True if the operator renews the certificate.
    pub generated: bool,
}

const DAY: Duration = Duration::from_hours(24);

/// The stages of the report: name, time and divisor. A stage begins when the remaining validity is shorter than the
/// time, and also shorter than the whole validity divided by the divisor.
const STAGES: [(&str, Duration, u32); 3] = [
    ("1d", DAY, 16),
    ("7d", Duration::from_hours(7 * 24), 8),
    ("30d", Duration::from_hours(30 * 24), 4),
];

impl Expiry {
    /// The name of the stage. `None` if enough time remains, or if the operator will renew the certificate in time.
    pub fn stage(&self, now: Timestamp) -> Option<&'static str> {
        let life = age(self.not_before, self.not_after);
        if now >= self.not_after {
            return Some("Expired");
        }
        if self.generated && age(renewal(self.not_before, self.not_after), now) < life / 12 {
            return None;
        }
        let left = age(now, self.not_after);
        let is = |(_, most, part): &&(&str, Duration, u32)| left < (*most).min(life / *part);
        STAGES.iter().find(is).map(|(word, ..)| *word)
    }
}

/// The expiries of certificates in Secrets of other owners, and of the CAs that signed these certificates. A CA is not
/// reported if the trust bundle contains a CA of the same name that expires later.
pub fn of_secrets(tls: &ClusterTls) -> Vec<Expiry> {
    let slots = [
        (Purpose::Peer, &tls.peer),
        (Purpose::Server, &tls.server),
        (Purpose::Operator, &tls.operator),
    ];
    let read: Vec<_> = slots
        .into_iter()
        .filter_map(|(purpose, slot)| {
            let slot = slot.as_ref()?;
            let material = slot.found.as_ref().ok()?;
            let own = certificates(&material.certificate).ok()?;
            let trusted = certificates(&material.ca).unwrap_or_default();
            Some((&slot.secret, purpose.keys(material.names), own, trusted))
        })
        .collect();
    let signed = |authority: &Certificate| {
        let mut all = read.iter().flat_map(|(.., own, _)| own);
        all.any(|one| one.issuer == authority.subject)
    };
    let expiry = |secret: &str, key: &'static str, one: &Certificate| Expiry {
        secret: secret.to_owned(),
        key,
        not_before: one.not_before,
        not_after: one.not_after,
        generated: false,
    };
    let mut all = Vec::new();
    for (secret, keys, own, trusted) in &read {
        let first = own.iter().min_by_key(|one| one.not_after);
        all.extend(first.map(|one| expiry(secret, keys.certificate, one)));
        let mut newest: BTreeMap<&[u8], &Certificate> = BTreeMap::new();
        for one in trusted.iter().filter(|one| signed(one)) {
            let held = newest.entry(one.subject.as_slice()).or_insert(one);
            if held.not_after < one.not_after {
                *held = one;
            }
        }
        let authorities = newest.into_values();
        all.extend(authorities.map(|one| expiry(secret, keys.ca, one)));
    }
    all
}

/// The expiries of certificates that the operator issues.
pub(crate) fn of_held<'a>(secrets: impl Iterator<Item = (&'a String, &'a Held)>) -> Vec<Expiry> {
    let expiry = |(secret, held): (&String, &Held)| {
        let leaf = held.certificate.as_ref()?;
        Some(Expiry {
            secret: secret.clone(),
            key: TLS_CERTIFICATE,
            not_before: leaf.not_before,
            not_after: leaf.not_after,
            generated: true,
        })
    };
    secrets.filter_map(expiry).collect()
}

/// The certificate that the status shows: the first to expire of the certificates that have reached a stage or, if none
/// has, of all certificates.
pub fn report(all: &[Expiry], now: Timestamp) -> Option<CertificatesStatus> {
    let first = all.iter().min_by_key(|one| one.not_after)?;
    let worst = all.iter().filter(|one| one.stage(now).is_some());
    let worst = worst.min_by_key(|one| one.not_after);
    let said = worst.unwrap_or(first);
    Some(CertificatesStatus {
        secret: said.secret.clone(),
        key: Some(said.key.to_owned()),
        not_after: Time(said.not_after),
        expires_within: worst.and_then(|one| one.stage(now)).map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expiry(days: i64, generated: bool) -> Expiry {
        let start = Timestamp::UNIX_EPOCH;
        let end = Timestamp::from_second(days * 86400).unwrap();
        Expiry {
            secret: "server".into(),
            key: "server.crt",
            not_before: start,
            not_after: end,
            generated,
        }
    }

    fn at(days: f64) -> Timestamp {
        #[allow(clippy::cast_possible_truncation)]
        Timestamp::from_second((days * 86400.0) as i64).unwrap()
    }

    #[test]
    fn certificate_expiry_is_reported_30_7_and_1_days_in_advance() {
        let year = expiry(365, false);
        for (day, stage) in [
            (300.0, None),
            (336.0, Some("30d")),
            (359.0, Some("7d")),
            (364.5, Some("1d")),
            (366.0, Some("Expired")),
        ] {
            assert_eq!(year.stage(at(day)), stage, "{day}");
        }
    }

    #[test]
    fn expiry_of_one_day_certificate_is_reported_only_near_its_end() {
        let day = expiry(1, false);
        assert_eq!(day.stage(at(0.5)), None);
        assert_eq!(day.stage(at(0.8)), Some("30d"));
        assert_eq!(day.stage(at(0.97)), Some("1d"));
    }

    #[test]
    fn generated_certificate_expiry_is_reported_if_renewal_is_overdue() {
        let own = expiry(90, true);
        assert_eq!(own.stage(at(61.0)), None);
        assert_eq!(own.stage(at(70.0)), Some("30d"));
        let all = [own, expiry(365, false)];
        let report = report(&all, at(61.0)).unwrap();
        assert_eq!(
            (report.expires_within, report.not_after.0),
            (None, at(90.0))
        );
    }
}
