//! The username and the passwords with which the operators authenticate to a cluster. They are kept only in memory and
//! never printed (invariant 14).
//!
//! The user's Secret, which `spec.auth.secret` names, contains the desired password. The operator's own Secret contains
//! the passwords that the operator has set in etcd or is about to set. The operators can log in as long as at least one
//! of the two Secrets contains a valid password (invariant 21).

use std::fmt;
use std::time::Duration;

use api::EtcdCluster;
use api::cluster::ROOT_USER;
use api::names;
use etcd::Credentials;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client, ResourceExt};

use crate::apply::is_marked;

/// Time limit for one read of a Secret.
const DEADLINE: Duration = Duration::from_secs(10);
/// Key in the operator's own Secret. The value is a JSON list of passwords, the newest first.
pub const PASSWORDS: &str = "passwords";
/// Key with the username, in the user's Secret and in the operator's own Secret.
pub const USERNAME: &str = "username";
/// Key with the password, in the user's Secret.
pub const PASSWORD: &str = "password";
/// Maximum length of a password in bytes. etcd hashes passwords with bcrypt, which uses only the first 72 bytes.
const MAX_PASSWORD_BYTES: usize = 72;
/// Maximum number of passwords in the operator's Secret.
const MAX_PASSWORDS: usize = 8;

/// The content of the operator's own Secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Recorded {
    /// The user whom the passwords authenticate.
    pub user: String,
    /// The passwords, the newest first.
    pub passwords: Vec<String>,
    /// The UID of the Secret, which differs if the Secret was deleted and created again.
    pub uid: String,
    /// The resourceVersion of the Secret, as precondition of the next write.
    pub resource_version: String,
    /// True if the content cannot be parsed, so that `user` and `passwords` are empty.
    pub is_damaged: bool,
    /// Whether the Secret has the owner reference and the labels that the operator sets.
    pub is_marked: bool,
}

/// The credentials of a cluster, from the user's Secret and the operator's own Secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ClusterAuth {
    /// User and password from `spec.auth.secret`. An error if one of the two Secrets cannot be read. `None` if
    /// `spec.auth` is not set.
    wanted: Option<Result<(String, String), String>>,
    /// The content of the operator's own Secret. `None` if the Secret does not exist or cannot be read.
    recorded: Option<Recorded>,
}

impl fmt::Debug for ClusterAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterAuth")
            .field("wanted", &self.wanted.as_ref().map(Result::is_ok))
            .field("recorded", &self.recorded.is_some())
            .finish()
    }
}

/// How the passwords in the operator's own Secret compare to the desired password.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Record {
    /// The operator's Secret does not exist or cannot be read.
    #[default]
    None,
    /// The operator's Secret contains only the desired password.
    Wanted,
    /// The operator's Secret contains only the desired password, but the owner reference or the labels of this Secret
    /// were changed.
    WantedUnmarked,
    /// The operator's Secret contains the desired password first, and other passwords after it.
    WantedFirst,
    /// The first password in the operator's Secret is not the desired password, or the desired password cannot be read.
    Others,
    /// The operator's Secret cannot be parsed.
    Damaged,
}

impl ClusterAuth {
    /// Reads the user's Secret and the operator's own Secret of a cluster. Reads nothing if `spec.auth` is not set.
    pub async fn read(client: &Client, cluster: &EtcdCluster) -> Self {
        let namespace = cluster.namespace().unwrap_or_default();
        let Some(auth) = &cluster.spec.auth else {
            return Self::default();
        };
        let secrets = Api::<Secret>::namespaced(client.clone(), &namespace);
        let own = names::auth_secret(&cluster.name_any());
        let (wanted, recorded) = tokio::join!(
            wanted(&secrets, &auth.secret, "spec.auth.secret"),
            recorded(&secrets, &own, cluster)
        );
        Self {
            wanted: Some(
                recorded
                    .as_ref()
                    .map_or_else(|why| Err(why.clone()), |_| wanted),
            ),
            recorded: recorded.ok().flatten(),
        }
    }

