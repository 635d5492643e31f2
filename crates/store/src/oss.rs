//! Alibaba Cloud OSS, which [`crate::S3Store`] accesses through its S3 endpoint. This module finds the endpoint and
//! reads the keys of the Secret. Performs no I/O.

use crate::port::Error;
use crate::s3::S3Keys;
use crate::secret;
use crate::secret::SecretData;

/// The default endpoint, as documented for `EtcdBackup`.
const DEFAULT_ENDPOINT: &str = "https://oss-cn-hangzhou.aliyuncs.com";

/// The domain of OSS. An endpoint in another domain belongs to a proxy or to another store.
const DOMAIN: &str = ".aliyuncs.com";

/// The names of the keys in the Secret with the OSS credentials.
const KEY_ID: &str = "accessKeyID";
const KEY_SECRET: &str = "accessKeySecret";

/// The S3 settings for an OSS endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) endpoint: String,
    pub(crate) region: Option<String>,
    pub(crate) force_path_style: bool,
}

/// Converts an OSS endpoint to S3 settings. Users write the endpoint as in v1beta2, `oss-<region>.aliyuncs.com`, with
/// or without a scheme. OSS serves S3 at `s3.oss-<region>.aliyuncs.com`, and requires the bucket in the host name
/// (<https://www.alibabacloud.com/help/en/oss/developer-reference/use-aws-sdks-to-access-oss>).
pub(crate) fn settings(endpoint: Option<&str>) -> Settings {
    let given = endpoint
        .filter(|endpoint| !endpoint.is_empty())
        .unwrap_or(DEFAULT_ENDPOINT);
    let (scheme, host) = given.split_once("://").unwrap_or(("https", given));
    let host = host.trim_end_matches('/');
    let Some(name) = host.strip_suffix(DOMAIN) else {
        return Settings {
            endpoint: format!("{scheme}://{host}"),
            region: None,
            force_path_style: true,
        };
    };
    let name = name.strip_prefix("s3.").unwrap_or(name);
    let region = name.strip_prefix("oss-").unwrap_or(name);
    let region = region.strip_suffix("-internal").unwrap_or(region);
    Settings {
        endpoint: format!("{scheme}://s3.{name}{DOMAIN}"),
        region: Some(region.to_owned()),
        force_path_style: false,
    }
}

/// Reads the Secret's keys `accessKeyID` and `accessKeySecret`, as defined by v1beta2.
pub(crate) fn keys(data: &SecretData) -> Result<S3Keys, Error> {
    secret::reject_misspelled(data, &[KEY_ID, KEY_SECRET])?;
    let id = secret::text(data, KEY_ID, "add the ID of the AccessKey as accessKeyID")?;
    let key = secret::text(
        data,
        KEY_SECRET,
        "add the secret of the AccessKey as accessKeySecret",
    )?;
    Ok(S3Keys::new(id, key))
}

#[cfg(test)]
mod tests {
    use api::storage::OssSource;
    use bytes::Bytes;

    use super::*;
    use crate::source::{Secrets, oss_config};
    use crate::testing::{ACCESS_KEY, S3Server, SECRET_KEY, content, download, upload};
    use crate::{S3Store, Store};

