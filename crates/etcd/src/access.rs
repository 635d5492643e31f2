//! Access to a cluster: TLS material and credentials, in memory only.
//!
//! `Debug` prints which kinds of access are set, never their content (invariant 14).

use std::fmt;

/// Access to the members of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// For `https` URLs; `None` if the cluster uses plain HTTP.
    pub tls: Option<TlsAccess>,
    /// For clusters with authentication enabled.
    pub credentials: Option<Credentials>,
}

/// PEM bytes, as in a Secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TlsAccess {
    /// The CA certificate that signed the members' certificates.
    pub ca: Vec<u8>,
    /// The client's certificate chain and key, if the members require a client certificate.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// The etcd user that is the common name of the certificate, if no other certificate has this name. The
    /// client creates this user when it enables authentication.
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
    /// Previous passwords that may still be valid during a password change.
    pub former: Vec<String>,
}

impl Credentials {
    /// The passwords to try, the current password first.
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

/// Splits an endpoint into the client URL and the host name after `#`. The certificate is verified against
/// this name if it differs from the host of the URL: members are dialed at pod IP addresses, but certificates
/// contain host names. Verification is never skipped.
pub(crate) fn split(endpoint: &str) -> (&str, Option<&str>) {
    match endpoint.split_once('#') {
        Some((url, name)) => (url, Some(name)),
        None => (endpoint, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Invariant 14.
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
