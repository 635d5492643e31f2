//! Checks the Grafana dashboards of the chart, and the metrics of etcd in dashboards, alerts and recording rules. The
//! end-to-end tests run every query.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value as Json;
use serde_yaml_ng::Value;

use super::alerts::{mapping, promtool, recordings};
use super::documents::metrics;
use super::root;
use crate::{programs, shell};

const FOLDER: &str = "charts/etcd-operator/dashboards";
/// The variable for the range of `rate`. Grafana sets it, so dashboards do not define it.
const RATE_INTERVAL: &str = "__rate_interval";
/// Suffixes of the series of a histogram.
const HISTOGRAM: [&str; 3] = ["_bucket", "_count", "_sum"];
/// Metrics that etcd serves only in a cluster with several members. The end-to-end tests query them.
const ONLY_WITH_PEERS: [&str; 1] = ["etcd_network_peer_round_trip_time_seconds"];

/// A dashboard file of the chart.
struct Dashboard {
    file: String,
    text: String,
    json: Json,
}

impl Dashboard {
    fn panels(&self) -> &[Json] {
        let panels = self.json["panels"].as_array();
        panels.unwrap_or_else(|| panic!("{}: no panels", self.file))
    }

    /// The expressions, each with the title of its panel.
    fn queries(&self) -> Vec<(&str, &str)> {
        let mut found = Vec::new();
        for panel in self.panels() {
            let title = panel["title"].as_str().unwrap();
            for target in panel["targets"].as_array().unwrap() {
                found.push((title, target["expr"].as_str().unwrap()));
            }
        }
        found
    }

    fn variables(&self) -> BTreeSet<&str> {
        let list = self.json["templating"]["list"].as_array().unwrap();
        list.iter()
            .map(|one| one["name"].as_str().unwrap())
            .collect()
    }
}

fn dashboards() -> Vec<Dashboard> {
    let files = fs::read_dir(root().join(FOLDER)).unwrap();
    let paths = files.map(|file| file.unwrap().path());
    let mut found: Vec<Dashboard> = paths
        .map(|path| {
            let file = path.file_name().unwrap().to_string_lossy().into_owned();
            let text = fs::read_to_string(&path).unwrap();
            let json =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
            Dashboard { file, text, json }
        })
        .collect();
    found.sort_by(|a, b| a.file.cmp(&b.file));
    found
}

/// The names of the variables in an expression.
fn used_variables(expression: &str) -> BTreeSet<&str> {
    let rests = expression.split('$').skip(1);
    rests
        .map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            &rest[..end.unwrap_or(rest.len())]
        })
        .collect()
}

/// Replaces each variable in an expression by a value.
fn filled(expression: &str) -> String {
    let ranged = expression.replace(&format!("${RATE_INTERVAL}"), "5m");
    let names = used_variables(&ranged);
    // Longer names are replaced first, because a name can begin with another name.
    let mut names: Vec<String> = names.into_iter().map(str::to_owned).collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len()));
    let fill = |text: String, name: &String| text.replace(&format!("${name}"), "x");
    names.iter().fold(ranged, fill)
}

/// True if the dashboard defines every color of the panel. Without thresholds or mappings, Grafana shows numbers of 80
/// or more in red. Tables show the colors of mappings only in cells of the type `color-text`.
fn has_colors(panel: &Json) -> bool {
    let defaults = &panel["fieldConfig"]["defaults"];
    if panel["type"] == "stat" {
        return defaults["thresholds"].is_object() || defaults["mappings"].is_array();
    }
    let overrides = panel["fieldConfig"]["overrides"].as_array();
    overrides.into_iter().flatten().all(|change| {
        let ids: Vec<&Json> = change["properties"]
            .as_array()
            .into_iter()
            .flatten()
            .collect();
        let has = |id: &str| ids.iter().any(|property| property["id"] == id);
        has("mappings") == has("custom.cellOptions")
    })
}

