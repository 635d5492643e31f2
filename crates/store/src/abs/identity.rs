//! The pod's own identity in Azure: the workload identity if the pod has a federated token, or the managed identity of
//! the machine if the pod has none. This module requests the tokens itself, because the token requests of the Azure
//! crates would need a second TLS library.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use api::problem::Chain;
use async_trait::async_trait;
use azure_core::auth::{AccessToken, Secret, TokenCredential};
use azure_core::error::ErrorKind;
use serde::Deserialize;
use tokio::sync::Mutex;

use crate::http::{self, Unread};
use crate::limits::MAX_ANSWER;

/// Every error of a token request starts with this text.
pub(super) const NO_TOKEN: &str = "no token for the pod's own identity";

/// The service for which the token is valid.
const RESOURCE: &str = "https://storage.azure.com/";

/// The identity endpoint of an Azure machine
/// (<https://learn.microsoft.com/entra/identity/managed-identities-azure-resources/how-to-use-vm-token>).
const METADATA_URL: &str = "http://169.254.169.254/metadata/identity/oauth2/token";

/// A token is replaced this long before it expires.
const EXPIRY_MARGIN: Duration = Duration::from_mins(5);

/// Requests access tokens from Azure, and caches the newest token.
#[derive(Debug)]
pub(super) struct Identity {
    client: reqwest::Client,
    source: Source,
    last: Mutex<Option<(AccessToken, SystemTime)>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    /// A token of the pod's ServiceAccount, exchanged for an Azure token
    /// (<https://azure.github.io/azure-workload-identity/docs/>).
    Federated {
        url: String,
        client_id: String,
        token_file: PathBuf,
    },
    /// The managed identity of the machine.
    Managed {
        url: String,
        client_id: Option<String>,
    },
}

#[derive(Deserialize)]
struct Answer {
    access_token: String,
    /// The number of seconds until the token expires, as a number or as text.
    expires_in: serde_json::Value,
}

impl Source {
    /// Selects the federated token if the workload identity webhook has set its environment variables, and the managed
    /// identity if they are not set.
    fn of(environment: impl Fn(&str) -> Option<String>) -> Self {
        let given = |name: &str| environment(name).filter(|value| !value.is_empty());
        let client_id = given("AZURE_CLIENT_ID");
        match (
            given("AZURE_FEDERATED_TOKEN_FILE"),
            given("AZURE_TENANT_ID"),
            &client_id,
        ) {
            (Some(file), Some(tenant), Some(client_id)) => {
                let authority = given("AZURE_AUTHORITY_HOST");
                let authority =
                    authority.unwrap_or_else(|| "https://login.microsoftonline.com".to_owned());
                let authority = authority.trim_end_matches('/');
                Self::Federated {
                    url: format!("{authority}/{tenant}/oauth2/v2.0/token"),
                    client_id: client_id.clone(),
                    token_file: file.into(),
                }
            }
            _ => Self::Managed {
                url: METADATA_URL.to_owned(),
                client_id,
            },
        }
    }
}

impl Identity {
    pub(super) fn new(client: reqwest::Client) -> Self {
        Self {
            client,
            source: Source::of(|name| std::env::var(name).ok()),
            last: Mutex::default(),
        }
    }

    async fn ask(&self) -> Result<Answer, String> {
        let request = match &self.source {
            Source::Federated {
                url,
                client_id,
                token_file,
            } => {
                let token = tokio::fs::read_to_string(token_file)
                    .await
                    .map_err(|error| format!("{}: {error}", token_file.display()))?;
                self.client.post(url).form(&[
                    ("grant_type", "client_credentials"),
                    ("client_id", client_id),
                    ("scope", "https://storage.azure.com/.default"),
                    (
                        "client_assertion_type",
                        "urn:ietf:params:oauth:client-assertion-type:jwt-bearer",
                    ),
                    ("client_assertion", token.trim()),
                ])
            }
            Source::Managed { url, client_id } => {
                let mut query = vec![("api-version", "2018-02-01"), ("resource", RESOURCE)];
                if let Some(id) = client_id {
                    query.push(("client_id", id));
                }
                self.client
                    .get(url)
                    .query(&query)
                    .header("Metadata", "true")
            }
        };
        let answer = request
            .send()
            .await
            .map_err(|error| Chain(&error).to_string())?;
        let status = answer.status();
        let body = http::whole(answer, MAX_ANSWER).await;
        let body = body.map_err(|error| match error {
            Unread::TooLong => "the response is too long".to_owned(),
            Unread::Broken(error) => Chain(&error).to_string(),
        })?;
        if !status.is_success() {
            // The error message contains the start of the response, which names the tenant and the client. This is
            // safe, because an error response contains no token.
            let text: String = String::from_utf8_lossy(&body).chars().take(500).collect();
            return Err(format!("{status} {text}"));
        }
        serde_json::from_slice(&body).map_err(|_| "the response contains no token".to_owned())
    }
}

