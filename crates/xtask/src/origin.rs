//! The version, the commit and the source repository of an image or a release, from git.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{checkout, shell};

pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version, commit and source repository for the labels of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) version: String,
    /// The commit, with the suffix `-modified` if files of the checkout differ from it.
    pub(crate) revision: Option<String>,
    /// The URL of the source repository.
    pub(crate) source: Option<String>,
    /// The time of the commit, in the format of RFC 3339.
    pub(crate) created: Option<String>,
}

impl Origin {
    /// The origin for images of `demo` and `test`. It has no commit, so the image changes only if its program changes.
    pub(crate) fn unreleased() -> Self {
        Self {
            version: VERSION.to_owned(),
            revision: None,
            source: None,
            created: None,
        }
    }

    /// The origin of the checkout. The URL of the source repository is `source`. If `source` is `None`, it is the URL
    /// of the git remote `origin`, if that URL is public.
    pub(crate) fn of_checkout(version: &str, source: Option<&str>) -> Result<Self> {
        let mut revision = git(&["rev-parse", "HEAD"])?;
        if is_modified()? {
            revision.push_str("-modified");
        }
        let remote = git(&["config", "--get", "remote.origin.url"]).ok();
        let source = source
            .map(str::to_owned)
            .or_else(|| public_address(&remote?));
        Ok(Self {
            version: version.to_owned(),
            revision: Some(revision),
            source,
            created: Some(git(&[
                "log",
                "-1",
                "--date=format-local:%Y-%m-%dT%H:%M:%SZ",
                "--format=%cd",
            ])?),
        })
    }

    /// The image labels that the Open Container Initiative (OCI) defines.
    pub(crate) fn labels(&self) -> Vec<(String, String)> {
        let label = |name: &str, value: Option<&String>| {
            Some((format!("org.opencontainers.image.{name}"), value?.clone()))
        };
        let title = "etcd-operator".to_owned();
        let licenses = "Apache-2.0".to_owned();
        [
            label("title", Some(&title)),
            label("licenses", Some(&licenses)),
            label("version", Some(&self.version)),
            label("revision", self.revision.as_ref()),
            label("source", self.source.as_ref()),
            label("created", self.created.as_ref()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// True if files of the checkout differ from the current commit, or are not in it.
pub(crate) fn is_modified() -> Result<bool> {
    Ok(!git(&["status", "--porcelain"])?.is_empty())
}

/// The URL of a git remote. `None` if it is not an `https` URL, or if it contains credentials.
fn public_address(remote: &str) -> Option<String> {
    let is_public = remote.starts_with("https://") && !remote.contains('@');
    is_public.then(|| remote.trim_end_matches(".git").to_owned())
}

/// Rejects every version except the version of the workspace, because programs and CRDs contain the version of the
/// workspace. A pre-release suffix is allowed.
pub(crate) fn check_version(version: &str) -> Result<()> {
    let is_suffix = |suffix: &str| {
        let text = suffix.strip_prefix('-').unwrap_or_default();
        text.split('.').all(|part| {
            !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
        })
    };
    match version.strip_prefix(VERSION) {
        Some(rest) if rest.is_empty() || is_suffix(rest) => Ok(()),
        _ => bail!(
            "--version {version} does not match the workspace: use {VERSION} or {VERSION}-SUFFIX, or change workspace.package.version in Cargo.toml first"
        ),
    }
}

/// Runs git in the checkout, with times in UTC.
pub(crate) fn git(args: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    command
        .args(args)
        .current_dir(checkout::root())
        .env("TZ", "UTC");
    let text = shell::output(&mut command)
        .context("this command needs git and a checkout of the repository")?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_image_has_opencontainers_labels() {
        let origin = Origin::of_checkout("0.1.0-rc.1", Some("https://example.com/x")).unwrap();
        let labels = origin.labels();
        let value = |name: &str| {
            let name = format!("org.opencontainers.image.{name}");
            let found = labels.iter().find(|(label, _)| *label == name);
            found.map(|(_, value)| value.as_str()).unwrap_or_default()
        };
        assert_eq!(value("title"), "etcd-operator");
        assert_eq!(value("version"), "0.1.0-rc.1");
        assert_eq!(value("licenses"), "Apache-2.0");
        assert_eq!(value("source"), "https://example.com/x");
        assert_eq!(value("revision").trim_end_matches("-modified").len(), 40);
        assert!(value("created").ends_with('Z'), "{labels:?}");
    }

    #[test]
    fn unreleased_image_has_no_commit_label() {
        let labels = Origin::unreleased().labels();
        assert!(labels.iter().all(|(name, _)| !name.ends_with("revision")));
    }

    #[test]
    fn only_public_url_of_git_remote_is_published() {
        assert_eq!(
            public_address("https://example.com/a/b.git").as_deref(),
            Some("https://example.com/a/b")
        );
        for remote in ["https://user:token@example.com/a/b", "/srv/b", "git@x:b"] {
            assert_eq!(public_address(remote), None);
        }
    }

    #[test]
    fn release_version_must_match_workspace_version() {
        for good in [VERSION.to_owned(), format!("{VERSION}-rc.1")] {
            check_version(&good).unwrap();
        }
        for bad in [
            "",
            "9.9.9",
            "v1",
            &format!("{VERSION}.1"),
            &format!("{VERSION}-"),
            &format!("{VERSION}+x"),
        ] {
            let error = check_version(bad).unwrap_err().to_string();
            assert!(error.contains("workspace.package.version"), "{error}");
        }
    }
}
