//! The login of a client: one for all members, since etcd makes a token known to every one of them.
//!
//! What etcd does (`server/auth/store.go`, `simple_token.go`, `api/v3rpc/interceptor.go`): a token is given out by a
//! voter, through a quorum, and each member forgets it five minutes after it has last seen it, and when it starts
//! again. A learner gives none out and asks for one like the others, also for `Status` since 3.5.26 and 3.6.9. So the
//! token is fetched where it can be had and shown wherever it is asked for, and fetched anew when a member does not
//! know it. While authentication is off none is given out, and none is needed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use etcd_client::{BalancedChannelBuilder, Channel, Client, ConnectOptions};
use http::{HeaderValue, Request};
use tokio::sync::mpsc::Sender;
use tokio::time::Instant;
use tonic::transport::Endpoint;
use tonic::transport::channel::Change;
use tower::ServiceExt;
use tower::util::BoxCloneSyncService;

use crate::access::Credentials;
use crate::port::{Error, Login};

/// The header etcd looks for the token in (`rpctypes.TokenFieldNameGRPC`).
const HEADER: &str = "token";
/// The call that gives a token out; a token that is out of date would only be in its way.
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
/// How long a refusal is taken for granted: each try costs the member a hash that is made to be slow.
const REFUSED_FOR: Duration = Duration::from_secs(3);
/// How long what was found holds; after that it is asked again whether authentication is on.
const FOUND_FOR: Duration = Duration::from_mins(4);

type Token = Arc<RwLock<Option<HeaderValue>>>;

/// What is known of the login, and how many times it was found out.
#[derive(Clone, Debug)]
struct Found {
    login: Login,
    at: Instant,
    number: u64,
}

/// The login of one client.
#[derive(Default)]
pub(crate) struct Session {
    credentials: Option<Credentials>,
    token: Token,
    found: Mutex<Option<Found>>,
    /// Who logs in does it for all that wait.
    turn: tokio::sync::Mutex<()>,
    /// The members that were asked last: one of them gives out what a learner does not.
    known: Mutex<Vec<String>>,
}

/// What one member answered to a login.
pub(crate) enum Answer {
    /// The token, and that of the passwords which fits.
    Token(String, usize),
    /// Authentication is off.
    Off,
    /// None of the passwords fits.
    Refused,
    /// The member cannot say.
    Silent,
}

impl Session {
    pub(crate) fn new(credentials: Option<Credentials>) -> Self {
        Self {
            credentials,
            ..Self::default()
        }
    }

    /// Connects like the library does, with the token of the moment in every call.
    pub(crate) async fn connect(
        &self,
        url: &str,
        options: ConnectOptions,
    ) -> Result<Client, etcd_client::Error> {
        if self.credentials.is_none() {
            return Client::connect([url], Some(options)).await;
        }
        let shows = Shows(self.token.clone());
        Client::connect_with_balanced_channel([url], Some(options), shows).await
    }

    fn found(&self) -> MutexGuard<'_, Option<Found>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Members that may give a token out.
    pub(crate) fn know(&self, via: &[String]) {
        if self.credentials.is_some() {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.clear();
            known.extend_from_slice(via);
        }
    }

    /// What is known, unless it is out of date; and its number.
    pub(crate) fn current(&self) -> Option<(Login, u64)> {
        let found = self.found();
        let found = found.as_ref()?;
        let holds = match found.login {
            Login::Refused(_) => REFUSED_FOR,
            _ => FOUND_FOR,
        };
        (found.at.elapsed() < holds).then(|| (found.login.clone(), found.number))
    }

    /// Whether a login is of any use.
    pub(crate) fn has_credentials(&self) -> bool {
        self.credentials.is_some()
    }

    /// Forgets what is known, after a change of it.
    pub(crate) fn forget(&self) {
        let mut found = self.found();
        if let Some(found) = found.as_mut() {
            found.at = Instant::now()
                .checked_sub(FOUND_FOR)
                .unwrap_or_else(Instant::now);
        }
    }

    /// Makes sure of the login: what is known, unless that is `stale`, else what a member says now. `endpoint` is
    /// asked first.
    pub(crate) async fn ensure<A, F>(
        &self,
        endpoint: &str,
        stale: Option<u64>,
        ask: A,
    ) -> Result<Option<(Login, u64)>, Error>
    where
        A: Fn(String, Credentials) -> F + Send + Sync,
        F: Future<Output = Answer> + Send,
    {
        let Some(credentials) = &self.credentials else {
            return Ok(None);
        };
        let usable = |found: &(Login, u64)| Some(found.1) != stale;
        if let Some(found) = self.current().filter(usable) {
            return settled(found);
        }
        let _turn = self.turn.lock().await;
        if let Some(found) = self.current().filter(usable) {
            return settled(found);
        }
        let mut members = vec![endpoint.to_owned()];
        {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            members.extend(known.iter().filter(|one| *one != endpoint).cloned());
        }
        for member in members {
            let (login, token) = match ask(member.clone(), credentials.clone()).await {
                Answer::Silent => continue,
                Answer::Off => (Login::Off, None),
                Answer::Refused => {
                    let user = &credentials.user;
                    let text = format!("{member}: etcd does not take the password of user {user}");
                    (Login::Refused(text), None)
                }
                Answer::Token(token, 0) => (Login::Accepted, Some(token)),
                Answer::Token(token, _) => (Login::Former, Some(token)),
            };
            let header = token.and_then(|token| {
                let mut value = HeaderValue::from_str(&token).ok()?;
                value.set_sensitive(true);
                Some(value)
            });
            *self.token.write().unwrap_or_else(PoisonError::into_inner) = header;
            return settled(self.keep(login));
        }
        // Nobody gives one out: what is known is shown all the same, or the call is made without.
        Ok(None)
    }

