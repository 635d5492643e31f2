//! Uploads to stores that report checksums of parts, no checksums, or wrong checksums. An upload may succeed only if
//! the stored data was verified. No unfinished upload may remain.

use store::Error;
use store::testing::{content, download};

use crate::proxy::{Fault, Harm, Request};
use crate::{ALWAYS, KEY, MIB, Rig, fault};

const PARTS: &str = "partNumber=";
const ALGORITHM: &str = "x-amz-checksum-algorithm";
const CRC32C: &str = "x-amz-checksum-crc32c";
const SIZE: usize = 30 * MIB;
const NO_CHECKSUM: Harm = Harm::Headers(&[(CRC32C, None)]);

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

/// Uploads an object, and checks its stored content. Returns the number of requests that sent a part with a CRC32C, and
/// the number of requests that sent a part with an MD5.
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
    let stored = download(rig.direct.as_ref(), KEY).await.unwrap();
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

/// Invariant 12: the CRC32C that the store reports verifies each part.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariant_12_parts_are_verified_by_reported_crc32c() {
    let rig = Rig::s3().await;
    assert_eq!(proofs(&rig, &[]).await, (5, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_are_verified_by_md5_if_store_does_not_support_crc32c() {
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
        assert_eq!(rig.proxy.done(), 0, "checksums must not be requested again");
        rig.clean("store without CRC32C").await;
    }
}

/// Invariant 12: if the store does not report the CRC32C of a part, the MD5 verifies the part.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariant_12_parts_are_verified_by_md5_if_crc32c_is_missing() {
    let rig = Rig::s3().await;
    let no_part_checksum = fault(part, ALWAYS, NO_CHECKSUM);
    let (checksums, md5s) = proofs(&rig, std::slice::from_ref(&no_part_checksum)).await;
    // Up to three parts were in flight when the client received the first response without a checksum.
    assert!((6..=8).contains(&checksums), "{checksums}");
    assert_eq!(md5s, 5);
    // If the store reports neither the checksums of the parts nor the checksum of the object, the entity tag verifies
    // the object.
    let both = [no_part_checksum, fault(head, ALWAYS, NO_CHECKSUM)];
    proofs(&rig, &both).await;
}

/// Invariant 12: an upload fails if the store reports a wrong checksum.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariant_12_wrong_checksum_or_entity_tag_fails_upload() {
    let rig = Rig::s3().await;
    let other = Harm::Headers(&[(CRC32C, Some("AAAAAA=="))]);
    let error = refused(&rig, &[fault(third_part, ALWAYS, other.clone())]).await;
    assert!(error.to_string().contains("part 3"), "{error}");
    assert_eq!(rig.direct.head(KEY).await.unwrap(), None);
    rig.clean("wrong checksum of a part").await;
    // In the first scene, the store reports a wrong checksum of the object. In the second scene, the store reports no
    // checksum, and an entity tag that does not match the parts.
    let tagged = Harm::Headers(&[(CRC32C, None), ("etag", Some("\"0-5\""))]);
    for harm in [other, tagged] {
        let error = refused(&rig, &[fault(head, ALWAYS, harm)]).await;
        assert!(error.to_string().contains("checksum"), "{error}");
        rig.clean("wrong checksum of the object").await;
    }
}

/// Invariant 12: if the store reports no checksum of the whole object, the entity tag of the object must match the
/// verified parts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariant_12_entity_tag_verifies_object_if_checksum_is_missing() {
    let rig = Rig::s3().await;
    let no_checksum = fault(head, ALWAYS, NO_CHECKSUM);
    assert_eq!(proofs(&rig, &[no_checksum]).await, (5, 0));
}
