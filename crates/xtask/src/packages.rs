//! The Debian packages the commands need: installs what is missing where that
//! can be done, and otherwise says how.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{progress, shell};

/// A program or file that tells that a package is there.
struct Need {
    package: &'static str,
    /// Found on the PATH, or as a file if it begins with a slash; any of them is enough.
    evidence: &'static [&'static str],
}

const BUILD: &[Need] = &[
    // For etcd-client's build script.
    Need {
        package: "protobuf-compiler",
        evidence: &["protoc"],
    },
    // The definitions it imports: only recommended by the package of the compiler.
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

/// What a command is going to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Compile the operators.
    Build,
    /// Build and run the testbed.
    Testbed,
}

/// Makes sure that the packages for `purposes` are there.
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
            "missing on this machine, under their Debian names: {}. Install what your system calls them.",
            missing.join(", ")
        );
    }
    if !rustix::process::getuid().is_root() {
        bail!(
            "missing on this machine: {}. Install with\n    sudo sh -c '{command}'",
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
    .with_context(|| format!("install by hand with\n    {command}"))?;
    Ok(())
}

fn missing(purposes: &[Purpose], there: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let mut missing: Vec<&'static str> = purposes
        .iter()
        .flat_map(|purpose| match purpose {
            Purpose::Build => BUILD,
            Purpose::Testbed => TESTBED,
        })
        .filter(|need| !need.evidence.iter().any(|evidence| there(evidence)))
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
    fn a_package_two_purposes_need_is_named_once() {
        let all = missing(&[Purpose::Build, Purpose::Testbed], |_| false);
        assert_eq!(all.iter().filter(|name| **name == "gcc").count(), 1);
        assert!(all.contains(&"protobuf-compiler") && all.contains(&"libseccomp-dev"));
    }

    #[test]
    fn nothing_is_missing_where_all_is_there() {
        assert!(missing(&[Purpose::Build, Purpose::Testbed], |_| true).is_empty());
    }
}
