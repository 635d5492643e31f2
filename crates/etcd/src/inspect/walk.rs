//! Reads the revisions of a database file. Reads only the few pages that lead to the revisions, and does not verify the
//! other pages. In contrast, [`super::Inspector`] reads every byte of a snapshot.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::page::{self, Edge, Note, REVISION_KEY};
use super::{InspectError, LARGEST_PAGE, SMALLEST_PAGE};

/// The revisions that were found in a database file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revisions {
    /// The newest revision of a key.
    pub revision: i64,
    /// The compaction revision, 0 if etcd was never compacted.
    pub compacted: i64,
}

impl Revisions {
    /// Reads the revisions of a member's database, or of a snapshot that ends with its SHA-256. No process may write to
    /// the file during the call.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is not a complete database.
    pub fn of_file(file: &File) -> Result<Self, WalkError> {
        let walk = Walk::begin(file)?;
        let buckets = walk.note(walk.root)?;
        let compacted = match buckets.meta_root {
            Some(page) => match walk.page(page) {
                Ok(Edge::Noted(note)) => note.compacted.max(buckets.compacted),
                // If etcd was never compacted, this page contains no compaction revision. A damaged page is handled
                // like a page without a compaction revision.
                Ok(_) | Err(WalkError::Database(_)) => buckets.compacted,
                Err(error) => return Err(error),
            },
            None => buckets.compacted,
        };
        let revision = match buckets.key_root {
            None => buckets.inline_revision,
            Some(page) => walk.last_revision(page)?,
        };
        Ok(Self {
            revision,
            compacted,
        })
    }

    /// The revision of an etcd that starts from this database. See [`super::Inspected::store_revision`].
    pub fn store_revision(&self) -> i64 {
        self.revision.max(self.compacted).max(1)
    }
}

/// Why the revisions of a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum WalkError {
    /// The file cannot be read.
    #[error("the database cannot be read")]
    Read(#[from] io::Error),
    /// The file is not a complete database.
    #[error(transparent)]
    Database(#[from] InspectError),
}

struct Walk<'a> {
    file: &'a File,
    page_size: usize,
    root: u64,
}

impl<'a> Walk<'a> {
    /// Reads the meta pages. Of two valid meta pages, the page with the greater transaction number is current.
    fn begin(file: &'a File) -> Result<Self, WalkError> {
        let mut first = vec![0; SMALLEST_PAGE];
        read(file, 0, &mut first, 0)?;
        let first = page::meta(&first);
        let known = |size: &usize| (SMALLEST_PAGE..=LARGEST_PAGE).contains(size);
        let page_size = first.as_ref().map(|meta| meta.page_size).filter(known);
        let page_size = page_size.unwrap_or(SMALLEST_PAGE);
        let mut second = vec![0; page_size];
        read(file, page_size as u64, &mut second, 1)?;
        let last = [first, page::meta(&second)]
            .into_iter()
            .flatten()
            .max_by_key(|meta| meta.transaction);
        let root = last.ok_or(InspectError::NotADatabase)?.root;
        Ok(Self {
            file,
            page_size,
            root,
        })
    }

    fn page(&self, id: u64) -> Result<Edge, WalkError> {
        let broken = InspectError::Broken { page: id };
        let at = id.checked_mul(self.page_size as u64).ok_or(broken)?;
        let mut bytes = vec![0; self.page_size];
        read(self.file, at, &mut bytes, id)?;
        match page::read_page(&bytes, id) {
            None => Err(broken.into()),
            // The last key is in an overflow page, so a second read gets it from the file.
            Some(Edge::Overflow { offset }) => {
                let mut key = [0; REVISION_KEY];
                read(self.file, at.saturating_add(offset), &mut key, id)?;
                let revision = page::revision(&key).ok_or(broken)?;
                Ok(Edge::Leaf { revision })
            }
            Some(edge) => Ok(edge),
        }
    }

    fn note(&self, id: u64) -> Result<Note, WalkError> {
        match self.page(id)? {
            Edge::Noted(note) => Ok(note),
            _ => Err(InspectError::Broken { page: id }.into()),
        }
    }

    fn last_revision(&self, root: u64) -> Result<i64, WalkError> {
        /// Maximum depth of the tree. A deeper tree would have more pages than a file can contain.
        const MAX_DEPTH: usize = 64;
        let mut page = root;
        for _ in 0..MAX_DEPTH {
            match self.page(page)? {
                Edge::Branch { last_child } => page = last_child,
                Edge::Leaf { revision } => return Ok(revision),
                Edge::Noted(note) if note.empty => return Ok(0),
                Edge::Noted(_) | Edge::Overflow { .. } => break,
            }
        }
        Err(InspectError::Broken { page }.into())
    }
}

/// Fills `bytes` from the offset `at` of the file. Reports `page` as damaged if the file is too short.
fn read(file: &File, at: u64, bytes: &mut [u8], page: u64) -> Result<(), WalkError> {
    file.read_exact_at(bytes, at)
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => InspectError::Broken { page }.into(),
            _ => error.into(),
        })
}
