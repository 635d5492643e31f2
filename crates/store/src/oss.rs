//! Alibaba Cloud OSS, which is reached over its S3 endpoint by [`crate::S3Store`]: where that is, and the form of
//! the Secret. No I/O here.

use crate::port::Error;
use crate::s3::S3Keys;
use crate::secret;
use crate::secret::SecretData;

/// Where OSS is when nobody says so, as `EtcdBackup` documents it.
const DEFAULT_ENDPOINT: &str = "https://oss-cn-hangzhou.aliyuncs.com";

/// The domain of OSS itself; anything else is a proxy or another store.
const DOMAIN: &str = ".aliyuncs.com";

/// The keys of the Secret.
const KEY_ID: &str = "accessKeyID";
const KEY_SECRET: &str = "accessKeySecret";

/// How S3's protocol reaches OSS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) endpoint: String,
    pub(crate) region: Option<String>,
    pub(crate) force_path_style: bool,
}

/// OSS speaks S3's protocol at `s3.oss-<region>.aliyuncs.com`, with the bucket in the host name only
/// (<https://www.alibabacloud.com/help/en/oss/developer-reference/use-aws-sdks-to-access-oss>). Users give
/// the endpoint of v1beta2, `oss-<region>.aliyuncs.com`, with or without a scheme.
pub(crate) fn place(endpoint: Option<&str>) -> Place {
    let given = endpoint
        .filter(|endpoint| !endpoint.is_empty())
        .unwrap_or(DEFAULT_ENDPOINT);
    let (scheme, host) = given.split_once("://").unwrap_or(("https", given));
    let host = host.trim_end_matches('/');
    let Some(name) = host.strip_suffix(DOMAIN) else {
        return Place {
            endpoint: format!("{scheme}://{host}"),
            region: None,
            force_path_style: true,
        };
    };
    let name = name.strip_prefix("s3.").unwrap_or(name);
    let region = name.strip_prefix("oss-").unwrap_or(name);
    let region = region.strip_suffix("-internal").unwrap_or(region);
    Place {
        endpoint: format!("{scheme}://s3.{name}{DOMAIN}"),
        region: Some(region.to_owned()),
        force_path_style: false,
    }
}

/// The Secret's keys `accessKeyID` and `accessKeySecret`, as v1beta2 defines them.
pub(crate) fn keys(data: &SecretData) -> Result<S3Keys, Error> {
    secret::spelt(data, &[KEY_ID, KEY_SECRET])?;
    let id = secret::text(data, KEY_ID, "add the AccessKey's ID under this key")?;
    let key = secret::text(
        data,
        KEY_SECRET,
        "add the AccessKey's secret under this key",
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

    /// OSS answers `SecondLevelDomainForbidden` to a bucket in the path. Only the bucket's own host leads to the server
    /// here, which finds the bucket in it and checks the signature with it.
    #[tokio::test]
    async fn requests_to_oss_carry_the_bucket_in_the_host_and_are_signed_for_it() {
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
        let store = S3Store::elsewhere(config, &host, address.parse().unwrap())
            .await
            .unwrap();

        // All that a backup, a restore and a removal ask for; the name is one of a periodic backup.
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
    fn the_endpoints_of_v1beta2_become_those_that_speak_s3() {
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
            let expected = Place {
                endpoint: endpoint.to_owned(),
                region: Some(region.to_owned()),
                force_path_style: false,
            };
            assert_eq!(place(given), expected, "{given:?}");
        }
        let elsewhere = place(Some("http://127.0.0.1:9000"));
        assert_eq!(elsewhere.endpoint, "http://127.0.0.1:9000");
        assert!(elsewhere.force_path_style);
    }

    #[test]
    fn says_which_key_of_the_secret_is_missing_or_unknown() {
        let secret = |keys: &[&str]| -> SecretData {
            keys.iter()
                .map(|key| ((*key).to_owned(), b"value".to_vec()))
                .collect()
        };
        assert!(keys(&secret(&[KEY_ID, KEY_SECRET])).is_ok());
        let cases = [
            (
                secret(&[KEY_ID]),
                "accessKeySecret: is missing (it has accessKeyID)",
            ),
            (secret(&[KEY_SECRET]), "accessKeyID: is missing"),
            (
                secret(&[KEY_ID, KEY_SECRET, "accessKeyId"]),
                "accessKeyId: is not known: call it accessKeyID",
            ),
        ];
        for (data, expected) in cases {
            let error = keys(&data).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
