//! Stores that calculate checksums of parts, that do not know them, and that lie. Whichever it is, nothing counts that
//! is not proven, and nothing is left behind.

use store::Error;
use store::testing::{content, download};

use crate::proxy::{Fault, Harm, Request};
use crate::{ALWAYS, KEY, MIB, Rig, fault};

const PARTS: &str = "partNumber=";
const ALGORITHM: &str = "x-amz-checksum-algorithm";
const CRC32C: &str = "x-amz-checksum-crc32c";
const SIZE: usize = 30 * MIB;
const UNSAID: Harm = Harm::Headers(&[(CRC32C, None)]);

fn begins(request: &Request) -> bool {
    request.method == "POST" && request.target.contains("uploads")
}

fn begins_checked(request: &Request) -> bool {
    begins(request) && request.header(ALGORITHM).is_some()
}

fn part(request: &Request) -> bool {
    request.target.contains(PARTS)
}

fn third_part(request: &Request) -> bool {
    request.target.contains("partNumber=3")
}

fn head(request: &Request) -> bool {
    request.method == "HEAD"
}

/// What proves parts: how many carried a checksum, and how many an MD5.
async fn proofs(rig: &Rig, faults: &[Fault]) -> (usize, usize) {
    let content = content(SIZE);
    rig.proxy.harm(faults);
    assert_eq!(rig.upload(&content).await.unwrap(), SIZE as u64);
    let asked = rig.proxy.asked();
    let carrying = |name| {
        let parts = asked.iter().filter(|request| part(request));
        parts.filter(|part| part.header(name).is_some()).count()
    };
    let proofs = (carrying(CRC32C), carrying("content-md5"));
    let stored = download(rig.beside.as_ref(), KEY).await.unwrap();
    assert!(stored == content);
    rig.clean("checksums").await;
    proofs
}

async fn refused(rig: &Rig, faults: &[Fault]) -> Error {
    rig.proxy.harm(faults);
    let stored = rig.upload(&content(SIZE)).await;
    rig.proxy.harm(&[]);
    stored.unwrap_err()
}

/// Invariant 12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariant_12_parts_are_proven_by_the_checksum_the_store_tells() {
    let rig = Rig::s3().await;
    assert_eq!(proofs(&rig, &[]).await, (5, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_that_know_no_checksums_are_asked_once_and_compare_md5s() {
    for harm in [
        Harm::Answer(501, "<Error><Code>NotImplemented</Code></Error>"),
        Harm::Answer(400, "<Error><Code>InvalidArgument</Code></Error>"),
        Harm::Headers(&[(ALGORITHM, None)]),
    ] {
        let rig = Rig::s3().await;
        let fault = fault(begins_checked, ALWAYS, harm);
        assert_eq!(proofs(&rig, std::slice::from_ref(&fault)).await, (0, 5));
        rig.proxy.harm(&[fault]);
        assert_eq!(rig.upload(&content(SIZE)).await.unwrap(), SIZE as u64);
        assert_eq!(rig.proxy.done(), 0, "asked again");
        rig.clean("asked once").await;
    }
}

/// Invariant 12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariant_12_a_store_that_does_not_tell_checksums_compares_md5s() {
    let rig = Rig::s3().await;
    let silent = fault(part, ALWAYS, UNSAID);
    let (checksums, md5s) = proofs(&rig, std::slice::from_ref(&silent)).await;
    // Up to three were under way before it was seen.
    assert!((6..=8).contains(&checksums), "{checksums}");
    assert_eq!(md5s, 5);
    // Then the whole is proven by its tag as well.
    let both = [silent, fault(head, ALWAYS, UNSAID)];
    proofs(&rig, &both).await;
}

/// Invariant 12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariant_12_a_checksum_that_is_not_ours_is_no_success() {
    let rig = Rig::s3().await;
    let other = Harm::Headers(&[(CRC32C, Some("AAAAAA=="))]);
    let error = refused(&rig, &[fault(third_part, ALWAYS, other.clone())]).await;
    assert!(error.to_string().contains("part 3"), "{error}");
    assert_eq!(rig.beside.head(KEY).await.unwrap(), None);
    rig.clean("a part").await;
    // Of the whole: another checksum, or none and a tag that is not made of the parts'.
    let tagged = Harm::Headers(&[(CRC32C, None), ("etag", Some("\"0-5\""))]);
    for harm in [other, tagged] {
        let error = refused(&rig, &[fault(head, ALWAYS, harm)]).await;
        assert!(error.to_string().contains("checksum"), "{error}");
        rig.clean("the whole").await;
    }
}

/// Invariant 12: such as keep the whole's checksum to themselves say by its tag that it is made of the proven parts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariant_12_the_whole_is_proven_by_a_tag_made_of_its_parts() {
    let rig = Rig::s3().await;
    let unsaid = fault(head, ALWAYS, UNSAID);
    assert_eq!(proofs(&rig, &[unsaid]).await, (5, 0));
}
