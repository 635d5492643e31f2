//! The Kubernetes versions of the testbed. Each minor version has its own Go module, whose `go.mod` defines the patch
//! release.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::required;
use crate::checkout;

/// The module of the default version.
const DEFAULT: &str = "kube";
/// The prefix of the modules of all versions except the default. The minor version follows the prefix. The prefix must
/// not begin with `kube-`, because unit tests find the cache folder of the default version by `kube-`.
const OTHERS: &str = "kubernetes-";

/// The Go module of a minor version of Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kubernetes {
    /// The name of the module's folder.
    pub(super) module: String,
    /// The version, such as `1.36.3`.
    pub(crate) version: String,
}

impl Kubernetes {
    /// The version that the testbed has without the option `--kubernetes`.
    pub(crate) fn default_version() -> Result<Self> {
        Self::of_module(DEFAULT)
    }

    /// The module of a version, such as `1.33` or `1.33.13`.
    ///
    /// # Errors
    /// Fails if no module has this version. The error lists the versions.
    pub(crate) fn find(version: &str) -> Result<Self> {
        let all = Self::all()?;
        let wanted = version.trim_start_matches('v');
        let found = all
            .iter()
            .find(|one| one.version == wanted || one.minor() == wanted);
        let Some(found) = found else {
            let known: Vec<&str> = all.iter().map(|one| one.version.as_str()).collect();
            bail!(
                "the testbed has no Kubernetes {version}: use one of {}, or add a version with e2e/testbed/pin-kubernetes.sh",
                known.join(", ")
            )
        };
        Ok(found.clone())
    }

    /// All versions, the oldest first.
    fn all() -> Result<Vec<Self>> {
        let folder = checkout::testbed_sources();
        let mut all = vec![Self::default_version()?];
        for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.starts_with(OTHERS) {
                all.push(Self::of_module(&name)?);
            }
        }
        let number = |part: &str| part.parse::<u32>().unwrap_or_default();
        all.sort_by_key(|one| one.version.split('.').map(number).collect::<Vec<_>>());
        Ok(all)
    }

    fn of_module(module: &str) -> Result<Self> {
        let path = checkout::testbed_sources().join(module).join("go.mod");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let version =
            required(&text, "k8s.io/kubernetes").with_context(|| path.display().to_string())?;
        Ok(Self {
            module: module.to_owned(),
            version,
        })
    }

    /// The minor version, such as `1.36`.
    pub(crate) fn minor(&self) -> &str {
        self.version
            .rsplit_once('.')
            .map_or(&self.version, |(minor, _)| minor)
    }

    /// The folder of the module.
    pub(super) fn source(&self) -> PathBuf {
        checkout::testbed_sources().join(&self.module)
    }

    /// Linker flags that set the version of the program, as in the official build. Charts and clients read it from the
    /// API server.
    pub(super) fn linker_flags(&self) -> String {
        let (version, minor) = (&self.version, self.minor());
        let (major, minor) = minor.split_once('.').unwrap_or((minor, ""));
        format!(
            "-X k8s.io/component-base/version.gitVersion=v{version} -X k8s.io/component-base/version.gitMajor={major} \
             -X k8s.io/component-base/version.gitMinor={minor} -X k8s.io/client-go/pkg/version.gitVersion=v{version}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubernetes_version_is_found_by_minor_or_patch() {
        let default = Kubernetes::default_version().unwrap();
        assert_eq!(Kubernetes::find(&default.version).unwrap(), default);
        assert_eq!(Kubernetes::find(default.minor()).unwrap(), default);
        let oldest = Kubernetes::find("1.33").unwrap();
        assert_eq!(oldest.module, "kubernetes-1.33");
        assert!(oldest.version.starts_with("1.33."), "{oldest:?}");
    }

    #[test]
    fn unknown_kubernetes_version_is_reported_with_known_versions() {
        let error = Kubernetes::find("1.12").unwrap_err().to_string();
        for version in Kubernetes::all().unwrap() {
            assert!(error.contains(&version.version), "{error}");
        }
        assert!(error.contains("pin-kubernetes.sh"), "{error}");
    }

    /// Kubernetes releases its programs only with libraries of the same version.
    #[test]
    fn kubernetes_modules_pin_libraries_of_same_version() {
        for one in Kubernetes::all().unwrap() {
            if let Some(minor) = one.module.strip_prefix(OTHERS) {
                assert_eq!(one.minor(), minor);
            }
            let text = fs::read_to_string(one.source().join("go.mod")).unwrap();
            let libraries = format!("v0.{}", one.version.split_once('.').unwrap().1);
            let replaced: Vec<&str> = text.lines().filter(|line| line.contains(" => ")).collect();
            assert!(replaced.len() > 25, "{one:?}: {}", replaced.len());
            for line in replaced {
                assert!(line.ends_with(&libraries), "{}: {line}", one.module);
            }
        }
    }

    #[test]
    fn kubernetes_linker_flags_contain_version_parts() {
        let one = Kubernetes {
            module: DEFAULT.to_owned(),
            version: "1.33.13".to_owned(),
        };
        let flags = one.linker_flags();
        for part in ["gitVersion=v1.33.13 ", "gitMajor=1 ", "gitMinor=33 "] {
            assert!(flags.contains(part), "{flags}");
        }
    }
}
