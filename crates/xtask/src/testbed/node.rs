//! The nodes of the testbed. Each node has its own container runtime and kubelet, with separate folders, sockets and
//! control groups. Nodes can be killed and started again.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::inside::Daemon;
use super::{Testbed, control, group_of, state};
use crate::{checkout, image, progress};

/// The daemons that run on each node.
const DAEMONS: [&str; 2] = ["containerd", "kubelet"];
/// The folder of a node that its kubelet sees as `/var/lib/kubelet`.
const LIB: &str = "lib-kubelet";
/// A script that runs a kubelet in its own mount namespace. The folder in the first argument is mounted over
/// `/var/lib/kubelet`, where the kubelet creates a socket and stores its certificate. Without the mount, all kubelets
/// would use the same files.
///
/// `/var/lib/kubelet` is made private first, so that the other kubelets do not get this mount. All other mounts stay
/// shared, because the container runtime needs the volumes that the kubelet mounts.
const OWN_LIB: &str = "mount --make-private /var/lib/kubelet
    mount --bind \"$1\" /var/lib/kubelet
    shift
    exec \"$@\"";
const ZONES: &[&str] = &["zone-a", "zone-b", "zone-c"];

/// Starts the container runtime of a node, and loads the missing images.
pub(crate) fn start_runtime(testbed: &Testbed, index: u8) -> Result<()> {
    let name = format!("node-{index}");
    let folder = testbed.run_folder.join(&name);
    for part in ["pod-logs", "kubelet", "plugins", "opt", LIB] {
        fs::create_dir_all(folder.join(part)).with_context(|| folder.display().to_string())?;
    }
    write_network(testbed)?;
    let config = folder.join("containerd.toml");
    fs::write(&config, containerd_config(testbed, &name))
        .with_context(|| config.display().to_string())?;
    testbed.cgroups.create(&group_of(&name))?;
    testbed.inside.spawn(
        &testbed.cgroups,
        Daemon {
            name: format!("{name}-containerd"),
            group: group_of(&format!("{name}/daemons/containerd")),
            umask: "022",
            command: vec![
                "containerd".into(),
                "-c".into(),
                config.display().to_string(),
            ],
        },
    )?;
    testbed.wait_for(
        &format!("the container runtime of {name}"),
        Duration::from_secs(30),
        || ctr(testbed, index, "version").is_ok(),
    )?;
    let present = ctr(testbed, index, "images ls -q")?;
    import_programs(testbed, index, &present)?;
    // All images in the folder are imported, because other nodes may have loaded some of them while this node was
    // down.
    for entry in fs::read_dir(testbed.run_folder.join("images"))
        .into_iter()
        .flatten()
        .flatten()
    {
        import(testbed, index, &entry.path(), &present)?;
    }
    Ok(())
}

/// Loads the etcd and pause images that xtask built after the node had started. Does nothing if the node is down.
pub(super) fn complete_images(testbed: &Testbed, index: u8) -> Result<()> {
    if !daemon_runs(testbed, &format!("node-{index}"), "containerd") {
        return Ok(());
    }
    let present = ctr(testbed, index, "images ls -q")?;
    import_programs(testbed, index, &present)
}

fn import_programs(testbed: &Testbed, index: u8, present: &str) -> Result<()> {
    let images = &testbed.programs.images;
    images
        .iter()
        .try_for_each(|image| import(testbed, index, image, present))
}

