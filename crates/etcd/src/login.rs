//! The login of a client. All calls of the client share it, because a token is valid at every member of the cluster.
//!
//! The rules of etcd (`server/auth/store.go`, `simple_token.go`, `api/v3rpc/interceptor.go`):
//! - A voter issues a token through a quorum. A learner issues no tokens.
//! - A member forgets a token at a restart, and five minutes after its last use on that member.
//! - A learner requires a token like every member. Since 3.5.26 and 3.6.9, also for `Status`.
//! - While authentication is disabled, tokens are neither issued nor required.
//!
//! The client therefore requests a token from any member that issues one, and presents it to all members. If a member
//! does not know the token, the client requests a new one.
//!
//! Certificates: if members require client certificates, a client whose certificate names a user needs no token.
//! Without a quorum no token is issued, and the certificate is the only way to authenticate. etcd checks the
//! certificate only if the request has no token (`AuthInfoFromCtx` in `server/etcdserver/v3_server.go`). The client
//! therefore drops a token that a member does not know.
//!
//! Suspect logins: a token contains a position in the log of the cluster that issued it. If the log of a member ends
//! before this position, the member does not reject the token, but blocks the call (`isValidSimpleToken` in
//! `simple_token.go`). This happens if the member lags, or if it belongs to a new cluster after a restore or recovery.
//! A login therefore becomes suspect when a call gets no response.
//!
//! A missing response can also have other causes. A client without a certificate uses the suspect token until it has a
//! new one. A client with a certificate uses only the certificate until then.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions};
use futures::stream::{self, FuturesUnordered, StreamExt};
use http::HeaderValue;
use tokio::time::Instant;

use crate::access::Credentials;
use crate::channel::{MemberChannels, Token};
use crate::limits::MAX_ENDPOINTS;
use crate::port::{Error, Login};

/// A rejected login is not repeated within this time. Each attempt costs the member a slow password hash.
const REJECTION_CACHE: Duration = Duration::from_secs(3);
/// After no member has responded, no login is attempted for this time. Calls that need no login must not wait for one.
const NO_ANSWER_BACKOFF: Duration = Duration::from_secs(2);
/// After this time, the client checks again whether authentication is enabled. Until the check ends, calls use the
/// existing token. Without a quorum no new token is issued, but a member keeps a token that is used regularly.
const LOGIN_CACHE: Duration = Duration::from_mins(4);

/// A call makes its login suspect only if it had no response for at least this time. It is shorter than the shortest
/// timeout of a caller: the cluster operator waits 250 ms for members that are not ready, and members that block calls
/// do not become ready. A read does not make its login suspect if another member has responded first
/// ([`Session::watch`]).
const MIN_UNANSWERED: Duration = Duration::from_millis(200);
/// Minimum time between two suspect logins. A new login costs a member a password hash, and the cluster a log entry.
const SUSPECT_INTERVAL: Duration = Duration::from_secs(15);

/// The `overtaken` flag of a call that is sent to only one member, so no other member can respond first.
pub(crate) static NOT_HEDGED: AtomicBool = AtomicBool::new(false);

/// The result of a login. Logins are numbered, so that a caller can name the login that it has used.
#[derive(Clone, Debug)]
struct LoginResult {
    login: Login,
    at: Instant,
    number: u64,
}

/// The result of the last login, and the time since which no member has responded.
#[derive(Debug, Default)]
struct State {
    found: Option<LoginResult>,
    no_answer_since: Option<Instant>,
    count: u64,
    suspect: Suspect,
}

/// A suspect login, and what the client uses until a new login exists.
#[derive(Debug, Default)]
struct Suspect {
    /// The time at which a login last became suspect.
    since: Option<Instant>,
    /// The number of the suspect login that calls use until a new login exists.
    presented: Option<u64>,
    /// The suspect login with its token. It is not used while the certificate authenticates the client.
    suspended: Option<(LoginResult, HeaderValue)>,
}

impl State {
    /// The login that calls may use. `None` if the login has the number `stale`, or if it is an old rejection.
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
    /// Number of passwords that etcd has rejected so far.
    pub(crate) rejected: AtomicUsize,
    /// The members that the last call named. If the called member is a learner, another of them issues the token.
    members: Mutex<Vec<String>>,
}

/// The response of one member to a login.
pub(crate) enum Answer {
    /// The token, and the index of the accepted password.
    Token(String, usize),
    /// Authentication is disabled.
    Off,
    /// The member rejects all passwords.
    Rejected,
    /// The member did not respond, or issues no tokens.
    Unavailable,
}

impl Session {
    pub(crate) fn new(credentials: Option<Credentials>, with_certificate: bool) -> Self {
        Self {
            credentials,
            with_certificate,
            ..Self::default()
        }
    }

    /// Connects as the library does. In addition, each call contains the current token, and responses are limited.
    pub(crate) async fn connect(
        &self,
        url: &str,
        options: ConnectOptions,
    ) -> Result<Client, etcd_client::Error> {
        let channels = MemberChannels(self.token.clone());
        Client::connect_with_balanced_channel([url], Some(options), channels).await
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

    /// The result of the current login. `None` if there is no login or it is too old.
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

    /// Watches a call that presents this login. If the call is dropped without a response, the login becomes suspect.
    /// If `overtaken` is set, it does not: another member has then responded to the same login.
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

    /// Makes a login suspect, because a member did not respond to a call that presented it.
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

    /// The suspect login that the caller should replace. Only one caller gets it.
    pub(crate) fn take_suspect(&self) -> Option<u64> {
        self.found().suspect.presented.take()
    }

    /// Uses the suspended login again, because the certificate is not enough. Returns the number of the login.
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

    /// Drops the token. Without a token, etcd checks the certificate.
    pub(crate) fn drop_token(&self) {
        let mut known = self.found();
        (known.found, known.suspect.suspended) = (None, None);
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn has_certificate(&self) -> bool {
        self.with_certificate
    }

    /// Forgets the login, because authentication has changed. Also ends the back-off after no member had responded.
    pub(crate) fn forget(&self) {
        let mut known = self.found();
        (known.found, known.no_answer_since) = (None, None);
        (known.suspect.presented, known.suspect.suspended) = (None, None);
    }

    /// Returns the current login, unless it is `stale`. Otherwise logs in, at `endpoint` first.
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
        // No member issues a token. The call uses the existing token, or no token.
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

/// A call without a response so far.
pub(crate) struct PendingCall<'a> {
    session: &'a Session,
    login: Option<u64>,
    overtaken: &'a AtomicBool,
    since: Instant,
}

impl PendingCall<'_> {
    /// Marks the call as answered. The result of the call does not matter.
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

/// Logs in at one member with the first password that the member accepts. `rejected` is the number of passwords that
/// were already rejected: each attempt costs the member a password hash, so a client that timed out continues with the
/// next password.
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
                // etcd returns the same errors for an unknown user, and for a user without a password.
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
    // For some calls, older releases return other texts, with the code `Unknown`.
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
