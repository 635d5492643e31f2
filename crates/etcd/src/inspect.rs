//! Calculates the SHA-256 and the revision of a snapshot stream, in constant memory.
//!
//! A snapshot is a bbolt file (pages of fixed size, little endian), followed by the 32-byte SHA-256 of the file. The
//! bucket `key` is a tree of pages, in which each key is a revision. The revision of the snapshot is the last key, at
//! the right edge of the tree.
//!
//! Pages arrive in the order of the file, not in the order of the tree. The file also contains pages outside of the
//! tree: old pages, and pages that etcd writes while it sends the snapshot. Such pages may have higher revisions than
//! the snapshot.
//!
//! The inspector therefore keeps a few bytes of each page: the last child of each branch page, and the last revision of
//! the leaf pages with the highest revisions. At the end of the stream, the inspector follows the right edge of the
//! tree. This module performs no I/O.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use sha2::{Digest, Sha256};

use page::{Edge, Note, REVISION_KEY, read_page};

mod page;
mod walk;

pub use walk::{Revisions, WalkError};

/// Length in bytes of the SHA-256 that follows the database in a snapshot.
const TRAILER: usize = 32;

/// The length of a database file is a multiple of this number of bytes.
const ALIGNMENT: u64 = 512;

/// Result of the inspection of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspected {
    /// Size in bytes, including the SHA-256 at the end.
    pub size: u64,
    /// SHA-256 of all bytes, as `sha256sum` prints it for the stored object. The bytes include the SHA-256 at the end.
    pub sha256: [u8; 32],
    /// Whether the snapshot ends with a SHA-256, which then matches the content.
    pub trailer: bool,
    /// The newest revision in the snapshot, as `etcdutl snapshot status` reports it.
    pub revision: i64,
    /// The compaction revision, 0 if etcd was never compacted. If the newest keys were deleted and compacted,
    /// `compacted` is greater than `revision`, and etcd continues from `compacted`.
    pub compacted: i64,
}

impl Inspected {
    /// The revision of an etcd that starts from this snapshot: the greater of `revision` and `compacted`, but at least
    /// 1, the revision of an empty etcd.
    pub fn store_revision(&self) -> i64 {
        self.revision.max(self.compacted).max(1)
    }
}

/// Why a stream is not a complete snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InspectError {
    /// The SHA-256 at the end does not match the received bytes, because the stream was damaged or truncated.
    #[error("the snapshot's SHA-256 does not match the SHA-256 that etcd sent with it")]
    ChecksumMismatch,
    /// The length is neither a multiple of the sector size, nor 32 bytes (the SHA-256) more than such a multiple.
    #[error("the snapshot is truncated after {size} bytes")]
    Truncated {
        /// Number of bytes that were received.
        size: u64,
    },
    /// The first pages are not meta pages of an etcd database.
    #[error("this is not an etcd database")]
    NotADatabase,
    /// The tree of the keys in the database is damaged.
    #[error("the database's tree of keys is broken at page {page}")]
    Broken {
        /// The missing or damaged page.
        page: u64,
    },
}

/// Inspects the bytes of a snapshot, in order and in chunks of any size.
pub struct Inspector {
    size: u64,
    body: Sha256,
    /// The last received bytes. Only at the end of the stream is it known whether they are the SHA-256 or belong to the
    /// file.
    held: Vec<u8>,
    pages: Pages,
}

impl Default for Inspector {
    fn default() -> Self {
        Self::new()
    }
}

impl Inspector {
    /// Creates an inspector for a new snapshot.
    pub fn new() -> Self {
        Self {
            size: 0,
            body: Sha256::new(),
            held: Vec::with_capacity(2 * TRAILER),
            pages: Pages::new(),
        }
    }

