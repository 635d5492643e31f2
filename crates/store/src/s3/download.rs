//! An object of S3 to read.

use async_trait::async_trait;
use aws_sdk_s3::operation::get_object::GetObjectOutput;
use aws_sdk_s3::primitives::ByteStream;
use futures::StreamExt;
use futures::stream;

use super::S3Store;
use super::failure::explain;
use crate::failure::Place;
use crate::port::{Error, ObjectStream};
use crate::resume::{Body, Version, resumed};

struct S3Version {
    store: S3Store,
    key: String,
    tag: Option<String>,
}

/// Opens the object.
pub(super) async fn open(store: S3Store, key: String) -> Result<ObjectStream, Error> {
    let mut version = S3Version {
        store,
        key,
        tag: None,
    };
    let answer = version.request(0).await?;
    let size = answer
        .content_length()
        .and_then(|size| u64::try_from(size).ok())
        .ok_or_else(|| Error::Other("an object without a size".to_owned()))?;
    version.tag = answer.e_tag().map(str::to_owned);
    let body = body(answer.body, version.store.place.clone());
    Ok(resumed(version, size, Some(body)))
}

fn body(content: ByteStream, place: Place) -> Body {
    stream::unfold(content, |mut content| async move {
        content.next().await.map(|chunk| (chunk, content))
    })
    .map(move |chunk| chunk.map_err(|error| place.broken(&error)))
    .boxed()
}

impl S3Version {
    async fn request(&self, from: u64) -> Result<GetObjectOutput, Error> {
        // Only the very object that was begun may be continued.
        let range = (from > 0).then(|| format!("bytes={from}-"));
        self.store
            .client
            .get_object()
            .bucket(&self.store.place.bucket)
            .key(&self.key)
            .set_range(range)
            .set_if_match(self.tag.clone())
            .send()
            .await
            .map_err(|error| explain(&self.store.place, &self.key, &error))
    }
}

#[async_trait]
impl Version for S3Version {
    async fn body(&self, from: u64) -> Result<Body, Error> {
        let answer = self.request(from).await?;
        Ok(body(answer.body, self.store.place.clone()))
    }

    fn endpoint(&self) -> String {
        self.store.place.endpoint.clone()
    }
}
