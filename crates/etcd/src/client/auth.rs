//! The login of the real client, and its calls that change etcd's authentication.

use std::future::Future;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use etcd_client::{Client, UserAddOptions};
use tokio::time::{Instant, timeout};

use super::EtcdClient;
use crate::access::Credentials;
use crate::answer::{ROLE_EXISTS, USER_EXISTS, most_specific};
use crate::login::{Answer, log_in};
use crate::port::{Error, Login};

impl EtcdClient {
    /// Logs the client in and returns the number of the login. Returns `None` if the client has no credentials, or if
    /// no member issues a token.
    ///
    /// `stale` is the number of a login that etcd no longer accepts. `deadline` is the time limit of the call that
    /// needs the login.
    pub(super) async fn logged_in(
        &self,
        endpoint: &str,
        stale: Option<u64>,
        deadline: Duration,
    ) -> Result<Option<u64>, Error> {
        // If the current login is suspect, the client first requests a new token. If no member issues one in time,
        // the client continues with the suspect login.
        let suspect = if stale.is_none() && deadline > self.deadlines.status {
            self.session.take_suspect()
        } else {
            None
        };
        // A client with a certificate or a suspect login can also send the call without a new token. The request for
        // a token therefore takes at most a quarter of the call's deadline.
        let longest = self.deadlines.call / 2;
        let login_timeout = if self.session.has_certificate() || suspect.is_some() {
            longest.min(deadline / 4)
        } else {
            longest
        };
        let ask = |member: String, credentials: Credentials| async move {
            let asked = async {
                match self.connection(&member).await {
                    Ok(client) => log_in(&client, &credentials, &self.session.rejected).await,
                    Err(_) => Answer::Unavailable,
                }
            };
            let answer = timeout(login_timeout, asked).await;
            answer.unwrap_or(Answer::Unavailable)
        };
        let stale = stale.or(suspect);
        let found = self.session.ensure(endpoint, stale, ask).await?;
        Ok(found.map(|(_, number)| number).or(suspect))
    }

    /// Sends a call with the token of this login. If the called member does not respond, the login becomes suspect,
    /// unless another member has responded to the same call.
    pub(super) async fn call_with_login<F: Future>(
        &self,
        login: Option<u64>,
        overtaken: &AtomicBool,
        call: F,
    ) -> F::Output {
        let watch = self.session.watch(login, overtaken);
        let answer = call.await;
        watch.answered();
        answer
    }

    pub(super) async fn login_state(&self, via: &[String]) -> Result<Option<Login>, Error> {
        if let Some(login) = self.session.current() {
            return Ok(Some(login));
        }
        self.session.forget();
        self.session.set_members(via);
        let Some(endpoint) = self.ordered(via).first().map(|one| (*one).to_owned()) else {
            return Err(most_specific(Vec::new()));
        };
        let deadline = self.deadlines.call * 2;
        match self.logged_in(&endpoint, None, deadline).await {
            Ok(_) | Err(Error::AccessDenied(_)) => {}
            Err(error) => return Err(error),
        }
        match self.session.current() {
            Some(login) => Ok(Some(login)),
            None if self.session.has_credentials() => Err(Error::Timeout(via.join(", "))),
            None => Ok(None),
        }
    }

    pub(super) async fn enable_authentication(&self, via: &[String]) -> Result<(), Error> {
        let Some(credentials) = self.access.credentials.clone() else {
            return Err(Error::Other(
                "the client has no credentials: set a user and a password".to_owned(),
            ));
        };
        self.session.forget();
        // If authentication is already enabled, the client does not set the password again, because a new password
        // would invalidate the current login.
        match self.login_state(via).await? {
            Some(Login::Off) => {}
            _ => return Ok(()),
        }
        let done = self.enable_with_root(via, credentials).await;
        self.session.forget();
        done
    }

    /// The user that the client creates for its certificate. `None` if it creates no user.
    fn certificate_user(&self) -> Option<String> {
        self.access.tls.as_ref()?.user.clone()
    }

    pub(super) async fn disable_authentication(&self, via: &[String]) -> Result<(), Error> {
        let done = self.change(via, |mut client| async move {
            client.auth_disable().await.map(|_| ())
        });
        let done = done.await;
        self.session.forget();
        done
    }

