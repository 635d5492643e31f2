//! Control groups, versions 1 and 2. All processes of a testbed are in a control group that is named after the
//! checkout, and each node and daemon has its own group below it. Commands kill the processes of a group, and never
//! search for processes by name. A group is created before its first process starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

const MOUNT: &str = "/sys/fs/cgroup";
const KILL_LIMIT: Duration = Duration::from_secs(30);

/// The control group trees of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cgroups {
    /// Version 1: one tree for each controller. `tracking` is the tree from which the processes of a group are read.
    V1 {
        trees: Vec<PathBuf>,
        tracking: PathBuf,
    },
    /// Version 2: one tree for all controllers.
    V2 { tree: PathBuf },
}

impl Cgroups {
    pub(crate) fn detect() -> Result<Self> {
        Self::detect_at(Path::new(MOUNT))
    }

    fn detect_at(mount: &Path) -> Result<Self> {
        if mount.join("cgroup.controllers").is_file() {
            return Ok(Self::V2 {
                tree: mount.to_path_buf(),
            });
        }
        let mut trees: Vec<PathBuf> = fs::read_dir(mount)
            .with_context(|| format!("{}: control groups are not mounted", mount.display()))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            // Symlinks are skipped, because they name a tree a second time, such as `cpu` for `cpu,cpuacct`. If a
            // version 2 tree (`unified`) is mounted too, it is included, because container runtimes also create groups
            // in this tree.
            .filter(|path| !path.is_symlink() && path.join("cgroup.procs").is_file())
            .collect();
        trees.sort();
        let tracking = ["pids", "systemd", "freezer", "memory"]
            .iter()
            .map(|name| mount.join(name))
            .find(|path| trees.contains(path));
        match tracking {
            Some(tracking) => Ok(Self::V1 { trees, tracking }),
            None => bail!(
                "{} has neither cgroup v2 nor a v1 tree named pids, systemd, freezer or memory",
                mount.display()
            ),
        }
    }

    fn trees(&self) -> Vec<&Path> {
        match self {
            Self::V1 { trees, .. } => trees.iter().map(PathBuf::as_path).collect(),
            Self::V2 { tree } => vec![tree],
        }
    }

    /// The folder of the group in the tree from which its processes are read.
    pub(crate) fn tracking_folder(&self, group: &str) -> PathBuf {
        match self {
            Self::V1 { tracking, .. } => tracking.join(group),
            Self::V2 { tree } => tree.join(group),
        }
    }

    /// Creates a group with all controllers, so that a kubelet can create groups below it.
    pub(crate) fn create(&self, group: &str) -> Result<()> {
        for tree in self.trees() {
            let mut path = tree.to_path_buf();
            for part in group.split('/') {
                if matches!(self, Self::V2 { .. }) {
                    enable_controllers(&path);
                }
                path.push(part);
                if !path.is_dir() {
                    fs::create_dir(&path).with_context(|| {
                        format!("cannot create the control group {}", path.display())
                    })?;
                }
                copy_cpuset(&path);
            }
            if matches!(self, Self::V2 { .. }) {
                enable_controllers(&path);
            }
        }
        Ok(())
    }

    /// Creates a group without controllers, for one daemon.
    pub(crate) fn create_leaf(&self, group: &str) -> Result<PathBuf> {
        let path = self.tracking_folder(group);
        fs::create_dir_all(&path)
            .with_context(|| format!("cannot create the control group {}", path.display()))?;
        Ok(path)
    }

    /// The processes in a group and the groups below it.
    pub(crate) fn processes(&self, group: &str) -> Vec<i32> {
        let mut found = Vec::new();
        collect(&self.tracking_folder(group), &mut found);
        found
    }

