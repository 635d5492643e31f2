//! A store in a directory, for volumes and for tests.
//!
//! A key is a relative path in the directory. An object becomes visible when its complete and synced file is renamed.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::stream::{self, StreamExt};
use md5::{Digest as _, Md5};
use tokio::fs;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::failure::Place;
use crate::limits::{MAX_ENTRIES, too_many_entries};
use crate::port::{Committed, Error, Object, ObjectStream, Store, Unfinished, Upload};

/// Prefix of the names of unfinished files. Such files are not objects.
const UNFINISHED: &str = ".unfinished-";

/// After this time without a write, an unfinished file of another process counts as abandoned. The time is longer than
/// any pause of an upload.
const ABANDONED_AFTER: Duration = Duration::from_mins(10);

/// Number of hexadecimal digits that identify the owner of an unfinished file.
const OWNER_DIGITS: usize = 8;

/// Size of a read in bytes.
const CHUNK: usize = 1 << 20;

/// A directory with objects.
#[derive(Clone, Debug)]
pub struct LocalStore {
    root: PathBuf,
    location: String,
    owner: Option<String>,
}

impl LocalStore {
    /// A store in the directory `root`, which must exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        let location = format!("file://{}", root.display());
        Self::named(root, location)
    }

    /// Like [`LocalStore::new`], with a location that messages show.
    pub fn named(root: impl Into<PathBuf>, location: String) -> Self {
        Self {
            root: root.into(),
            location,
            owner: None,
        }
    }

    /// Sets the owner in the names of unfinished files, for a directory to which several processes write. Unfinished
    /// files of other owners are listed only ten minutes after their last write.
    #[must_use]
    pub fn owned_by(mut self, owner: &str) -> Self {
        let mut digits = hex::encode(Md5::digest(owner));
        digits.truncate(OWNER_DIGITS);
        self.owner = Some(digits);
        self
    }

    /// Whether another process may still be writing to an unfinished file.
    fn may_be_in_use(&self, name: &str, written: &std::fs::Metadata) -> bool {
        let is_abandoned = written
            .modified()
            .ok()
            .and_then(|time| SystemTime::now().duration_since(time).ok())
            .is_some_and(|idle| idle >= ABANDONED_AFTER);
        self.owner.is_some() && self.owner.as_deref() != owner_of(name) && !is_abandoned
    }

    fn path(&self, key: &str) -> Result<PathBuf, Error> {
        let plain = !key.is_empty()
            && key
                .split('/')
                .all(|part| !matches!(part, "" | "." | "..") && !part.starts_with(UNFINISHED))
            && !key.contains('\0');
        if plain {
            Ok(self.root.join(key))
        } else {
            Err(Error::Invalid {
                field: "path".to_owned(),
                problem: format!(
                    "{key:?} is not a relative path in the store's directory: remove leading slashes and .."
                ),
            })
        }
    }

    fn place(&self) -> Place {
        Place {
            bucket: self.location.clone(),
            endpoint: self.location.clone(),
        }
    }

    fn explain(&self, key: &str, error: &std::io::Error) -> Error {
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

fn described(key: String, metadata: &std::fs::Metadata) -> Object {
    let modified = metadata.modified().ok();
    let since = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    Object {
        key,
        size: metadata.len(),
        modified_unix_seconds: since.and_then(|since| i64::try_from(since.as_secs()).ok()),
        // On network volumes, the times and inode numbers of a file can differ between reads, so neither is used as a
        // tag.
        tag: None,
    }
}

/// The name of an unfinished file. It contains the owner and the name of the target file.
fn unfinished_name(owner: Option<&str>, target: &str) -> String {
    let random = rand::random::<u64>();
    match owner {
        None => format!("{UNFINISHED}{random:016x}-{target}"),
        // The name has the same length as without an owner.
        Some(owner) => format!("{UNFINISHED}{owner}.{:07x}-{target}", random >> 36),
    }
}

/// The owner of an unfinished file. `None` if its name contains no owner.
fn owner_of(unfinished: &str) -> Option<&str> {
    let (owner, rest) = unfinished
        .strip_prefix(UNFINISHED)?
        .split_at_checked(OWNER_DIGITS)?;
    rest.starts_with('.').then_some(owner)
}

/// The name of the target file of an unfinished file.
fn target_of(unfinished: &str) -> Option<&str> {
    let (_, target) = unfinished.strip_prefix(UNFINISHED)?.split_once('-')?;
    Some(target)
}

struct LocalUpload {
    store: LocalStore,
    key: String,
    target: PathBuf,
    unfinished: Temporary,
    file: fs::File,
    written: u64,
}

/// Deletes the file on drop, unless the file was renamed.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[async_trait]
impl Upload for LocalUpload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        self.written += chunk.len() as u64;
        self.file
            .write_all(&chunk)
            .await
            .map_err(|error| self.store.explain(&self.key, &error))
    }

    async fn commit(mut self: Box<Self>) -> Result<Committed, Error> {
        let done = async {
            self.file.flush().await?;
            self.file.sync_all().await?;
            let size = self.file.metadata().await?.len();
            if size != self.written {
                return Ok(size);
            }
            fs::rename(&self.unfinished.0, &self.target).await?;
            if let Some(parent) = self.target.parent() {
                fs::File::open(parent).await?.sync_all().await?;
            }
            Ok(size)
        };
        let size = done
            .await
            .map_err(|error: std::io::Error| self.store.explain(&self.key, &error))?;
        if size == self.written {
            Ok(Committed { size, tag: None })
        } else {
            Err(Error::Other(format!(
                "the store has {size} of {} bytes",
                self.written
            )))
        }
    }

    async fn abort(self: Box<Self>) -> Result<(), Error> {
        Ok(())
    }
}

