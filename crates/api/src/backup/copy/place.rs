//! Compares the locations of storage blocks. Performs no I/O.

use crate::storage::{StorageBlock, StorageSource};

/// A cloud whose bucket names are unique in the whole cloud: its domain, and the name of its object storage. All
/// endpoints of this object storage therefore lead to the same bucket.
type Cloud = (&'static str, &'static str);

const S3_CLOUD: Cloud = ("amazonaws.com", "s3");
const GCS_CLOUD: Cloud = ("googleapis.com", "storage");
const OSS_CLOUD: Cloud = ("aliyuncs.com", "oss");

/// Whether two storage blocks have the same location. The spelling of the endpoints does not matter.
pub(super) fn is_same_place(one: &StorageBlock, other: &StorageBlock) -> bool {
    place(one) == place(other)
}

/// The kind of the store, the server, and the path.
fn place(block: &StorageBlock) -> (&'static str, Option<String>, String) {
    let source = block.source();
    let (endpoint, cloud) = match source {
        StorageSource::S3(s3) => (s3.endpoint(), Some(S3_CLOUD)),
        StorageSource::Abs(abs) => (abs.endpoint.as_deref(), None),
        StorageSource::Gcs(gcs) => (gcs.endpoint.as_deref(), Some(GCS_CLOUD)),
        StorageSource::Oss(oss) => (oss.endpoint.as_deref(), Some(OSS_CLOUD)),
        StorageSource::Pvc(_) | StorageSource::Local(_) => (None, None),
    };
    let endpoint = endpoint.filter(|endpoint| !endpoint.is_empty());
    let server = endpoint.and_then(|endpoint| server(endpoint, cloud));
    (source.block(), server, source.path().to_owned())
}

/// Whether the host is an endpoint of the cloud's object storage, such as `s3.eu-west-1.amazonaws.com`. Other hosts in
/// the domain can be servers of users, for example behind a load balancer (`elb`). AWS GovCloud (`us-gov-`) has
/// separate bucket names, so its endpoints are not in the cloud either.
fn is_in(host: &str, (domain, storage): Cloud) -> bool {
    let before = host.strip_suffix(domain);
    let Some(before) = before.and_then(|before| before.strip_suffix('.')) else {
        return false;
    };
    let is_storage = |label: &str| {
        let rest = label.strip_prefix(storage);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    let is_other = |label: &str| label == "elb" || label.starts_with("us-gov-");
    before.split('.').any(is_storage) && !before.split('.').any(is_other)
}

/// The host, the port and the path of an endpoint, in lower case except the path. `None` for an endpoint of this cloud,
/// which is also the default endpoint.
fn server(endpoint: &str, cloud: Option<Cloud>) -> Option<String> {
    let endpoint = endpoint.trim();
    // An endpoint of OSS may have no scheme, which means HTTPS.
    let (scheme, rest) = endpoint.split_once("://").unwrap_or(("https", endpoint));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let authority = authority.to_ascii_lowercase();
    // The last colon may be inside of an IPv6 address in brackets. The text after this colon is then not a number, so
    // the endpoint has no port.
    let port = authority.rsplit_once(':').and_then(|(host, port)| {
        let port = if port.is_empty() {
            None
        } else {
            Some(port.parse::<u16>().ok()?)
        };
        Some((host, port))
    });
    let (host, port) = port.unwrap_or((authority.as_str(), None));
    let host = host.strip_suffix('.').unwrap_or(host);
    if cloud.is_some_and(|cloud| is_in(host, cloud)) {
        return None;
    }
    // The scheme only selects the default port. The result omits the scheme, because a port serves either HTTP or
    // HTTPS.
    let default = if scheme.eq_ignore_ascii_case("http") {
        80
    } else {
        443
    };
    let (port, path) = (port.unwrap_or(default), path.trim_end_matches('/'));
    Some(format!("{host}:{port}/{path}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn s3(endpoint: &str) -> StorageBlock {
        let block = json!({ "s3": { "path": "bucket/etcd/b", "endpoint": endpoint } });
        serde_json::from_value(block).unwrap()
    }

    #[test]
    fn equivalent_endpoints_are_the_same_place() {
        for (one, other) in [
            ("https://s3.example", "HTTPS://S3.Example"),
            ("https://s3.example", "https://s3.example/"),
            ("https://s3.example", "https://s3.example:443"),
            ("https://s3.example", "https://s3.example:"),
            ("https://s3.example", "https://s3.example.//"),
            ("https://s3.example", "s3.example"),
            ("http://s3.example", "http://s3.example:80/"),
            ("http://s3.example:9000", "https://s3.example:9000"),
            ("http://s3.example:9000", "S3.example:9000"),
            ("http://[fd00::1]", "http://[FD00::1]:80/"),
            ("https://s3.example/path", "https://s3.example/path/"),
            ("", "https://s3.amazonaws.com"),
            ("", "https://s3.eu-west-1.amazonaws.com:443/"),
            ("", "https://s3-fips.dualstack.us-east-1.amazonaws.com"),
        ] {
            assert!(is_same_place(&s3(one), &s3(other)), "{one} {other}");
        }
    }

    #[test]
    fn different_host_port_or_path_is_a_different_place() {
        for (one, other) in [
            ("https://s3.example", "https://other.example"),
            ("https://s3.example", "https://s3.example:9000"),
            ("http://s3.example:9000", "http://s3.example:9001"),
            ("http://[fd00::1]", "http://[fd00::2]"),
            ("https://s3.example/path", "https://s3.example/PATH"),
            ("", "https://s3.example"),
            ("", "https://myamazonaws.com"),
            ("", "https://s3.myamazonaws.com"),
            ("", "https://minio-1.elb.eu-west-1.amazonaws.com"),
            ("", "https://s3-1.elb.eu-west-1.amazonaws.com"),
            ("", "http://ec2-1-2-3-4.compute.amazonaws.com:9000"),
            ("", "https://s3.us-gov-west-1.amazonaws.com"),
        ] {
            assert!(!is_same_place(&s3(one), &s3(other)), "{one} {other}");
        }
    }

    #[test]
    fn missing_endpoint_equals_default_endpoint_of_cloud() {
        let block = |kind: &str, endpoint: Option<&str>| -> StorageBlock {
            let mut block = json!({ kind: { "path": "bucket/etcd/b" } });
            block[kind]["endpoint"] = json!(endpoint);
            serde_json::from_value(block).unwrap()
        };
        for (kind, endpoint) in [
            ("gcs", "https://storage.googleapis.com"),
            ("oss", "oss-cn-hangzhou.aliyuncs.com"),
            ("oss", "https://cn-hangzhou.oss.aliyuncs.com"),
            ("oss", "https://s3.oss-cn-hangzhou-internal.aliyuncs.com/"),
        ] {
            let (default, named) = (block(kind, None), block(kind, Some(endpoint)));
            assert!(is_same_place(&default, &named), "{endpoint}");
        }
        let (one, other) = (block("gcs", None), block("oss", None));
        assert!(!is_same_place(&one, &other));
    }
}
