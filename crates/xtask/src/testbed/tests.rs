//! Tests of the testbed's configuration.

use super::*;

#[test]
fn missing_and_unready_nodes_are_listed() {
    assert_eq!(
        unready(3, "node-0=True node-1=False node-10=True "),
        ["node-1", "node-2"]
    );
    assert!(unready(2, "node-1=True node-0=True ").is_empty());
    assert_eq!(unready(1, ""), ["node-0"]);
}

#[test]
fn running_testbed_is_refused_if_ip_family_or_version_differs() {
    let state = state::tests::state(None);
    let platform = |ip_family, kubernetes: Option<&str>| Platform {
        ip_family,
        kubernetes: kubernetes.map(str::to_owned),
    };
    let minor = state.kubernetes.as_str();
    for same in [
        platform(None, None),
        platform(Some(IpFamily::Ipv4), Some(minor)),
    ] {
        same.check(&state).unwrap();
    }
    let other = platform(Some(IpFamily::Ipv6), Some("1.33"));
    let error = other.check(&state).unwrap_err().to_string();
    for part in [
        "IPv4, not IPv6",
        "Kubernetes 1.36, not 1.33",
        "testbed down",
    ] {
        assert!(error.contains(part), "{error}");
    }
}