#[test]
fn dashboard_panels_have_units_colors_and_known_variables() {
    let all = dashboards();
    assert_eq!(all.len(), 4, "{FOLDER}");
    let mut identifiers = BTreeSet::new();
    for dashboard in &all {
        let file = &dashboard.file;
        let identifier = dashboard.json["uid"].as_str().unwrap();
        assert!(identifiers.insert(identifier), "{file}: uid {identifier}");
        let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
        for panel in dashboard.panels() {
            let title = panel["title"].as_str().unwrap();
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{file}: {title}");
            for key in ["/description", "/fieldConfig/defaults/unit"] {
                let text = panel.pointer(key).and_then(Json::as_str);
                assert!(
                    text.is_some_and(|it| !it.is_empty()),
                    "{file}: {title}: {key}"
                );
            }
            assert!(has_colors(panel), "{file}: {title}: thresholds");
            assert_eq!(
                panel["datasource"]["uid"], "${datasource}",
                "{file}: {title}"
            );
            let place = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            for x in place("x")..place("x") + place("w") {
                for y in place("y")..place("y") + place("h") {
                    assert!(x < 24 && cells.insert((x, y)), "{file}: {title} overlaps");
                }
            }
            let references = panel["targets"].as_array().unwrap().iter();
            let references: Vec<&Json> = references.map(|target| &target["refId"]).collect();
            let unique: BTreeSet<String> = references.iter().map(ToString::to_string).collect();
            assert_eq!(references.len(), unique.len(), "{file}: {title}: refId");
        }
        let mut known = dashboard.variables();
        assert!(known.contains("datasource"), "{file}");
        let mut used = BTreeSet::from(["datasource"]);
        for (title, expression) in dashboard.queries() {
            used.extend(used_variables(expression));
            let unknown = |name: &&str| !known.contains(name) && *name != RATE_INTERVAL;
            let unknown: Vec<&str> = used.iter().copied().filter(unknown).collect();
            assert!(unknown.is_empty(), "{file}: {title}: {unknown:?}");
        }
        for variable in dashboard.json["templating"]["list"].as_array().unwrap() {
            used.extend(used_variables(variable["query"].as_str().unwrap()));
        }
        known.retain(|name| !used.contains(name));
        assert!(known.is_empty(), "{file}: unused variables {known:?}");
    }
}

/// Each query becomes a recording rule, because promtool checks only rules.
#[test]
fn prometheus_accepts_all_dashboard_queries() {
    let mut rules = Vec::new();
    for dashboard in dashboards() {
        for (_, expression) in dashboard.queries() {
            let name = format!("query_{}", rules.len());
            let (name, expression) = (Value::from(name), Value::from(filled(expression)));
            rules.push(mapping([("record", name), ("expr", expression)]));
        }
    }
    assert!(rules.len() > 50, "{} queries", rules.len());
    let group = mapping([("name", "dashboards".into()), ("rules", rules.into())]);
    let file = mapping([("groups", Value::from(vec![group]))]);
    let folder = tempfile::tempdir().unwrap();
    let text = serde_yaml_ng::to_string(&file).unwrap();
    fs::write(folder.path().join("rules.yaml"), text).unwrap();
    promtool(&["check", "rules", "rules.yaml"], folder.path());
}

