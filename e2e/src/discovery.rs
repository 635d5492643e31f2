//! Creates scrape jobs of Prometheus from a PodMonitor, as the Prometheus operator does.
//!
//! Debian's build of Prometheus cannot discover Kubernetes pods. This module therefore creates a list of pods with the
//! labels that the discovery would set.

use std::net::IpAddr;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Map, Value, json};

/// The prefix of the labels with which Prometheus' discovery of pods describes a pod.
const POD: &str = "__meta_kubernetes_pod";

/// The targets for `file_sd_configs`: the container ports of each pod that has an IP address.
pub(crate) fn targets(pods: &[Pod]) -> Value {
    let mut found = Vec::new();
    for pod in pods {
        let status = pod.status.as_ref();
        let address = status.and_then(|status| status.pod_ip.as_ref()?.parse().ok());
        let (Some(address), Some(spec)) = (address, &pod.spec) else {
            continue;
        };
        let phase = status.and_then(|status| status.phase.as_deref());
        let mut labels = Map::from_iter([
            ("__meta_kubernetes_namespace".into(), json!(pod.namespace())),
            (format!("{POD}_name"), json!(pod.name_any())),
            (format!("{POD}_phase"), json!(phase)),
        ]);
        for (label, value) in pod.labels() {
            labels.insert(label_of(label), json!(value));
            labels.insert(presence_of(label), json!("true"));
        }
        for container in &spec.containers {
            for port in container.ports.iter().flatten() {
                let mut labels = labels.clone();
                labels.insert(format!("{POD}_container_name"), json!(container.name));
                labels.insert(format!("{POD}_container_port_name"), json!(port.name));
                let address = match address {
                    IpAddr::V4(address) => format!("{address}:{}", port.container_port),
                    IpAddr::V6(address) => format!("[{address}]:{}", port.container_port),
                };
                found.push(json!({"targets": [address], "labels": labels}));
            }
        }
    }
    json!(found)
}

fn sanitized(label: &str) -> String {
    label.replace(|c: char| !c.is_ascii_alphanumeric(), "_")
}

fn label_of(label: &str) -> String {
    format!("{POD}_label_{}", sanitized(label))
}

fn presence_of(label: &str) -> String {
    format!("{POD}_labelpresent_{}", sanitized(label))
}

/// The scrape jobs of a PodMonitor, without their targets.
///
/// # Errors
/// Fails if the PodMonitor uses a feature that this function does not support.
pub fn scrape_jobs(monitor: &Value) -> Result<Vec<Value>> {
    let text = |pointer: &str| monitor.pointer(pointer).and_then(Value::as_str);
    let namespace = text("/metadata/namespace").context("no namespace")?;
    let name = format!("{namespace}/{}", text("/metadata/name").context("no name")?);
    let spec = &monitor["spec"];
    let mut common = vec![drop_if(&format!("{POD}_phase"), "Failed|Succeeded")];
    if spec["namespaceSelector"]["any"] != true {
        let names = spec["namespaceSelector"]["matchNames"].as_array();
        let names = names.map_or_else(|| vec![namespace], |names| strings(names));
        common.push(keep_if("__meta_kubernetes_namespace", &names.join("|")));
    }
    for (label, value) in spec["selector"]["matchLabels"]
        .as_object()
        .into_iter()
        .flatten()
    {
        common.push(keep_if(
            &label_of(label),
            value.as_str().context("a label")?,
        ));
    }
    let expressions = spec["selector"]["matchExpressions"].as_array();
    for expression in expressions.into_iter().flatten() {
        let key = expression["key"].as_str().context("no key")?;
        if expression["operator"] != "Exists" {
            bail!("unknown operator: {expression}");
        }
        common.push(keep_if(&presence_of(key), "true"));
    }
    let endpoints = spec["podMetricsEndpoints"].as_array();
    let endpoints = endpoints.context("no podMetricsEndpoints")?.iter();
    let jobs = endpoints.enumerate().map(|(index, endpoint)| {
        let port = endpoint["port"].as_str().context("no port")?;
        let mut relabelings = common.clone();
        relabelings.push(keep_if(&format!("{POD}_container_port_name"), port));
        relabelings.push(copy("__meta_kubernetes_namespace", "namespace"));
        relabelings.push(copy(&format!("{POD}_container_name"), "container"));
        relabelings.push(copy(&format!("{POD}_name"), "pod"));
        relabelings.push(json!({"target_label": "job", "replacement": name}));
        relabelings.push(json!({"target_label": "endpoint", "replacement": port}));
        relabelings.extend(relabelings_of(&endpoint["relabelings"]));
        Ok(json!({
            "job_name": format!("podMonitor/{name}/{index}"),
            "honor_labels": endpoint["honorLabels"] == true,
            "relabel_configs": relabelings,
            "metric_relabel_configs": relabelings_of(&endpoint["metricRelabelings"]),
        }))
    });
    jobs.collect()
}

