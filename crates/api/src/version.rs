//! Versions of etcd: parsing, support, and features.

pub mod path;

use std::fmt;

use thiserror::Error;

/// The default of `spec.version`: the newest release that the project tests.
pub const DEFAULT_VERSION: &str = "3.7.3";
/// The default of `spec.repository`.
pub const DEFAULT_REPOSITORY: &str = "quay.io/coreos/etcd";

const OLDEST_SUPPORTED: (u64, u64) = (3, 4);
const NEWEST_SUPPORTED: (u64, u64) = (3, 7);

/// A version of etcd.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EtcdVersion(semver::Version);

/// The error for a text that is not a version.
#[derive(Debug, Error)]
#[error("{text:?} is not a version such as 3.6.16")]
pub struct VersionError {
    text: String,
    #[source]
    source: semver::Error,
}

/// Whether the project tests a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// The project tests this minor release.
    Tested,
    /// The version is older than the tested releases. For example, manifests of coreos/etcd-operator contain 3.2.13.
    Older,
    /// The version is newer than the tested releases.
    Newer,
}

impl EtcdVersion {
    /// Parses a version. Ignores all leading `v`, like coreos/etcd-operator.
    ///
    /// # Errors
    /// Fails if the text is not a semantic version.
    pub fn parse(text: &str) -> Result<Self, VersionError> {
        semver::Version::parse(text.trim_start_matches('v'))
            .map(Self)
            .map_err(|source| VersionError {
                text: text.to_owned(),
                source,
            })
    }

    /// The version with these numbers.
    pub fn release(major: u64, minor: u64, patch: u64) -> Self {
        Self(semver::Version::new(major, minor, patch))
    }

    /// The major and the minor number.
    pub fn minor(&self) -> (u64, u64) {
        (self.0.major, self.0.minor)
    }

    /// The parsed version: major, minor, patch and pre-release.
    pub fn semver(&self) -> &semver::Version {
        &self.0
    }

    /// Compares the version with the minor releases that the project tests.
    pub fn support(&self) -> Support {
        match self.minor() {
            minor if minor < OLDEST_SUPPORTED => Support::Older,
            minor if minor > NEWEST_SUPPORTED => Support::Newer,
            _ => Support::Tested,
        }
    }

    /// True if members can join as learners (since 3.4).
    pub fn has_learners(&self) -> bool {
        self.minor() >= (3, 4)
    }

    /// True if the flag `--peer-skip-client-san-verification` has no prefix `experimental-` (since 3.6).
    pub fn has_stable_flag_names(&self) -> bool {
        self.minor() >= (3, 6)
    }

    /// True if the image has `etcdutl` (since 3.5). Older images have only `etcdctl`.
    pub fn has_etcdutl(&self) -> bool {
        self.minor() >= (3, 5)
    }

    /// True if etcd serves `/readyz` and `/livez` (since 3.4.29, 3.5.11 and 3.6). Older releases serve only `/health`.
    pub fn has_readyz(&self) -> bool {
        let patch = self.0.patch;
        match self.minor() {
            (3, 4) => patch >= 29,
            (3, 5) => patch >= 11,
            minor => minor >= (3, 6),
        }
    }

    /// True if `etcd grpc-proxy` has the flags `--dial-keepalive-time` and `--dial-keepalive-timeout` (since 3.5.13).
    pub fn has_proxy_keepalive(&self) -> bool {
        match self.minor() {
            (3, 5) => self.0.patch >= 13,
            minor => minor >= (3, 6),
        }
    }

    /// The image of this version: `<repository>:v<version>`.
    pub fn image(&self, repository: &str) -> String {
        format!("{repository}:v{self}")
    }
}

impl fmt::Display for EtcdVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> EtcdVersion {
        EtcdVersion::parse(text).unwrap()
    }

    #[test]
    fn leading_v_of_etcd_version_is_optional() {
        assert_eq!(version("v3.6.16"), version("3.6.16"));
        assert_eq!(
            version("3.6.16").image("quay.io/coreos/etcd"),
            "quay.io/coreos/etcd:v3.6.16"
        );
        assert_eq!(version("v3.7.0-rc.0").to_string(), "3.7.0-rc.0");
    }

    #[test]
    fn invalid_etcd_versions_are_rejected() {
        for text in ["", "3.6", "latest", "3.6.x", "v"] {
            assert!(EtcdVersion::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn etcd_versions_compare_numerically() {
        assert!(version("3.5.9") < version("3.5.10"));
        assert!(version("3.7.0-rc.0") < version("3.7.0"));
    }

    #[test]
    fn etcd_3_4_to_3_7_count_as_tested() {
        let cases = [
            ("3.2.13", Support::Older),
            ("3.4.0", Support::Tested),
            (DEFAULT_VERSION, Support::Tested),
            ("3.8.0", Support::Newer),
            ("4.0.0", Support::Newer),
        ];
        for (text, support) in cases {
            assert_eq!(version(text).support(), support, "{text}");
        }
    }

    #[test]
    fn etcd_features_depend_on_version() {
        // The columns: version, learners, stable flag names, etcdutl, `/readyz`.
        let cases = [
            ("3.3.27", false, false, false, false),
            ("3.4.28", true, false, false, false),
            ("3.4.29", true, false, false, true),
            ("3.5.10", true, false, true, false),
            ("3.5.11", true, false, true, true),
            ("3.6.0", true, true, true, true),
            ("3.7.3", true, true, true, true),
        ];
        for (text, learners, stable_names, etcdutl, readyz) in cases {
            let version = version(text);
            assert_eq!(version.has_learners(), learners, "{text}");
            assert_eq!(version.has_stable_flag_names(), stable_names, "{text}");
            assert_eq!(version.has_etcdutl(), etcdutl, "{text}");
            assert_eq!(version.has_readyz(), readyz, "{text}");
        }
    }

    #[test]
    fn proxy_keepalive_exists_since_3_5_13() {
        for (text, expected) in [
            ("3.4.40", false),
            ("3.5.12", false),
            ("3.5.13", true),
            ("3.6.0", true),
            ("3.7.3", true),
        ] {
            assert_eq!(version(text).has_proxy_keepalive(), expected, "{text}");
        }
    }
}
