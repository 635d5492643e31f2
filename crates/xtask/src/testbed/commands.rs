//! The commands that change or show a running testbed: `dns`, `daemon`, `mend`, `exec` and `status`.

use anyhow::{Result, bail};

use super::{Dns, Options, Testbed, control, daemons, group_of, node, state};
use crate::{checkout, progress, shell};

/// Changes the DNS cache of the running testbed.
pub(crate) fn set_dns(dns: Dns) -> Result<()> {
    let run_folder = checkout::run_folder();
    let _lock = state::lock(&run_folder)?;
    let mut testbed = Testbed::running()?;
    testbed.state.dns = dns;
    control::restart_dns(&testbed)?;
    testbed.state.write(&run_folder)
}

/// Kills a daemon of the control plane.
pub(crate) fn stop_daemon(name: &str) -> Result<()> {
    let run_folder = checkout::run_folder();
    let _lock = state::lock(&run_folder)?;
    let testbed = Testbed::running()?;
    known_daemon(name)?;
    control::stop_daemon(&testbed, name)?;
    progress::say(&format!(
        "{name} is stopped; start it with `cargo xtask testbed daemon start {name}`"
    ));
    Ok(())
}

/// Starts a daemon of the control plane if it is not running. Waits until the control plane is ready.
pub(crate) fn start_daemon(name: &str) -> Result<()> {
    let run_folder = checkout::run_folder();
    let _lock = state::lock(&run_folder)?;
    let testbed = Testbed::running()?;
    known_daemon(name)?;
    if control::daemon_runs(&testbed, name) {
        progress::say(&format!("{name} is already running"));
        return Ok(());
    }
    progress::step(&format!("starting {name}"), || {
        control::start_daemon(&testbed, name)?;
        testbed.wait_ready()?;
        if name == "kube-apiserver" {
            control::restart_clients(&testbed)?;
        }
        control::wait_services(&testbed)
    })
}

fn known_daemon(name: &str) -> Result<()> {
    if !control::DAEMONS.contains(&name) {
        bail!(
            "unknown daemon {name}: use one of {}",
            control::DAEMONS.join(", ")
        );
    }
    Ok(())
}

/// Starts all stopped nodes and daemons, and resets the DNS cache to its default.
pub(crate) fn mend() -> Result<()> {
    for name in control::DAEMONS {
        let runs = control::daemon_runs(&Testbed::running()?, name);
        if !runs {
            start_daemon(name)?;
        }
    }
    let state = Testbed::running()?.state;
    for index in 0..state.nodes {
        let name = format!("node-{index}");
        if !node::runs(&Testbed::running()?, &name) {
            node::start(&name)?;
        }
    }
    if state.dns != Options::default().dns {
        set_dns(Options::default().dns)?;
    }
    Ok(())
}

/// Like [`mend`], but does nothing if this checkout has no testbed that is completely up.
pub(crate) fn mend_if_up() -> Result<()> {
    match Testbed::running() {
        Ok(testbed) if testbed.state.ready => mend(),
        _ => Ok(()),
    }
}

/// Runs a command in the process, mount and network namespaces of the testbed.
pub(crate) fn exec(words: &[String]) -> Result<()> {
    let testbed = Testbed::running()?;
    let Some((program, args)) = words.split_first() else {
        bail!("no command given")
    };
    let mut command = testbed.inside.command(program);
    command
        .args(args)
        .env("KUBECONFIG", testbed.run_folder.join("kubeconfig"));
    if let Some(term) = std::env::var_os("TERM") {
        command.env("TERM", term);
    }
    shell::inherit(&mut command)
}

/// A description of the testbed's daemons, nodes and pods.
pub(crate) fn status() -> Result<String> {
    let testbed = Testbed::running()?;
    let mut lines = vec![
        format!("run folder  {}", testbed.run_folder.display()),
        format!(
            "slot        {} (pods {}, Services {})",
            testbed.state.slot.0,
            testbed.state.addresses().pods_network(),
            testbed.state.addresses().services_network()
        ),
        format!("Kubernetes  {}", testbed.programs.kubernetes),
        format!("DNS         {}", testbed.state.dns),
        format!(
            "up          {}",
            if testbed.state.ready {
                "completely"
            } else {
                "incomplete: see the logs"
            }
        ),
        String::new(),
    ];
    for (name, group) in daemons(testbed.state.nodes) {
        let pids = testbed.cgroups.processes(&group_of(&group));
        let shown = if pids.is_empty() {
            "not running".to_owned()
        } else {
            format!("{pids:?}")
        };
        lines.push(format!("{name:24}{shown}"));
    }
    lines.push(String::new());
    lines.push(testbed.kubectl(&["get", "nodes", "-o", "wide"])?);
    lines.push(testbed.kubectl(&["get", "pods", "-A", "-o", "wide"])?);
    Ok(lines.join("\n"))
}
