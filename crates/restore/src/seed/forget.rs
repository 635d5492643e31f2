//! Releases the page cache of a snapshot while etcdutl copies it. Copied pages are not read again, so the kernel can
//! reuse their memory for the copy. Otherwise a restore would fill the memory of its node with twice the database, at
//! the expense of other pods. On a virtual machine whose host assigns memory page by page, this took half the time of a
//! restore (docs/benchmarks.md).

use std::fs::{self, File};
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{Advice, fadvise};

/// Interval of checks of the copied size.
const LOOK: Duration = Duration::from_millis(20);

/// Runs `copying`, and meanwhile releases the pages of `source` that `target` already contains. This is only a hint to
/// the kernel. The file is unchanged, a later read comes from the disk, and errors are ignored.
pub(super) fn forget_what_is_copied<T>(
    source: &Path,
    target: &Path,
    copying: impl FnOnce() -> T,
) -> T {
    let waiting = || waiting_for_the_disk(&fs::read_to_string("/proc/meminfo").ok()?);
    forget(source, target, waiting, copying)
}

fn forget<T>(
    source: &Path,
    target: &Path,
    waiting: impl Fn() -> Option<u64> + Sync,
    copying: impl FnOnce() -> T,
) -> T {
    let Ok(source) = File::open(source) else {
        return copying();
    };
    let is_over = AtomicBool::new(false);
    let follow = || {
        let size = source.metadata().map_or(0, |found| found.len());
        while !is_over.load(Ordering::Relaxed) {
            thread::sleep(LOOK);
            let copied = target.metadata().map_or(0, |found| found.len());
            // The kernel writes the oldest pages first: those of the source before those of its copy.
            let written = |waiting| (size + copied).saturating_sub(waiting);
            let clean = waiting().map_or(0, written);
            if let Some(end) = NonZeroU64::new(copied.min(clean)) {
                // The range starts at 0, because pages that were in use before may be released now.
                let _ = fadvise(&source, 0, Some(end), Advice::DontNeed);
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(follow);
        let done = copying();
        is_over.store(true, Ordering::Relaxed);
        done
    })
}

/// The bytes of all files in `/proc/meminfo` that are not yet on disk. Dirty pages of the source are not released,
/// because the hint would write them at once and slow the copy down. In most cases they need not be written at all,
/// because the file is deleted after the copy.
fn waiting_for_the_disk(meminfo: &str) -> Option<u64> {
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
    /// Larger than the read-ahead of the kernel.
    const APART: u64 = SIZE / 2;

    struct Files {
        _folder: tempfile::TempDir,
        source: PathBuf,
        target: PathBuf,
    }

    impl Files {
        /// Creates the files next to this program, because `/tmp` may be in memory. The source is on disk and in the
        /// page cache.
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

        /// Whether a byte of the source is read from the disk. The read adds its page to the page cache.
        fn is_forgotten(&self, at: u64) -> bool {
            use std::os::unix::fs::FileExt as _;
            let file = File::open(&self.source).unwrap();
            fadvise(&file, 0, None, Advice::Random).unwrap();
            let before = read_by_this_thread();
            file.read_exact_at(&mut [0], at).unwrap();
            read_by_this_thread() > before
        }
    }

    fn read_by_this_thread() -> u64 {
        let told = fs::read_to_string("/proc/thread-self/io").unwrap();
        let bytes = told
            .lines()
            .find_map(|line| line.strip_prefix("read_bytes: "));
        bytes.unwrap().parse().unwrap()
    }

    fn soon(mut seen: impl FnMut() -> bool) -> bool {
        let end = Instant::now() + Duration::from_secs(30);
        while Instant::now() < end {
            if seen() {
                return true;
            }
            thread::sleep(LOOK);
        }
        false
    }

    #[test]
    fn releases_only_copied_pages() {
        let files = Files::create();
        assert!(
            !files.is_forgotten(0),
            "it is in memory after it was written"
        );
        let target = File::create(&files.target).unwrap();
        let seen = forget(
            &files.source,
            &files.target,
            || Some(0),
            || {
                target.set_len(APART).unwrap();
                soon(|| files.is_forgotten(0))
            },
        );
        assert!(seen, "the first byte stays in memory");
        assert!(
            !files.is_forgotten(SIZE - 1),
            "what nobody has copied is gone"
        );
        let whole = fs::read(&files.source).unwrap();
        assert!(whole.len() as u64 == SIZE && whole.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn keeps_dirty_pages() {
        let files = Files::create();
        fs::copy(&files.source, &files.target).unwrap();
        let seen = forget(
            &files.source,
            &files.target,
            || Some(2 * SIZE - APART),
            || soon(|| files.is_forgotten(0)),
        );
        assert!(seen, "the first byte stays in memory");
        assert!(!files.is_forgotten(APART + 4096));
        // If the number of dirty bytes is unknown, all pages may be dirty.
        let files = Files::create();
        fs::copy(&files.source, &files.target).unwrap();
        let looks = std::sync::atomic::AtomicUsize::new(0);
        let told = || {
            looks.fetch_add(1, Ordering::Relaxed);
            None
        };
        let several = || soon(|| looks.load(Ordering::Relaxed) > 3);
        assert!(forget(&files.source, &files.target, told, several));
        assert!(!files.is_forgotten(0));
    }

    #[test]
    fn reads_dirty_bytes_from_meminfo() {
        let told = "MemFree:  7 kB\nDirty:             2048 kB\nWriteback:            16 kB\nWritebackTmp:   9 kB\n";
        assert_eq!(waiting_for_the_disk(told), Some(2064 << 10));
        assert_eq!(waiting_for_the_disk("MemFree: 7 kB\n"), None);
        assert!(waiting_for_the_disk(&fs::read_to_string("/proc/meminfo").unwrap()).is_some());
    }
}
