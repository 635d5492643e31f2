//! The real clients of stores receive damaged listings, errors and encrypted objects. Every call must end with a result
//! or an error.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../api/tests/damaged/mod.rs"]
mod damaged;

mod clients;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use damaged::{assert_little_memory, bounded, cases, damaged, damaged_text};
use proptest::prelude::*;
use store::compression::Compressor;
use store::encryption::{Encryptor, Key, Keys};
use store::grants::Grant;
use store::unpack::{self, Unpacker};
use store::{Error, Store};
use tokio::runtime::Runtime;

/// The argument `store` of [`Clients::list`] that lists the unfinished uploads of S3.
const UPLOADS: usize = 3;

/// Time limit for one call, including all its retries.
const CALL: Duration = Duration::from_mins(2);

/// A listing, as Amazon S3 sends it.
const S3_LIST: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
    <ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>bucket</Name><Prefix>etcd</Prefix>\
    <KeyCount>2</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated><Contents>\
    <Key>etcd_v99_2018-12-31-23:59:59</Key><LastModified>2018-12-31T23:59:59.000Z</LastModified>\
    <ETag>&quot;d41d8cd98f00b204e9800998ecf8427e-2&quot;</ETag><Size>20512</Size><StorageClass>STANDARD</StorageClass>\
    </Contents><Contents><Key>etcd_v99_2018-12-31-23:59:59.manifest.json</Key>\
    <LastModified>2018-12-31T23:59:59.000Z</LastModified><Size>511</Size></Contents></ListBucketResult>";
/// The unfinished uploads, as Amazon S3 lists them.
const S3_UPLOADS: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
    <ListMultipartUploadsResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Bucket>bucket</Bucket><KeyMarker/>\
    <UploadIdMarker/><MaxUploads>1000</MaxUploads><IsTruncated>false</IsTruncated><Upload>\
    <Key>etcd_v99_2018-12-31-23:59:59</Key><UploadId>VXBsb2FkIElE.7A--</UploadId><Initiator><ID>arn:aws:iam::1:user/a</ID>\
    <DisplayName>a</DisplayName></Initiator><Owner><ID>75aa57f0</ID></Owner><StorageClass>STANDARD</StorageClass>\
    <Initiated>2018-12-31T23:59:59.000Z</Initiated></Upload></ListMultipartUploadsResult>";
const S3_ERROR: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>NoSuchBucket</Code>\
    <Message>The specified bucket does not exist</Message><BucketName>bucket</BucketName>\
    <RequestId>4442587FB7D0A2F9</RequestId><HostId>w+/</HostId></Error>";
const AZURE_LIST: &str = "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults \
    ServiceEndpoint=\"https://account.blob.core.windows.net/\" ContainerName=\"bucket\"><Prefix>etcd</Prefix><Blobs><Blob>\
    <Name>etcd_v99_2018-12-31-23:59:59</Name><Properties><Creation-Time>Tue, 24 Nov 2026 00:00:00 GMT</Creation-Time>\
    <Last-Modified>Tue, 24 Nov 2026 00:00:00 GMT</Last-Modified><Etag>0x8CBFF45D8A29A19</Etag>\
    <Content-Length>20512</Content-Length><Content-Type>application/octet-stream</Content-Type>\
    <BlobType>BlockBlob</BlobType><LeaseStatus>unlocked</LeaseStatus><LeaseState>available</LeaseState>\
    <ServerEncrypted>true</ServerEncrypted></Properties></Blob></Blobs><NextMarker /></EnumerationResults>";
const GOOGLE_LIST: &str = r#"{"kind":"storage#objects","items":[{"kind":"storage#object","id":"bucket/etcd/1",
    "name":"etcd_v99_2018-12-31-23:59:59","bucket":"bucket","generation":"1732406400000000","metageneration":"1",
    "contentType":"application/octet-stream","size":"20512","md5Hash":"1B2M2Y8AsgTpgAmY7PhCfg==","crc32c":"AAAAAA==",
    "etag":"CIDAhNn3=","timeCreated":"2026-11-24T00:00:00.000Z","updated":"2026-11-24T00:00:00.000Z"}]}"#;
const GOOGLE_ERROR: &str = r#"{"error":{"code":404,"message":"The specified bucket does not exist.",
    "errors":[{"message":"The specified bucket does not exist.","domain":"global","reason":"notFound"}]}}"#;

/// A server that sends the same answer to every request.
struct TestServer {
    endpoint: String,
    answer: Arc<Mutex<(u16, String)>>,
}

impl TestServer {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let answer = Arc::new(Mutex::new((200, String::new())));
        let current = answer.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let (status, body) = current.lock().unwrap().clone();
                std::thread::spawn(move || {
                    // One `read` suffices, because each request of this test is short and has no body.
                    let mut request = [0; 1 << 14];
                    if !matches!(stream.read(&mut request), Ok(read) if read > 0) {
                        return;
                    }
                    let head = format!(
                        "HTTP/1.1 {status} Status\r\nconnection: close\r\ncontent-length: {}\r\n\
                         x-ms-request-id: 6f1d4d3c-6c2a-4f25-9d57-0d5e0a2f9f11\r\n\
                         date: Tue, 24 Nov 2026 00:00:00 GMT\r\n\r\n",
                        body.len()
                    );
                    let _ = stream.write_all(head.as_bytes());
                    let _ = stream.write_all(body.as_bytes());
                });
            }
        });
        Self { endpoint, answer }
    }
}

/// A server, and one client for each kind of store. All cases of a test share them.
struct Clients {
    server: TestServer,
    runtime: Runtime,
    stores: [Box<dyn Store>; 3],
}

