//! Watches the health of members through `grpc.health.v1`, like clients that check health. A member reports each
//! change on one stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use bytes::Buf;
use http::uri::PathAndQuery;
use tokio::task::JoinHandle;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Endpoint;
use tonic::{Request, Status};

/// The pause before a new connection after a stream has ended.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// Watches the health of one member until this value is dropped.
pub(crate) struct MemberHealth {
    serves: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl MemberHealth {
    /// Starts the watch. The member counts as unhealthy until its first report, and while no stream is open.
    pub(crate) fn watch(url: &str) -> Self {
        let serves = Arc::new(AtomicBool::new(false));
        let (url, flag) = (url.to_owned(), Arc::clone(&serves));
        let task = tokio::spawn(async move {
            loop {
                // The error is ignored, because a member without a stream counts as unhealthy, whatever the error is.
                drop(listen(&url, &flag).await);
                flag.store(false, Ordering::Relaxed);
                tokio::time::sleep(RECONNECT_INTERVAL).await;
            }
        });
        Self { serves, task }
    }

    /// True if the stream of reports is open, and the last report says that the member is healthy.
    pub(crate) fn serves(&self) -> bool {
        self.serves.load(Ordering::Relaxed)
    }
}

impl Drop for MemberHealth {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn listen(url: &str, serves: &AtomicBool) -> Result<()> {
    let endpoint = Endpoint::from_shared(url.to_owned())?;
    let channel = endpoint
        .connect_timeout(RECONNECT_INTERVAL * 5)
        .connect()
        .await?;
    let mut client = Grpc::new(channel);
    client.ready().await?;
    let path = PathAndQuery::from_static("/grpc.health.v1.Health/Watch");
    let answer = client
        .server_streaming(Request::new(()), path, HealthCodec)
        .await?;
    let mut changes = answer.into_inner();
    while let Some(serving) = changes.message().await? {
        serves.store(serving, Ordering::Relaxed);
    }
    Ok(())
}

/// Encodes the request and decodes the response of `Health.Watch`. The request has no fields, and the response has one
/// number.
#[derive(Clone, Copy)]
struct HealthCodec;

/// The protobuf tag of `HealthCheckResponse.status`: field 1, a varint.
const STATUS: u8 = 0x08;
/// The value of `HealthCheckResponse.SERVING`.
const SERVING: u8 = 1;

impl Codec for HealthCodec {
    type Encode = ();
    type Decode = bool;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for HealthCodec {
    type Item = ();
    type Error = Status;

    fn encode(&mut self, (): (), _: &mut EncodeBuf<'_>) -> Result<(), Status> {
        Ok(())
    }
}

impl Decoder for HealthCodec {
    type Item = bool;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<bool>, Status> {
        let mut bytes = from.copy_to_bytes(from.remaining());
        let is_status = bytes.has_remaining() && bytes.get_u8() == STATUS;
        Ok(Some(
            is_status && bytes.has_remaining() && bytes.get_u8() == SERVING,
        ))
    }
}
