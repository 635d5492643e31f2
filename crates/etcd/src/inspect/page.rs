//! Parses the fields of a bbolt page that are needed to follow the right edge of the key tree. Performs no I/O.

/// Size of a page header in bytes: ID, flags, count and overflow.
const HEADER: usize = 16;
/// Size in bytes of the header of an element in a leaf or branch page.
const ELEMENT: usize = 16;
/// Number of bytes of a revision key that are kept: 8 bytes, `_`, 8 bytes. The `t` at the end of the key of a deletion
/// is not kept.
pub(super) const REVISION_KEY: usize = 17;

const BRANCH: u16 = 0x01;
const LEAF: u16 = 0x02;
const META: u16 = 0x04;
const MAGIC: u32 = 0xED0C_DAED;
const BUCKET: u32 = 0x01;

/// The content of a page that is needed to follow the right edge of the tree.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Edge {
    /// An inner page of a tree.
    Branch { last_child: u64 },
    /// A leaf page of the key tree, with the last revision in it.
    Leaf { revision: i64 },
    /// A page whose last key is in its overflow pages, at this offset from the start of the page.
    Overflow { offset: u64 },
    /// A page that lists buckets or contains compaction revisions, or an empty page.
    Noted(Note),
}

/// The root pages of buckets and the compaction revision in a page.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Note {
    /// The root page of the bucket `key`. `None` if the bucket is inlined or is not in this page.
    pub(super) key_root: Option<u64>,
    /// The last revision of the bucket `key` if it is inlined.
    pub(super) inline_revision: i64,
    /// The root page of the bucket `meta`. `None` if the bucket is inlined or is not in this page.
    pub(super) meta_root: Option<u64>,
    /// The greater of the scheduled and the finished compaction revision.
    pub(super) compacted: i64,
    /// Whether the page is a leaf without elements.
    pub(super) empty: bool,
}

/// A meta page with a valid checksum.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Meta {
    pub(super) page_size: usize,
    pub(super) root: u64,
    pub(super) transaction: u64,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// The main revision in a key. `None` if the bytes are not a revision. Both numbers of a revision start with a zero
/// byte, unlike a text key whose ninth byte is `_`.
pub(super) fn revision(key: &[u8]) -> Option<i64> {
    if key.len() < REVISION_KEY || key[8] != b'_' || key[0] != 0 || key[9] != 0 {
        return None;
    }
    Some(i64::from_be_bytes(key[..8].try_into().ok()?))
}

/// Parses a meta page. `None` if the page is not a valid meta page.
pub(super) fn meta(page: &[u8]) -> Option<Meta> {
    const CHECKSUM: usize = HEADER + 56;
    if u16_at(page, 8)? != META || u32_at(page, HEADER)? != MAGIC {
        return None;
    }
    let checksum = page[HEADER..CHECKSUM]
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    if u64_at(page, CHECKSUM)? != checksum {
        return None;
    }
    Some(Meta {
        page_size: usize::try_from(u32_at(page, HEADER + 8)?).ok()?,
        root: u64_at(page, HEADER + 16)?,
        transaction: u64_at(page, HEADER + 48)?,
    })
}

/// Parses the page with the ID `id`, without its overflow pages. `None` if the content is not this page: freed pages
/// and overflow pages may contain any bytes.
pub(super) fn read_page(page: &[u8], id: u64) -> Option<Edge> {
    if u64_at(page, 0)? != id {
        return None;
    }
    let flags = u16_at(page, 8)?;
    let count = usize::from(u16_at(page, 10)?);
    let overflow = u32_at(page, 12)?;
    match flags {
        BRANCH => {
            let element = HEADER + ELEMENT * count.checked_sub(1)?;
            Some(Edge::Branch {
                last_child: u64_at(page, element + 8)?,
            })
        }
        LEAF if count == 0 => Some(Edge::Noted(Note {
            empty: true,
            ..Note::default()
        })),
        LEAF => leaf(page, count, overflow),
        _ => None,
    }
}

struct Element<'a> {
    flags: u32,
    key: &'a [u8],
    value: &'a [u8],
}

fn element(page: &[u8], index: usize) -> Option<Element<'_>> {
    let at = HEADER + ELEMENT * index;
    let key_at = at.checked_add(u32_at(page, at + 4)? as usize)?;
    let value_at = key_at.checked_add(u32_at(page, at + 8)? as usize)?;
    let end = value_at.checked_add(u32_at(page, at + 12)? as usize)?;
    Some(Element {
        flags: u32_at(page, at)?,
        key: page.get(key_at..value_at)?,
        // If the value continues in overflow pages, `value` has only the bytes in this page, because callers need
        // only the first bytes.
        value: page.get(value_at..end.min(page.len()))?,
    })
}

fn leaf(page: &[u8], count: usize, overflow: u32) -> Option<Edge> {
    let last = HEADER + ELEMENT * (count - 1);
    let key_at = last.checked_add(u32_at(page, last + 4)? as usize)?;
    let key_size = u32_at(page, last + 8)?;
    if u32_at(page, last)? & BUCKET == 0 && (key_size == 17 || key_size == 18) {
        if let Some(key) = page.get(key_at..key_at + REVISION_KEY) {
            if let Some(revision) = revision(key) {
                return Some(Edge::Leaf { revision });
            }
        } else if overflow > 0 {
            return Some(Edge::Overflow {
                offset: key_at as u64,
            });
        }
    }
    note(page, count).map(Edge::Noted)
}

/// Reads the root pages of buckets and the compaction revision. `None` if the page contains neither.
fn note(page: &[u8], count: usize) -> Option<Note> {
    let mut note = Note::default();
    let mut found = false;
    for element in (0..count).map_while(|index| element(page, index)) {
        let bucket = element.flags & BUCKET != 0;
        match (element.key, bucket) {
            (b"key", true) => {
                found = true;
                let root = u64_at(element.value, 0)?;
                note.key_root = Some(root).filter(|root| *root != 0);
                if root == 0 {
                    note.inline_revision = inline_revision(element.value.get(HEADER..)?)?;
                }
            }
            (b"meta", true) => {
                let root = u64_at(element.value, 0)?;
                note.meta_root = Some(root).filter(|root| *root != 0);
                if root == 0 {
                    note.compacted = inline_compacted(element.value.get(HEADER..)?)?;
                }
            }
            (b"finishedCompactRev" | b"scheduledCompactRev", false) => {
                found = true;
                if let Some(revision) = revision(element.value) {
                    note.compacted = note.compacted.max(revision);
                }
            }
            _ => {}
        }
    }
    found.then_some(note)
}

/// The last revision of an inlined bucket. The value of an inlined bucket has the format of a page.
fn inline_revision(page: &[u8]) -> Option<i64> {
    match usize::from(u16_at(page, 10)?) {
        0 => Some(0),
        count => revision(element(page, count - 1)?.key),
    }
}

fn inline_compacted(page: &[u8]) -> Option<i64> {
    let count = usize::from(u16_at(page, 10)?);
    Some(note(page, count).map_or(0, |note| note.compacted))
}
