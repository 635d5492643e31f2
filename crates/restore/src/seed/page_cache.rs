//! Releases the pages of a snapshot from the page cache while etcdutl copies it, so that the kernel can reuse this
//! memory. Without this release, a restore would fill the memory of its node with twice the size of the database, and
//! other pods would lose their page cache. Some virtual machines restore twice as fast with this module
//! (docs/benchmarks.md).

use std::fs::{self, File};
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{Advice, fadvise};

/// Interval at which the size of the copy is read.
const POLL: Duration = Duration::from_millis(20);

/// Runs `copy`, and meanwhile releases the pages of `source` that are already in `target`. This is only a hint to the
/// kernel: the file does not change, and errors are ignored.
pub(super) fn release_copied_pages<T>(source: &Path, target: &Path, copy: impl FnOnce() -> T) -> T {
    let dirty = || dirty_bytes(&fs::read_to_string("/proc/meminfo").ok()?);
    release(source, target, dirty, copy)
}

fn release<T>(
    source: &Path,
    target: &Path,
    dirty: impl Fn() -> Option<u64> + Sync,
    copy: impl FnOnce() -> T,
) -> T {
    let Ok(source) = File::open(source) else {
        return copy();
    };
    let has_ended = AtomicBool::new(false);
    let follow = || {
        let size = source.metadata().map_or(0, |found| found.len());
        while !has_ended.load(Ordering::Relaxed) {
            thread::sleep(POLL);
            let copied = target.metadata().map_or(0, |found| found.len());
            // The kernel can release only pages that are on disk. It writes the oldest dirty pages first, and the
            // source is older than the copy. Therefore at most the last `dirty` bytes of the `size + copied` bytes are
            // not on disk.
            let written = |dirty| (size + copied).saturating_sub(dirty);
            let clean = dirty().map_or(0, written);
            if let Some(end) = NonZeroU64::new(copied.min(clean)) {
                // The range starts at 0, because an earlier call may have skipped pages that were in use.
                let _ = fadvise(&source, 0, Some(end), Advice::DontNeed);
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(follow);
        let done = copy();
        has_ended.store(true, Ordering::Relaxed);
        done
    })
}

/// The number of bytes in the page cache that are not on disk yet (dirty pages), from `/proc/meminfo`. `None` if
/// `meminfo` cannot be parsed. Dirty pages of the source are not released, because the kernel would first write them,
/// and slow down the copy.
fn dirty_bytes(meminfo: &str) -> Option<u64> {
    let kibibytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let number = line.strip_prefix(':')?.trim().strip_suffix("kB")?;
        number.trim().parse::<u64>().ok()
    };
    Some((kibibytes("Dirty")? + kibibytes("Writeback")?) << 10)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Instant;

    use super::*;

    const SIZE: u64 = 8 << 20;
    /// Half of the size of a file. It is larger than the read-ahead of the kernel, so a read in one half loads no page
    /// of the other half.
    const HALF: u64 = SIZE / 2;

    struct Files {
        _folder: tempfile::TempDir,
        source: PathBuf,
        target: PathBuf,
    }

    impl Files {
        /// Creates the source file next to the test program, because `/tmp` may be in memory. Afterwards, this file is
        /// on disk and in the page cache.
        fn create() -> Self {
            let here = std::env::current_exe().unwrap();
            let folder = tempfile::tempdir_in(here.parent().unwrap()).unwrap();
            let [source, target] = ["source", "target"].map(|name| folder.path().join(name));
            fs::write(&source, vec![7; usize::try_from(SIZE).unwrap()]).unwrap();
            File::open(&source).unwrap().sync_all().unwrap();
            Self {
                _folder: folder,
                source,
                target,
            }
        }

        /// True if the page of this byte is not in the page cache. The check loads the page.
        fn is_released(&self, at: u64) -> bool {
            use std::os::unix::fs::FileExt as _;
            let file = File::open(&self.source).unwrap();
            fadvise(&file, 0, None, Advice::Random).unwrap();
            let before = read_by_this_thread();
            file.read_exact_at(&mut [0], at).unwrap();
            read_by_this_thread() > before
        }
    }

    fn read_by_this_thread() -> u64 {
        let counters = fs::read_to_string("/proc/thread-self/io").unwrap();
        let bytes = counters
            .lines()
            .find_map(|line| line.strip_prefix("read_bytes: "));
        bytes.unwrap().parse().unwrap()
    }

    fn eventually(mut condition: impl FnMut() -> bool) -> bool {
        let end = Instant::now() + Duration::from_secs(30);
        while Instant::now() < end {
            if condition() {
                return true;
            }
            thread::sleep(POLL);
        }
        false
    }

    #[test]
    fn only_copied_pages_are_released_from_page_cache() {
        let files = Files::create();
        assert!(
            !files.is_released(0),
            "the file that was just written is not in the page cache"
        );
        let target = File::create(&files.target).unwrap();
        let released = release(
            &files.source,
            &files.target,
            || Some(0),
            || {
                target.set_len(HALF).unwrap();
                eventually(|| files.is_released(0))
            },
        );
        assert!(released, "the first byte remains in the page cache");
        assert!(
            !files.is_released(SIZE - 1),
            "a page that was not copied is released"
        );
        let content = fs::read(&files.source).unwrap();
        assert!(content.len() as u64 == SIZE && content.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn dirty_pages_stay_in_page_cache() {
        let files = Files::create();
        fs::copy(&files.source, &files.target).unwrap();
        let released = release(
            &files.source,
            &files.target,
            || Some(2 * SIZE - HALF),
            || eventually(|| files.is_released(0)),
        );
        assert!(released, "the first byte remains in the page cache");
        assert!(!files.is_released(HALF + 4096));
        // If the number of dirty bytes is unknown, no page is released.
        let files = Files::create();
        fs::copy(&files.source, &files.target).unwrap();
        let checks = std::sync::atomic::AtomicUsize::new(0);
        let unknown = || {
            checks.fetch_add(1, Ordering::Relaxed);
            None
        };
        let several = || eventually(|| checks.load(Ordering::Relaxed) > 3);
        assert!(release(&files.source, &files.target, unknown, several));
        assert!(!files.is_released(0));
    }

    #[test]
    fn dirty_bytes_are_read_from_meminfo() {
        let meminfo = "MemFree:  7 kB\nDirty:             2048 kB\nWriteback:            16 kB\nWritebackTmp:   9 kB\n";
        assert_eq!(dirty_bytes(meminfo), Some(2064 << 10));
        assert_eq!(dirty_bytes("MemFree: 7 kB\n"), None);
        assert!(dirty_bytes(&fs::read_to_string("/proc/meminfo").unwrap()).is_some());
    }
}