#[async_trait]
impl Store for LocalStore {
    fn location(&self) -> String {
        self.location.clone()
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        let target = self.path(key)?;
        let explain = |error: std::io::Error| self.explain(key, &error);
        // The root directory is not created here, because a missing root means that the volume is not mounted.
        fs::metadata(&self.root).await.map_err(explain)?;
        let parent = target.parent().unwrap_or(&self.root);
        fs::create_dir_all(parent).await.map_err(explain)?;
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let unfinished = parent.join(unfinished_name(self.owner.as_deref(), &name));
        let file = fs::File::create_new(&unfinished).await.map_err(explain)?;
        Ok(Box::new(LocalUpload {
            store: self.clone(),
            key: key.to_owned(),
            target,
            unfinished: Temporary(unfinished),
            file,
            written: 0,
        }))
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        let mut upload = self.begin(key).await?;
        upload.write(content).await?;
        upload.commit().await.map(|_| ())
    }

    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        let path = self.path(key)?;
        let explain = |error: std::io::Error| self.explain(key, &error);
        let metadata = fs::metadata(&path).await.map_err(explain)?;
        if !metadata.is_file() {
            return Err(Error::NoSuchObject {
                key: key.to_owned(),
            });
        }
        let file = fs::File::open(&path).await.map_err(explain)?;
        let chunks = stream::try_unfold(file, |mut file| async move {
            let mut chunk = BytesMut::with_capacity(CHUNK);
            let read = file
                .read_buf(&mut chunk)
                .await
                .map_err(|error| Error::Other(error.to_string()))?;
            Ok((read > 0).then(|| (chunk.freeze(), file)))
        });
        Ok(ObjectStream {
            size: metadata.len(),
            chunks: chunks.boxed(),
        })
    }

    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        match fs::metadata(self.path(key)?).await {
            Ok(metadata) if metadata.is_file() => Ok(Some(described(key.to_owned(), &metadata))),
            Ok(_) => Ok(None),
            Err(error) => match self.explain(key, &error) {
                Error::NoSuchObject { .. } => Ok(None),
                error => Err(error),
            },
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let (root, prefix) = (self.root.clone(), prefix.to_owned());
        let place = self.place();
        let listed = tokio::task::spawn_blocking(move || {
            let mut objects = Vec::new();
            walk(&root, "", &prefix, MAX_ENTRIES, &mut objects)?;
            objects.sort_by(|a: &Object, b: &Object| a.key.cmp(&b.key));
            Ok(if objects.len() > MAX_ENTRIES {
                Err(too_many_entries(&place, &prefix))
            } else {
                Ok(objects)
            })
        });
        listed
            .await
            .map_err(|_| Error::Other("the listing was interrupted".to_owned()))?
            .map_err(|error: std::io::Error| self.explain("", &error))?
    }

    async fn delete(&self, key: &str) -> Result<(), Error> {
        match fs::remove_file(self.path(key)?).await {
            Ok(()) => Ok(()),
            Err(error) => match self.explain(key, &error) {
                Error::NoSuchObject { .. } => Ok(()),
                error => Err(error),
            },
        }
    }

    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        // Unfinished files are in the same directories as their target files.
        let below = prefix.rsplit_once('/').map_or("", |(folder, _)| folder);
        let mut folders = vec![below.to_owned()];
        let mut all = Vec::new();
        while let Some(folder) = folders.pop() {
            let Ok(mut entries) = fs::read_dir(self.root.join(&folder)).await else {
                continue;
            };
            while let Ok(Some(entry)) = entries.next_entry().await {
                let (Ok(metadata), Ok(name)) =
                    (entry.metadata().await, entry.file_name().into_string())
                else {
                    continue;
                };
                let full = |name: &str| match folder.as_str() {
                    "" => name.to_owned(),
                    folder => format!("{folder}/{name}"),
                };
                if metadata.is_dir() {
                    folders.push(full(&name));
                } else if let Some(target) = target_of(&name)
                    && full(target).starts_with(prefix)
                    && !self.may_be_in_use(&name, &metadata)
                {
                    if all.len() >= MAX_ENTRIES {
                        return Err(too_many_entries(&self.place(), prefix));
                    }
                    let begun = described(String::new(), &metadata).modified_unix_seconds;
                    all.push(Unfinished {
                        key: full(target),
                        id: name,
                        begun_unix_seconds: begun.unwrap_or(i64::MAX),
                    });
                }
            }
        }
        Ok(all)
    }

    async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
        let path = self.path(&unfinished.key)?.with_file_name(&unfinished.id);
        match fs::remove_file(path).await {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(self.explain(&unfinished.key, &error))
            }
            _ => Ok(()),
        }
    }
}

