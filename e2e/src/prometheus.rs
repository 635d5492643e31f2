//! A Prometheus server on this machine, which scrapes the pods of a sandbox and evaluates alerts.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::wait::Poll;
use crate::{DEADLINE, Sandbox, discovery, until};

/// The interval of scrapes and of evaluations of the alerts.
const INTERVAL: &str = "1s";
/// The interval at which the list of pods is updated.
const DISCOVERY_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit for the start of Prometheus, and for a response of its API.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A Prometheus server.
pub struct Prometheus {
    address: String,
    /// `None` if another process runs Prometheus.
    _server: Option<Server>,
}

/// The Prometheus process. It is killed when this value is dropped.
struct Server {
    discovery: JoinHandle<()>,
    _process: Child,
    _folder: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.discovery.abort();
    }
}

impl Prometheus {
    /// Starts Prometheus, which scrapes the pods of the sandbox with `jobs` ([`discovery::scrape_jobs`]) and evaluates
    /// the rules in `groups`.
    ///
    /// # Errors
    /// Fails if Prometheus is missing or rejects the configuration. The error contains the last line of the log of
    /// Prometheus.
    pub async fn start(sandbox: &Sandbox, mut jobs: Vec<Value>, groups: &Value) -> Result<Self> {
        let folder = TempDir::new()?;
        let (pods, rules) = (folder.path().join("pods.json"), folder.path().join("rules"));
        for job in &mut jobs {
            job["file_sd_configs"] = json!([{"files": [pods], "refresh_interval": "5s"}]);
        }
        let configuration = json!({
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [rules],
            "scrape_configs": jobs,
        });
        // The configuration is written as JSON, which is also valid YAML.
        let file = folder.path().join("prometheus.yml");
        std::fs::write(&file, configuration.to_string())?;
        std::fs::write(&rules, json!({"groups": groups}).to_string())?;
        std::fs::write(&pods, "[]")?;
        // `setpriv` makes the kernel kill Prometheus if this process is killed.
        let mut process = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "prometheus",
                "--web.listen-address=127.0.0.1:0",
            ])
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.path().join("data").display()
            ))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("setpriv cannot be started: install the package util-linux")?;
        let stderr = process.stderr.take().context("stderr is piped")?;
        let mut log = BufReader::new(stderr).lines();
        let address = timeout(ANSWER_TIMEOUT, listen_address(&mut log)).await;
        let address = address.context("prometheus did not start to listen in time")??;
        // The log is read until its end, because Prometheus would block on a full pipe.
        tokio::spawn(async move {
            while let Ok(Some(line)) = log.next_line().await {
                if line.contains("level=error") || line.contains("level=warn") {
                    println!("prometheus: {line}");
                }
            }
        });
        let discovery = tokio::spawn(write_targets(sandbox.api(), pods));
        let server = Self {
            address,
            _server: Some(Server {
                discovery,
                _process: process,
                _folder: folder,
            }),
        };
        until("Prometheus answers", ANSWER_TIMEOUT, async || {
            server.get("/api/v1/alerts").await.map(Poll::Done)
        })
        .await?;
        Ok(server)
    }

    /// A server that another process runs. `address` is the result of [`Self::address`] in that process.
    #[must_use]
    pub fn at(address: String) -> Self {
        Self {
            address,
            _server: None,
        }
    }

    /// The host and port of the server.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The series that match an expression now, each with `metric` and `value`.
    ///
    /// # Errors
    /// Fails if Prometheus rejects the expression or does not answer.
    pub async fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let path = format!("/api/v1/query?query={}", encoded(expression));
        self.series(&path)
            .await
            .with_context(|| expression.to_owned())
    }

    /// The series that match an expression in a time range, each with `metric` and `values`. `start` and `end` are
    /// Unix seconds, and `step` is the distance of two values in seconds.
    ///
    /// # Errors
    /// Fails if Prometheus rejects the expression or does not answer.
    pub async fn query_range(
        &self,
        expression: &str,
        (start, end): (f64, f64),
        step: f64,
    ) -> Result<Vec<Value>> {
        let query = encoded(expression);
        let path = format!("/api/v1/query_range?query={query}&start={start}&end={end}&step={step}");
        self.series(&path)
            .await
            .with_context(|| expression.to_owned())
    }

    /// The scraped targets, each with `labels`, `scrapePool`, `health` and `lastError`.
    ///
    /// # Errors
    /// Fails if Prometheus does not answer.
    pub async fn targets(&self) -> Result<Vec<Value>> {
        let data = self.get("/api/v1/targets?state=active").await?;
        let targets = data["activeTargets"].as_array();
        targets.cloned().context("no activeTargets")
    }

    /// Waits until the alert fires with these labels.
    ///
    /// # Errors
    /// Fails if the alert does not fire in time. The error contains all pending and firing alerts.
    pub async fn await_firing(&self, alert: &str, labels: &[(&str, &str)]) -> Result<()> {
        let what = format!("{alert} fires for {labels:?}");
        until(&what, DEADLINE, async || {
            let alerts = self.alerts(alert).await?;
            let fires = |one: &Value| one["state"] == "firing" && has_labels(one, labels);
            Ok(if alerts.iter().any(fires) {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{alerts:?}"))
            })
        })
        .await
    }

    /// Waits until the alert with these labels is neither pending nor firing.
    ///
    /// # Errors
    /// Fails if the alert is still active at the time limit. The error contains the alert.
    pub async fn await_resolved(&self, alert: &str, labels: &[(&str, &str)]) -> Result<()> {
        let what = format!("{alert} ends for {labels:?}");
        until(&what, DEADLINE, async || {
            let mut alerts = self.alerts(alert).await?;
            alerts.retain(|one| has_labels(one, labels));
            Ok(if alerts.is_empty() {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{alerts:?}"))
            })
        })
        .await
    }

    /// The pending and firing alerts, each with `labels`, `annotations`, `state` and `activeAt`.
    ///
    /// # Errors
    /// Fails if Prometheus does not answer.
    pub async fn active_alerts(&self) -> Result<Vec<Value>> {
        let mut data = self.get("/api/v1/alerts").await?;
        match data["alerts"].take() {
            Value::Array(alerts) => Ok(alerts),
            other => bail!("no alerts: {other}"),
        }
    }

    /// The pending and firing alerts with this name.
    async fn alerts(&self, name: &str) -> Result<Vec<Value>> {
        let mut alerts = self.active_alerts().await?;
        alerts.retain(|alert| alert["labels"]["alertname"] == name);
        Ok(alerts)
    }

    /// The series in the response to a query.
    async fn series(&self, path: &str) -> Result<Vec<Value>> {
        match self.get(path).await?["result"].take() {
            Value::Array(series) => Ok(series),
            other => bail!("no series: {other}"),
        }
    }

    async fn get(&self, path: &str) -> Result<Value> {
        let asked = async {
            let mut stream = TcpStream::connect(&self.address).await?;
            let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
            stream.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            anyhow::Ok(answer)
        };
        let answer = timeout(ANSWER_TIMEOUT, asked)
            .await
            .context("no answer in time")??;
        let (_, body) = answer.split_once("\r\n\r\n").context("no HTTP response")?;
        let mut answer: Value = serde_json::from_str(body).with_context(|| body.to_owned())?;
        ensure!(answer["status"] == "success", "{answer}");
        Ok(answer["data"].take())
    }
}

