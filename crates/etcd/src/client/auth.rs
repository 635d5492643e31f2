//! The real client's login, and what it changes of etcd's authentication.

use std::future::Future;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use etcd_client::{Client, UserAddOptions};
use tokio::time::timeout;

use super::EtcdClient;
use crate::access::Credentials;
use crate::answer::{ROLE_EXISTS, USER_EXISTS, most_telling};
use crate::login::{Answer, log_in};
use crate::port::{Error, Login};

impl EtcdClient {
    /// Makes sure that the client is logged in, where it has credentials and etcd asks for them; `stale` is the login
    /// that was not good enough, `deadline` that of the call it is for. Returns which login it is.
    pub(super) async fn logged_in(
        &self,
        endpoint: &str,
        stale: Option<u64>,
        deadline: Duration,
    ) -> Result<Option<u64>, Error> {
        // One that is doubted is shown all the same, if nobody gives out another in time.
        let doubted = if stale.is_none() && deadline > self.deadlines.status {
            self.session.take_doubt()
        } else {
            None
        };
        // Twice at most: the member itself, then all others at the same time. Whoever has another way in waits so short
        // that the call is still made.
        let longest = self.deadlines.call / 2;
        let patience = if self.session.is_certified() || doubted.is_some() {
            longest.min(deadline / 4)
        } else {
            longest
        };
        let ask = |member: String, credentials: Credentials| async move {
            let asked = async {
                match self.connection(&member).await {
                    Ok(client) => log_in(&client, &credentials, &self.session.refused).await,
                    Err(_) => Answer::Silent,
                }
            };
            let answer = timeout(patience, asked).await;
            answer.unwrap_or(Answer::Silent)
        };
        let stale = stale.or(doubted);
        let found = self.session.ensure(endpoint, stale, ask).await?;
        Ok(found.map(|(_, number)| number).or(doubted))
    }

    /// A call that shows this login: while it is not answered, nor overtaken, that tells against the login.
    pub(super) async fn shown<F: Future>(
        &self,
        login: Option<u64>,
        overtaken: &AtomicBool,
        call: F,
    ) -> F::Output {
        let watch = self.session.shows(login, overtaken);
        let answer = call.await;
        watch.answered();
        answer
    }

    pub(super) async fn how_logged_in(&self, via: &[String]) -> Result<Option<Login>, Error> {
        if let Some(login) = self.session.current() {
            return Ok(Some(login));
        }
        self.session.forget();
        self.session.know(via);
        let Some(endpoint) = self.ordered(via).first().map(|one| (*one).to_owned()) else {
            return Err(most_telling(Vec::new()));
        };
        let patient = self.deadlines.call * 2;
        match self.logged_in(&endpoint, None, patient).await {
            Ok(_) | Err(Error::AccessDenied(_)) => {}
            Err(error) => return Err(error),
        }
        match self.session.current() {
            Some(login) => Ok(Some(login)),
            None if self.session.has_credentials() => Err(Error::Timeout(via.join(", "))),
            None => Ok(None),
        }
    }

    pub(super) async fn turn_auth_on(&self, via: &[String]) -> Result<(), Error> {
        let Some(credentials) = self.access.credentials.clone() else {
            return Err(Error::Other("there are no credentials".to_owned()));
        };
        self.session.forget();
        // Where it is on by now, what is there is looked at again: a new password would end this very login.
        match self.how_logged_in(via).await? {
            Some(Login::Off) => {}
            _ => return Ok(()),
        }
        let named = self.named();
        let done = self.change(via, |client| {
            turn_on(client, credentials.clone(), named.clone())
        });
        let done = done.await;
        self.session.forget();
        done
    }

    /// The user that the certificate names.
    fn named(&self) -> Option<String> {
        self.access.tls.as_ref()?.user.clone()
    }

    pub(super) async fn turn_auth_off(&self, via: &[String]) -> Result<(), Error> {
        let done = self.change(via, |mut client| async move {
            client.auth_disable().await.map(|_| ())
        });
        let done = done.await;
        self.session.forget();
        done
    }

    pub(super) async fn set_password(&self, via: &[String]) -> Result<(), Error> {
        let Some(Credentials { user, password, .. }) = self.access.credentials.clone() else {
            return Err(Error::Other("there are no credentials".to_owned()));
        };
        let named = self.named();
        let done = self.change(via, |mut client| {
            let (user, password, named) = (user.clone(), password.clone(), named.clone());
            async move {
                if let Some(named) = named {
                    stand_in(&mut client, &named).await?;
                }
                let mut auth = client.auth_client();
                auth.user_change_password(user, password).await.map(|_| ())
            }
        });
        let done = done.await;
        self.session.forget();
        done
    }
}

/// User, role and switch, in this order: with any of them missing etcd refuses the next, and what is there already is
/// left or set again (`AuthEnable` and `UserGrantRole` in etcd's `server/auth/store.go`).
///
/// Invariant 21: authentication is on only after the operator's own password was set for the user it stands for.
async fn turn_on(
    mut client: Client,
    credentials: Credentials,
    named: Option<String>,
) -> Result<(), etcd_client::Error> {
    let Credentials { user, password, .. } = credentials;
    match client.user_add(user.clone(), password.clone(), None).await {
        Err(etcd_client::Error::GRpcStatus(status)) if status.message().contains(USER_EXISTS) => {
            let mut auth = client.auth_client();
            auth.user_change_password(user.clone(), password).await?;
        }
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    // Before 3.6 it must be there to be granted; it means what it is called, whatever it holds.
    match client.role_add("root").await {
        Err(etcd_client::Error::GRpcStatus(status)) if status.message().contains(ROLE_EXISTS) => {}
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    client.user_grant_role(user, "root").await?;
    if let Some(named) = named {
        stand_in(&mut client, &named).await?;
    }
    client.auth_enable().await.map(|_| ())
}

/// The user that the client's own certificate names, without a password: whoever has that certificate is let in while no
/// quorum gives a login out.
async fn stand_in(client: &mut Client, user: &str) -> Result<(), etcd_client::Error> {
    let options = UserAddOptions::new().with_no_pwd();
    match client.user_add(user, "", Some(options)).await {
        Err(etcd_client::Error::GRpcStatus(status)) if status.message().contains(USER_EXISTS) => {}
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    client.user_grant_role(user, "root").await.map(|_| ())
}
