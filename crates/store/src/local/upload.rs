//! Writes an object to an unfinished file. The commit of the upload renames the file to the name of the object.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use bytes::Bytes;

use super::directory::Directory;
use super::tenant::Room;
use crate::port::{Committed, Error, Upload};

/// An unfinished file. Dropping this value deletes the file if it was not renamed.
pub(super) struct UnfinishedFile {
    directory: Directory,
    /// The path of the unfinished file. `None` after the file was renamed or removed.
    path: Option<PathBuf>,
    file: Option<File>,
    room: Option<Room>,
    written: u64,
}

impl UnfinishedFile {
    /// Creates the unfinished file. Blocks the thread.
    pub(super) fn create(
        directory: Directory,
        path: PathBuf,
        room: Option<Room>,
    ) -> std::io::Result<Self> {
        let file = File::create_new(&path)?;
        Ok(Self {
            directory,
            path: Some(path),
            file: Some(file),
            room,
            written: 0,
        })
    }

    fn file(&mut self) -> std::io::Result<&mut File> {
        let closed = || std::io::Error::other("the file is closed");
        self.file.as_mut().ok_or_else(closed)
    }

    fn write(&mut self, key: &str, chunk: &[u8]) -> Result<(), Error> {
        if let Some(room) = &mut self.room {
            room.take(chunk.len() as u64)?;
        }
        let written = self.file().and_then(|file| file.write_all(chunk));
        written.map_err(|error| self.directory.explain(key, &error))?;
        self.written += chunk.len() as u64;
        Ok(())
    }

    /// Syncs the file, and renames it to `target` if its size equals the number of written bytes. Returns the size in
    /// both cases.
    fn rename(&mut self, target: &Path) -> std::io::Result<u64> {
        let file = self.file()?;
        file.sync_all()?;
        let size = file.metadata()?.len();
        if size != self.written {
            return Ok(size);
        }
        if let Some(path) = &self.path {
            std::fs::rename(path, target)?;
            self.path = None;
        }
        if let Some(parent) = target.parent() {
            File::open(parent)?.sync_all()?;
        }
        Ok(size)
    }

    fn remove(&mut self) {
        remove(self.file.take(), self.path.take());
    }
}

fn remove(file: Option<File>, path: Option<PathBuf>) {
    // Closing a file on a network volume writes its content and can block, so callers run this function on a thread
    // for blocking operations.
    drop(file);
    if let Some(path) = path {
        let _ = std::fs::remove_file(path);
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        let (file, path) = (self.file.take(), self.path.take());
        // The file is removed in the background, because the removal can block, and `drop` must not block a thread of
        // the runtime.
        if file.is_some() || path.is_some() {
            self.directory.run_detached(move || remove(file, path));
        }
    }
}

pub(super) struct LocalUpload {
    directory: Directory,
    key: String,
    target: PathBuf,
    /// `None` while an operation uses the file, and after the caller has canceled an operation.
    unfinished: Option<UnfinishedFile>,
}

impl LocalUpload {
    pub(super) fn new(
        directory: Directory,
        key: String,
        target: PathBuf,
        unfinished: UnfinishedFile,
    ) -> Self {
        Self {
            directory,
            key,
            target,
            unfinished: Some(unfinished),
        }
    }

    /// Runs an operation on the unfinished file, in a thread for blocking operations.
    async fn run<T: Send + 'static>(
        &mut self,
        operation: impl FnOnce(&mut UnfinishedFile) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let ended = || Error::Other("the upload has ended".to_owned());
        let mut unfinished = self.unfinished.take().ok_or_else(ended)?;
        let result = self.directory.run(move || {
            let result = operation(&mut unfinished);
            Ok((unfinished, result))
        });
        let (unfinished, result) = result.await?;
        self.unfinished = Some(unfinished);
        result
    }
}

#[async_trait]
impl Upload for LocalUpload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        let key = self.key.clone();
        self.run(move |unfinished| unfinished.write(&key, &chunk))
            .await
    }

    async fn commit(mut self: Box<Self>) -> Result<Committed, Error> {
        let (key, target) = (self.key.clone(), self.target.clone());
        self.run(move |unfinished| {
            let size = unfinished.rename(&target);
            let size = size.map_err(|error| unfinished.directory.explain(&key, &error))?;
            if size == unfinished.written {
                return Ok(Committed { size, tag: None });
            }
            Err(Error::Other(format!(
                "the file has {size} bytes, but {} bytes were written",
                unfinished.written
            )))
        })
        .await
    }

    async fn abort(mut self: Box<Self>) -> Result<(), Error> {
        if self.unfinished.is_none() {
            // The caller has canceled an operation. The operation continues in its thread and deletes the file at its
            // end, so there is no file to remove here.
            return Ok(());
        }
        self.run(|unfinished| {
            unfinished.remove();
            Ok(())
        })
        .await
    }
}
