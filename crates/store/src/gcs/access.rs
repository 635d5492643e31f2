//! Access to a bucket: the configuration and the keys of the Secret.

use std::fmt;

use google_cloud_auth::credentials::{
    Builder, CacheableResource, Credentials, CredentialsProvider, EntityTag, service_account,
    user_account,
};
use google_cloud_auth::errors::CredentialsError;
use http::header::AUTHORIZATION;
use http::{Extensions, HeaderMap, HeaderValue};
use reqwest::Url;

use crate::http as client;
use crate::port::Error;
use crate::secret;
use crate::secret::SecretData;

/// The public endpoint of Google Cloud Storage.
const DEFAULT_ENDPOINT: &str = "https://storage.googleapis.com";

/// The scope of a token.
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_write";

/// The keys of the Secret.
const CREDENTIALS: &str = "credentials.json";
const TOKEN: &str = "access-token";

/// The configuration of a bucket.
#[derive(Clone, Debug)]
pub struct GcsConfig {
    /// The bucket's name.
    pub bucket: String,
    /// URL of the storage service, if it is not the public one.
    pub endpoint: Option<String>,
    /// The identity.
    pub access: GcsAccess,
}

/// The identity of the requests.
#[derive(Clone)]
pub enum GcsAccess {
    /// The pod's own identity: workload identity, or the machine's service account.
    Ambient,
    /// The key of a service account, or a user's credentials: Google's JSON.
    Json(serde_json::Value),
    /// A token that the user keeps valid.
    Token(HeaderValue),
}

impl fmt::Debug for GcsAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ambient => "Ambient",
            Self::Json(_) => "Json",
            Self::Token(_) => "Token",
        })
    }
}

impl GcsConfig {
    pub(super) fn endpoint(&self) -> Result<Url, Error> {
        let given = self.endpoint.as_deref().filter(|text| !text.is_empty());
        client::endpoint(given.unwrap_or(DEFAULT_ENDPOINT))
    }
}

impl GcsAccess {
    /// Reads the Secret's keys `access-token` or `credentials.json`, as defined by v1beta2. The token takes
    /// precedence.
    ///
    /// # Errors
    /// A key is missing or invalid.
    pub fn from_secret(data: &SecretData) -> Result<Self, Error> {
        secret::reject_misspelled(data, &[CREDENTIALS, TOKEN])?;
        if let Some(token) = secret::optional(data, TOKEN)? {
            let mut header = HeaderValue::from_str(&format!("Bearer {token}"))
                .map_err(|_| secret::invalid_key(TOKEN, "is not a valid token".to_owned()))?;
            header.set_sensitive(true);
            return Ok(Self::Token(header));
        }
        let text = secret::text(
            data,
            CREDENTIALS,
            "add the service account key under this key, or a token under access-token",
        )?;
        let invalid_key = |problem: &str| secret::invalid_key(CREDENTIALS, problem.to_owned());
        let json: serde_json::Value = serde_json::from_str(text)
            .map_err(|_| invalid_key("is not JSON: use the file that Google generated"))?;
        let access = Self::Json(json);
        access.credentials().map_err(|_| {
            invalid_key("is neither a service account key nor user credentials: use the file that Google generated")
        })?;
        Ok(access)
    }

    pub(super) fn credentials(&self) -> Result<Credentials, Error> {
        let built = match self {
            Self::Ambient => Builder::default().with_scopes([SCOPE]).build(),
            Self::Token(header) => return Ok(Credentials::from(Token(header.clone()))),
            Self::Json(json) => match json.get("type").and_then(|kind| kind.as_str()) {
                Some("service_account") => service_account::Builder::new(json.clone())
                    .with_access_specifier(service_account::AccessSpecifier::from_scopes([SCOPE]))
                    .build(),
                Some("authorized_user") => user_account::Builder::new(json.clone())
                    .with_scopes([SCOPE])
                    .build(),
                // "external_account" names files, programs and URLs that this process would read: a user with
                // write access to a Secret could read the operator's own files.
                _ => {
                    return Err(secret::invalid_key(
                        CREDENTIALS,
                        "has an unsupported type".to_owned(),
                    ));
                }
            },
        };
        built.map_err(|_| {
            Error::AccessDenied("no credentials were found for the pod's own identity".to_owned())
        })
    }
}

/// A static token.
#[derive(Debug)]
struct Token(HeaderValue);

impl CredentialsProvider for Token {
    async fn headers(
        &self,
        _extensions: Extensions,
    ) -> Result<CacheableResource<HeaderMap>, CredentialsError> {
        Ok(CacheableResource::New {
            entity_tag: EntityTag::new(),
            data: HeaderMap::from_iter([(AUTHORIZATION, self.0.clone())]),
        })
    }

    async fn universe_domain(&self) -> Option<String> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(entries: &[(&str, &str)]) -> SecretData {
        entries
            .iter()
            .map(|(key, value)| ((*key).to_owned(), value.as_bytes().to_vec()))
            .collect()
    }

    #[tokio::test]
    async fn reads_v1beta2_secret_keys() {
        let account = r#"{"type":"service_account","client_email":"a@b","private_key_id":"i",
            "private_key":"hidden","project_id":"p"}"#;
        let access = GcsAccess::from_secret(&secret(&[(CREDENTIALS, account)])).unwrap();
        assert!(matches!(access, GcsAccess::Json(_)));
        // Invariant 14.
        assert!(!format!("{access:?}").contains("hidden"));
        let user =
            r#"{"type":"authorized_user","client_id":"i","client_secret":"s","refresh_token":"r"}"#;
        assert!(GcsAccess::from_secret(&secret(&[(CREDENTIALS, user)])).is_ok());
        let token = GcsAccess::from_secret(&secret(&[(TOKEN, "ya29.secret\n")])).unwrap();
        assert!(!format!("{token:?}").contains("ya29"));
        let headers = token
            .credentials()
            .unwrap()
            .headers(Extensions::new())
            .await
            .unwrap();
        let CacheableResource::New { data, .. } = headers else {
            panic!("no headers");
        };
        assert_eq!(data[AUTHORIZATION], "Bearer ya29.secret");
    }

    #[tokio::test]
    async fn error_names_invalid_secret_key() {
        let external = r#"{"type":"external_account","credential_source":{"file":"/etc/passwd"}}"#;
        let cases: [(&[(&str, &str)], &str); 5] = [
            (&[], "credentials.json: is missing (the Secret has no keys)"),
            (
                &[("credentials", "{}")],
                "credentials.json: is missing (the Secret has credentials)",
            ),
            (
                &[("access_token", "t")],
                "access_token: is an unknown key: rename it to access-token",
            ),
            (&[(CREDENTIALS, "secret")], "credentials.json: is not JSON"),
            (
                &[(CREDENTIALS, external)],
                "credentials.json: is neither a service account key",
            ),
        ];
        for (entries, expected) in cases {
            let error = GcsAccess::from_secret(&secret(entries))
                .unwrap_err()
                .to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
