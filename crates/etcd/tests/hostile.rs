//! A hostile member sends long lists, large responses and endless streams. Every call must end with an error and use
//! limited memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../api/tests/damaged/mod.rs"]
mod damaged;
#[path = "hostile/member.rs"]
#[allow(dead_code, reason = "the tests of the operators also use the module")]
mod member;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use damaged::assert_little_memory;
use etcd::{Access, Deadlines, Error, Etcd, EtcdClient};
use futures::StreamExt;
use member::{Answer, CLIENT_URL, HostileMember, PEER_URL, field, framed, list_of};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

const MIB: u64 = 1 << 20;

fn client() -> EtcdClient {
    EtcdClient::new(Access::default())
}

#[tokio::test]
async fn member_list_of_hostile_etcd_is_rejected_above_limit() {
    let url = |field_number: u8| field(field_number, b"http://u").repeat(33);
    for (list, expected) in [
        (list_of(33, &[]), "33 members"),
        (list_of(8_000, &[8, 1]), "8000 members"),
        (list_of(100_000, &[8, 1]), "more than 32 KiB"),
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

/// The hostile member announces a message of 3 MiB. Without the limit of 32 KiB, the client library would accept the
/// message.
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
        assert!(error.to_string().contains("more than 32 KiB"), "{error}");
    }
    // In each call, the client receives at most its limit for a response and the bytes of its HTTP/2 flow-control
    // windows.
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
    // No process listens at port 1, so every connection fails.
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

/// Sends copies of `piece` to the first client until the client closes the connection, with `pause` after each copy.
/// Returns the address of the server, and the number of sent bytes.
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
    // The client receives at most its limit and some MiB in the socket buffers.
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
