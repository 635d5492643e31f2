//! The Debian packages that the commands need. Installs missing packages. If this is not possible, the error contains
//! the command that installs them.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{progress, shell};

/// A Debian package, and files that show that it is installed.
struct Need {
    package: &'static str,
    /// Names of programs on the PATH, or absolute paths of files. If one exists, the package is installed.
    evidence: &'static [&'static str],
}

const BUILD: &[Need] = &[
    // The build script of the crate etcd-client runs the protobuf compiler.
    Need {
        package: "protobuf-compiler",
        evidence: &["protoc"],
    },
    // The build script of the crate etcd-client reads these protobuf definitions, which are not part of the package
    // protobuf-compiler.
    Need {
        package: "libprotobuf-dev",
        evidence: &[
            "/usr/include/google/protobuf/descriptor.proto",
            "/usr/local/include/google/protobuf/descriptor.proto",
        ],
    },
    Need {
        package: "gcc",
        evidence: &["gcc"],
    },
];

const TESTBED: &[Need] = &[
    Need {
        package: "gcc",
        evidence: &["gcc"],
    },
    Need {
        package: "libc6-dev",
        evidence: &["/usr/include/stdlib.h"],
    },
    Need {
        package: "pkg-config",
        evidence: &["pkg-config"],
    },
    Need {
        package: "libseccomp-dev",
        evidence: &["/usr/include/seccomp.h"],
    },
    Need {
        package: "iptables",
        evidence: &["iptables"],
    },
    Need {
        package: "conntrack",
        evidence: &["conntrack"],
    },
    Need {
        package: "iproute2",
        evidence: &["ip"],
    },
    Need {
        package: "socat",
        evidence: &["socat"],
    },
    Need {
        package: "util-linux",
        evidence: &["nsenter"],
    },
];

/// The purpose of packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To compile the operators.
    Build,
    /// To build and run the testbed.
    Testbed,
}

/// Installs the missing packages for `purposes`.
pub(crate) fn ensure_packages(purposes: &[Purpose]) -> Result<()> {
    let missing = missing(purposes, |evidence| {
        if evidence.starts_with('/') {
            std::path::Path::new(evidence).exists()
        } else {
            shell::which(evidence).is_some()
        }
    });
    if missing.is_empty() {
        return Ok(());
    }
    let command = format!(
        "apt-get update && apt-get install -y --no-install-recommends {}",
        missing.join(" ")
    );
    if shell::which("apt-get").is_none() {
        bail!(
            "these packages are missing (Debian names): {}. Install the corresponding packages of your distribution.",
            missing.join(", ")
        );
    }
    if !rustix::process::getuid().is_root() {
        bail!(
            "these packages are missing: {}. Install them with\n    sudo sh -c '{command}'",
            missing.join(", ")
        );
    }
    progress::step(&format!("installing {}", missing.join(", ")), || {
        shell::output(Command::new("apt-get").arg("update"))?;
        shell::output(
            Command::new("apt-get")
                .args(["install", "-y", "--no-install-recommends"])
                .args(&missing)
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )
    })
    .with_context(|| format!("install them manually with\n    {command}"))?;
    Ok(())
}

fn missing(purposes: &[Purpose], exists: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let mut missing: Vec<&'static str> = purposes
        .iter()
        .flat_map(|purpose| match purpose {
            Purpose::Build => BUILD,
            Purpose::Testbed => TESTBED,
        })
        .filter(|need| !need.evidence.iter().any(|evidence| exists(evidence)))
        .map(|need| need.package)
        .collect();
    missing.sort_unstable();
    missing.dedup();
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_needed_for_build_and_testbed_is_listed_once() {
        let all = missing(&[Purpose::Build, Purpose::Testbed], |_| false);
        assert_eq!(all.iter().filter(|name| **name == "gcc").count(), 1);
        assert!(all.contains(&"protobuf-compiler") && all.contains(&"libseccomp-dev"));
    }

    #[test]
    fn no_package_is_reported_missing_if_all_exist() {
        assert!(missing(&[Purpose::Build, Purpose::Testbed], |_| true).is_empty());
    }
}
