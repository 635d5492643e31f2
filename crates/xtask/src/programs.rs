//! Builds the programs of the testbed from Go modules with pinned versions. Each module is built once, into a cache
//! folder whose name contains a hash of the inputs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::{checkout, progress, shell};

mod azurite;
mod debian;
mod images;
mod kubernetes;
mod tools;

pub(crate) use kubernetes::Kubernetes;
pub(crate) use tools::{CYCLONEDX, cert_manager, cyclonedx, helm, hyperlink, mdbook, olm_validate};
#[cfg(test)]
pub(crate) use tools::{actionlint, etcds, krew, lua, promtool};

/// Part of the hash of each cache folder. Change it when the build procedure changes, so that all programs are built
/// again.
const RECIPE: &str = "2";

/// One `go build` command.
struct Build {
    /// The path of the program in the cache folder. If empty, the program has the name of its package.
    output: &'static str,
    packages: &'static [&'static str],
    /// True if the program needs the C library. Such a program must not be in an image.
    cgo: bool,
    tags: &'static str,
    /// Linker flags with the version of the program. For Kubernetes, see [`Kubernetes::linker_flags`].
    version: &'static str,
}

/// A folder of `e2e/testbed` with a `go.mod`.
struct Module {
    name: &'static str,
    builds: &'static [Build],
}

const PLAIN: Build = Build {
    output: "",
    packages: &[],
    cgo: false,
    tags: "",
    version: "",
};

const HELM_VERSION: &str = "-X helm.sh/helm/v4/internal/version.version=v4.3.1";

const ETCD_ALONE: Build = Build {
    output: "etcd",
    packages: &["."],
    ..PLAIN
};

const ETCD: &[Build] = &[
    ETCD_ALONE,
    Build {
        packages: &["go.etcd.io/etcd/etcdctl/v3", "go.etcd.io/etcd/etcdutl/v3"],
        ..PLAIN
    },
];

/// The Kubernetes module in [`MODULES`]. If the user selects another Kubernetes version, the folder of that version is
/// built in place of this module.
const KUBE: &str = "kube";

/// The module of etcd 3.3.
const COREOS_ETCD: &str = "coreos-etcd-3.3";

const MODULES: &[Module] = &[
    Module {
        name: "node",
        builds: &[
            Build {
                packages: &[
                    "github.com/containerd/containerd/v2/cmd/containerd",
                    "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
                    "github.com/containerd/containerd/v2/cmd/ctr",
                ],
                ..PLAIN
            },
            Build {
                output: "cni/",
                packages: &[
                    "github.com/containernetworking/plugins/plugins/ipam/host-local",
                    "github.com/containernetworking/plugins/plugins/main/bridge",
                    "github.com/containernetworking/plugins/plugins/main/loopback",
                    "github.com/containernetworking/plugins/plugins/meta/portmap",
                ],
                ..PLAIN
            },
            Build {
                packages: &["github.com/opencontainers/runc"],
                cgo: true,
                tags: "seccomp",
                ..PLAIN
            },
        ],
    },
    Module {
        name: KUBE,
        builds: &[Build {
            output: "kube",
            packages: &["."],
            cgo: true,
            ..PLAIN
        }],
    },
    // Tests of updates within a minor release use this older patch release. etcdctl and etcdutl are not built, because
    // no test restores a backup into this release. The name does not begin with `etcd-3`, because tests find the newest
    // patch release of each minor release by this prefix.
    Module {
        name: "etcd-older-3.5",
        builds: &[ETCD_ALONE],
    },
    Module {
        name: "etcd-3.5",
        builds: ETCD,
    },
    Module {
        name: "etcd-3.6",
        builds: ETCD,
    },
    Module {
        name: "etcd-3.7",
        builds: ETCD,
    },
    // Tests of the migration from coreos/etcd-operator use etcd 3.3, which clusters of that operator run. The name does
    // not begin with `etcd-`, so that other tests do not use etcd 3.3. The project does not support this version.
    Module {
        name: COREOS_ETCD,
        builds: &[
            ETCD_ALONE,
            Build {
                packages: &["github.com/coreos/etcd/etcdctl"],
                ..PLAIN
            },
        ],
    },
    Module {
        name: "coredns",
        builds: &[Build {
            output: "coredns",
            packages: &["."],
            ..PLAIN
        }],
    },
    Module {
        name: "versitygw",
        builds: &[Build {
            packages: &["github.com/versity/versitygw/cmd/versitygw"],
            ..PLAIN
        }],
    },
    Module {
        name: "fake-gcs-server",
        builds: &[Build {
            packages: &["github.com/fsouza/fake-gcs-server"],
            ..PLAIN
        }],
    },
    // `linearize` checks with the library porcupine that the operations of `cargo xtask soak` are linearizable.
    Module {
        name: "linearize",
        builds: &[Build {
            output: "linearize",
            packages: &["."],
            ..PLAIN
        }],
    },
    Module {
        name: "helm",
        builds: &[Build {
            packages: &["helm.sh/helm/v4/cmd/helm"],
            version: HELM_VERSION,
            ..PLAIN
        }],
    },
];

