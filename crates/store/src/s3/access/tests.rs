//! Tests of the access to S3.

use super::*;

fn secret(entries: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
    entries
        .iter()
        .map(|(key, value)| ((*key).to_owned(), value.as_bytes().to_vec()))
        .collect()
}

const CREDENTIALS: &str = "# a comment\n[other]\naws_access_key_id = WRONG\n\n[default]\r\naws_access_key_id = AKIA\r\naws_secret_access_key=s3cr3t=with=signs\n";

#[test]
fn keys_of_v1beta2_aws_secret_are_read() {
    let config = "[default]\nregion = eu-central-1\ns3 =\n  addressing_style = path\n";
    let keys =
        S3Keys::from_secret(&secret(&[("credentials", CREDENTIALS), ("config", config)])).unwrap();
    assert_eq!(keys.access_key_id, "AKIA");
    assert_eq!(keys.secret_access_key, "s3cr3t=with=signs");
    assert_eq!(keys.region.as_deref(), Some("eu-central-1"));
    let named = S3Keys::from_secret(&secret(&[
        ("credentials", CREDENTIALS),
        ("config", "[profile default]\nregion=x"),
    ]));
    assert_eq!(named.unwrap().region.as_deref(), Some("x"));
}

#[test]
fn invalid_key_of_aws_secret_is_reported_with_remedy() {
    let cases: [(&[(&str, &str)], &str); 4] = [
        (&[], "credentials: is missing"),
        (
            &[("credentials", "[default]\naws_access_key_id = A")],
            "credentials: has no aws_secret_access_key",
        ),
        (
            &[("credentials", "[staging]\naws_access_key_id = A")],
            "credentials: has no aws_access_key_id",
        ),
        (
            &[
                ("credentials", CREDENTIALS),
                ("config", "[default]\nrole_arn = arn:x"),
            ],
            "config: sets role_arn",
        ),
    ];
    for (entries, expected) in cases {
        let error = S3Keys::from_secret(&secret(entries))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let binary = BTreeMap::from([("credentials".to_owned(), vec![0xff, 0xfe])]);
    assert!(S3Keys::from_secret(&binary).is_err());
}

/// Invariant 14: the debug output contains no keys.
#[test]
fn invariant_14_s3_keys_are_not_printed() {
    let keys = S3Keys::from_secret(&secret(&[("credentials", CREDENTIALS)])).unwrap();
    let shown = format!("{:?}", S3Access::Keys(keys));
    assert!(
        !shown.contains("AKIA") && !shown.contains("s3cr3t"),
        "{shown}"
    );
}

#[test]
fn s3_error_messages_name_endpoint_in_use() {
    let keys = S3Access::Keys(S3Keys::new("a", "b"));
    let shown = |access: &S3Access, endpoint: Option<&str>, set: &[(&str, &str)]| {
        let config = S3Config {
            endpoint: endpoint.map(str::to_owned),
            access: access.clone(),
            ..S3Config::default()
        };
        config.endpoint_in(|name| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, url)| (*url).to_owned())
        })
    };
    let general = ("AWS_ENDPOINT_URL", "http://general");
    let own = ("AWS_ENDPOINT_URL_S3", "http://s3");
    for (access, endpoint, set, expected) in [
        (&S3Access::Ambient, None, &[][..], "Amazon S3"),
        (&S3Access::Ambient, None, &[general], "http://general"),
        (&S3Access::Ambient, None, &[general, own], "http://s3"),
        (
            &S3Access::Ambient,
            Some("http://field"),
            &[own],
            "http://field",
        ),
        // With access keys from a Secret, the environment variable for the endpoint has no effect.
        (&keys, None, &[own], "Amazon S3"),
    ] {
        assert_eq!(shown(access, endpoint, set), expected);
    }
}

#[tokio::test]
async fn invalid_s3_configuration_error_contains_field() {
    let good = S3Config {
        bucket: "b".into(),
        endpoint: Some("http://127.0.0.1:1".into()),
        access: S3Access::Keys(S3Keys::new("a", "b")),
        ..S3Config::default()
    };
    assert!(clients(good.clone()).await.is_ok());
    let cases = [
        (
            S3Config {
                bucket: String::new(),
                ..good.clone()
            },
            "path",
        ),
        (
            S3Config {
                endpoint: Some("minio:9000".into()),
                ..good.clone()
            },
            "endpoint",
        ),
        (
            S3Config {
                endpoint: Some("http://".into()),
                ..good.clone()
            },
            "endpoint",
        ),
        (
            S3Config {
                ca: Some(b"nonsense".to_vec()),
                ..good.clone()
            },
            "ca.crt",
        ),
        (
            S3Config {
                ca: Some(
                    b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_vec(),
                ),
                ..good.clone()
            },
            "ca.crt",
        ),
    ];
    for (config, expected) in cases {
        match clients(config).await {
            Err(Error::Invalid { field: name, .. } | Error::Secret { key: name, .. }) => {
                assert_eq!(name, expected);
            }
            other => panic!("{expected}: {}", other.is_ok()),
        }
    }
}
