//! Access to a bucket: the configuration, the keys of the Secret and the HTTP client.
//!
//! Environment variables of the process configure the access only if the client uses the pod's own identity. Secrets
//! are never printed.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use aws_config::{BehaviorVersion, Region};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    Credentials, RequestChecksumCalculation, ResponseChecksumValidation, SharedCredentialsProvider,
    SharedHttpClient,
};
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore, rustls_provider::CryptoMode};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::limit::{LimitResponses, NoRetryOfTooLong};
use super::{S3Protection, insecure};
use crate::port::Error;
use crate::secret;

const DEFAULT_REGION: &str = "us-east-1";

/// The configuration of a bucket.
#[derive(Clone, Debug, Default)]
pub struct S3Config {
    /// The bucket's name.
    pub bucket: String,
    /// URL of an S3-compatible store. `None` means AWS. With the pod's own identity, the environment may set another
    /// endpoint.
    pub endpoint: Option<String>,
    /// The region. `None` means the region of the Secret or, with the pod's own identity, of the environment. If
    /// neither has a region, the region is `us-east-1`.
    pub region: Option<String>,
    /// Whether the bucket is in the path of the URL, not in the host name.
    pub force_path_style: bool,
    /// The identity with which requests are sent.
    pub access: S3Access,
    /// PEM certificates of CAs that the client trusts in addition to the CAs of the system.
    pub ca: Option<Vec<u8>>,
    /// True if the client does not verify the certificate of the endpoint. For tests only.
    pub insecure_skip_verify: bool,
    /// Server-side encryption and locks of the stored objects.
    pub protection: S3Protection,
}

/// The identity with which requests are sent.
#[derive(Clone, Debug, Default)]
pub enum S3Access {
    /// The pod's own identity: a web identity, or the credentials of the container or the instance.
    #[default]
    Ambient,
    /// The keys of a Secret.
    Keys(S3Keys),
}

/// The credentials in the profile `default` of the Secret's files `credentials` and `config`.
#[derive(Clone, PartialEq, Eq)]
pub struct S3Keys {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    region: Option<String>,
}

impl fmt::Debug for S3Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Keys")
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

impl S3Keys {
    /// Creates keys without a session token or region.
    pub fn new(access_key_id: &str, secret_access_key: &str) -> Self {
        Self {
            access_key_id: access_key_id.to_owned(),
            secret_access_key: secret_access_key.to_owned(),
            session_token: None,
            region: None,
        }
    }

    /// Reads the Secret's keys `credentials` (required) and `config` (optional), as defined by v1beta2.
    ///
    /// # Errors
    /// Fails if a key is missing or invalid. The error names the key and the missing setting, and contains no value.
    pub fn from_secret(data: &BTreeMap<String, Vec<u8>>) -> Result<Self, Error> {
        secret::reject_misspelled(data, &["credentials", "config"])?;
        let credentials = secret::text(
            data,
            "credentials",
            "add the AWS credentials file as credentials",
        )?;
        let credentials = default_profile(credentials);
        let config = secret::optional(data, "config")?
            .map(default_profile)
            .unwrap_or_default();
        let required = |name: &str| {
            let value = credentials.get(name).or_else(|| config.get(name)).copied();
            value.filter(|value| !value.is_empty()).ok_or_else(|| {
                secret::invalid_key(
                    "credentials",
                    format!("has no {name} in its profile [default]: add it"),
                )
            })
        };
        if let Some(name) = ["role_arn", "credential_process", "sso_session"]
            .into_iter()
            .find(|name| credentials.contains_key(name) || config.contains_key(name))
        {
            return Err(secret::invalid_key(
                "config",
                format!(
                    "sets {name}, which is not supported: use access keys, or remove the Secret from the spec to use the pod's own identity"
                ),
            ));
        }
        let region = config.get("region").or_else(|| credentials.get("region"));
        Ok(Self {
            access_key_id: required("aws_access_key_id")?.to_owned(),
            secret_access_key: required("aws_secret_access_key")?.to_owned(),
            session_token: credentials
                .get("aws_session_token")
                .map(|token| (*token).to_owned()),
            region: region.map(|region| (*region).to_owned()),
        })
    }
}