    fn keep(&self, login: Login) -> (Login, u64) {
        let mut found = self.found();
        let number = found.as_ref().map_or(0, |found| found.number) + 1;
        let at = Instant::now();
        *found = Some(Found {
            login: login.clone(),
            at,
            number,
        });
        (login, number)
    }
}

fn settled((login, number): (Login, u64)) -> Result<Option<(Login, u64)>, Error> {
    match login {
        Login::Refused(text) => Err(Error::AccessDenied(text)),
        login => Ok(Some((login, number))),
    }
}

/// Logs in at one member with the first of the passwords that it takes.
pub(crate) async fn log_in(client: &Client, credentials: &Credentials) -> Answer {
    let mut refused = false;
    for (index, password) in credentials.passwords().enumerate() {
        let mut auth = client.auth_client();
        let answer = auth.authenticate(credentials.user.clone(), password.to_owned());
        match answer.await {
            Ok(answer) => return Answer::Token(answer.token().to_owned(), index),
            Err(etcd_client::Error::GRpcStatus(status)) => {
                let text = status.message();
                if text.contains("authentication is not enabled") {
                    return Answer::Off;
                }
                // Also what etcd says of a user without a password, and of one it does not know.
                if !text.contains("authentication failed") && !text.contains("no password") {
                    return Answer::Silent;
                }
                refused = true;
            }
            Err(_) => return Answer::Silent,
        }
    }
    if refused { Answer::Refused } else { Answer::Silent }
}

/// Whether a member asks for a token, or does not know the one it was shown.
pub(crate) fn asks_for_token(error: &etcd_client::Error) -> bool {
    // Some calls of older releases answer in words of their own, with the code `Unknown`.
    const TEXTS: [&str; 3] = [
        "invalid auth token",
        "user name is empty",
        "revision of auth store is old",
    ];
    let etcd_client::Error::GRpcStatus(status) = error else {
        return false;
    };
    TEXTS.iter().any(|text| status.message().contains(text))
}

/// Puts the token of the moment into every request.
struct Shows(Token);

impl BalancedChannelBuilder for Shows {
    type Error = tonic::transport::Error;

    fn balanced_channel(
        self,
        buffer_size: usize,
    ) -> Result<(Channel, Sender<Change<http::Uri, Endpoint>>), Self::Error> {
        let (channel, endpoints) = tonic::transport::Channel::balance_channel(buffer_size);
        let token = self.0;
        let shows = channel
            .map_request(move |mut request: Request<tonic::body::Body>| {
                let held = token.read().unwrap_or_else(PoisonError::into_inner);
                if let Some(held) = held.as_ref()
                    && request.uri().path() != AUTHENTICATE
                {
                    request.headers_mut().insert(HEADER, held.clone());
                }
                request
            })
            .map_err(tower::BoxError::from);
        Ok((Channel::Custom(BoxCloneSyncService::new(shows)), endpoints))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn session() -> Session {
        Session::new(Some(Credentials {
            user: "root".into(),
            password: "new".into(),
            former: vec!["old".into()],
        }))
    }

    #[tokio::test]
    async fn many_calls_log_in_once_and_again_when_the_token_is_not_known() {
        let (session, asked) = (session(), AtomicUsize::new(0));
        let ask = |_: String, _: Credentials| {
            let count = asked.fetch_add(1, Ordering::SeqCst);
            async move { Answer::Token(format!("token{count}.1"), 0) }
        };
        let first = session.ensure("a", None, ask).await.unwrap().unwrap();
        assert_eq!(first.0, Login::Accepted);
        assert_eq!(session.ensure("b", None, ask).await.unwrap(), Some(first.clone()));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        let next = session.ensure("b", Some(first.1), ask).await.unwrap();
        assert_ne!(next, Some(first));
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_member_that_gives_none_out_is_followed_by_those_that_are_known() {
        let session = session();
        session.know(&["learner".to_owned(), "voter".to_owned()]);
        let ask = |member: String, _: Credentials| async move {
            match member.as_str() {
                "voter" => Answer::Token("t.1".into(), 1),
                _ => Answer::Silent,
            }
        };
        let found = session.ensure("learner", None, ask).await.unwrap();
        assert_eq!(found.map(|found| found.0), Some(Login::Former));
    }

    #[tokio::test]
    async fn a_refusal_names_the_user_and_no_password_and_is_not_repeated_at_once() {
        let (session, asked) = (session(), AtomicUsize::new(0));
        let ask = |_: String, _: Credentials| {
            asked.fetch_add(1, Ordering::SeqCst);
            async { Answer::Refused }
        };
        for _ in 0..3 {
            let error = session.ensure("a", None, ask).await.unwrap_err();
            let text = error.to_string();
            assert!(text.contains("user root"), "{text}");
            assert!(!text.contains("new") && !text.contains("old"), "{text}");
        }
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn without_credentials_nobody_is_asked() {
        let session = Session::new(None);
        let ask = |_: String, _: Credentials| async { Answer::Refused };
        assert_eq!(session.ensure("a", None, ask).await.unwrap(), None);
    }
}
