//! Authentication against real etcd processes: turned on and off, logins that last, learners, rotated passwords.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use etcd::testing::{EtcdProcess, Programs, Start, free_port};
use etcd::{Access, Credentials, Deadlines, Error, Etcd, EtcdClient, Login, MemberId, TlsAccess};
use futures::TryStreamExt;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// How long anything may take at most; whoever waits does so for a condition.
const LONGEST: Duration = Duration::from_secs(90);

/// As short as the cluster operator's, or shorter: where it matters what a call does that is not answered.
const QUICK: Deadlines = Deadlines {
    connect: Duration::from_millis(500),
    status: Duration::from_millis(1500),
    call: Duration::from_secs(3),
    hedge: Duration::from_millis(300),
    defragment: Duration::from_mins(1),
    progress: Duration::from_secs(5),
    idle: Duration::from_mins(2),
};

/// Where it does not: a machine that is busy is given the time.
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

/// What members are started with that make hashes in no time: a busy machine takes longer for an ordinary one than a
/// call is given here.
fn light() -> Start {
    Start {
        flags: vec!["--bcrypt-cost=4".to_owned()],
        ..Start::default()
    }
}

/// Waits until it is answered.
async fn answered<T, F>(mut call: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, Error>>,
{
    let end = Instant::now() + LONGEST;
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

/// Invariant 21: whoever has the password still reaches everything, whoever has not reaches nothing, and doing it
/// again does no harm.
#[tokio::test]
async fn invariant_21_turns_authentication_on_and_off_on_every_supported_minor() {
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
        let nobody = EtcdClient::with_deadlines(Access::default(), PATIENT);
        let refused = nobody.members(&via).await;
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
        assert!(nobody.members(&via).await.is_ok());
        assert!(root.members(&via).await.is_ok());
    }
}

/// Invariant 21: whatever part was done before a crash, the next attempt ends with the password that is wanted.
#[tokio::test]
async fn invariant_21_turning_on_goes_on_from_wherever_it_was_interrupted() {
    let member = EtcdProcess::start(&Programs::find("3.6"), &Start::default()).await;
    let via = [member.client_url.clone()];
    let mut plain = etcd_client::Client::connect(&via, None).await.unwrap();
    plain.user_add("root", "of before", None).await.unwrap();
    client("wanted", &[]).enable_auth(&via).await.unwrap();
    let root = client("wanted", &[]);
    assert_eq!(root.login(&via).await.unwrap(), Some(Login::Accepted));
    root.disable_auth(&via).await.unwrap();
    // Role and grant are there already.
    client("another", &[]).enable_auth(&via).await.unwrap();
    assert!(client("another", &[]).members(&via).await.is_ok());
}

#[tokio::test]
async fn a_password_is_changed_with_the_one_before() {
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
async fn a_login_outlasts_its_token_and_the_restart_of_a_member() {
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
    // The others go on, and a stream asks anew as well.
    assert!(root.members(&via[1..]).await.is_ok());
    assert!(bytes_of_snapshot(&root, &via[1]).await > 0);
}

/// A learner gives no token out, and asks for one.
#[tokio::test]
async fn a_learner_is_asked_with_a_token_of_the_voters() {
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
    let end = Instant::now() + LONGEST;
    loop {
        match client.status(member).await {
            Ok(status) if status.leader.is_some() => return (status.member_id, status.is_learner),
            answer if Instant::now() > end => panic!("{answer:?}"),
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn promoted(client: &EtcdClient, via: &[String], id: MemberId) {
    let end = Instant::now() + LONGEST;
    while let Err(error) = client.promote_member(via, id).await {
        assert!(Instant::now() < end, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Members that ask everybody for a certificate.
struct Certified {
    start: Start,
    /// What a client shows, whose certificate names the user `operator`.
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
    let mut start = light();
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

/// Nobody is given a login without a quorum; whoever has a certificate that names a user needs none.
#[tokio::test]
async fn a_survivor_is_asked_by_the_certificate_that_names_a_user() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let Certified { start, tls, _dir } = certified();
        let mut members = EtcdProcess::start_cluster(&Programs::find(minor), 3, &start).await;
        let via = urls(&members);
        let root = EtcdClient::new(access(Some(&tls)));
        turned_on(Some(&tls), &via).await;
        let login = answered(|| root.login(&via)).await;
        assert_eq!(login, Some(Login::Accepted), "{minor}");
        let list = answered(|| root.members(&via)).await;
        assert_eq!(list.members.len(), 3, "{minor}");
        members[1].kill();
        members[2].kill();
        // The one that has logged in, one that has only just been started, and a seed, which has no password.
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

/// Turns authentication on in a cluster that has a leader.
async fn turned_on(tls: Option<&TlsAccess>, via: &[String]) {
    let root = patient(tls);
    status_of(&root, &via[0]).await;
    answered(|| root.enable_auth(via)).await;
}

async fn leaderless(client: &EtcdClient, member: &str) {
    // As little time as the operator gives a member that is not ready, and as much again for a busy machine; more when
    // it is busier, but always less than nobody's answer to a login is waited for.
    let (mut patience, longest) = (Duration::from_millis(500), Duration::from_millis(1500));
    let end = Instant::now() + LONGEST;
    loop {
        match tokio::time::timeout(patience, client.status(member)).await {
            Ok(Ok(status)) if status.leader.is_none() => return,
            answer if Instant::now() > end => panic!("{answer:?}"),
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
        patience = longest.min(patience * 11 / 10);
    }
}

/// A member that is shown a token of another cluster, whose log is longer, keeps the call.
#[tokio::test]
async fn a_login_with_which_a_member_keeps_calls_is_followed_by_another() {
    let mut kept = 0;
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let secure = certified();
        let ways = [(&light(), None), (&secure.start, Some(&secure.tls))];
        for (start, tls) in ways {
            let programs = Programs::find(minor);
            let before = EtcdProcess::start(&programs, start).await;
            let seed = EtcdProcess::start(&programs, start).await;
            let [before, via] = [[before.client_url.clone()], [seed.client_url.clone()]];
            turned_on(tls, &before).await;
            turned_on(tls, &via).await;
            let longer = patient(tls);
            for _ in 0..30 {
                let alarm = etcd::Alarm {
                    member: MemberId(1),
                    kind: etcd::AlarmKind::NoSpace,
                };
                answered(|| longer.disarm(&before, alarm)).await;
            }
            let root = quick(tls);
            answered(|| root.members(&before)).await;
            // On a slow machine the login is in doubt already.
            let first = root.members(&via).await;
            kept += usize::from(matches!(first, Err(Error::Timeout(_))));
            let late = matches!(first, Err(Error::Timeout(_) | Error::Unavailable(_)));
            assert!(late || first.is_ok(), "{minor}: {first:?}");
            answered(|| root.members(&via)).await;
            answered(|| root.status(&via[0])).await;
            assert!(bytes_of_snapshot(&root, &via[0]).await > 0, "{minor}");
            let login = answered(|| root.login(&via)).await;
            assert_eq!(login, Some(Login::Accepted), "{minor}");
        }
    }
    assert!(kept > 0, "no member kept a call");
}

/// Silence has other reasons: without a quorum, which gives out no other, the login is worth what it was.
#[tokio::test]
async fn a_login_is_kept_as_long_as_nobody_gives_out_another() {
    for minor in ["3.4", "3.6"] {
        let programs = Programs::find(minor);
        let mut members = EtcdProcess::start_cluster(&programs, 3, &light()).await;
        let via = urls(&members);
        let root = quick(None);
        turned_on(None, &via).await;
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
        members[1].start_again();
        answered(|| root.members(&via[..2])).await;
    }
}

/// Members keep tokens in memory: after all were started again, none is known any more.
#[tokio::test]
async fn a_login_outlasts_the_restart_of_every_member() {
    for minor in ["3.4", "3.5", "3.6", "3.7"] {
        let Certified { start, tls, _dir } = certified();
        let mut members = EtcdProcess::start_cluster(&Programs::find(minor), 3, &start).await;
        let via = urls(&members);
        let root = quick(Some(&tls));
        turned_on(Some(&tls), &via).await;
        answered(|| root.members(&via)).await;
        for member in &mut members {
            member.kill();
        }
        for member in &mut members {
            member.start_again();
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
