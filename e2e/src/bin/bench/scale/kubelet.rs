//! One kubelet for all simulated nodes. It assigns an IP address to each scheduled pod, starts the simulated etcd of
//! the pod, and reports the status of the pod.
//!
//! A pod is ready while its etcd runs and its cluster has a quorum, like a real member with its readiness probe. Pods
//! start without delay, because the benchmark does not measure the start of containers.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use api::names;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::cluster::Start;
use super::fleet::Fleet;
use super::load::CHANGE;
use super::nodes;

/// Number of concurrent status reports. Real kubelets of different nodes also report concurrently.
const REQUESTS: usize = 64;
/// Time to wait after a change, so that changes within this time are reported in one request.
const COALESCE: Duration = Duration::from_millis(2);
/// Pause after a failed request.
const RETRY: Duration = Duration::from_millis(500);
/// The first IP address of the pods. The module `network` routes these addresses to this machine.
const FIRST_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

/// The fields of a pod's status that change after the pod has started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Report {
    ready: bool,
    restarts: i32,
    /// True if the pod has stopped, so that the API server may delete it.
    ended: bool,
}

struct Known {
    namespace: String,
    name: String,
    /// The name of the EtcdCluster.
    cluster: String,
    node: Option<String>,
    unschedulable: bool,
    image: String,
    /// The IP address, set when the pod starts.
    address: Option<IpAddr>,
    started: Timestamp,
    wanted: Report,
    sent: Option<Report>,
    /// True while a status report of this pod is in flight.
    sending: bool,
}

#[derive(Default)]
struct State {
    pods: HashMap<String, Known>,
    uids: HashMap<IpAddr, String>,
    /// UIDs of pods whose status may differ from the reported status.
    due: HashSet<String>,
    /// For each value of the label [`CHANGE`], the time at which the watch first showed a pod with this value.
    effects: HashMap<String, Instant>,
}

/// The kubelet of all simulated nodes.
pub(super) struct Kubelet {
    client: kube::Client,
    fleet: Arc<Fleet>,
    state: Mutex<State>,
    addresses: AtomicU32,
    requests: Semaphore,
}

