//! One process of the operator under test, its metrics, and its resource usage.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::metrics::Page;
use e2e::until;
use e2e::wait::Poll;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

/// The namespace of the operator's Lease.
pub(super) const NAMESPACE: &str = "scale-operator";
/// The metrics port of the process with index 0. The port of each process is this port plus the index of the process.
const FIRST_PORT: u16 = 18_080;
/// Time limit until a started process is ready, until the processes hold all shards, and until the queue is empty.
pub(super) const START: Duration = Duration::from_mins(2);
/// Time limit for the process to exit after SIGTERM. It exceeds the time that the operator waits for its reconciles.
const STOP: Duration = Duration::from_secs(40);
const SAMPLES: Duration = Duration::from_millis(500);
const REQUESTS: &str = "etcd_operator_api_requests_total";

/// A running process of the operator.
pub(super) struct Operator {
    child: Child,
    /// Processes that run at the same time have different indexes.
    pub(super) index: u16,
    pub(super) port: u16,
    pub(super) log: PathBuf,
}

/// Resources that the process has used since its start.
#[derive(Clone, Debug, Default)]
pub(super) struct Usage {
    pub(super) cpu_seconds: f64,
    /// Private memory, without pages of the program file.
    pub(super) anonymous_mebibytes: f64,
    /// Requests to the API server, by verb and resource.
    pub(super) requests: BTreeMap<String, f64>,
}

impl Operator {
    /// Starts a process of an operator that is divided into `shards` shards. 1 means that the operator is not divided.
    pub(super) fn start(program: &Path, index: u16, shards: u16) -> Result<Self> {
        let port = FIRST_PORT + index;
        let log = std::env::temp_dir().join(format!("etcd-operator-scale-{index}.log"));
        let output = File::create(&log).with_context(|| log.display().to_string())?;
        let child = Command::new(program)
            .args(["--cluster-wide", "--scope=All"])
            .arg(format!("--shards={shards}"))
            .arg(format!("--listen-addr=127.0.0.1:{port}"))
            .arg(format!("--pod-namespace={NAMESPACE}"))
            .arg(format!(
                "--pod-name=operator-{index}-{}",
                std::process::id()
            ))
            .stdout(output.try_clone()?)
            .stderr(output)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| program.display().to_string())?;
        Ok(Self {
            child,
            index,
            port,
            log,
        })
    }

    /// Waits until `/readyz` succeeds. The process may still be on standby.
    pub(super) async fn await_ready(&self) -> Result<()> {
        until("the operator is ready", START, async || {
            let answer = get(self.port, "/readyz").await?;
            Ok(if answer.starts_with("HTTP/1.1 200") {
                Poll::Done(())
            } else {
                Poll::NotYet(answer)
            })
        })
        .await
        .with_context(|| format!("its log is {}", self.log.display()))
    }

    /// The number of shards that the process holds. Without shards, 1 for the leader.
    pub(super) async fn shards_held(&self) -> Result<f64> {
        Ok(page(self.port).await?.sum("etcd_operator_shards_held", ""))
    }

    /// The number of objects that wait for their reconcile.
    pub(super) async fn queue_depth(&self) -> Result<f64> {
        Ok(page(self.port).await?.sum("etcd_operator_queue_depth", ""))
    }

    /// True if the process has exited.
    pub(super) fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Sends SIGTERM, as the kubelet does to stop a container.
    pub(super) fn terminate(&self) -> Result<()> {
        let pid = self.child.id().context("the operator has ended")?;
        let pid = Pid::from_raw(i32::try_from(pid)?).context("the operator has no PID")?;
        kill_process(pid, Signal::TERM).context("stop the operator")
    }

    /// Waits until the process has exited.
    pub(super) async fn await_end(mut self) -> Result<()> {
        let ended = timeout(STOP, self.child.wait()).await;
        let status = ended.context("the operator did not exit in time")??;
        ensure!(
            status.success(),
            "the operator failed: its log is {}",
            self.log.display()
        );
        Ok(())
    }

    pub(super) async fn usage(&self) -> Result<Usage> {
        let page = page(self.port).await?;
        let mut requests = BTreeMap::new();
        for (labels, value) in page.series(REQUESTS) {
            let part = |name: &str| {
                let (_, rest) = labels.split_once(&format!("{name}=\""))?;
                rest.split_once('"').map(|(value, _)| value.to_owned())
            };
            let what = [part("verb"), part("resource")].map(Option::unwrap_or_default);
            *requests.entry(what.join(" ")).or_default() += value;
        }
        let pid = self.child.id().context("the operator has ended")?;
        Ok(Usage {
            cpu_seconds: cpu_seconds(&fs::read_to_string(format!("/proc/{pid}/stat"))?)?,
            anonymous_mebibytes: anonymous(&fs::read_to_string(format!("/proc/{pid}/status"))?)?,
            requests,
        })
    }
}