/// Reads the log until it contains the address of the server.
async fn listen_address(log: &mut Lines<BufReader<ChildStderr>>) -> Result<String> {
    let mut last = String::from("no output");
    while let Some(line) = log.next_line().await? {
        if let Some((_, address)) = line.split_once("msg=\"Listening on\" address=") {
            return Ok(address.trim().to_owned());
        }
        last = line;
    }
    bail!(
        "prometheus exited too early; its last output: {last}. If prometheus is not on the PATH, run the test with \
         the environment of `cargo xtask testbed env`"
    )
}

/// Writes the list of targets to the file whenever the list has changed.
async fn write_targets(pods: Api<Pod>, file: PathBuf) {
    let mut written = Value::Null;
    loop {
        match pods.list(&ListParams::default()).await {
            Ok(list) => {
                let targets = discovery::targets(&list.items);
                if targets != written {
                    // Prometheus never reads an incomplete file, because the rename is atomic.
                    let next = file.with_extension("next");
                    let renamed = std::fs::write(&next, targets.to_string())
                        .and_then(|()| std::fs::rename(&next, &file));
                    match renamed {
                        Ok(()) => written = targets,
                        Err(error) => println!("{}: {error}", file.display()),
                    }
                }
            }
            Err(error) => println!("the pods cannot be listed: {error}"),
        }
        sleep(DISCOVERY_INTERVAL).await;
    }
}

fn has_labels(alert: &Value, labels: &[(&str, &str)]) -> bool {
    labels
        .iter()
        .all(|(key, value)| alert["labels"][key] == **value)
}

/// Escapes every byte except letters and digits, for use in a URL.
fn encoded(text: &str) -> String {
    let escaped = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prometheus_expressions_are_escaped_for_urls() {
        assert_eq!(encoded("up{a=\"b\"}"), "up%7Ba%3D%22b%22%7D");
    }

    #[test]
    fn prometheus_alert_matches_only_with_all_labels() {
        let alert = json!({"labels": {"cluster": "c", "pod": "p"}});
        assert!(has_labels(&alert, &[("cluster", "c")]));
        assert!(!has_labels(&alert, &[("cluster", "c"), ("pod", "q")]));
    }
}
