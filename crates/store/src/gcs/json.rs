//! The part of Google's JSON API that its client only has over gRPC
//! (<https://cloud.google.com/storage/docs/json_api/v1/objects>).

use std::time::Duration;

use google_cloud_auth::credentials::{CacheableResource, Credentials};
use reqwest::{Method, StatusCode, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::failure::{Place, chain};
use crate::http;
use crate::port::{Error, Object};

/// Attempts of one request.
const ATTEMPTS: u32 = 5;

/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Calls that are answered at once.
#[derive(Clone)]
pub(super) struct Json {
    client: reqwest::Client,
    endpoint: Url,
    credentials: Credentials,
    place: Place,
}

/// An object, as far as it is asked for.
#[derive(Debug, Deserialize)]
pub(super) struct Resource {
    name: String,
    /// Numbers of 64 bits are text in this API.
    size: String,
    #[serde(default)]
    updated: Option<String>,
    /// The CRC32C of the content, big endian, in base64.
    #[serde(default)]
    pub(super) crc32c: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Page {
    #[serde(default)]
    items: Vec<Resource>,
    next_page_token: Option<String>,
}

#[derive(Deserialize)]
struct Failure {
    error: Details,
}

#[derive(Deserialize)]
struct Details {
    message: String,
}

impl Resource {
    pub(super) fn size(&self) -> Result<u64, Error> {
        self.size
            .parse()
            .map_err(|_| Error::Other(format!("object {:?} has no size", self.name)))
    }

    pub(super) fn described(&self) -> Result<Object, Error> {
        let updated = self.updated.as_deref();
        let updated = updated.and_then(|text| text.parse::<jiff::Timestamp>().ok());
        Ok(Object {
            key: self.name.clone(),
            size: self.size()?,
            modified_unix_seconds: updated.map(jiff::Timestamp::as_second),
        })
    }
}

impl Json {
    pub(super) fn new(
        endpoint: Url,
        credentials: Credentials,
        place: Place,
    ) -> Result<Self, Error> {
        Ok(Self {
            client: http::client(|builder| builder.timeout(PATIENCE))?,
            endpoint,
            credentials,
            place,
        })
    }

    pub(super) async fn object(&self, key: &str) -> Result<Resource, Error> {
        let body = self.call(Method::GET, key, self.url(Some(key))?).await?;
        read(&body)
    }

    pub(super) async fn delete(&self, key: &str) -> Result<(), Error> {
        self.call(Method::DELETE, key, self.url(Some(key))?)
            .await
            .map(|_| ())
    }

    pub(super) async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let mut objects = Vec::new();
        let mut token: Option<String> = None;
        loop {
            let mut url = self.url(None)?;
            url.query_pairs_mut()
                .append_pair("prefix", prefix)
                .append_pair("maxResults", "1000")
                .append_pair("fields", "nextPageToken,items(name,size,updated)");
            if let Some(token) = &token {
                url.query_pairs_mut().append_pair("pageToken", token);
            }
            let body = self
                .call(Method::GET, "", url)
                .await
                .map_err(|error| self.place.about_bucket(error))?;
            let page: Page = read(&body)?;
            for item in &page.items {
                objects.push(item.described()?);
            }
            token = page.next_page_token.filter(|token| !token.is_empty());
            if token.is_none() {
                return Ok(objects);
            }
        }
    }

    /// The bucket's objects, or one of them.
    fn url(&self, key: Option<&str>) -> Result<Url, Error> {
        let mut url = self.endpoint.clone();
        url.path_segments_mut()
            .map_err(|()| Error::Other("an endpoint without a path".to_owned()))?
            .pop_if_empty()
            .extend(["storage", "v1", "b", &self.place.bucket, "o"])
            .extend(key);
        Ok(url)
    }

    /// Calls until there is an answer that would not change.
    async fn call(&self, method: Method, key: &str, url: Url) -> Result<Vec<u8>, Error> {
        let mut failures = 0;
        loop {
            let (error, lasting) = match self.attempt(&method, key, url.clone()).await {
                Ok(body) => return Ok(body),
                Err(failed) => failed,
            };
            failures += 1;
            if lasting || failures >= ATTEMPTS {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(100) * 3_u32.pow(failures - 1)).await;
        }
    }

    /// One attempt; a failure comes with whether it would be the same again.
    async fn attempt(
        &self,
        method: &Method,
        key: &str,
        url: Url,
    ) -> Result<Vec<u8>, (Error, bool)> {
        let headers = match self.credentials.headers(::http::Extensions::new()).await {
            Ok(CacheableResource::New { data, .. }) => data,
            Ok(CacheableResource::NotModified) => ::http::HeaderMap::new(),
            Err(error) => {
                let lasting = !error.is_transient();
                return Err((Error::AccessDenied(chain(&error)), lasting));
            }
        };
        let request = self.client.request(method.clone(), url).headers(headers);
        let broken = |error: reqwest::Error| {
            let error = if error.is_timeout() {
                Error::Timeout(self.place.endpoint.clone())
            } else {
                // The address holds nothing secret, but is long.
                self.place.unreachable(&chain(&error.without_url()))
            };
            let lasting = matches!(error, Error::Certificate(_));
            (error, lasting)
        };
        let answer = request.send().await.map_err(broken)?;
        let status = answer.status();
        let body = answer.bytes().await.map_err(broken)?;
        if status.is_success() {
            return Ok(body.to_vec());
        }
        let passing = status.is_server_error()
            || matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT
            );
        let message = match serde_json::from_slice::<Failure>(&body) {
            Ok(failure) => failure.error.message,
            Err(_) => String::from_utf8_lossy(&body).chars().take(200).collect(),
        };
        let error = self
            .place
            .answered(key, None, &message, Some(status.as_u16()));
        Err((error, !passing))
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(body)
        .map_err(|error| Error::Other(format!("something unreadable: {error}")))
}
