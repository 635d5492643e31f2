//! Where a container is and who asks: the typed configuration, the Secret's keys.

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

/// The keys of the Secret.
const ACCOUNT: &str = "storage-account";
const KEY: &str = "storage-key";
const CLOUD: &str = "cloud";

/// What is needed to reach a container.
#[derive(Clone, Debug)]
pub struct AbsConfig {
    /// The container's name.
    pub container: String,
    /// URL of the account's blob service where it is not that of the cloud.
    pub endpoint: Option<String>,
    /// Who asks.
    pub access: AbsAccess,
}

/// Who asks.
#[derive(Clone)]
pub enum AbsAccess {
    /// The pod's own identity: workload identity, else the machine's managed identity.
    Ambient,
    /// An account and its key.
    Key {
        /// The storage account.
        account: String,
        /// Its key, in base64.
        key: String,
        /// The cloud it is in.
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

/// The clouds of Azure, by the names of its environments that v1beta2 takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AbsCloud {
    /// `AzurePublicCloud`.
    #[default]
    Public,
    /// `AzureChinaCloud`.
    China,
    /// `AzureUSGovernmentCloud`.
    UsGovernment,
    /// `AzureGermanCloud`.
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

    /// Names are compared without their case, as Azure's own library does.
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
    /// Reads the Secret's keys `storage-account`, `storage-key` and `cloud`, as v1beta2 defines them.
    pub fn from_secret(data: &SecretData) -> Result<Self, Error> {
        secret::spelt(data, &[ACCOUNT, KEY, CLOUD])?;
        let account = secret::text(
            data,
            ACCOUNT,
            "add the storage account's name under this key",
        )?;
        let plain = (3..=24).contains(&account.len())
            && account
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if !plain {
            return Err(secret::wrong(
                ACCOUNT,
                "is no name of a storage account: give 3 to 24 lower case letters and digits"
                    .to_owned(),
            ));
        }
        let key = secret::text(data, KEY, "add the storage account's key under this key")?;
        if STANDARD.decode(key).is_err() {
            return Err(secret::wrong(
                KEY,
                "is not base64: give the key as Azure shows it".to_owned(),
            ));
        }
        let cloud = match secret::optional(data, CLOUD)? {
            None => AbsCloud::default(),
            Some(name) => AbsCloud::named(name).ok_or_else(|| {
                let known: Vec<&str> = AbsCloud::ALL.iter().map(|(name, ..)| *name).collect();
                secret::wrong(CLOUD, format!("is not known: use {}", known.join(", ")))
            })?,
        };
        Ok(Self::Key {
            account: account.to_owned(),
            key: key.to_owned(),
            cloud,
        })
    }
}

impl AbsConfig {
    /// The endpoint for messages.
    pub(super) fn shown_endpoint(&self) -> String {
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

/// A client for short calls and one for long ones.
pub(super) fn clients(config: &AbsConfig) -> Result<(ContainerClient, ContainerClient), Error> {
    let missing = || Error::Invalid {
        field: "endpoint".to_owned(),
        problem: "is missing: without absSecret give the account's URL, \
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
            let identity = Identity::new(http::client(|builder| builder)?);
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
    let client = |patience| -> Result<ContainerClient, Error> {
        let client = http::client(|builder| builder.timeout(Duration::from_secs(patience)))?;
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
    fn reads_the_keys_of_v1beta2() {
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
            config.shown_endpoint(),
            "https://myaccount.blob.core.chinacloudapi.cn"
        );
        // Invariant 14.
        let shown = format!("{config:?}");
        assert!(!shown.contains("c2VjcmV0"), "{shown}");
        assert!(clients(&config).is_ok());
    }

    #[test]
    fn says_which_key_of_the_secret_is_wrong() {
        let cases: [(&[(&str, &str)], &str); 6] = [
            (&[], "storage-account: is missing (it has no keys)"),
            (&[(ACCOUNT, "myaccount")], "storage-key: is missing"),
            (
                &[(ACCOUNT, "myaccount"), ("storageKey", "c2VjcmV0")],
                "storageKey: is not known: call it storage-key",
            ),
            (
                &[(ACCOUNT, "My Account"), (KEY, "c2VjcmV0")],
                "storage-account: is no name",
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
                "cloud: is not known: use AzurePublicCloud, ",
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
    fn the_pods_own_identity_needs_the_accounts_url() {
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
