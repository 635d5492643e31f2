//! Measures how many revisions per second are recorded and replayed.

use std::time::Instant;

use continuous::{Options, Reader, Target, Until, replay};
use etcd_client::Client;

use crate::lab::{Lab, PREFIX, extras, revision};
use crate::pipeline::ONE_PROCESSOR;

const WRITERS: usize = 32;
const WRITES: usize = 1_000;

async fn write(mut client: Client, writer: usize) {
    for index in 0..WRITES {
        let key = format!("/registry/pods/{writer}/{}", index % 100);
        client.put(key, vec![b'x'; 200], None).await.unwrap();
    }
}

/// Run this measurement with `cargo test -p continuous --test etcd --release speed -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn speed_of_recording_and_replay_is_measured() {
    let lab = Lab::new("3.6").await;
    let base = lab.base().await;
    let mut source = lab.client().await;
    let begun = Instant::now();
    let written = lab
        .record(&base, extras(), async {
            let client = lab.client().await;
            let writers = (0..WRITERS).map(|writer| write(client.clone(), writer));
            futures::future::join_all(writers).await;
            begun.elapsed()
        })
        .await;
    let recorded = begun.elapsed();
    let last = revision(&mut source).await;
    println!("written in {written:?}, stored in {recorded:?}");
    let runs: [&[(&str, &str)]; 2] = [&[], &[ONE_PROCESSOR]];
    for variables in runs {
        let target = lab.restore_with(&base, variables).await;
        let mut reader = Reader::open(&lab.store, PREFIX, base.name).await.unwrap();
        let connected = Target::connect(&target.client_url, None).await.unwrap();
        let options = Options {
            until: Until::Revision(last),
            follow_compactions: false,
        };
        let begun = Instant::now();
        let report = replay(&mut reader, &connected, options).await.unwrap();
        let replayed = begun.elapsed();
        println!(
            "{variables:?}: {} revisions replayed in {replayed:?} ({:?} each), {} transactions sent again",
            report.transactions,
            replayed / u32::try_from(report.transactions).unwrap(),
            report.repeated
        );
    }
}
