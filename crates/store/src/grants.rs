//! Grants for the operator's own cloud identity, which EtcdBackups and EtcdRestores without a Secret use. With a grant,
//! an administrator allows a namespace to use a location with this identity. Performs no I/O.

use std::str::FromStr;

use api::storage::{AbsSource, S3Source, StorageSource};

use crate::abs::account_at;

/// A bucket, or a prefix in a bucket, that a namespace may use with the operator's identity. An Azure grant begins with
/// the storage account, because container names are unique only within an account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    namespace: String,
    place: String,
}

/// The error for a grant that cannot be parsed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not <namespace>=<s3|gs>://<bucket>[/<prefix>] or <namespace>=abs://<account>[/<container>[/<prefix>]], such \
     as team-a=s3://backups/team-a"
)]
pub struct Unreadable(String);

impl FromStr for Grant {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let unreadable = || Unreadable(text.to_owned());
        let (namespace, place) = text.split_once('=').ok_or_else(unreadable)?;
        let (scheme, path) = place.split_once("://").ok_or_else(unreadable)?;
        let known = ["s3", "gs", "abs"].contains(&scheme);
        let whole = path.trim_end_matches('/');
        if namespace.is_empty() || !known || !is_plain(whole) {
            return Err(unreadable());
        }
        Ok(Self {
            namespace: namespace.to_owned(),
            place: format!("{scheme}://{whole}"),
        })
    }
}

/// True if no part of the path is empty, `.` or `..`. A client or a store could resolve such a part to a path outside
/// of the granted location.
fn is_plain(path: &str) -> bool {
    path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// The grants of one operator: the storage locations that namespaces may use with its cloud identity.
#[derive(Clone, Debug, Default)]
pub struct Grants {
    /// Name of the operator as messages show it, such as `backup operator`.
    pub operator: &'static str,
    /// The operator's own namespace. It needs no grant: a user who may create pods in this namespace can run a pod with
    /// the operator's ServiceAccount, and use its identity in that pod.
    pub own: String,
    /// The grants for the namespaces other than `own`.
    pub others: Vec<Grant>,
}

impl Grants {
    /// Checks that an object of the namespace may use the location of `source`. `ambient` is true if the object names
    /// no Secret and therefore uses the operator's identity.
    ///
    /// # Errors
    /// Fails if no grant covers the location. The error names the field to correct.
    pub fn check(
        &self,
        namespace: &str,
        source: &StorageSource<'_>,
        ambient: bool,
    ) -> Result<(), String> {
        if !ambient || namespace == self.own {
            return Ok(());
        }
        let block = source.block();
        let (secret, place) = match source {
            StorageSource::S3(s3) => ("awsSecret", s3_place(s3)),
            StorageSource::Gcs(gcs) => (
                "gcpSecret",
                without_endpoint("gs", gcs.endpoint.as_deref(), &gcs.path),
            ),
            StorageSource::Abs(abs) => ("absSecret", abs_place(abs)),
            // OSS, PersistentVolumeClaims and local directories never use the operator's cloud identity, so they need
            // no grant.
            StorageSource::Oss(_) | StorageSource::Pvc(_) | StorageSource::Local(_) => {
                return Ok(());
            }
        };
        let wanted = place.map_err(|problem| {
            format!(
                "spec.{block}.{problem}, so the operator does not use its own identity: set spec.{block}.{secret}"
            )
        })?;
        let granted = is_plain(source.path())
            && self
                .others
                .iter()
                .any(|grant| grant.covers(namespace, &wanted));
        if granted {
            return Ok(());
        }
        let operator = self.operator;
        Err(format!(
            "spec.{block}.{secret} is not set, and namespace {namespace} may not use the operator's own identity for \
             {wanted}: set spec.{block}.{secret}, or ask the administrator to start the {operator} with \
             --ambient-identity={namespace}={wanted}"
        ))
    }
}

/// The location of an S3 block that a grant must cover. Fails if TLS verification is off or if the object names a CA.
/// With these settings, users of the namespace could impersonate the store and receive the operator's token.
fn s3_place(s3: &S3Source) -> Result<String, &'static str> {
    if s3.insecure_skip_verify {
        return Err("insecureSkipVerify is set");
    }
    if s3.ca_secret.as_ref().is_some_and(|name| !name.is_empty()) {
        return Err("caSecret is set");
    }
    without_endpoint("s3", s3.endpoint.as_deref(), &s3.path)
}