pub(crate) fn start_kubelet(testbed: &Testbed, index: u8) -> Result<()> {
    let name = format!("node-{index}");
    let folder = testbed.run_folder.join(&name);
    let config = folder.join("kubelet.json");
    fs::write(&config, kubelet_config(testbed, index).to_string())
        .with_context(|| config.display().to_string())?;
    fs::write(
        testbed.run_folder.join("resolv.conf"),
        "nameserver 127.0.0.1\n",
    )
    .context("resolv.conf")?;
    let run = testbed.run_folder.display();
    let zone = ZONES[usize::from(index) % ZONES.len()];
    testbed.inside.spawn(
        &testbed.cgroups,
        Daemon {
            name: format!("{name}-kubelet"),
            group: group_of(&format!("{name}/daemons/kubelet")),
            umask: "022",
            command: vec![
                "unshare".into(),
                "--mount".into(),
                "--propagation=unchanged".into(),
                "--".into(),
                "sh".into(),
                "-euc".into(),
                OWN_LIB.into(),
                "sh".into(),
                folder.join(LIB).display().to_string(),
                "kubelet".into(),
                format!("--config={}", config.display()),
                format!("--kubeconfig={run}/{name}.kubeconfig"),
                format!("--hostname-override={name}"),
                format!("--node-ip={}", testbed.state.addresses().node(index)),
                format!("--root-dir={}", folder.join("kubelet").display()),
                format!("--node-labels=topology.kubernetes.io/zone={zone},topology.kubernetes.io/region=testbed"),
            ],
        },
    )
}

/// Loads an image archive into a node. Does nothing if the node is down or has the image.
pub(crate) fn load_image(
    testbed: &Testbed,
    index: u8,
    archive: &Path,
    reference: &str,
) -> Result<()> {
    if !daemon_runs(testbed, &format!("node-{index}"), "containerd") {
        return Ok(());
    }
    let present = ctr(testbed, index, "images ls -q")?;
    if present.lines().any(|name| name == reference) {
        return Ok(());
    }
    remove_old_images(testbed, index, &present)?;
    import(testbed, index, archive, &present)
}

/// Removes the operator images whose archives no longer exist. Without the removal, they would fill the disk, because
/// every change of the code creates a new image.
fn remove_old_images(testbed: &Testbed, index: u8, present: &str) -> Result<()> {
    let prefix = format!("{}:", image::NAME);
    for name in present.lines() {
        let Some(tag) = name.strip_prefix(&prefix) else {
            continue;
        };
        if !testbed
            .run_folder
            .join(format!("images/etcd-operator-{tag}.tar"))
            .exists()
        {
            ctr(testbed, index, &format!("images rm {name}"))?;
        }
    }
    Ok(())
}

/// Kills the kubelet, the container runtime and all containers of a node, like a power failure.
pub(crate) fn kill(name: &str) -> Result<()> {
    let run_folder = checkout::run_folder();
    let _lock = state::lock(&run_folder)?;
    let testbed = Testbed::running()?;
    index(&testbed, name)?;
    testbed.cgroups.kill(&group_of(name))?;
    progress::say(&format!(
        "{name} is down; start it with `cargo xtask testbed node start {name}`"
    ));
    Ok(())
}

/// Kills only the kubelet of a node. Its containers continue.
pub(crate) fn stop_kubelet(name: &str) -> Result<()> {
    let run_folder = checkout::run_folder();
    let _lock = state::lock(&run_folder)?;
    let testbed = Testbed::running()?;
    index(&testbed, name)?;
    testbed
        .cgroups
        .kill(&group_of(&format!("{name}/daemons/kubelet")))?;
    progress::say(&format!(
        "the kubelet of {name} is stopped; start it with `cargo xtask testbed node start {name}`"
    ));
    Ok(())
}

/// True if all daemons of the node run.
pub(crate) fn runs(testbed: &Testbed, name: &str) -> bool {
    DAEMONS
        .iter()
        .all(|daemon| daemon_runs(testbed, name, daemon))
}

fn daemon_runs(testbed: &Testbed, name: &str, daemon: &str) -> bool {
    let group = group_of(&format!("{name}/daemons/{daemon}"));
    !testbed.cgroups.processes(&group).is_empty()
}

/// Starts the stopped daemons of a node, and waits until the node is ready.
pub(crate) fn start(name: &str) -> Result<()> {
    let run_folder = checkout::run_folder();
    let _lock = state::lock(&run_folder)?;
    let testbed = Testbed::running()?;
    let index = index(&testbed, name)?;
    progress::step(&format!("starting {name}"), || {
        if !daemon_runs(&testbed, name, "containerd") {
            start_runtime(&testbed, index)?;
        }
        let begun = now(&testbed)?;
        if !daemon_runs(&testbed, name, "kubelet") {
            start_kubelet(&testbed, index)?;
        }
        wait_node_ready(&testbed, name, &begun)
    })
}

