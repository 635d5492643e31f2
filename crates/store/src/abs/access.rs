//! Access to a container: the configuration and the keys of the Secret.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use azure_core::{ExponentialRetryOptions, RetryOptions, TransportOptions};
use azure_storage::{CloudLocation, StorageCredentials};
use azure_storage_blobs::prelude::{ClientBuilder, ContainerClient};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::identity::Identity;
use super::transport::Transport;
use crate::http;
use crate::port::Error;
use crate::secret;
use crate::secret::SecretData;

/// The names of the keys in the Secret with the Azure credentials.
const ACCOUNT: &str = "storage-account";
const KEY: &str = "storage-key";
const CLOUD: &str = "cloud";

/// The configuration of a container.
#[derive(Clone, Debug)]
pub struct AbsConfig {
    /// The container's name.
    pub container: String,
    /// URL of the account's blob service. `None` means the default URL of the account in its cloud.
    pub endpoint: Option<String>,
    /// The identity with which requests are sent.
    pub access: AbsAccess,
}

/// The identity with which requests are sent.
#[derive(Clone)]
pub enum AbsAccess {
    /// The pod's own identity: the workload identity, or the managed identity of the machine if there is no workload
    /// identity.
    Ambient,
    /// Requests are signed with an account key.
    Key {
        /// The storage account.
        account: String,
        /// The key of the storage account, in base64.
        key: String,
        /// The cloud of the storage account.
        cloud: AbsCloud,
    },
}

impl fmt::Debug for AbsAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ambient => f.write_str("Ambient"),
            Self::Key { account, cloud, .. } => f
                .debug_struct("Key")
                .field("account", account)
                .field("cloud", cloud)
                .finish_non_exhaustive(),
        }
    }
}

/// Azure's clouds, with the names that the v1beta2 Secret uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AbsCloud {
    /// The public cloud, named `AzurePublicCloud`.
    #[default]
    Public,
    /// The cloud for China, named `AzureChinaCloud`.
    China,
    /// The cloud for the US government, named `AzureUSGovernmentCloud`.
    UsGovernment,
    /// The cloud for Germany, named `AzureGermanCloud`.
    German,
}

impl AbsCloud {
    const ALL: [(&'static str, Self, &'static str); 4] = [
        ("AzurePublicCloud", Self::Public, "core.windows.net"),
        ("AzureChinaCloud", Self::China, "core.chinacloudapi.cn"),
        (
            "AzureUSGovernmentCloud",
            Self::UsGovernment,
            "core.usgovcloudapi.net",
        ),
        ("AzureGermanCloud", Self::German, "core.cloudapi.de"),
    ];

    /// Finds the cloud by its name. Ignores the difference between upper and lower case, like Azure's own library.
    fn named(name: &str) -> Option<Self> {
        let found = Self::ALL
            .iter()
            .find(|(known, ..)| known.eq_ignore_ascii_case(name));
        found.map(|(_, cloud, _)| *cloud)
    }

    fn domain(self) -> &'static str {
        let found = Self::ALL.iter().find(|(_, cloud, _)| *cloud == self);
        found.map_or("core.windows.net", |(_, _, domain)| domain)
    }
}

impl AbsAccess {
    /// Reads the Secret's keys `storage-account`, `storage-key` and `cloud`, as defined by v1beta2.
    ///
    /// # Errors
    /// Fails if a key is missing or invalid.
    pub fn from_secret(data: &SecretData) -> Result<Self, Error> {
        secret::reject_misspelled(data, &[ACCOUNT, KEY, CLOUD])?;
        let account = secret::text(
            data,
            ACCOUNT,
            "add the name of the storage account as storage-account",
        )?;
        if !is_account(account) {
            return Err(secret::invalid_key(
                ACCOUNT,
                "is not a storage account name: use 3 to 24 lowercase letters and digits"
                    .to_owned(),
            ));
        }
        let key = secret::text(
            data,
            KEY,
            "add an access key of the storage account as storage-key",
        )?;
        if STANDARD.decode(key).is_err() {
            return Err(secret::invalid_key(
                KEY,
                "is not base64: use the key as Azure shows it".to_owned(),
            ));
        }
        let cloud = match secret::optional(data, CLOUD)? {
            None => AbsCloud::default(),
            Some(name) => AbsCloud::named(name).ok_or_else(|| {
                let known: Vec<&str> = AbsCloud::ALL.iter().map(|(name, ..)| *name).collect();
                secret::invalid_key(
                    CLOUD,
                    format!("has an unknown value: use {}", known.join(", ")),
                )
            })?,
        };
        Ok(Self::Key {
            account: account.to_owned(),
            key: key.to_owned(),
            cloud,
        })
    }
}

fn is_account(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (3..=24).contains(&name.len()) && name.bytes().all(is_plain)
}

/// The storage account in the URL of one of Azure's servers. `None` for any other URL.
pub(crate) fn account_at(endpoint: &str) -> Option<&str> {
    let host = endpoint.strip_prefix("https://")?;
    let (account, service) = host.strip_suffix('/').unwrap_or(host).split_once('.')?;
    let domain = service.strip_prefix("blob.")?;
    let is_azure = AbsCloud::ALL
        .iter()
        // The domain of the German cloud is not accepted as Azure: this cloud closed in 2021, and another party may
        // have registered its domain since.
        .any(|(_, cloud, known)| *cloud != AbsCloud::German && *known == domain);
    (is_azure && is_account(account)).then_some(account)
}