/// The example configures a Prometheus that runs without the Prometheus operator.
#[test]
fn prometheus_accepts_example_configuration() {
    let example = root().join("examples/example-monitoring.yaml");
    let example: Value = serde_yaml_ng::from_str(&fs::read_to_string(example).unwrap()).unwrap();
    let configuration = example["data"]["prometheus.yml"].as_str().unwrap();
    let mut configuration: Value = serde_yaml_ng::from_str(configuration).unwrap();
    // The key `kubernetes_sd_configs` is removed, because the promtool of Debian rejects it: Debian builds Prometheus
    // without the service discovery of Kubernetes.
    for job in configuration["scrape_configs"].as_sequence_mut().unwrap() {
        let job = job.as_mapping_mut().unwrap();
        assert!(job.remove("kubernetes_sd_configs").is_some(), "{job:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let text = serde_yaml_ng::to_string(&configuration).unwrap();
    fs::write(folder.path().join("prometheus.yml"), text).unwrap();
    let words = ["check", "config", "--syntax-only", "prometheus.yml"];
    promtool(&words, folder.path());
}

/// The metric of a series, without the suffix of a histogram.
fn metric_of(series: &str) -> &str {
    let suffix = HISTOGRAM.iter().find_map(|end| series.strip_suffix(end));
    suffix.unwrap_or(series)
}

/// A query for a metric that does not exist would show an empty panel.
#[test]
fn dashboards_use_documented_metrics() {
    let document = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    for dashboard in dashboards() {
        for series in metrics(&dashboard.text) {
            let names = [series, metric_of(series)].map(|name| format!("`{name}`"));
            let documented = names.iter().any(|name| document.contains(name));
            assert!(documented, "{}: {series}", dashboard.file);
        }
    }
}

/// The metrics of etcd in a text.
fn metrics_of_etcd(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_of_etcd = |word: &&str| {
        let prefixes = ["etcd_", "grpc_server_", "process_"];
        prefixes.iter().any(|prefix| word.starts_with(prefix)) && !word.starts_with("etcd_operator")
    };
    words.filter(is_of_etcd).map(metric_of).collect()
}

/// An etcd with one member. It ends when this value is dropped.
struct Etcd {
    process: Child,
    address: SocketAddr,
    _data: tempfile::TempDir,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Etcd {
    fn start(program: &Path) -> Self {
        let free = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [address, peer] = free.map(|listener| listener.local_addr().unwrap());
        let (client, peer) = (format!("http://{address}"), format!("http://{peer}"));
        let data = tempfile::tempdir().unwrap();
        let process = Command::new(program)
            .arg("--data-dir")
            .arg(data.path())
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            process,
            address,
            _data: data,
        }
    }

    /// The response of `/metrics`. Empty if etcd does not respond.
    fn page(&self) -> String {
        let mut page = String::new();
        if let Ok(mut stream) = TcpStream::connect(self.address) {
            let _ = stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n");
            let _ = stream.read_to_string(&mut page);
        }
        page
    }
}

/// The minor releases of etcd have different metrics.
#[test]
fn every_etcd_version_serves_metrics_of_dashboards_and_rules() {
    let alerts = root().join("charts/etcd-operator/alerts.yaml");
    let mut texts = vec![fs::read_to_string(alerts).unwrap()];
    let recordings = recordings();
    let expressions = recordings.iter().map(|it| it["expr"].as_str().unwrap());
    texts.extend(expressions.map(str::to_owned));
    let all = dashboards().into_iter();
    texts.extend(
        all.filter(|one| one.file == "cluster.json")
            .map(|one| one.text),
    );
    let mut used: BTreeSet<&str> = texts
        .iter()
        .flat_map(|text| metrics_of_etcd(text))
        .collect();
    assert!(used.len() > 10, "is the format still parsed? {used:?}");
    used.retain(|metric| !ONLY_WITH_PEERS.contains(metric));
    for program in programs::etcds().unwrap() {
        let etcd = Etcd::start(&program);
        let mut page = String::new();
        shell::wait_for("etcd has a leader", Duration::from_mins(1), || {
            page = etcd.page();
            page.contains("\netcd_server_has_leader 1\n")
        })
        .unwrap();
        let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let served: BTreeSet<&str> = types.filter_map(|line| line.split(' ').next()).collect();
        let missing: Vec<&&str> = used.difference(&served).collect();
        assert!(missing.is_empty(), "{}: {missing:?}", program.display());
    }
}