/// The location of a block that a grant must cover. Fails for a custom endpoint, because the client would send the
/// operator's token to it.
fn without_endpoint(
    scheme: &str,
    endpoint: Option<&str>,
    path: &str,
) -> Result<String, &'static str> {
    if endpoint.is_some_and(|endpoint| !endpoint.is_empty()) {
        return Err("endpoint is set");
    }
    Ok(format!("{scheme}://{path}"))
}

/// The location of an Azure block that a grant must cover. Fails if the endpoint is not one of Azure's servers, because
/// the client sends the operator's token to the endpoint.
fn abs_place(abs: &AbsSource) -> Result<String, &'static str> {
    let account = abs.endpoint.as_deref().and_then(account_at);
    let account = account.ok_or(
        "endpoint is not the URL of a storage account at Azure, such as https://account.blob.core.windows.net",
    )?;
    Ok(format!("abs://{account}/{}", abs.path))
}

impl Grant {
    fn covers(&self, namespace: &str, wanted: &str) -> bool {
        let named = self.namespace == namespace || self.namespace == "*";
        let below = wanted
            .strip_prefix(&self.place)
            .is_some_and(|rest| rest.starts_with('/') || rest.is_empty());
        named && below
    }
}

#[cfg(test)]
mod tests {
    use api::storage::GcsSource;

    use super::*;

    fn grants(texts: &[&str]) -> Grants {
        Grants {
            operator: "backup operator",
            own: "operators".to_owned(),
            others: texts.iter().map(|text| text.parse().unwrap()).collect(),
        }
    }

    fn s3(path: &str) -> S3Source {
        S3Source {
            path: path.to_owned(),
            ..S3Source::default()
        }
    }

    #[test]
    fn cloud_identity_requires_grant_in_other_namespaces() {
        let source = s3("backups/team-a/etcd");
        let source = StorageSource::S3(&source);
        assert_eq!(grants(&[]).check("operators", &source, true), Ok(()));
        let rejected = grants(&[]).check("team-a", &source, true).unwrap_err();
        for remedy in [
            "spec.s3.awsSecret",
            "--ambient-identity=team-a=s3://backups/team-a/etcd",
        ] {
            assert!(rejected.contains(remedy), "{rejected}");
        }
    }

    #[test]
    fn grant_covers_namespace_and_whole_path_segments() {
        let grants = grants(&["team-a=s3://backups/team-a/", "*=gs://shared"]);
        for (namespace, path, allowed) in [
            ("team-a", "backups/team-a/etcd", true),
            ("team-a", "backups/team-a/deep/etcd", true),
            ("team-b", "backups/team-a/etcd", false),
            ("team-a", "backups/team-ab/etcd", false),
            ("team-a", "backups/team-b/etcd", false),
            ("team-a", "other/team-a/etcd", false),
            ("team-a", "backups/team-a/../team-b/etcd", false),
            ("team-a", "backups/team-a//etcd", false),
            ("team-b", "shared/etcd", false),
        ] {
            let source = s3(path);
            let answer = grants.check(namespace, &StorageSource::S3(&source), true);
            assert_eq!(answer.is_ok(), allowed, "{namespace} {path}");
        }
        let gcs = GcsSource {
            path: "shared/etcd".to_owned(),
            ..GcsSource::default()
        };
        assert!(
            grants
                .check("team-z", &StorageSource::Gcs(&gcs), true)
                .is_ok()
        );
    }

