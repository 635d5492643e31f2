//! Google's JSON API, for calls that Google's client supports only over gRPC, and for uploads
//! (<https://cloud.google.com/storage/docs/json_api/v1/objects>).

use std::time::Duration;

use google_cloud_auth::credentials::{CacheableResource, Credentials};
use reqwest::header::HeaderMap;
use reqwest::{RequestBuilder, StatusCode, Url};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::failure::{Place, chain};
use crate::http;
use crate::port::{Error, Object};

/// Maximum number of attempts of one request.
pub(super) const ATTEMPTS: u32 = 6;

/// Timeout of a request, and of a request with content.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
const BULK_TIMEOUT: Duration = Duration::from_mins(5);

/// A bucket and the identity of the requests.
#[derive(Clone)]
pub(super) struct Json {
    /// For short calls.
    pub(super) client: reqwest::Client,
    /// For content, with a timeout that allows slow connections.
    pub(super) bulk: reqwest::Client,
    endpoint: Url,
    credentials: Credentials,
    place: Place,
}

/// The used fields of an object.
#[derive(Debug, Deserialize)]
pub(super) struct Resource {
    name: String,
    /// The API sends 64-bit numbers as text.
    size: String,
    #[serde(default)]
    updated: Option<String>,
    /// The CRC32C of the content, big endian, in base64.
    #[serde(default)]
    pub(super) crc32c: Option<String>,
    /// Changes with every write of the object.
    #[serde(default)]
    generation: Option<serde_json::Value>,
}

/// Path of the objects.
const OBJECTS: &[&str] = &["storage", "v1", "b"];

/// A successful response.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

impl Answer {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
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

    pub(super) fn tag(&self) -> Option<String> {
        self.generation.as_ref().map(ToString::to_string)
    }

    pub(super) fn described(&self) -> Result<Object, Error> {
        let updated = self.updated.as_deref();
        let updated = updated.and_then(|text| text.parse::<jiff::Timestamp>().ok());
        Ok(Object {
            key: self.name.clone(),
            size: self.size()?,
            modified_unix_seconds: updated.map(jiff::Timestamp::as_second),
            tag: self.tag(),
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
            client: http::client(|builder| builder.timeout(REQUEST_TIMEOUT))?,
            bulk: http::client(|builder| builder.timeout(BULK_TIMEOUT))?,
            endpoint,
            credentials,
            place,
        })
    }

    pub(super) async fn object(&self, key: &str) -> Result<Resource, Error> {
        let url = self.url(OBJECTS, Some(key))?;
        let answer = self.call(key, |client| client.get(url.clone())).await?;
        read(&answer.body)
    }

    pub(super) async fn delete(&self, key: &str) -> Result<(), Error> {
        let url = self.url(OBJECTS, Some(key))?;
        self.call(key, |client| client.delete(url.clone()))
            .await
            .map(|_| ())
    }

    pub(super) async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let mut objects = Vec::new();
        let mut token: Option<String> = None;
        loop {
            let mut url = self.url(OBJECTS, None)?;
            url.query_pairs_mut()
                .append_pair("prefix", prefix)
                .append_pair("maxResults", "1000")
                .append_pair("fields", "nextPageToken,items(name,size,updated)");
            if let Some(token) = &token {
                url.query_pairs_mut().append_pair("pageToken", token);
            }
            let answer = self
                .call("", |client| client.get(url.clone()))
                .await
                .map_err(|error| self.place.about_bucket(error))?;
            let page: Page = read(&answer.body)?;
            for item in &page.items {
                objects.push(item.described()?);
            }
            token = page.next_page_token.filter(|token| !token.is_empty());
            if token.is_none() {
                return Ok(objects);
            }
        }
    }

    /// The URL of the bucket's objects below a path of the API, or of one object.
    pub(super) fn url(&self, path: &[&str], key: Option<&str>) -> Result<Url, Error> {
        let mut url = self.endpoint.clone();
        url.path_segments_mut()
            .map_err(|()| Error::Other("the endpoint URL cannot have a path".to_owned()))?
            .pop_if_empty()
            .extend(path)
            .extend([&self.place.bucket, "o"])
            .extend(key);
        Ok(url)
    }

    /// Calls with retries until the response is final.
    pub(super) async fn call(
        &self,
        key: &str,
        request: impl Fn(&reqwest::Client) -> RequestBuilder + Send + Sync,
    ) -> Result<Answer, Error> {
        let mut failures = 0;
        loop {
            let (error, lasting) = match self.once(key, request(&self.client)).await {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            failures += 1;
            if lasting || failures >= ATTEMPTS {
                return Err(error);
            }
            tokio::time::sleep(backoff(failures)).await;
        }
    }

    /// One attempt. An error comes with a flag that is true if a retry would fail too.
    pub(super) async fn once(
        &self,
        key: &str,
        request: RequestBuilder,
    ) -> Result<Answer, (Error, bool)> {
        let headers = match self.credentials.headers(::http::Extensions::new()).await {
            Ok(CacheableResource::New { data, .. }) => data,
            Ok(CacheableResource::NotModified) => HeaderMap::new(),
            Err(error) => {
                let lasting = !error.is_transient();
                return Err((Error::AccessDenied(chain(&error)), lasting));
            }
        };
        let broken = |error: reqwest::Error| {
            let error = if error.is_timeout() {
                Error::Timeout(self.place.endpoint.clone())
            } else {
                // The URL of an upload grants access like credentials.
                self.place.unreachable(&chain(&error.without_url()))
            };
            let lasting = matches!(error, Error::Certificate(_));
            (error, lasting)
        };
        let answer = request.headers(headers).send().await.map_err(broken)?;
        let status = answer.status();
        let headers = answer.headers().clone();
        let body = answer.bytes().await.map_err(broken)?;
        if status.is_success() || status == StatusCode::PERMANENT_REDIRECT {
            return Ok(Answer {
                status,
                headers,
                body: body.to_vec(),
            });
        }
        let passing = status.is_server_error()
            || matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT
            );
        let answered = |message: &str| {
            let status = Some(status.as_u16());
            self.place.answered(key, None, message, status)
        };
        let error = if let Ok(failure) = serde_json::from_slice::<Failure>(&body) {
            answered(&failure.error.message)
        } else {
            let text: String = String::from_utf8_lossy(&body).chars().take(200).collect();
            match answered(&text) {
                Error::Other(_) if !passing => {
                    self.place.foreign(&format!("{} {text}", status.as_u16()))
                }
                error => error,
            }
        };
        Err((error, !passing))
    }
}

/// The delay before the next attempt, by the number of failures.
pub(super) fn backoff(failures: u32) -> Duration {
    Duration::from_millis(100) * 3_u32.pow(failures.clamp(1, 5) - 1)
}

pub(super) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(body)
        .map_err(|error| Error::Other(format!("unreadable response: {error}")))
}
