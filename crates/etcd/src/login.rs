//! The login of a client: one for all members, since etcd makes a token known to every one of them.
//!
//! What etcd does (`server/auth/store.go`, `simple_token.go`, `api/v3rpc/interceptor.go`): a token is given out by a
//! voter, through a quorum, and each member forgets it five minutes after it has last seen it, and when it starts
//! again. A learner gives none out and asks for one like the others, also for `Status` since 3.5.26 and 3.6.9. So the
//! token is fetched where it can be had and shown wherever it is asked for, and fetched anew when a member does not
//! know it. While authentication is off none is given out, and none is needed.
//!
//! A client whose certificate names a user needs no token, where members ask for certificates: without a quorum, which
//! gives none out, it is the only way in for whoever has none yet. etcd looks at the certificate only where no token is
//! shown (`AuthInfoFromCtx` in `server/etcdserver/v3_server.go`), so one that a member does not know is dropped then.
//!
//! A token ends with the place in the log of the cluster that gave it out, and a member whose log does not reach that far
//! does not refuse it: it keeps the call (`isValidSimpleToken` in `simple_token.go`). That is a member that lags, and
//! one of another cluster, restored or recovered. So a login is doubted when a call is not answered. A doubted one is
//! shown until there is another, as silence has other reasons; whoever has a certificate shows that meanwhile.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use etcd_client::{BalancedChannelBuilder, Channel, Client, ConnectOptions};
use futures::stream::{self, FuturesUnordered, StreamExt};
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
/// So long nobody is asked again after nobody has answered: calls that need no login are not to wait for one.
const SILENT_FOR: Duration = Duration::from_secs(2);
/// How long what was found is told; then it is asked again whether authentication is on. Calls go on with the token
/// they have: also without a quorum, which gives no new one out, a member knows one that it is shown time and again.
const FOUND_FOR: Duration = Duration::from_mins(4);

/// A call that was given up earlier says nothing about the login it showed. Less than the least time anybody gives a
/// call: the cluster operator gives members that are not ready 250 ms, and those that keep calls do not become ready. A
/// read that another member answers meanwhile says nothing either, however long it has taken ([`Session::shows`]).
const PATIENCE: Duration = Duration::from_millis(200);
/// How often a login is doubted at most: another one costs a member a hash, and the cluster an entry of its log.
const DOUBTED_EVERY: Duration = Duration::from_secs(15);

type Token = Arc<RwLock<Option<HeaderValue>>>;

/// For a call that nobody overtakes: it is made to one member alone.
pub(crate) static ALONE: AtomicBool = AtomicBool::new(false);

/// What is known of the login, and how many times it was found out.
#[derive(Clone, Debug)]
struct Found {
    login: Login,
    at: Instant,
    number: u64,
}

/// What is known, and since when nobody has answered.
#[derive(Debug, Default)]
struct Known {
    found: Option<Found>,
    silent: Option<Instant>,
    count: u64,
    doubt: Doubt,
}

/// What is known of a login that is doubted.
#[derive(Debug, Default)]
struct Doubt {
    /// When one was doubted last.
    since: Option<Instant>,
    /// The one that is shown until somebody gives out another.
    shown: Option<u64>,
    /// The one that a certificate stands in for, and its token.
    aside: Option<(Found, HeaderValue)>,
}

impl Known {
    /// What calls go by.
    fn usable(&self, stale: Option<u64>) -> Option<(Login, u64)> {
        let found = self.found.as_ref()?;
        let refused = matches!(found.login, Login::Refused(_));
        let holds = !refused || found.at.elapsed() < REFUSED_FOR;
        (holds && Some(found.number) != stale).then(|| (found.login.clone(), found.number))
    }

    fn is_silent(&self) -> bool {
        self.silent
            .is_some_and(|since| since.elapsed() < SILENT_FOR)
    }
}

/// The login of one client.
#[derive(Default)]
pub(crate) struct Session {
    credentials: Option<Credentials>,
    /// It shows a certificate, too.
    certified: bool,
    token: Token,
    found: Mutex<Known>,
    /// Who logs in does it for all that wait.
    turn: tokio::sync::Mutex<()>,
    /// How many of the passwords were refused so far.
    pub(crate) refused: AtomicUsize,
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
    pub(crate) fn new(credentials: Option<Credentials>, certified: bool) -> Self {
        Self {
            credentials,
            certified,
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

    fn found(&self) -> MutexGuard<'_, Known> {
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

    /// What is known, unless it is out of date.
    pub(crate) fn current(&self) -> Option<Login> {
        let known = self.found();
        let recent = |found: &Found| found.at.elapsed() < FOUND_FOR;
        let Some(found) = &known.found else {
            let aside = known.doubt.aside.as_ref();
            return aside
                .filter(|(found, _)| recent(found))
                .map(|(found, _)| found.login.clone());
        };
        let recent = recent(found);
        known
            .usable(None)
            .filter(|_| recent)
            .map(|(login, _)| login)
    }

    /// Watches a call that shows this login, until it is answered: one that is dropped before tells against it, unless
    /// it was overtaken. Then another member has answered with the same login, and this one is slow.
    pub(crate) fn shows<'a>(
        &'a self,
        login: Option<u64>,
        overtaken: &'a AtomicBool,
    ) -> Unanswered<'a> {
        Unanswered {
            session: self,
            login,
            overtaken,
            since: Instant::now(),
        }
    }

