//! Requests to Google's JSON API (<https://cloud.google.com/storage/docs/json_api/v1/objects>).

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use api::problem::Chain;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use google_cloud_auth::credentials::{CacheableResource, Credentials};
use reqwest::header::HeaderMap;
use reqwest::{RequestBuilder, StatusCode, Url};
use serde::de::{DeserializeOwned, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::failure::Place;
use crate::http::{self, Unread};
use crate::limits::{Listing, MAX_ANSWER, MAX_PAGE, MAX_PAGE_ENTRIES, too_long};
use crate::lock::Retention;
use crate::port::{Error, Object};
use crate::resume::{Body, check_range};

/// Maximum number of attempts for one request.
pub(super) const ATTEMPTS: u32 = 6;

/// Time limit for a request that transfers no content.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit for a request that transfers content.
const BULK_TIMEOUT: Duration = Duration::from_mins(5);

/// A bucket, and the identity with which requests are sent.
#[derive(Clone)]
pub(super) struct Json {
    /// The client for requests that send no content.
    pub(super) client: reqwest::Client,
    /// The client for requests that send content. Its timeout is long enough for slow connections.
    pub(super) bulk: reqwest::Client,
    endpoint: Url,
    credentials: Credentials,
    place: Place,
}

/// The fields of an object that this crate uses.
#[derive(Debug, Deserialize)]
pub(super) struct Resource {
    name: String,
    /// Size in bytes. The API sends 64-bit numbers as text.
    size: String,
    #[serde(default)]
    updated: Option<String>,
    /// The CRC32C of the content, big endian, in base64.
    #[serde(default)]
    pub(super) crc32c: Option<String>,
    /// A number that changes with every write of the object.
    #[serde(default)]
    generation: Option<Generation>,
    /// The lock of the object against deletion.
    #[serde(default)]
    retention: Option<StoredRetention>,
}

/// The lock of a stored object.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct StoredRetention {
    mode: String,
    retain_until_time: String,
}

/// The generation in a JSON response, as a number or as text.
#[derive(Debug)]
struct Generation(serde_json::Value);

impl<'de> Deserialize<'de> for Generation {
    /// Accepts only a number or text, because a parsed nested value takes far more memory than its text.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar;
        impl Visitor<'_> for Scalar {
            type Value = Generation;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, or a number as text")
            }

            fn visit_u64<E>(self, value: u64) -> Result<Generation, E> {
                Ok(Generation(value.into()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Generation, E> {
                Ok(Generation(value.into()))
            }

            fn visit_str<E>(self, value: &str) -> Result<Generation, E> {
                Ok(Generation(value.into()))
            }
        }
        deserializer.deserialize_any(Scalar)
    }
}

/// The objects of a page, at most [`MAX_PAGE_ENTRIES`], because a parsed object takes far more memory than its text.
#[derive(Debug, Default)]
struct Items(Vec<Resource>);

impl<'de> Deserialize<'de> for Items {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bounded;
        impl<'de> Visitor<'de> for Bounded {
            type Value = Items;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_PAGE_ENTRIES} objects")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Items, A::Error> {
                let mut all = Vec::new();
                while let Some(item) = items.next_element()? {
                    if all.len() == MAX_PAGE_ENTRIES {
                        return Err(A::Error::invalid_length(all.len() + 1, &self));
                    }
                    all.push(item);
                }
                Ok(Items(all))
            }
        }
        deserializer.deserialize_seq(Bounded)
    }
}

/// The beginning of the URL path of objects.
const OBJECTS: &[&str] = &["storage", "v1", "b"];

