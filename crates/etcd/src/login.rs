//! The login of a client. All calls of the client share the login, because a token is valid at every member of the
//! cluster.
//!
//! The rules of etcd (`server/auth/store.go`, `simple_token.go`, `api/v3rpc/interceptor.go`):
//! - A voter issues a token only with a quorum. A learner issues no tokens.
//! - A member forgets a token at a restart, and five minutes after its last use on that member.
//! - A learner requires a token like every member. Since 3.5.26 and 3.6.9, `Status` also requires a token.
//! - While authentication is disabled, tokens are neither issued nor required.
//!
//! The client therefore requests a token from any member, and sends the token to all members. If a member does not know
//! the token, the client requests a new one.
//!
//! Certificates: a client whose certificate names an etcd user needs no token. Without a quorum, no member issues a
//! token, so the certificate is the only way to authenticate. etcd checks the certificate only if the request has no
//! token (`AuthInfoFromCtx` in `server/etcdserver/v3_server.go`). The client therefore drops a token that a member does
//! not know.
//!
//! Suspect logins: a token contains a position in the Raft log. If a member's log ends before this position, the member
//! does not reject the token, but blocks the call (`isValidSimpleToken` in `simple_token.go`). This happens if the
//! member lags, or if a restore or recovery has replaced its cluster. A login therefore becomes suspect when a member
//! does not respond to a call.
//!
//! A missing response can also have other causes. Until the client has a new token, it therefore authenticates with its
//! certificate or, without a certificate, with the suspect token.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions};
use futures::stream::{self, FuturesUnordered, StreamExt};
use http::HeaderValue;
use tokio::time::Instant;

use crate::access::Credentials;
use crate::channel::{MemberChannel, MemberChannels, Token};
use crate::limits::{MAX_ANSWER, MAX_ENDPOINTS};
use crate::port::{Error, Login};

/// The client does not repeat a rejected login within this time, because the member computes a slow password hash for
/// each attempt.
const REJECTION_CACHE: Duration = Duration::from_secs(3);
/// After a login without a response, the client attempts no login for this time, so that calls that need no login do
/// not wait.
const NO_ANSWER_BACKOFF: Duration = Duration::from_secs(2);
/// After this time, the client checks again whether authentication is enabled. Until then, calls use the existing
/// token.
const LOGIN_CACHE: Duration = Duration::from_mins(4);

/// A login becomes suspect if a call has no response for this time. This time is shorter than the shortest timeout of a
/// caller: the cluster operator waits 250 ms for a member that is not ready.
const MIN_UNANSWERED: Duration = Duration::from_millis(200);
/// Minimum time between two suspect logins, because each new login costs a password hash and an entry in the Raft log.
const SUSPECT_INTERVAL: Duration = Duration::from_secs(15);

/// The `overtaken` flag of a call that only one member gets. No other member can respond first.
pub(crate) static NOT_HEDGED: AtomicBool = AtomicBool::new(false);

/// The result of a login. Its number identifies the login when a caller reports that etcd no longer accepts it.
#[derive(Clone, Debug)]
struct LoginResult {
    login: Login,
    at: Instant,
    number: u64,
}

/// The last login of a client, and failed attempts to log in.
#[derive(Debug, Default)]
struct State {
    found: Option<LoginResult>,
    no_answer_since: Option<Instant>,
    count: u64,
    suspect: Suspect,
}

/// A suspect login. Without a certificate, calls still use it (`presented`). With a certificate, calls do not use it
/// (`suspended`).
#[derive(Debug, Default)]
struct Suspect {
    /// The time at which a login last became suspect.
    since: Option<Instant>,
    /// The number of the suspect login that calls use until a new login exists.
    presented: Option<u64>,
    /// The suspect login and its token, which calls do not use while the certificate authenticates the client.
    suspended: Option<(LoginResult, HeaderValue)>,
}

