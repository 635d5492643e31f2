//! Limits for responses and listings. Users choose the endpoints of EtcdBackups and EtcdRestores, so a server may send
//! endless responses or listings. The content of an object is read as a stream and has no limit here.

use std::collections::HashSet;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::Duration;

use crate::failure::Place;
use crate::port::Error;

/// Maximum size in bytes of one page of a listing. A page with 1,000 keys of the maximum length has 7 MiB of escaped
/// XML.
pub(crate) const MAX_PAGE: usize = 16 << 20;

/// Maximum size in bytes of responses that are read completely and are not listings, such as errors, properties and
/// results of writes. The known services send a few KiB.
pub(crate) const MAX_ANSWER: usize = 1 << 20;

/// The size limit counts each received chunk as at least this number of bytes. Even a chunk of one byte costs memory
/// and time.
pub(crate) const MIN_CHUNK: usize = 64;

/// Maximum number of entries in one page. S3 and Google send up to 1,000 entries, and Azure up to 5,000.
pub(crate) const MAX_PAGE_ENTRIES: usize = 10_000;

/// Maximum number of entries in a listing.
pub(crate) const MAX_ENTRIES: usize = 100_000;

/// Maximum size in bytes of all keys and identifiers of a listing. Allows 120 bytes for each of [`MAX_ENTRIES`].
const MAX_TEXT: usize = 12 << 20;

/// Maximum number of pages in a listing. Azure may send empty pages.
const MAX_PAGES: usize = 1_000;

/// Maximum length in bytes of the marker for the next page, which becomes a part of the next URL. The known services
/// send at most a few KiB.
const MAX_MARKER: usize = 16 << 10;

/// Maximum duration of a listing. One page takes less than a second.
const LISTING_TIMEOUT: Duration = Duration::from_mins(2);

#[cfg(feature = "testing")]
tokio::task_local! {
    /// Replaces [`LISTING_TIMEOUT`] within an async task of a test.
    pub(crate) static TEST_TIMEOUT: Duration;
}

#[cfg(feature = "testing")]
fn listing_timeout() -> Duration {
    let other = TEST_TIMEOUT.try_with(|timeout| *timeout);
    other.unwrap_or(LISTING_TIMEOUT)
}

#[cfg(not(feature = "testing"))]
fn listing_timeout() -> Duration {
    LISTING_TIMEOUT
}

pub(crate) struct Listing<'a, T> {
    place: &'a Place,
    prefix: &'a str,
    entries: Vec<T>,
    text: usize,
    pages: usize,
    /// Hashes of the markers of all pages. If a marker occurs again, the store repeats a page.
    markers: HashSet<u64>,
    hasher: RandomState,
}

impl<'a, T> Listing<'a, T> {
    pub(crate) fn new(place: &'a Place, prefix: &'a str) -> Self {
        Self {
            place,
            prefix,
            entries: Vec::new(),
            text: 0,
            pages: 0,
            markers: HashSet::new(),
            hasher: RandomState::new(),
        }
    }

    /// Adds an entry whose keys and identifiers have `text` bytes.
    ///
    /// # Errors
    /// Fails if the listing has too many entries, or if their keys and identifiers are too long.
    pub(crate) fn push(&mut self, entry: T, text: usize) -> Result<(), Error> {
        self.text = self.text.saturating_add(text);
        if self.entries.len() >= MAX_ENTRIES || self.text > MAX_TEXT {
            return Err(too_many_entries(self.place, self.prefix));
        }
        self.entries.push(entry);
        Ok(())
    }

    /// Continues with the page after `marker`.
    ///
    /// Fails if the listing has too many pages or repeats a page, or if `marker` is too long.
    pub(crate) fn advance(&mut self, marker: &str) -> Result<(), Error> {
        self.pages += 1;
        if marker.len() > MAX_MARKER {
            return Err(self.place.excessive(format!(
                "sends a page marker of more than {MAX_MARKER} bytes: check that the endpoint is an object store"
            )));
        }
        if self.pages >= MAX_PAGES {
            return Err(self.place.excessive(format!(
                "lists the objects {:?} in more than {MAX_PAGES} pages: check that the endpoint is an object store",
                self.prefix
            )));
        }
        if !self.markers.insert(self.hasher.hash_one(marker)) {
            return Err(self.place.excessive(format!(
                "repeats a page of the listing of {:?}: check the endpoint, and report the defect to the store's provider",
                self.prefix
            )));
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> Vec<T> {
        self.entries
    }
}

/// The error for a listing with more than [`MAX_ENTRIES`] entries, or with more than [`MAX_TEXT`] bytes of names.
pub(crate) fn too_many_entries(place: &Place, prefix: &str) -> Error {
    place.excessive(format!(
        "has more than {MAX_ENTRIES} objects whose names begin with {prefix:?}, or the names of these objects are too \
         long: delete old backups, or use another path"
    ))
}

/// The error for a response with more than `limit` bytes.
pub(crate) fn too_long(place: &Place, limit: usize) -> Error {
    place.excessive(format!(
        "sends a response of more than {} MiB: check that the endpoint is an object store",
        limit >> 20
    ))
}

/// Runs a listing. Fails if it takes longer than [`LISTING_TIMEOUT`].
pub(crate) async fn within<T>(
    place: &Place,
    prefix: &str,
    listing: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let limit = listing_timeout();
    tokio::time::timeout(limit, listing)
        .await
        .unwrap_or_else(|_| {
            Err(place.excessive(format!(
                "did not end the listing of {prefix:?} within {} s: check the store and the network, or use another path",
                limit.as_secs_f32()
            )))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        Place {
            bucket: "b".into(),
            endpoint: "http://store".into(),
        }
    }

    #[test]
    fn hostile_store_listing_is_limited_by_entries_and_text() {
        let place = place();
        let mut listing = Listing::new(&place, "p");
        for entry in 0..MAX_ENTRIES {
            listing.push(entry, 120).unwrap();
        }
        let error = listing.push(0, 0).unwrap_err().to_string();
        assert!(
            error.contains("http://store has more than 100000"),
            "{error}"
        );
        assert_eq!(listing.finish().len(), MAX_ENTRIES);

        let mut listing = Listing::new(&place, "p");
        let keys = (0..MAX_ENTRIES).map(|entry| listing.push(entry, 1024));
        assert_eq!(keys.take_while(Result::is_ok).count(), MAX_TEXT / 1024);
    }

    #[test]
    fn hostile_store_listing_is_limited_by_pages_and_markers() {
        let place = place();
        let mut listing = Listing::<()>::new(&place, "p");
        let pages = (0..).map(|page| listing.advance(&page.to_string()));
        assert_eq!(pages.take_while(Result::is_ok).count(), MAX_PAGES - 1);

        // `advance` detects a repeated marker even after other markers.
        let mut listing = Listing::<()>::new(&place, "p");
        for marker in ["a", "b", "c"] {
            listing.advance(marker).unwrap();
        }
        let error = listing.advance("a").unwrap_err().to_string();
        assert!(error.contains("repeats a page"), "{error}");
        assert!(listing.advance(&"x".repeat(MAX_MARKER + 1)).is_err());
    }
}
