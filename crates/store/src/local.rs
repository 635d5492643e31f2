//! A store in a directory, for volumes and for tests.
//!
//! A key is a relative path in the directory. An object becomes visible when its file is complete, synced and renamed.

use std::fs::{self, File, Metadata};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, StreamExt};
use md5::{Digest as _, Md5};

use crate::failure::Place;
use crate::limits::{MAX_ENTRIES, too_many_entries};
use crate::port::{Error, Object, ObjectStream, Store, Unfinished, Upload};

mod directory;
mod tenant;
mod upload;

use directory::Directory;
use tenant::{Room, Tenant};
use upload::{LocalUpload, UnfinishedFile};

/// Prefix of the names of unfinished files, which are not objects.
const UNFINISHED: &str = ".unfinished-";

/// An unfinished file of another process counts as abandoned if it was not written for this time, because no upload
/// pauses that long.
const ABANDONED_AFTER: Duration = Duration::from_mins(10);

/// Number of hexadecimal digits of the owner ([`LocalStore::owned_by`]) in the name of an unfinished file.
const OWNER_DIGITS: usize = 8;

/// Number of bytes in each read.
const CHUNK: u64 = 1 << 20;

/// A [`Store`] in a directory.
#[derive(Clone, Debug)]
pub struct LocalStore {
    directory: Directory,
    location: String,
    owner: Option<String>,
    tenant: Option<Tenant>,
}