    /// If the bucket is in the path of the URL, OSS rejects the request (`SecondLevelDomainForbidden`). In this test,
    /// only a host name that begins with the bucket resolves to the server. The server reads the bucket from the signed
    /// host name.
    #[tokio::test]
    async fn oss_requests_have_bucket_in_signed_host() {
        let domain = "s3.oss-eu-central-1.aliyuncs.com";
        let arguments = ["--virtual-domain", domain, "--region", "eu-central-1"];
        let server = S3Server::start_with(&["backups"], &arguments);
        let address = server.endpoint.strip_prefix("http://").unwrap();
        let source = OssSource {
            path: "backups/etcd/main".to_owned(),
            endpoint: Some("http://oss-eu-central-1.aliyuncs.com".to_owned()),
            ..OssSource::default()
        };
        let secret = SecretData::from([
            (KEY_ID.to_owned(), ACCESS_KEY.into()),
            (KEY_SECRET.to_owned(), SECRET_KEY.into()),
        ]);
        let secrets = Secrets {
            credentials: Some(&secret),
            ca: None,
        };
        let config = oss_config(&source, "backups".to_owned(), secrets).unwrap();
        let host = format!("backups.{domain}");
        let store = S3Store::with_host_address(config, &host, address.parse().unwrap())
            .await
            .unwrap();

        // The test sends the same requests as a backup, a restore and the deletion of a backup. The key has the format
        // of a periodic backup's key.
        let key = "etcd/main_v7_2026-01-15-12:00:00";
        let whole = content(13 << 20);
        let stored = upload(&store, key, &whole, 1 << 20).await.unwrap();
        assert_eq!(stored, 13 << 20);
        let manifest = format!("{key}.manifest.json");
        let written = store.put(&manifest, Bytes::from_static(b"{}"));
        written.await.unwrap();
        let listed = store.list("etcd/main_v").await.unwrap();
        let keys: Vec<&str> = listed.iter().map(|object| object.key.as_str()).collect();
        assert_eq!(keys, [key, manifest.as_str()]);
        assert!(store.unfinished("etcd/main").await.unwrap().is_empty());
        assert_eq!(store.head(key).await.unwrap().unwrap().size, 13 << 20);
        assert!(download(&store, key).await.unwrap() == whole);
        for key in keys {
            store.delete(key).await.unwrap();
        }
        assert!(store.list("etcd/main_v").await.unwrap().is_empty());
    }

    #[test]
    fn oss_endpoint_is_converted_to_s3_endpoint() {
        let cases = [
            (
                None,
                "https://s3.oss-cn-hangzhou.aliyuncs.com",
                "cn-hangzhou",
            ),
            (
                Some(""),
                "https://s3.oss-cn-hangzhou.aliyuncs.com",
                "cn-hangzhou",
            ),
            (
                Some("http://oss-eu-central-1-internal.aliyuncs.com/"),
                "http://s3.oss-eu-central-1-internal.aliyuncs.com",
                "eu-central-1",
            ),
            (
                Some("s3.oss-cn-beijing.aliyuncs.com"),
                "https://s3.oss-cn-beijing.aliyuncs.com",
                "cn-beijing",
            ),
        ];
        for (given, endpoint, region) in cases {
            let expected = Settings {
                endpoint: endpoint.to_owned(),
                region: Some(region.to_owned()),
                force_path_style: false,
            };
            assert_eq!(settings(given), expected, "{given:?}");
        }
        let other = settings(Some("http://127.0.0.1:9000"));
        assert_eq!(other.endpoint, "http://127.0.0.1:9000");
        let ipv6 = settings(Some("http://[fd00::7]:9000/"));
        assert_eq!(ipv6.endpoint, "http://[fd00::7]:9000");
        assert!(ipv6.force_path_style);
        assert!(other.force_path_style);
    }

    #[test]
    fn missing_or_misspelled_key_of_oss_secret_is_reported() {
        let secret = |keys: &[&str]| -> SecretData {
            keys.iter()
                .map(|key| ((*key).to_owned(), b"value".to_vec()))
                .collect()
        };
        assert!(keys(&secret(&[KEY_ID, KEY_SECRET])).is_ok());
        let cases = [
            (
                secret(&[KEY_ID]),
                "accessKeySecret: is missing (the Secret has only these keys: accessKeyID)",
            ),
            (secret(&[KEY_SECRET]), "accessKeyID: is missing"),
            (
                secret(&[KEY_ID, KEY_SECRET, "accessKeyId"]),
                "accessKeyId: is an unknown key: rename it to accessKeyID",
            ),
        ];
        for (data, expected) in cases {
            let error = keys(&data).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
