//! An etcd on localhost for the replay of recorded changes.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use api::problem::Chain;
use continuous::{BaseName, Options, Reader, ReplayError, Report, Target, Until};
use etcd::{Access, Etcd, EtcdClient};
use member::DataDirectorySettings;
use rustix::process::{Pid, Signal, kill_process};
use store::LocalStore;
use store::progress::{self, Meter, Moved};

use super::{unusable, volume_trouble};
use crate::reason::{Reason, Trouble};

/// Interval of checks whether etcd serves.
const START_POLL: Duration = Duration::from_millis(50);

/// Interval between two updates of the progress.
const PROGRESS_POLL: Duration = Duration::from_secs(1);

/// Maximum number of changes of a transaction (docs/internals/continuous-format.md).
const MAX_CHANGES: u32 = 1 << 18;

/// Maximum size of a request to etcd in bytes. A transaction has at most 32 MiB.
const MAX_REQUEST: u32 = 64 << 20;

/// Maximum length in bytes of etcd's output in an error message.
const OUTPUT_LIMIT: usize = 600;

/// An etcd on localhost. A drop without [`Self::stop`] kills the process.
pub(super) struct LocalEtcd {
    child: Child,
    client_url: String,
    log: PathBuf,
}

impl Drop for LocalEtcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl LocalEtcd {
    pub(super) fn start(
        program: &Path,
        settings: &DataDirectorySettings,
        data: &Path,
        log: &Path,
    ) -> Result<Self, Trouble> {
        let failed = |error: &io::Error| {
            let message = format!("cannot run {}: {error}", program.display());
            Trouble::new(Reason::SeedFailed, message)
        };
        let (client, peer) = free_ports().map_err(|error| failed(&error))?;
        let client_url = format!("http://127.0.0.1:{client}");
        let output = File::create(log).map_err(|error| volume_trouble("write", log, &error))?;
        let errors = output.try_clone().map_err(|error| failed(&error))?;
        let (name, peer_url) = (&settings.name, &settings.peer_url);
        let mut command = Command::new(program);
        command
            .arg(format!("--name={name}"))
            .arg(format!("--data-dir={}", data.display()))
            // etcd listens only on 127.0.0.1, so that no other client connects. Every write of another client would use
            // a revision.
            .arg(format!("--listen-client-urls={client_url}"))
            .arg(format!("--advertise-client-urls={client_url}"))
            .arg(format!("--listen-peer-urls=http://127.0.0.1:{peer}"))
            .arg(format!("--initial-advertise-peer-urls={peer_url}"))
            .arg(format!("--initial-cluster={name}={peer_url}"))
            .arg(format!("--initial-cluster-token={}", settings.token))
            // Invariant 6: with `existing`, etcd does not start without the restored data, and never forms an empty
            // cluster.
            .arg("--initial-cluster-state=existing")
            .arg(format!("--max-txn-ops={MAX_CHANGES}"))
            .arg(format!("--max-request-bytes={MAX_REQUEST}"))
            // This etcd has no quota. The etcd of the member starts later with the quota of the cluster, and raises an
            // alarm if the data exceeds it.
            .arg("--quota-backend-bytes=-1")
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors);
        // Without fsync, etcd is faster. A crash loses no data, because the next start begins again with the snapshot.
        // etcd 3.4, which has no etcdutl, also lacks this flag.
        if settings.tool.file_name() == Some(OsStr::new("etcdutl")) {
            command.arg("--unsafe-no-fsync");
        }
        // With one processor, the Go scheduler of etcd changes the order of concurrent requests less often. If etcd
        // processes a request before an earlier request, the replay must send it again.
        command.env("GOMAXPROCS", "1");
        // The variables `ETCD_*` of the pod must not set flags of this etcd, for example an automatic compaction.
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with("ETCD_") {
                command.env_remove(variable);
            }
        }
        Ok(Self {
            child: command.spawn().map_err(|error| failed(&error))?,
            client_url,
            log: log.to_owned(),
        })
    }

    /// Waits until etcd serves, and replays the changes in the directory up to `revision`.
    pub(super) async fn replay(
        &self,
        base: BaseName,
        revision: i64,
        changes: &Path,
    ) -> Result<Report, Trouble> {
        self.serves().await?;
        let connected = Target::connect(&self.client_url, None).await;
        let target = connected.map_err(|error| self.failed(&error.to_string()))?;
        let store = LocalStore::new(changes);
        let opened = Reader::open(&store, "", base).await;
        let mut reader = opened.map_err(|error| unusable(&Chain(&error).to_string()))?;
        let options = Options {
            until: Until::Revision(revision),
            // The hash of etcd's data depends on the compacted revision, so the recorded hashes can be compared only if
            // the replay also compacts.
            follow_compactions: true,
        };
        let points = (reader.base().base.revision, revision);
        let meter = Meter::default();
        let reports = async {
            let total = size(changes).unwrap_or_default();
            let updates = self.follow(points, total, &meter);
            tokio::join!(progress::serve(|| meter.read()), updates);
            std::future::pending().await
        };
        let report = tokio::select! {
            report = continuous::replay(&mut reader, &target, options) => report,
            // `reports` never ends. If the progress server fails, the replay continues, because the progress is only
            // displayed.
            report = reports => report,
        };
        report.map_err(|error| self.replay_trouble(&error))
    }

    /// Updates the progress once per second: the size of the recorded changes, multiplied by the share of the revisions
    /// that etcd has replayed.
    async fn follow(&self, (first, last): (i64, i64), total: u64, meter: &Meter) {
        let client = EtcdClient::new(Access::default());
        loop {
            if let Ok(status) = client.status(&self.client_url).await {
                let bytes = share(total, status.revision - first, last - first);
                meter.set(Moved {
                    bytes,
                    total: Some(total),
                });
            }
            tokio::time::sleep(PROGRESS_POLL).await;
        }
    }

    async fn serves(&self) -> Result<(), Trouble> {
        let client = EtcdClient::new(Access::default());
        loop {
            if let Ok(status) = client.status(&self.client_url).await
                && status.leader.is_some()
            {
                return Ok(());
            }
            if !self.runs() {
                return Err(self.failed("etcd has ended"));
            }
            tokio::time::sleep(START_POLL).await;
        }
    }

    /// Whether the process runs. A process that has ended is a zombie until its parent waits for it, and does not run.
    fn runs(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        // In this file, the state of the process follows the name of the program, which is in parentheses.
        let state = status
            .as_deref()
            .ok()
            .and_then(|text| text.rsplit_once(") "));
        state.is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
    }

    fn replay_trouble(&self, error: &ReplayError) -> Trouble {
        let text = Chain(error).to_string();
        match error {
            ReplayError::Target { .. } if text.contains("user name is empty") => Trouble::new(
                Reason::NotSupported,
                "spec.continuous: authentication is enabled in the snapshot of the base, and the operator cannot \
                 replay changes into such an etcd yet: restore a backup",
            ),
            ReplayError::Target { .. } => self.failed(&text),
            _ => unusable(&text),
        }
    }

    /// An error with the cause `why` and the end of etcd's output.
    fn failed(&self, why: &str) -> Trouble {
        let output = fs::read(&self.log).unwrap_or_default();
        let output = String::from_utf8_lossy(&output);
        let start = output.ceil_char_boundary(output.len().saturating_sub(OUTPUT_LIMIT));
        let end = output[start..].trim();
        let message =
            format!("etcd cannot replay the recorded changes: {why}; its last output: {end}");
        Trouble::new(Reason::SeedFailed, message)
    }

    /// Stops etcd, so that the database contains all changes.
    pub(super) fn stop(mut self) -> Result<(), Trouble> {
        let stopped = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let stopped = stopped.map_err(io::Error::from);
        let ended = stopped.and_then(|()| self.child.wait());
        // After SIGTERM, etcd ends itself with the same signal, so its exit status does not show an error. The caller
        // checks the revision of the database.
        ended
            .map(|_| ())
            .map_err(|error| self.failed(&format!("it cannot be stopped: {error}")))
    }
}

