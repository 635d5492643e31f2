//! Watches keys of a cluster over a separate connection, for the recorder of changes and for mirrors.
//!
//! etcd sends the events of a revision in order. It splits a large batch into fragments, so the events of one revision
//! can arrive in several batches. etcd does not split a batch that it has read before it confirms the watch.
//!
//! The client therefore limits the size of a batch. After [`WatchError::TooLarge`], the caller starts the watch again.

mod message;

use std::mem::take;
use std::time::Duration;

use bytes::Bytes;
use etcd_client::{Client, GetOptions, LeaseTimeToLiveOptions, ResponseHeader};
use futures::SinkExt;
use futures::channel::mpsc;
use http::uri::PathAndQuery;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use self::message::{
    CreateRequest, Event, ProgressRequest, RequestUnion, WatchRequest, WatchResponse,
};
use super::EtcdClient;
use crate::answer::{classify, of_read};
use crate::channel::WATCH;
use crate::limits::shortened;
use crate::login::NOT_HEDGED;
use crate::port::{ClusterId, Error};
use crate::range::KeyRange;

/// Maximum size of one batch in bytes. An unsplit batch of etcd has up to 1,000 revisions.
pub const MAX_WATCH_MESSAGE: usize = 40 << 20;

/// With this header, etcd ends the watch if the member has no leader. Without it, a disconnected member would keep open
/// a watch that receives no events.
const REQUIRE_LEADER: &str = "hasleader";

/// A put or a deletion of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: Bytes,
    /// The new value. `None` if the key was deleted.
    pub value: Option<Value>,
}

/// The value of a key, with the properties that etcd stores with the value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Value {
    /// The content.
    pub content: Bytes,
    /// The lease of the key. 0 if the key has no lease.
    pub lease: i64,
    /// Number of puts since the creation of the key, including the put that created the key.
    pub version: i64,
    /// The revision in which the key was created.
    pub create_revision: i64,
}

/// An event of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchEvent {
    /// The revision of the change.
    pub revision: i64,
    /// The change.
    pub change: Change,
}

/// Events that etcd has sent together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchBatch {
    /// The cluster ID in the response header.
    pub cluster_id: ClusterId,
    /// The revision in the response header. A batch without events is a progress notification. Before 3.4.25 and 3.5.8,
    /// etcd may send events with earlier revisions after a progress notification.
    pub revision: i64,
    /// The events in etcd's order.
    pub events: Vec<WatchEvent>,
    /// True if events of the same revision may follow in the next batch.
    pub is_fragment: bool,
}

/// Why a watch has ended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WatchError {
    /// etcd has compacted revisions that the watch has not received yet.
    #[error("etcd has compacted all revisions before {compacted}")]
    Compacted {
        /// etcd's compaction revision.
        compacted: i64,
    },
    /// A batch exceeds [`MAX_WATCH_MESSAGE`]. After a restart of the watch, etcd usually splits the batch.
    #[error("etcd has sent a batch with more than {MAX_WATCH_MESSAGE} bytes: {0}")]
    TooLarge(String),
    /// The connection has ended, or etcd has canceled the watch.
    #[error(transparent)]
    Ended(Error),
}

/// The granted TTL of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTtl {
    /// The TTL in seconds with which the lease was granted. `None` if the lease does not exist.
    pub granted: Option<i64>,
    /// A revision of etcd that was read after the TTL. If the lease does not exist, etcd deleted its keys at this
    /// revision or before.
    pub revision: i64,
}

/// A running watch. Dropping the handle ends the watch.
pub struct Watch {
    endpoint: String,
    requests: mpsc::Sender<WatchRequest>,
    responses: Streaming<WatchResponse>,
    /// Kept, because `requests` and `responses` work only while their client exists.
    _client: Client,
}

