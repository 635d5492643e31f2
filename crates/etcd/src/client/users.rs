//! Calls that read and change the users and roles of etcd's authentication. Each change is idempotent, so the caller
//! can repeat a change whose answer was lost.
//!
//! etcd orders also the reads by its Raft log, so each read costs one log entry (`UserGet` and `RoleGet` in etcd's
//! `server/etcdserver/v3_server.go`).

use etcd_client::{
    Client, Permission, PermissionType, RoleRevokePermissionOptions, UserAddOptions,
};

use super::EtcdClient;
use crate::answer::{ROLE_EXISTS, USER_EXISTS};
use crate::port::Error;
use crate::users::{KeyAccess, KeyPermission, PasswordCheck, PermissionRange};

/// Parts of etcd's errors for a user, a role or a grant that does not exist.
const USER_MISSING: &str = "user name not found";
const ROLE_MISSING: &str = "role name not found";
const ROLE_NOT_GRANTED: &str = "role is not granted to the user";
const PERMISSION_NOT_GRANTED: &str = "permission is not granted to the role";

impl EtcdClient {
    /// Returns the roles of a user. `None` if the user does not exist.
    ///
    /// # Errors
    /// Fails if etcd does not answer in time, or denies access.
    pub async fn user_roles(
        &self,
        via: &[String],
        user: &str,
    ) -> Result<Option<Vec<String>>, Error> {
        self.read(via, |client: Client| {
            let user = user.to_owned();
            async move {
                let answer = client.auth_client().user_get(user).await;
                let found = unless(answer, &[USER_MISSING])?;
                Ok(found.map(|answer| answer.roles().to_vec()))
            }
        })
        .await
    }

    /// Returns the permissions of a role. `None` if the role does not exist.
    ///
    /// # Errors
    /// Fails if etcd does not answer in time, or denies access.
    pub async fn role_permissions(
        &self,
        via: &[String],
        role: &str,
    ) -> Result<Option<Vec<KeyPermission>>, Error> {
        self.read(via, |client: Client| {
            let role = role.to_owned();
            async move {
                let answer = client.auth_client().role_get(role).await;
                let Some(answer) = unless(answer, &[ROLE_MISSING])? else {
                    return Ok(None);
                };
                let permissions = answer.permissions();
                let permissions = permissions.iter().map(permission_from);
                permissions.collect::<Result<Vec<_>, _>>().map(Some)
            }
        })
        .await
    }

    /// Sends a password to etcd, and returns whether etcd accepts it. Costs etcd a slow password hash, and one log
    /// entry if etcd accepts the password.
    ///
    /// # Errors
    /// Fails if etcd does not answer in time.
    pub async fn check_password(
        &self,
        via: &[String],
        user: &str,
        password: &str,
    ) -> Result<PasswordCheck, Error> {
        self.change(via, |client: Client| {
            let (user, password) = (user.to_owned(), password.to_owned());
            async move {
                let answer = client.auth_client().authenticate(user, password).await;
                let Err(error) = answer else {
                    return Ok(PasswordCheck::Accepted);
                };
                let text = match &error {
                    etcd_client::Error::GRpcStatus(status) => status.message(),
                    _ => "",
                };
                // This text is compared first, because the error for a user without a password also contains
                // "authentication failed".
                if text.contains("no password user") {
                    Ok(PasswordCheck::NoPassword)
                } else if text.contains("authentication failed") {
                    Ok(PasswordCheck::Rejected)
                } else if text.contains("authentication is not enabled") {
                    Ok(PasswordCheck::Off)
                } else {
                    Err(error)
                }
            }
        })
        .await
    }

    /// Creates a user. Without a password, the user can only authenticate with a client certificate. Returns false if
    /// the user already exists.
    ///
    /// # Errors
    /// Fails if etcd does not acknowledge the change. etcd may nevertheless have applied it.
    pub async fn create_user(
        &self,
        via: &[String],
        user: &str,
        password: Option<&str>,
    ) -> Result<bool, Error> {
        self.change(via, |client: Client| {
            let user = user.to_owned();
            let options = password
                .is_none()
                .then(|| UserAddOptions::new().with_no_pwd());
            let password = password.unwrap_or_default().to_owned();
            async move {
                let answer = client.auth_client().user_add(user, password, options).await;
                Ok(unless(answer, &[USER_EXISTS])?.is_some())
            }
        })
        .await
    }

    /// Deletes a user. Succeeds if the user does not exist.
    ///
    /// # Errors
    /// Fails like [`Self::create_user`].
    pub async fn delete_user(&self, via: &[String], user: &str) -> Result<(), Error> {
        self.change(via, |client: Client| {
            let user = user.to_owned();
            async move {
                let answer = client.auth_client().user_delete(user).await;
                unless(answer, &[USER_MISSING]).map(drop)
            }
        })
        .await
    }

    /// Sets the password of a user. Has no effect on a user that was created without a password. The user's existing
    /// logins become invalid.
    ///
    /// # Errors
    /// Fails like [`Self::create_user`], and if the user does not exist.
    pub async fn set_user_password(
        &self,
        via: &[String],
        user: &str,
        password: &str,
    ) -> Result<(), Error> {
        self.change(via, |client: Client| {
            let (user, password) = (user.to_owned(), password.to_owned());
            let mut auth = client.auth_client();
            async move { auth.user_change_password(user, password).await.map(drop) }
        })
        .await
    }

