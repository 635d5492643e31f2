//! etcd 3.4 from Debian's packages, unpacked into the cache. Nothing is installed.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::shell;

/// The version of etcd that comes as a Debian package; the other versions are Go modules.
pub(super) const VERSION: &str = "3.4.23";

/// Where its packages are for a machine whose apt does not offer them, with their SHA-256.
const POOL: &str = "http://deb.debian.org/debian/pool/main/e/etcd";
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

/// Debian's packages, unpacked beside each other, with the libraries they are linked with. Nothing is installed.
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

/// Takes a package from apt, which checks it, or from Debian's pool, where we do.
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
        .with_context(|| format!("{package} {VERSION}: neither apt has it (`apt-get update` may help) nor could {url} be fetched"))?;
    let found = hex::encode(Sha256::digest(fs::read(&path)?));
    if found != sum {
        bail!("{url}: SHA-256 is {found}, not {sum}");
    }
    Ok(())
}
