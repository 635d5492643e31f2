//! A hostile member sends long lists, large responses and endless streams. Every call must end with an error and use
//! limited memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../api/tests/damaged/mod.rs"]
mod damaged;

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use damaged::assert_little_memory;
use etcd::{Access, Deadlines, Error, Etcd, EtcdClient};
use futures::StreamExt;
use h2::SendStream;
use h2::server::SendResponse;
use http::HeaderMap;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

const MIB: u64 = 1 << 20;

/// The response to one call.
enum Answer {
    /// A response of one message with this content.
    Message(Vec<u8>),
    /// An endless response, in which the server repeats these bytes.
    Endless(Bytes),
}

/// A gRPC server with one response for each method, such as `MemberList`.
struct HostileMember {
    url: String,
    /// Number of bytes that were sent to the client.
    sent: Arc<AtomicU64>,
}

impl HostileMember {
    async fn start(answers: impl Fn(&str) -> Answer + Clone + Send + Sync + 'static) -> Self {
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

    fn sent(&self) -> u64 {
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
        Answer::Endless(piece) => loop {
            send(&mut stream, piece.clone(), &sent).await?;
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
fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0][..], &length, message].concat().into()
}

/// A protobuf field with a length prefix.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut field = vec![(number << 3) | 2];
    let mut length = content.len();
    while length >= 0x80 {
        field.push(u8::try_from(length & 0x7f).unwrap() | 0x80);
        length >>= 7;
    }
    field.push(u8::try_from(length).unwrap());
    field.extend_from_slice(content);
    field
}

/// A `MemberListResponse` with `count` copies of the same member.
fn list_of(count: usize, member: &[u8]) -> Vec<u8> {
    field(2, member).repeat(count)
}

/// Numbers of the fields of `Member`.
const PEER_URL: u8 = 3;
const CLIENT_URL: u8 = 4;

fn client() -> EtcdClient {
    EtcdClient::new(Access::default())
}