impl State {
    /// The login that calls may use. `None` if its number is `stale`, or if it is a rejected login that is older than
    /// [`REJECTION_CACHE`].
    fn usable(&self, stale: Option<u64>) -> Option<(Login, u64)> {
        let found = self.found.as_ref()?;
        let rejected = matches!(found.login, Login::Refused(_));
        let holds = !rejected || found.at.elapsed() < REJECTION_CACHE;
        (holds && Some(found.number) != stale).then(|| (found.login.clone(), found.number))
    }

    fn is_unanswered(&self) -> bool {
        self.no_answer_since
            .is_some_and(|since| since.elapsed() < NO_ANSWER_BACKOFF)
    }
}

/// The login of one client.
#[derive(Default)]
pub(crate) struct Session {
    credentials: Option<Credentials>,
    /// Whether the client has a certificate.
    with_certificate: bool,
    token: Token,
    found: Mutex<State>,
    /// Locked during a login, so that concurrent calls share one login.
    login_lock: tokio::sync::Mutex<()>,
    /// Number of passwords that etcd rejected before a login timed out. The next login skips them ([`log_in`]).
    pub(crate) rejected: AtomicUsize,
    /// The members of the last call. The client may request a token from each of them.
    members: Mutex<Vec<String>>,
    /// Maximum size in bytes of a response of a member.
    max_answer: usize,
}

/// The response of one member to a login.
pub(crate) enum Answer {
    /// The token, and the index of the accepted password.
    Token(String, usize),
    /// Authentication is disabled.
    Off,
    /// The member rejects all passwords of the user.
    Rejected,
    /// The member did not respond, or issues no tokens.
    Unavailable,
}

impl Session {
    pub(crate) fn new(credentials: Option<Credentials>, with_certificate: bool) -> Self {
        Self {
            credentials,
            with_certificate,
            max_answer: MAX_ANSWER,
            ..Self::default()
        }
    }

    /// Sets the maximum size in bytes of the responses over new connections.
    pub(crate) fn with_max_answer(self, bytes: usize) -> Self {
        Self {
            max_answer: bytes,
            ..self
        }
    }

    /// Connects to a member. The channel adds the current token to calls, and limits the size of responses.
    pub(crate) async fn connect(
        &self,
        url: &str,
        options: ConnectOptions,
    ) -> Result<Client, etcd_client::Error> {
        let channels = MemberChannels {
            token: self.token.clone(),
            created: None,
            max_answer: self.max_answer,
        };
        Client::connect_with_balanced_channel([url], Some(options), channels).await
    }

    /// Like [`Session::connect`]. Also returns the channel of the connection, which works while the client exists.
    pub(crate) async fn connect_with_channel(
        &self,
        url: &str,
        options: ConnectOptions,
    ) -> Result<(Client, MemberChannel), etcd_client::Error> {
        let created = Arc::new(OnceLock::new());
        let channels = MemberChannels {
            token: self.token.clone(),
            created: Some(created.clone()),
            max_answer: self.max_answer,
        };
        let client = Client::connect_with_balanced_channel([url], Some(options), channels).await?;
        let channel = created.get().cloned().ok_or_else(|| {
            etcd_client::Error::Internal("the connection was created without a channel".to_owned())
        })?;
        Ok((client, channel))
    }

    fn found(&self) -> MutexGuard<'_, State> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the members from which a token may be requested.
    pub(crate) fn set_members(&self, via: &[String]) {
        if self.credentials.is_some() {
            let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
            members.clear();
            members.extend(via.iter().take(MAX_ENDPOINTS).cloned());
        }
    }

