//! The process, mount and network namespaces of the testbed. When their init process ends, the kernel kills all other
//! processes in them, and removes the mounts, network links and packet filter rules.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::cgroup::Cgroups;
use super::process::Identity;
use crate::{progress, shell};

/// The process name of the init program.
const INIT: &str = "testbed-init";

/// The namespaces of a testbed. They are found through their init process.
#[derive(Debug)]
pub(crate) struct Inside {
    init: Identity,
    run_folder: PathBuf,
    /// The folder with the programs of the testbed.
    bin: PathBuf,
    /// The daemons that this command has started.
    started: Mutex<Vec<Started>>,
}

/// A daemon that this command has started and that runs until the testbed is stopped.
#[derive(Debug)]
struct Started {
    daemon: Daemon,
    /// True if the daemon has been restarted once.
    restarted: bool,
}

/// The number of log lines in the error of a daemon that has ended.
const LAST_LINES: usize = 8;

/// Closes inherited file descriptors in a shell. A daemon that inherits the lock file of its caller would keep the lock
/// after the caller has ended.
const CLOSE_INHERITED: &str = "exec 3<&- 4<&- 5<&- 6<&- 7<&- 8<&- 9<&-";

impl Inside {
    /// Creates the namespaces. Their init process first joins the control group, so that the group contains all
    /// processes of the testbed.
    pub(crate) fn begin(
        cgroups: &Cgroups,
        group: &str,
        init: &Path,
        run_folder: &Path,
        bin: &Path,
    ) -> Result<Self> {
        let procs = cgroups
            .create_leaf(&format!("{group}/init"))?
            .join("cgroup.procs");
        let script = format!(
            r#"echo 0 >"$1" && shift && {CLOSE_INHERITED} && {{ setsid "$@" </dev/null >/dev/null 2>&1 & }}"#
        );
        shell::output(
            Command::new("sh")
                .args(["-c", &script, "sh"])
                .arg(procs)
                .args([
                    "unshare",
                    "--fork",
                    "--pid",
                    "--mount-proc",
                    "--net",
                    "--mount",
                    "--propagation",
                    "private",
                    "--",
                ])
                .arg(init),
        )?;
        let mut found = None;
        shell::wait_for(
            "the init process of the testbed",
            Duration::from_secs(10),
            || {
                found = cgroups
                    .processes(&format!("{group}/init"))
                    .into_iter()
                    .find(|pid| is_init(*pid));
                found.is_some()
            },
        )?;
        let init = Identity::of(found.context("the init process of the testbed")?)?;
        Ok(Self::of(init, run_folder, bin))
    }

    /// The namespaces of a running init process.
    pub(crate) fn of(init: Identity, run_folder: &Path, bin: &Path) -> Self {
        Self {
            init,
            run_folder: run_folder.to_path_buf(),
            bin: bin.to_path_buf(),
            started: Mutex::default(),
        }
    }

    pub(crate) fn init(&self) -> Identity {
        self.init
    }

