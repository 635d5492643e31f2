//! Tests in which the client gets no answer to a change that etcd has received. The client must not repeat the change.
//! It may send a change to another member only if the first member certainly did not apply it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use etcd::testing::{EtcdProcess, Programs, Start, free_port};
use etcd::{
    Access, Alarm, AlarmKind, Credentials, Deadlines, Error, Etcd, EtcdClient, Login, MemberId,
};
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::Request;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

const MINORS: [&str; 4] = ["3.4", "3.5", "3.6", "3.7"];

/// Long deadlines, because a busy machine needs more time. No test reaches a deadline.
const PATIENT: Deadlines = Deadlines {
    connect: Duration::from_secs(30),
    status: Duration::from_secs(30),
    call: Duration::from_mins(1),
    hedge: Duration::from_secs(30),
    defragment: Duration::from_mins(1),
    progress: Duration::from_secs(30),
    idle: Duration::from_mins(2),
};

/// A proxy in front of one member. For the methods in `lost`, the proxy forwards the call and then closes the
/// connection without an answer. The proxy rejects the calls of the methods in `unhealthy`.
struct Proxy {
    url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// The methods whose answers are lost, such as `MemberAdd`.
    lost: Mutex<Vec<&'static str>>,
    /// The methods that the proxy rejects with etcd's error `unhealthy cluster`, without forwarding them.
    unhealthy: Mutex<Vec<&'static str>>,
    /// The methods of all calls that the proxy has forwarded or rejected, in order.
    received: Mutex<Vec<String>>,
}

