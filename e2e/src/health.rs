//! What members say of their health (`grpc.health.v1`), heard the way clients with health checking hear it: a stream
//! that tells each change.

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

/// How soon a member that does not answer is asked again.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// Listens to one member until it is dropped.
pub(crate) struct MemberHealth {
    serves: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl MemberHealth {
    /// Begins to listen; nobody serves before he has serving so.
    pub(crate) fn watch(url: &str) -> Self {
        let serves = Arc::new(AtomicBool::new(false));
        let (url, flag) = (url.to_owned(), Arc::clone(&serves));
        let task = tokio::spawn(async move {
            loop {
                // Why it does not answer is of no interest: it does not serve.
                drop(listen(&url, &flag).await);
                flag.store(false, Ordering::Relaxed);
                tokio::time::sleep(RECONNECT_INTERVAL).await;
            }
        });
        Self { serves, task }
    }

    /// What it serving last.
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

/// The two messages: a question about all services is empty, an answer is one number.
#[derive(Clone, Copy)]
struct HealthCodec;

/// Field 1, a number.
const STATUS: u8 = 0x08;
/// `HealthCheckResponse.SERVING`.
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
