//! Tests: names, labels and URLs.

use super::*;

fn addresses(member: MemberAddress, cluster_domain: &str) -> Addresses {
    Addresses {
        namespace: "prod".into(),
        cluster: "main".into(),
        member,
        cluster_domain: cluster_domain.into(),
        peer_tls: false,
        client_tls: true,
    }
}

#[test]
fn member_name_contains_cluster_name() {
    let name = member_name("main-db", [0, 1, 2, 25, 26, 35, 36, 255, 7, 8]);
    assert_eq!(name, "main-db-abcz09adhi");
    assert_eq!(cluster_of_member(&name), Some("main-db"));
    assert!(is_cluster_name(&"x".repeat(52)));
    assert!(member_name(&"x".repeat(52), [0; 10]).len() <= 63);
}

#[test]
fn cluster_name_is_not_read_from_invalid_member_name() {
    for name in [
        "main",
        "main-0000",
        "main-ABCDEFGHIJ",
        "-abcdefghij",
        "1a-abcdefghij",
        "",
    ] {
        assert_eq!(cluster_of_member(name), None, "{name}");
    }
}

#[test]
fn cluster_name_is_dns_1035_label_of_at_most_52_characters() {
    for good in ["a", "a1", "a-b", &"x".repeat(52)] {
        assert!(is_cluster_name(good), "{good}");
    }
    for bad in ["", "1a", "-a", "a-", "A", "a.b", "a_b", &"x".repeat(53)] {
        assert!(!is_cluster_name(bad), "{bad}");
    }
}

#[test]
fn member_urls_depend_on_member_address_and_domain() {
    let service = addresses(MemberAddress::Service, "");
    assert_eq!(service.peer_url("main-x"), "http://main-x.prod.svc:2380");
    assert_eq!(service.client_url("main-x"), "https://main-x.prod.svc:2379");
    assert_eq!(service.service_url(), "https://main-client.prod.svc:2379");
    for domain in [".cluster.local", "cluster.local", "cluster.local."] {
        let pod = addresses(MemberAddress::Pod, domain);
        assert_eq!(
            pod.peer_url("main-x"),
            "http://main-x.main.prod.svc.cluster.local:2380"
        );
    }
    assert_eq!(
        service.initial_cluster(["a", "b"]),
        "a=http://a.prod.svc:2380,b=http://b.prod.svc:2380"
    );
}

#[test]
fn token_label_keeps_the_end_of_a_long_cluster_token() {
    assert_eq!(token_label("db-00ff"), "db-00ff");
    let long = format!("{}-0123456789abcdef", "x".repeat(52));
    assert_eq!(token_label(&long).len(), 63);
    assert!(token_label(&long).ends_with("-0123456789abcdef"));
    let dashed = format!("{}-0123456789abcdef", "-".repeat(52));
    assert_eq!(token_label(&dashed), "0123456789abcdef");
}

#[test]
fn client_url_at_ip_address_has_ipv6_brackets_and_tls_host_name() {
    let addresses = addresses(MemberAddress::Service, "");
    let plain = Addresses {
        client_tls: false,
        ..addresses.clone()
    };
    let at = |addresses: &Addresses, address: &str| {
        addresses.client_url_at(address.parse().unwrap(), "main-x")
    };
    assert_eq!(at(&plain, "10.0.0.7"), "http://10.0.0.7:2379");
    assert_eq!(at(&plain, "fd00::7"), "http://[fd00::7]:2379");
    // With TLS, `#` and the host name follow, because the certificate contains the host name and not the IP address.
    assert_eq!(
        at(&addresses, "10.0.0.7"),
        "https://10.0.0.7:2379#main-x.prod.svc"
    );
}

#[test]
fn member_name_is_read_from_host_name_in_url() {
    let both = [
        addresses(MemberAddress::Service, ""),
        addresses(MemberAddress::Pod, ".x"),
    ];
    for form in both {
        assert_eq!(member_of_url(&form.peer_url("main-x")), Some("main-x"));
    }
    assert_eq!(member_of_url("http://10.0.0.1:2380"), None);
    assert_eq!(member_of_url("http://[fd00::7]:2380"), None);
    assert_eq!(member_of_url("nonsense"), None);
}

#[test]
fn operator_labels_and_annotations_are_reserved() {
    for key in ["app", "etcd_cluster", "etcd_node", "etcd_x", LABEL_ROLE] {
        assert!(is_reserved_label(key), "{key}");
    }
    assert!(!is_reserved_label("team") && !is_reserved_label("apps"));
    assert!(
        is_reserved_annotation("etcd.version") && is_reserved_annotation(ANNOTATION_CLUSTER_ID)
    );
    assert!(!is_reserved_annotation("prometheus.io/scrape"));
}
