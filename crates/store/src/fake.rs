//! A store for the tests of the operators. The store keeps objects in a directory, and tests can make its requests
//! fail.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::local::LocalStore;
use crate::port::{Committed, Error, Object, ObjectStream, Store, Unfinished, Upload};

/// The requests that a [`FaultyStore`] can make fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A call of [`Store::begin`].
    Begin,
    /// A call of [`Upload::write`].
    Write,
    /// A call of [`Upload::commit`] that fails, so that the object does not exist.
    Commit,
    /// A call of [`Upload::commit`] that fails although the object exists, because the response is lost.
    CommitAnswer,
    /// A call of [`Store::put`].
    Put,
    /// A call of [`Store::get`].
    Get,
    /// A call of [`Store::head`].
    Head,
    /// A call of [`Store::list`].
    List,
    /// A call of [`Store::delete`].
    Delete,
    /// A call of [`Store::unfinished`].
    Unfinished,
}

/// A store in a directory. Tests choose which of its requests fail.
#[derive(Clone, Debug)]
pub struct FaultyStore {
    inner: LocalStore,
    script: Arc<Mutex<VecDeque<(Call, usize, Error)>>>,
    write_delay: Duration,
}

impl FaultyStore {
    /// Creates a store whose requests succeed until [`FaultyStore::fail`] is called.
    pub fn new(inner: LocalStore) -> Self {
        Self {
            inner,
            script: Arc::default(),
            write_delay: Duration::ZERO,
        }
    }

    /// Delays each call of [`Upload::write`] by this time.
    #[must_use]
    pub fn with_write_delay(self, write_delay: Duration) -> Self {
        Self {
            write_delay,
            ..self
        }
    }

    /// Makes the next request of the kind `call` fail with `error`. If a test calls this function several times, each
    /// call makes one more request fail, in the order of the calls.
    pub fn fail(&self, call: Call, error: Error) {
        self.fail_after(call, 0, error);
    }

    /// Makes a request of the kind `call` fail with `error`, after `working` requests of this kind have succeeded.
    pub fn fail_after(&self, call: Call, working: usize, error: Error) {
        self.script
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back((call, working, error));
    }

    /// Removes all errors that no request has returned yet, so that all further requests succeed.
    pub fn forget(&self) {
        self.script
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    fn check(&self, call: Call) -> Result<(), Error> {
        let mut script = self.script.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = script.iter().position(|(scripted, ..)| *scripted == call) else {
            return Ok(());
        };
        match script.get_mut(index) {
            Some((_, working, _)) if *working > 0 => {
                *working -= 1;
                Ok(())
            }
            _ => Err(script
                .remove(index)
                .map_or_else(|| Error::Other(String::new()), |(_, _, error)| error)),
        }
    }
}

struct FaultyUpload {
    inner: Box<dyn Upload>,
    store: FaultyStore,
}

#[async_trait]
impl Upload for FaultyUpload {
    async fn write(&mut self, chunk: Bytes) -> Result<(), Error> {
        self.store.check(Call::Write)?;
        if !self.store.write_delay.is_zero() {
            tokio::time::sleep(self.store.write_delay).await;
        }
        self.inner.write(chunk).await
    }

    async fn commit(self: Box<Self>) -> Result<Committed, Error> {
        self.store.check(Call::Commit)?;
        let committed = self.inner.commit().await?;
        self.store.check(Call::CommitAnswer)?;
        Ok(committed)
    }

    async fn abort(self: Box<Self>) -> Result<(), Error> {
        self.inner.abort().await
    }
}

#[async_trait]
impl Store for FaultyStore {
    fn location(&self) -> String {
        self.inner.location()
    }

    async fn begin(&self, key: &str) -> Result<Box<dyn Upload>, Error> {
        self.check(Call::Begin)?;
        Ok(Box::new(FaultyUpload {
            inner: self.inner.begin(key).await?,
            store: self.clone(),
        }))
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), Error> {
        self.check(Call::Put)?;
        self.inner.put(key, content).await
    }

    async fn get(&self, key: &str) -> Result<ObjectStream, Error> {
        self.check(Call::Get)?;
        self.inner.get(key).await
    }

    async fn head(&self, key: &str) -> Result<Option<Object>, Error> {
        self.check(Call::Head)?;
        self.inner.head(key).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Object>, Error> {
        self.check(Call::List)?;
        self.inner.list(prefix).await
    }

    async fn delete(&self, key: &str) -> Result<(), Error> {
        self.check(Call::Delete)?;
        self.inner.delete(key).await
    }

    async fn unfinished(&self, prefix: &str) -> Result<Vec<Unfinished>, Error> {
        self.check(Call::Unfinished)?;
        self.inner.unfinished(prefix).await
    }

    async fn discard(&self, unfinished: &Unfinished) -> Result<(), Error> {
        self.inner.discard(unfinished).await
    }
}
