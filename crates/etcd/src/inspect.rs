//! Reads a snapshot as it streams by, in constant memory: its SHA-256 and the revision it holds.
//!
//! A snapshot is a bbolt file (pages of fixed size, little endian) followed by 32 bytes, the SHA-256 of the file.
//! The revision is the last key of the `key` bucket: the right edge of its tree. The pages come in file order, not
//! in tree order, and the file also holds pages that are free: old ones, and, since etcd goes on committing while
//! it sends, newer ones than the snapshot itself. So the greatest key seen is not good enough: for each page the few
//! bytes are kept that make the right edge walkable at the end (the last child of a branch, the last revision of a
//! leaf), of the leaves only those with the greatest revisions.
//!
//! No I/O here, and nothing is interpreted beyond the right edge.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use sha2::{Digest, Sha256};

use page::{Edge, KEYS_NOTED, Note, read_page};

mod page;
mod walk;

pub use walk::{Revisions, WalkError};

/// Bytes of the SHA-256 that follows the file.
const TRAILER: usize = 32;

/// etcd aligns its file to this; a length beyond it by 32 says that there is a trailer.
const ALIGNMENT: u64 = 512;

/// What a snapshot turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspected {
    /// Bytes in all, trailer included.
    pub size: u64,
    /// SHA-256 of all bytes, trailer included: what `sha256sum` says of the stored object.
    pub sha256: [u8; 32],
    /// Whether a trailer followed the file; if so, it matched.
    pub trailer: bool,
    /// The newest revision in the snapshot, as `etcdutl snapshot status` shows it.
    pub revision: i64,
    /// The revision the store was compacted at, 0 if never. It can lie above `revision` when the newest keys were
    /// deleted and compacted away; etcd counts on from the greater of both.
    pub compacted: i64,
}

impl Inspected {
    /// The revision an etcd that is started from it serves: that of an empty store is 1, and after a compaction
    /// etcd never counts from below it.
    pub fn store_revision(&self) -> i64 {
        self.revision.max(self.compacted).max(1)
    }
}

/// Why a stream is no whole snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InspectError {
    /// The SHA-256 at the end is not that of what was received: damaged on the way, or cut off.
    #[error("the snapshot's SHA-256 does not match what etcd sent with it")]
    ChecksumMismatch,
    /// Neither a whole number of sectors nor that and a checksum.
    #[error("the snapshot is cut off after {size} bytes")]
    Truncated {
        /// Bytes received.
        size: u64,
    },
    /// The first pages are not those of an etcd database.
    #[error("this is not an etcd database")]
    NotADatabase,
    /// The tree of keys cannot be followed.
    #[error("the database's tree of keys is broken at page {page}")]
    Broken {
        /// The page that should be there.
        page: u64,
    },
}

/// Takes a snapshot's bytes in order, in chunks of any size.
pub struct Inspector {
    size: u64,
    body: Sha256,
    /// The last bytes seen: file or trailer, known only at the end.
    held: Vec<u8>,
    pages: Pages,
}

impl Default for Inspector {
    fn default() -> Self {
        Self::new()
    }
}

impl Inspector {
    /// An inspector that has seen nothing.
    pub fn new() -> Self {
        Self {
            size: 0,
            body: Sha256::new(),
            held: Vec::with_capacity(2 * TRAILER),
            pages: Pages::new(),
        }
    }

    /// Bytes taken so far.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Takes the next bytes.
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

    /// Says what it was, once every byte was pushed.
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

/// A revision key that lies beyond its page's first page, in the overflow.
struct Pending {
    page: u64,
    /// From the beginning of the file.
    at: u64,
    bytes: Vec<u8>,
}

/// What is kept of the pages.
struct Pages {
    offset: u64,
    page_size: usize,
    buffer: Vec<u8>,
    /// Of the meta page with the greatest transaction: that and the root of all buckets.
    root: Option<(u64, u64)>,
    /// Branch pages in file order with their last child.
    branches: Vec<(u64, u64)>,
    /// Pages that hold buckets or the store's own marks, in file order.
    notes: Vec<(u64, Note)>,
    /// The leaves with the greatest last revisions.
    leaves: BinaryHeap<Reverse<(i64, u64)>>,
    pending: Vec<Pending>,
}

/// bbolt's smallest page is the operating system's.
const SMALLEST_PAGE: usize = 4096;
const LARGEST_PAGE: usize = 1 << 16;

/// Overflow keys waited for at a time; more than this only a forged file has.
const PENDING: usize = 4096;

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

    /// Bytes at the positions that overflow keys were announced at.
    fn serve_pending(&mut self, bytes: &[u8]) {
        let mut done = Vec::new();
        for (index, pending) in self.pending.iter_mut().enumerate() {
            pending.collect(self.offset, bytes);
            if pending.bytes.len() == KEYS_NOTED {
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

    /// One whole page is in the buffer; `later` are the bytes after it that are here already.
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
                    bytes: Vec::with_capacity(KEYS_NOTED),
                };
                let from = usize::try_from(offset)
                    .map_or(self.page_size, |offset| offset.min(self.page_size));
                pending.bytes.extend_from_slice(&self.buffer[from..]);
                pending.collect(self.offset, later);
                if pending.bytes.len() == KEYS_NOTED {
                    if let Some(revision) = page::revision(&pending.bytes) {
                        self.keep_leaf(id, revision);
                    }
                } else if self.pending.len() < PENDING {
                    self.pending.push(pending);
                }
            }
        }
    }

    fn keep_leaf(&mut self, page: u64, revision: i64) {
        /// 2 MiB. The right edge is lost only if etcd writes more leaves than this while it sends.
        const LEAVES: usize = 1 << 17;
        if self.leaves.len() == LEAVES {
            if let Some(Reverse((least, _))) = self.leaves.peek()
                && *least >= revision
            {
                return;
            }
            self.leaves.pop();
        }
        self.leaves.push(Reverse((revision, page)));
    }

    /// The last revision and the compacted one, from the root of the last transaction.
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
            // The bucket is small enough to lie within the root page.
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
        /// A tree this deep would have more pages than a file can hold.
        const DEPTH: usize = 64;
        let mut page = root;
        for _ in 0..DEPTH {
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
    /// Takes what it waits for from `bytes`, which begin at `offset` of the file.
    fn collect(&mut self, offset: u64, bytes: &[u8]) {
        let next = self.at + self.bytes.len() as u64;
        if self.bytes.len() < KEYS_NOTED && next >= offset {
            let skip = usize::try_from(next - offset).unwrap_or(usize::MAX);
            let wanted = KEYS_NOTED - self.bytes.len();
            self.bytes
                .extend(bytes.iter().skip(skip).take(wanted).copied());
        }
    }
}