    pub(super) async fn set_password(&self, via: &[String]) -> Result<(), Error> {
        let Some(Credentials { user, password, .. }) = self.access.credentials.clone() else {
            return Err(Error::Other(
                "the client has no credentials: set a user and a password".to_owned(),
            ));
        };
        let end = Instant::now() + self.deadlines.call;
        let done = async {
            if let Some(certificate_user) = self.certificate_user() {
                self.add_certificate_user(end, via, certificate_user)
                    .await?;
            }
            self.change_user(end, via, user, password).await
        };
        let done = done.await;
        self.session.forget();
        done
    }

    /// Creates the user and the role, and then enables authentication, in the order that etcd requires. All steps can
    /// be repeated: etcd keeps existing users and roles (`AuthEnable` and `UserGrantRole` in etcd's
    /// `server/auth/store.go`).
    ///
    /// Invariant 21: the client enables authentication only after it has set the password of the operator's user.
    async fn enable_with_root(
        &self,
        via: &[String],
        credentials: Credentials,
    ) -> Result<(), Error> {
        let Credentials { user, password, .. } = credentials;
        let end = Instant::now() + self.deadlines.call;
        let added = self.add_user(end, via, &user, &password, None).await?;
        if !added {
            self.change_user(end, via, user.clone(), password).await?;
        }
        // The role `root` is added before it is granted, because etcd before 3.6 requires that the role exists. The
        // role needs no permissions, because etcd allows everything to a user with this role.
        let role = self.change_before(end, via, |mut client| async move {
            or_exists(client.role_add(ROOT).await, ROLE_EXISTS)
        });
        role.await?;
        self.grant_root(end, via, user).await?;
        if let Some(certificate_user) = self.certificate_user() {
            self.add_certificate_user(end, via, certificate_user)
                .await?;
        }
        let enable = self.change_before(end, via, |mut client| async move {
            client.auth_enable().await.map(|_| ())
        });
        enable.await
    }

    /// Creates a user without a password, with the name in the client's certificate. The certificate then authenticates
    /// the client even without a quorum, when no member issues tokens.
    async fn add_certificate_user(
        &self,
        end: Instant,
        via: &[String],
        user: String,
    ) -> Result<(), Error> {
        let options = UserAddOptions::new().with_no_pwd();
        self.add_user(end, via, &user, "", Some(options)).await?;
        self.grant_root(end, via, user).await
    }

    /// Creates a user. Returns false if the user already exists.
    async fn add_user(
        &self,
        end: Instant,
        via: &[String],
        user: &str,
        password: &str,
        options: Option<UserAddOptions>,
    ) -> Result<bool, Error> {
        let call = |mut client: Client| {
            let (user, password) = (user.to_owned(), password.to_owned());
            let options = options.clone();
            async move { or_exists(client.user_add(user, password, options).await, USER_EXISTS) }
        };
        self.change_before(end, via, call).await
    }

    async fn change_user(
        &self,
        end: Instant,
        via: &[String],
        user: String,
        password: String,
    ) -> Result<(), Error> {
        let call = |client: Client| {
            let (user, password) = (user.clone(), password.clone());
            let mut auth = client.auth_client();
            async move { auth.user_change_password(user, password).await.map(|_| ()) }
        };
        self.change_before(end, via, call).await
    }

    async fn grant_root(&self, end: Instant, via: &[String], user: String) -> Result<(), Error> {
        let call = |mut client: Client| {
            let user = user.clone();
            async move { client.user_grant_role(user, ROOT).await.map(|_| ()) }
        };
        self.change_before(end, via, call).await
    }
}

/// The role that has all permissions.
const ROOT: &str = "root";

/// True if etcd has created the user or role. False if etcd answers that the user or role already exists.
fn or_exists<T>(
    answer: Result<T, etcd_client::Error>,
    exists: &str,
) -> Result<bool, etcd_client::Error> {
    match answer {
        Err(etcd_client::Error::GRpcStatus(status)) if status.message().contains(exists) => {
            Ok(false)
        }
        answer => answer.map(|_| true),
    }
}