impl AbsConfig {
    /// The endpoint, as messages show it.
    pub(super) fn display_endpoint(&self) -> String {
        self.endpoint
            .clone()
            .or_else(|| self.cloud_endpoint())
            .unwrap_or_else(|| "Azure Blob Storage".to_owned())
    }

    fn cloud_endpoint(&self) -> Option<String> {
        match &self.access {
            AbsAccess::Ambient => None,
            AbsAccess::Key { account, cloud, .. } => {
                Some(format!("https://{account}.blob.{}", cloud.domain()))
            }
        }
    }
}

/// Two clients: one for requests that send no content, and one for blocks.
pub(super) fn clients(config: &AbsConfig) -> Result<(ContainerClient, ContainerClient), Error> {
    let missing = || Error::Invalid {
        field: "endpoint".to_owned(),
        problem: "is missing: without absSecret, set the URL of the account, \
                  such as https://account.blob.core.windows.net"
            .to_owned(),
    };
    let given = config.endpoint.clone().filter(|text| !text.is_empty());
    let uri = given
        .or_else(|| config.cloud_endpoint())
        .ok_or_else(missing)?;
    let url = http::endpoint(&uri)?;
    let (account, credentials) = match &config.access {
        AbsAccess::Key { account, key, .. } => (
            account.clone(),
            StorageCredentials::access_key(account.clone(), key.clone()),
        ),
        AbsAccess::Ambient => {
            let host = url.host_str().unwrap_or_default();
            let account = host.split('.').next().unwrap_or_default().to_owned();
            let identity = Identity::new(http::client(|builder| {
                builder.timeout(Duration::from_secs(20))
            })?);
            (
                account,
                StorageCredentials::token_credential(Arc::new(identity)),
            )
        }
    };
    let location = CloudLocation::Custom {
        account,
        uri: url.as_str().trim_end_matches('/').to_owned(),
    };
    let retry = ExponentialRetryOptions::default()
        .initial_delay(Duration::from_millis(200))
        .max_retries(4_u32)
        .max_delay(Duration::from_secs(5))
        .max_total_elapsed(Duration::from_mins(10));
    let client = |timeout| -> Result<ContainerClient, Error> {
        let client = http::client(|builder| builder.timeout(Duration::from_secs(timeout)))?;
        let transport = TransportOptions::new(Arc::new(Transport(client)));
        Ok(
            ClientBuilder::with_location(location.clone(), credentials.clone())
                .retry(RetryOptions::exponential(retry.clone()))
                .transport(transport)
                .container_client(&config.container),
        )
    };
    Ok((client(20)?, client(300)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(entries: &[(&str, &str)]) -> SecretData {
        entries
            .iter()
            .map(|(key, value)| ((*key).to_owned(), value.as_bytes().to_vec()))
            .collect()
    }

    #[test]
    fn keys_of_v1beta2_azure_secret_are_read() {
        let access = AbsAccess::from_secret(&secret(&[
            (ACCOUNT, "myaccount\n"),
            (KEY, "c2VjcmV0"),
            (CLOUD, "azurechinacloud"),
        ]))
        .unwrap();
        let config = AbsConfig {
            container: "backups".to_owned(),
            endpoint: None,
            access,
        };
        assert_eq!(
            config.display_endpoint(),
            "https://myaccount.blob.core.chinacloudapi.cn"
        );
        // Invariant 14: the debug output does not contain the storage key.
        let shown = format!("{config:?}");
        assert!(!shown.contains("c2VjcmV0"), "{shown}");
        assert!(clients(&config).is_ok());
    }

    #[test]
    fn invalid_key_of_azure_secret_is_reported_with_remedy() {
        let cases: [(&[(&str, &str)], &str); 6] = [
            (&[], "storage-account: is missing (the Secret has no keys)"),
            (&[(ACCOUNT, "myaccount")], "storage-key: is missing"),
            (
                &[(ACCOUNT, "myaccount"), ("storageKey", "c2VjcmV0")],
                "storageKey: is an unknown key: rename it to storage-key",
            ),
            (
                &[(ACCOUNT, "My Account"), (KEY, "c2VjcmV0")],
                "storage-account: is not a storage account name",
            ),
            (
                &[(ACCOUNT, "myaccount"), (KEY, "not base64")],
                "storage-key: is not base64",
            ),
            (
                &[
                    (ACCOUNT, "myaccount"),
                    (KEY, "c2VjcmV0"),
                    (CLOUD, "AzureMoonCloud"),
                ],
                "cloud: has an unknown value: use AzurePublicCloud, ",
            ),
        ];
        for (entries, expected) in cases {
            let error = AbsAccess::from_secret(&secret(entries))
                .unwrap_err()
                .to_string();
            assert!(error.starts_with(expected), "{error}");
            assert!(!error.contains("c2VjcmV0"), "{error}");
        }
    }

    #[test]
    fn pod_identity_requires_azure_endpoint() {
        let config = AbsConfig {
            container: "backups".to_owned(),
            endpoint: None,
            access: AbsAccess::Ambient,
        };
        let error = clients(&config).unwrap_err().to_string();
        assert!(error.starts_with("endpoint: is missing"), "{error}");
        let endpoint = Some("https://account.blob.core.windows.net".to_owned());
        assert!(clients(&AbsConfig { endpoint, ..config }).is_ok());
    }
}