    #[test]
    fn custom_store_endpoint_requires_secret() {
        let mut source = s3("backups/team-a/etcd");
        source.endpoint = Some("https://elsewhere".to_owned());
        let granted = grants(&["team-a=s3://backups"]);
        let rejected = granted
            .check("team-a", &StorageSource::S3(&source), true)
            .unwrap_err();
        assert!(rejected.contains("spec.s3.endpoint"), "{rejected}");
        source.aws_secret = Some("aws".to_owned());
        assert_eq!(
            grants(&[]).check("team-a", &StorageSource::S3(&source), false),
            Ok(())
        );
    }

    #[test]
    fn granted_identity_requires_tls_verification() {
        let granted = grants(&["team-a=s3://backups"]);
        let mut insecure = s3("backups/team-a/etcd");
        insecure.insecure_skip_verify = true;
        let mut own_ca = s3("backups/team-a/etcd");
        own_ca.ca_secret = Some("ca".to_owned());
        for (source, field) in [(insecure, "insecureSkipVerify"), (own_ca, "caSecret")] {
            let source = StorageSource::S3(&source);
            let rejected = granted.check("team-a", &source, true).unwrap_err();
            assert!(
                rejected.starts_with(&format!("spec.s3.{field} is set")),
                "{rejected}"
            );
            assert!(rejected.contains("set spec.s3.awsSecret"), "{rejected}");
            // No grant is needed if the EtcdBackup or EtcdRestore names a Secret (`false`), or is in the operator's own
            // namespace.
            assert_eq!(granted.check("team-a", &source, false), Ok(()));
            assert_eq!(granted.check("operators", &source, true), Ok(()));
        }
    }

    #[test]
    fn azure_grant_covers_account_or_container() {
        let abs = |endpoint: &str| AbsSource {
            path: "backups/team-a/etcd".to_owned(),
            endpoint: Some(endpoint.to_owned()),
            ..AbsSource::default()
        };
        let own = "https://account.blob.core.windows.net";
        for (grant, endpoint, allowed) in [
            ("team-a=abs://account/backups/team-a", own, true),
            (
                "team-a=abs://account/backups",
                "https://account.blob.core.windows.net/",
                true,
            ),
            (
                "*=abs://account",
                "https://account.blob.core.chinacloudapi.cn",
                true,
            ),
            ("team-a=abs://account/other", own, false),
            ("team-a=abs://other/backups", own, false),
            ("team-b=abs://account/backups", own, false),
            ("team-a=abs://backups/team-a", own, false),
            (
                "*=abs://account",
                "http://account.blob.core.windows.net",
                false,
            ),
            (
                "*=abs://account",
                "https://account.blob.core.windows.net:8443",
                false,
            ),
            (
                "*=abs://account",
                "https://account.blob.core.windows.net.evil",
                false,
            ),
            (
                "*=abs://account",
                "https://evil/account.blob.core.windows.net",
                false,
            ),
            (
                "*=abs://account",
                "https://account@evil.blob.core.windows.net",
                false,
            ),
            (
                "*=abs://account",
                "https://evil#account.blob.core.windows.net",
                false,
            ),
            ("*=abs://account", "", false),
        ] {
            let source = abs(endpoint);
            let source = StorageSource::Abs(&source);
            let answer = grants(&[grant]).check("team-a", &source, true);
            assert_eq!(answer.is_ok(), allowed, "{grant} {endpoint} {answer:?}");
        }
        let source = abs(own);
        let rejected = grants(&[])
            .check("team-a", &StorageSource::Abs(&source), true)
            .unwrap_err();
        let remedy = "--ambient-identity=team-a=abs://account/backups/team-a/etcd";
        assert!(rejected.contains(remedy), "{rejected}");
    }

    #[test]
    fn malformed_storage_grants_are_rejected() {
        for text in [
            "",
            "team-a",
            "team-a=bucket",
            "=s3://b",
            "a=ftp://b",
            "a=s3://",
            "a=s3://b/../c",
            "a=s3://b//c",
        ] {
            assert!(text.parse::<Grant>().is_err(), "{text}");
        }
    }
}
