//! Accesses an S3 bucket without the operators.

use std::fs::File;
use std::io::{Read, Write as _};
use std::path::Path;

use anyhow::{Context, Result};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};

use crate::env::S3;

/// A bucket on the S3 server of the tests.
pub struct Bucket {
    client: Client,
    /// The name of the bucket.
    pub name: String,
}

impl Bucket {
    /// Creates the bucket if it does not exist.
    ///
    /// # Errors
    /// Fails if the server rejects a request.
    pub async fn create(s3: &S3, name: &str) -> Result<Self> {
        let config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .endpoint_url(&s3.endpoint)
            .region(Region::new(s3.region.clone()))
            .credentials_provider(Credentials::new(
                &s3.access_key,
                &s3.secret_key,
                None,
                None,
                "e2e",
            ))
            .force_path_style(true)
            .build();
        let client = Client::from_conf(config);
        if client.head_bucket().bucket(name).send().await.is_err() {
            client
                .create_bucket()
                .bucket(name)
                .send()
                .await
                .with_context(|| format!("create bucket {name} on {}", s3.endpoint))?;
        }
        Ok(Self {
            client,
            name: name.to_owned(),
        })
    }

    /// The first page of keys in the bucket, sorted. One page is enough, because tests store few objects.
    ///
    /// # Errors
    /// Fails if the server rejects the request.
    pub async fn keys(&self) -> Result<Vec<String>> {
        let page = self
            .client
            .list_objects_v2()
            .bucket(&self.name)
            .send()
            .await
            .context("list the bucket")?;
        Ok(page
            .contents()
            .iter()
            .filter_map(|object| object.key().map(str::to_owned))
            .collect())
    }

    /// All keys with this prefix, from all pages, and the sizes of the objects in bytes.
    ///
    /// # Errors
    /// Fails if the server rejects a request.
    pub async fn list(&self, prefix: &str) -> Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        let mut token = None;
        loop {
            let request = self.client.list_objects_v2().bucket(&self.name);
            let request = request.prefix(prefix).set_continuation_token(token);
            let page = request.send().await.context("list the bucket")?;
            for object in page.contents() {
                let size = object.size().and_then(|size| u64::try_from(size).ok());
                let key = object.key().context("an object without a key")?;
                found.push((key.to_owned(), size.unwrap_or_default()));
            }
            token = page.next_continuation_token().map(str::to_owned);
            if token.is_none() {
                return Ok(found);
            }
        }
    }

    /// Number of multipart uploads that were started, but neither completed nor aborted.
    ///
    /// # Errors
    /// Fails if the server rejects the request.
    pub async fn unfinished_uploads(&self) -> Result<usize> {
        let page = self
            .client
            .list_multipart_uploads()
            .bucket(&self.name)
            .send()
            .await
            .context("list the uploads")?;
        Ok(page.uploads().len())
    }

    /// Returns the content of an object.
    ///
    /// # Errors
    /// Fails if the object does not exist.
    pub async fn read(&self, key: &str) -> Result<Vec<u8>> {
        let object = self
            .client
            .get_object()
            .bucket(&self.name)
            .key(key)
            .send()
            .await
            .context("get object")?;
        Ok(object.body.collect().await?.to_vec())
    }

    /// Uploads the file `from` in parts, and stores it as the object `key`.
    ///
    /// # Errors
    /// Fails if the file cannot be read or the server rejects a request.
    pub async fn upload(&self, key: &str, from: &Path) -> Result<()> {
        const PART: u64 = 64 << 20;
        let (bucket, client) = (&self.name, &self.client);
        let begun = client.create_multipart_upload().bucket(bucket).key(key);
        let begun = begun.send().await.context("start the upload")?;
        let id = begun.upload_id().context("no upload ID")?;
        let mut file = File::open(from).with_context(|| from.display().to_string())?;
        let mut parts = CompletedMultipartUpload::builder();
        for number in 1.. {
            let mut content = Vec::new();
            Read::by_ref(&mut file)
                .take(PART)
                .read_to_end(&mut content)?;
            if content.is_empty() {
                break;
            }
            let part = client.upload_part().bucket(bucket).key(key).upload_id(id);
            let part = part.part_number(number).body(content.into()).send().await;
            let tag = part.context("upload a part")?.e_tag().map(str::to_owned);
            let part = CompletedPart::builder().part_number(number).set_e_tag(tag);
            parts = parts.parts(part.build());
        }
        let ended = client.complete_multipart_upload().bucket(bucket).key(key);
        let ended = ended.upload_id(id).multipart_upload(parts.build());
        ended.send().await.context("complete the upload").map(drop)
    }

    /// Downloads an object into the file `to`.
    ///
    /// # Errors
    /// Fails if the object does not exist or the file cannot be written.
    pub async fn download(&self, key: &str, to: &Path) -> Result<()> {
        let object = self.client.get_object().bucket(&self.name).key(key);
        let mut body = object.send().await.context("get object")?.body;
        let mut file = File::create(to).with_context(|| to.display().to_string())?;
        while let Some(chunk) = body.next().await {
            file.write_all(&chunk.context("the download of the object was interrupted")?)?;
        }
        Ok(())
    }

    /// Writes an object.
    ///
    /// # Errors
    /// Fails if the server rejects the request.
    pub async fn write(&self, key: &str, content: Vec<u8>) -> Result<()> {
        self.client
            .put_object()
            .bucket(&self.name)
            .key(key)
            .body(content.into())
            .send()
            .await
            .context("put object")?;
        Ok(())
    }
}
