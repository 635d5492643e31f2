//! Injects faults into the testbed: into its nodes, its control plane, its DNS, and the files on its volumes.
//!
//! Only tests in a module `alone` may stop or break components that other tests use.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use tokio::process::Command;

use crate::objects::node_of;
use crate::wait::{Poll, until};
use crate::{DEADLINE, Sandbox};

/// A script that limits the writes of the container with the process `pid` to `rate` per second. It sets this limit in
/// the container's control group (version 1 or 2). The rate 0 removes the limit. The kernel limits only whole disks, so
/// the script limits the disk that contains the partition of `directory`. It never changes the root group, which
/// contains all processes of the machine.
const LIMIT_WRITES: &str = r#"
device=$(stat -c %Hd:%Ld "$directory")
if [ -e "/sys/dev/block/$device/partition" ]; then device=$(cat "/sys/dev/block/$device/../dev"); fi
group=$(sed -n 's/^[0-9]*:blkio://p' "/proc/$pid/cgroup")
file="/sys/fs/cgroup/blkio$group/blkio.throttle.write_iops_device"
limit="$device $rate"
if [ -z "$group" ]; then
    group=$(sed -n 's/^0:://p' "/proc/$pid/cgroup")
    file="/sys/fs/cgroup$group/io.max"
    if [ "$rate" = 0 ]; then limit="$device wiops=max"; else limit="$device wiops=$rate"; fi
fi
if [ "$group" = / ]; then echo "the container runs in the root control group" >&2; exit 1; fi
echo "$limit" >"$file"
"#;

/// The testbed on which a test runs.
pub struct Testbed<'a> {
    sandbox: &'a Sandbox,
    xtask: &'a Path,
}

impl<'a> Testbed<'a> {
    /// The testbed of the sandbox.
    ///
    /// # Errors
    /// Fails if the sandbox is on a user's cluster, where faults are not allowed.
    pub fn of(sandbox: &'a Sandbox) -> Result<Self> {
        let xtask = sandbox
            .env
            .xtask
            .as_deref()
            .context("E2E_XTASK is not set: run the test with `cargo xtask test`, because only the testbed can inject faults")?;
        Ok(Self { sandbox, xtask })
    }

    /// Runs a test that injects faults, and then restarts all stopped components, even if the test failed.
    ///
    /// # Errors
    /// Fails if the test fails, or if a component does not start.
    pub async fn with_faults(
        sandbox: &'a Sandbox,
        body: impl AsyncFnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let testbed = Self::of(sandbox)?;
        let outcome = body(&testbed).await;
        if outcome.is_err() {
            // The state of the namespace is printed before `repair` changes it.
            sandbox.print_state().await;
        }
        let repaired = testbed.repair().await;
        outcome.and(repaired)
    }

    /// Starts all stopped nodes and daemons, resets the DNS configuration, and uncordons all nodes.
    ///
    /// # Errors
    /// Fails if a component does not start.
    pub async fn repair(&self) -> Result<()> {
        self.run(&["mend"]).await?;
        for node in self.nodes() {
            self.sandbox.kubectl(&["uncordon", &node]).await?;
        }
        Ok(())
    }

    /// The names of the nodes.
    #[must_use]
    pub fn nodes(&self) -> Vec<String> {
        self.sandbox.env.nodes.clone()
    }

    /// Stops a node without a shutdown, as after a power failure.
    ///
    /// # Errors
    /// Fails if the node does not exist.
    pub async fn kill_node(&self, node: &str) -> Result<()> {
        self.run(&["node", "kill", node]).await.map(drop)
    }

    /// Starts a stopped node and waits until it is ready.
    ///
    /// # Errors
    /// Fails if the node does not become ready.
    pub async fn start_node(&self, node: &str) -> Result<()> {
        self.run(&["node", "start", node]).await.map(drop)
    }

    /// Stops the kubelet of a node, but not its containers. [`Self::start_node`] starts the kubelet again.
    ///
    /// # Errors
    /// Fails if the node does not exist.
    pub async fn stop_kubelet(&self, node: &str) -> Result<()> {
        self.run(&["node", "stop-kubelet", node]).await.map(drop)
    }

    /// Stops a daemon of the control plane, such as `kube-apiserver` or `coredns`.
    ///
    /// # Errors
    /// Fails if the daemon does not exist.
    pub async fn stop_daemon(&self, name: &str) -> Result<()> {
        self.run(&["daemon", "stop", name]).await.map(drop)
    }

    /// Starts a daemon of the control plane, and waits until it responds.
    ///
    /// # Errors
    /// Fails if the daemon does not respond.
    pub async fn start_daemon(&self, name: &str) -> Result<()> {
        self.run(&["daemon", "start", name]).await.map(drop)
    }

    /// Restarts the DNS server with another setting of its cache: `nocache` (no cache) or `cache30` (for 30 s).
    ///
    /// # Errors
    /// Fails if DNS does not start again.
    pub async fn dns(&self, mode: &str) -> Result<()> {
        self.run(&["dns", mode]).await.map(drop)
    }

