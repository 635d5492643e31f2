//! File operations in a mounted directory. They can hang, because a hard-mounted network volume waits for its server
//! forever.
//!
//! Each hung operation blocks a thread, and the process has a limited number of threads, some of which DNS lookups
//! need. The number of concurrent operations in one directory is therefore limited by permits. An operation holds its
//! permit until its thread is free, even after its caller has timed out (invariant 15).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::port::Error;

/// Maximum number of concurrent file operations in one directory. An operator has 64 threads for blocking operations.
const MAX_OPERATIONS: usize = 8;

/// Maximum time to wait for a permit. This time is shorter than the time limit of 30 seconds with which an operator
/// reads a store in a reconcile.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(20);

/// A mounted directory. All clones share the same permits.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    root: PathBuf,
    operations: Arc<Semaphore>,
    permit_timeout: Duration,
}

impl Directory {
    pub(super) fn new(root: PathBuf) -> Self {
        Self {
            root,
            operations: Arc::new(Semaphore::new(MAX_OPERATIONS)),
            permit_timeout: PERMIT_TIMEOUT,
        }
    }

    /// The root directory, which exists only while the volume is mounted.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Runs file operations in a thread for blocking operations.
    ///
    /// # Errors
    /// Fails with the error of `operation`, or with [`Error::Timeout`] if hung operations hold all permits.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        operation: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let permit = self.operations.clone().acquire_owned();
        let permit = timeout(self.permit_timeout, permit)
            .await
            .ok()
            .and_then(Result::ok)
            .ok_or_else(|| self.hangs())?;
        let task = spawn_blocking(move || {
            let result = operation();
            drop(permit);
            result
        });
        task.await
            .unwrap_or_else(|_| Err(Error::Other("a file operation was interrupted".to_owned())))
    }

    /// Runs file operations in the background, when a permit is free. For destructors, which must not block a thread of
    /// the runtime.
    pub(super) fn run_detached(&self, operation: impl FnOnce() + Send + 'static) {
        let Ok(runtime) = Handle::try_current() else {
            return operation();
        };
        let permit = self.operations.clone().acquire_owned();
        runtime.spawn(async move {
            let permit = permit.await;
            spawn_blocking(move || {
                operation();
                drop(permit);
            });
        });
    }

    fn hangs(&self) -> Error {
        Error::Timeout(format!(
            "{MAX_OPERATIONS} file operations in the directory {} have not ended within {} s: check the volume and its \
             server",
            self.root.display(),
            self.permit_timeout.as_secs_f32()
        ))
    }

    /// Converts the error of an operation on `key`. Reads the directory, so it blocks the thread.
    pub(super) fn explain(&self, key: &str, error: &std::io::Error) -> Error {
        match error.kind() {
            ErrorKind::NotFound if !self.root.is_dir() => Error::NoSuchBucket {
                bucket: self.root.display().to_string(),
            },
            ErrorKind::NotFound => Error::NoSuchObject {
                key: key.to_owned(),
            },
            ErrorKind::PermissionDenied => Error::AccessDenied(error.to_string()),
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Error::Full(error.to_string()),
            ErrorKind::InvalidFilename => Error::Invalid {
                field: "path".to_owned(),
                problem: format!(
                    "{key:?} has a part that is too long for a file name: use a shorter path"
                ),
            },
            _ => Error::Other(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use bytes::Bytes;
    use tokio::sync::oneshot;

    use super::*;
    use crate::{LocalStore, Store};

    /// A directory with a FIFO that has no writer. Opening the FIFO blocks, like a file operation on a volume whose
    /// server does not answer.
    struct Hung {
        dir: tempfile::TempDir,
        fifo: PathBuf,
        directory: Directory,
    }

    impl Hung {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let fifo = dir.path().join("fifo");
            let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
            assert!(made.success());
            let directory = Directory {
                permit_timeout: Duration::from_millis(300),
                ..Directory::new(dir.path().to_owned())
            };
            Self {
                dir,
                fifo,
                directory,
            }
        }

        async fn open(self: &Arc<Self>) -> Result<(), Error> {
            let fifo = self.fifo.clone();
            let opened = self.directory.run(move || {
                std::fs::File::open(fifo).map_err(|error| Error::Other(error.to_string()))
            });
            opened.await.map(drop)
        }

        /// Ends all blocked operations.
        fn answer(&self) {
            let both = std::fs::File::options()
                .read(true)
                .write(true)
                .open(&self.fifo);
            std::mem::forget(both.unwrap());
        }
    }

    impl Drop for Hung {
        fn drop(&mut self) {
            // If the test fails, the tokio runtime waits at its end for the threads of the blocked operations, so the
            // operations are ended here.
            self.answer();
        }
    }

    /// Invariant 15: twenty callers block only eight threads, so a DNS lookup gets the ninth thread.
    #[test]
    fn hung_directory_leaves_thread_for_dns_lookup() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(MAX_OPERATIONS + 1)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let hung = Arc::new(Hung::new());
            let mut callers = Vec::new();
            for _ in 0..20 {
                let hung = hung.clone();
                callers.push(tokio::spawn(async move { hung.open().await }));
            }
            let mut rejected = 0;
            while rejected < 20 - MAX_OPERATIONS {
                tokio::time::sleep(Duration::from_millis(50)).await;
                rejected = callers.iter().filter(|caller| caller.is_finished()).count();
            }
            // The rejected callers have finished. The other callers wait for their blocked operations. An operation
            // keeps its thread even after `abort` below has canceled its caller.
            let (ended, waiting): (Vec<_>, Vec<_>) = callers
                .into_iter()
                .partition(tokio::task::JoinHandle::is_finished);
            assert_eq!(waiting.len(), MAX_OPERATIONS);
            for caller in ended {
                let error = caller.await.unwrap().unwrap_err().to_string();
                let directory = hung.dir.path().display().to_string();
                assert!(error.contains(&directory), "{error}");
                assert!(error.contains("check the volume"), "{error}");
            }
            for caller in waiting {
                caller.abort();
            }
            let error = hung.open().await.unwrap_err();
            assert!(matches!(error, Error::Timeout(_)), "{error:?}");

            let begun = Instant::now();
            let found = tokio::net::lookup_host("localhost:80").await.unwrap();
            assert!(found.count() > 0);
            // Operations in another directory do not need the permits of the hung directory, so they succeed.
            let other = tempfile::tempdir().unwrap();
            let store = LocalStore::new(other.path());
            store.put("key", Bytes::from_static(b"x")).await.unwrap();
            assert!(store.head("key").await.unwrap().is_some());
            assert!(begun.elapsed() < Duration::from_secs(10));

            // When the volume answers again, operations in the directory succeed.
            hung.answer();
            while hung.open().await.is_err() {}
            let store = LocalStore::in_directory(hung.directory.clone());
            store.put("key", Bytes::from_static(b"x")).await.unwrap();
        });
    }

    /// A destructor does not block while the directory hangs. Its operation runs when a permit is free.
    #[tokio::test]
    async fn detached_operation_waits_for_permit() {
        let hung = Arc::new(Hung::new());
        for _ in 0..MAX_OPERATIONS {
            let hung = hung.clone();
            tokio::spawn(async move { hung.open().await });
        }
        while hung.directory.operations.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let (sender, mut done) = oneshot::channel();
        hung.directory.run_detached(move || {
            let _ = sender.send(());
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(done.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        hung.answer();
        done.await.unwrap();
    }
}
