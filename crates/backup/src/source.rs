//! From what a spec names, and what those objects hold, to a transfer that can run. No Secret's content leaves
//! this module but inside the store it opens (invariant 14).

use std::collections::BTreeMap;
use std::sync::Arc;

use api::EtcdCluster;
use api::conditions::Reason;
use api::manifest::ManifestCluster;
use api::names::Addresses;
use api::storage::{ObjectPath, S3Source};
use store::{S3Access, S3Config, S3Keys, S3Store, Store};

use crate::observed::Trouble;

/// A Secret's data.
pub(crate) type SecretData = BTreeMap<String, Vec<u8>>;

/// The key of the certificate authority in `caSecret`.
const CA_KEY: &str = "ca.crt";

/// A store, open, and the key in it.
pub(crate) struct Target {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) key: String,
}

/// Opens the bucket of an S3 block; `secret` and `ca` are what the Secrets hold that it names.
pub(crate) async fn target(
    source: &S3Source,
    secret: Option<&SecretData>,
    ca: Option<&SecretData>,
) -> Result<Target, Trouble> {
    let path = ObjectPath::parse(&source.path).map_err(|error| {
        let message = format!("spec.s3.path is {:?}: {error}", source.path);
        Trouble::new(Reason::InvalidSpec, message)
    })?;
    let access = match secret {
        Some(data) => S3Access::Keys(S3Keys::from_secret(data).map_err(|error| {
            let name = source.aws_secret().unwrap_or_default();
            let message = format!("spec.s3.awsSecret: Secret {name}: {error}");
            Trouble::new(Reason::SecretMissing, message)
        })?),
        None => S3Access::Ambient,
    };
    let ca = match ca {
        Some(data) => Some(data.get(CA_KEY).cloned().ok_or_else(|| {
            let name = source.ca_secret.as_deref().unwrap_or_default();
            let message = format!(
                "spec.s3.caSecret: Secret {name} has no key {CA_KEY}: add the certificate authority under it"
            );
            Trouble::new(Reason::SecretMissing, message)
        })?),
        None => None,
    };
    let config = S3Config {
        bucket: path.bucket,
        endpoint: source.endpoint().map(str::to_owned),
        region: source.region.clone().filter(|region| !region.is_empty()),
        force_path_style: source.force_path_style,
        access,
        ca,
    };
    let store = S3Store::new(config).await.map_err(|error| {
        let field = match &error {
            store::Error::Invalid { field, .. } if field == CA_KEY => "spec.s3.caSecret: ",
            store::Error::Invalid { .. } => "spec.s3.",
            _ => "spec.s3: ",
        };
        Trouble::new(Reason::InvalidSpec, format!("{field}{error}"))
    })?;
    Ok(Target {
        store: Arc::new(store),
        key: path.key,
    })
}

/// The client URLs of an EtcdCluster, and what the manifest says about it.
pub(crate) fn members_of(
    cluster: &EtcdCluster,
    namespace: &str,
) -> Result<(Vec<String>, ManifestCluster), Trouble> {
    let name = cluster.metadata.name.clone().unwrap_or_default();
    if cluster.spec.tls.is_some() {
        return Err(Trouble::new(
            Reason::NotSupported,
            format!(
                "EtcdCluster {name} has spec.TLS, and TLS to etcd is not in effect in this release"
            ),
        ));
    }
    let addresses = Addresses {
        namespace: namespace.to_owned(),
        cluster: name.clone(),
        member: cluster.spec.member_address(),
        cluster_domain: cluster.spec.cluster_domain().to_owned(),
        peer_tls: false,
        client_tls: false,
    };
    let known = cluster
        .status
        .iter()
        .flat_map(|status| &status.member_details);
    let mut urls: Vec<String> = known
        .map(|member| addresses.client_url(&member.name))
        .collect();
    urls.push(addresses.service_url());
    let manifest = ManifestCluster {
        name,
        namespace: namespace.to_owned(),
        spec: cluster.spec.clone(),
    };
    Ok((urls, manifest))
}

/// The endpoints of a spec as this operator can resolve them: a bare Service name, which old manifests have, is
/// meant in the namespace of the object, and the operator may be in another one.
pub(crate) fn endpoints(given: &[String], namespace: &str) -> Vec<String> {
    given.iter().map(|url| endpoint(url, namespace)).collect()
}

fn endpoint(url: &str, namespace: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let rest = rest.trim_end_matches('/');
    let (host, port) = match rest.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (host, Some(port)),
        _ => (rest, None),
    };
    let bare = !host.is_empty() && !host.contains(['.', ':', '[']) && host != "localhost";
    let host = if bare {
        format!("{host}.{namespace}.svc")
    } else {
        host.to_owned()
    };
    match port {
        Some(port) => format!("{scheme}://{host}:{port}"),
        None => format!("{scheme}://{host}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_service_name_is_meant_in_the_objects_namespace() {
        let cases = [
            (
                "http://example-client:2379",
                "http://example-client.prod.svc:2379",
            ),
            ("example-client:2379", "http://example-client.prod.svc:2379"),
            (
                "http://example-client:2379/",
                "http://example-client.prod.svc:2379",
            ),
            ("http://a.other.svc:2379", "http://a.other.svc:2379"),
            ("http://10.0.0.1:2379", "http://10.0.0.1:2379"),
            ("http://[fd00::1]:2379", "http://[fd00::1]:2379"),
            ("http://localhost:2379", "http://localhost:2379"),
            ("http://plain", "http://plain.prod.svc"),
        ];
        for (given, expected) in cases {
            assert_eq!(endpoint(given, "prod"), expected);
        }
    }

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
            let trouble = target(&source, Some(secret), ca).await.err().unwrap();
            assert!(trouble.message.starts_with(expected), "{}", trouble.message);
        }
        let elsewhere = S3Source {
            endpoint: Some("minio:9000".to_owned()),
            ..source.clone()
        };
        let trouble = target(&elsewhere, Some(&good), None).await.err().unwrap();
        assert!(
            trouble.message.starts_with("spec.s3.endpoint: "),
            "{}",
            trouble.message
        );
        assert!(target(&source, Some(&good), None).await.is_ok());
    }
}