impl Watch {
    /// Waits for the next batch. If the caller drops the future, no batch is lost.
    ///
    /// # Errors
    /// Fails if the watch has ended. The watch cannot be used after an error.
    pub async fn next(&mut self) -> Result<WatchBatch, WatchError> {
        let mut response = self.message().await?;
        if response.compact_revision > 0 {
            return Err(WatchError::Compacted {
                compacted: response.compact_revision,
            });
        }
        if response.canceled {
            let reason = shortened(&response.cancel_reason);
            let text = format!("{}: etcd has canceled the watch: {reason}", self.endpoint);
            return Err(WatchError::Ended(Error::Unavailable(text)));
        }
        let header = response.header.unwrap_or_default();
        let events: Result<Vec<_>, _> = take(&mut response.events).into_iter().map(event).collect();
        Ok(WatchBatch {
            cluster_id: ClusterId(header.cluster_id),
            revision: header.revision,
            events: events.map_err(|problem| {
                WatchError::Ended(Error::Other(format!("{}: {problem}", self.endpoint)))
            })?,
            is_fragment: response.fragment,
        })
    }

    /// Requests a progress notification, which is a batch without events. etcd sends the notification after all events
    /// that it had at the time of the request.
    ///
    /// etcd ignores the request while the start revision is in the future, and while the watch has not received all
    /// past events.
    ///
    /// # Errors
    /// Fails if the watch has ended.
    pub async fn request_progress(&mut self) -> Result<(), WatchError> {
        let request = WatchRequest {
            request_union: Some(RequestUnion::Progress(ProgressRequest {})),
        };
        self.requests.send(request).await.map_err(|_| {
            let text = format!("{}: the connection is closed", self.endpoint);
            WatchError::Ended(Error::Unreachable(text))
        })
    }

    async fn message(&mut self) -> Result<WatchResponse, WatchError> {
        match self.responses.message().await {
            Ok(Some(response)) => Ok(response),
            Ok(None) => {
                let text = format!("{}: etcd has closed the connection", self.endpoint);
                Err(WatchError::Ended(Error::Unreachable(text)))
            }
            Err(status) => Err(failed(&self.endpoint, status)),
        }
    }
}

fn failed(endpoint: &str, status: Status) -> WatchError {
    if status.code() == Code::OutOfRange && status.message().contains("length too large") {
        return WatchError::TooLarge(endpoint.to_owned());
    }
    let error = etcd_client::Error::GRpcStatus(status);
    WatchError::Ended(of_read(classify(endpoint, &error)))
}

fn event(event: Event) -> Result<WatchEvent, &'static str> {
    let kv = event.kv.ok_or("an event contains no key")?;
    let value = match event.kind {
        0 => Some(Value {
            content: kv.value,
            lease: kv.lease,
            version: kv.version,
            create_revision: kv.create_revision,
        }),
        1 => None,
        _ => return Err("an event has an unknown type"),
    };
    Ok(WatchEvent {
        revision: kv.mod_revision,
        change: Change { key: kv.key, value },
    })
}

/// True if etcd has rejected the watch because of its login.
fn is_denied(reason: &str) -> bool {
    [
        "permission denied",
        "invalid auth token",
        "user name is empty",
        "revision of auth store is old",
    ]
    .iter()
    .any(|text| reason.contains(text))
}

impl EtcdClient {
    /// Watches all keys from `start_revision`, through one member. The watch includes the events of `start_revision`.
    ///
    /// # Errors
    /// Fails if the member does not confirm the watch in time. A compacted `start_revision` is an error of
    /// [`Watch::next`].
    pub async fn watch(&self, member: &str, start_revision: i64) -> Result<Watch, Error> {
        self.watch_range(member, &KeyRange::all(), start_revision)
            .await
    }

    /// Like [`EtcdClient::watch`], but only for the keys of a range.
    ///
    /// # Errors
    /// Fails like [`EtcdClient::watch`].
    pub async fn watch_range(
        &self,
        member: &str,
        range: &KeyRange,
        start_revision: i64,
    ) -> Result<Watch, Error> {
        let login = Box::pin(self.logged_in(member, None, self.deadlines.call)).await?;
        let open = || self.open_watch(member, range, start_revision);
        match Box::pin(self.call_with_login(login, &NOT_HEDGED, open())).await {
            Err(Error::AccessDenied(_)) if self.session.has_credentials() => {
                let login = match self.session.restore_login() {
                    Some(former) => Some(former),
                    None => Box::pin(self.logged_in(member, login, self.deadlines.call)).await?,
                };
                Box::pin(self.call_with_login(login, &NOT_HEDGED, open())).await
            }
            opened => opened,
        }
    }