/// The names of the links to the Kubernetes binary, which contains all these programs. The name of the link selects the
/// program that the binary runs.
const KUBE_NAMES: &[&str] = &[
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
];

/// The programs and images of the testbed.
#[derive(Debug, Clone)]
pub(crate) struct Programs {
    /// A folder with links to all programs except etcd, for the PATH.
    pub(crate) bin: PathBuf,
    /// The program of the init process of the testbed.
    pub(crate) init: PathBuf,
    /// The etcd program of the control plane.
    pub(crate) etcd: PathBuf,
    /// The image archives for the nodes.
    pub(crate) images: Vec<PathBuf>,
    /// The etcd versions in `images` except etcd 3.3, the oldest first.
    pub(crate) etcd_versions: Vec<String>,
    /// The version of Kubernetes, without a leading `v`.
    pub(crate) kubernetes: String,
}

/// Builds the programs that are not in the cache.
pub(crate) fn ensure(kubernetes: &Kubernetes) -> Result<Programs> {
    let (cache, _lock) = lock()?;
    let go = go_version()?;
    let mut folders = Vec::new();
    for module in MODULES {
        let (name, source, flags) = match module.name {
            KUBE => (
                kubernetes.module.as_str(),
                kubernetes.source(),
                kubernetes.linker_flags(),
            ),
            name => (name, checkout::testbed_sources().join(name), String::new()),
        };
        let key = key(&source, &go)?;
        folders.push((
            module.name,
            cached(&cache, name, &key, |folder| {
                build(module, &flags, &source, folder)
            })?,
        ));
    }
    match azurite::ensure(&cache) {
        Ok(folder) => folders.push(("azurite", folder)),
        Err(error) => progress::say(&format!("continuing without Azurite: {error:#}")),
    }
    match tools::prometheus(&cache) {
        Ok(folder) => folders.push(("prometheus", folder)),
        Err(error) => progress::say(&format!("continuing without Prometheus: {error:#}")),
    }
    let of = |name: &str| -> Result<PathBuf> {
        Ok(folders
            .iter()
            .find(|(known, _)| *known == name)
            .context("unknown module")?
            .1
            .clone())
    };
    let init_source = checkout::testbed_sources().join("init.c");
    let init_key = digest(&[fs::read(&init_source).context("init.c")?.as_slice()]);
    let init = cached(&cache, "init", &init_key, |folder| {
        compile_init(&init_source, folder)
    })?
    .join("testbed-init");
    let etcd_34 = cached(
        &cache,
        "etcd-3.4",
        &digest(&[debian::VERSION.as_bytes()]),
        debian::unpack,
    );
    let bin = link_all(&cache, &folders)?;
    let mut images = vec![images::archive(&cache, "pause", &images::pause(&init))?];
    let mut etcd_versions = Vec::new();
    match etcd_34 {
        Ok(folder) => {
            images.push(images::etcd(&cache, debian::VERSION, &folder)?);
            etcd_versions.push(debian::VERSION.to_owned());
        }
        Err(error) => progress::say(&format!(
            "continuing without the image of etcd {}: {error:#}",
            debian::VERSION
        )),
    }
    for (name, version) in go_etcd_versions()? {
        images.push(images::etcd(&cache, &version, &of(name)?)?);
        etcd_versions.push(version);
    }
    let coreos = go_mod_version(COREOS_ETCD, "github.com/coreos/etcd")?;
    images.push(images::etcd(&cache, &coreos, &of(COREOS_ETCD)?)?);
    Ok(Programs {
        bin,
        init,
        etcd: of("etcd-3.6")?.join("etcd"),
        images,
        etcd_versions,
        kubernetes: kubernetes.version.clone(),
    })
}

/// Locks the cache. While another checkout builds programs, waits for the lock. Afterwards, its programs are in the
/// cache.
fn lock() -> Result<(PathBuf, File)> {
    let cache = checkout::cache()?;
    fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let lock = File::create(cache.join("lock")).context("cache: lock file")?;
    if lock.try_lock().is_err() {
        progress::say("waiting for another checkout, which builds the programs of the testbed");
        lock.lock().context("cache: lock")?;
    }
    Ok((cache, lock))
}

/// The etcd versions with an image on the testbed, the oldest first. Does not contain etcd 3.3, which the project does
/// not support.
pub(crate) fn etcd_versions() -> Result<Vec<String>> {
    let mut versions = vec![debian::VERSION.to_owned()];
    versions.extend(go_etcd_versions()?.into_iter().map(|(_, version)| version));
    Ok(versions)
}

/// The name and the etcd version of each module `etcd-*`. Only the `go.mod` of the module defines the version.
fn go_etcd_versions() -> Result<Vec<(&'static str, String)>> {
    MODULES
        .iter()
        .filter(|module| module.name.starts_with("etcd-"))
        .map(|module| {
            let version = go_mod_version(module.name, "go.etcd.io/etcd/server/v3")?;
            Ok((module.name, version))
        })
        .collect()
}

/// The version of `dependency` in the `go.mod` of a folder of `e2e/testbed`.
fn go_mod_version(folder: &str, dependency: &str) -> Result<String> {
    let path = checkout::testbed_sources().join(folder).join("go.mod");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    required(&text, dependency).with_context(|| path.display().to_string())
}