impl Clients {
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let server = TestServer::start();
        let stores = runtime.block_on(async {
            let s3: Box<dyn Store> = Box::new(clients::s3(&server.endpoint).await);
            let google: Box<dyn Store> = Box::new(clients::google(&server.endpoint).await);
            let azure: Box<dyn Store> = Box::new(clients::azure(&server.endpoint));
            [s3, google, azure]
        });
        Self {
            server,
            runtime,
            stores,
        }
    }

    /// The keys that a client finds in a response with this status and body. `store` is 0 for S3, 1 for Google, 2 for
    /// Azure, and [`UPLOADS`] for the unfinished uploads of S3.
    fn list(&self, store: usize, status: u16, body: &str) -> Result<Vec<String>, Error> {
        *self.server.answer.lock().unwrap() = (status, body.to_owned());
        let listed = async {
            if store == UPLOADS {
                let uploads = self.stores[0].unfinished("etcd").await?;
                return Ok::<Vec<String>, Error>(
                    uploads.into_iter().map(|upload| upload.key).collect(),
                );
            }
            let objects = self.stores[store].list("etcd").await?;
            Ok(objects.into_iter().map(|object| object.key).collect())
        };
        self.runtime.block_on(async {
            tokio::time::timeout(CALL, listed)
                .await
                .expect("the call ends")
        })
    }
}

/// A damaged listing or error of one kind of store, as the arguments of [`Clients::list`].
fn answers() -> impl Strategy<Value = (usize, u16, String)> {
    prop_oneof![
        3 => damaged_text(&[S3_LIST]).prop_map(|text| (0_usize, 200_u16, text)),
        1 => damaged_text(&[S3_ERROR]).prop_map(|text| (0_usize, 404_u16, text)),
        2 => damaged_text(&[S3_UPLOADS]).prop_map(|text| (UPLOADS, 200_u16, text)),
        3 => damaged_text(&[GOOGLE_LIST]).prop_map(|text| (1_usize, 200_u16, text)),
        1 => damaged_text(&[GOOGLE_ERROR]).prop_map(|text| (1_usize, 404_u16, text)),
        3 => damaged_text(&[AZURE_LIST]).prop_map(|text| (2_usize, 200_u16, text)),
        1 => damaged_text(&[S3_ERROR]).prop_map(|text| (2_usize, 404_u16, text)),
    ]
}

#[test]
fn undamaged_store_listings_are_read() {
    let clients = Clients::start();
    let lists = [S3_LIST, GOOGLE_LIST, AZURE_LIST, S3_UPLOADS];
    for (store, list) in lists.into_iter().enumerate() {
        let names = clients.list(store, 200, list).unwrap();
        assert!(
            names.contains(&"etcd_v99_2018-12-31-23:59:59".to_owned()),
            "{names:?}"
        );
    }
}

#[test]
fn listing_with_damaged_response_returns_few_names_or_error() {
    let clients = Clients::start();
    proptest!(cases(48), |((store, status, body) in answers())| {
        if let Ok(names) = clients.list(store, status, &body) {
            // Random changes of a response add only a few names. A hundred names would mean that the client reads a
            // page more than once.
            prop_assert!(names.len() < 100, "{:?}", names);
        }
        assert_little_memory();
    });
}

/// The plain content of the encrypted objects. It is long enough for several chunks of encryption.
fn content() -> Bytes {
    store::testing::content(150_000)
}

fn key() -> Key {
    Key::parse("key", b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=").unwrap()
}

fn encrypted(compress: bool) -> Vec<u8> {
    let mut packed = content().to_vec();
    if compress {
        packed.clear();
        let mut compressor = Compressor::new().unwrap();
        compressor
            .push(&content(), |piece| packed.extend_from_slice(piece))
            .unwrap();
        compressor
            .finish(|piece| packed.extend_from_slice(piece))
            .unwrap();
    }
    let mut object = Vec::new();
    let mut encryptor = Encryptor::new(&key()).unwrap();
    encryptor.push(&packed, &mut object).unwrap();
    encryptor.finish(&mut object).unwrap();
    object
}

fn unpacked(object: &[u8]) -> Result<Vec<u8>, unpack::Error> {
    let mut keys = Keys::default();
    keys.add(key());
    let mut unpacker = Unpacker::new(Some(keys));
    let mut found = Vec::new();
    let mut chunks = object.chunks(10_000);
    loop {
        let chunk = chunks.next();
        match chunk {
            Some(chunk) => unpacker.push(Bytes::copy_from_slice(chunk))?,
            None => unpacker.end()?,
        }
        while let Some(piece) = unpacker.piece()? {
            found.extend_from_slice(&piece);
        }
        if chunk.is_none() {
            unpacker.finish()?;
            return Ok(found);
        }
    }
}

#[test]
fn damaged_encrypted_objects_never_yield_wrong_content() {
    let objects = [encrypted(false), encrypted(true)];
    let samples: Vec<&[u8]> = objects.iter().map(Vec::as_slice).collect();
    proptest!(cases(256), |(object in damaged(&samples))| {
        if let Ok(found) = bounded(|| unpacked(&object)) {
            // An object that decrypts without an error must have the original content.
            prop_assert!(found == content());
        }
        assert_little_memory();
    });
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn damaged_grant_with_parent_directory_is_rejected(
        text in damaged_text(&["team-a=s3://backups/team-a", "b=abs://account/container", "c=gs://bucket"]),
    ) {
        if bounded(|| text.parse::<Grant>()).is_ok() {
            prop_assert!(!text.split('/').any(|part| part == ".."), "{}", text);
        }
    }
}
