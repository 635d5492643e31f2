//! etcd 3.4 from Debian packages, which are unpacked into the cache and not installed.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::shell;

/// The etcd version of the Debian packages. Other versions are built from Go modules.
pub(super) const VERSION: &str = "3.4.23";

/// Debian's package pool, which is used if apt does not offer this version.
const POOL: &str = "http://deb.debian.org/debian/pool/main/e/etcd";
/// The packages: name, file in the pool, and SHA-256.
const PACKAGES: &[(&str, &str, &str)] = &[
    (
        "etcd-server",
        "etcd-server_3.4.23-4+b4_amd64.deb",
        "3a9445d4560ad6de1c375756b2a17d97713df44cbd20a658c871fe108af7ef5d",
    ),
    (
        "etcd-client",
        "etcd-client_3.4.23-4+b4_amd64.deb",
        "db3a484d5d924b50bf71f459ee544ecd7b11c25dc2f6becc0c50352d67299cc8",
    ),
];

/// Downloads and unpacks the packages, and copies their programs to `folder`.
pub(super) fn unpack(folder: &Path) -> Result<()> {
    let download = folder.join("download");
    fs::create_dir_all(&download)?;
    for (package, file, sum) in PACKAGES {
        download_package(package, file, sum, &download)?;
    }
    for entry in fs::read_dir(&download)? {
        shell::output(
            Command::new("dpkg-deb")
                .arg("-x")
                .arg(entry?.path())
                .arg(&download),
        )?;
    }
    for program in ["etcd", "etcdctl"] {
        fs::copy(download.join("usr/bin").join(program), folder.join(program)).context(program)?;
    }
    fs::remove_dir_all(&download)?;
    Ok(())
}

/// Downloads a package with apt, which verifies it. If apt does not offer the version, downloads it from the pool and
/// verifies its SHA-256.
fn download_package(package: &str, file: &str, sum: &str, folder: &Path) -> Result<()> {
    let wanted = format!("{package}={VERSION}*");
    let mut apt = Command::new("apt-get");
    apt.args(["download", "-o", "APT::Sandbox::User=root", &wanted])
        .current_dir(folder);
    if shell::output(&mut apt).is_ok() {
        return Ok(());
    }
    let url = format!("{POOL}/{file}");
    let path = folder.join(file);
    let mut curl = Command::new("curl");
    curl.args(["-fsSL", "-o"]).arg(&path).arg(&url);
    let mut wget = Command::new("wget");
    wget.args(["-q", "-O"]).arg(&path).arg(&url);
    shell::output(&mut curl)
        .or_else(|_| shell::output(&mut wget))
        .with_context(|| format!("cannot download {package} {VERSION} with apt (`apt-get update` may help) or from {url}"))?;
    let found = hex::encode(Sha256::digest(fs::read(&path)?));
    if found != sum {
        bail!("{url}: SHA-256 is {found}, not {sum}");
    }
    Ok(())
}
