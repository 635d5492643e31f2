//! From the block of a spec, and what the Secrets hold that it names, to an open store. No Secret's content leaves
//! this module but inside the store (invariant 14).

use std::collections::BTreeMap;
use std::sync::Arc;

use api::storage::{ObjectPath, S3Source};

use crate::{Error, S3Access, S3Config, S3Keys, S3Store, Store};

/// A Secret's data, or what the directory of a mounted Secret holds.
pub type SecretData = BTreeMap<String, Vec<u8>>;

/// The key of the certificate authority in `caSecret`.
const CA_KEY: &str = "ca.crt";

/// The fields that name Secrets; an [`Error::Invalid`] about their content names them.
pub const AWS_SECRET: &str = "spec.s3.awsSecret";
/// As [`AWS_SECRET`], for the certificate authority.
pub const CA_SECRET: &str = "spec.s3.caSecret";

/// A store, open, and the key in it.
#[derive(Clone)]
pub struct Target {
    /// The bucket.
    pub store: Arc<dyn Store>,
    /// The key of the backup.
    pub key: String,
}

/// Opens the bucket of an S3 block; nothing is sent yet. What cannot work is [`Error::Invalid`] with the field of the
/// spec.
pub async fn open_s3(
    source: &S3Source,
    secret: Option<&SecretData>,
    ca: Option<&SecretData>,
) -> Result<Target, Error> {
    let path = ObjectPath::parse(&source.path)
        .map_err(|error| invalid("spec.s3.path", format!("{:?}: {error}", source.path)))?;
    let access = match secret {
        Some(data) => S3Access::Keys(S3Keys::from_secret(data).map_err(|error| {
            let name = source.aws_secret().unwrap_or_default();
            invalid(AWS_SECRET, format!("Secret {name}: {error}"))
        })?),
        None => S3Access::Ambient,
    };
    let ca = ca.map(|data| authority(source, data)).transpose()?;
    let config = S3Config {
        bucket: path.bucket,
        endpoint: source.endpoint().map(str::to_owned),
        region: source.region.clone().filter(|region| !region.is_empty()),
        force_path_style: source.force_path_style,
        access,
        ca,
    };
    let store = S3Store::new(config).await.map_err(in_spec)?;
    Ok(Target {
        store: Arc::new(store),
        key: path.key,
    })
}

fn authority(source: &S3Source, data: &SecretData) -> Result<Vec<u8>, Error> {
    data.get(CA_KEY).cloned().ok_or_else(|| {
        let name = source.ca_secret.as_deref().unwrap_or_default();
        let problem =
            format!("Secret {name} has no key {CA_KEY}: add the certificate authority under it");
        invalid(CA_SECRET, problem)
    })
}

/// The store names its own settings; the user knows them by their place in the spec.
fn in_spec(error: Error) -> Error {
    match error {
        Error::Invalid { field, problem } if field == CA_KEY => {
            invalid(CA_SECRET, format!("{field}: {problem}"))
        }
        Error::Invalid { field, problem } => Error::Invalid {
            field: format!("spec.s3.{field}"),
            problem,
        },
        error => error,
    }
}

fn invalid(field: &str, problem: String) -> Error {
    Error::Invalid {
        field: field.to_owned(),
        problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn says_which_secret_and_key_are_wrong() {
        let source = S3Source {
            path: "bucket/key".to_owned(),
            aws_secret: Some("aws".to_owned()),
            ca_secret: Some("authority".to_owned()),
            endpoint: Some("http://127.0.0.1:1".to_owned()),
            ..S3Source::default()
        };
        let good = SecretData::from([(
            "credentials".to_owned(),
            b"[default]\naws_access_key_id=a\naws_secret_access_key=b".to_vec(),
        )]);
        let empty = SecretData::new();
        let nonsense = SecretData::from([("ca.crt".to_owned(), b"nonsense".to_vec())]);
        let cases = [
            (
                &empty,
                None,
                "spec.s3.awsSecret: Secret aws: credentials: is missing",
            ),
            (
                &good,
                Some(&empty),
                "spec.s3.caSecret: Secret authority has no key ca.crt",
            ),
            (&good, Some(&nonsense), "spec.s3.caSecret: ca.crt: "),
        ];
        for (secret, ca, expected) in cases {
            let error = open_s3(&source, Some(secret), ca).await.err().unwrap();
            assert!(error.to_string().starts_with(expected), "{error}");
        }
        let elsewhere = S3Source {
            endpoint: Some("minio:9000".to_owned()),
            ..source.clone()
        };
        let error = open_s3(&elsewhere, Some(&good), None).await.err().unwrap();
        assert!(
            error.to_string().starts_with("spec.s3.endpoint: "),
            "{error}"
        );
        assert!(open_s3(&source, Some(&good), None).await.is_ok());
    }
}
