//! The network links, IP addresses and mounts of a testbed. A link connects the network namespace of the testbed to
//! the host. The host has routes over this link to the pods, the Services, the API server and S3. The packet filter of
//! the host is not changed.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::Testbed;
use super::addresses::{Addresses, IpFamily, Slot};
use crate::shell;

/// The folder in which the controller manager creates volumes. The path is not configurable.
const VOLUMES: &str = "/tmp/hostpath_pv";

/// Paths at which the namespace mounts folders of the testbed. If the host lacks such a path, the path is created
/// before the mount, and removed later if it is empty.
const COVERED: &[&str] = &[VOLUMES, "/var/lib/cni", "/var/lib/kubelet"];

/// Sysctls of the whole host that a kubelet sets, with their values. In the namespace, a file with the value is
/// mounted over each sysctl, so that the host keeps its values.
const SYSCTLS: &[(&str, &str)] = &[
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// The MAC address of the bridge `cni0`. The kernel never changes a MAC address that is set explicitly.
///
/// Without an explicit MAC address, the bridge has the lowest MAC address of its ports, which changes when pods start
/// and end. Packets that a pod sends to the old MAC address are lost.
/// - With IPv4, the next ARP request of the bridge is a broadcast, so all pods receive the new MAC address.
/// - With IPv6, the bridge sends each neighbor solicitation to one pod only, and usually with its link-local address as
///   the source, so the pods keep the old MAC address. The pod of a member does not check it: the connections of the
///   member to the Services of other members succeed with any MAC address, because `br_netfilter` translates their
///   packets first, and each acknowledged packet confirms the gateway. Only responses to the address of the bridge are
///   lost. The kubelet probes from this address, so the readiness probes time out.
///
/// The CNI plugin `bridge` sets the MAC address only if it adds the IP address of the bridge (`ensureAddr`). In the
/// testbed, the bridge already has this IP address.
const BRIDGE_MAC: &str = "02:00:00:00:00:01";

/// Creates the links, IP addresses, routes and mounts of the testbed.
pub(crate) fn create(testbed: &Testbed) -> Result<()> {
    let addresses = testbed.state.addresses();
    let (near, far) = addresses.uplink();
    let interface = testbed.state.slot.interface();
    let init = testbed.inside.init().pid;
    for folder in COVERED {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {folder}"))?;
    }
    host(&format!(
        "ip link add {interface} type veth peer name uplink netns {init}
         ip address add {near}/{} dev {interface}{}
         ip link set {interface} up",
        addresses.uplink_length(),
        no_dad(addresses)
    ))?;
    testbed
        .inside
        .script(&inner_links(addresses, testbed.state.nodes))?;
    testbed.inside.script(&mounts(&testbed.run_folder))?;
    let routes = addresses.routed().into_iter();
    let routes =
        routes.map(|network| format!("ip route add {network} via {far} dev {interface}\n"));
    host(&routes.collect::<String>())
}

/// The option of `ip address add` that makes an IP address usable at once. Without it, the kernel first searches for a
/// duplicate IPv6 address, which takes about a second.
fn no_dad(addresses: Addresses) -> &'static str {
    match addresses.family {
        IpFamily::Ipv4 => "",
        IpFamily::Ipv6 => " nodad",
    }
}

fn inner_links(addresses: Addresses, nodes: u8) -> String {
    let (near, far) = addresses.uplink();
    let no_dad = no_dad(addresses);
    let forwarding = match addresses.family {
        IpFamily::Ipv4 => "echo 1 >/proc/sys/net/ipv4/ip_forward",
        // `accept_dad`: the bridge uses its link-local address to ask for the MAC address of a pod. By default, the
        // kernel first searches for a duplicate of this address, which delays the first connection between pods through
        // a Service by a second.
        IpFamily::Ipv6 => {
            "echo 0 >/proc/sys/net/ipv6/conf/all/disable_ipv6
         echo 1 >/proc/sys/net/ipv6/conf/all/forwarding
         echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad"
        }
    };
    let mut script = format!(
        "{forwarding}
         ip link set lo up
         ip address add {far}/{} dev uplink{no_dad}
         ip link set uplink up
         ip route add {} via {near}
         ip link add cni0 address {BRIDGE_MAC} type bridge
         ip address add {}/{} dev cni0{no_dad}
         ip link set cni0 up
         if [ -w {filter} ]; then echo 1 >{filter}; fi\n",
        addresses.uplink_length(),
        addresses.everything(),
        addresses.gateway(),
        addresses.pods_length(),
        filter = addresses.family.bridge_filter()
    );
    for index in 0..nodes {
        // A write to a `String` cannot fail.
        let _ = writeln!(
            script,
            "ip address add {}/{} dev cni0{no_dad}",
            addresses.node(index),
            addresses.full_length()
        );
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
        // A write to a `String` cannot fail.
        let _ = writeln!(
            script,
            "if [ -e /proc/sys/{name} ]; then echo {value} >{run}/sysctl/{file}; mount --bind {run}/sysctl/{file} /proc/sys/{name}; fi"
        );
    }
    script
}