    /// Why the user's Secret cannot be used, or why the operator's own Secret cannot be read. `None` without such a
    /// problem.
    pub fn fault(&self) -> Option<&str> {
        let wanted = self.wanted.as_ref()?;
        wanted.as_ref().err().map(String::as_str)
    }

    /// The credentials for the login: first the desired password, then the passwords in the operator's Secret. `None`
    /// if there is no password.
    pub fn credentials(&self) -> Option<Credentials> {
        let recorded = self.recorded.as_ref();
        let passwords = recorded
            .map(|one| one.passwords.clone())
            .unwrap_or_default();
        match &self.wanted {
            Some(Ok((user, password))) => Some(Credentials {
                user: user.clone(),
                password: password.clone(),
                // The recorded passwords are used only if they belong to this user.
                former: if recorded.is_some_and(|one| one.user == *user) {
                    passwords
                } else {
                    Vec::new()
                },
            }),
            _ => recorded.and_then(|one| {
                let (password, former) = one.passwords.split_first()?;
                Some(Credentials {
                    user: one.user.clone(),
                    password: password.clone(),
                    former: former.to_vec(),
                })
            }),
        }
    }

    /// Whether the desired user is `root`, without which etcd cannot enable authentication.
    pub fn is_root(&self) -> bool {
        matches!(&self.wanted, Some(Ok((user, _))) if user == ROOT_USER)
    }

    /// Compares the passwords in the operator's Secret with the desired password.
    pub fn record(&self) -> Record {
        let Some(recorded) = &self.recorded else {
            return Record::None;
        };
        if recorded.is_damaged {
            return Record::Damaged;
        }
        let Some(Ok((user, password))) = &self.wanted else {
            return Record::Others;
        };
        match recorded.passwords.split_first() {
            Some((first, rest)) if first == password && recorded.user == *user => {
                match (rest.is_empty(), recorded.is_marked) {
                    (true, true) => Record::Wanted,
                    (true, false) => Record::WantedUnmarked,
                    (false, _) => Record::WantedFirst,
                }
            }
            _ => Record::Others,
        }
    }

    /// The content of the operator's own Secret. `None` if the Secret does not exist or cannot be read.
    pub fn recorded(&self) -> Option<&Recorded> {
        self.recorded.as_ref()
    }

    /// The user and the passwords for the operator's Secret, the desired password first. `None` without a desired
    /// password. If `others` is set, the passwords in the operator's Secret for this user follow, because these
    /// passwords may be valid in etcd.
    pub fn to_record(&self, others: bool) -> Option<(String, Vec<String>)> {
        let Some(Ok((user, password))) = &self.wanted else {
            return None;
        };
        let mut passwords = vec![password.clone()];
        let former = self
            .recorded
            .iter()
            .filter(|one| others && one.user == *user);
        for one in former.flat_map(|one| &one.passwords) {
            if !passwords.contains(one) && passwords.len() < MAX_PASSWORDS {
                passwords.push(one.clone());
            }
        }
        Some((user.clone(), passwords))
    }
}

/// Reads the credentials in a Secret of type `kubernetes.io/basic-auth`. `field` is the field of the spec that names
/// the Secret.
///
/// # Errors
/// Fails if the Secret cannot be read or is incomplete. The error names the field, the Secret and the remedy.
pub async fn of_secret(
    client: &Client,
    namespace: &str,
    name: &str,
    field: &str,
) -> Result<Credentials, String> {
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let (user, password) = wanted(&secrets, name, field).await?;
    Ok(Credentials {
        user,
        password,
        former: Vec::new(),
    })
}

/// A password, and the UID and the resourceVersion of the Secret that contains it.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SecretPassword {
    /// The password.
    pub password: String,
    /// The UID of the Secret.
    pub uid: String,
    /// The resourceVersion of the Secret.
    pub resource_version: String,
}

impl fmt::Debug for SecretPassword {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecretPassword").finish_non_exhaustive()
    }
}

