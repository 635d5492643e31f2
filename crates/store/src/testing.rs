//! Starts real object stores for tests, and contains the conformance test for stores.
//!
//! For tests only.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::missing_panics_doc
)]

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures::TryStreamExt;

use crate::limits::TEST_TIMEOUT;
use crate::{Error, Object, Store};

mod servers;

pub use servers::{
    ACCESS_KEY, ACCOUNT, ACCOUNT_KEY, AzureServer, GoogleServer, S3Server, SECRET_KEY,
};

/// Runs `work` with `timeout` as the time limit for each listing.
pub async fn with_listing_timeout<T>(timeout: Duration, work: impl Future<Output = T>) -> T {
    TEST_TIMEOUT.scope(timeout, work).await
}

/// Pseudorandom bytes, so that a test detects a part at a wrong offset.
pub fn content(size: usize) -> Bytes {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes.into()
}

/// Uploads an object in chunks of `chunk` bytes.
pub async fn upload(
    store: &dyn Store,
    key: &str,
    content: &Bytes,
    chunk: usize,
) -> Result<u64, Error> {
    let mut upload = store.begin(key).await?;
    let mut rest = content.clone();
    while !rest.is_empty() {
        upload.write(rest.split_to(chunk.min(rest.len()))).await?;
    }
    upload.commit().await.map(|committed| committed.size)
}

/// Downloads a whole object.
pub async fn download(store: &dyn Store, key: &str) -> Result<Bytes, Error> {
    let stream = store.get(key).await?;
    let chunks: Vec<Bytes> = stream.chunks.try_collect().await?;
    let whole: Bytes = chunks.concat().into();
    assert_eq!(
        whole.len() as u64,
        stream.size,
        "the reported size of {key} differs from the size of its content"
    );
    Ok(whole)
}

/// How the unfinished uploads of a process that has ended are removed from a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leftovers {
    /// The store lists unfinished uploads, so the operator can remove them.
    Removable,
    /// The store does not list unfinished uploads, and removes them after some time.
    Expiring,
}

/// The conformance test, which every store must pass.
pub async fn conforms(store: &dyn Store, leftovers: Leftovers) {
    missing_objects_are_reported(store).await;
    objects_round_trip(store).await;
    concurrent_replacement_does_not_mix_content(store).await;
    upload_is_invisible_before_commit(store).await;
    discards_uploads_of_dead_process(store, leftovers).await;
    listing_returns_all_pages(store).await;
    special_characters_in_keys_are_kept(store).await;
}

/// For a missing object, `get` fails with [`Error::NoSuchObject`], `head` returns `None`, and `delete` succeeds.
async fn missing_objects_are_reported(store: &dyn Store) {
    assert_eq!(store.head("a/nothing").await.unwrap(), None);
    assert_eq!(store.list("").await.unwrap(), []);
    store.delete("a/nothing").await.unwrap();
    let missing = store.get("a/nothing").await.err();
    assert!(
        matches!(missing, Some(Error::NoSuchObject { .. })),
        "{missing:?}"
    );
}

/// Objects of many sizes are read back unchanged, also if the object replaces another object.
async fn objects_round_trip(store: &dyn Store) {
    for size in [
        0,
        1,
        1000,
        5 << 20,
        (6 << 20) - 1,
        6 << 20,
        (6 << 20) + 1,
        8 << 20,
        (8 << 20) + 1,
        27_000_001,
        32 << 20,
    ] {
        let content = content(size);
        let stored = upload(store, "a/b/object", &content, 300_007)
            .await
            .unwrap();
        assert_eq!(stored, size as u64);
        let found = store.head("a/b/object").await.unwrap().unwrap();
        assert_eq!(
            (found.size, found.key.as_str()),
            (size as u64, "a/b/object")
        );
        assert!(found.modified_unix_seconds.is_some());
        assert!(
            download(store, "a/b/object").await.unwrap() == content,
            "the content of the object with {size} bytes differs"
        );
    }
    store.put("a/b/small", content(70)).await.unwrap();
    assert_eq!(download(store, "a/b/small").await.unwrap(), content(70));
}

/// An object that is larger than the read buffer is replaced while it is read. The read must return the old content or
/// an error.
async fn concurrent_replacement_does_not_mix_content(store: &dyn Store) {
    let before = content(80 << 20);
    let after: Bytes = before.iter().map(|byte| !byte).collect();
    upload(store, "a/replaced", &before, 1 << 20).await.unwrap();
    let mut object = store.get("a/replaced").await.unwrap();
    let mut read = object.chunks.try_next().await.unwrap().unwrap().to_vec();
    upload(store, "a/replaced", &after, 1 << 20).await.unwrap();
    let outcome = loop {
        match object.chunks.try_next().await {
            Ok(Some(chunk)) => read.extend_from_slice(&chunk),
            other => break other,
        }
    };
    assert!(
        before.starts_with(&read),
        "{} bytes mix old and new content",
        read.len()
    );
    assert!(
        outcome.is_err() || read.len() == before.len(),
        "the read ended before the whole object was received"
    );
    store.delete("a/replaced").await.unwrap();
}