fn strings(list: &[Value]) -> Vec<&str> {
    list.iter().filter_map(Value::as_str).collect()
}

fn keep_if(label: &str, pattern: &str) -> Value {
    json!({"source_labels": [label], "regex": pattern, "action": "keep"})
}

fn drop_if(label: &str, pattern: &str) -> Value {
    json!({"source_labels": [label], "regex": pattern, "action": "drop"})
}

fn copy(from: &str, to: &str) -> Value {
    json!({"source_labels": [from], "target_label": to})
}

/// Translates the field names of the Prometheus operator (`sourceLabels`) into those of Prometheus (`source_labels`).
fn relabelings_of(list: &Value) -> Vec<Value> {
    let renamed = |(key, value): (&String, &Value)| {
        let key = match key.as_str() {
            "sourceLabels" => "source_labels",
            "targetLabel" => "target_label",
            key => key,
        };
        (key.to_owned(), value.clone())
    };
    let list = list.as_array().into_iter().flatten();
    let maps = list.filter_map(Value::as_object);
    maps.map(|map| map.iter().map(renamed).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_ports_become_prometheus_targets_with_pod_labels() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "c-1", "namespace": "n", "labels": {"a.b/c": "d"}},
            "spec": {"containers": [{"name": "etcd", "ports": [{"name": "metrics", "containerPort": 2381}]}]},
            "status": {"podIP": "fd00::7", "phase": "Running"},
        }))
        .unwrap();
        let pending = Pod::default();
        let found = targets(&[pod, pending]);
        assert_eq!(found.as_array().map(Vec::len), Some(1));
        assert_eq!(found[0]["targets"], json!(["[fd00::7]:2381"]));
        let labels = &found[0]["labels"];
        assert_eq!(labels["__meta_kubernetes_pod_label_a_b_c"], "d");
        assert_eq!(labels["__meta_kubernetes_pod_labelpresent_a_b_c"], "true");
        assert_eq!(
            labels["__meta_kubernetes_pod_container_port_name"],
            "metrics"
        );
    }

    #[test]
    fn pod_monitor_becomes_prometheus_scrape_job() {
        let monitor = json!({
            "metadata": {"name": "members", "namespace": "n"},
            "spec": {
                "selector": {"matchLabels": {"app": "etcd"}, "matchExpressions": [{"key": "e", "operator": "Exists"}]},
                "podMetricsEndpoints": [{"port": "metrics", "relabelings": [{"sourceLabels": ["x"], "targetLabel": "y"}]}],
            },
        });
        let jobs = scrape_jobs(&monitor).unwrap();
        assert_eq!(jobs.len(), 1);
        assert_eq!(jobs[0]["job_name"], "podMonitor/n/members/0");
        let relabelings = jobs[0]["relabel_configs"].as_array().unwrap();
        for expected in [
            keep_if("__meta_kubernetes_namespace", "n"),
            keep_if("__meta_kubernetes_pod_label_app", "etcd"),
            keep_if("__meta_kubernetes_pod_labelpresent_e", "true"),
            keep_if("__meta_kubernetes_pod_container_port_name", "metrics"),
            json!({"source_labels": ["x"], "target_label": "y"}),
        ] {
            assert!(relabelings.contains(&expected), "{expected}");
        }
    }
}
