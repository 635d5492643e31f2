//! Complete segments that are not in the store yet. The outbox uploads them in their order, while the capture reads
//! further events. If the store is slow or unavailable, the segments wait in memory, and then in a directory.

use std::collections::VecDeque;
use std::fs;
use std::future::{Future, pending};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use store::Store;
use tokio::time::{Instant, sleep_until};

use crate::name::{BaseName, SegmentName};
use crate::progress::Monitor;
use crate::segment::Sealed;
use crate::stored::write_segment;

/// Segments up to this size in total wait in memory.
const MEMORY: u64 = 16 << 20;

/// The first pause after a failed write to the store. Each further pause is twice as long.
const STORE_RETRY: Duration = Duration::from_millis(200);

/// Maximum pause after a failed write to the store.
const MAX_STORE_RETRY: Duration = Duration::from_secs(10);

/// A directory for segments that do not fit into memory. The recorder deletes the segments that an earlier process has
/// left in this directory, because etcd sends their changes again.
#[derive(Clone, Debug)]
pub struct Spool {
    /// The directory. No other recorder may use it.
    pub directory: PathBuf,
    /// Maximum size of all segments in the directory, in bytes. The last segment may exceed it.
    pub limit: u64,
}

/// A segment that is not in the store yet.
struct Waiting {
    sealed: Sealed,
    /// The file that contains the object, while the object in `sealed` is empty. `None` if `sealed` contains the
    /// object.
    file: Option<PathBuf>,
    size: u64,
    /// The time of the last record, in microseconds since the epoch.
    time: i64,
}

/// The segments of one chain that are not in the store yet.
pub(crate) struct Outbox<'a> {
    store: &'a dyn Store,
    prefix: String,
    base: BaseName,
    spool: Option<Spool>,
    monitor: Monitor,
    /// The segments in their order.
    waiting: VecDeque<Waiting>,
    /// Number of bytes in memory. `spooled` is the number of bytes in the directory.
    memory: u64,
    spooled: u64,
    /// True if a write to the directory has failed. The directory is used again when the outbox is empty.
    is_spool_broken: bool,
    /// The upload of the first segment.
    upload: Option<BoxFuture<'a, Result<(), store::Error>>>,
    pause: Duration,
    retry_at: Option<Instant>,
}

impl<'a> Outbox<'a> {
    pub(crate) fn new(store: &'a dyn Store, prefix: &str, base: BaseName) -> Self {
        Self {
            store,
            prefix: prefix.to_owned(),
            base,
            spool: None,
            monitor: Monitor::default(),
            waiting: VecDeque::new(),
            memory: 0,
            spooled: 0,
            is_spool_broken: false,
            upload: None,
            pause: STORE_RETRY,
            retry_at: None,
        }
    }