/// Waits until the node is ready and has sent a heartbeat after `begun`. An older heartbeat is not sufficient, because
/// the API server keeps the last status of a stopped node for a while.
fn wait_node_ready(testbed: &Testbed, name: &str, begun: &str) -> Result<()> {
    let path = "jsonpath={range .status.conditions[?(@.type=='Ready')]}{.status} {.lastHeartbeatTime}{end}";
    testbed.wait_for(
        &format!("{name} to be ready"),
        Duration::from_secs(90),
        || {
            let Ok(text) = testbed.kubectl(&["get", "node", name, "-o", path]) else {
                return false;
            };
            // `heartbeat` and `begun` are both in UTC and in the format of RFC 3339, so they can be compared as text.
            matches!(text.split_once(' '), Some(("True", heartbeat)) if heartbeat.trim() >= begun)
        },
    )
}

fn now(testbed: &Testbed) -> Result<String> {
    Ok(testbed
        .inside
        .script("date -u +%Y-%m-%dT%H:%M:%SZ")?
        .trim()
        .to_owned())
}

/// The name and control group of each daemon on each node.
pub(crate) fn daemons(nodes: u8) -> impl Iterator<Item = (String, String)> {
    (0..nodes).flat_map(|index| {
        DAEMONS.map(|daemon| {
            (
                format!("node-{index} {daemon}"),
                format!("node-{index}/daemons/{daemon}"),
            )
        })
    })
}

fn index(testbed: &Testbed, name: &str) -> Result<u8> {
    let known = (0..testbed.state.nodes).find(|index| format!("node-{index}") == name);
    match known {
        Some(index) => Ok(index),
        None => bail!(
            "unknown node {name}: use one of node-0 to node-{}",
            testbed.state.nodes.saturating_sub(1)
        ),
    }
}

fn socket(name: &str) -> String {
    // The kernel limits the length of a socket path. The socket is therefore in the testbed's own /run, and not in the
    // run folder, whose path may be long.
    format!("/run/{name}/containerd.sock")
}

fn ctr(testbed: &Testbed, index: u8, command: &str) -> Result<String> {
    testbed.inside.script(&format!(
        "ctr -a {} -n k8s.io {command}",
        socket(&format!("node-{index}"))
    ))
}

fn import(testbed: &Testbed, index: u8, archive: &Path, present: &str) -> Result<()> {
    let names = names_in(archive)?;
    if names
        .iter()
        .all(|name| present.lines().any(|line| line == name))
    {
        return Ok(());
    }
    let snapshotter = &testbed.state.snapshotter;
    ctr(
        testbed,
        index,
        &format!(
            "images import --snapshotter {snapshotter} --local {}",
            archive.display()
        ),
    )
    .or_else(|_| {
        ctr(
            testbed,
            index,
            &format!("images import {}", archive.display()),
        )
    })
    .with_context(|| format!("cannot load image {} into node-{index}", archive.display()))?;
    Ok(())
}

/// The names of the images in an archive, from its manifest, which is the last file of the archive.
fn names_in(archive: &Path) -> Result<Vec<String>> {
    let mut tar =
        tar::Archive::new(fs::File::open(archive).with_context(|| archive.display().to_string())?);
    for entry in tar.entries_with_seek()? {
        let entry = entry?;
        if entry.path()?.as_os_str() == "manifest.json" {
            let manifest: serde_json::Value =
                serde_json::from_reader(entry).context("manifest.json")?;
            let names = manifest[0]["RepoTags"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            return Ok(names
                .iter()
                .filter_map(|name| name.as_str().map(ToOwned::to_owned))
                .collect());
        }
    }
    bail!("{}: no manifest.json", archive.display())
}

/// Writes the CNI configuration. All nodes share the configuration and the store of IP addresses, so that each pod
/// gets a different IP address.
fn write_network(testbed: &Testbed) -> Result<()> {
    let addresses = testbed.state.addresses();
    let run = &testbed.run_folder;
    let text = serde_json::json!({
        "cniVersion": "1.0.0",
        "name": "testbed",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": true,
                "ipMasq": false,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "dataDir": run.join("leases"),
                    "ranges": [[{ "subnet": addresses.pods_network(), "rangeStart": addresses.first_pod(), "gateway": addresses.gateway() }]],
                    "routes": [{ "dst": addresses.everything() }],
                },
            },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    });
    let (file, temporary) = (
        run.join("cni/10-testbed.conflist"),
        run.join(format!("cni/{:?}.new", std::thread::current().id())),
    );
    fs::write(&temporary, text.to_string()).context("network configuration")?;
    fs::rename(&temporary, &file).context("network configuration")
}

