//! What stores of S3's protocol, and what stands before them, answer to who asks for a part of an object.

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

/// Where a store does not tell versions or parts, it is read as well as that allows; bytes that were not asked for, and
/// those of another version, are none of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_answer_to_what_was_asked_for_is_not_put_together() {
    let rig = Rig::s3().await;
    let whole = content(20 * MIB);
    upload(rig.beside.as_ref(), KEY, &whole, MIB).await.unwrap();
    let harm = |on: fn(&Request) -> bool, headers: Headers| -> [Fault; 1] {
        [fault(on, ALWAYS, Harm::Headers(headers))]
    };
    for (on, headers, requests) in [
        (
            read as fn(&Request) -> bool,
            &[("x-none", None)] as Headers,
            3,
        ),
        // The first answer is not used, and all is read in one.
        (read, &[("etag", None)], 2),
        (read, &[("etag", Some("W/\"weak\""))], 2),
        (first_part, &[("content-range", None)], 2),
        (
            first_part,
            &[("content-range", Some("bytes 0-8388607/*"))],
            2,
        ),
        // Each is as long as what was asked for.
        (later_part, &[("content-range", None)], 3),
    ] {
        rig.proxy.harm(&harm(on, headers));
        let found = download(rig.through.as_ref(), KEY).await;
        assert!(found.unwrap() == whole, "{headers:?}");
        assert_eq!(rig.proxy.asked().len(), requests, "{headers:?}");
    }
    let refused: [(Headers, &str); 2] = [
        (
            &[("content-range", Some("bytes 0-8388607/20971520"))],
            "bytes 0-8388607/20971520, when it was asked for the bytes from 8388608 on",
        ),
        (&[("etag", Some("\"another\""))], "it was replaced"),
    ];
    for (headers, says) in refused {
        rig.proxy.harm(&harm(later_part, headers));
        let object = rig.through.get(KEY).await.unwrap();
        let read = futures::TryStreamExt::try_collect::<Vec<_>>(object.chunks).await;
        let error: Error = read.unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    rig.clean("answers").await;
}