    pub(crate) fn with(self, spool: Option<Spool>, monitor: Monitor) -> Self {
        if let Some(spool) = &spool {
            clear(&spool.directory);
        }
        Self {
            spool,
            monitor,
            ..self
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether the capture must not read further events. etcd then keeps them.
    pub(crate) fn is_full(&self) -> bool {
        self.memory >= MEMORY && !self.can_spool()
    }

    fn can_spool(&self) -> bool {
        let spool = self.spool.as_ref().filter(|_| !self.is_spool_broken);
        spool.is_some_and(|spool| self.spooled < spool.limit)
    }

    /// Adds a segment. `time` is the time of its last record.
    pub(crate) fn push(&mut self, sealed: Sealed, time: i64) {
        let size = sealed.object.len() as u64;
        let spools = self.memory + size > MEMORY && self.can_spool();
        let file = if spools { self.spool(&sealed) } else { None };
        let sealed = match &file {
            Some(_) => Sealed {
                object: Bytes::new(),
                ..sealed
            },
            None => sealed,
        };
        if file.is_some() {
            self.spooled += size;
        } else {
            self.memory += size;
        }
        self.waiting.push_back(Waiting {
            sealed,
            file,
            size,
            time,
        });
        self.monitor.waits(self.memory + self.spooled);
    }

    /// Writes a segment to the directory. The write is synchronous, because a canceled write would lose the segment.
    fn spool(&mut self, sealed: &Sealed) -> Option<PathBuf> {
        let directory = &self.spool.as_ref()?.directory;
        let path = directory.join(sealed.name.to_string());
        let written = fs::create_dir_all(directory).and_then(|()| fs::write(&path, &sealed.object));
        if let Err(error) = written {
            let directory = directory.display();
            tracing::warn!(%error, %directory, "a segment cannot be spooled and stays in memory");
            self.is_spool_broken = true;
            let _ = fs::remove_file(&path);
            return None;
        }
        Some(path)
    }

    /// Uploads until the outbox is empty.
    pub(crate) async fn drain(&mut self) {
        while !self.is_empty() {
            self.step().await;
        }
    }

    /// Uploads until another future completes, and returns the result of that future.
    pub(crate) async fn drive_during<T>(&mut self, other: impl Future<Output = T>) -> T {
        let mut other = pin!(other);
        loop {
            tokio::select! {
                biased;
                result = &mut other => return result,
                () = self.step() => {}
            }
        }
    }

    /// Uploads the first segment once. Returns when the attempt has ended, and never returns if the outbox is empty. If
    /// the call is canceled, the next call continues the upload.
    pub(crate) async fn step(&mut self) {
        if self.is_empty() {
            pending::<()>().await;
        }
        if let Some(at) = self.retry_at {
            sleep_until(at).await;
            self.retry_at = None;
        }
        if self.upload.is_none() {
            self.upload = self.begin();
        }
        let Some(upload) = &mut self.upload else {
            return;
        };
        let result = upload.await;
        self.upload = None;
        match result {
            Ok(()) => self.complete(),
            Err(error) => {
                let store = self.store.location();
                self.fails(&format!("a segment cannot be stored in {store}: {error}"));
            }
        }
    }

    /// Begins the upload of the first segment. `None` if its file cannot be read.
    fn begin(&mut self) -> Option<BoxFuture<'a, Result<(), store::Error>>> {
        let first = self.waiting.front()?;
        let mut sealed = first.sealed.clone();
        if let Some(path) = &first.file {
            match fs::read(path) {
                Ok(object) => sealed.object = object.into(),
                Err(error) => {
                    let path = path.display();
                    let problem = format!(
                        "the spooled segment {path} cannot be read: {error}; delete the pod, so that the agent reads \
                         the changes again from etcd"
                    );
                    self.fails(&problem);
                    return None;
                }
            }
        }
        let (store, prefix, base) = (self.store, self.prefix.clone(), self.base);
        let upload = async move { write_segment(store, &prefix, base, &sealed).await };
        Some(upload.boxed())
    }

    fn complete(&mut self) {
        let Some(stored) = self.waiting.pop_front() else {
            return;
        };
        if let Some(path) = &stored.file {
            let _ = fs::remove_file(path);
            self.spooled -= stored.size;
        } else {
            self.memory -= stored.size;
        }
        self.is_spool_broken &= !self.is_empty();
        self.pause = STORE_RETRY;
        let SegmentName { last, .. } = stored.sealed.name;
        self.monitor.stored((last, stored.time), stored.size);
        self.monitor.waits(self.memory + self.spooled);
    }

    fn fails(&mut self, problem: &str) {
        tracing::warn!(problem, "the upload of a segment is retried");
        self.monitor.fails(problem);
        self.retry_at = Some(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(MAX_STORE_RETRY);
    }
}

#[cfg(test)]
impl Outbox<'_> {
    /// Retries the failed upload without a pause.
    pub(crate) fn retry_now(&mut self) {
        self.retry_at = None;
    }
}

/// Deletes the segments in the directory of a spool.
fn clear(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if SegmentName::parse(&name.to_string_lossy()).is_some() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use store::LocalStore;
    use store::fake::{Call, FaultyStore};

    use super::*;
    use crate::fixture::{base, chain};
    use crate::stored::{Reader, write_base};

    fn files(directory: &Path) -> usize {
        fs::read_dir(directory).map_or(0, Iterator::count)
    }

    /// A segment that fills the memory of the outbox.
    fn large(sealed: &Sealed) -> Sealed {
        Sealed {
            object: vec![0; usize::try_from(MEMORY).unwrap()].into(),
            ..sealed.clone()
        }
    }

    #[tokio::test]
    async fn segments_are_stored_in_order_after_store_failure() {
        let directory = tempfile::tempdir().unwrap();
        let local = LocalStore::new(directory.path());
        write_base(&local, "p/", &base()).await.unwrap();
        let store = FaultyStore::new(local.clone());
        store.fail(Call::Put, store::Error::Full("disk".to_owned()));
        let monitor = Monitor::default();
        let mut outbox = Outbox::new(&store, "p/", base().name).with(None, monitor.clone());
        for segment in chain(&base(), 4, 2, 0) {
            outbox.push(segment, 5);
        }
        assert!(monitor.read().waiting_bytes > 0);
        outbox.drain().await;
        let reader = Reader::open(&local, "p/", base().name).await.unwrap();
        assert_eq!(reader.chain().segments.len(), 4);
        let progress = monitor.read();
        assert_eq!((progress.waiting_bytes, progress.segments), (0, 4));
        assert_eq!(progress.revision, Some(reader.chain().last));
        assert!(progress.problem.unwrap().contains("cannot be stored"));
    }

    #[tokio::test]
    async fn segments_are_spooled_up_to_spool_limit_if_memory_is_full() {
        let directory = tempfile::tempdir().unwrap();
        let store = directory.path().join("store");
        fs::create_dir(&store).unwrap();
        let local = LocalStore::new(store);
        let spool = Spool {
            directory: directory.path().join("spool"),
            limit: 1,
        };
        let segments = chain(&base(), 3, 2, 0);
        let outbox = Outbox::new(&local, "p/", base().name);
        let mut outbox = outbox.with(Some(spool.clone()), Monitor::default());
        outbox.push(large(&segments[0]), 1);
        assert!(!outbox.is_full());
        assert_eq!(files(&spool.directory), 0);
        outbox.push(segments[1].clone(), 2);
        assert_eq!(files(&spool.directory), 1);
        assert!(outbox.is_full());
        outbox.drain().await;
        assert!(!outbox.is_full());
        assert_eq!(files(&spool.directory), 0);
        let listed = local.list(&format!("p/{}/", base().name)).await.unwrap();
        assert_eq!(listed.len(), 2);
    }

    #[test]
    fn outbox_without_spool_directory_is_full_at_memory_limit() {
        let local = LocalStore::new("/nonexistent");
        let segments = chain(&base(), 1, 2, 0);
        let mut outbox = Outbox::new(&local, "p/", base().name);
        outbox.push(large(&segments[0]), 1);
        assert!(outbox.is_full());
    }

    #[test]
    fn outbox_is_full_if_spool_directory_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "x").unwrap();
        let local = LocalStore::new("/nonexistent");
        let spool = Spool {
            directory: file,
            limit: u64::MAX,
        };
        let segments = chain(&base(), 2, 2, 0);
        let outbox = Outbox::new(&local, "p/", base().name);
        let mut outbox = outbox.with(Some(spool), Monitor::default());
        outbox.push(large(&segments[0]), 1);
        outbox.push(segments[1].clone(), 2);
        assert!(outbox.is_full());
    }
}