/// Reads the password under a key of a Secret. `field` is the field of the spec that names the Secret.
///
/// # Errors
/// Fails if the Secret cannot be read, or if etcd cannot use the password. The error names the field, the Secret and
/// the remedy.
pub async fn password_of(
    client: &Client,
    namespace: &str,
    (name, key): (&str, &str),
    field: &str,
) -> Result<SecretPassword, String> {
    let secrets = Api::<Secret>::namespaced(client.clone(), namespace);
    let secret = existing(&secrets, name, field).await?;
    let password = password(&secret, key).map_err(|why| format!("{field}: Secret {name} {why}"))?;
    Ok(SecretPassword {
        password,
        uid: secret.uid().unwrap_or_default(),
        resource_version: secret.resource_version().unwrap_or_default(),
    })
}

async fn get(secrets: &Api<Secret>, name: &str) -> Result<Option<Secret>, String> {
    match tokio::time::timeout(DEADLINE, secrets.get_opt(name)).await {
        Ok(Ok(secret)) => Ok(secret),
        Ok(Err(error)) => Err(format!("cannot read Secret {name}: {error}")),
        Err(_) => Err(format!(
            "cannot read Secret {name}: no answer from the API server within {DEADLINE:?}"
        )),
    }
}

async fn existing(secrets: &Api<Secret>, name: &str, field: &str) -> Result<Secret, String> {
    let secret = get(secrets, name)
        .await
        .map_err(|why| format!("{field}: {why}"))?;
    secret.ok_or_else(|| {
        format!(
            "{field}: Secret {name} does not exist in this namespace: create it or correct the name"
        )
    })
}

async fn wanted(
    secrets: &Api<Secret>,
    name: &str,
    field: &str,
) -> Result<(String, String), String> {
    let secret = existing(secrets, name, field).await?;
    pair(&secret).map_err(|why| format!("{field}: Secret {name} {why}"))
}

/// The user and the password in a Secret of type `kubernetes.io/basic-auth`. Performs no I/O.
fn pair(secret: &Secret) -> Result<(String, String), String> {
    let user = text(secret, USERNAME)?;
    Ok((user, password(secret, PASSWORD)?))
}

/// The password under a key of a Secret. Performs no I/O.
fn password(secret: &Secret, key: &str) -> Result<String, String> {
    let password = text(secret, key)?;
    if password.len() > MAX_PASSWORD_BYTES {
        return Err(format!(
            "has a {key} of more than {MAX_PASSWORD_BYTES} bytes, but etcd would check only the first \
             {MAX_PASSWORD_BYTES}: use a shorter password"
        ));
    }
    Ok(password)
}

fn text(secret: &Secret, key: &str) -> Result<String, String> {
    let value = secret.data.as_ref().and_then(|data| data.get(key));
    let value = value.ok_or_else(|| format!("has no value under the key {key}: add it"))?;
    let text = String::from_utf8(value.0.clone());
    let text = text.map_err(|_| {
        format!("has a value under the key {key} that is not UTF-8 text: correct the value")
    })?;
    // Line breaks at the end are removed, because editors and `echo` add a line break that is not part of the password.
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() {
        return Err(format!(
            "has an empty value under the key {key}: set the value"
        ));
    }
    Ok(text.to_owned())
}

async fn recorded(
    secrets: &Api<Secret>,
    name: &str,
    cluster: &EtcdCluster,
) -> Result<Option<Recorded>, String> {
    let secret = get(secrets, name).await?;
    Ok(secret.map(|secret| record(&secret, cluster)))
}