    /// Grants a role to a user.
    ///
    /// # Errors
    /// Fails like [`Self::create_user`], and if the user or the role does not exist.
    pub async fn grant_role(&self, via: &[String], user: &str, role: &str) -> Result<(), Error> {
        self.change(via, |client: Client| {
            let (user, role) = (user.to_owned(), role.to_owned());
            let mut auth = client.auth_client();
            async move { auth.user_grant_role(user, role).await.map(drop) }
        })
        .await
    }

    /// Revokes a role of a user. Succeeds if the user does not exist or does not have the role.
    ///
    /// # Errors
    /// Fails like [`Self::create_user`].
    pub async fn revoke_role(&self, via: &[String], user: &str, role: &str) -> Result<(), Error> {
        self.change(via, |client: Client| {
            let (user, role) = (user.to_owned(), role.to_owned());
            async move {
                let answer = client.auth_client().user_revoke_role(user, role).await;
                unless(answer, &[ROLE_NOT_GRANTED, USER_MISSING]).map(drop)
            }
        })
        .await
    }

    /// Creates a role without permissions. Returns false if the role already exists.
    ///
    /// # Errors
    /// Fails like [`Self::create_user`].
    pub async fn create_role(&self, via: &[String], role: &str) -> Result<bool, Error> {
        self.change(via, |client: Client| {
            let role = role.to_owned();
            async move {
                let answer = client.auth_client().role_add(role).await;
                Ok(unless(answer, &[ROLE_EXISTS])?.is_some())
            }
        })
        .await
    }

    /// Deletes a role. etcd also revokes it from all users. Succeeds if the role does not exist.
    ///
    /// # Errors
    /// Fails like [`Self::create_user`].
    pub async fn delete_role(&self, via: &[String], role: &str) -> Result<(), Error> {
        self.change(via, |client: Client| {
            let role = role.to_owned();
            async move {
                let answer = client.auth_client().role_delete(role).await;
                unless(answer, &[ROLE_MISSING]).map(drop)
            }
        })
        .await
    }

    /// Grants a permission to a role. Replaces a permission of the role for the same range.
    ///
    /// # Errors
    /// Fails like [`Self::create_user`], and if the role does not exist.
    pub async fn grant_permission(
        &self,
        via: &[String],
        role: &str,
        permission: &KeyPermission,
    ) -> Result<(), Error> {
        self.change(via, |client: Client| {
            let (role, PermissionRange { key, end }) = (role.to_owned(), permission.range.clone());
            let granted = Permission::new(permission.access.into(), key).with_range_end(end);
            let mut auth = client.auth_client();
            async move { auth.role_grant_permission(role, granted).await.map(drop) }
        })
        .await
    }

    /// Revokes the permission of a role for a range. Succeeds if the role does not exist or has no such permission.
    ///
    /// # Errors
    /// Fails like [`Self::create_user`].
    pub async fn revoke_permission(
        &self,
        via: &[String],
        role: &str,
        range: &PermissionRange,
    ) -> Result<(), Error> {
        self.change(via, |client: Client| {
            let (role, PermissionRange { key, end }) = (role.to_owned(), range.clone());
            let options = RoleRevokePermissionOptions::new().with_range_end(end);
            let mut auth = client.auth_client();
            async move {
                let answer = auth.role_revoke_permission(role, key, Some(options)).await;
                unless(answer, &[PERMISSION_NOT_GRANTED, ROLE_MISSING]).map(drop)
            }
        })
        .await
    }
}

impl From<KeyAccess> for PermissionType {
    fn from(access: KeyAccess) -> Self {
        match access {
            KeyAccess::Read => Self::Read,
            KeyAccess::Write => Self::Write,
            KeyAccess::ReadWrite => Self::Readwrite,
        }
    }
}

fn permission_from(permission: &Permission) -> Result<KeyPermission, etcd_client::Error> {
    let access = match PermissionType::try_from(permission.get_type()) {
        Ok(PermissionType::Read) => KeyAccess::Read,
        Ok(PermissionType::Write) => KeyAccess::Write,
        Ok(PermissionType::Readwrite) => KeyAccess::ReadWrite,
        Err(error) => return Err(etcd_client::Error::EndpointError(error.to_string())),
    };
    let range = PermissionRange {
        key: permission.key().to_vec(),
        end: permission.range_end().to_vec(),
    };
    Ok(KeyPermission { range, access })
}

/// The answer of etcd. `None` if etcd answers with an error that contains one of these texts.
fn unless<T>(
    answer: Result<T, etcd_client::Error>,
    texts: &[&str],
) -> Result<Option<T>, etcd_client::Error> {
    let is_expected = |message: &str| texts.iter().any(|text| message.contains(text));
    match answer {
        Err(etcd_client::Error::GRpcStatus(status)) if is_expected(status.message()) => Ok(None),
        answer => answer.map(Some),
    }
}
