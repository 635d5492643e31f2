//! The TLS material and the credentials of the etcd client, which this module keeps only in memory.
//!
//! `Debug` prints only whether TLS material and credentials are set (invariant 14).

use std::fmt;

/// Access to the members of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The TLS material for `https` URLs. `None` if the cluster uses plain HTTP.
    pub tls: Option<TlsAccess>,
    /// `None` if the cluster has no authentication.
    pub credentials: Option<Credentials>,
}

/// TLS material in PEM format.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TlsAccess {
    /// The CA certificate with which the client verifies the members' certificates.
    pub ca: Vec<u8>,
    /// The certificate chain and the key of the client. `None` if the members require no client certificate.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// The etcd user that the client creates for its certificate when it enables authentication. The user's name is the
    /// common name of the certificate. `None` if the client must not create a user, because other certificates may have
    /// this common name.
    pub user: Option<String>,
}

impl fmt::Debug for TlsAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsAccess")
            .field("identity", &self.identity.is_some())
            .finish_non_exhaustive()
    }
}

/// A user of etcd's authentication.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The user's name.
    pub user: String,
    /// The user's password.
    pub password: String,
    /// Previous passwords, which etcd may still require while the password is being changed.
    pub former: Vec<String>,
}

impl Credentials {
    /// The passwords in the order of the login attempts: first the current password, then the previous ones.
    pub(crate) fn passwords(&self) -> impl Iterator<Item = &str> {
        let former = self.former.iter().filter(|one| **one != self.password);
        std::iter::once(&self.password)
            .chain(former)
            .map(String::as_str)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

/// Splits an endpoint `URL#HOST` into the client URL and the host name. The URL contains a pod IP address, so the
/// client verifies the member's certificate against the host name.
pub(crate) fn split(endpoint: &str) -> (&str, Option<&str>) {
    match endpoint.split_once('#') {
        Some((url, name)) => (url, Some(name)),
        None => (endpoint, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invariant_14_debug_output_contains_no_secret() {
        let access = Access {
            tls: Some(TlsAccess {
                ca: b"CA-PEM".to_vec(),
                identity: Some((b"CERT-PEM".to_vec(), b"KEY-PEM".to_vec())),
                user: None,
            }),
            credentials: Some(Credentials {
                user: "root".into(),
                password: "hunter2".into(),
                former: vec!["hunter1".into()],
            }),
        };
        let shown = format!("{access:?}");
        for secret in ["hunter", "PEM", "67, 65", "75, 69"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}