    /// A command that runs in the namespaces. Its environment contains only the variables that the programs of the
    /// testbed need.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg("-t")
            .arg(self.init.pid.to_string())
            .args(["-m", "-n", "-p", "--"])
            .arg(program);
        command
            .env_clear()
            .envs(self.environment())
            .current_dir(&self.run_folder);
        command
    }

    /// Runs a shell script in the namespaces.
    pub(crate) fn script(&self, script: &str) -> Result<String> {
        shell::output(self.command("sh").args(["-euc", script]))
    }

    /// Starts a daemon in the namespaces and in its own control group. Its output goes to `logs/NAME.log`.
    /// [`Inside::restart_ended`] restarts the daemon if it ends.
    pub(crate) fn spawn(&self, cgroups: &Cgroups, daemon: Daemon) -> Result<()> {
        let mut started = self.started()?;
        self.launch(cgroups, &daemon)?;
        started.retain(|one| one.daemon.name != daemon.name);
        started.push(Started {
            daemon,
            restarted: false,
        });
        Ok(())
    }

    /// Restarts each daemon that this command has started and that has ended. A daemon is restarted only once.
    ///
    /// # Errors
    /// Fails if a daemon has ended for the second time. The error contains the last lines of its log.
    pub(crate) fn restart_ended(&self, cgroups: &Cgroups) -> Result<()> {
        for one in self.started()?.iter_mut() {
            let name = &one.daemon.name;
            if !cgroups.processes(&one.daemon.group).is_empty() {
                continue;
            }
            let last = self.last_lines(name);
            if one.restarted {
                bail!("{name} ended twice; the last lines of logs/{name}.log:\n{last}");
            }
            progress::say(&format!(
                "{name} ended and is restarted; the last lines of logs/{name}.log:\n{last}"
            ));
            one.restarted = true;
            self.launch(cgroups, &one.daemon)?;
        }
        Ok(())
    }

    /// The last lines of a daemon's log, indented.
    pub(crate) fn last_lines(&self, daemon: &str) -> String {
        let text = fs::read(self.log(daemon)).unwrap_or_default();
        let last = shell::tail(&String::from_utf8_lossy(&text), LAST_LINES);
        let lines: Vec<String> = last.lines().map(|line| format!("    {line}")).collect();
        if lines.is_empty() {
            "    (the log is empty)".to_owned()
        } else {
            lines.join("\n")
        }
    }

    fn log(&self, daemon: &str) -> PathBuf {
        self.run_folder.join("logs").join(format!("{daemon}.log"))
    }

    fn started(&self) -> Result<MutexGuard<'_, Vec<Started>>> {
        self.started
            .lock()
            .map_err(|_| anyhow::anyhow!("a thread that started a daemon panicked"))
    }

    fn launch(&self, cgroups: &Cgroups, daemon: &Daemon) -> Result<()> {
        let procs = cgroups.create_leaf(&daemon.group)?.join("cgroup.procs");
        let script = format!(
            r#"echo 0 >"$1" || exit; umask "$2"; log=$3; shift 3; {CLOSE_INHERITED}; setsid "$@" </dev/null >>"$log" 2>&1 &"#
        );
        let mut command = self.command("sh");
        command
            .args(["-c", &script, "sh"])
            .arg(procs)
            .arg(daemon.umask)
            .arg(self.log(&daemon.name))
            .args(&daemon.command);
        // The shell starts the daemon in the background and ends at once, so that the init process of the testbed
        // becomes the parent of the daemon.
        command.stdout(Stdio::null());
        shell::output(&mut command).with_context(|| format!("cannot start {}", daemon.name))?;
        Ok(())
    }

    fn environment(&self) -> [(&'static str, String); 3] {
        let path = format!(
            "{}:{}/cni:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            self.bin.display(),
            self.bin.display()
        );
        [
            ("PATH", path),
            ("HOME", self.run_folder.display().to_string()),
            ("GOGC", super::GOGC.to_owned()),
        ]
    }
}

/// A long-running program of the testbed.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) name: String,
    /// The control group in which the program starts.
    pub(crate) group: String,
    pub(crate) umask: &'static str,
    pub(crate) command: Vec<String>,
}

/// True if the process is PID 1 of its namespace and already runs the init program. Before that, `/proc` may not be
/// mounted in the namespace.
fn is_init(pid: i32) -> bool {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    name.trim() == INIT && is_first(&status)
}

/// True if this content of `/proc/PID/status` shows PID 1 in the innermost namespace.
fn is_first(status: &str) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))
        .is_some_and(|numbers| {
            numbers.split_whitespace().count() > 1 && numbers.split_whitespace().last() == Some("1")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_process_is_recognized_as_pid_1_of_inner_namespace() {
        assert!(is_first("Name:\tx\nNSpid:\t25448\t1\n"));
        assert!(is_first("NSpid:\t99\t25448\t1\n"));
        assert!(!is_first("NSpid:\t1\n"));
        assert!(!is_first("NSpid:\t25447\n"));
        assert!(!is_first(""));
    }
}