impl Kubelet {
    pub(super) fn new(client: kube::Client, fleet: Arc<Fleet>) -> Arc<Self> {
        Arc::new(Self {
            client,
            fleet,
            state: Mutex::default(),
            addresses: AtomicU32::new(FIRST_ADDRESS.to_bits()),
            requests: Semaphore::new(REQUESTS),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches pods and reports their status, until the caller aborts the task.
    pub(super) async fn run(self: Arc<Self>) {
        tokio::join!(self.watch(), self.report());
    }

    async fn watch(&self) {
        let config = watcher::Config::default().labels("app=etcd");
        let pods = Api::<Pod>::all(self.client.clone());
        let mut events = pin!(watcher(pods, config).default_backoff());
        let mut listed = HashSet::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listed.clear(),
                Ok(Event::InitApply(pod)) => {
                    listed.insert(pod.uid().unwrap_or_default());
                    self.apply(&pod);
                }
                Ok(Event::InitDone) => {
                    let state = self.state();
                    let known = state.pods.keys().cloned().collect::<HashSet<_>>();
                    drop(state);
                    known.difference(&listed).for_each(|uid| self.forget(uid));
                }
                Ok(Event::Apply(pod)) => self.apply(&pod),
                Ok(Event::Delete(pod)) => self.forget(&pod.uid().unwrap_or_default()),
                // An error is ignored, because `watcher` retries after it.
                Err(_) => {}
            }
        }
    }

    /// Starts etcd in a new pod, restarts etcd after a change of its image, and stops etcd in a terminating pod.
    fn apply(&self, pod: &Pod) {
        let (uid, image) = (pod.uid().unwrap_or_default(), image_of(pod));
        let mut state = self.state();
        if let Some(value) = pod.labels().get(CHANGE) {
            { state.effects.entry(value.clone()) }.or_insert_with(Instant::now);
        }
        let known = state.pods.entry(uid.clone()).or_insert_with(|| Known {
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.name_any(),
            cluster: pod
                .labels()
                .get(names::LABEL_CLUSTER)
                .cloned()
                .unwrap_or_default(),
            node: None,
            unschedulable: false,
            image: image.clone(),
            address: None,
            started: Timestamp::now(),
            wanted: Report::default(),
            sent: None,
            sending: false,
        });
        known.node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        known.unschedulable = is_unschedulable(pod);
        let ended = pod.metadata.deletion_timestamp.is_some();
        if known
            .node
            .as_deref()
            .is_none_or(|node| !nodes::is_simulated(node))
        {
            return;
        }
        let is_new = known.address.is_none() && !ended;
        let is_changed = known.image != image;
        if is_new {
            let next = self.addresses.fetch_add(1, Ordering::Relaxed);
            let address = IpAddr::V4(Ipv4Addr::from_bits(next));
            (known.address, known.started) = (Some(address), Timestamp::now());
        } else if is_changed {
            (known.image, known.started) = (image, Timestamp::now());
            known.wanted.restarts += 1;
        }
        if ended {
            (known.wanted.ended, known.wanted.ready) = (true, false);
        }
        let address = known.address;
        if let Some(address) = address {
            state.uids.insert(address, uid.clone());
        }
        state.due.insert(uid);
        drop(state);
        if let (Some(address), true) = (address, ended || is_changed) {
            self.fleet.stop(address);
        }
        if let (Some(address), Some(start), true) =
            (address, start_of(pod), !ended && (is_new || is_changed))
        {
            self.fleet.start(&start, address);
        }
        self.fleet.changed.notify_one();
    }

    /// Removes a pod that was deleted from the API server.
    fn forget(&self, uid: &str) {
        let mut state = self.state();
        let address = state.pods.remove(uid).and_then(|known| known.address);
        if let Some(address) = address {
            state.uids.remove(&address);
        }
        drop(state);
        if let Some(address) = address {
            self.fleet.stop(address);
        }
    }

    /// Reports pods whose status has changed.
    async fn report(self: &Arc<Self>) {
        loop {
            self.fleet.changed.notified().await;
            sleep(COALESCE).await;
            for (uid, report, body) in self.due() {
                let kubelet = Arc::clone(self);
                tokio::spawn(async move { kubelet.send(uid, report, body).await });
            }
        }
    }

    /// The status reports to send now. A pod has at most one report in flight, because an older report must not
    /// overwrite a newer report.
    fn due(&self) -> Vec<(String, Report, Value)> {
        let changes = self.fleet.take_changes();
        let mut state = self.state();
        let State {
            pods, uids, due, ..
        } = &mut *state;
        for (address, ready) in changes {
            let Some(uid) = uids.get(&address) else {
                continue;
            };
            if let Some(known) = pods.get_mut(uid) {
                known.wanted.ready = ready && !known.wanted.ended;
                due.insert(uid.clone());
            }
        }
        let mut reports = Vec::new();
        for uid in std::mem::take(due) {
            let Some(known) = pods.get_mut(&uid) else {
                continue;
            };
            let report = known.wanted;
            if known.sending || known.sent == Some(report) {
                continue;
            }
            known.sending = true;
            let body = known.body(&uid);
            reports.push((uid, report, body));
        }
        reports
    }

    async fn send(&self, uid: String, report: Report, body: Value) {
        let (namespace, name) = match self.state().pods.get(&uid) {
            Some(known) => (known.namespace.clone(), known.name.clone()),
            None => return,
        };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let sent: Result<(), kube::Error> = {
            let _slot = self.requests.acquire().await;
            if report.ended {
                let of_pod = Preconditions {
                    uid: Some(uid.clone()),
                    ..Preconditions::default()
                };
                let now = DeleteParams::default().grace_period(0);
                pods.delete(&name, &now.preconditions(of_pod))
                    .await
                    .map(drop)
            } else {
                let (params, patch) = (PatchParams::default(), Patch::Strategic(body));
                let sent = pods.patch_status(&name, &params, &patch).await;
                sent.map(drop)
            }
        };
        // After status 404 or 409, the report is not retried: the pod was deleted, or a new pod has its name.
        let is_final = match &sent {
            Ok(()) => true,
            Err(kube::Error::Api(status)) => [404, 409].contains(&status.code),
            Err(_) => false,
        };
        if !is_final {
            sleep(RETRY).await;
        }
        let mut state = self.state();
        if let Some(known) = state.pods.get_mut(&uid) {
            known.sending = false;
            if is_final {
                known.sent = Some(report);
            }
            state.due.insert(uid);
        }
        drop(state);
        self.fleet.changed.notify_one();
    }

    /// The time at which the watch first showed a pod with this value of the label [`CHANGE`]. `None` before that.
    pub(super) fn effect(&self, value: &str) -> Option<Instant> {
        self.state().effects.get(value).copied()
    }

    /// Number of pods whose reported status is ready.
    pub(super) fn ready(&self) -> usize {
        let ready = |known: &&Known| known.sent.is_some_and(|sent| sent.ready && !sent.ended);
        self.state().pods.values().filter(ready).count()
    }

    /// Number of pods that exist.
    pub(super) fn pods(&self) -> usize {
        self.state().pods.len()
    }

    /// Number of pods that the scheduler reports as unschedulable.
    pub(super) fn unschedulable(&self) -> usize {
        let state = self.state();
        state
            .pods
            .values()
            .filter(|known| known.unschedulable)
            .count()
    }

    /// Namespaces and names of pods in a zone. The result has at most `most` pods of each cluster.
    pub(super) fn in_zone(&self, zone: usize, most: usize) -> Vec<(String, String)> {
        let state = self.state();
        let mut counts: HashMap<(&str, &str), usize> = HashMap::new();
        let here = |known: &&Known| known.node.as_deref().and_then(nodes::zone_of) == Some(zone);
        let mut pods = Vec::new();
        for known in state.pods.values().filter(here) {
            let count = counts.entry((known.namespace.as_str(), known.cluster.as_str()));
            let count = count.or_default();
            *count += 1;
            if *count <= most {
                pods.push((known.namespace.clone(), known.name.clone()));
            }
        }
        pods
    }

    /// True if at least one of these pods exists.
    pub(super) fn has_any(&self, names: &HashSet<(String, String)>) -> bool {
        let state = self.state();
        let mut all = state.pods.values();
        all.any(|known| names.contains(&(known.namespace.clone(), known.name.clone())))
    }
}

impl Known {
    /// The patch that reports the pod's status.
    fn body(&self, uid: &str) -> Value {
        let (ready, restarts) = (self.wanted.ready, self.wanted.restarts);
        let (started, now) = (
            format!("{:.0}", self.started),
            format!("{:.0}", Timestamp::now()),
        );
        let condition = |kind: &str, holds: bool, since: &str| {
            let status = if holds { "True" } else { "False" };
            json!({"type": kind, "status": status, "lastTransitionTime": since})
        };
        let address = self.address.map(|address| address.to_string());
        json!({"metadata": {"uid": uid}, "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": started,
            "conditions": [
                condition("Initialized", true, &started),
                condition("ContainersReady", ready, &now),
                condition("Ready", ready, &now),
            ],
            "containerStatuses": [{
                "name": names::CONTAINER_ETCD, "image": self.image, "imageID": self.image,
                "containerID": format!("simulated://{uid}-{restarts}"),
                "ready": ready, "started": true, "restartCount": restarts,
                "state": {"running": {"startedAt": started}},
            }],
        }})
    }
}

