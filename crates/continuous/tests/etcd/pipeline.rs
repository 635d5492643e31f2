//! A replay with several transactions in flight must reproduce every revision.

use continuous::{Extras, Options, Reader, StoredBase, Target, Until, replay};
use etcd_client::{Client, PutOptions, Txn, TxnOp};

use crate::lab::{Lab, PREFIX, client, extras, hash, revision};

/// The environment variable that the seed of a restore sets for its etcd.
pub(crate) const ONE_PROCESSOR: (&str, &str) = ("GOMAXPROCS", "1");

const WRITERS: usize = 8;
const ROUNDS: usize = 150;

/// Creates, changes and deletes keys. A key is often deleted in the revision after its creation.
async fn write(mut client: Client, writer: usize, lease: i64) {
    for round in 0..ROUNDS {
        let key = format!("{writer}/{}", round % 7);
        let shared = format!("shared/{}", round % 3);
        client
            .put(key.clone(), round.to_string(), None)
            .await
            .unwrap();
        match round % 4 {
            0 => drop(client.delete(key, None).await.unwrap()),
            1 => {
                let options = PutOptions::new().with_lease(lease);
                let operations = [
                    TxnOp::put(shared, round.to_string(), Some(options)),
                    TxnOp::delete(key, None),
                ];
                client.txn(Txn::new().and_then(operations)).await.unwrap();
            }
            2 => drop(client.delete(shared, None).await.unwrap()),
            _ => {}
        }
    }
}

/// Records concurrent writers. Returns the base and the last revision.
async fn recorded(lab: &Lab) -> (StoredBase, i64) {
    let base = lab.base().await;
    // Without recorded hashes, the replay never waits for the transactions in flight to compare a hash.
    let extras = Extras {
        hash_interval: None,
        ..extras()
    };
    let last = lab
        .record(&base, extras, async {
            let mut client = lab.client().await;
            let lease = client.lease_grant(600, None).await.unwrap().id();
            let writers = (0..WRITERS).map(|writer| write(client.clone(), writer, lease));
            futures::future::join_all(writers).await;
            revision(&mut client).await
        })
        .await;
    (base, last)
}

async fn reproduces_hashes(variables: &[(&str, &str)]) {
    let lab = Lab::new("3.6").await;
    let (base, last) = recorded(&lab).await;
    let target = lab.restore_with(&base, variables).await;
    let mut reader = Reader::open(&lab.store, PREFIX, base.name).await.unwrap();
    let connected = Target::connect(&target.client_url, None).await.unwrap();
    let options = Options {
        until: Until::Latest,
        follow_compactions: false,
    };
    let report = replay(&mut reader, &connected, options).await.unwrap();
    println!("{variables:?}: {report:?}");
    assert_eq!(report.revision, last);
    let replayed = u64::try_from(last - base.base.revision).unwrap();
    assert_eq!(report.transactions, replayed);
    let (mut source, mut restored) = (lab.client().await, client(&target).await);
    let revisions = (base.base.revision..last).step_by(20).chain([last]);
    for at in revisions {
        let expected = hash(&mut source, at).await;
        assert_eq!(hash(&mut restored, at).await, expected, "revision {at}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_with_transactions_in_flight_reproduces_hashes() {
    reproduces_hashes(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_to_etcd_with_one_processor_reproduces_hashes() {
    reproduces_hashes(&[ONE_PROCESSOR]).await;
}
