//! Tests how the S3 client handles responses to range requests if a store or a proxy ignores the range, or omits or
//! changes headers.

use store::Error;
use store::testing::{content, download, upload};

use crate::proxy::{Fault, Harm, Request};
use crate::{ALWAYS, KEY, MIB, Rig, fault};

const FIRST: &str = "bytes=0-8388607";
type Headers = &'static [(&'static str, Option<&'static str>)];

fn read(request: &Request) -> bool {
    request.method == "GET"
}

fn first_part(request: &Request) -> bool {
    read(request) && request.header("range") == Some(FIRST)
}

fn later_part(request: &Request) -> bool {
    read(request) && request.header("range").is_some_and(|range| range != FIRST)
}

/// The client can read from a store that ignores `If-Match` or `Range`, if the response headers identify the received
/// bytes. The client never uses bytes outside of the requested range or of another version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn range_response_may_lack_headers_but_not_contradict_request() {
    let rig = Rig::s3().await;
    let whole = content(20 * MIB);
    upload(rig.direct.as_ref(), KEY, &whole, MIB).await.unwrap();
    let harm = |on: fn(&Request) -> bool, headers: Headers| -> [Fault; 1] {
        [fault(on, ALWAYS, Harm::Headers(headers))]
    };
    for (on, headers, requests) in [
        (
            read as fn(&Request) -> bool,
            &[("x-none", None)] as Headers,
            3,
        ),
        // If the first response has no strong entity tag, or no content range with the size of the object, the client
        // discards this response and reads the whole object with a second request.
        (read, &[("etag", None)], 2),
        (read, &[("etag", Some("W/\"weak\""))], 2),
        (first_part, &[("content-range", None)], 2),
        (
            first_part,
            &[("content-range", Some("bytes 0-8388607/*"))],
            2,
        ),
        // A later response without a content range is accepted if its length equals the length of the requested range.
        (later_part, &[("content-range", None)], 3),
    ] {
        rig.proxy.harm(&harm(on, headers));
        let found = download(rig.proxied.as_ref(), KEY).await;
        assert!(found.unwrap() == whole, "{headers:?}");
        assert_eq!(rig.proxy.asked().len(), requests, "{headers:?}");
    }
    let refused: [(Headers, &str); 2] = [
        (
            &[("content-range", Some("bytes 0-8388607/20971520"))],
            "contains bytes 0-8388607/20971520, but the bytes from 8388608 on were requested",
        ),
        (&[("etag", Some("\"another\""))], "was replaced during"),
    ];
    for (headers, expected) in refused {
        rig.proxy.harm(&harm(later_part, headers));
        let object = rig.proxied.get(KEY).await.unwrap();
        let read = futures::TryStreamExt::try_collect::<Vec<_>>(object.chunks).await;
        let error: Error = read.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    rig.clean("changed headers").await;
}