/// Removes the mount points that [`create`] has created on the host. Call it only if no other testbed is up, because
/// the removal of a folder removes its mounts in every namespace.
pub(crate) fn remove_covered() {
    for folder in COVERED {
        // `remove_dir` fails for a folder with files. This error is ignored, because such a folder belongs to the host.
        let _ = fs::remove_dir(folder);
    }
}

/// Removes the link to the host, with its routes, after the last process of the testbed has ended.
pub(crate) fn remove(slot: Slot) -> Result<()> {
    let interface = slot.interface();
    let exists = || Path::new("/sys/class/net").join(&interface).exists();
    if exists() {
        // An error is ignored, because the kernel may already be removing the link.
        let _ = shell::output(Command::new("ip").args(["link", "delete", &interface]));
    }
    shell::wait_for(
        &format!("the removal of network interface {interface}"),
        Duration::from_secs(20),
        || !exists(),
    )
}

/// Fails if a file system is mounted below the run folder, because the removal of the folder would delete the files of
/// this file system.
pub(crate) fn refuse_mounts_below(run_folder: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let below = mounts_below(&mounts, &run_folder.display().to_string());
    if !below.is_empty() {
        bail!(
            "the run folder is not removed, because these paths are mounted below it: {}. Unmount them with `umount {}`.",
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

/// Removes the proxy variables from the environment of the command, because the testbed must be reached directly.
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
    fn only_mounts_at_and_below_folder_are_found() {
        let mounts = "a /var/tmp/x/1/y ext4 rw 0 0\nb /var/tmp/x/12 ext4 rw 0 0\nc /var/tmp/x/1 ext4 rw 0 0\n";
        assert_eq!(
            mounts_below(mounts, "/var/tmp/x/1"),
            ["/var/tmp/x/1/y", "/var/tmp/x/1"]
        );
    }

    /// The script must set the MAC address before the first pod starts, in both IP families.
    #[test]
    fn bridge_has_fixed_mac_address() {
        for family in [IpFamily::Ipv4, IpFamily::Ipv6] {
            let slot = Slot(0);
            let script = inner_links(Addresses { slot, family }, 1);
            let created = "ip link add cni0 address 02:00:00:00:00:01 type bridge\n";
            assert!(script.contains(created), "{script}");
        }
    }

    /// The script must disable the default setting `accept_dad` before it creates the bridge, because the kernel copies
    /// the default to a new bridge.
    #[test]
    fn ipv6_bridge_is_created_without_duplicate_address_detection() {
        let of = |family| {
            let slot = Slot(0);
            inner_links(Addresses { slot, family }, 1)
        };
        let script = of(IpFamily::Ipv6);
        let (before, _) = script.split_once("ip link add cni0").unwrap();
        let disabled = "echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad\n";
        assert!(before.contains(disabled), "{script}");
        assert!(!of(IpFamily::Ipv4).contains("ipv6"));
    }

    #[test]
    fn network_script_sets_node_addresses_and_default_route() {
        for (family, expected) in [
            (
                IpFamily::Ipv4,
                [
                    "10.90.0.1/16 dev cni0\n",
                    "10.90.0.10/32 dev cni0\n",
                    "10.90.0.12/32 dev cni0\n",
                    "0.0.0.0/0 via 10.120.2.1\n",
                ],
            ),
            (
                IpFamily::Ipv6,
                [
                    "fd65:7462:2:1::1/64 dev cni0 nodad\n",
                    "fd65:7462:2:3::a/128 dev cni0 nodad\n",
                    "fd65:7462:2:3::c/128 dev cni0 nodad\n",
                    "::/0 via fd65:7462:2::1\n",
                ],
            ),
        ] {
            let slot = Slot(2);
            let script = inner_links(Addresses { slot, family }, 3);
            for address in expected {
                assert!(script.contains(address), "{address}: {script}");
            }
        }
    }
}