#[async_trait]
impl TokenCredential for Identity {
    async fn get_token(&self, _scopes: &[&str]) -> azure_core::Result<AccessToken> {
        let mut last = self.last.lock().await;
        if let Some((token, until)) = &*last
            && *until > SystemTime::now()
        {
            return Ok(token.clone());
        }
        let answer = self.ask().await.map_err(|why| {
            azure_core::Error::message(ErrorKind::Credential, format!("{NO_TOKEN}: {why}"))
        })?;
        let seconds = match &answer.expires_in {
            serde_json::Value::String(text) => text.parse().unwrap_or_default(),
            number => number.as_u64().unwrap_or_default(),
        };
        let lasts = Duration::from_secs(seconds);
        let until = SystemTime::now() + lasts.saturating_sub(EXPIRY_MARGIN);
        let token = AccessToken::new(
            Secret::new(answer.access_token),
            (SystemTime::now() + lasts).into(),
        );
        *last = Some((token.clone(), until));
        Ok(token)
    }

    async fn clear_cache(&self) -> azure_core::Result<()> {
        *self.last.lock().await = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    fn environment(entries: &'static [(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        |name| {
            let found = entries.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        }
    }

    /// Starts a server that sends `answer` to one request. Returns its URL, and a task that returns the received
    /// request.
    async fn once(answer: &'static str) -> (String, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/token", listener.local_addr().unwrap());
        let asked = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let mut read = 0;
            while !String::from_utf8_lossy(&request[..read]).contains("\r\n\r\n") {
                read += stream.read(&mut request[read..]).await.unwrap();
            }
            // The client may send the body of the request in a separate packet after the headers, so the server reads
            // once more.
            let rest = tokio::time::timeout(
                Duration::from_millis(200),
                stream.read(&mut request[read..]),
            );
            if let Ok(Ok(more)) = rest.await {
                read += more;
            }
            stream.write_all(answer.as_bytes()).await.unwrap();
            String::from_utf8_lossy(&request[..read]).into_owned()
        });
        (url, asked)
    }

    #[test]
    fn federated_token_takes_precedence_over_managed_identity() {
        let pod = environment(&[
            ("AZURE_CLIENT_ID", "id"),
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_FEDERATED_TOKEN_FILE", "/token"),
            ("AZURE_AUTHORITY_HOST", "https://login.example/"),
        ]);
        assert_eq!(
            Source::of(pod),
            Source::Federated {
                url: "https://login.example/tenant/oauth2/v2.0/token".to_owned(),
                client_id: "id".to_owned(),
                token_file: "/token".into(),
            }
        );
        let machine = environment(&[("AZURE_CLIENT_ID", "id")]);
        assert_eq!(
            Source::of(machine),
            Source::Managed {
                url: METADATA_URL.to_owned(),
                client_id: Some("id".to_owned()),
            }
        );
    }

    #[tokio::test]
    async fn azure_token_is_cached_and_rejection_is_reported() {
        let (url, asked) = once(
            "HTTP/1.1 200 OK\r\ncontent-length: 46\r\n\r\n{\"access_token\":\"secret\",\"expires_in\":\"86400\"} ",
        )
        .await;
        let identity = Identity {
            client: reqwest::Client::new(),
            source: Source::Managed {
                url,
                client_id: None,
            },
            last: Mutex::default(),
        };
        for _ in 0..2 {
            let token = identity.get_token(&[]).await.unwrap();
            assert_eq!(token.token.secret(), "secret");
        }
        let request = asked.await.unwrap().to_lowercase();
        assert!(request.contains("metadata: true"), "{request}");

        let (url, asked) =
            once("HTTP/1.1 401 Unauthorized\r\ncontent-length: 9\r\n\r\nno tenant").await;
        let token_file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&token_file, "assertion\n").unwrap();
        let identity = Identity {
            source: Source::Federated {
                url,
                client_id: "id".to_owned(),
                token_file: token_file.path().to_owned(),
            },
            ..identity
        };
        identity.clear_cache().await.unwrap();
        let error = Chain(&identity.get_token(&[]).await.unwrap_err()).to_string();
        assert!(
            error.contains(NO_TOKEN) && error.contains("no tenant"),
            "{error}"
        );
        assert!(asked.await.unwrap().contains("client_assertion=assertion"));
    }
}
