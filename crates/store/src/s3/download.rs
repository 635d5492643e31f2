//! An object of S3 to read.

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
use crate::resume::{Body, First, PART, Version, read};

struct S3Version {
    store: S3Store,
    key: String,
    tag: Option<String>,
}

/// Opens the object, with its first part. A store that knows no parts answers with the whole.
pub(super) async fn open(store: S3Store, key: String) -> Result<ObjectStream, Error> {
    let mut version = S3Version {
        store,
        key,
        tag: None,
    };
    let answer = match version.request(Some(0..PART)).await {
        // There is no first byte of an empty object.
        Err(error) if is_out_of_range(&error) => version.request(None).await,
        // What may be replaced meanwhile is not put together from parts.
        Ok(answer) if answer.e_tag().is_none() => version.request(None).await,
        answer => answer,
    };
    let answer = answer.map_err(|error| version.explain(&error))?;
    let without = || Error::Other("an object without a size".to_owned());
    let length = answer
        .content_length()
        .and_then(|size| size.try_into().ok());
    let first = length.ok_or_else(without)?;
    let size = answer.content_range().map_or(Some(first), size_in);
    let size = size.ok_or_else(without)?;
    version.tag = answer.e_tag().map(str::to_owned);
    let first = First {
        size: first,
        body: body(answer.body, version.store.place.clone()),
    };
    Ok(read(version, size, Some(first)))
}

/// The size of the whole object, from `bytes 0-99/1234`.
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
            // Only the very object that was begun may be continued.
            .set_if_match(self.tag.clone())
            .send()
            .await
    }

    fn explain(&self, error: &SdkError<GetObjectError>) -> Error {
        explain(&self.store.place, &self.key, error)
    }
}

#[async_trait]
impl Version for S3Version {
    async fn body(&self, part: Range<u64>) -> Result<Body, Error> {
        let answer = self.request(Some(part)).await;
        let answer = answer.map_err(|error| self.explain(&error))?;
        Ok(body(answer.body, self.store.place.clone()))
    }

    fn endpoint(&self) -> String {
        self.store.place.endpoint.clone()
    }
}
