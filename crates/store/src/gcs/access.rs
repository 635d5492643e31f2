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

/// The scope of the requested tokens.
const SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_write";

/// The names of the keys in the Secret with the Google credentials.
const CREDENTIALS: &str = "credentials.json";
const TOKEN: &str = "access-token";
const ENDPOINT: &str = "endpoint";

/// The configuration of a bucket.
#[derive(Clone, Debug)]
pub struct GcsConfig {
    /// The bucket's name.
    pub bucket: String,
    /// URL of the storage service. `None` means Google's public endpoint.
    pub endpoint: Option<String>,
    /// The identity with which requests are sent.
    pub access: GcsAccess,
}

/// The identity with which requests are sent.
#[derive(Clone)]
pub enum GcsAccess {
    /// The pod's own identity: the workload identity, or the service account of the machine if there is no workload
    /// identity.
    Ambient,
    /// The JSON file of a service account key or of a user's credentials, as Google generates it.
    Json(serde_json::Value),
    /// A token, which the user replaces before it expires.
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
    fn own_endpoint(&self) -> Option<&str> {
        self.endpoint.as_deref().filter(|text| !text.is_empty())
    }

    /// Whether the user has set an endpoint.
    pub(super) fn has_own_endpoint(&self) -> bool {
        self.own_endpoint().is_some()
    }

    pub(super) fn endpoint(&self) -> Result<Url, Error> {
        client::endpoint(self.own_endpoint().unwrap_or(DEFAULT_ENDPOINT))
    }
}

/// Whether a URL names a server of Google.
fn is_googles(endpoint: &Url) -> bool {
    let host = endpoint.host_str().unwrap_or_default();
    endpoint.scheme() == "https" && host.ends_with(".googleapis.com")
}

impl GcsAccess {
    /// Checks that the credentials of the Secret may be sent to the endpoint of a spec. If the endpoint is not
    /// Google's, the Secret must name it. Without this check, a user who may create EtcdBackups, but not read the
    /// Secret, could send its token to any server.
    ///
    /// # Errors
    /// Fails if the endpoint is not Google's and the Secret does not name it.
    pub(crate) fn check_endpoint(data: &SecretData, endpoint: Option<&str>) -> Result<(), Error> {
        let Some(endpoint) = endpoint.filter(|text| !text.is_empty()) else {
            return Ok(());
        };
        let url = client::endpoint(endpoint)?;
        let named = secret::optional(data, ENDPOINT)?;
        let named = named.and_then(|named| client::endpoint(named).ok());
        if is_googles(&url) || named == Some(url) {
            return Ok(());
        }
        let problem = format!(
            "does not name {endpoint}. The operator sends tokens only to Google and to the endpoint in the Secret: set \
             {ENDPOINT} in the Secret to the value of spec.gcs.endpoint"
        );
        Err(secret::invalid_key(ENDPOINT, problem))
    }

    /// Reads the Secret's keys `access-token` or `credentials.json`, as defined by v1beta2. The token takes precedence.
    ///
    /// # Errors
    /// Fails if a key is missing or invalid.
    pub fn from_secret(data: &SecretData) -> Result<Self, Error> {
        secret::reject_misspelled(data, &[CREDENTIALS, TOKEN, ENDPOINT])?;
        if let Some(token) = secret::optional(data, TOKEN)? {
            let mut header = HeaderValue::from_str(&format!("Bearer {token}"))
                .map_err(|_| secret::invalid_key(TOKEN, "is not a valid token".to_owned()))?;
            header.set_sensitive(true);
            return Ok(Self::Token(header));
        }
        let text = secret::text(
            data,
            CREDENTIALS,
            "add the JSON file of a service account as credentials.json, or an access token as access-token",
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
                Some("authorized_user") => user_account::Builder::new(without_token_server(json))
                    .with_scopes([SCOPE])
                    .build(),
                // Credentials of any other type are rejected. For example, "external_account" credentials name files
                // and URLs that the client would read. A user who may write a Secret could then read the operator's
                // files.
                _ => {
                    return Err(secret::invalid_key(
                        CREDENTIALS,
                        "has an unsupported type".to_owned(),
                    ));
                }
            },
        };
        built.map_err(|_| match self {
            Self::Ambient => Error::NoIdentity("no credentials were found".to_owned()),
            Self::Json(_) | Self::Token(_) => secret::invalid_key(
                CREDENTIALS,
                "cannot be used: use the file that Google generated".to_owned(),
            ),
        })
    }
}

/// Removes the token server from the credentials, so that the client uses Google's token server. Users must not choose
/// the server, because the client reads token responses of any size into memory.
fn without_token_server(json: &serde_json::Value) -> serde_json::Value {
    let mut json = json.clone();
    if let Some(fields) = json.as_object_mut() {
        fields.remove("token_uri");
    }
    json
}

/// A token from the Secret, which this crate does not renew.
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
    async fn keys_of_v1beta2_google_secret_are_read() {
        let account = r#"{"type":"service_account","client_email":"a@b","private_key_id":"i",
            "private_key":"hidden","project_id":"p"}"#;
        let access = GcsAccess::from_secret(&secret(&[(CREDENTIALS, account)])).unwrap();
        assert!(matches!(access, GcsAccess::Json(_)));
        // Invariant 14: the debug output contains no credentials.
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

    #[test]
    fn token_is_sent_only_to_google_or_endpoint_in_secret() {
        let check = |named: Option<&str>, endpoint: &str| {
            let named = named.map(|url| (ENDPOINT.to_owned(), url.as_bytes().to_vec()));
            let mut data: SecretData = named.into_iter().collect();
            data.insert(TOKEN.to_owned(), b"ya29.secret".to_vec());
            assert!(GcsAccess::from_secret(&data).is_ok());
            GcsAccess::check_endpoint(&data, Some(endpoint))
        };
        for endpoint in [
            "https://attacker.example",
            "http://storage.googleapis.com",
            "https://storage.googleapis.com.attacker.example",
            "https://storage.googleapis.com@attacker.example",
            "https://attacker.example#.googleapis.com",
            "https://attackergoogleapis.com",
        ] {
            for named in [None, Some("https://store.example")] {
                let error = check(named, endpoint).unwrap_err().to_string();
                assert!(error.starts_with("endpoint: does not name"), "{error}");
                assert!(!error.contains("ya29"), "{error}");
            }
        }
        for (named, endpoint) in [
            (None, ""),
            (None, "https://storage.googleapis.com"),
            (None, "https://storage-private.p.googleapis.com/"),
            (Some("http://10.0.0.1:4443"), "http://10.0.0.1:4443/"),
        ] {
            assert_eq!(
                check(named, endpoint).err().map(|error| error.to_string()),
                None
            );
        }
    }

    #[test]
    fn token_server_url_in_google_credentials_is_removed() {
        let json = serde_json::json!({ "type": "authorized_user", "token_uri": "http://hostile" });
        let used = without_token_server(&json);
        assert_eq!(used, serde_json::json!({ "type": "authorized_user" }));
    }

    #[tokio::test]
    async fn invalid_key_of_google_secret_is_reported_with_remedy() {
        let external = r#"{"type":"external_account","credential_source":{"file":"/etc/passwd"}}"#;
        let cases: [(&[(&str, &str)], &str); 5] = [
            (&[], "credentials.json: is missing (the Secret has no keys)"),
            (
                &[("credentials", "{}")],
                "credentials.json: is missing (the Secret has only these keys: credentials)",
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
