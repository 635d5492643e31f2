//! Tests of the agent.

mod model;

use super::*;

#[test]
fn base_is_full_at_maximum_number_or_size_of_segments() {
    for (size, expected) in [
        ((0, 0), false),
        ((MAX_SEGMENTS - 1, 99), false),
        ((MAX_SEGMENTS, 0), true),
        ((1, 100), true),
    ] {
        assert_eq!(is_full(size, 100), expected, "{size:?}");
    }
}

#[test]
fn advertised_urls_without_tls_are_ignored_if_endpoints_have_tls() {
    let urls = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
    let advertised = urls("http://a https://b");
    for (endpoint, expected) in [
        ("https://c", "https://b https://c"),
        ("http://c", "http://a https://b http://c"),
    ] {
        let found = all_urls(advertised.iter(), &urls(endpoint));
        assert_eq!(found, urls(expected));
    }
}

#[test]
fn only_store_error_excessive_makes_chain_excessive() {
    let excessive = store::Error::Excessive {
        endpoint: String::new(),
        problem: String::new(),
    };
    assert!(is_excessive(&ReadError::store("k", excessive)));
    let timeout = store::Error::Timeout(String::new());
    assert!(!is_excessive(&ReadError::store("k", timeout)));
}
