//! A hostile store sends endless responses and listings, wrong sizes and slow bytes. Every call must fail with an error
//! that names a remedy, and must use limited memory.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../api/tests/damaged/mod.rs"]
mod damaged;

mod clients;
#[path = "hostile/server.rs"]
mod server;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use damaged::assert_little_memory;
use server::{HostileServer, Reply, Then};
use store::testing::with_listing_timeout;
use store::{AbsStore, Error, GcsStore, S3Store, Store};

const MIB: u64 = 1 << 20;

/// Sockets and HTTP clients buffer up to this number of bytes that the `store` crate has not read.
const BUFFERS: u64 = 20 * MIB;

impl HostileServer {
    async fn s3(&self) -> S3Store {
        clients::s3(&self.endpoint).await
    }

    async fn google(&self) -> GcsStore {
        clients::google(&self.endpoint).await
    }

    fn azure(&self) -> AbsStore {
        clients::azure(&self.endpoint)
    }

    async fn stores(&self) -> [(&'static str, Box<dyn Store>); 3] {
        [
            ("S3", Box::new(self.s3().await)),
            ("Google", Box::new(self.google().await)),
            ("Azure", Box::new(self.azure())),
        ]
    }
}

/// Asserts that a call failed because of a limit, with a message that contains `expected`.
fn assert_limit<T>(name: &str, server: &HostileServer, result: Result<T, Error>, expected: &str) {
    let Err(error) = result else {
        panic!("{name}: succeeded");
    };
    let text = error.to_string();
    assert!(
        matches!(error, Error::Excessive { .. }),
        "{name}: {error:?}"
    );
    assert!(text.contains(expected), "{name}: {text}");
    assert!(text.contains(&server.endpoint), "{name}: {text}");
    assert!(
        text.contains("check") || text.contains("delete old"),
        "{name}: {text}"
    );
}

/// The beginning of a listing, in the format of the kind of store whose client sent the request.
fn beginning(request: &str) -> &'static str {
    if request.contains("/storage/v1/") {
        "{\"items\":["
    } else if request.contains("list-type=2") {
        "<?xml version=\"1.0\"?><ListBucketResult><Prefix>"
    } else {
        "<?xml version=\"1.0\"?><EnumerationResults><Prefix>"
    }
}