    /// Waits until the containers of a pod have stopped. Asks the container runtime, because the API server may be
    /// stopped.
    ///
    /// # Errors
    /// Fails if containers still run at the time limit.
    pub async fn await_containers_stopped(&self, pod: &Pod) -> Result<()> {
        let node = node_of(pod);
        let ids = container_ids(pod);
        ensure!(!ids.is_empty(), "the pod had no containers");
        until(
            "the containers of the pod have stopped",
            DEADLINE,
            async || {
                let list = format!("ctr -a /run/{node}/containerd.sock -n k8s.io tasks ls");
                let list = self.script(&list).await?;
                let running = list
                    .lines()
                    .filter(|line| line.contains("RUNNING"))
                    .any(|line| ids.iter().any(|id| line.starts_with(id.as_str())));
                Ok(if running {
                    Poll::NotYet("still running".to_owned())
                } else {
                    Poll::Done(())
                })
            },
        )
        .await
    }

    /// Kills the containers of all these pods at the same time with SIGKILL, like the kernel when memory is exhausted.
    ///
    /// # Errors
    /// Fails if a container is not running.
    pub async fn kill_containers(&self, pods: &[Pod]) -> Result<()> {
        self.signal_containers(pods, "SIGKILL").await
    }

    /// Sends a signal to the first process of each container of the pods. `SIGSTOP` makes a container hang.
    ///
    /// # Errors
    /// Fails if a container is not running.
    pub async fn signal_containers(&self, pods: &[Pod], signal: &str) -> Result<()> {
        let mut script = String::new();
        for pod in pods {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let node = node_of(pod);
            let status = pod.status.as_ref();
            let containers = status.and_then(|status| status.container_statuses.as_ref());
            for container in containers.into_iter().flatten() {
                let id = container.container_id.as_deref().unwrap_or_default();
                let id = id.strip_prefix("containerd://");
                let id = id.with_context(|| format!("{name} is not running"))?;
                let _ = writeln!(
                    script,
                    "ctr -a /run/{node}/containerd.sock -n k8s.io tasks kill -s {signal} {id} &"
                );
            }
        }
        script.push_str("wait\n");
        self.script(&script).await.map(drop)
    }

    /// Limits the writes of a pod's running containers to the disk of `directory`. Each container can make `per_second`
    /// writes per second. 0 removes the limit. The limit ends when the container stops.
    ///
    /// # Errors
    /// Fails if a container is not running, or if the directory is not on a block device.
    pub async fn limit_writes(&self, pod: &Pod, directory: &str, per_second: u32) -> Result<()> {
        let node = node_of(pod);
        let mut script = format!("directory={directory} rate={per_second}\n");
        for id in container_ids(pod) {
            script.push_str(&set_pid(node, &id));
            script.push_str(LIMIT_WRITES);
        }
        self.script(&script).await.map(drop)
    }

    /// The anonymous memory of the first process of each container of a pod, in bytes. Pages of the program file do not
    /// count.
    ///
    /// # Errors
    /// Fails if a container is not running.
    pub async fn anonymous_memory(&self, pod: &Pod) -> Result<u64> {
        let node = node_of(pod);
        let mut script = String::new();
        for id in container_ids(pod) {
            script.push_str(&set_pid(node, &id));
            script.push_str("awk '/^RssAnon:/ {print $2}' /proc/$pid/status\n");
        }
        let printed = self.script(&script).await?;
        let sizes = printed.split_whitespace().map(str::parse::<u64>);
        let kibibytes: u64 = sizes
            .sum::<Result<u64, _>>()
            .with_context(|| format!("the sizes in KiB: {printed}"))?;
        Ok(kibibytes * 1024)
    }

    /// Builds the controllers of cert-manager, unless they are in the cache. Returns the path of the program.
    ///
    /// # Errors
    /// Fails if the build fails.
    pub async fn cert_manager(&self) -> Result<std::path::PathBuf> {
        let path = self.run(&["cert-manager"]).await?;
        Ok(path.trim().into())
    }

    /// Runs a shell script in the Linux namespaces of the testbed, which contain the processes and volumes of all
    /// nodes. Returns its output.
    ///
    /// # Errors
    /// Fails if the script fails. The error contains the error output of the script.
    pub async fn script(&self, script: &str) -> Result<String> {
        self.run(&["exec", "--", "sh", "-euc", script]).await
    }

    async fn run(&self, words: &[&str]) -> Result<String> {
        let output = Command::new(self.xtask)
            .arg("testbed")
            .args(words)
            .kill_on_drop(true)
            .output()
            .await
            .with_context(|| self.xtask.display().to_string())?;
        ensure!(
            output.status.success(),
            "testbed {}: {}",
            words.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// A line of a shell script that sets `pid` to the first process of a container.
fn set_pid(node: &str, id: &str) -> String {
    format!(
        "pid=$(ctr -a /run/{node}/containerd.sock -n k8s.io tasks ls | awk '$1 == \"{id}\" {{print $2}}')\n"
    )
}

/// The IDs of the pod's containers, as in containerd.
fn container_ids(pod: &Pod) -> Vec<String> {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    let ids = containers.into_iter().flatten();
    ids.filter_map(|container| container.container_id.as_deref())
        .map(|id| id.trim_start_matches("containerd://").to_owned())
        .collect()
}
