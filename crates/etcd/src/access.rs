//! How a cluster lets its clients in: TLS material and credentials, in memory only.
//!
//! Nothing here is printed: `Debug` shows what kind of access it is, never its content (invariant 14).

use std::fmt;

/// How to reach a cluster's members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// For `https` URLs; `None` where the cluster speaks plain HTTP.
    pub tls: Option<TlsAccess>,
    /// For clusters with authentication enabled.
    pub credentials: Option<Credentials>,
}

/// PEM bytes as they stand in a Secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TlsAccess {
    /// The authority that signed the members' certificates.
    pub ca: Vec<u8>,
    /// The client's certificate chain and key, where the members ask for one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// The user of etcd's authentication that the certificate names, where nobody else has one of that name: it is made
    /// when authentication is turned on.
    pub user: Option<String>,
}

impl fmt::Debug for TlsAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsAccess")
            .field("identity", &self.identity.is_some())
            .finish_non_exhaustive()
    }
}

/// A user of etcd's own authentication.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The user's name.
    pub user: String,
    /// The user's password.
    pub password: String,
    /// Passwords that may still be the user's: while one is changed, the one before.
    pub former: Vec<String>,
}

impl Credentials {
    /// The passwords to try, the wanted one first.
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

/// A client URL, and after `#` the name its certificate is checked against where that is not the URL's host: members
/// are asked at their pods' addresses, and certificates are made for names. The check itself is never left out.
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
    fn invariant_14_debug_output_carries_no_secret() {
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
