//! A hostile member of etcd. Its responses may be long, endless or slow.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use h2::server::SendResponse;
use http::HeaderMap;
use tokio::net::TcpListener;

/// The response to one call.
pub(crate) enum Answer {
    /// A response of one message with this content. The server then ends the call.
    Message(Vec<u8>),
    /// A response of one message with this content. The server does not end the call.
    Open(Vec<u8>),
    /// An endless repetition of these bytes.
    Endless(Bytes),
    /// An endless response with this pause after each byte.
    Slow(Duration),
}

/// A gRPC server with one response for each method, such as `MemberList`.
pub(crate) struct HostileMember {
    pub(crate) url: String,
    /// Number of bytes that were sent to the client.
    sent: Arc<AtomicU64>,
}

impl HostileMember {
    pub(crate) async fn start(
        answers: impl Fn(&str) -> Answer + Clone + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let sent = Arc::new(AtomicU64::new(0));
        let counter = sent.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answers, sent) = (answers.clone(), counter.clone());
                tokio::spawn(async move {
                    let Ok(mut connection) = h2::server::handshake(stream).await else {
                        return;
                    };
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        let method = request.uri().path().rsplit('/').next();
                        let answer = answers(method.unwrap_or_default());
                        tokio::spawn(answer_call(respond, answer, sent.clone()));
                    }
                });
            }
        });
        Self { url, sent }
    }

    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::SeqCst)
    }
}

/// Sends the response to a call. Returns `None` if the client has ended the call.
async fn answer_call(
    mut respond: SendResponse<Bytes>,
    answer: Answer,
    sent: Arc<AtomicU64>,
) -> Option<()> {
    let head = http::Response::builder().header("content-type", "application/grpc");
    let mut stream = respond.send_response(head.body(()).unwrap(), false).ok()?;
    match answer {
        Answer::Message(message) => {
            send(&mut stream, framed(&message), &sent).await?;
            let status = [("grpc-status".parse().unwrap(), "0".parse().unwrap())];
            stream.send_trailers(HeaderMap::from_iter(status)).ok()
        }
        Answer::Open(message) => {
            send(&mut stream, framed(&message), &sent).await?;
            poll_fn(|context| stream.poll_reset(context)).await.ok()?;
            None
        }
        Answer::Endless(piece) => loop {
            send(&mut stream, piece.clone(), &sent).await?;
        },
        Answer::Slow(pause) => loop {
            send(&mut stream, Bytes::from_static(&[0]), &sent).await?;
            tokio::time::sleep(pause).await;
        },
    }
}

/// Sends data as long as the client accepts more. Returns `None` if the client has ended the call.
async fn send(stream: &mut SendStream<Bytes>, mut data: Bytes, sent: &AtomicU64) -> Option<()> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let granted = poll_fn(|context| stream.poll_capacity(context))
            .await?
            .ok()?;
        let now = data.split_to(granted.min(data.len()));
        sent.fetch_add(now.len() as u64, Ordering::SeqCst);
        stream.send_data(now, false).ok()?;
    }
    Some(())
}

/// A message with the length prefix of gRPC.
pub(crate) fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0][..], &length, message].concat().into()
}

/// A protobuf field with a length prefix.
pub(crate) fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut field = vec![(number << 3) | 2];
    field.extend(varint(content.len() as u64));
    field.extend_from_slice(content);
    field
}

/// A protobuf field with an integer value.
pub(crate) fn number(id: u8, value: u64) -> Vec<u8> {
    let mut field = vec![id << 3];
    field.extend(varint(value));
    field
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
        value >>= 7;
    }
    bytes.push(u8::try_from(value).unwrap());
    bytes
}

/// A `MemberListResponse` with `count` copies of the same member.
pub(crate) fn list_of(count: usize, member: &[u8]) -> Vec<u8> {
    field(2, member).repeat(count)
}

/// Numbers of fields in etcd's message `Member`.
pub(crate) const PEER_URL: u8 = 3;
pub(crate) const CLIENT_URL: u8 = 4;

/// A `StatusResponse` of a healthy member with etcd 3.6. The member is the leader of a cluster.
pub(crate) fn status() -> Vec<u8> {
    let header = [number(1, 7), number(2, 1), number(3, 10), number(4, 2)].concat();
    [
        field(1, &header),
        field(2, b"3.6.16"),
        number(3, 20_480),
        number(4, 1),
        number(5, 10),
        number(6, 2),
        number(7, 10),
    ]
    .concat()
}
