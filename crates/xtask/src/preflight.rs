//! Checks the machine before the testbed starts. Most checks try a feature that the testbed needs, and undo their
//! changes. An error names the remedy.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::packages::{self, Purpose};
use crate::testbed::addresses::IpFamily;
use crate::testbed::cgroup::Cgroups;
use crate::{checkout, progress, shell};

/// Properties of the machine that the configuration of the testbed depends on.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// The snapshotter of containerd: `overlayfs`, or `native` if overlayfs does not work.
    pub(crate) snapshotter: String,
}

/// The minimum free space for the cache, in bytes.
const CACHE_SPACE: u64 = 8 << 30;
/// The minimum free space for the run folder of the testbed, in bytes.
const RUN_SPACE: u64 = 6 << 30;

/// Runs all checks. Fails at once without root, or if a package is missing. Otherwise, the error lists all problems.
pub(crate) fn check(run_folder: &Path, family: IpFamily) -> Result<Found> {
    if !rustix::process::getuid().is_root() {
        bail!(
            "the testbed needs root (namespaces, mounts, control groups). Run it as root (`sudo -E env PATH=\"$PATH\" cargo xtask ...`), \
             or use an existing cluster with `--context NAME`."
        );
    }
    packages::ensure_packages(&[Purpose::Testbed])?;
    let base = run_folder.parent().context("run folder")?;
    fs::create_dir_all(base).with_context(|| format!("cannot create {}", base.display()))?;
    let mut problems = Vec::new();
    let mut note = |result: Result<()>| {
        if let Err(error) = result {
            problems.push(format!("  - {error:#}"));
        }
    };
    note(go());
    note(namespaces());
    note(control_groups());
    note(packet_filter("iptables", "10.0.0.1:1"));
    if family == IpFamily::Ipv6 {
        note(ipv6());
    }
    note(inotify());
    note(place(run_folder, "ETCD_OPERATOR_TESTBED_DIR"));
    note(space(base, RUN_SPACE, "ETCD_OPERATOR_TESTBED_DIR"));
    if let Ok(cache) = checkout::cache() {
        note(place(&cache, "XDG_CACHE_HOME"));
        let _ = fs::create_dir_all(&cache);
        note(space(
            &cache,
            if is_warm(&cache) {
                1 << 30
            } else {
                CACHE_SPACE
            },
            "XDG_CACHE_HOME (and GOCACHE, GOMODCACHE)",
        ));
    }
    if !problems.is_empty() {
        bail!(
            "this machine cannot run the testbed:\n{}\nFix these problems, or use an existing cluster with `--context NAME`.",
            problems.join("\n")
        );
    }
    let snapshotter = if overlay_works(base) {
        "overlayfs"
    } else {
        "native"
    };
    if snapshotter == "native" {
        progress::say(&format!(
            "overlayfs does not work in {}, so images are copied, which is slower. To avoid this, set ETCD_OPERATOR_TESTBED_DIR to a folder on ext4, xfs or tmpfs.",
            base.display()
        ));
    }
    Ok(Found {
        snapshotter: snapshotter.into(),
    })
}

fn go() -> Result<()> {
    let text = shell::output(Command::new("go").args(["env", "GOVERSION"])).context(
        "Go is not installed: install it from https://go.dev/dl/ and add its bin folder to the PATH",
    )?;
    match minor_version(&text) {
        Some(minor) if minor >= 21 => Ok(()),
        _ => bail!(
            "{} is too old: install Go 1.26 from https://go.dev/dl/ (Go 1.21 and later download Go 1.26 themselves)",
            text.trim()
        ),
    }
}

