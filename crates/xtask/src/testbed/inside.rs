//! The testbed's own process, mount and network namespaces. What runs in them
//! cannot be left behind: when their first process ends, the kernel ends the
//! others, and with the last one go the mounts, the links and the packet
//! filter's rules. It may not know what runs inside.

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

/// The name of the program that is the first process, as the kernel shows it.
const INIT: &str = "testbed-init";

/// A way in.
#[derive(Debug)]
pub(crate) struct Inside {
    init: Identity,
    run_folder: PathBuf,
    /// The testbed's programs.
    bin: PathBuf,
    /// The daemons that this command started.
    started: Mutex<Vec<Started>>,
}

/// A daemon that this command started and that has to keep running.
#[derive(Debug)]
struct Started {
    daemon: Daemon,
    /// The daemon ended once and was started again.
    again: bool,
}

/// Lines of a daemon's log shown when the daemon ended.
const LAST_LINES: usize = 8;

/// For the shell: what the caller has open (a lock, say) is not kept open by what it starts.
const LET_GO: &str = "exec 3<&- 4<&- 5<&- 6<&- 7<&- 8<&- 9<&-";

impl Inside {
    /// Makes the namespaces with their first process, which joins the group before anything else.
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
            r#"echo 0 >"$1" && shift && {LET_GO} && {{ setsid "$@" </dev/null >/dev/null 2>&1 & }}"#
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
            "the testbed's first process",
            Duration::from_secs(10),
            || {
                found = cgroups
                    .processes(&format!("{group}/init"))
                    .into_iter()
                    .find(|pid| is_init(*pid));
                found.is_some()
            },
        )?;
        let init = Identity::of(found.context("the testbed's first process")?)?;
        Ok(Self::of(init, run_folder, bin))
    }

    /// The namespaces of a first process that runs.
    pub(crate) fn of(init: Identity, run_folder: &Path, bin: &Path) -> Self {
        Self {
            init,
            run_folder: run_folder.to_path_buf(),
            bin: bin.to_path_buf(),
            started: Mutex::default(),
        }
    }

    /// The first process.
    pub(crate) fn init(&self) -> Identity {
        self.init
    }

    /// A command that will run inside, with nothing of our environment but what programs need.
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

    /// Runs a shell script inside, to its end.
    pub(crate) fn script(&self, script: &str) -> Result<String> {
        shell::output(self.command("sh").args(["-euc", script]))
    }

    /// Starts a daemon inside, in a group of its own; its output goes to `logs/NAME.log`. From now on
    /// [`Inside::restart_ended`] expects the daemon to run.
    pub(crate) fn spawn(&self, cgroups: &Cgroups, daemon: Daemon) -> Result<()> {
        let mut started = self.started()?;
        self.launch(cgroups, &daemon)?;
        started.retain(|one| one.daemon.name != daemon.name);
        started.push(Started {
            daemon,
            again: false,
        });
        Ok(())
    }

    /// Starts each daemon of this command that has ended once more.
    ///
    /// # Errors
    /// When a daemon has ended for the second time; the error shows the last lines of its log.
    pub(crate) fn restart_ended(&self, cgroups: &Cgroups) -> Result<()> {
        for one in self.started()?.iter_mut() {
            let name = &one.daemon.name;
            if !cgroups.processes(&one.daemon.group).is_empty() {
                continue;
            }
            let last = self.last_lines(name);
            if one.again {
                bail!("{name} ended twice; the last lines of logs/{name}.log:\n{last}");
            }
            progress::say(&format!(
                "{name} ended and is started once more; the last lines of logs/{name}.log:\n{last}"
            ));
            one.again = true;
            self.launch(cgroups, &one.daemon)?;
        }
        Ok(())
    }

    /// The end of a daemon's log, indented.
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
            r#"echo 0 >"$1" || exit; umask "$2"; log=$3; shift 3; {LET_GO}; setsid "$@" </dev/null >>"$log" 2>&1 &"#
        );
        let mut command = self.command("sh");
        command
            .args(["-c", &script, "sh"])
            .arg(procs)
            .arg(daemon.umask)
            .arg(self.log(&daemon.name))
            .args(&daemon.command);
        // The shell ends at once and leaves the daemon to the first process.
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
    /// The control group it starts in.
    pub(crate) group: String,
    pub(crate) umask: &'static str,
    pub(crate) command: Vec<String>,
}

/// Whether a process is the first one of its namespace and has become the init program:
/// before that, /proc is not yet its own.
fn is_init(pid: i32) -> bool {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    name.trim() == INIT && is_first(&status)
}

/// Whether /proc/PID/status says that the process is number 1 in its innermost namespace.
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
    fn the_first_process_is_number_one_of_an_inner_namespace() {
        assert!(is_first("Name:\tx\nNSpid:\t25448\t1\n"));
        assert!(is_first("NSpid:\t99\t25448\t1\n"));
        assert!(!is_first("NSpid:\t1\n"));
        assert!(!is_first("NSpid:\t25447\n"));
        assert!(!is_first(""));
    }
}