    /// The result of the current login. `None` if there is no login, or if the login is older than [`LOGIN_CACHE`].
    pub(crate) fn current(&self) -> Option<Login> {
        let known = self.found();
        let recent = |found: &LoginResult| found.at.elapsed() < LOGIN_CACHE;
        let Some(found) = &known.found else {
            let aside = known.suspect.suspended.as_ref();
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

    /// Returns a guard for a call with the token of this login. If the caller drops the call without a response after
    /// [`MIN_UNANSWERED`], the login becomes suspect. If `overtaken` is set, another member has accepted the token, so
    /// the login stays valid.
    pub(crate) fn watch<'a>(
        &'a self,
        login: Option<u64>,
        overtaken: &'a AtomicBool,
    ) -> PendingCall<'a> {
        PendingCall {
            session: self,
            login,
            overtaken,
            since: Instant::now(),
        }
    }

    /// Makes a login suspect, because a member did not respond to a call with its token.
    fn mark_suspect(&self, number: u64) {
        let mut known = self.found();
        let known = &mut *known;
        let recent = |at: Instant| at.elapsed() < SUSPECT_INTERVAL;
        let is_known = known
            .found
            .as_ref()
            .is_some_and(|found| found.number == number);
        let mut token = self.token.write().unwrap_or_else(PoisonError::into_inner);
        if !is_known || token.is_none() || known.suspect.since.is_some_and(recent) {
            return;
        }
        known.suspect.since = Some(Instant::now());
        if self.with_certificate {
            known.suspect.suspended = known.found.take().zip(token.take());
        } else {
            known.suspect.presented = Some(number);
        }
    }

    /// Returns the number of the suspect login, but only to the first caller, so that only one caller requests a new
    /// token.
    pub(crate) fn take_suspect(&self) -> Option<u64> {
        self.found().suspect.presented.take()
    }

    /// Uses the suspended login again, because the certificate does not authenticate the client. Returns the login's
    /// number.
    pub(crate) fn restore_login(&self) -> Option<u64> {
        let mut known = self.found();
        if known.found.is_some() {
            return None;
        }
        let (found, token) = known.suspect.suspended.take()?;
        let number = found.number;
        known.found = Some(found);
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = Some(token);
        Some(number)
    }

    pub(crate) fn has_credentials(&self) -> bool {
        self.credentials.is_some()
    }

    /// The number of the current login. Sends no request.
    pub(crate) fn login_number(&self) -> Option<u64> {
        let known = self.found();
        known.usable(None).map(|(_, number)| number)
    }

    /// True if authentication was disabled at this login.
    pub(crate) fn is_off(&self, login: Option<u64>) -> bool {
        let known = self.found();
        let found = known.found.as_ref();
        found.is_some_and(|found| Some(found.number) == login && found.login == Login::Off)
    }

    /// Drops the token, so that etcd checks the certificate.
    pub(crate) fn drop_token(&self) {
        let mut known = self.found();
        (known.found, known.suspect.suspended) = (None, None);
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn has_certificate(&self) -> bool {
        self.with_certificate
    }

    /// Forgets the login and ends the back-off of logins, because authentication was changed.
    pub(crate) fn forget(&self) {
        let mut known = self.found();
        (known.found, known.no_answer_since) = (None, None);
        (known.suspect.presented, known.suspect.suspended) = (None, None);
    }

    /// Returns the current login, unless its number is `stale`. If no login is usable, logs in at `endpoint`, and then
    /// at the other members.
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
            (known.usable(stale), known.is_unanswered())
        };
        if let (Some(found), _) = known() {
            return into_result(found);
        }
        let _guard = self.login_lock.lock().await;
        match known() {
            (Some(found), _) => return into_result(found),
            (None, true) => return Ok(None),
            (None, false) => {}
        }
        let others: Vec<String> = {
            let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
            members
                .iter()
                .filter(|one| *one != endpoint)
                .cloned()
                .collect()
        };
        let first = stream::iter([endpoint.to_owned()]);
        let first = first.then(|member| ask_member(&ask, member, credentials));
        let others: FuturesUnordered<_> = others
            .into_iter()
            .map(|member| ask_member(&ask, member, credentials))
            .collect();
        let mut answers = pin!(first.chain(others));
        while let Some((member, answer)) = answers.next().await {
            let (login, token) = match answer {
                Answer::Unavailable => continue,
                Answer::Off => (Login::Off, None),
                Answer::Rejected => {
                    let user = &credentials.user;
                    let text = format!("{member}: etcd rejects the password of user {user}");
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
            return into_result(self.record(login, header));
        }
        // No member has issued a token. The caller sends its call with the current token, or without a token if the
        // client has a certificate and the current token is stale.
        self.found().no_answer_since = Some(Instant::now());
        if self.with_certificate && stale.is_some() {
            self.drop_token();
        }
        Ok(None)
    }

    fn record(&self, login: Login, token: Option<HeaderValue>) -> (Login, u64) {
        let mut known = self.found();
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = token;
        known.count += 1;
        known.no_answer_since = None;
        (known.suspect.presented, known.suspect.suspended) = (None, None);
        let number = known.count;
        known.found = Some(LoginResult {
            login: login.clone(),
            at: Instant::now(),
            number,
        });
        (login, number)
    }
}

/// A call that has no response yet.
pub(crate) struct PendingCall<'a> {
    session: &'a Session,
    login: Option<u64>,
    overtaken: &'a AtomicBool,
    since: Instant,
}

