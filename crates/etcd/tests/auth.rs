//! Authentication with real etcd processes: enabling, disabling, long-lived logins, learners, and password rotation.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use etcd::testing::{EtcdProcess, Programs, Start, free_port};
use etcd::{Access, Credentials, Deadlines, Error, Etcd, EtcdClient, Login, MemberId, TlsAccess};
use futures::TryStreamExt;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// A test repeats a call for at most this time.
const MAX_WAIT: Duration = Duration::from_secs(90);

/// Deadlines for tests of unanswered calls, at most as long as those of the cluster operator.
const QUICK: Deadlines = Deadlines {
    connect: Duration::from_millis(500),
    status: Duration::from_millis(1500),
    call: Duration::from_secs(3),
    hedge: Duration::from_millis(300),
    defragment: Duration::from_mins(1),
    progress: Duration::from_secs(5),
    idle: Duration::from_mins(2),
};

/// Long deadlines for the tests that do not need `QUICK`, because a busy machine needs more time.
const PATIENT: Deadlines = Deadlines {
    connect: Duration::from_secs(30),
    status: Duration::from_secs(30),
    call: Duration::from_mins(1),
    hedge: Duration::from_secs(1),
    ..QUICK
};

fn credentials(password: &str, former: &[&str]) -> Credentials {
    Credentials {
        user: "root".into(),
        password: password.into(),
        former: former.iter().map(|one| (*one).to_owned()).collect(),
    }
}

fn access(tls: Option<&TlsAccess>) -> Access {
    Access {
        tls: tls.cloned(),
        credentials: Some(credentials("first", &[])),
    }
}

fn quick(tls: Option<&TlsAccess>) -> EtcdClient {
    EtcdClient::with_deadlines(access(tls), QUICK)
}

fn patient(tls: Option<&TlsAccess>) -> EtcdClient {
    EtcdClient::with_deadlines(access(tls), PATIENT)
}

fn client(password: &str, former: &[&str]) -> EtcdClient {
    let access = Access {
        tls: None,
        credentials: Some(credentials(password, former)),
    };
    EtcdClient::with_deadlines(access, PATIENT)
}

/// Options with a fast password hash. On a busy machine, the default hash takes longer than a call may take.
fn cheap_hashes() -> Start {
    Start {
        flags: vec!["--bcrypt-cost=4".to_owned()],
        ..Start::default()
    }
}

/// Repeats a call until it succeeds, for at most [`MAX_WAIT`].
async fn answered<T, F>(mut call: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, Error>>,
{
    let end = Instant::now() + MAX_WAIT;
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) if Instant::now() > end => panic!("{error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

fn urls(members: &[EtcdProcess]) -> Vec<String> {
    let urls = members.iter().map(|member| member.client_url.clone());
    urls.collect()
}

async fn bytes_of_snapshot(client: &EtcdClient, member: &str) -> usize {
    let whole = || async {
        let snapshot = client.snapshot(member).await?;
        let chunks: Vec<_> = snapshot.chunks.try_collect().await?;
        Ok(chunks.iter().map(bytes::Bytes::len).sum())
    };
    answered(whole).await
}

/// Invariant 21: while authentication is enabled, only clients with the password have access. Each step is idempotent.
#[tokio::test]
async fn invariant_21_auth_is_enabled_and_disabled_on_every_minor() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let programs = Programs::find(minor);
        let members = EtcdProcess::start_cluster(&programs, 3, &Start::default()).await;
        let via = urls(&members);
        let root = client("first", &[]);
        assert_eq!(root.login(&via).await.unwrap(), Some(Login::Off), "{minor}");
        root.enable_auth(&via).await.unwrap();
        root.enable_auth(&via).await.unwrap();
        assert_eq!(root.login(&via).await.unwrap(), Some(Login::Accepted));
        assert_eq!(root.members(&via).await.unwrap().members.len(), 3);
        for url in &via {
            assert!(root.status(url).await.unwrap().leader.is_some());
            assert!(bytes_of_snapshot(&root, url).await > 0);
        }
        let anonymous = EtcdClient::with_deadlines(Access::default(), PATIENT);
        let refused = anonymous.members(&via).await;
        assert!(
            matches!(refused, Err(Error::AccessDenied(_))),
            "{refused:?}"
        );
        let wrong = client("wrong", &[]);
        let refused = wrong.members(&via).await;
        assert!(
            matches!(refused, Err(Error::AccessDenied(_))),
            "{refused:?}"
        );
        assert!(matches!(
            wrong.login(&via).await.unwrap(),
            Some(Login::Refused(_))
        ));
        root.disable_auth(&via).await.unwrap();
        assert_eq!(root.login(&via).await.unwrap(), Some(Login::Off));
        assert!(anonymous.members(&via).await.is_ok());
        assert!(root.members(&via).await.is_ok());
    }
}