fn invalid(field: &str, problem: String) -> Error {
    Error::Invalid {
        field: field.to_owned(),
        problem,
    }
}

/// The settings in the section `[default]` or `[profile default]`.
fn default_profile(file: &str) -> BTreeMap<&str, &str> {
    let mut inside = false;
    let mut settings = BTreeMap::new();
    for line in file.trim_start_matches('\u{feff}').lines() {
        // This loop skips comments and indented lines. Indented lines are nested settings, which this crate does not
        // use.
        if line.starts_with([' ', '\t']) || line.starts_with(['#', ';']) {
            continue;
        }
        let line = line.trim_end();
        if let Some(section) = line.strip_prefix('[') {
            let name = section.split(']').next().unwrap_or_default().trim();
            let name = name.strip_prefix("profile ").unwrap_or(name).trim();
            inside = name == "default";
        } else if inside && let Some((name, value)) = line.split_once('=') {
            settings.insert(name.trim(), value.trim());
        }
    }
    settings
}

impl S3Config {
    /// The endpoint, as messages show it.
    pub(super) fn display_endpoint(&self) -> String {
        self.endpoint_in(|name| std::env::var(name).ok())
    }

    /// The endpoint, as messages show it. With the pod's own identity, the AWS library reads the endpoint from
    /// environment variables. The library does not return the endpoint, so this function reads the same variables.
    fn endpoint_in(&self, variable: impl Fn(&str) -> Option<String>) -> String {
        let of_environment = || {
            let names: &[&str] = match self.access {
                S3Access::Ambient => &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"],
                S3Access::Keys(_) => &[],
            };
            let mut urls = names.iter().filter_map(|name| variable(name));
            urls.find(|url| !url.is_empty())
        };
        let endpoint = self.endpoint.clone().or_else(of_environment);
        endpoint.unwrap_or_else(|| "Amazon S3".to_owned())
    }

    fn region(&self) -> Option<String> {
        let named = self.region.clone();
        named.or_else(|| match &self.access {
            S3Access::Keys(keys) => keys.region.clone(),
            S3Access::Ambient => None,
        })
    }

    fn check(&self) -> Result<(), Error> {
        if self.bucket.is_empty() {
            return Err(invalid(
                "path",
                "has no bucket: use <bucket>/<key>".to_owned(),
            ));
        }
        match &self.endpoint {
            Some(endpoint)
                if !endpoint
                    .strip_prefix("http://")
                    .or_else(|| endpoint.strip_prefix("https://"))
                    .is_some_and(|host| {
                        !host.is_empty() && !host.contains(char::is_whitespace)
                    }) =>
            {
                Err(invalid(
                    "endpoint",
                    format!("{endpoint:?} is not a URL: begin with http:// or https:// and a host"),
                ))
            }
            _ => Ok(()),
        }
    }
}

/// The HTTP client for the store. It trusts the system's CAs and `ca`, or every certificate if `insecure_skip_verify`
/// is true.
///
/// If no CA exists, an `http://` endpoint gets a client without TLS. For all other endpoints, this function then fails,
/// because the AWS library would not report the missing CAs.
fn http_client(config: &S3Config) -> Result<SharedHttpClient, Error> {
    if config.insecure_skip_verify {
        return insecure::http_client();
    }
    let endpoint = config.endpoint.as_ref();
    let is_plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
    verifying_client(config.ca.as_deref(), is_plain)
}

/// The HTTP client that requests credentials for the pod's own identity. It trusts only the system's CAs, because the
/// settings of a store must not affect this connection.
fn identity_client() -> Result<SharedHttpClient, Error> {
    verifying_client(None, true)
}