fn containerd_config(testbed: &Testbed, name: &str) -> String {
    control::fill(
        CONTAINERD_CONFIG,
        &[
            ("RUN", &testbed.run_folder.display().to_string()),
            ("NODE", name),
            ("SNAPSHOTTER", &testbed.state.snapshotter),
            ("BIN", &testbed.programs.bin.display().to_string()),
        ],
    )
}

const CONTAINERD_CONFIG: &str = r#"version = 3
root = "${RUN}/${NODE}/containerd"
state = "/run/${NODE}"

[grpc]
  address = "/run/${NODE}/containerd.sock"

[plugins.'io.containerd.cri.v1.images']
  snapshotter = "${SNAPSHOTTER}"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "docker.io/testbed/pause:1"

[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["${BIN}/cni"]
    conf_dir = "${RUN}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "${BIN}/runc"
      SystemdCgroup = false

[plugins.'io.containerd.internal.v1.opt']
  path = "${RUN}/${NODE}/opt"

[plugins.'io.containerd.nri.v1.nri']
  disable = true
"#;

fn kubelet_config(testbed: &Testbed, index: u8) -> serde_json::Value {
    let name = format!("node-{index}");
    let run = &testbed.run_folder;
    let address = testbed.state.addresses().node(index);
    serde_json::json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "healthzBindAddress": address,
        "failCgroupV1": false,
        "failSwapOn": false,
        "cgroupDriver": "cgroupfs",
        // Each kubelet has its own control group, because a kubelet kills all pods in its group that it does not
        // know.
        "cgroupRoot": format!("/{}", group_of(&name)),
        "enforceNodeAllocatable": [],
        "containerRuntimeEndpoint": format!("unix://{}", socket(&name)),
        // Each kubelet has its own folder for pod logs, because a kubelet removes the logs of pods that it does not
        // know.
        "podLogsDir": run.join(&name).join("pod-logs"),
        "volumePluginDir": run.join(&name).join("plugins"),
        "authentication": {
            "anonymous": { "enabled": false },
            "x509": { "clientCAFile": run.join("pki/ca.crt") },
            "webhook": { "enabled": false },
        },
        "authorization": { "mode": "AlwaysAllow" },
        "clusterDNS": [control::dns_address(testbed)],
        "clusterDomain": "cluster.local",
        "resolvConf": run.join("resolv.conf"),
        "nodeStatusUpdateFrequency": "4s",
        "nodeStatusReportFrequency": "10s",
        "serializeImagePulls": false,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {},
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::{Entry, Image};

    #[test]
    fn each_node_has_two_daemons() {
        let all: Vec<_> = daemons(2).collect();
        assert_eq!(all.len(), 4);
        assert_eq!(
            all[3],
            ("node-1 kubelet".into(), "node-1/daemons/kubelet".into())
        );
    }

    #[test]
    fn image_names_are_read_from_archive_manifest() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), "").unwrap();
        let image = Image {
            names: vec!["a/b:1".into(), "c:2".into()],
            entries: vec![Entry::data(&dir.path().join("f"), "f")],
            ..Image::default()
        };
        let tar = dir.path().join("x.tar");
        image.write(&tar).unwrap();
        assert_eq!(names_in(&tar).unwrap(), ["a/b:1", "c:2"]);
    }

    #[test]
    fn containerd_config_has_no_unknown_placeholders() {
        let text = control::fill(
            CONTAINERD_CONFIG,
            &[
                ("RUN", "r"),
                ("NODE", "n"),
                ("SNAPSHOTTER", "s"),
                ("BIN", "b"),
            ],
        );
        assert!(!text.contains("${"), "{text}");
    }
}