/// `total` multiplied by `done / all`, at most `total`.
fn share(total: u64, done: i64, all: i64) -> u64 {
    let (done, all) = (done.max(0).unsigned_abs(), all.max(1).unsigned_abs());
    let share = u128::from(total) * u128::from(done.min(all)) / u128::from(all);
    u64::try_from(share).unwrap_or(total)
}

/// The size of all files in a directory and its subdirectories in bytes.
fn size(directory: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() {
            size(&entry.path())?
        } else {
            metadata.len()
        };
    }
    Ok(bytes)
}

/// Two ports that no program uses.
fn free_ports() -> io::Result<(u16, u16)> {
    let listeners = (
        TcpListener::bind("127.0.0.1:0")?,
        TcpListener::bind("127.0.0.1:0")?,
    );
    Ok((
        listeners.0.local_addr()?.port(),
        listeners.1.local_addr()?.port(),
    ))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn replay_progress_is_share_of_replayed_revisions() {
        for (done, all, bytes) in [
            (0, 10, 0),
            (3, 10, 300),
            (10, 10, 1000),
            (11, 10, 1000),
            (-1, 10, 0),
            (0, 0, 0),
        ] {
            assert_eq!(share(1000, done, all), bytes, "{done} of {all}");
        }
        assert_eq!(share(u64::MAX, i64::MAX, i64::MAX), u64::MAX);
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("bases")).unwrap();
        fs::write(directory.path().join("bases/a"), [0; 7]).unwrap();
        fs::write(directory.path().join("b"), [0; 5]).unwrap();
        assert_eq!(size(directory.path()).unwrap(), 12);
    }

    #[test]
    fn ended_process_does_not_count_as_running() {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let mut etcd = LocalEtcd {
            child,
            client_url: String::new(),
            log: PathBuf::new(),
        };
        assert!(etcd.runs());
        etcd.child.kill().unwrap();
        while etcd.runs() {
            thread::sleep(START_POLL);
        }
        etcd.child.wait().unwrap();
        assert!(!etcd.runs());
    }
}