    /// Number of bytes received so far.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Adds the next bytes of the snapshot.
    pub fn push(&mut self, chunk: &[u8]) {
        self.size += chunk.len() as u64;
        if chunk.len() >= TRAILER {
            let held = std::mem::take(&mut self.held);
            self.take(&held);
            let (sure, tail) = chunk.split_at(chunk.len() - TRAILER);
            self.take(sure);
            self.held.extend_from_slice(tail);
        } else {
            self.held.extend_from_slice(chunk);
            if self.held.len() > TRAILER {
                let tail = self.held.split_off(self.held.len() - TRAILER);
                let sure = std::mem::replace(&mut self.held, tail);
                self.take(&sure);
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.body.update(bytes);
        self.pages.push(bytes);
    }

    /// Returns the result. Call this function after the last byte.
    ///
    /// # Errors
    /// Fails if the stream is not a complete snapshot.
    pub fn finish(mut self) -> Result<Inspected, InspectError> {
        let beyond = self.size % ALIGNMENT;
        let trailer = beyond == TRAILER as u64;
        if self.size == 0 || (beyond != 0 && !trailer) {
            return Err(InspectError::Truncated { size: self.size });
        }
        if trailer && self.body.clone().finalize().as_slice() != self.held {
            return Err(InspectError::ChecksumMismatch);
        }
        let held = std::mem::take(&mut self.held);
        self.body.update(&held);
        if !trailer {
            self.pages.push(&held);
        }
        let (revision, compacted) = self.pages.right_edge()?;
        Ok(Inspected {
            size: self.size,
            sha256: self.body.finalize().into(),
            trailer,
            revision,
            compacted,
        })
    }
}

/// A revision key that is in the overflow pages of a page, and therefore arrives after the page.
struct Pending {
    page: u64,
    /// Offset of the key from the start of the file.
    at: u64,
    bytes: Vec<u8>,
}

/// The parts of the pages that the inspector keeps.
struct Pages {
    offset: u64,
    page_size: usize,
    buffer: Vec<u8>,
    /// Transaction number and root page of the bucket tree, from the meta page with the higher transaction number.
    root: Option<(u64, u64)>,
    /// The branch pages, each with its last child, in the order of the file.
    branches: Vec<(u64, u64)>,
    /// The pages that list buckets or contain compaction revisions, in the order of the file.
    notes: Vec<(u64, Note)>,
    /// Leaf pages as (last revision, page number). Only the `MAX_LEAVES` pages with the highest revisions are kept.
    leaves: BinaryHeap<Reverse<(i64, u64)>>,
    pending: Vec<Pending>,
}

/// The minimum and maximum page size in bytes. bbolt uses the page size of the operating system.
const SMALLEST_PAGE: usize = 4096;
const LARGEST_PAGE: usize = 1 << 16;

/// Maximum number of pending keys. Only a forged file has more.
const MAX_PENDING: usize = 4096;

impl Pages {
    fn new() -> Self {
        Self {
            offset: 0,
            page_size: SMALLEST_PAGE,
            buffer: Vec::with_capacity(SMALLEST_PAGE),
            root: None,
            branches: Vec::new(),
            notes: Vec::new(),
            leaves: BinaryHeap::new(),
            pending: Vec::new(),
        }
    }

    fn push(&mut self, mut bytes: &[u8]) {
        self.serve_pending(bytes);
        while !bytes.is_empty() {
            let wanted = self.page_size - self.buffer.len();
            let (now, later) = bytes.split_at(wanted.min(bytes.len()));
            self.buffer.extend_from_slice(now);
            self.offset += now.len() as u64;
            bytes = later;
            if self.offset == SMALLEST_PAGE as u64
                && let Some(meta) = page::meta(&self.buffer)
                && (SMALLEST_PAGE..=LARGEST_PAGE).contains(&meta.page_size)
            {
                self.page_size = meta.page_size;
            }
            if self.buffer.len() == self.page_size {
                self.page(later);
                self.buffer.clear();
            }
        }
    }

    /// Copies the missing parts of pending keys from `bytes`, and processes the keys that become complete.
    fn serve_pending(&mut self, bytes: &[u8]) {
        let mut done = Vec::new();
        for (index, pending) in self.pending.iter_mut().enumerate() {
            pending.collect(self.offset, bytes);
            if pending.bytes.len() == REVISION_KEY {
                done.push(index);
            }
        }
        for index in done.into_iter().rev() {
            let pending = self.pending.swap_remove(index);
            if let Some(revision) = page::revision(&pending.bytes) {
                self.keep_leaf(pending.page, revision);
            }
        }
    }

    /// Processes the complete page in the buffer. `later` contains the bytes that have arrived after the page.
    fn page(&mut self, later: &[u8]) {
        let id = self.offset / self.page_size as u64 - 1;
        if id < 2 {
            if let Some(meta) = page::meta(&self.buffer)
                && self
                    .root
                    .is_none_or(|(transaction, _)| meta.transaction > transaction)
            {
                self.root = Some((meta.transaction, meta.root));
            }
            return;
        }
        match read_page(&self.buffer, id) {
            None => {}
            Some(Edge::Branch { last_child }) => self.branches.push((id, last_child)),
            Some(Edge::Leaf { revision }) => self.keep_leaf(id, revision),
            Some(Edge::Noted(note)) => self.notes.push((id, note)),
            Some(Edge::Overflow { offset }) => {
                let mut pending = Pending {
                    page: id,
                    at: id * self.page_size as u64 + offset,
                    bytes: Vec::with_capacity(REVISION_KEY),
                };
                let from = usize::try_from(offset)
                    .map_or(self.page_size, |offset| offset.min(self.page_size));
                pending.bytes.extend_from_slice(&self.buffer[from..]);
                pending.collect(self.offset, later);
                if pending.bytes.len() == REVISION_KEY {
                    if let Some(revision) = page::revision(&pending.bytes) {
                        self.keep_leaf(id, revision);
                    }
                } else if self.pending.len() < MAX_PENDING {
                    self.pending.push(pending);
                }
            }
        }
    }

    fn keep_leaf(&mut self, page: u64, revision: i64) {
        /// Maximum number of leaf pages that are kept (2 MiB of memory). The inspector loses the right edge of the tree
        /// only if etcd writes more leaf pages than this number while it sends the snapshot.
        const MAX_LEAVES: usize = 1 << 17;
        if self.leaves.len() == MAX_LEAVES {
            if let Some(Reverse((least, _))) = self.leaves.peek()
                && *least >= revision
            {
                return;
            }
            self.leaves.pop();
        }
        self.leaves.push(Reverse((revision, page)));
    }

    /// Returns the last revision and the compaction revision, from the tree of the last transaction.
    fn right_edge(&self) -> Result<(i64, i64), InspectError> {
        let (_, root) = self.root.ok_or(InspectError::NotADatabase)?;
        let buckets = self.note(root).ok_or(InspectError::Broken { page: root })?;
        let compacted = match buckets.meta_root {
            Some(page) => self.note(page).map_or(buckets.compacted, |note| {
                note.compacted.max(buckets.compacted)
            }),
            None => buckets.compacted,
        };
        let revision = match buckets.key_root {
            // If `key_root` is `None`, bbolt has stored the bucket `key` inside the root page. Its last revision is
            // then in `buckets`.
            None => buckets.inline_revision,
            Some(page) => self.last_revision(page)?,
        };
        Ok((revision, compacted))
    }

    fn note(&self, page: u64) -> Option<&Note> {
        let index = self.notes.binary_search_by_key(&page, |(id, _)| *id).ok()?;
        Some(&self.notes.get(index)?.1)
    }

    fn last_revision(&self, root: u64) -> Result<i64, InspectError> {
        /// Maximum depth of the tree. A deeper tree would have more pages than a file can contain.
        const MAX_DEPTH: usize = 64;
        let mut page = root;
        for _ in 0..MAX_DEPTH {
            let branch = self.branches.binary_search_by_key(&page, |(id, _)| *id);
            let Ok(index) = branch else {
                return self.leaf_revision(page);
            };
            page = self.branches[index].1;
        }
        Err(InspectError::Broken { page })
    }

    fn leaf_revision(&self, page: u64) -> Result<i64, InspectError> {
        let kept = self.leaves.iter().find(|Reverse((_, id))| *id == page);
        match (kept, self.note(page)) {
            (Some(Reverse((revision, _))), _) => Ok(*revision),
            (None, Some(note)) if note.empty => Ok(0),
            _ => Err(InspectError::Broken { page }),
        }
    }
}

impl Pending {
    /// Copies the missing bytes of the key from `bytes`. `offset` is the position of `bytes` in the file.
    fn collect(&mut self, offset: u64, bytes: &[u8]) {
        let next = self.at + self.bytes.len() as u64;
        if self.bytes.len() < REVISION_KEY && next >= offset {
            let skip = usize::try_from(next - offset).unwrap_or(usize::MAX);
            let wanted = REVISION_KEY - self.bytes.len();
            self.bytes
                .extend(bytes.iter().skip(skip).take(wanted).copied());
        }
    }
}