#[tokio::test]
async fn member_list_of_hostile_etcd_is_rejected_above_limit() {
    let url = |field_number: u8| field(field_number, b"http://u").repeat(33);
    for (list, expected) in [
        (list_of(33, &[]), "33 members"),
        (list_of(100_000, &[8, 1]), "100000 members"),
        (list_of(1, &url(PEER_URL)), "33 URLs"),
        (list_of(1, &url(CLIENT_URL)), "33 URLs"),
        (
            list_of(32, &field(CLIENT_URL, b"u").repeat(5)),
            "160 client URLs",
        ),
    ] {
        let answers = move |method: &str| {
            let is_list = method == "MemberList";
            Answer::Message(if is_list { list.clone() } else { Vec::new() })
        };
        let member = HostileMember::start(answers).await;
        let via = [member.url.clone()];
        for error in [
            client().members(&via).await.unwrap_err(),
            client().local_members(&member.url).await.unwrap_err(),
        ] {
            assert!(matches!(error, Error::Other(_)), "{error:?}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
    assert_little_memory();
}

#[tokio::test]
async fn member_list_of_hostile_etcd_is_accepted_at_limit() {
    let member = [
        field(PEER_URL, b"http://p").repeat(32),
        field(CLIENT_URL, b"http://c"),
    ]
    .concat();
    let list = list_of(32, &member);
    let answers = move |_: &str| Answer::Message(list.clone());
    let member = HostileMember::start(answers).await;
    let members = client().local_members(&member.url).await.unwrap();
    assert_eq!(members.members.len(), 32);
    assert!(
        members
            .members
            .iter()
            .all(|member| member.peer_urls.len() == 32)
    );
}

/// The hostile member announces a message of 3 MiB, which the client library alone would accept.
#[tokio::test]
async fn long_responses_of_hostile_etcd_are_limited() {
    let piece: Bytes = [&[0, 0, 48, 0, 0][..], &[0].repeat(60_000)].concat().into();
    let member = HostileMember::start(move |_| Answer::Endless(piece.clone())).await;
    let (client, via) = (client(), [member.url.clone()]);
    let errors = [
        client.members(&via).await.unwrap_err(),
        client.local_members(&member.url).await.unwrap_err(),
        client.status(&member.url).await.unwrap_err(),
        client.alarms(&via).await.unwrap_err(),
        client.hash(&member.url, 1).await.unwrap_err(),
        client.add_member(&via, &[], false).await.unwrap_err(),
    ];
    for error in &errors {
        assert!(error.to_string().contains("more than 512 KiB"), "{error}");
    }
    // The client library receives at most the limit, and the bytes in its HTTP/2 flow-control windows.
    let calls = errors.len() as u64;
    assert!(member.sent() < calls * 6 * MIB, "{} bytes", member.sent());
    assert_little_memory();
}

#[tokio::test]
async fn endless_snapshot_of_hostile_etcd_fails() {
    let blob = framed(&field(3, &[7].repeat(32 << 10)));
    let member = HostileMember::start(move |_| Answer::Endless(blob.clone())).await;
    let client = client().with_max_snapshot(MIB);
    let mut snapshot = client.snapshot(&member.url).await.unwrap();
    let mut read = 0;
    let error = loop {
        match snapshot
            .chunks
            .next()
            .await
            .expect("the stream must not end without an error")
        {
            Ok(chunk) => read += chunk.len() as u64,
            Err(error) => break error,
        }
        assert!(read <= MIB, "the snapshot continues after the limit");
    };
    assert_eq!(read, MIB);
    assert!(
        error.to_string().contains("the snapshot has more than"),
        "{error}"
    );
}

#[tokio::test]
async fn snapshot_of_empty_messages_from_hostile_etcd_times_out() {
    let empty = framed(&[]).repeat(1_000).into();
    let answer = move |_: &str| Answer::Endless(Bytes::clone(&empty));
    let member = HostileMember::start(answer).await;
    let deadlines = Deadlines {
        progress: Duration::from_millis(200),
        ..Deadlines::default()
    };
    let client = EtcdClient::with_deadlines(Access::default(), deadlines);
    let error = client.snapshot(&member.url).await.err().unwrap();
    assert!(matches!(error, Error::Timeout(_)), "{error:?}");
    assert_little_memory();
}

#[tokio::test]
async fn failing_call_is_sent_to_limited_number_of_members() {
    // No process listens at port 1, so every attempt fails.
    let via: Vec<String> = (0..200)
        .map(|number| format!("http://127.0.0.1:1#{number}"))
        .collect();
    for error in [
        client().members(&via).await.unwrap_err(),
        client().disable_auth(&via).await.unwrap_err(),
    ] {
        assert_eq!(error.to_string().matches('#').count(), 32, "{error}");
    }
}

/// Sends `piece` to each client forever, with `pause` between two pieces. Counts the bytes that were sent.
async fn metrics(piece: &'static [u8], pause: Duration) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let sent = Arc::new(AtomicU64::new(0));
    let counter = sent.clone();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = b"HTTP/1.0 200 OK\r\n\r\n";
        stream.write_all(head).await.unwrap();
        while stream.write_all(piece).await.is_ok() {
            counter.fetch_add(piece.len() as u64, Ordering::SeqCst);
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
        }
    });
    (address, sent)
}

#[tokio::test]
async fn endless_metrics_of_hostile_etcd_are_limited() {
    let (address, sent) = metrics(&[b'\n'; 4096], Duration::ZERO).await;
    let error = client().pulse(&address).await.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("longer than that of an etcd member"),
        "{error}"
    );
    // The client receives at most the limit, and some MiB in the buffers of the sockets.
    let sent = sent.load(Ordering::SeqCst);
    assert!(sent < 20 * MIB, "{sent} bytes");
}

#[tokio::test]
async fn slow_metrics_of_hostile_etcd_time_out() {
    let (address, _) = metrics(b"x", Duration::from_millis(20)).await;
    let deadlines = Deadlines {
        status: Duration::from_millis(200),
        ..Deadlines::default()
    };
    let client = EtcdClient::with_deadlines(Access::default(), deadlines);
    let error = client.pulse(&address).await.unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error:?}");
}
