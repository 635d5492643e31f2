//! The page cache of a snapshot while etcd's tool copies it. Nobody reads again what is copied, so the kernel is told
//! that it may have that memory back, and takes it for the copy. Without that a restore fills a node's memory with twice
//! the database, which its neighbours have to give; and where a virtual machine gets its memory from its host page by
//! page, that took half the time of a restore (docs/benchmarks.md).

use std::fs::{self, File};
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{Advice, fadvise};

/// How often it is looked how much is copied.
const LOOK: Duration = Duration::from_millis(20);

/// Runs `copying`, and lets the kernel forget as much of `source` as `target` has meanwhile. That is a hint: the file
/// stays what it is, and who reads it again reads the disk. Nothing fails for it.
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
            // The kernel writes what is oldest first: the source before its copy.
            let written = |waiting| (size + copied).saturating_sub(waiting);
            let clean = waiting().map_or(0, written);
            if let Some(end) = NonZeroU64::new(copied.min(clean)) {
                // From the beginning: what could not go at the look before goes now.
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

/// How many bytes of all files the node's disks have not got yet, of `/proc/meminfo`. What of the source is among them
/// is left alone: the hint would have it written at once, beside the copy that is waited for, and mostly it never has to
/// be, for the file is removed next.
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
    /// Wide of what a kernel reads ahead.
    const APART: u64 = SIZE / 2;

    struct Files {
        _folder: tempfile::TempDir,
        source: PathBuf,
        target: PathBuf,
    }

    impl Files {
        /// Beside this program, because `/tmp` may be memory. The source is on the disk and in memory.
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

        /// Whether one byte of the source has to come from the disk. It is in memory then.
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
    fn what_is_copied_is_forgotten_and_what_is_not_stays() {
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
    fn what_the_disk_may_not_have_yet_stays() {
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
        // Where a node does not tell it, all may be waiting.
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
    fn what_waits_for_the_disk_is_read_as_the_kernel_tells_it() {
        let told = "MemFree:  7 kB\nDirty:             2048 kB\nWriteback:            16 kB\nWritebackTmp:   9 kB\n";
        assert_eq!(waiting_for_the_disk(told), Some(2064 << 10));
        assert_eq!(waiting_for_the_disk("MemFree: 7 kB\n"), None);
        assert!(waiting_for_the_disk(&fs::read_to_string("/proc/meminfo").unwrap()).is_some());
    }
}
