//! The links, addresses and mounts of a testbed. The testbed has a network
//! namespace of its own with a link to the machine: the machine reaches pods,
//! Services, API server and S3 by routes, and keeps its packet filter as it is.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::Testbed;
use super::slot::Slot;
use crate::shell;

/// Where the controller manager's volume provisioner puts its folders; the path is built into it.
const VOLUMES: &str = "/tmp/hostpath_pv";

/// Folders the machine may lack and the namespace covers: made before, removed after if they are empty.
const COVERED: &[&str] = &[VOLUMES, "/var/lib/cni", "/var/lib/kubelet"];

/// What a kubelet would set for the whole machine, with the value it wants to find.
/// Inside, a file with that value lies over each, so the machine's own stay as they are.
const SYSCTLS: &[(&str, &str)] = &[
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Makes links, addresses, routes and mounts.
pub(crate) fn create(testbed: &Testbed) -> Result<()> {
    let slot = testbed.state.slot;
    let (near, far) = slot.uplink();
    let interface = slot.interface();
    let init = testbed.inside.init().pid;
    for folder in COVERED {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {folder}"))?;
    }
    host(&format!(
        "ip link add {interface} type veth peer name uplink netns {init}
         ip address add {near}/30 dev {interface}
         ip link set {interface} up"
    ))?;
    testbed
        .inside
        .script(&inner_links(slot, testbed.state.nodes, far, near))?;
    testbed.inside.script(&mounts(&testbed.run_folder))?;
    host(&format!(
        "ip route add {}/16 via {far} dev {interface}
         ip route add {}/16 via {far} dev {interface}",
        slot.pods(0, 0),
        slot.services(0)
    ))
}

fn inner_links(slot: Slot, nodes: u8, far: std::net::Ipv4Addr, near: std::net::Ipv4Addr) -> String {
    let mut script = format!(
        "ip link set lo up
         ip address add {far}/30 dev uplink
         ip link set uplink up
         ip route add default via {near}
         ip link add cni0 type bridge
         ip address add {}/16 dev cni0
         ip link set cni0 up
         echo 1 >/proc/sys/net/ipv4/ip_forward
         if [ -w /proc/sys/net/bridge/bridge-nf-call-iptables ]; then echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables; fi\n",
        slot.gateway()
    );
    for index in 0..nodes {
        // Writing to a String cannot fail.
        let _ = writeln!(script, "ip address add {}/32 dev cni0", slot.node(index));
    }
    script
}

fn mounts(run_folder: &Path) -> String {
    let run = run_folder.display();
    let mut script = format!(
        "mount --make-rshared /
         mount -t tmpfs -o mode=755 testbed /run
         mkdir -p /run/lock
         mkdir -p {run}/sysctl
         mount --bind {run}/volumes {VOLUMES}
         mount -t tmpfs -o mode=755 testbed /var/lib/cni
         mount -t tmpfs -o mode=755 testbed /var/lib/kubelet
         mount -t tmpfs -o mode=755 testbed /var/log\n"
    );
    for (name, value) in SYSCTLS {
        let file = name.replace('/', ".");
        // Writing to a String cannot fail.
        let _ = writeln!(
            script,
            "if [ -e /proc/sys/{name} ]; then echo {value} >{run}/sysctl/{file}; mount --bind {run}/sysctl/{file} /proc/sys/{name}; fi"
        );
    }
    script
}

/// Removes the folders [`create`] made for the namespace to cover. No other testbed may be up: a folder that is
/// removed takes the mounts on it along, in every namespace.
pub(crate) fn remove_covered() {
    for folder in COVERED {
        // Only if it is empty: it may be the machine's.
        let _ = fs::remove_dir(folder);
    }
}

/// Removes the link, with which the routes go, once the namespace's last process has ended.
pub(crate) fn remove(slot: Slot) -> Result<()> {
    let interface = slot.interface();
    let there = || Path::new("/sys/class/net").join(&interface).exists();
    if there() {
        // The kernel may be removing it at this moment.
        let _ = shell::output(Command::new("ip").args(["link", "delete", &interface]));
    }
    shell::wait_for(
        &format!("the end of network interface {interface}"),
        Duration::from_secs(20),
        || !there(),
    )
}

/// A mount below the run folder would have its content removed with the folder.
pub(crate) fn refuse_mounts_below(run_folder: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let below = mounts_below(&mounts, &run_folder.display().to_string());
    if !below.is_empty() {
        bail!(
            "not removed, because something is mounted in it: {}. Unmount with `umount {}`.",
            below.join(", "),
            below.join(" ")
        );
    }
    Ok(())
}

fn mounts_below<'a>(mounts: &'a str, folder: &str) -> Vec<&'a str> {
    mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .filter(|path| Path::new(path).starts_with(folder))
        .collect()
}

/// Keeps a client from asking a proxy for an address of this machine.
pub(crate) fn without_proxy(command: &mut Command) {
    for name in [
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ] {
        command.env_remove(name);
    }
}

fn host(script: &str) -> Result<()> {
    shell::output(Command::new("sh").args(["-euc", script]))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_below_the_folder_count() {
        let mounts = "a /var/tmp/x/1/y ext4 rw 0 0\nb /var/tmp/x/12 ext4 rw 0 0\nc /var/tmp/x/1 ext4 rw 0 0\n";
        assert_eq!(
            mounts_below(mounts, "/var/tmp/x/1"),
            ["/var/tmp/x/1/y", "/var/tmp/x/1"]
        );
    }

    #[test]
    fn each_node_gets_an_address() {
        let slot = Slot(2);
        let script = inner_links(slot, 3, slot.uplink().1, slot.uplink().0);
        for address in [
            "10.90.0.1/16",
            "10.90.0.10/32",
            "10.90.0.12/32",
            "default via 10.120.2.1",
        ] {
            assert!(script.contains(address), "{address}: {script}");
        }
    }
}