/// The response to a successful request.
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
    items: Items,
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
        Some(self.generation.as_ref()?.0.to_string())
    }

    /// The generation as the value of a query parameter.
    pub(super) fn generation(&self) -> Option<String> {
        match &self.generation.as_ref()?.0 {
            serde_json::Value::String(text) => Some(text.clone()),
            number => Some(number.to_string()),
        }
    }

    /// Whether the object has this lock.
    pub(super) fn has_lock(&self, lock: &Retention) -> bool {
        let stored = self.retention.as_ref();
        stored.is_some_and(|stored| {
            let until = stored.retain_until_time.parse().ok();
            lock.is_confirmed_by(&stored.mode, until)
        })
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

/// The metadata of a new object, as JSON. `content` is the name of the object and the CRC32C of its content.
pub(super) fn metadata(content: Option<(&str, &str)>, retention: Option<&Retention>) -> String {
    let mut fields = serde_json::Map::new();
    if let Some((name, crc32c)) = content {
        fields.insert("name".to_owned(), name.into());
        fields.insert("crc32c".to_owned(), crc32c.into());
    }
    if let Some(Retention { mode, until }) = retention {
        let until = until.to_string();
        let retention = serde_json::json!({ "mode": mode, "retainUntilTime": until });
        fields.insert("retention".to_owned(), retention);
    }
    serde_json::Value::Object(fields).to_string()
}

/// The body of a multipart request: the metadata and the content
/// (<https://cloud.google.com/storage/docs/uploading-objects#rest-upload-objects>).
fn multipart(boundary: &str, metadata: &str, content: &[u8]) -> Vec<u8> {
    let head = format!(
        "--{boundary}\r\ncontent-type: application/json\r\n\r\n{metadata}\r\n\
         --{boundary}\r\ncontent-type: application/octet-stream\r\n\r\n"
    );
    let tail = format!("\r\n--{boundary}--\r\n");
    [head.as_bytes(), content, tail.as_bytes()].concat()
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

    /// Writes an object in one request. The store rejects the request if the content does not match the CRC32C in
    /// `metadata`. A retry is harmless, because it writes the same content.
    pub(super) async fn put(
        &self,
        key: &str,
        metadata: &str,
        content: &[u8],
    ) -> Result<Resource, Error> {
        let mut url = self.url(&["upload", "storage", "v1", "b"], None)?;
        url.query_pairs_mut().append_pair("uploadType", "multipart");
        // The boundary is random, so that it does not occur in the content.
        let boundary = format!("{:032x}", rand::random::<u128>());
        let body = Bytes::from(multipart(&boundary, metadata, content));
        let request = || {
            self.bulk
                .post(url.clone())
                .header(
                    "content-type",
                    format!("multipart/related; boundary={boundary}"),
                )
                .header("content-length", body.len())
                .body(body.clone())
        };
        let answer = self.retried(key, MAX_ANSWER, request).await?;
        read(&answer.body)
    }

    /// Reads the range `part`, which must not be empty, of one generation of an object. Sends one request without
    /// retries.
    pub(super) async fn content(
        &self,
        key: &str,
        generation: Option<&str>,
        part: Range<u64>,
    ) -> Result<Body, Error> {
        let mut url = self.url(OBJECTS, Some(key))?;
        url.query_pairs_mut().append_pair("alt", "media");
        if let Some(generation) = generation {
            url.query_pairs_mut().append_pair("generation", generation);
        }
        let range = format!("bytes={}-{}", part.start, part.end.saturating_sub(1));
        let request = self.bulk.get(url).header("range", range);
        let answer = self.send(request).await.map_err(|(error, _)| error)?;
        if !answer.status().is_success() {
            return match self.read(key, MAX_ANSWER, answer).await {
                Err((error, _)) => Err(error),
                Ok(answer) => Err(self.place.foreign(answer.status.as_str())),
            };
        }
        let range = answer.headers().get("content-range");
        let range = range.and_then(|range| range.to_str().ok());
        check_range(range, answer.content_length(), &part)?;
        let place = self.place.clone();
        let content = answer.bytes_stream();
        Ok(content
            .map_err(move |error| place.broken(&error.without_url()))
            .boxed())
    }

    pub(super) async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let mut listing = Listing::new(&self.place, prefix);
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
            let request = || self.client.get(url.clone());
            let answer = self
                .retried("", MAX_PAGE, request)
                .await
                .map_err(|error| self.place.about_bucket(error))?;
            let page: Page = read(&answer.body)?;
            for item in &page.items.0 {
                listing.push(item.described()?, item.name.len())?;
            }
            let next = page.next_page_token.filter(|token| !token.is_empty());
            let Some(next) = next else {
                return Ok(listing.finish());
            };
            listing.advance(&next)?;
            token = Some(next);
        }
    }

    /// The URL of the bucket's objects, or of the object `key`. `path` is the beginning of the URL path.
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

    /// Sends a request, at most [`ATTEMPTS`] times while the error may be temporary.
    pub(super) async fn call(
        &self,
        key: &str,
        request: impl Fn(&reqwest::Client) -> RequestBuilder + Send + Sync,
    ) -> Result<Answer, Error> {
        self.retried(key, MAX_ANSWER, || request(&self.client))
            .await
    }

    async fn retried(
        &self,
        key: &str,
        limit: usize,
        request: impl Fn() -> RequestBuilder + Send + Sync,
    ) -> Result<Answer, Error> {
        let mut failures = 0;
        loop {
            let attempt = async { self.read(key, limit, self.send(request()).await?).await };
            let (error, lasting) = match attempt.await {
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

    /// Sends a request once. The Boolean next to the error is true if a retry would fail too.
    pub(super) async fn once(
        &self,
        key: &str,
        request: RequestBuilder,
    ) -> Result<Answer, (Error, bool)> {
        let answer = self.send(request).await?;
        self.read(key, MAX_ANSWER, answer).await
    }

    async fn send(&self, request: RequestBuilder) -> Result<reqwest::Response, (Error, bool)> {
        let headers = match self.credentials.headers(::http::Extensions::new()).await {
            Ok(CacheableResource::New { data, .. }) => data,
            Ok(CacheableResource::NotModified) => HeaderMap::new(),
            Err(error) => {
                let lasting = !error.is_transient();
                return Err((Error::AccessDenied(Chain(&error).to_string()), lasting));
            }
        };
        let answer = request.headers(headers).send().await;
        answer.map_err(|error| self.broken(error))
    }

    fn broken(&self, error: reqwest::Error) -> (Error, bool) {
        let error = if error.is_timeout() {
            Error::Timeout(self.place.endpoint.clone())
        } else {
            // `without_url` removes the URL from the message, because the URL of an upload grants access without
            // credentials.
            self.place
                .unreachable(&Chain(&error.without_url()).to_string())
        };
        let lasting = matches!(error, Error::Certificate(_));
        (error, lasting)
    }

    /// Reads a response of at most `limit` bytes.
    async fn read(
        &self,
        key: &str,
        limit: usize,
        answer: reqwest::Response,
    ) -> Result<Answer, (Error, bool)> {
        let status = answer.status();
        let headers = answer.headers().clone();
        let success = status.is_success() || status == StatusCode::PERMANENT_REDIRECT;
        let limit = if success { limit } else { MAX_ANSWER };
        let body = tokio::time::timeout(REQUEST_TIMEOUT, http::whole(answer, limit)).await;
        let body = match body {
            Ok(Ok(body)) => body,
            Ok(Err(Unread::Broken(error))) => return Err(self.broken(error)),
            Ok(Err(Unread::TooLong)) => return Err((too_long(&self.place, limit), true)),
            Err(_) => return Err((Error::Timeout(self.place.endpoint.clone()), false)),
        };
        if success {
            return Ok(Answer {
                status,
                headers,
                body,
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

/// The pause before the next attempt, after this number of failed attempts.
pub(super) fn backoff(failures: u32) -> Duration {
    Duration::from_millis(100) * 3_u32.pow(failures.clamp(1, 5) - 1)
}

pub(super) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(body)
        .map_err(|error| Error::Other(format!("unreadable response: {error}")))
}