/// An upload that is not committed creates no object and changes no existing object, even after it is aborted or
/// dropped.
async fn upload_is_invisible_before_commit(store: &dyn Store) {
    for abort in [true, false] {
        let mut replaced = store.begin("a/b/small").await.unwrap();
        let mut new = store.begin("a/b/new").await.unwrap();
        for _ in 0..20 {
            replaced.write(content(1 << 20)).await.unwrap();
            new.write(content(1 << 20)).await.unwrap();
        }
        assert_eq!(store.head("a/b/new").await.unwrap(), None);
        assert_eq!(store.head("a/b/small").await.unwrap().unwrap().size, 70);
        if abort {
            replaced.abort().await.unwrap();
            new.abort().await.unwrap();
        }
    }
    assert_eq!(store.head("a/b/new").await.unwrap(), None);
    assert_eq!(download(store, "a/b/small").await.unwrap(), content(70));
    assert_eq!(
        keys(store.list("a/b/").await.unwrap()),
        ["a/b/object", "a/b/small"]
    );
}

/// `discard_unfinished` discards an upload only if its key is exactly the given key and if it started before the given
/// time.
async fn discards_uploads_of_dead_process(store: &dyn Store, leftovers: Leftovers) {
    let mut left = Vec::new();
    for key in ["a/b/left", "a/b/left-other"] {
        let mut upload = store.begin(key).await.unwrap();
        for _ in 0..20 {
            upload.write(content(1 << 20)).await.unwrap();
        }
        left.push(upload);
    }
    store
        .discard_unfinished("a/b/left", 1_000_000_000)
        .await
        .unwrap();
    let mut seen: Vec<String> = store
        .unfinished("a/b/left")
        .await
        .unwrap()
        .into_iter()
        .map(|unfinished| unfinished.key)
        .collect();
    seen.sort();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_secs()).unwrap();
    store.discard_unfinished("a/b/left", now).await.unwrap();
    let other = left.pop().unwrap().commit().await.unwrap();
    assert_eq!(other.size, 20 << 20);
    let left = left.pop().unwrap();
    match leftovers {
        Leftovers::Removable => {
            assert_eq!(seen, ["a/b/left", "a/b/left-other"]);
            assert!(left.commit().await.is_err(), "the upload was not discarded");
        }
        Leftovers::Expiring => {
            assert_eq!(seen, Vec::<String>::new());
            left.abort().await.unwrap();
        }
    }
    assert_eq!(store.head("a/b/left").await.unwrap(), None);
    store.delete("a/b/left-other").await.unwrap();
    store
        .discard_unfinished("a/b/nothing", 4_000_000_000)
        .await
        .unwrap();
}

/// A listing returns all pages, and only keys with the prefix.
async fn listing_returns_all_pages(store: &dyn Store) {
    for index in 0..1005 {
        store
            .put(&format!("many/{index:04}"), content(1))
            .await
            .unwrap();
    }
    store.put("many-others", content(1)).await.unwrap();
    let expected: Vec<String> = (0..1005).map(|index| format!("many/{index:04}")).collect();
    assert_eq!(keys(store.list("many/").await.unwrap()), expected);
    assert_eq!(store.list("many").await.unwrap().len(), 1006);
    assert_eq!(
        keys(store.list("a/b/").await.unwrap()),
        ["a/b/object", "a/b/small"]
    );
    store.delete("many/0007").await.unwrap();
    assert_eq!(store.list("many/").await.unwrap().len(), 1004);
}

/// Keys with special characters of URLs are read back unchanged.
async fn special_characters_in_keys_are_kept(store: &dyn Store) {
    for key in [
        "odd/a b+c",
        "odd/100%",
        "odd/a%2Fb",
        "odd/q?x=1&y#z",
        "odd/ü",
    ] {
        let content = content(key.len());
        assert_eq!(
            upload(store, key, &content, 10).await.unwrap(),
            key.len() as u64
        );
        assert_eq!(store.head(key).await.unwrap().unwrap().key, key);
        assert_eq!(download(store, key).await.unwrap(), content, "{key}");
        assert_eq!(keys(store.list(key).await.unwrap()), [key]);
        store.delete(key).await.unwrap();
        assert_eq!(store.head(key).await.unwrap(), None, "{key}");
    }
}

fn keys(objects: Vec<Object>) -> Vec<String> {
    objects.into_iter().map(|object| object.key).collect()
}