/// The minor version of Go, such as 26 for `go1.26.8`.
fn minor_version(text: &str) -> Option<u32> {
    let rest = text.trim().strip_prefix("go1.")?;
    rest.split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

fn namespaces() -> Result<()> {
    shell::output(Command::new("unshare").args(["--fork", "--pid", "--mount-proc", "--net", "--mount", "--", "true"]))
        .context("cannot create process, network and mount namespaces. In a container: run it privileged (`docker run --privileged`)")?;
    Ok(())
}

fn control_groups() -> Result<()> {
    const REMEDY: &str = "in a container: run it privileged with `--cgroupns=host -v /sys/fs/cgroup:/sys/fs/cgroup:rw`";
    let cgroups = Cgroups::detect().context(REMEDY)?;
    let group = format!("etb-check-{}", std::process::id());
    let made = cgroups.create(&group).context(REMEDY);
    cgroups.remove(&group)?;
    made
}

/// Checks that network namespaces support IPv6, and that the packet filter can translate IPv6 addresses.
fn ipv6() -> Result<()> {
    const DISABLED: &str = "/proc/sys/net/ipv6/conf/default/disable_ipv6";
    const TRY: &str = "echo 0 >/proc/sys/net/ipv6/conf/all/disable_ipv6 && ip link set lo up \
        && ip address add fd65:7462::1/64 dev lo";
    shell::output(Command::new("unshare").args(["--net", "--", "sh", "-euc", TRY])).context(
        "the kernel has no IPv6, or its boot parameters disable it (`ipv6.disable`): use another machine, or `--ip-family ipv4`",
    )?;
    if fs::read_to_string(DISABLED).unwrap_or_default().trim() != "0" {
        bail!(
            "IPv6 is disabled on this machine, so that it cannot reach the testbed: `sysctl -w net.ipv6.conf.default.disable_ipv6=0`, or `--ip-family ipv4`"
        );
    }
    packet_filter("ip6tables", "[fd65:7462::1]:1")
}

/// Tries packet filter rules like those of kube-proxy, in a temporary network namespace.
fn packet_filter(program: &str, target: &str) -> Result<()> {
    let rules = format!(
        "{program} -t nat -N TRY \
        && {program} -t nat -A TRY -m comment --comment x -m conntrack --ctstate NEW -j MARK --or-mark 0x4000 \
        && {program} -t nat -A TRY -m statistic --mode random --probability 0.5 -j RETURN \
        && {program} -t nat -A TRY -m addrtype --dst-type LOCAL -j MASQUERADE \
        && {program} -t nat -A TRY -p tcp -j DNAT --to-destination {target} \
        && ip link add try0 type bridge && ip link add try1 type veth peer name try2"
    );
    // Errors of `modprobe` are ignored, because the kernel may have the module built in. The commands in `rules` fail
    // if a module that they need is missing.
    for module in [
        "br_netfilter",
        "overlay",
        "xt_comment",
        "xt_conntrack",
        "xt_statistic",
        "xt_MASQUERADE",
        "bridge",
        "veth",
    ] {
        let _ = Command::new("modprobe").args(["-q", module]).output();
    }
    shell::output(Command::new("unshare").args(["--net", "--", "sh", "-euc", &rules]))
        .context("the packet filter or virtual links do not work: the kernel needs nf_nat, nf_conntrack, xt_comment, xt_statistic, xt_addrtype, xt_MASQUERADE, bridge, veth (`modprobe NAME`; Debian's kernel has them)")?;
    Ok(())
}

/// Checks the limit of inotify instances. Kubelets and container runtimes need many, so Debian's default of 128 is
/// enough for only two testbeds.
fn inotify() -> Result<()> {
    const FILE: &str = "/proc/sys/fs/inotify/max_user_instances";
    let text = fs::read_to_string(FILE).unwrap_or_default();
    match text.trim().parse::<u32>() {
        Ok(limit) if limit < 64 => {
            bail!("{FILE} is {limit}: raise it with `sysctl -w fs.inotify.max_user_instances=512`")
        }
        _ => Ok(()),
    }
}

/// Rejects a folder below /run or /var/log, because the testbed mounts its own folders at these paths, and these mounts
/// hide the files of the folder.
fn place(folder: &Path, variable: &str) -> Result<()> {
    let covered = ["/run", "/var/run", "/var/log"];
    match covered.iter().find(|above| folder.starts_with(above)) {
        Some(above) => bail!(
            "{} is below {above}, which the testbed hides with its own mount: set {variable} to another folder",
            folder.display()
        ),
        None => Ok(()),
    }
}

fn space(folder: &Path, wanted: u64, variable: &str) -> Result<()> {
    let stat = rustix::fs::statvfs(folder).with_context(|| folder.display().to_string())?;
    let free = stat.f_bavail * stat.f_frsize;
    if free < wanted {
        bail!(
            "{} has {:.1} GiB free, but {:.0} are needed: free some space, or set {variable} to another folder",
            folder.display(),
            gib(free),
            gib(wanted)
        );
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "the number is only displayed")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn is_warm(cache: &Path) -> bool {
    fs::read_dir(cache)
        .into_iter()
        .flatten()
        .flatten()
        .any(|entry| entry.file_name().to_string_lossy().starts_with("kube-"))
}

fn overlay_works(base: &Path) -> bool {
    let dir = base.join(format!("overlay-check-{}", std::process::id()));
    let path = dir.display();
    let script = format!(
        "mkdir -p {path}/lower {path}/upper {path}/work {path}/merged && echo x >{path}/lower/f
         mount -t overlay overlay -o lowerdir={path}/lower,upperdir={path}/upper,workdir={path}/work {path}/merged && rm {path}/merged/f"
    );
    // The mount exists only in the mount namespace of `unshare`, so the kernel removes the mount when the command ends.
    let works =
        shell::output(Command::new("unshare").args(["--mount", "--", "sh", "-euc", &script]))
            .is_ok();
    let _ = fs::remove_dir_all(&dir);
    works
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_version_is_parsed() {
        assert_eq!(minor_version("go1.26.8\n"), Some(26));
        assert_eq!(minor_version("go1.27rc1"), Some(27));
        assert_eq!(minor_version("devel"), None);
    }

    #[test]
    fn folder_below_mount_of_testbed_is_rejected() {
        assert!(place(Path::new("/run/user/0/x"), "X").is_err());
        assert!(place(Path::new("/runner/x"), "X").is_ok());
    }

    #[test]
    fn lack_of_disk_space_is_reported_with_environment_variable_to_set() {
        let dir = tempfile::tempdir().unwrap();
        let error = space(dir.path(), u64::MAX, "SOME_DIR").unwrap_err();
        assert!(error.to_string().contains("SOME_DIR"));
    }
}