/// Invariant 21: if an earlier attempt has ended after some steps, the next attempt enables authentication with the
/// current password.
#[tokio::test]
async fn invariant_21_enabling_auth_resumes_after_interruption() {
    let member = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let via = [member.client_url.clone()];
    let mut plain = etcd_client::Client::connect(&via, None).await.unwrap();
    plain.user_add("root", "previous", None).await.unwrap();
    client("current", &[]).enable_auth(&via).await.unwrap();
    let root = client("current", &[]);
    assert_eq!(root.login(&via).await.unwrap(), Some(Login::Accepted));
    root.disable_auth(&via).await.unwrap();
    // The role `root` still exists, so `enable_auth` must accept etcd's error about an existing role.
    client("another", &[]).enable_auth(&via).await.unwrap();
    assert!(client("another", &[]).members(&via).await.is_ok());
}

#[tokio::test]
async fn client_changes_password_after_login_with_previous_password() {
    let member = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let via = [member.client_url.clone()];
    let old = client("old", &[]);
    old.enable_auth(&via).await.unwrap();
    let new = client("new", &["older", "old"]);
    assert_eq!(new.login(&via).await.unwrap(), Some(Login::Former));
    assert!(new.members(&via).await.is_ok());
    new.change_password(&via).await.unwrap();
    assert_eq!(new.login(&via).await.unwrap(), Some(Login::Accepted));
    let refused = old.members(&via).await;
    assert!(
        matches!(refused, Err(Error::AccessDenied(_))),
        "{refused:?}"
    );
}

#[tokio::test]
async fn login_survives_token_expiry_and_member_failure() {
    let programs = Programs::find("3.6");
    let start = Start {
        flags: vec!["--auth-token-ttl=1".into()],
        ..Start::default()
    };
    let mut members = EtcdProcess::start_cluster(&programs, 3, &start).await;
    let via = urls(&members);
    let root = client("first", &[]);
    root.enable_auth(&via).await.unwrap();
    assert!(root.members(&via).await.is_ok());
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(root.members(&via).await.is_ok());
    for url in &via {
        assert!(root.status(url).await.is_ok());
        assert!(bytes_of_snapshot(&root, url).await > 0);
    }
    members[0].kill();
    // The other members may not know a token that `members[0]` has issued, so the client must log in again for calls
    // and for snapshots.
    assert!(root.members(&via[1..]).await.is_ok());
    assert!(bytes_of_snapshot(&root, &via[1]).await > 0);
}

/// A learner requires a token, but issues no tokens.
#[tokio::test]
async fn learner_accepts_token_of_voter() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let programs = Programs::find(minor);
        let first = EtcdProcess::start(&programs, &Start::default()).await;
        let via = [first.client_url.clone()];
        let root = client("first", &[]);
        root.enable_auth(&via).await.unwrap();
        assert!(root.members(&via).await.is_ok());
        let peer = format!("http://127.0.0.1:{}", free_port());
        let added = root.add_member(&via, std::slice::from_ref(&peer), true);
        let added = added.await.unwrap();
        let start = Start {
            join: vec![format!("{}={}", first.name, first.peer_url)],
            ..Start::default()
        };
        let second = EtcdProcess::join(&programs, "m1", &peer, &start);
        let learner = status_of(&root, &second.client_url).await;
        assert!(learner.1, "{minor}");
        promoted(&root, &via, added.id).await;
        assert_eq!(status_of(&root, &second.client_url).await.0, added.id);
    }
}

