//! Tests of the fake etcd cluster.

use super::*;

fn url(name: &str) -> String {
    format!("http://{name}.test.svc:2379")
}

fn three() -> (FakeEtcd, Vec<String>) {
    let names = ["a", "b", "c"];
    (FakeEtcd::formed(7, &names, url), names.map(url).to_vec())
}

fn peer(name: &str) -> Vec<String> {
    vec![format!("http://{name}.test.svc:2380")]
}

#[tokio::test]
async fn fake_etcd_rejects_second_learner_and_premature_promotion() {
    let (etcd, via) = three();
    let added = etcd.add_member(&via, &peer("d"), true).await.unwrap();
    assert_eq!(added.members.members.len(), 4);
    let again = etcd.add_member(&via, &peer("e"), true).await;
    assert!(matches!(again, Err(Error::Unavailable(_))), "{again:?}");
    etcd.start(added.id, "d", &url("d"));
    let early = etcd.promote_member(&via, added.id).await;
    assert!(matches!(early, Err(Error::Unavailable(_))), "{early:?}");
    etcd.with(|state| state.find(added.id).unwrap().caught_up = true);
    etcd.promote_member(&via, added.id).await.unwrap();
}

#[tokio::test]
async fn fake_etcd_removes_dead_voter_but_refuses_quorum_loss() {
    let (etcd, via) = three();
    etcd.with(|state| state.find(MemberId(3)).unwrap().up = false);
    let live = etcd.remove_member(&via, MemberId(2)).await;
    assert!(matches!(live, Err(Error::Unavailable(_))), "{live:?}");
    etcd.remove_member(&via, MemberId(3)).await.unwrap();
    let gone = etcd.remove_member(&via, MemberId(3)).await;
    assert!(matches!(gone, Err(Error::MemberNotFound)), "{gone:?}");
}

#[tokio::test]
async fn fake_etcd_fails_linearizable_calls_without_quorum() {
    let (etcd, via) = three();
    etcd.with(|state| {
        state.members[0].up = false;
        state.members[1].up = false;
    });
    assert!(matches!(etcd.members(&via).await, Err(Error::Timeout(_))));
    assert_eq!(etcd.status(&via[2]).await.unwrap().leader, None);
    let list = etcd.local_members(&via[2]).await.unwrap();
    assert_eq!(list.members.len(), 3);
    assert!(matches!(
        etcd.status(&via[0]).await,
        Err(Error::Unreachable(_))
    ));
}