fn etcd_of(pod: &Pod) -> Option<&Container> {
    let mut containers = pod.spec.as_ref()?.containers.iter();
    containers.find(|one| one.name == names::CONTAINER_ETCD)
}

fn image_of(pod: &Pod) -> String {
    let image = etcd_of(pod).and_then(|etcd| etcd.image.clone());
    image.unwrap_or_default()
}

fn is_unschedulable(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|one| one.type_ == "PodScheduled" && one.status == "False")
}

/// The etcd arguments of a member's pod. `None` for other pods.
fn start_of(pod: &Pod) -> Option<Start> {
    let etcd = etcd_of(pod)?;
    let argument = |flag: &str| {
        let mut arguments = etcd.args.iter().flatten();
        arguments.find_map(|one| one.strip_prefix(flag)?.strip_prefix('='))
    };
    let initial = argument("--initial-cluster")?.split(',');
    let initial = initial.filter_map(|member| member.split_once('='));
    let (_, tag) = etcd.image.as_deref()?.rsplit_once(':')?;
    Some(Start {
        token: argument("--initial-cluster-token")?.to_owned(),
        name: argument("--name")?.to_owned(),
        peer_url: argument("--initial-advertise-peer-urls")?.to_owned(),
        client_url: argument("--advertise-client-urls")?.to_owned(),
        initial: initial
            .map(|(name, url)| (name.to_owned(), url.to_owned()))
            .collect(),
        joins: argument("--initial-cluster-state")? == "existing",
        version: tag.trim_start_matches('v').to_owned(),
        pod: pod.uid()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_parameters_of_etcd_are_read_from_pod_arguments() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "db-a", "uid": "uid"},
            "spec": {"containers": [{"name": "etcd", "image": "quay.io/coreos/etcd:v3.6.15", "args": [
                "--name=db-a", "--initial-advertise-peer-urls=http://db-a.ns.svc:2380",
                "--advertise-client-urls=http://db-a.ns.svc:2379",
                "--initial-cluster=db-a=http://db-a.ns.svc:2380,db-b=http://db-b.ns.svc:2380",
                "--initial-cluster-state=new", "--initial-cluster-token=db-1",
            ]}]},
        }))
        .unwrap();
        let start = start_of(&pod).unwrap();
        assert_eq!((start.token.as_str(), start.joins), ("db-1", false));
        assert_eq!(
            (start.version.as_str(), start.pod.as_str()),
            ("3.6.15", "uid")
        );
        assert_eq!(start.initial.len(), 2);
        assert_eq!(start.initial[0].1, start.peer_url);
    }
}
