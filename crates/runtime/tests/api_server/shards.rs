//! Tests of replicas that share the shards of an operator.

use k8s_openapi::api::coordination::v1::Lease;
use runtime::shards::Shards;
use runtime::shards::keeper::{Gauges, Keeper};
use tokio_util::sync::CancellationToken;

use super::*;

const LEASE: &str = "sharded";

fn candidate(name: &str) -> Candidate {
    Candidate {
        name: LEASE.into(),
        namespace: NAMESPACE.into(),
        identity: name.into(),
    }
}

/// A replica that reconciles no objects.
struct Replica {
    gauges: Gauges,
    shutdown: CancellationToken,
    /// Ends with the error if the replica has lost a Lease.
    ended: JoinHandle<Option<lease::Error>>,
}

impl Replica {
    fn start(client: &Client, name: &str, count: u16) -> Self {
        let (gauges, shutdown) = (Gauges::default(), CancellationToken::new());
        let mut keeper = Keeper::new(
            client.clone(),
            &candidate(name),
            Shards::divided(count),
            gauges.clone(),
            shutdown.clone(),
        );
        let stopped = shutdown.clone();
        let ended = tokio::spawn(async move {
            let lost = tokio::select! {
                lost = keeper.hold() => Some(lost),
                () = stopped.cancelled() => None,
            };
            if lost.is_none() {
                keeper.release().await;
            }
            lost
        });
        Self {
            gauges,
            shutdown,
            ended,
        }
    }

    fn held(&self) -> i64 {
        self.gauges.held.get()
    }

    async fn stop(self) {
        self.shutdown.cancel();
        let lost = self.ended.await.unwrap();
        assert!(lost.is_none(), "{lost:?}");
    }
}

/// Invariant 40: replicas share the shards, hand them over at the shutdown, and wait while an operator with another
/// number of shards holds the Lease.
#[tokio::test]
async fn invariant_40_replicas_share_and_hand_over_shards() {
    let server = ApiServer::start().await;
    let client = lease::client(server.config()).unwrap();
    let leases: Api<Lease> = Api::namespaced(client.clone(), NAMESPACE);
    let holder = async |name: &str| {
        let spec = leases.get(name).await.unwrap().spec;
        spec.and_then(|spec| spec.holder_identity)
    };

    // A replica finds the Leases by their label. A person has removed the label of this Lease.
    let unlabelled = json!({ "metadata": { "name": format!("{LEASE}-shard-2") }, "spec": {} });
    let unlabelled: Lease = serde_json::from_value(unlabelled).unwrap();
    let created = leases.create(&PostParams::default(), &unlabelled).await;
    created.unwrap();
    let first = Replica::start(&client, "one", 4);
    eventually("the only replica holds all shards", async || {
        (first.held() == 4).then_some(())
    })
    .await;
    assert_eq!(holder(LEASE).await.as_deref(), Some("shards/4"));
    let second = Replica::start(&client, "two", 4);
    eventually("both replicas hold two shards", async || {
        ((first.held(), second.held()) == (2, 2)).then_some(())
    })
    .await;
    for (shard, replica) in ["one", "one", "two", "two"].into_iter().enumerate() {
        let lease = format!("{LEASE}-shard-{shard}");
        assert_eq!(holder(&lease).await.as_deref(), Some(replica), "{shard}");
    }

    // Neither an operator without shards nor an operator with another number of shards may take the Lease.
    let undivided = lease::acquire(&client, candidate("undivided"));
    let undivided = tokio::time::timeout(Duration::from_secs(5), undivided).await;
    assert!(undivided.is_err(), "an undivided operator leads");
    let other = Replica::start(&client, "three", 3);
    second.stop().await;
    // The stopped replica has released its Leases, so that other replicas need not wait until the Leases expire.
    for shard in [2, 3] {
        let next = holder(&format!("{LEASE}-shard-{shard}")).await;
        let next = next.unwrap_or_else(|| "one".to_owned());
        assert_eq!(next, "one", "{shard}");
    }
    eventually("the first replica holds all shards again", async || {
        (first.held() == 4).then_some(())
    })
    .await;
    assert_eq!(other.held(), 0);

    first.stop().await;
    let next = holder(LEASE).await;
    let next = next.unwrap_or_else(|| "shards/3".to_owned());
    assert_eq!(next, "shards/3");
    eventually("the other operator holds all of its shards", async || {
        (other.held() == 3).then_some(())
    })
    .await;
    assert_eq!(holder(LEASE).await.as_deref(), Some("shards/3"));

    let lost = format!("{LEASE}-shard-1");
    leases
        .delete(&lost, &DeleteParams::default())
        .await
        .unwrap();
    let lost = tokio::time::timeout(Duration::from_mins(1), other.ended).await;
    let lost = lost.expect("the replica must stop without its lease");
    assert!(matches!(lost.unwrap(), Some(lease::Error::Taken { .. })));
}