impl PendingCall<'_> {
    /// Marks the call as answered, whether it succeeded or failed.
    pub(crate) fn answered(mut self) {
        self.login = None;
    }
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        if let Some(login) = self.login
            && self.since.elapsed() >= MIN_UNANSWERED
            && !self.overtaken.load(Ordering::Relaxed)
        {
            self.session.mark_suspect(login);
        }
    }
}

async fn ask_member<A, F>(ask: &A, member: String, credentials: &Credentials) -> (String, Answer)
where
    A: Fn(String, Credentials) -> F,
    F: Future<Output = Answer>,
{
    let answer = ask(member.clone(), credentials.clone()).await;
    (member, answer)
}

fn into_result((login, number): (Login, u64)) -> Result<Option<(Login, u64)>, Error> {
    match login {
        Login::Refused(text) => Err(Error::AccessDenied(text)),
        login => Ok(Some((login, number))),
    }
}

/// Logs in at one member with the first password that the member accepts. Skips the first `rejected` passwords, because
/// etcd has rejected them in an earlier login that timed out. Each password costs a slow password hash.
pub(crate) async fn log_in(
    client: &Client,
    credentials: &Credentials,
    rejected: &AtomicUsize,
) -> Answer {
    let known = rejected.load(Ordering::Relaxed);
    for (index, password) in credentials.passwords().enumerate().skip(known) {
        let mut auth = client.auth_client();
        let answer = auth.authenticate(credentials.user.clone(), password.to_owned());
        match answer.await {
            Ok(answer) => {
                rejected.store(0, Ordering::Relaxed);
                return Answer::Token(answer.token().to_owned(), index);
            }
            Err(etcd_client::Error::GRpcStatus(status)) => {
                let text = status.message();
                if text.contains("authentication is not enabled") {
                    rejected.store(0, Ordering::Relaxed);
                    return Answer::Off;
                }
                // etcd returns these errors for a wrong password, for an unknown user, and for a user without a
                // password. Any other error does not reject the password.
                if !text.contains("authentication failed") && !text.contains("no password") {
                    return Answer::Unavailable;
                }
                rejected.fetch_max(index + 1, Ordering::Relaxed);
            }
            Err(_) => return Answer::Unavailable,
        }
    }
    rejected.store(0, Ordering::Relaxed);
    Answer::Rejected
}

/// Whether the member rejects the call because it requires a token or does not know the token.
pub(crate) fn asks_for_token(error: &etcd_client::Error) -> bool {
    // Only the message is compared, not the gRPC code, because older etcd releases return some of these errors with the
    // gRPC code `Unknown`.
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

#[cfg(test)]
mod tests;