/// Parses the operator's own Secret. Performs no I/O.
fn record(secret: &Secret, cluster: &EtcdCluster) -> Recorded {
    let bytes = |key: &str| {
        let data = secret.data.as_ref()?;
        data.get(key).map(|one| &one.0)
    };
    let passwords = bytes(PASSWORDS).and_then(|text| serde_json::from_slice(text).ok());
    let user = bytes(USERNAME).and_then(|text| String::from_utf8(text.clone()).ok());
    let read = user.zip(passwords);
    let labels = names::cluster_labels(&cluster.name_any());
    let owner = cluster.uid().unwrap_or_default();
    let is_damaged = read.is_none();
    let (user, passwords) = read.unwrap_or_default();
    Recorded {
        user,
        passwords,
        uid: secret.uid().unwrap_or_default(),
        resource_version: secret.resource_version().unwrap_or_default(),
        is_damaged,
        is_marked: is_marked(&secret.metadata, &owner, &labels),
    }
}

/// The data of the operator's own Secret.
pub fn record_data(
    user: &str,
    passwords: &[String],
) -> std::collections::BTreeMap<String, ByteString> {
    let list = serde_json::to_vec(passwords).unwrap_or_default();
    [
        (USERNAME.to_owned(), ByteString(user.as_bytes().to_vec())),
        (PASSWORDS.to_owned(), ByteString(list)),
    ]
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(pairs: &[(&str, &str)]) -> Secret {
        let data = pairs.iter().map(|(key, value)| {
            let value = ByteString(value.as_bytes().to_vec());
            ((*key).to_owned(), value)
        });
        Secret {
            data: Some(data.collect()),
            ..Secret::default()
        }
    }

    fn auth(wanted: &str, recorded: &[&str]) -> ClusterAuth {
        ClusterAuth {
            wanted: Some(Ok(("root".to_owned(), wanted.to_owned()))),
            recorded: (!recorded.is_empty()).then(|| Recorded {
                user: "root".to_owned(),
                passwords: recorded.iter().map(|one| (*one).to_owned()).collect(),
                is_marked: true,
                ..Recorded::default()
            }),
        }
    }

    #[test]
    fn invalid_credentials_secret_is_reported_with_its_key() {
        let whole = secret(&[("username", "root"), ("password", "p\n")]);
        assert_eq!(pair(&whole), Ok(("root".to_owned(), "p".to_owned())));
        let long = "x".repeat(73);
        for (pairs, what) in [
            (
                &[("password", "p")][..],
                "has no value under the key username",
            ),
            (
                &[("username", "root")],
                "has no value under the key password",
            ),
            (
                &[("username", "root"), ("password", "")],
                "an empty value under the key password",
            ),
            (
                &[("username", "root"), ("password", long.as_str())],
                "more than 72 bytes",
            ),
        ] {
            let why = pair(&secret(pairs)).unwrap_err();
            assert!(why.contains(what), "{why}");
        }
    }

    /// Invariant 21: no password that may be valid in etcd is dropped from the operator's Secret.
    #[test]
    fn invariant_21_operator_secret_keeps_every_password_that_may_be_valid() {
        let changing = auth("c", &["b", "a"]);
        assert_eq!(changing.record(), Record::Others);
        let (_, passwords) = changing.to_record(true).unwrap();
        assert_eq!(passwords, ["c", "b", "a"]);
        let credentials = changing.credentials().unwrap();
        assert_eq!(credentials.password, "c");
        assert_eq!(credentials.former, ["b", "a"]);
        assert_eq!(auth("c", &["c", "b"]).record(), Record::WantedFirst);
        assert_eq!(auth("c", &["c"]).record(), Record::Wanted);
        assert_eq!(auth("c", &[]).record(), Record::None);
    }

    /// Invariant 21: while the user's Secret is missing, the operators log in with a password from the operator's
    /// Secret.
    #[test]
    fn invariant_21_recorded_password_is_used_without_user_secret() {
        let mut missing = auth("c", &["b"]);
        missing.wanted = Some(Err("spec.auth.secret: Secret is missing".to_owned()));
        assert_eq!(missing.credentials().unwrap().password, "b");
        assert!(missing.fault().is_some());
    }

    #[test]
    fn invariant_14_debug_output_contains_no_password() {
        let shown = format!("{:?}", auth("hunter2", &["hunter1"]));
        assert!(!shown.contains("hunter"), "{shown}");
    }
}