/// A page of a listing with `count` entries and the marker of the next page.
fn page(request: &str, count: usize, marker: &str) -> String {
    if request.contains("/storage/v1/") {
        let items = vec!["{\"name\":\"key\",\"size\":\"1\"}"; count].join(",");
        format!("{{\"nextPageToken\":\"{marker}\",\"items\":[{items}]}}")
    } else if request.contains("list-type=2") {
        let entries = "<Contents><Key>key</Key><Size>1</Size></Contents>".repeat(count);
        format!(
            "<ListBucketResult><IsTruncated>true</IsTruncated>\
             <NextContinuationToken>{marker}</NextContinuationToken>{entries}</ListBucketResult>"
        )
    } else if request.contains("uploads") {
        let entry = "<Upload><Key>key</Key><UploadId>id</UploadId>\
                     <Initiated>2026-11-24T00:00:00Z</Initiated></Upload>";
        format!(
            "<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>\
             <NextKeyMarker>{marker}</NextKeyMarker><NextUploadIdMarker>id</NextUploadIdMarker>{}\
             </ListMultipartUploadsResult>",
            entry.repeat(count)
        )
    } else {
        let time = "Tue, 24 Nov 2026 00:00:00 GMT";
        let blob = format!(
            "<Blob><Name>key</Name><Properties><Creation-Time>{time}</Creation-Time>\
             <Last-Modified>{time}</Last-Modified><Etag>0x1</Etag><Content-Length>1</Content-Length>\
             <Content-Type>text/plain</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
        );
        format!(
            "<EnumerationResults><Blobs>{}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>",
            blob.repeat(count)
        )
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_list_response_of_store_is_rejected_at_size_limit() {
    for length in ["x-no: length", "content-length: 999999999999"] {
        let server = HostileServer::start(move |request| {
            Reply::new(beginning(request), Then::Repeat(vec![b'x'; 64 << 10])).with_header(length)
        });
        for (name, store) in server.stores().await {
            let before = server.sent();
            let result = store.list("prefix").await;
            assert_limit(name, &server, result, "more than 16 MiB");
            let sent = server.sent() - before;
            assert!(sent < 16 * MIB + BUFFERS, "{name}: {sent} bytes");
        }
        // The server counted one request of each of the three clients, so no client retried.
        assert_eq!(server.requests(), 3);
    }
    assert_little_memory();
}

/// Error responses and responses to writes have a lower limit than listings, because they are short.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reading_of_endless_error_and_write_responses_stops_at_limit() {
    let endless = || Reply::new("x", Then::Repeat(vec![b'x'; 64 << 10]));
    for status in ["200 OK", "400 Bad Request", "403 Forbidden"] {
        let server = HostileServer::start(move |_| endless().with_status(status));
        for (name, store) in server.stores().await {
            let before = server.sent();
            let deleted = store.delete("key").await;
            let put = store.put("key", "content".into()).await;
            let got = store.get("key").await.map(|object| object.size);
            // With status 200, the Azure client does not read the body of the response to a write or a deletion, and
            // `get` does not read the content. Therefore these requests may succeed.
            if !status.starts_with("200") {
                for result in [&deleted, &put] {
                    assert!(result.is_err(), "{name}: {status}");
                }
                assert!(got.is_err(), "{name}: {status}");
            }
            if name == "Google" {
                assert_limit(name, &server, deleted, "more than 1 MiB");
                assert_limit(name, &server, put, "more than 1 MiB");
            }
            let sent = server.sent() - before;
            assert!(sent < 3 * (MIB + BUFFERS), "{name}: {sent} bytes");
        }
    }
    assert_little_memory();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_listing_with_endless_pages_fails() {
    let number = AtomicUsize::new(0);
    let server = HostileServer::start(move |request| {
        let marker = number.fetch_add(1, Ordering::SeqCst).to_string();
        Reply::new(page(request, 1_000, &marker), Then::End)
    });
    for (name, store) in server.stores().await {
        let result = store.list("prefix").await;
        assert_limit(name, &server, result, "more than 100000 objects");
    }
    let unfinished = server.s3().await.unfinished("prefix").await;
    assert_limit(
        "S3 uploads",
        &server,
        unfinished,
        "more than 100000 objects",
    );
    assert!(
        server.requests() <= 4 * 101,
        "{} requests",
        server.requests()
    );
    assert_little_memory();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_listing_with_repeated_page_marker_fails() {
    let server = HostileServer::start(|request| Reply::new(page(request, 1, "same"), Then::End));
    for (name, store) in server.stores().await {
        let result = store.list("prefix").await;
        assert_limit(name, &server, result, "repeats a page");
    }
    let unfinished = server.s3().await.unfinished("prefix").await;
    assert_limit("S3 uploads", &server, unfinished, "repeats a page");
    assert_eq!(server.requests(), 4 * 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_store_listing_times_out() {
    let pause = Duration::from_millis(20);
    let server =
        HostileServer::start(move |request| Reply::new(beginning(request), Then::Slow(pause)));
    let limit = Duration::from_millis(200);
    let stores = server.stores().await;
    let s3 = server.s3().await;
    let began = Instant::now();
    let all = async {
        for (name, store) in stores {
            let result = store.list("prefix").await;
            assert_limit(
                name,
                &server,
                result,
                "did not end the listing of \"prefix\" within 0.2 s",
            );
        }
        let unfinished = s3.unfinished("prefix").await;
        assert_limit("S3 uploads", &server, unfinished, "did not end the listing");
    };
    with_listing_timeout(limit, all).await;
    // Without the time limit of the whole listing, only the timeout of a single request (20 s) would apply.
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "{:?}",
        began.elapsed()
    );
}

/// A response that would need many times its size in memory is rejected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_responses_that_need_much_memory_are_rejected() {
    // An endless listing arrives in HTTP chunks of one byte.
    let server = HostileServer::start(|request| {
        let first = beginning(request);
        let first = format!("{:x}\r\n{first}\r\n", first.len());
        let chunks = b"1\r\nx\r\n".repeat(10_000);
        Reply::new(first, Then::Repeat(chunks)).with_header("transfer-encoding: chunked")
    });
    for (name, store) in server.stores().await {
        let result = store.list("prefix").await;
        assert_limit(name, &server, result, "more than 16 MiB");
    }

    // The listing consists of empty entries, 15 MiB in total.
    let server = HostileServer::start(|request| {
        let (entry, end) = match beginning(request) {
            json if json.starts_with('{') => ("{\"name\":\"\",\"size\":\"0\"},", "]}"),
            s3 if s3.contains("ListBucketResult") => ("<Contents/>", "</ListBucketResult>"),
            _ => (
                "<BlobPrefix><Name/></BlobPrefix>",
                "</Blobs></EnumerationResults>",
            ),
        };
        let begin = beginning(request).replace("<Prefix>", "<Blobs>");
        let begin = begin.replace("<ListBucketResult><Blobs>", "<ListBucketResult>");
        let entries = entry.repeat((15 << 20) / entry.len());
        Reply::new(format!("{begin}{entries}{end}"), Then::End)
    });
    for (name, store) in server.stores().await {
        let error = store.list("prefix").await.unwrap_err().to_string();
        let expected = match name {
            "S3" => "more entries than one page may have",
            "Google" => "at most 10000 objects",
            _ => "lists more blobs than one page may have",
        };
        assert!(error.contains(expected), "{name}: {error}");
    }
    assert_little_memory();
}

/// The first part of an object is read into memory, so a response that is longer than the requested part is rejected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn response_longer_than_requested_first_part_is_rejected() {
    let server = HostileServer::start(|_| {
        Reply::new("x", Then::Repeat(vec![b'x'; 64 << 10]))
            .with_status("206 Partial Content")
            .with_header("etag: \"tag\"")
            .with_header("content-range: bytes 0-549755813887/1099511627776")
            .with_header("content-length: 549755813888")
    });
    let error = server
        .s3()
        .await
        .get("key")
        .await
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("549755813888 bytes, but 8388608 of the object's 1099511627776 bytes"),
        "{error}"
    );
    assert!(server.sent() < BUFFERS, "{} bytes", server.sent());
    assert_little_memory();
}