    async fn open_watch(
        &self,
        member: &str,
        range: &KeyRange,
        start_revision: i64,
    ) -> Result<Watch, Error> {
        let deadline: Duration = self.deadlines.call;
        timeout(deadline, self.request_watch(member, range, start_revision))
            .await
            .map_err(|_| Error::Timeout(member.to_owned()))?
    }

    async fn request_watch(
        &self,
        member: &str,
        range: &KeyRange,
        start_revision: i64,
    ) -> Result<Watch, Error> {
        let read = |error: &etcd_client::Error| of_read(classify(member, error));
        let (url, options) = self.options(member)?;
        let connected = self.session.connect_with_channel(url, options).await;
        let (client, channel) = connected.map_err(|error| read(&error))?;
        let mut grpc = Grpc::new(channel).max_decoding_message_size(MAX_WATCH_MESSAGE);
        grpc.ready()
            .await
            .map_err(|error| Error::Unreachable(format!("{member}: {error}")))?;
        let (mut requests, sent) = mpsc::channel(4);
        let create = CreateRequest {
            key: range.start.clone(),
            range_end: range.end.clone(),
            start_revision,
            progress_notify: true,
            fragment: true,
        };
        let create = WatchRequest {
            request_union: Some(RequestUnion::Create(create)),
        };
        requests
            .send(create)
            .await
            .map_err(|_| Error::Unreachable(member.to_owned()))?;
        let mut request = Request::new(sent);
        request
            .metadata_mut()
            .insert(REQUIRE_LEADER, MetadataValue::from_static("true"));
        let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
        let responses = grpc
            .streaming(request, PathAndQuery::from_static(WATCH), codec)
            .await
            .map_err(|status| read(&etcd_client::Error::GRpcStatus(status)))?
            .into_inner();
        let mut watch = Watch {
            endpoint: member.to_owned(),
            requests,
            responses,
            _client: client,
        };
        // The first message of etcd confirms that the watch was created, or contains the reason for its rejection.
        let first = watch.message().await.map_err(|error| match error {
            WatchError::Ended(error) => error,
            other => Error::Other(format!("{member}: {other}")),
        })?;
        let reason = shortened(&first.cancel_reason);
        match (first.created, first.canceled) {
            (true, false) => Ok(watch),
            (_, true) if is_denied(&reason) => {
                Err(Error::AccessDenied(format!("{member}: {reason}")))
            }
            (_, true) => Err(Error::Unavailable(format!(
                "{member}: etcd rejects the watch: {reason}"
            ))),
            (false, false) => Err(Error::Other(format!(
                "{member}: the first message does not confirm the watch: check that the endpoint is an etcd member"
            ))),
        }
    }

    /// Returns the ID of the cluster and its newest revision. The read is linearizable, so each revision that a member
    /// of the cluster has sent before the call is at most the returned revision.
    ///
    /// # Errors
    /// Fails if the member does not answer, or if it has no leader.
    pub async fn newest_revision(&self, member: &str) -> Result<(ClusterId, i64), Error> {
        self.ask(member, self.deadlines.call, |mut client| async move {
            let options = GetOptions::new().with_count_only();
            let answer = client.get([0_u8], Some(options)).await?;
            let found = answer
                .header()
                .map(|header| (ClusterId(header.cluster_id()), header.revision()));
            found.ok_or_else(|| {
                etcd_client::Error::EndpointError("the answer has no header".to_owned())
            })
        })
        .await
    }

    /// Returns the TTL with which a lease was granted. The leader answers, so the call needs a leader.
    ///
    /// # Errors
    /// Fails if the member does not answer.
    pub async fn lease(&self, member: &str, id: i64) -> Result<LeaseTtl, Error> {
        self.ask(member, self.deadlines.call, |mut client| async move {
            let options = LeaseTimeToLiveOptions::new();
            let answer = client.lease_time_to_live(id, Some(options)).await?;
            // The revision in the header of `answer` may be lower than the revision at which the lease ended. The
            // revision of a linearizable read after `answer` is at least as high as the revision of the end.
            let barrier = GetOptions::new().with_count_only();
            let barrier = client.get([0_u8], Some(barrier)).await?;
            Ok(LeaseTtl {
                // etcd answers with a TTL of -1 if the lease does not exist.
                granted: (answer.ttl() >= 0).then(|| answer.granted_ttl()),
                revision: barrier.header().map_or(0, ResponseHeader::revision),
            })
        })
        .await
    }
}