    /// Doubts a login that was shown to a member which did not answer.
    fn doubt(&self, number: u64) {
        let mut known = self.found();
        let known = &mut *known;
        let recent = |at: Instant| at.elapsed() < DOUBTED_EVERY;
        let is_known = known
            .found
            .as_ref()
            .is_some_and(|found| found.number == number);
        let mut token = self.token.write().unwrap_or_else(PoisonError::into_inner);
        if !is_known || token.is_none() || known.doubt.since.is_some_and(recent) {
            return;
        }
        known.doubt.since = Some(Instant::now());
        if self.certified {
            known.doubt.aside = known.found.take().zip(token.take());
        } else {
            known.doubt.shown = Some(number);
        }
    }

    /// The login that is doubted, for whoever has the time to ask for another one. Each doubt is settled once.
    pub(crate) fn take_doubt(&self) -> Option<u64> {
        self.found().doubt.shown.take()
    }

    /// Shows the login again that a certificate stood in for, where that is not enough.
    pub(crate) fn take_back(&self) -> Option<u64> {
        let mut known = self.found();
        if known.found.is_some() {
            return None;
        }
        let (found, token) = known.doubt.aside.take()?;
        let number = found.number;
        known.found = Some(found);
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = Some(token);
        Some(number)
    }

    /// Whether a login is of any use.
    pub(crate) fn has_credentials(&self) -> bool {
        self.credentials.is_some()
    }

    /// Which login is known, without asking anybody.
    pub(crate) fn known(&self) -> Option<u64> {
        let known = self.found();
        known.usable(None).map(|(_, number)| number)
    }

    /// Shows no token any more, so that etcd looks at the certificate.
    pub(crate) fn drop_token(&self) {
        let mut known = self.found();
        (known.found, known.doubt.aside) = (None, None);
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether it shows a certificate beside its token.
    pub(crate) fn is_certified(&self) -> bool {
        self.certified
    }

    /// Forgets what is known, after a change of it; also that nobody has answered.
    pub(crate) fn forget(&self) {
        let mut known = self.found();
        (known.found, known.silent) = (None, None);
        (known.doubt.shown, known.doubt.aside) = (None, None);
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
        let known = || {
            let known = self.found();
            (known.usable(stale), known.is_silent())
        };
        if let (Some(found), _) = known() {
            return settled(found);
        }
        let _turn = self.turn.lock().await;
        match known() {
            (Some(found), _) => return settled(found),
            (None, true) => return Ok(None),
            (None, false) => {}
        }
        let others: Vec<String> = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known
                .iter()
                .filter(|one| *one != endpoint)
                .cloned()
                .collect()
        };
        let first = stream::iter([endpoint.to_owned()]);
        let first = first.then(|member| asked(&ask, member, credentials));
        let others: FuturesUnordered<_> = others
            .into_iter()
            .map(|member| asked(&ask, member, credentials))
            .collect();
        let mut answers = pin!(first.chain(others));
        while let Some((member, answer)) = answers.next().await {
            let (login, token) = match answer {
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
            return settled(self.keep(login, header));
        }
        // Nobody gives one out: the one that is known is shown all the same, or the call is made without.
        self.found().silent = Some(Instant::now());
        if self.certified && stale.is_some() {
            self.drop_token();
        }
        Ok(None)
    }

    fn keep(&self, login: Login, token: Option<HeaderValue>) -> (Login, u64) {
        let mut known = self.found();
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = token;
        known.count += 1;
        known.silent = None;
        (known.doubt.shown, known.doubt.aside) = (None, None);
        let number = known.count;
        known.found = Some(Found {
            login: login.clone(),
            at: Instant::now(),
            number,
        });
        (login, number)
    }
}

/// A call that is not answered yet.
pub(crate) struct Unanswered<'a> {
    session: &'a Session,
    login: Option<u64>,
    overtaken: &'a AtomicBool,
    since: Instant,
}

impl Unanswered<'_> {
    /// It is answered, whatever the answer is.
    pub(crate) fn answered(mut self) {
        self.login = None;
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(login) = self.login
            && self.since.elapsed() >= PATIENCE
            && !self.overtaken.load(Ordering::Relaxed)
        {
            self.session.doubt(login);
        }
    }
}

async fn asked<A, F>(ask: &A, member: String, credentials: &Credentials) -> (String, Answer)
where
    A: Fn(String, Credentials) -> F,
    F: Future<Output = Answer>,
{
    let answer = ask(member.clone(), credentials.clone()).await;
    (member, answer)
}

fn settled((login, number): (Login, u64)) -> Result<Option<(Login, u64)>, Error> {
    match login {
        Login::Refused(text) => Err(Error::AccessDenied(text)),
        login => Ok(Some((login, number))),
    }
}

/// Logs in at one member with the first of the passwords that it takes. `refused` counts those that were refused
/// already: each costs the member a hash, and whoever has no time for all of them goes on where he was.
pub(crate) async fn log_in(
    client: &Client,
    credentials: &Credentials,
    refused: &AtomicUsize,
) -> Answer {
    let known = refused.load(Ordering::Relaxed);
    for (index, password) in credentials.passwords().enumerate().skip(known) {
        let mut auth = client.auth_client();
        let answer = auth.authenticate(credentials.user.clone(), password.to_owned());
        match answer.await {
            Ok(answer) => {
                refused.store(0, Ordering::Relaxed);
                return Answer::Token(answer.token().to_owned(), index);
            }
            Err(etcd_client::Error::GRpcStatus(status)) => {
                let text = status.message();
                if text.contains("authentication is not enabled") {
                    refused.store(0, Ordering::Relaxed);
                    return Answer::Off;
                }
                // Also what etcd says of a user without a password, and of one it does not know.
                if !text.contains("authentication failed") && !text.contains("no password") {
                    return Answer::Silent;
                }
                refused.fetch_max(index + 1, Ordering::Relaxed);
            }
            Err(_) => return Answer::Silent,
        }
    }
    refused.store(0, Ordering::Relaxed);
    Answer::Refused
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
mod tests;
