//! Breaking things on the testbed: nodes, daemons of the control plane, DNS, files on volumes.
//!
//! Only tests in a module `alone` do this to what others use.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use tokio::process::Command;

use crate::objects::node_of;
use crate::wait::{Poll, until};
use crate::{DEADLINE, Sandbox};

/// The testbed a test runs on.
pub struct Testbed<'a> {
    sandbox: &'a Sandbox,
    xtask: &'a Path,
}

impl<'a> Testbed<'a> {
    /// The testbed below the sandbox.
    ///
    /// # Errors
    /// On a cluster of the user's own, where nothing is broken.
    pub fn of(sandbox: &'a Sandbox) -> Result<Self> {
        let xtask = sandbox
            .env
            .xtask
            .as_deref()
            .context("E2E_XTASK is not set: things can only be broken on the testbed")?;
        Ok(Self { sandbox, xtask })
    }

    /// Runs a test's body that breaks things, and starts everything again that it left broken, also when it failed.
    ///
    /// # Errors
    /// With the body's, or when something does not start again.
    pub async fn with_faults(
        sandbox: &'a Sandbox,
        body: impl AsyncFnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let testbed = Self::of(sandbox)?;
        let outcome = body(&testbed).await;
        if outcome.is_err() {
            // While it is still as it failed.
            sandbox.print_state().await;
        }
        let mended = testbed.mend().await;
        outcome.and(mended)
    }

    /// Starts every node and daemon that does not run, with DNS as most tests want it, and lets pods onto all nodes.
    ///
    /// # Errors
    /// When something does not start.
    pub async fn mend(&self) -> Result<()> {
        self.run(&["mend"]).await?;
        for node in self.nodes() {
            self.sandbox.kubectl(&["uncordon", &node]).await?;
        }
        Ok(())
    }

    /// The nodes' names.
    #[must_use]
    pub fn nodes(&self) -> Vec<String> {
        self.sandbox.env.nodes.clone()
    }

    /// Loses a node as if its power went.
    ///
    /// # Errors
    /// When it is no node.
    pub async fn kill_node(&self, node: &str) -> Result<()> {
        self.run(&["node", "kill", node]).await.map(drop)
    }

    /// Starts a lost node and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn start_node(&self, node: &str) -> Result<()> {
        self.run(&["node", "start", node]).await.map(drop)
    }

    /// Stops a node's kubelet alone; [`Self::start_node`] starts it again.
    ///
    /// # Errors
    /// When it is no node.
    pub async fn stop_kubelet(&self, node: &str) -> Result<()> {
        self.run(&["node", "stop-kubelet", node]).await.map(drop)
    }

    /// Stops a daemon of the control plane, such as `kube-apiserver` or `coredns`.
    ///
    /// # Errors
    /// When there is none of this name.
    pub async fn stop_daemon(&self, name: &str) -> Result<()> {
        self.run(&["daemon", "stop", name]).await.map(drop)
    }

    /// Starts a daemon again and waits until it answers.
    ///
    /// # Errors
    /// When it does not.
    pub async fn start_daemon(&self, name: &str) -> Result<()> {
        self.run(&["daemon", "start", name]).await.map(drop)
    }

    /// Changes how DNS caches: `nocache` or `cache30`.
    ///
    /// # Errors
    /// When DNS does not start.
    pub async fn dns(&self, mode: &str) -> Result<()> {
        self.run(&["dns", mode]).await.map(drop)
    }

    /// Waits until a pod's containers do not run any more, as the container runtime says: the API server need not
    /// answer.
    ///
    /// # Errors
    /// When they still run.
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
        until("the pod's containers have ended", DEADLINE, async || {
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
        })
        .await
    }

    /// Kills the containers of pods, all at once, as the kernel does when they take too much memory.
    ///
    /// # Errors
    /// When one of them does not run.
    pub async fn kill_containers(&self, pods: &[Pod]) -> Result<()> {
        self.signal_containers(pods, "SIGKILL").await
    }

    /// Sends a signal to the first process of every container of the pods: `SIGSTOP` makes them hang.
    ///
    /// # Errors
    /// When one of them does not run.
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
                let id = id.with_context(|| format!("{name} does not run"))?;
                let _ = writeln!(
                    script,
                    "ctr -a /run/{node}/containerd.sock -n k8s.io tasks kill -s {signal} {id} &"
                );
            }
        }
        script.push_str("wait\n");
        self.script(&script).await.map(drop)
    }

    /// Runs a shell script in the testbed's namespaces, where nodes' processes and volumes are; returns its output.
    ///
    /// # Errors
    /// With what the script said.
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