/// The CPU time in seconds, from the text of `/proc/PID/stat`. The unit of the file is 1/100 s (`USER_HZ`).
fn cpu_seconds(stat: &str) -> Result<f64> {
    // The line is split after the last `)`, because the program name before it may contain spaces.
    let (_, fields) = stat.rsplit_once(") ").context("/proc/PID/stat")?;
    let mut ticks = fields.split(' ').skip(11).take(2).map(str::parse::<f64>);
    let (user, system) = ticks.next().zip(ticks.next()).context("/proc/PID/stat")?;
    Ok((user? + system?) / 100.0)
}

/// The private memory in the text of `/proc/PID/status`, in MiB.
fn anonymous(status: &str) -> Result<f64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kibibytes = kibibytes.context("/proc/PID/status has no RssAnon")?;
    Ok(kibibytes.trim().parse::<f64>()? / 1024.0)
}

async fn get(port: u16, path: &str) -> Result<String> {
    let read = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    timeout(Duration::from_secs(10), read).await?
}

async fn page(port: u16) -> Result<Page> {
    let answer = get(port, "/metrics").await?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    Ok(Page::new(body.to_owned()))
}

/// The highest values of the queue of any replica during a measurement.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queue {
    pub(super) depth: f64,
    pub(super) oldest_seconds: f64,
}

/// Reads the metrics of the queues twice per second, and keeps the highest values.
pub(super) struct Sampler {
    highest: Arc<Mutex<Queue>>,
    task: AbortHandle,
}

impl Sampler {
    /// Reads the metrics of the processes with these ports, until the sampler is dropped.
    pub(super) fn start(ports: Vec<u16>) -> Self {
        let highest = Arc::new(Mutex::new(Queue::default()));
        let shared = Arc::clone(&highest);
        let task = tokio::spawn(async move {
            loop {
                for port in &ports {
                    // A request fails while the operator is starting or stopping. Such a sample is skipped.
                    if let Ok(page) = page(*port).await {
                        let mut highest = shared.lock().unwrap_or_else(PoisonError::into_inner);
                        let depth = page.sum("etcd_operator_queue_depth", "");
                        let oldest = page.sum("etcd_operator_queue_oldest_seconds", "");
                        highest.depth = highest.depth.max(depth);
                        highest.oldest_seconds = highest.oldest_seconds.max(oldest);
                    }
                }
                sleep(SAMPLES).await;
            }
        });
        Self {
            highest,
            task: task.abort_handle(),
        }
    }

    pub(super) fn highest(&self) -> Queue {
        *self.highest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resource_usage_is_read_from_proc() {
        let stat = "7 (etcd operator) S 1 7 7 0 -1 4194304 900 0 0 0 250 50 0 0 20 0 5 0 100";
        assert!((cpu_seconds(stat).unwrap() - 3.0).abs() < f64::EPSILON);
        let status = "Name:\tx\nVmRSS:\t  9000 kB\nRssAnon:\t    2048 kB\nThreads:\t5\n";
        assert!((anonymous(status).unwrap() - 2.0).abs() < f64::EPSILON);
        assert!(cpu_seconds("7 (x) S 1").is_err() && anonymous("Name:\tx\n").is_err());
    }
}
