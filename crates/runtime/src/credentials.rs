//! The user and the password with which the operators log in to a cluster: read by name, kept in memory only.
//!
//! Two Secrets: the user's own, which `spec.auth.secret` names and which says what is wanted, and the operator's, with
//! the passwords it has set or is about to set in etcd. As long as either fits, nobody is locked out (invariant 21).
//! Nothing here is printed (invariant 14).

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

/// How long reading one Secret may take.
const DEADLINE: Duration = Duration::from_secs(10);
/// Key of the operator's own Secret: a JSON list, the newest password first.
pub const PASSWORDS: &str = "passwords";
/// Key of the user's name, in both Secrets.
pub const USERNAME: &str = "username";
/// Key of the password in the user's Secret.
pub const PASSWORD: &str = "password";
/// etcd keeps passwords as bcrypt hashes, which take no more bytes.
const LONGEST: usize = 72;
/// So many passwords are kept at most.
const MOST: usize = 8;

/// What the operator has recorded.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Whose passwords.
    pub user: String,
    /// The newest first.
    pub passwords: Vec<String>,
    /// The Secret that was read.
    pub uid: String,
    /// Its version: it is only written over this one.
    pub resource_version: String,
    /// Its content cannot be read; `user` and `passwords` are empty then.
    pub is_damaged: bool,
    /// It has the owner and the labels it was made with.
    pub is_marked: bool,
}

/// What is known of a cluster's credentials.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ClusterAuth {
    /// User and password of `spec.auth.secret`, or why they cannot be had; `None` where no Secret is named.
    wanted: Option<Result<(String, String), String>>,
    /// What the operator has recorded.
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

/// How what is recorded stands to what is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Record {
    /// Nothing is recorded.
    #[default]
    None,
    /// The wanted password, and nothing else.
    Wanted,
    /// The wanted password, and nothing else, in a Secret whose owner or labels were changed by hand.
    WantedUnmarked,
    /// The wanted password first, and others.
    WantedFirst,
    /// Others only, or others first.
    Others,
    /// What cannot be read.
    Damaged,
}

impl ClusterAuth {
    /// Reads both Secrets of a cluster. A cluster that never had authentication turned on by the operator, and names
    /// no Secret, costs no call.
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

    /// Why the credentials cannot be had.
    pub fn fault(&self) -> Option<&str> {
        let wanted = self.wanted.as_ref()?;
        wanted.as_ref().err().map(String::as_str)
    }

    /// What the operators log in with.
    pub fn credentials(&self) -> Option<Credentials> {
        let recorded = self.recorded.as_ref();
        let passwords = recorded
            .map(|one| one.passwords.clone())
            .unwrap_or_default();
        match &self.wanted {
            Some(Ok((user, password))) => Some(Credentials {
                user: user.clone(),
                password: password.clone(),
                // Another user's passwords are of no use.
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

    /// Whether the wanted user is the one etcd asks for when authentication is turned on.
    pub fn is_root(&self) -> bool {
        matches!(&self.wanted, Some(Ok((user, _))) if user == ROOT_USER)
    }

    /// How what is recorded stands to what is wanted.
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

    /// What is recorded.
    pub fn recorded(&self) -> Option<&Recorded> {
        self.recorded.as_ref()
    }

    /// What to record: the wanted password first, and with `others` all that may be etcd's still.
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
            if !passwords.contains(one) && passwords.len() < MOST {
                passwords.push(one.clone());
            }
        }
        Some((user.clone(), passwords))
    }
}

/// The credentials of any Secret with the usual keys; `field` is what names it.
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

async fn get(secrets: &Api<Secret>, name: &str) -> Result<Option<Secret>, String> {
    match tokio::time::timeout(DEADLINE, secrets.get_opt(name)).await {
        Ok(Ok(secret)) => Ok(secret),
        Ok(Err(error)) => Err(format!("Secret {name} cannot be read: {error}")),
        Err(_) => Err(format!("Secret {name} cannot be read: no answer")),
    }
}

async fn wanted(
    secrets: &Api<Secret>,
    name: &str,
    field: &str,
) -> Result<(String, String), String> {
    let secret = get(secrets, name)
        .await
        .map_err(|why| format!("{field}: {why}"))?;
    let Some(secret) = secret else {
        return Err(format!(
            "{field}: there is no Secret {name} in this namespace: create it or correct the name"
        ));
    };
    pair(&secret).map_err(|why| format!("{field}: Secret {name} {why}"))
}

/// User and password of a Secret of type `kubernetes.io/basic-auth`. Pure.
fn pair(secret: &Secret) -> Result<(String, String), String> {
    let user = text(secret, USERNAME)?;
    let password = text(secret, PASSWORD)?;
    if password.len() > LONGEST {
        return Err(format!(
            "has a {PASSWORD} of more than {LONGEST} bytes, of which etcd would look at the first only: make it shorter"
        ));
    }
    Ok((user, password))
}

fn text(secret: &Secret, key: &str) -> Result<String, String> {
    let value = secret.data.as_ref().and_then(|data| data.get(key));
    let value = value.ok_or_else(|| format!("has no key {key}: add it"))?;
    let text = String::from_utf8(value.0.clone());
    let text = text.map_err(|_| format!("holds no text under {key}: correct it"))?;
    // An editor's last line break is nobody's password.
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() {
        return Err(format!("holds nothing under {key}: fill it in"));
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

/// Reads the operator's own Secret. Pure.
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

/// The content of the operator's own Secret.
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
    fn a_secret_says_what_is_missing_in_it() {
        let whole = secret(&[("username", "root"), ("password", "p\n")]);
        assert_eq!(pair(&whole), Ok(("root".to_owned(), "p".to_owned())));
        let long = "x".repeat(73);
        for (pairs, what) in [
            (&[("password", "p")][..], "has no key username"),
            (&[("username", "root")], "has no key password"),
            (
                &[("username", "root"), ("password", "")],
                "nothing under password",
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

    /// Invariant 21.
    #[test]
    fn invariant_21_no_password_that_may_be_etcds_is_left_out_of_the_record() {
        let turning = auth("c", &["b", "a"]);
        assert_eq!(turning.record(), Record::Others);
        let (_, passwords) = turning.to_record(true).unwrap();
        assert_eq!(passwords, ["c", "b", "a"]);
        let credentials = turning.credentials().unwrap();
        assert_eq!(credentials.password, "c");
        assert_eq!(credentials.former, ["b", "a"]);
        assert_eq!(auth("c", &["c", "b"]).record(), Record::WantedFirst);
        assert_eq!(auth("c", &["c"]).record(), Record::Wanted);
        assert_eq!(auth("c", &[]).record(), Record::None);
    }

    /// Invariant 21.
    #[test]
    fn invariant_21_what_is_recorded_opens_the_cluster_while_the_secret_is_away() {
        let mut away = auth("c", &["b"]);
        away.wanted = Some(Err("spec.auth.secret: there is no Secret".to_owned()));
        assert_eq!(away.credentials().unwrap().password, "b");
        assert!(away.fault().is_some());
    }

    #[test]
    fn invariant_14_debug_output_carries_no_password() {
        let shown = format!("{:?}", auth("hunter2", &["hunter1"]));
        assert!(!shown.contains("hunter"), "{shown}");
    }
}
