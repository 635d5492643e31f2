//! Injects faults into the testbed: nodes, control plane daemons, DNS, files on volumes.
//!
//! Only tests in a module `alone` break components that other tests use.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use tokio::process::Command;

use crate::objects::node_of;
use crate::wait::{Poll, until};
use crate::{DEADLINE, Sandbox};

/// The testbed of a test.
pub struct Testbed<'a> {
    sandbox: &'a Sandbox,
    xtask: &'a Path,
}

impl<'a> Testbed<'a> {
    /// The testbed of a sandbox.
    ///
    /// # Errors
    /// On a user-provided cluster, where faults are not allowed.
    pub fn of(sandbox: &'a Sandbox) -> Result<Self> {
        let xtask = sandbox
            .env
            .xtask
            .as_deref()
            .context("E2E_XTASK is not set: faults can be injected only on the testbed")?;
        Ok(Self { sandbox, xtask })
    }

    /// Runs a test body that injects faults. Afterwards, restarts everything that is still stopped, even if the body
    /// failed.
    ///
    /// # Errors
    /// If the body fails, or a component does not start again.
    pub async fn with_faults(
        sandbox: &'a Sandbox,
        body: impl AsyncFnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let testbed = Self::of(sandbox)?;
        let outcome = body(&testbed).await;
        if outcome.is_err() {
            // Prints the state before the repair changes it.
            sandbox.print_state().await;
        }
        let repaired = testbed.repair().await;
        outcome.and(repaired)
    }

    /// Starts every stopped node and daemon, resets DNS to its default configuration, and uncordons all nodes.
    ///
    /// # Errors
    /// If a component does not start.
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

    /// Stops a node like a power failure.
    ///
    /// # Errors
    /// If there is no such node.
    pub async fn kill_node(&self, node: &str) -> Result<()> {
        self.run(&["node", "kill", node]).await.map(drop)
    }

    /// Starts a stopped node and waits until it is ready.
    ///
    /// # Errors
    /// If the node does not become ready.
    pub async fn start_node(&self, node: &str) -> Result<()> {
        self.run(&["node", "start", node]).await.map(drop)
    }

    /// Stops only the kubelet of a node. [`Self::start_node`] starts it again.
    ///
    /// # Errors
    /// If there is no such node.
    pub async fn stop_kubelet(&self, node: &str) -> Result<()> {
        self.run(&["node", "stop-kubelet", node]).await.map(drop)
    }

    /// Stops a daemon of the control plane, such as `kube-apiserver` or `coredns`.
    ///
    /// # Errors
    /// If there is no such daemon.
    pub async fn stop_daemon(&self, name: &str) -> Result<()> {
        self.run(&["daemon", "stop", name]).await.map(drop)
    }

    /// Starts a daemon and waits until it answers.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub async fn start_daemon(&self, name: &str) -> Result<()> {
        self.run(&["daemon", "start", name]).await.map(drop)
    }

    /// Configures the cache of DNS: `nocache` or `cache30`.
    ///
    /// # Errors
    /// If DNS does not start.
    pub async fn dns(&self, mode: &str) -> Result<()> {
        self.run(&["dns", mode]).await.map(drop)
    }

    /// Waits until the containers of a pod have stopped. Asks the container runtime, because the API server may be
    /// down.
    ///
    /// # Errors
    /// If the containers still run at the deadline.
    pub async fn await_containers_stopped(&self, pod: &Pod) -> Result<()> {
        let node = node_of(pod);
        let status = pod.status.as_ref();
        let containers = status.and_then(|status| status.container_statuses.as_ref());
        let ids: Vec<String> = containers
            .into_iter()
            .flatten()
            .filter_map(|container| container.container_id.as_deref())
            .map(|id| id.trim_start_matches("containerd://").to_owned())
            .collect();
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

    /// Kills the containers of all pods at the same time, like the kernel when memory runs out.
    ///
    /// # Errors
    /// If one of the containers is not running.
    pub async fn kill_containers(&self, pods: &[Pod]) -> Result<()> {
        self.signal_containers(pods, "SIGKILL").await
    }

    /// Sends a signal to the first process of every container of the pods. `SIGSTOP` makes them hang.
    ///
    /// # Errors
    /// If one of the containers is not running.
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

    /// Runs a shell script in the testbed's namespaces, which contain the nodes' processes and volumes. Returns its
    /// output.
    ///
    /// # Errors
    /// If the script fails; with its error output.
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
