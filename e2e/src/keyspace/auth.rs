//! Enables authentication in etcd, changes passwords, and logs in, without the operators.

use anyhow::Result;

use super::{Keyspace, SERVICE_TIMEOUT, accept_if_done, is_transient};
use crate::Env;
use crate::retry::retry_transient;
use crate::wait::{Poll, until};

impl Keyspace {
    /// True if etcd accepts `password` for `user`.
    ///
    /// # Errors
    /// Fails if the Service has no endpoint.
    pub async fn accepts_login(
        env: &Env,
        namespace: &str,
        cluster: &str,
        (user, password): (&str, &str),
    ) -> Result<bool> {
        let target = format!("service/{cluster}-client");
        until(
            "etcd accepts or rejects the login",
            SERVICE_TIMEOUT,
            async || {
                let keys = Self::connect(env, namespace, &target).await?;
                let mut auth = keys.client.auth_client();
                let answer = auth
                    .authenticate(user.to_owned(), password.to_owned())
                    .await;
                Ok(match answer.map_err(anyhow::Error::from) {
                    Ok(_) => Poll::Done(true),
                    Err(error) if is_transient(&error) => Poll::NotYet(format!("{error:#}")),
                    Err(_) => Poll::Done(false),
                })
            },
        )
        .await
    }

    /// Enables authentication without the operators: creates the etcd user root with this password, grants it the role
    /// root, and sends `AuthEnable`.
    ///
    /// # Errors
    /// Fails if etcd rejects a request.
    pub async fn enable_auth(&self, password: &str) -> Result<()> {
        let auth = || self.client.auth_client();
        retry_transient(is_transient, async |is_retry| {
            let added = auth().user_add("root", password, None).await;
            accept_if_done(is_retry, added.map(drop))
        })
        .await?;
        retry_transient(is_transient, async |is_retry| {
            accept_if_done(is_retry, auth().role_add("root").await.map(drop))
        })
        .await?;
        retry_transient(is_transient, async |_| {
            Ok(auth().user_grant_role("root", "root").await?)
        })
        .await?;
        retry_transient(is_transient, async |is_retry| {
            let enabled = auth().auth_enable().await;
            self.ensure_root_login(is_retry, password, enabled.map(drop))
                .await
        })
        .await
    }

    /// Like [`accept_if_done`], for a request that invalidates the token of this client. A retry then always fails, so
    /// this function logs in as root with `password`. If etcd accepts the login, the first attempt succeeded.
    async fn ensure_root_login(
        &self,
        is_retry: bool,
        password: &str,
        outcome: Result<(), etcd_client::Error>,
    ) -> Result<()> {
        let Err(error) = outcome else { return Ok(()) };
        let error = anyhow::Error::from(error);
        if !is_retry || is_transient(&error) {
            return Err(error);
        }
        let login = (String::from("root"), password.to_owned());
        match self
            .client
            .auth_client()
            .authenticate(login.0, login.1)
            .await
        {
            Ok(_) => Ok(()),
            Err(other) => {
                let other = anyhow::Error::from(other);
                Err(if is_transient(&other) { other } else { error })
            }
        }
    }

    /// Changes the password of the etcd user root, without the operators.
    ///
    /// # Errors
    /// Fails if etcd rejects the request.
    pub async fn change_password(&self, password: &str) -> Result<()> {
        retry_transient(is_transient, async |is_retry| {
            let mut auth = self.client.auth_client();
            let changed = auth.user_change_password("root", password).await;
            self.ensure_root_login(is_retry, password, changed.map(drop))
                .await
        })
        .await
    }

    /// Revokes a role of a user, as an administrator does.
    ///
    /// # Errors
    /// Fails if etcd rejects the request.
    pub async fn revoke_role(&self, user: &str, role: &str) -> Result<()> {
        let mut auth = self.client.auth_client();
        auth.user_revoke_role(user, role).await?;
        Ok(())
    }

    /// The names of all users.
    ///
    /// # Errors
    /// Fails if etcd does not answer, or denies access.
    pub async fn users(&self) -> Result<Vec<String>> {
        retry_transient(is_transient, async |_| {
            let mut auth = self.client.auth_client();
            Ok(auth.user_list().await?.users().to_vec())
        })
        .await
    }
}