impl Proxy {
    async fn start(member: &EtcdProcess, lost: &[&'static str]) -> Self {
        let target = member.client_url.trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(State::default());
        *state.lost.lock().unwrap() = lost.to_vec();
        let shared = state.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let (target, state) = (target.clone(), shared.clone());
                tokio::spawn(async move { forward_connection(near, &target, state).await });
            }
        });
        Self { url, state }
    }

    /// From now on, loses the answers to these methods. Clears the list of received calls.
    fn lose(&self, methods: &[&'static str]) {
        self.state.received.lock().unwrap().clear();
        *self.state.lost.lock().unwrap() = methods.to_vec();
    }

    /// From now on, rejects these methods, like a member that regards another member as disconnected.
    fn reject(&self, methods: &[&'static str]) {
        *self.state.unhealthy.lock().unwrap() = methods.to_vec();
    }

    /// How often this proxy has received the method.
    fn count(&self, method: &str) -> usize {
        let received = self.state.received.lock().unwrap();
        received.iter().filter(|one| *one == method).count()
    }
}

/// Forwards the calls of one connection until the client closes it, or until an answer is lost.
async fn forward_connection(near: TcpStream, target: &str, state: Arc<State>) {
    let Ok(far) = TcpStream::connect(target).await else {
        return;
    };
    let (member, driver) = h2::client::handshake(far).await.unwrap();
    let driver = tokio::spawn(driver);
    let broken = Arc::new(Notify::new());
    let mut near = h2::server::handshake(near).await.unwrap();
    loop {
        let call = tokio::select! {
            call = near.accept() => call,
            // The end of this loop drops the connection, so the client gets no answer.
            () = broken.notified() => break,
        };
        let Some(Ok((request, respond))) = call else {
            break;
        };
        let (member, state, broken) = (member.clone(), state.clone(), broken.clone());
        tokio::spawn(async move {
            let _ = forward_call(member, request, respond, &state, &broken).await;
        });
    }
    driver.abort();
}

async fn forward_call(
    member: SendRequest<Bytes>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    state: &State,
    broken: &Notify,
) -> Result<(), h2::Error> {
    let path = request.uri().path().to_owned();
    let method = path.rsplit('/').next().unwrap().to_owned();
    if state.unhealthy.lock().unwrap().contains(&method.as_str()) {
        state.received.lock().unwrap().push(method);
        let head = http::Response::builder()
            .header("content-type", "application/grpc")
            .header("grpc-status", "14")
            .header("grpc-message", "etcdserver: unhealthy cluster");
        respond.send_response(head.body(()).unwrap(), true)?;
        return Ok(());
    }
    let (head, mut body) = request.into_parts();
    let mut member = member.ready().await?;
    let (answer, mut out) = member.send_request(Request::from_parts(head, ()), false)?;
    copy(&mut body, &mut out).await?;
    state.received.lock().unwrap().push(method.clone());
    let (head, mut body) = answer.await?.into_parts();
    if state.lost.lock().unwrap().iter().any(|one| *one == method) {
        // etcd has processed the call, and the proxy drops the answer.
        broken.notify_one();
        return Ok(());
    }
    let ended = body.is_end_stream();
    let mut out = respond.send_response(http::Response::from_parts(head, ()), ended)?;
    if !ended {
        copy(&mut body, &mut out).await?;
    }
    Ok(())
}

async fn copy(from: &mut RecvStream, to: &mut SendStream<Bytes>) -> Result<(), h2::Error> {
    while let Some(data) = from.data().await {
        let data = data?;
        from.flow_control().release_capacity(data.len())?;
        to.send_data(data, false)?;
    }
    match from.trailers().await? {
        Some(trailers) => to.send_trailers(trailers),
        None => to.send_data(Bytes::new(), true),
    }
}

/// One member behind two proxies. To the client, each proxy is a member of a cluster of two members. A new client calls
/// `first` before `second`, because `via` lists `first` before `second`.
struct Pair {
    member: EtcdProcess,
    first: Proxy,
    second: Proxy,
}

impl Pair {
    async fn start(programs: &Programs, lost: &[&'static str]) -> Self {
        // A low bcrypt cost makes the test fast.
        let start = Start {
            flags: vec!["--bcrypt-cost=4".to_owned()],
            ..Start::default()
        };
        let member = EtcdProcess::start(programs, &start).await;
        let first = Proxy::start(&member, lost).await;
        let second = Proxy::start(&member, &[]).await;
        Self {
            member,
            first,
            second,
        }
    }

    fn via(&self) -> [String; 2] {
        [self.first.url.clone(), self.second.url.clone()]
    }

    /// The client URL of the member, without a proxy.
    fn direct(&self) -> [String; 1] {
        [self.member.client_url.clone()]
    }

    /// Asserts that the client reports a lost answer, and that only the first proxy has received the call, exactly
    /// once.
    fn assert_sent_once<T: std::fmt::Debug>(&self, answer: Result<T, Error>, method: &str) {
        let counts = (self.first.count(method), self.second.count(method));
        assert_eq!(counts, (1, 0), "{method}: {answer:?}");
        let text = answer.expect_err(method).to_string();
        let named =
            text.starts_with("the answer to a change was lost") && text.contains(&self.first.url);
        assert!(named, "{method}: {text}");
    }
}

fn client() -> EtcdClient {
    EtcdClient::with_deadlines(Access::default(), PATIENT)
}

fn peer() -> [String; 1] {
    [format!("http://127.0.0.1:{}", free_port())]
}

#[tokio::test]
async fn membership_changes_are_not_repeated_after_lost_answers() {
    for minor in MINORS {
        let programs = Programs::find(minor);
        let methods = ["MemberAdd", "MemberUpdate", "MemberRemove", "MemberPromote"];
        let pair = Pair::start(&programs, &methods).await;
        let (client, via, direct) = (client(), pair.via(), pair.direct());
        let url = peer();
        let added = client.add_member(&via, &url, true).await;
        pair.assert_sent_once(added, "MemberAdd");
        // The learner is in the member list, although the client got no answer.
        let list = client.members(&direct).await.unwrap().members;
        let learner = list.iter().find(|one| one.peer_urls == url).unwrap().id;
        assert_eq!(list.len(), 2, "{minor}");

        let promoted = client.promote_member(&via, learner).await;
        // etcd rejects the promotion, because the learner has not started. The proxy drops the rejection, so the client
        // gets no answer, and must not repeat the call.
        pair.assert_sent_once(promoted, "MemberPromote");
        let next = peer();
        let updated = client.update_member(&via, learner, &next).await;
        pair.assert_sent_once(updated, "MemberUpdate");
        let list = client.members(&direct).await.unwrap().members;
        let updated = list.iter().find(|one| one.id == learner).unwrap();
        assert_eq!(updated.peer_urls, next, "{minor}");

        let removed = client.remove_member(&via, learner).await;
        pair.assert_sent_once(removed, "MemberRemove");
        assert_eq!(client.members(&direct).await.unwrap().members.len(), 1);
    }
}

#[tokio::test]
async fn upkeep_changes_are_not_repeated_after_lost_answers() {
    for minor in MINORS {
        let lost = ["Alarm", "Compact", "Defragment", "MoveLeader"];
        let pair = Pair::start(&Programs::find(minor), &lost).await;
        let (client, via, direct) = (client(), pair.via(), pair.direct());
        let alarm = Alarm {
            member: MemberId(1),
            kind: AlarmKind::NoSpace,
        };
        pair.assert_sent_once(client.disarm(&via, alarm).await, "Alarm");
        let mut raw = etcd_client::Client::connect(&direct, None).await.unwrap();
        let put = raw.put("a", "b", None).await.unwrap();
        let revision = put.header().unwrap().revision();
        pair.assert_sent_once(client.compact(&via, revision).await, "Compact");
        pair.assert_sent_once(client.defragment(&via[0]).await, "Defragment");
        let moved = client.move_leader(&via[0], MemberId(1)).await;
        pair.assert_sent_once(moved, "MoveLeader");
    }
}

fn root(password: &str, former: &[&str]) -> EtcdClient {
    let access = Access {
        tls: None,
        credentials: Some(Credentials {
            user: "root".into(),
            password: password.into(),
            former: former.iter().map(|one| (*one).to_owned()).collect(),
        }),
    };
    EtcdClient::with_deadlines(access, PATIENT)
}

/// A lost answer ends the call, and a second call completes the change. Within one call, etcd receives each request at
/// most once.
#[tokio::test]
async fn auth_changes_are_not_repeated_after_lost_answers() {
    for minor in MINORS {
        let pair = Pair::start(&Programs::find(minor), &[]).await;
        let (via, direct) = (pair.via(), pair.direct());
        for step in ["UserAdd", "RoleAdd", "UserGrantRole", "AuthEnable"] {
            pair.first.lose(&[step]);
            let enabled = root("one", &[]).enable_auth(&via).await;
            pair.assert_sent_once(enabled, step);
        }
        let login = root("one", &[]).login(&direct).await.unwrap();
        assert_eq!(login, Some(Login::Accepted), "{minor}");

        pair.first.lose(&["UserChangePassword"]);
        let changed = root("two", &["one"]).change_password(&via).await;
        pair.assert_sent_once(changed, "UserChangePassword");
        let login = root("two", &["one"]).login(&direct).await.unwrap();
        assert_eq!(login, Some(Login::Accepted), "{minor}");

        pair.first.lose(&["AuthDisable"]);
        let disabled = root("two", &[]).disable_auth(&via).await;
        pair.assert_sent_once(disabled, "AuthDisable");
        let login = root("two", &[]).login(&direct).await.unwrap();
        assert_eq!(login, Some(Login::Off), "{minor}");
    }
}

/// A read changes nothing, so after every failure the client sends it to the next member.
#[tokio::test]
async fn read_is_sent_to_next_member_after_lost_answer() {
    for minor in MINORS {
        let pair = Pair::start(&Programs::find(minor), &["MemberList", "Alarm"]).await;
        let client = client();
        let members = client.members(&pair.via()).await.unwrap();
        assert_eq!(members.members.len(), 1, "{minor}");
        assert_eq!(client.alarms(&pair.via()).await.unwrap(), []);
        let status = client.local_members(&pair.first.url).await;
        assert!(matches!(status, Err(Error::Unreachable(_))), "{status:?}");
    }
}

/// A member that refuses the connection or that is a learner has not applied the change. The client then sends the
/// change to the next member.
#[tokio::test]
async fn next_member_gets_change_if_first_refuses_connection_or_is_learner() {
    for minor in MINORS {
        let programs = Programs::find(minor);
        let pair = Pair::start(&programs, &[]).await;
        let client = client();
        let url = peer();
        let added = client.add_member(&pair.direct(), &url, true).await.unwrap();
        let start = Start {
            join: vec![format!("m0={}", pair.member.peer_url)],
            ..Start::default()
        };
        let mut learner = EtcdProcess::join(&programs, "m1", &url[0], &start);
        assert!(learner.serves().await);
        let behind = Proxy::start(&learner, &[]).await;
        let closed = format!("http://127.0.0.1:{}", free_port());
        let via = [closed, behind.url.clone(), pair.second.url.clone()];
        client.remove_member(&via, added.id).await.unwrap();
        let counts = (
            behind.count("MemberRemove"),
            pair.second.count("MemberRemove"),
        );
        assert_eq!(counts, (1, 1), "{minor}");
    }
}

/// A member can wrongly regard another member as disconnected (etcd issue 14523), and then rejects all changes of the
/// member list. The client sends the change to the next member.
#[tokio::test]
async fn next_member_gets_change_that_one_member_rejects_as_unhealthy() {
    let pair = Pair::start(&Programs::find("3.6"), &[]).await;
    let (client, via) = (client(), pair.via());
    let counts = |method| (pair.first.count(method), pair.second.count(method));
    pair.first.reject(&["MemberAdd", "MemberRemove"]);
    let added = client.add_member(&via, &peer(), true).await.unwrap();
    assert_eq!(counts("MemberAdd"), (1, 1));
    // `second` gave the last successful response, so the client calls `second` before `first`. Now both proxies reject
    // the change.
    pair.second.reject(&["MemberRemove"]);
    let removed = client.remove_member(&via, added.id).await;
    let rejected =
        matches!(&removed, Err(Error::Unavailable(text)) if text.contains("unhealthy cluster"));
    assert!(rejected, "{removed:?}");
    assert_eq!(counts("MemberRemove"), (1, 1));
    pair.second.reject(&[]);
    client.remove_member(&via, added.id).await.unwrap();
    assert_eq!(counts("MemberRemove").1, 2);
}