/// The version of a module that a `go.mod` requires.
fn required(go_mod: &str, module: &str) -> Option<String> {
    go_mod
        .lines()
        .filter_map(|line| line.trim().trim_start_matches("require ").split_once(' '))
        .find(|(name, _)| *name == module)
        .map(|(_, version)| {
            version
                .split_whitespace()
                .next()
                .unwrap_or_default()
                .trim_start_matches('v')
                .trim_end_matches("+incompatible")
                .to_owned()
        })
}

/// Returns the cache folder `NAME-KEY`. If it does not exist, `make` fills a temporary folder, which is then renamed.
fn cached(
    cache: &Path,
    name: &str,
    key: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let folder = cache.join(format!("{name}-{}", &key[..16]));
    if folder.is_dir() {
        return Ok(folder);
    }
    let temporary = cache.join(format!("{name}.new"));
    let _ = fs::remove_dir_all(&temporary);
    fs::create_dir_all(&temporary).with_context(|| temporary.display().to_string())?;
    progress::step(&format!("building {name}"), || make(&temporary))?;
    fs::rename(&temporary, &folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}

fn build(module: &Module, flags: &str, source: &Path, folder: &Path) -> Result<()> {
    for build in module.builds {
        let mut go = Command::new("go");
        go.current_dir(source)
            .args(["build", "-mod=readonly", "-trimpath", "-buildvcs=false"]);
        go.arg(format!("-ldflags=-s -w {}{flags}", build.version));
        if !build.tags.is_empty() {
            go.arg(format!("-tags={}", build.tags));
        }
        let output = if build.output.is_empty() {
            format!("{}/", folder.display())
        } else {
            format!("{}/{}", folder.display(), build.output)
        };
        go.arg("-o").arg(output).args(build.packages);
        go.env("CGO_ENABLED", if build.cgo { "1" } else { "0" })
            .env_remove("GOFLAGS")
            .env("GOWORK", "off");
        shell::output(&mut go)?;
    }
    Ok(())
}

fn go_version() -> Result<String> {
    // The command runs in the folder of the module `node`, because the `go.mod` of a module can select another version
    // of Go.
    let folder = checkout::testbed_sources().join("node");
    let text = shell::output(Command::new("go").args(["env", "GOVERSION"]).current_dir(folder))
        .context("Go is missing or too old: install Go 1.21 or later from https://go.dev/dl/ (on Debian: `apt-get install golang-go`)")?;
    Ok(text.trim().to_owned())
}

fn key(source: &Path, go: &str) -> Result<String> {
    let mut files: Vec<PathBuf> = fs::read_dir(source)
        .with_context(|| source.display().to_string())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    let mut parts = vec![RECIPE.as_bytes().to_vec(), go.as_bytes().to_vec()];
    for file in files {
        parts.push(
            file.file_name()
                .unwrap_or_default()
                .as_encoded_bytes()
                .to_vec(),
        );
        parts.push(fs::read(&file).with_context(|| file.display().to_string())?);
    }
    Ok(digest(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>()))
}

fn digest(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    hex::encode(hash.finalize())
}

fn compile_init(source: &Path, folder: &Path) -> Result<()> {
    shell::output(
        Command::new("gcc")
            .args(["-static", "-O2", "-s", "-o"])
            .arg(folder.join("testbed-init"))
            .arg(source),
    )?;
    Ok(())
}

/// Creates a folder with links to all programs except etcd, for the PATH.
fn link_all(cache: &Path, folders: &[(&'static str, PathBuf)]) -> Result<PathBuf> {
    let names: Vec<&[u8]> = folders
        .iter()
        .map(|(_, folder)| folder.as_os_str().as_encoded_bytes())
        .collect();
    let key = digest(&names);
    let folder = cache.join(format!("bin-{}", &key[..16]));
    if folder.is_dir() {
        return Ok(folder);
    }
    let temporary = cache.join("bin.new");
    let _ = fs::remove_dir_all(&temporary);
    fs::create_dir_all(&temporary)?;
    let link = |target: &Path, name: &str| {
        std::os::unix::fs::symlink(target, temporary.join(name))
            .with_context(|| format!("link {name}"))
    };
    for (module, built) in folders {
        match *module {
            KUBE => KUBE_NAMES
                .iter()
                .try_for_each(|name| link(&built.join("kube"), name))?,
            // `etcdctl` and `etcdutl` are built for several etcd releases, but linked only from the newest release.
            "etcd-3.7" => ["etcdctl", "etcdutl"]
                .iter()
                .try_for_each(|name| link(&built.join(name), name))?,
            "azurite" => link(&built.join("serve.js"), "azurite.js")?,
            name if name.starts_with("etcd-") || name == COREOS_ETCD => {}
            _ => {
                for entry in fs::read_dir(built)? {
                    let entry = entry?;
                    link(&entry.path(), &entry.file_name().to_string_lossy())?;
                }
            }
        }
    }
    fs::rename(&temporary, &folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}

#[cfg(test)]
mod tests;
