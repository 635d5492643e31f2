//! Reads an object from S3.

use std::ops::Range;

use async_trait::async_trait;
use aws_sdk_s3::error::SdkError;
use aws_sdk_s3::operation::get_object::{GetObjectError, GetObjectOutput};
use aws_sdk_s3::primitives::ByteStream;
use futures::StreamExt;
use futures::stream;

use super::S3Store;
use super::failure::explain;
use crate::failure::Place;
use crate::port::{Error, ObjectStream};
use crate::resume::{Body, First, PART, Version, check_range, read};

struct S3Version {
    store: S3Store,
    key: String,
    tag: Option<String>,
}

/// Opens an object by requesting its first part. A store that ignores ranges responds with the whole object.
pub(super) async fn open(store: S3Store, key: String) -> Result<ObjectStream, Error> {
    let mut version = S3Version {
        store,
        key,
        tag: None,
    };
    let mut answer = version.request(Some(0..PART)).await;
    let in_one = match &answer {
        // An empty object has no first part, so the store rejects the range, and the object is requested again
        // without a range.
        Err(error) => is_out_of_range(error),
        // Without an entity tag, the replacement of the object between two parts would not be detected. Without a size,
        // the last part would be unknown. If the entity tag or the size is missing, the whole object is requested with
        // a second request without a range.
        Ok(answer) => tag(answer).is_none() || size(answer).is_none(),
    };
    if in_one {
        answer = version.request(None).await;
    }
    let answer = answer.map_err(|error| version.explain(&error))?;
    let first = length(&answer);
    let size = if in_one { first } else { size(&answer) };
    let (Some(first), Some(size)) = (first, size) else {
        return Err(Error::Other("the object has no size".to_owned()));
    };
    // The first part is read into memory, so its response must not be longer than requested. A response with the
    // whole object is allowed, because it is read as a stream.
    if first > PART && first < size {
        return Err(Error::Other(format!(
            "the response has {first} bytes, but {PART} of the object's {size} bytes were requested"
        )));
    }
    version.tag = tag(&answer).map(str::to_owned);
    let first = First {
        size: first,
        body: body(answer.body, version.store.place.clone()),
    };
    Ok(read(version, size, Some(first)))
}

/// The entity tag of the version. Ignores a weak tag, because it does not identify the bytes.
fn tag(answer: &GetObjectOutput) -> Option<&str> {
    answer.e_tag().filter(|tag| !tag.starts_with("W/"))
}

/// Size of the response body in bytes.
fn length(answer: &GetObjectOutput) -> Option<u64> {
    answer.content_length()?.try_into().ok()
}

/// The size of the whole object in bytes, from the response to the first request. `None` if the response has no content
/// range and the length of exactly one part, because the object may be longer.
fn size(answer: &GetObjectOutput) -> Option<u64> {
    match answer.content_range() {
        Some(range) => size_in(range),
        None => length(answer).filter(|length| *length != PART),
    }
}

/// The size of the whole object, from a content range such as `bytes 8-99/1234`.
fn size_in(content_range: &str) -> Option<u64> {
    content_range.rsplit_once('/')?.1.parse().ok()
}

fn is_out_of_range(error: &SdkError<GetObjectError>) -> bool {
    let answer = error.raw_response();
    answer.is_some_and(|answer| answer.status().as_u16() == 416)
}

fn body(content: ByteStream, place: Place) -> Body {
    stream::unfold(content, |mut content| async move {
        content.next().await.map(|chunk| (chunk, content))
    })
    .map(move |chunk| chunk.map_err(|error| place.broken(&error)))
    .boxed()
}

impl S3Version {
    async fn request(
        &self,
        part: Option<Range<u64>>,
    ) -> Result<GetObjectOutput, SdkError<GetObjectError>> {
        let range = part.map(|part| format!("bytes={}-{}", part.start, part.end.saturating_sub(1)));
        self.store
            .client
            .get_object()
            .bucket(&self.store.place.bucket)
            .key(&self.key)
            .set_range(range)
            // All parts must come from the same version of the object.
            .set_if_match(self.tag.clone())
            .send()
            .await
    }

    /// Fails if the response is not the requested range of this version, because some stores ignore `If-Match`, and
    /// some proxies ignore ranges.
    fn check(&self, answer: &GetObjectOutput, part: &Range<u64>) -> Result<(), Error> {
        let (expected, found) = (self.tag.as_deref(), tag(answer));
        if expected.is_some() && found.is_some() && expected != found {
            return Err(Error::Other(
                "the object was replaced during the download".to_owned(),
            ));
        }
        check_range(answer.content_range(), length(answer), part)
    }

    fn explain(&self, error: &SdkError<GetObjectError>) -> Error {
        explain(&self.store.place, &self.key, error)
    }
}

#[async_trait]
impl Version for S3Version {
    async fn body(&self, part: Range<u64>) -> Result<Body, Error> {
        let answer = self.request(Some(part.clone())).await;
        let answer = answer.map_err(|error| self.explain(&error))?;
        self.check(&answer, &part)?;
        Ok(body(answer.body, self.store.place.clone()))
    }

    fn endpoint(&self) -> String {
        self.store.place.endpoint.clone()
    }
}