async fn status_of(client: &EtcdClient, member: &str) -> (MemberId, bool) {
    let end = Instant::now() + MAX_WAIT;
    loop {
        match client.status(member).await {
            Ok(status) if status.leader.is_some() => return (status.member_id, status.is_learner),
            answer if Instant::now() > end => panic!("{answer:?}"),
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn promoted(client: &EtcdClient, via: &[String], id: MemberId) {
    let end = Instant::now() + MAX_WAIT;
    while let Err(error) = client.promote_member(via, id).await {
        assert!(Instant::now() < end, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Members that require a client certificate from each client.
struct Certified {
    start: Start,
    /// TLS material of a client. Its certificate names the user `operator`.
    tls: TlsAccess,
    _dir: tempfile::TempDir,
}

fn certified() -> Certified {
    let (dir, user) = (tempfile::tempdir().unwrap(), "operator");
    let mut own = CertificateParams::default();
    own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let ca = own.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(own, key);
    let signed = |name: &str| {
        let mut parameters = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        parameters.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = parameters.signed_by(&key, &issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    };
    let (server, client) = (signed("a member"), signed(user));
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let mut start = cheap_hashes();
    start.flags.extend([
        format!("--cert-file={}", file("server.crt", &server.0)),
        format!("--key-file={}", file("server.key", &server.1)),
        format!("--trusted-ca-file={}", file("ca.crt", &ca)),
        "--client-cert-auth=true".to_owned(),
    ]);
    let tls = TlsAccess {
        ca: ca.into_bytes(),
        identity: Some((client.0.into_bytes(), client.1.into_bytes())),
        user: Some(user.to_owned()),
    };
    Certified {
        start,
        tls,
        _dir: dir,
    }
}

/// Without a quorum, no member issues a token. A client whose certificate names a user needs no token.
#[tokio::test]
async fn certificate_that_names_user_authenticates_without_quorum() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let Certified { start, tls, _dir } = certified();
        let mut members = EtcdProcess::start_cluster(&Programs::find(minor), 3, &start).await;
        let via = urls(&members);
        let root = EtcdClient::new(access(Some(&tls)));
        enable_auth(Some(&tls), &via).await;
        let login = answered(|| root.login(&via)).await;
        assert_eq!(login, Some(Login::Accepted), "{minor}");
        let list = answered(|| root.members(&via)).await;
        assert_eq!(list.members.len(), 3, "{minor}");
        members[1].kill();
        members[2].kill();
        // The first client is logged in, the second client is new, and the third client has a certificate but no
        // password.
        let clients = [
            root,
            EtcdClient::new(access(Some(&tls))),
            EtcdClient::new(Access {
                credentials: None,
                ..access(Some(&tls))
            }),
        ];
        for client in clients {
            leaderless(&client, &via[0]).await;
            let list = answered(|| client.local_members(&via[0])).await;
            assert_eq!(list.members.len(), 3, "{minor}");
            assert!(bytes_of_snapshot(&client, &via[0]).await > 0, "{minor}");
        }
    }
}

/// While authentication is disabled, a client gets no token. After another client has enabled authentication, etcd
/// takes the name in the certificate as the user. No user has this name, so etcd denies the call.
#[tokio::test]
async fn client_with_certificate_logs_in_after_auth_is_enabled() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let Certified { start, tls, _dir } = certified();
        let tls = TlsAccess { user: None, ..tls };
        let members = EtcdProcess::start_cluster(&Programs::find(minor), 1, &start).await;
        let via = urls(&members);
        let first = patient(Some(&tls));
        let login = answered(|| first.login(&via)).await;
        assert_eq!(login, Some(Login::Off), "{minor}");
        enable_auth(Some(&tls), &via).await;
        let status = first.status(&via[0]).await.unwrap();
        let keys = first.key_count(&via[0], status.revision).await.unwrap();
        assert_eq!(keys, Some(0), "{minor}");
    }
}

/// Enables authentication in a cluster that has a leader.
async fn enable_auth(tls: Option<&TlsAccess>, via: &[String]) {
    let root = patient(tls);
    status_of(&root, &via[0]).await;
    answered(|| root.enable_auth(via)).await;
}

async fn leaderless(client: &EtcdClient, member: &str) {
    // The first attempt may take 500 ms, because the test machine may be busy. This is twice the operator's timeout for
    // members that are not ready. Each later attempt may take longer, up to the login timeout.
    let (mut limit, max_limit) = (Duration::from_millis(500), Duration::from_millis(1500));
    let end = Instant::now() + MAX_WAIT;
    loop {
        match tokio::time::timeout(limit, client.status(member)).await {
            Ok(Ok(status)) if status.leader.is_none() => return,
            answer if Instant::now() > end => panic!("{answer:?}"),
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
        limit = max_limit.min(limit * 11 / 10);
    }
}

/// The token comes from another cluster with a longer Raft log, so the member blocks calls with this token.
#[tokio::test]
async fn client_replaces_blocking_token_from_other_cluster() {
    let mut blocked = 0;
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let secure = certified();
        let accesses = [(&cheap_hashes(), None), (&secure.start, Some(&secure.tls))];
        for (start, tls) in accesses {
            let programs = Programs::find(minor);
            let other = EtcdProcess::start(&programs, start).await;
            let seed = EtcdProcess::start(&programs, start).await;
            let [other, via] = [[other.client_url.clone()], [seed.client_url.clone()]];
            enable_auth(tls, &other).await;
            enable_auth(tls, &via).await;
            let longer = patient(tls);
            for _ in 0..30 {
                let alarm = etcd::Alarm {
                    member: MemberId(1),
                    kind: etcd::AlarmKind::NoSpace,
                };
                answered(|| longer.disarm(&other, alarm)).await;
            }
            let root = quick(tls);
            answered(|| root.members(&other)).await;
            // `root` has a token of the other cluster, so this call usually times out. On a slow machine, the client
            // may already have replaced the token, so the call may also succeed.
            let first = root.members(&via).await;
            blocked += usize::from(matches!(first, Err(Error::Timeout(_))));
            let failed = matches!(first, Err(Error::Timeout(_) | Error::Unavailable(_)));
            assert!(failed || first.is_ok(), "{minor}: {first:?}");
            answered(|| root.members(&via)).await;
            answered(|| root.status(&via[0])).await;
            assert!(bytes_of_snapshot(&root, &via[0]).await > 0, "{minor}");
            let login = answered(|| root.login(&via)).await;
            assert_eq!(login, Some(Login::Accepted), "{minor}");
        }
    }
    assert!(blocked > 0, "no member blocked a call");
}

/// Without a quorum, no member issues a new token. The client therefore keeps its login although a call has no
/// response.
#[tokio::test]
async fn login_is_kept_while_no_member_issues_token() {
    for minor in ["3.4", "3.6"] {
        let programs = Programs::find(minor);
        let mut members = EtcdProcess::start_cluster(&programs, 3, &cheap_hashes()).await;
        let via = urls(&members);
        let root = quick(None);
        enable_auth(None, &via).await;
        answered(|| root.members(&via)).await;
        members[1].kill();
        members[2].kill();
        leaderless(&root, &via[0]).await;
        for _ in 0..4 {
            assert!(root.members(&via).await.is_err(), "{minor}");
            answered(|| root.status(&via[0])).await;
            answered(|| root.local_members(&via[0])).await;
        }
        assert!(bytes_of_snapshot(&root, &via[0]).await > 0, "{minor}");
        members[1].restart();
        answered(|| root.members(&via[..2])).await;
    }
}

/// Members keep tokens only in memory. After a restart of all members, no member knows the token.
#[tokio::test]
async fn login_survives_restart_of_all_members() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let Certified { start, tls, _dir } = certified();
        let mut members = EtcdProcess::start_cluster(&Programs::find(minor), 3, &start).await;
        let via = urls(&members);
        let root = quick(Some(&tls));
        enable_auth(Some(&tls), &via).await;
        answered(|| root.members(&via)).await;
        for member in &mut members {
            member.kill();
        }
        for member in &mut members {
            member.restart();
        }
        answered(|| root.members(&via)).await;
        for url in &via {
            answered(|| root.status(url)).await;
            assert!(bytes_of_snapshot(&root, url).await > 0, "{minor}");
        }
        let login = answered(|| root.login(&via)).await;
        assert_eq!(login, Some(Login::Accepted), "{minor}");
    }
}