/// Lists only directories that can contain matches: other directories, such as `lost+found`, may be
/// inaccessible. Files that are deleted meanwhile are skipped. Ends after more than `limit` objects.
fn walk(
    dir: &Path,
    below: &str,
    prefix: &str,
    limit: usize,
    objects: &mut Vec<Object>,
) -> std::io::Result<()> {
    let was_deleted =
        |error: &std::io::Error| error.kind() == ErrorKind::NotFound && !below.is_empty();
    let entries = match std::fs::read_dir(dir) {
        Err(error) if was_deleted(&error) => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        if objects.len() > limit {
            break;
        }
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| !name.starts_with(UNFINISHED)) else {
            continue;
        };
        let key = format!("{below}{name}");
        let metadata = match entry.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        if metadata.is_dir() {
            let folder = format!("{key}/");
            if may_contain(&folder, prefix) {
                walk(&entry.path(), &folder, prefix, limit, objects)?;
            }
        } else if key.starts_with(prefix) {
            objects.push(described(key, &metadata));
        }
    }
    Ok(())
}

fn may_contain(folder: &str, prefix: &str) -> bool {
    folder.starts_with(prefix) || prefix.starts_with(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_store_directory_listing_ends_after_limit() {
        let root = tempfile::tempdir().unwrap();
        for name in ["a/1", "a/2", "b/1", "b/2", "c"] {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        let count = |limit| {
            let mut objects = Vec::new();
            walk(root.path(), "", "", limit, &mut objects).unwrap();
            objects.len()
        };
        assert_eq!([count(5), count(4), count(2)], [5, 5, 3]);
    }

    #[test]
    fn listing_enters_only_matching_directories() {
        for (folder, prefix, expected) in [
            ("etcd/", "etcd/main_v", true),
            ("etcd/main_v2/", "etcd/main_v", true),
            ("etcd/main/", "etcd/main_v", false),
            ("lost+found/", "etcd/main_v", false),
            ("etcd2/", "etcd/main_v", false),
            ("lost+found/", "main_v", false),
            ("any/", "", true),
        ] {
            assert_eq!(may_contain(folder, prefix), expected, "{folder} {prefix}");
        }
    }

    #[tokio::test]
    async fn listing_finds_exactly_objects_with_prefix() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalStore::new(dir.path());
        for key in [
            "etcd/main_v1",
            "etcd/main_v2/x",
            "etcd/main",
            "etcd/other/main_v1",
            "main_v1",
        ] {
            store.put(key, Bytes::from_static(b"x")).await.unwrap();
        }
        let listed = store.list("etcd/main_v").await.unwrap();
        let keys: Vec<&str> = listed.iter().map(|object| object.key.as_str()).collect();
        assert_eq!(keys, ["etcd/main_v1", "etcd/main_v2/x"]);
        assert_eq!(store.list("").await.unwrap().len(), 5);
        assert_eq!(store.list("nothing/there").await.unwrap(), []);
    }

    /// Some unfinished files belong to running processes, others to dead ones.
    #[tokio::test]
    async fn lists_only_abandoned_files_of_other_owners() {
        let dir = tempfile::tempdir().unwrap();
        let owned = |owner: &str| LocalStore::new(dir.path()).owned_by(owner);
        let count = async |store: &LocalStore| store.unfinished("etcd/").await.unwrap().len();
        let unowned = LocalStore::new(dir.path());
        for store in [&owned("one"), &unowned] {
            let upload = store.begin("etcd/main-a").await.unwrap();
            std::mem::forget(upload);
        }
        // A store without an owner lists every unfinished file.
        assert_eq!(count(&unowned).await, 2);
        let found = owned("one").unfinished("etcd/").await.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].key, "etcd/main-a");
        assert_eq!(owner_of(&found[0].id), owned("one").owner.as_deref());
        assert_eq!(count(&owned("two")).await, 0);
        let long_ago = SystemTime::now() - ABANDONED_AFTER;
        for entry in std::fs::read_dir(dir.path().join("etcd")).unwrap() {
            let file = std::fs::File::options()
                .write(true)
                .open(entry.unwrap().path());
            file.unwrap().set_modified(long_ago).unwrap();
        }
        assert_eq!(count(&owned("two")).await, 2);
        for unfinished in owned("two").unfinished("etcd/").await.unwrap() {
            owned("two").discard(&unfinished).await.unwrap();
        }
        assert_eq!(count(&unowned).await, 0);
    }
}
