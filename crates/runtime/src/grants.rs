//! Whose rights an object may borrow: without a Secret a store is reached with the operator's own identity, and not
//! everybody who may create an EtcdBackup or an EtcdRestore may use that. Pure.

use std::str::FromStr;

use api::storage::StorageSource;

/// A place one namespace, or every namespace, may use with the operator's identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    namespace: String,
    place: String,
}

/// A grant that cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not <namespace>=<s3|gs|abs>://<bucket>[/<prefix>], such as team-a=s3://backups/team-a"
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

/// No part that is empty or that a client or a store might resolve to another place.
fn is_plain(path: &str) -> bool {
    path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// What the administrator allows.
#[derive(Clone, Debug, Default)]
pub struct Grants {
    /// The operator that was told, in words, such as `backup operator`.
    pub operator: &'static str,
    /// The operator's own namespace: whoever may write there may use its identity anyway.
    pub own: String,
    /// For others.
    pub others: Vec<Grant>,
}

impl Grants {
    /// Refuses a place that the namespace may not use with the operator's identity; `ambient`: it would be used, since
    /// no Secret is named.
    ///
    /// # Errors
    /// With the field and the remedy.
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
        let (scheme, endpoint, secret) = match source {
            StorageSource::S3(s3) => ("s3", s3.endpoint.as_deref(), "awsSecret"),
            StorageSource::Gcs(gcs) => ("gs", gcs.endpoint.as_deref(), "gcpSecret"),
            StorageSource::Abs(abs) => ("abs", abs.endpoint.as_deref(), "absSecret"),
            // Nobody's identity reaches these.
            StorageSource::Oss(_) | StorageSource::Pvc(_) | StorageSource::Local(_) => {
                return Ok(());
            }
        };
        // A token goes to whatever answers at an endpoint.
        if endpoint.is_some_and(|endpoint| !endpoint.is_empty()) {
            return Err(format!(
                "spec.{block}.endpoint is given without spec.{block}.{secret}, and the operator's own identity is not \
                 shown to other endpoints: name a Secret"
            ));
        }
        let path = source.path();
        let wanted = format!("{scheme}://{path}");
        let granted = is_plain(path)
            && self
                .others
                .iter()
                .any(|grant| grant.covers(namespace, &wanted));
        if granted {
            return Ok(());
        }
        let operator = self.operator;
        Err(format!(
            "spec.{block}.{secret} is not given, and namespace {namespace} may not use the operator's own identity for \
             {wanted}: name a Secret, or ask the administrator to start the {operator} with \
             --ambient-identity={namespace}={wanted}"
        ))
    }
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
    use api::storage::{GcsSource, S3Source};

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
    fn by_default_only_the_operators_own_namespace_uses_its_identity() {
        let source = s3("backups/team-a/etcd");
        let source = StorageSource::S3(&source);
        assert_eq!(grants(&[]).check("operators", &source, true), Ok(()));
        let refused = grants(&[]).check("team-a", &source, true).unwrap_err();
        for remedy in [
            "spec.s3.awsSecret",
            "--ambient-identity=team-a=s3://backups/team-a/etcd",
        ] {
            assert!(refused.contains(remedy), "{refused}");
        }
    }

    #[test]
    fn a_grant_is_for_one_namespace_and_for_whole_parts_of_a_path() {
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
                .check("anybody", &StorageSource::Gcs(&gcs), true)
                .is_ok()
        );
    }

    #[test]
    fn a_secret_needs_no_grant_and_an_endpoint_gets_no_token() {
        let mut source = s3("backups/team-a/etcd");
        source.endpoint = Some("https://elsewhere".to_owned());
        let granted = grants(&["team-a=s3://backups"]);
        let refused = granted
            .check("team-a", &StorageSource::S3(&source), true)
            .unwrap_err();
        assert!(refused.contains("spec.s3.endpoint"), "{refused}");
        source.aws_secret = Some("aws".to_owned());
        assert_eq!(
            grants(&[]).check("team-a", &StorageSource::S3(&source), false),
            Ok(())
        );
    }

    #[test]
    fn what_is_no_grant_is_refused() {
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