impl LocalStore {
    /// A store in the directory `root`, which must exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self::in_directory(Directory::new(root.into()))
    }

    fn in_directory(directory: Directory) -> Self {
        let location = format!("file://{}", directory.root().display());
        Self {
            directory,
            location,
            owner: None,
            tenant: None,
        }
    }

    /// Like [`LocalStore::new`], but messages show `location` instead of the path of the directory.
    pub fn named(root: impl Into<PathBuf>, location: String) -> Self {
        Self {
            location,
            ..Self::new(root)
        }
    }

    /// Marks the names of unfinished files with `owner`, for a directory to which several processes write. `owner`
    /// identifies the writing process. The store lists an unfinished file of another process only if its last write is
    /// at least ten minutes old.
    #[must_use]
    pub fn owned_by(mut self, owner: &str) -> Self {
        let mut digits = hex::encode(Md5::digest(owner));
        digits.truncate(OWNER_DIGITS);
        self.owner = Some(digits);
        self
    }

    /// The store of a namespace, in the subdirectory `namespaces/NAMESPACE`. It follows no symbolic links. `quota` is
    /// the maximum size of its files in bytes.
    #[must_use]
    pub fn for_namespace(&self, namespace: &str, quota: Option<u64>) -> Self {
        let tenant = Tenant {
            namespace: namespace.to_owned(),
            quota,
        };
        Self {
            location: format!("{}/{}", self.location, tenant.below().display()),
            tenant: Some(tenant),
            ..self.clone()
        }
    }

    /// The directory that contains the keys.
    fn base(&self) -> PathBuf {
        let root = self.directory.root();
        let below = self.tenant.as_ref().map(Tenant::below);
        below.map_or_else(|| root.to_owned(), |below| root.join(below))
    }

    /// Whether another process may be writing to an unfinished file.
    fn may_be_in_use(&self, name: &str, written: &Metadata) -> bool {
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
            Ok(self.base().join(key))
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

    /// Invariant 13: fails if `path` contains a symbolic link, which could lead out of the directory of the namespace.
    fn check_links(&self, path: &Path) -> Result<(), Error> {
        match &self.tenant {
            Some(_) => Tenant::check_links(self.directory.root(), path),
            None => Ok(()),
        }
    }

    /// Runs file operations on the path of `key`.
    async fn at<T: Send + 'static>(
        &self,
        key: &str,
        operation: impl FnOnce(&Path) -> std::io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let (store, key, path) = (self.clone(), key.to_owned(), self.path(key)?);
        let operation = move || {
            store.check_links(&path)?;
            operation(&path).map_err(|error| store.directory.explain(&key, &error))
        };
        self.directory.run(operation).await
    }

    fn begin_at(&self, key: &str, target: PathBuf) -> Result<LocalUpload, Error> {
        let explain = |error: std::io::Error| self.directory.explain(key, &error);
        // The upload fails if the root directory does not exist, because then the volume is not mounted.
        fs::metadata(self.directory.root()).map_err(explain)?;
        self.check_links(&target)?;
        let base = self.base();
        let room = match &self.tenant {
            Some(tenant) => Room::new(tenant, &base)?,
            None => None,
        };
        let parent = target.parent().unwrap_or(&base);
        fs::create_dir_all(parent).map_err(explain)?;
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let path = parent.join(unfinished_name(self.owner.as_deref(), &name));
        let created = UnfinishedFile::create(self.directory.clone(), path, room);
        let created = created.map_err(explain)?;
        Ok(LocalUpload::new(
            self.directory.clone(),
            key.to_owned(),
            target,
            created,
        ))
    }

    fn list_all(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let base = self.base();
        self.check_links(&base)?;
        let mut objects = Vec::new();
        match walk(&base, "", prefix, MAX_ENTRIES, &mut objects) {
            // The directory of a namespace does not exist before the first backup of the namespace, so its listing is
            // empty. If the root directory does not exist, the volume is not mounted, and the listing fails.
            Err(error) if error.kind() == ErrorKind::NotFound && self.tenant.is_some() => {
                fs::metadata(self.directory.root())
                    .map_err(|error| self.directory.explain("", &error))?;
            }
            walked => walked.map_err(|error| self.directory.explain("", &error))?,
        }
        if objects.len() > MAX_ENTRIES {
            return Err(too_many_entries(&self.place(), prefix));
        }
        objects.sort_by(|a: &Object, b: &Object| a.key.cmp(&b.key));
        Ok(objects)
    }

    fn all_unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        // An unfinished file is in the same directory as its target file, so the search starts in the directory part
        // of `prefix`.
        let below = prefix.rsplit_once('/').map_or("", |(folder, _)| folder);
        self.check_links(&self.base().join(below))?;
        let mut folders = vec![below.to_owned()];
        let mut all = Vec::new();
        while let Some(folder) = folders.pop() {
            let Ok(entries) = fs::read_dir(self.base().join(&folder)) else {
                continue;
            };
            for entry in entries.map_while(Result::ok) {
                let (Ok(metadata), Ok(name)) = (entry.metadata(), entry.file_name().into_string())
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
}

fn described(key: String, metadata: &Metadata) -> Object {
    let modified = metadata.modified().ok();
    let since = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    Object {
        key,
        size: metadata.len(),
        modified_unix_seconds: since.and_then(|since| i64::try_from(since.as_secs()).ok()),
        // A file has no entity tag. On network volumes, the times and the inode number of an unchanged file can differ
        // between reads, so they cannot serve as a tag.
        tag: None,
    }
}

/// The name of an unfinished file. It contains the owner and the name of the target file.
fn unfinished_name(owner: Option<&str>, target: &str) -> String {
    let random = rand::random::<u64>();
    match owner {
        None => format!("{UNFINISHED}{random:016x}-{target}"),
        // The ID of the owner replaces some of the random digits, so that names with and without an owner have the same
        // length.
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

/// Opens a file and returns it with its size. `None` if the path is not a regular file.
fn open_file(path: &Path) -> std::io::Result<Option<(File, u64)>> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Ok(None);
    }
    Ok(Some((File::open(path)?, metadata.len())))
}

/// Removes a file. Succeeds if the file is missing.
fn remove_if_present(path: &Path) -> std::io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[async_trait]
impl Store for LocalStore {
    fn location(&self) -> String {
        self.location.clone()
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        let (store, target, key) = (self.clone(), self.path(key)?, key.to_owned());
        let begun = self.directory.run(move || store.begin_at(&key, target));
        Ok(Box::new(begun.await?))
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        let mut upload = self.begin(key).await?;
        upload.write(content).await?;
        upload.commit().await.map(|_| ())
    }

    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        let opened = self.at(key, open_file).await?;
        let (file, size) = opened.ok_or_else(|| Error::NoSuchObject {
            key: key.to_owned(),
        })?;
        let chunks = stream::try_unfold((self.directory.clone(), file), |(directory, file)| {
            Box::pin(async move {
                let (file, chunk) = directory
                    .run(move || {
                        let mut chunk = Vec::new();
                        let read = (&file).take(CHUNK).read_to_end(&mut chunk);
                        read.map_err(|error| Error::Other(error.to_string()))?;
                        Ok((file, chunk))
                    })
                    .await?;
                let next = (!chunk.is_empty()).then(|| (chunk.into(), (directory, file)));
                Ok(next)
            })
        });
        Ok(ObjectStream {
            size,
            chunks: chunks.boxed(),
        })
    }

    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        match self.at(key, |path| fs::metadata(path)).await {
            Ok(metadata) if metadata.is_file() => Ok(Some(described(key.to_owned(), &metadata))),
            Ok(_) | Err(Error::NoSuchObject { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        let (store, prefix) = (self.clone(), prefix.to_owned());
        self.directory.run(move || store.list_all(&prefix)).await
    }

    async fn delete(&self, key: &str) -> Result<(), Error> {
        match self.at(key, |path| fs::remove_file(path)).await {
            Err(Error::NoSuchObject { .. }) => Ok(()),
            deleted => deleted,
        }
    }

    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        let (store, prefix) = (self.clone(), prefix.to_owned());
        let listed = self.directory.run(move || store.all_unfinished(&prefix));
        listed.await
    }

    async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
        let id = unfinished.id.clone();
        self.at(&unfinished.key, move |path| {
            remove_if_present(&path.with_file_name(id))
        })
        .await
    }
}

/// Lists the objects below a directory, and stops above `limit` objects. Enters only directories that can contain
/// objects with `prefix`, because unrelated directories, such as `lost+found`, may be inaccessible. Skips unfinished
/// files, and files that are deleted during the listing.
fn walk(
    dir: &Path,
    below: &str,
    prefix: &str,
    limit: usize,
    objects: &mut Vec<Object>,
) -> std::io::Result<()> {
    let was_deleted =
        |error: &std::io::Error| error.kind() == ErrorKind::NotFound && !below.is_empty();
    let entries = match fs::read_dir(dir) {
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
mod tests;