fn verifying_client(ca: Option<&[u8]>, is_plain: bool) -> Result<SharedHttpClient, Error> {
    let native = rustls_native_certs::load_native_certs();
    let has_native = RootCertStore::empty()
        .add_parsable_certificates(native.certs)
        .0
        > 0;
    let mut trust = TrustStore::empty().with_native_roots(has_native);
    if let Some(pem) = ca {
        check_certificates(pem)?;
        trust = trust.with_pem_certificate(pem.to_vec());
    }
    if !has_native && ca.is_none() {
        return if is_plain {
            Ok(aws_smithy_http_client::Builder::new().build_http())
        } else {
            Err(invalid(
                "caSecret",
                "this process trusts no CA: set this field to the Secret with the store's CA certificate".to_owned(),
            ))
        };
    }
    let tls = TlsContext::builder()
        .with_trust_store(trust)
        .build()
        .map_err(|error| invalid("caSecret", error.to_string()))?;
    Ok(aws_smithy_http_client::Builder::new()
        .tls_provider(Provider::Rustls(CryptoMode::AwsLc))
        .tls_context(tls)
        .build_https())
}

fn check_certificates(pem: &[u8]) -> Result<(), Error> {
    let invalid_key = |problem: &str| secret::invalid_key("ca.crt", problem.to_owned());
    let certificates: Vec<CertificateDer<'_>> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|_| invalid_key("is not PEM: add the CA certificate of the store"))?;
    if certificates.is_empty() {
        return Err(invalid_key(
            "has no certificate: add the CA certificate in PEM format",
        ));
    }
    let mut store = RootCertStore::empty();
    for certificate in certificates {
        store
            .add(certificate)
            .map_err(|_| invalid_key("has an invalid certificate: add only CA certificates"))?;
    }
    Ok(())
}

/// Two clients: one with a short timeout, for requests without content, and one with a long timeout, for requests that
/// send content or complete an upload.
pub(super) async fn clients(config: S3Config) -> Result<(Client, Client), Error> {
    let http = http_client(&config)?;
    clients_over(config, http).await
}

/// Like [`clients`], with this HTTP client.
pub(super) async fn clients_over(
    config: S3Config,
    http: SharedHttpClient,
) -> Result<(Client, Client), Error> {
    config.check()?;
    let region = config.region();
    let identity = match config.access {
        S3Access::Keys(keys) => aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .credentials_provider(SharedCredentialsProvider::new(Credentials::new(
                keys.access_key_id,
                keys.secret_access_key,
                keys.session_token,
                None,
                "secret",
            )))
            .region(Region::from_static(DEFAULT_REGION)),
        // The AWS configuration provides the identity of the pod. It also provides the endpoint and the region, from
        // environment variables such as AWS_ENDPOINT_URL_S3 and AWS_REGION.
        S3Access::Ambient => {
            let loader =
                aws_config::defaults(BehaviorVersion::latest()).http_client(identity_client()?);
            let ambient = loader.load().await;
            let region = ambient.region().cloned();
            aws_sdk_s3::config::Builder::from(&ambient)
                .region(region.unwrap_or(Region::from_static(DEFAULT_REGION)))
        }
    };
    let mut builder = identity
        .http_client(http)
        .force_path_style(config.force_path_style)
        .retry_config(
            RetryConfig::standard()
                .with_max_attempts(5)
                .with_initial_backoff(Duration::from_millis(200))
                .with_max_backoff(Duration::from_secs(5)),
        )
        .interceptor(LimitResponses)
        .retry_classifier(NoRetryOfTooLong)
        // The client sends and expects checksums only where an operation requires them, because some S3-compatible
        // stores reject the checksum trailers.
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    if let Some(endpoint) = config.endpoint {
        builder = builder.endpoint_url(endpoint);
    }
    if let Some(region) = region {
        builder = builder.region(Region::new(region));
    }
    let timeouts = |seconds| {
        TimeoutConfig::builder()
            .connect_timeout(Duration::from_secs(5))
            .operation_attempt_timeout(Duration::from_secs(seconds))
            .build()
    };
    let short = builder.clone().timeout_config(timeouts(20)).build();
    let long = builder.timeout_config(timeouts(300)).build();
    Ok((Client::from_conf(short), Client::from_conf(long)))
}

#[cfg(test)]
mod tests;
