//! Snapshot streams of the real client. Each stream has its own connection and its own deadline.

use std::time::Duration;

use bytes::Bytes;
use etcd_client::SnapshotStreaming;
use futures::stream::{self, StreamExt};
use tokio::time::timeout;

use super::EtcdClient;
use crate::answer::{classify, of_read};
use crate::login::NOT_HEDGED;
use crate::port::{Error, Snapshot};

impl EtcdClient {
    pub(super) async fn stream(&self, member: &str) -> Result<Snapshot, Error> {
        let login = self.logged_in(member, None, self.deadlines.call).await?;
        let opened =
            match Box::pin(self.call_with_login(login, &NOT_HEDGED, self.open(member))).await {
                Err(Error::AccessDenied(_)) if self.session.has_credentials() => {
                    // The member does not know the token, or no etcd user has the name in the certificate. The client
                    // uses its suspended login (see `restore_login`), or logs in again.
                    let login = match self.session.restore_login() {
                        Some(former) => Some(former),
                        None => self.logged_in(member, login, self.deadlines.call).await?,
                    };
                    Box::pin(self.call_with_login(login, &NOT_HEDGED, self.open(member))).await?
                }
                opened => opened?,
            };
        let (source, first, version) = opened;
        let limit = self.max_snapshot;
        let read = first.len() as u64;
        let rest = stream::try_unfold((source, read), move |(mut source, read)| async move {
            let Some((chunk, _)) = source.next().await? else {
                return Ok(None);
            };
            let read = read.saturating_add(chunk.len() as u64);
            if read > limit {
                return Err(Error::Other(format!(
                    "{}: the snapshot has more than {limit} bytes, the limit of the backup operator: check that the endpoint is \
                     an etcd member",
                    source.endpoint
                )));
            }
            Ok(Some((chunk, (source, read))))
        });
        Ok(Snapshot {
            chunks: stream::iter([Ok(first)]).chain(rest).boxed(),
            version: Some(version).filter(|version| !version.is_empty()),
        })
    }

    /// Requests a snapshot. Returns the stream, its first chunk, and the etcd version in the stream.
    async fn open(&self, member: &str) -> Result<(Source, Bytes, String), Error> {
        // A snapshot uses its own connection, because its transfer can take hours and would slow down other calls on
        // a shared connection.
        let mut client = timeout(self.deadlines.call, self.connect(member))
            .await
            .map_err(|_| Error::Timeout(member.to_owned()))??;
        let mut source = Source {
            endpoint: member.to_owned(),
            stream: timeout(self.deadlines.call, client.snapshot())
                .await
                .map_err(|_| Error::Timeout(member.to_owned()))?
                .map_err(|error| of_read(classify(member, &error)))?,
            progress: self.deadlines.progress,
        };
        match source.next().await? {
            Some((first, version)) => Ok((source, first, version)),
            None => Err(Error::Other(format!("{member}: the snapshot is empty"))),
        }
    }
}

struct Source {
    endpoint: String,
    stream: SnapshotStreaming,
    progress: Duration,
}

impl Source {
    async fn next(&mut self) -> Result<Option<(Bytes, String)>, Error> {
        let Self {
            endpoint,
            stream,
            progress,
        } = self;
        let message = async {
            loop {
                match stream.message().await {
                    // An empty message is ignored, so it does not extend the deadline.
                    Ok(Some(message)) if message.blob().is_empty() => {}
                    message => return message,
                }
            }
        };
        let message = timeout(*progress, message)
            .await
            .map_err(|_| Error::Timeout(endpoint.clone()))?
            .map_err(|error| of_read(classify(endpoint, &error)))?;
        Ok(message.map(|message| {
            (
                Bytes::copy_from_slice(message.blob()),
                message.version().to_owned(),
            )
        }))
    }
}