    /// Kills all processes in a group and the groups below it. Returns when they have ended.
    pub(crate) fn kill(&self, group: &str) -> Result<()> {
        let begun = Instant::now();
        loop {
            let left = self.processes(group);
            if left.is_empty() {
                return Ok(());
            }
            if begun.elapsed() > KILL_LIMIT {
                bail!(
                    "processes {left:?} of control group {group} cannot be killed: they may hang in the kernel (see `ps -o pid,stat,wchan,cmd`)"
                );
            }
            for pid in left {
                kill_member(group, pid);
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Removes a group and the groups below it, in all trees.
    pub(crate) fn remove(&self, group: &str) -> Result<()> {
        let begun = Instant::now();
        loop {
            let left: Vec<PathBuf> = self
                .trees()
                .into_iter()
                .map(|tree| tree.join(group))
                .filter(|path| !remove_tree(path))
                .collect();
            if left.is_empty() {
                return Ok(());
            }
            if begun.elapsed() > KILL_LIMIT {
                bail!("cannot remove the control groups {left:?}");
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Kills a process if it is in the group. The pidfd is opened before the check, so that the signal never reaches a
/// later process with the same PID.
fn kill_member(group: &str, pid: i32) {
    let Some(id) = Pid::from_raw(pid) else { return };
    let Ok(held) = pidfd_open(id, PidfdFlags::empty()) else {
        return;
    };
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    if is_member(&groups, group) {
        // An error is ignored, because it means that the process has already ended.
        let _ = pidfd_send_signal(held, Signal::KILL);
    }
}

/// True if the process is in `group` or a group below it, in any tree. `groups` is the content of `/proc/PID/cgroup`.
fn is_member(groups: &str, group: &str) -> bool {
    let wanted = format!("/{group}");
    groups
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .any(|path| {
            path.match_indices(&wanted).any(|(at, _)| {
                let rest = &path[at + wanted.len()..];
                rest.is_empty() || rest.starts_with('/')
            })
        })
}

fn collect(group: &Path, found: &mut Vec<i32>) {
    let procs = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    found.extend(
        procs
            .lines()
            .filter_map(|line| line.trim().parse::<i32>().ok())
            .filter(|pid| *pid > 0),
    );
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), found);
        }
    }
}

/// Removes a group and all groups below it. Returns false if the group still exists.
fn remove_tree(group: &Path) -> bool {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    // `remove_dir` removes the group although it contains files, because the kernel removes these files with the
    // group.
    let _ = fs::remove_dir(group);
    !group.exists()
}

/// Version 1: copies the CPUs and memory nodes of the parent into a new group. Without this copy, a new group has none,
/// and accepts no process.
fn copy_cpuset(group: &Path) {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let own = group.join(file);
        let empty = fs::read_to_string(&own).is_ok_and(|text| text.trim().is_empty());
        if let (true, Some(parent)) = (empty, group.parent())
            && let Ok(value) = fs::read_to_string(parent.join(file))
        {
            let _ = fs::write(&own, value);
        }
    }
}

/// Version 2: enables the controllers for the groups below this group, in separate writes. The kernel rejects a whole
/// write if one of its controllers is not available.
fn enable_controllers(group: &Path) {
    let controllers = fs::read_to_string(group.join("cgroup.controllers")).unwrap_or_default();
    for controller in controllers.split_whitespace() {
        let _ = fs::write(
            group.join("cgroup.subtree_control"),
            format!("+{controller}"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(path: &Path, files: &[&str]) {
        fs::create_dir_all(path).unwrap();
        for file in files {
            fs::write(path.join(file), "").unwrap();
        }
    }

    #[test]
    fn cgroup_v1_detection_finds_all_trees_and_selects_pids_tree() {
        let dir = tempfile::tempdir().unwrap();
        for tree in ["cpu", "pids", "systemd"] {
            group(&dir.path().join(tree), &["cgroup.procs"]);
        }
        group(
            &dir.path().join("unified"),
            &["cgroup.procs", "cgroup.controllers"],
        );
        let found = Cgroups::detect_at(dir.path()).unwrap();
        let Cgroups::V1 { trees, tracking } = found else {
            panic!("{found:?}")
        };
        assert_eq!(trees.len(), 4);
        assert_eq!(tracking, dir.path().join("pids"));
    }

    #[test]
    fn cgroup_v2_is_detected_by_controllers_file() {
        let dir = tempfile::tempdir().unwrap();
        group(dir.path(), &["cgroup.controllers", "cgroup.procs"]);
        assert_eq!(
            Cgroups::detect_at(dir.path()).unwrap(),
            Cgroups::V2 {
                tree: dir.path().into()
            }
        );
    }

    #[test]
    fn cgroup_detection_fails_on_machine_without_cgroups() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Cgroups::detect_at(dir.path()).is_err());
    }

    #[test]
    fn only_processes_in_and_below_cgroup_are_found() {
        let dir = tempfile::tempdir().unwrap();
        group(dir.path(), &["cgroup.controllers"]);
        for (path, pids) in [
            ("ours", "1\n2\n"),
            ("ours/deep/er", "3\n"),
            ("other", "4\n"),
        ] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
            fs::write(dir.path().join(path).join("cgroup.procs"), pids).unwrap();
        }
        let mut pids = Cgroups::detect_at(dir.path()).unwrap().processes("ours");
        pids.sort_unstable();
        assert_eq!(pids, [1, 2, 3]);
    }

    #[test]
    fn cgroup_membership_compares_whole_group_names() {
        let groups = "4:pids:/etb-1234/node-0/kubepods/x\n0::/\n";
        assert!(is_member(groups, "etb-1234"));
        assert!(is_member(groups, "etb-1234/node-0"));
        assert!(!is_member(groups, "etb-1234/node"));
        assert!(!is_member(groups, "etb-123"));
        assert!(!is_member("", "etb-1234"));
    }
}
