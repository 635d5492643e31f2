//! The metrics of each cluster for `/metrics`. The operator computes them from the status that it has just written, so
//! the metrics and the EtcdCluster agree.
//!
//! The labels are the namespace, the cluster's name, and fixed words from this file and from [`crate::reason`].

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::EtcdCluster;
use api::cluster::{ClusterPhase, EtcdClusterStatus, MemberRole, MemberStatus};
use api::conditions::{ConditionType, find, is_true};
use kube::ResourceExt;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::action::Action;
use crate::reason::Reason;

/// The metrics of all clusters of this process.
#[derive(Clone, Default)]
pub struct Metrics(Arc<Mutex<Inner>>);

type Alive = Box<dyn Fn() -> HashMap<String, bool> + Send + Sync>;

#[derive(Default)]
struct Inner {
    clusters: HashMap<String, Cluster>,
    /// Number of created, deleted, modified and failed clusters. The key is the namespace and one of these words.
    events: BTreeMap<(String, &'static str), u64>,
    alive: Option<Alive>,
}

#[derive(Default)]
struct Cluster {
    namespace: String,
    name: String,
    generation: Option<i64>,
    failed: bool,
    gauges: Vec<(&'static Gauge, i64)>,
    voters: i64,
    learners: i64,
    changes: BTreeMap<Reason, u64>,
}

struct Gauge {
    name: &'static str,
    help: &'static str,
    of: fn(&EtcdCluster, &EtcdClusterStatus) -> Option<i64>,
}

const PREFIX: &str = "etcd_operator_cluster_";

/// The gauges, each with one series per cluster.
static GAUGES: [Gauge; 15] = [
    Gauge {
        name: "certificate_expiry_timestamp_seconds",
        help: "Time at which the next certificate of the cluster expires, in seconds since 1970",
        of: |_, status| {
            let certificates = status.certificates.as_ref()?;
            Some(certificates.not_after.0.as_second())
        },
    },
    Gauge {
        name: "desired_members",
        help: "Desired number of members (spec.size)",
        of: |cluster, _| Some(cluster.spec.size.into()),
    },
    Gauge {
        name: "ready_members",
        help: "Members whose pod is ready",
        of: |_, status| count(status.members.as_ref()?.ready.len()),
    },
    Gauge {
        name: "healthy_voters",
        help: "Voters that answered the operator's last check and have a leader",
        of: |_, status| {
            let members = status.member_details.iter();
            count(members.filter(|one| votes(one) && one.healthy).count())
        },
    },
    Gauge {
        name: "has_quorum",
        help: "1 while a quorum of the members answers, 0 while no quorum answers; absent before the cluster has formed and while it hibernates",
        of: |_, status| has_quorum(status).map(Into::into),
    },
    Gauge {
        name: "available",
        help: "1 while the condition Available is True: a quorum answers and the client Service has an endpoint",
        of: |_, status| Some(is_true(&status.conditions, &ConditionType::Available).into()),
    },
    Gauge {
        name: "ready",
        help: "1 while the condition Ready is True: the cluster matches its spec",
        of: |_, status| Some(is_true(&status.conditions, &ConditionType::Ready).into()),
    },
    Gauge {
        name: "degraded",
        help: "1 while the condition Degraded is True",
        of: |_, status| Some(is_true(&status.conditions, &ConditionType::Degraded).into()),
    },
    Gauge {
        name: "paused",
        help: "1 while spec.paused is set",
        of: |_, status| Some(status.control_paused.into()),
    },
    Gauge {
        name: "db_size_bytes",
        help: "Size of the largest database file among the members, off by at most 1 MiB, or by 10 % if that is more",
        of: |_, status| {
            let members = status.member_details.iter();
            members.filter_map(|one| one.db_size).max()
        },
    },
    Gauge {
        name: "db_size_in_use_bytes",
        help: "Largest number of bytes in use in a member's database, off by at most 1 MiB, or by 10 % if that is more",
        of: |_, status| {
            let members = status.member_details.iter();
            members.filter_map(|one| one.db_size_in_use).max()
        },
    },
    Gauge {
        name: "db_quota_bytes",
        help: "Size of the database at which etcd rejects writes",
        of: |cluster, _| Some(cluster.spec.quota_bytes()),
    },
    Gauge {
        name: "no_space_alarms",
        help: "Members for which etcd has raised the alarm NOSPACE",
        of: |_, status| raised(status, "NoSpace"),
    },
    Gauge {
        name: "corrupt_alarms",
        help: "Members for which etcd has raised the alarm CORRUPT",
        of: |_, status| raised(status, "Corrupt"),
    },
    Gauge {
        name: "hibernated",
        help: "1 while no member runs because spec.hibernate is set",
        of: |_, status| Some((status.phase == Some(ClusterPhase::Hibernated)).into()),
    },
];

/// True if a quorum answers; `None` if the cluster has not formed, or hibernates.
fn has_quorum(status: &EtcdClusterStatus) -> Option<bool> {
    let available = find(&status.conditions, &ConditionType::Available)?;
    match Reason::parse(&available.reason)? {
        // `NoEndpoint` means that the client Service has no endpoints. A quorum of etcd still answers.
        Reason::QuorumHealthy | Reason::NoEndpoint => Some(true),
        Reason::QuorumLost | Reason::ForeignCluster => Some(false),
        _ => None,
    }
}

fn raised(status: &EtcdClusterStatus, kind: &str) -> Option<i64> {
    count(status.alarms.iter().filter(|one| one.kind == kind).count())
}

fn votes(member: &MemberStatus) -> bool {
    let role = member.role.as_ref();
    role.is_some_and(|role| *role != MemberRole::Learner)
}

fn count(number: usize) -> Option<i64> {
    i64::try_from(number).ok()
}

impl Metrics {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the function that returns the UIDs of existing clusters, and whether this process reconciles each of them.
    /// The metrics of all other clusters are removed.
    pub fn alive_with(&self, alive: impl Fn() -> HashMap<String, bool> + Send + Sync + 'static) {
        self.inner().alive = Some(Box::new(alive));
    }

    /// Removes the metrics of deleted clusters. Called periodically, so that memory is freed even without a scraper.
    pub fn forget(&self) {
        self.inner().sweep();
    }

    /// Records the outcome of a reconcile.
    pub fn see(&self, cluster: &EtcdCluster, status: &EtcdClusterStatus, done: &[Action]) {
        let namespace = cluster.namespace().unwrap_or_default();
        let inner = &mut *self.inner();
        let mut happened = Vec::new();
        let seen = inner
            .clusters
            .entry(cluster.uid().unwrap_or_default())
            .or_insert_with(|| Cluster {
                namespace: namespace.clone(),
                name: cluster.name_any(),
                generation: cluster.metadata.generation,
                // The first sample of a counter must be 0, because `increase()` of Prometheus ignores the first value.
                changes: [(Reason::MemberRemoved, 0)].into(),
                ..Cluster::default()
            });
        if seen.generation != cluster.metadata.generation {
            seen.generation = cluster.metadata.generation;
            happened.push("modified");
        }
        let failed = status.phase == Some(ClusterPhase::Failed);
        if failed && !seen.failed {
            happened.push("failed");
        }
        seen.failed = failed;
        let gauges = GAUGES.iter();
        seen.gauges = gauges
            .filter_map(|gauge| Some((gauge, (gauge.of)(cluster, status)?)))
            .collect();
        let members = status.member_details.iter();
        let voters = members.filter(|one| votes(one)).count();
        seen.voters = count(voters).unwrap_or_default();
        seen.learners = count(status.member_details.len() - voters).unwrap_or_default();
        for (change, _) in done.iter().filter_map(|action| action.event) {
            if matches!(change, Reason::BootstrapBegun | Reason::ClusterRecorded) {
                happened.push("created");
            }
            *seen.changes.entry(change).or_default() += 1;
        }
        for what in happened {
            *inner.events.entry((namespace.clone(), what)).or_default() += 1;
        }
    }
}

impl Inner {
    /// Removes deleted clusters and clusters of other replicas. Counts the deleted clusters in the metric
    /// `clusters_deleted`.
    fn sweep(&mut self) {
        let Some(alive) = &self.alive else { return };
        let alive = alive();
        let events = &mut self.events;
        self.clusters.retain(|uid, cluster| {
            let stays = alive.get(uid);
            if stays.is_none() {
                *events
                    .entry((cluster.namespace.clone(), "deleted"))
                    .or_default() += 1;
            }
            stays == Some(&true)
        });
    }

    fn sorted(&self) -> Vec<&Cluster> {
        let mut clusters: Vec<&Cluster> = self.clusters.values().collect();
        clusters.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        clusters
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let inner = &mut *self.inner();
        inner.sweep();
        let clusters = inner.sorted();
        for gauge in &GAUGES {
            let name = format!("{PREFIX}{}", gauge.name);
            let mut family =
                encoder.encode_descriptor(&name, gauge.help, None, MetricType::Gauge)?;
            for cluster in &clusters {
                let value = cluster
                    .gauges
                    .iter()
                    .find(|(one, _)| one.name == gauge.name);
                if let Some((_, value)) = value {
                    let labels = [
                        ("namespace", &*cluster.namespace),
                        ("cluster", &*cluster.name),
                    ];
                    ConstGauge::new(*value).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        let name = format!("{PREFIX}members");
        let help = "Members in etcd's own list, by role";
        let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
        for cluster in &clusters {
            for (role, value) in [("voter", cluster.voters), ("learner", cluster.learners)] {
                let labels = [
                    ("namespace", &*cluster.namespace),
                    ("cluster", &*cluster.name),
                    ("role", role),
                ];
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        let name = format!("{PREFIX}changes");
        let help = "Changes that this process made to the cluster, by the reason of the Event";
        let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
        for cluster in &clusters {
            for (change, value) in &cluster.changes {
                let labels = [
                    ("namespace", &*cluster.namespace),
                    ("cluster", &*cluster.name),
                    ("change", change.as_str()),
                ];
                ConstCounter::new(*value).encode(family.encode_family(&labels)?)?;
            }
        }
        for what in ["created", "deleted", "modified", "failed"] {
            let name = format!("etcd_operator_controller_clusters_{what}");
            let help = format!("Clusters that this process observed as {what}, by namespace");
            let mut family = encoder.encode_descriptor(&name, &help, None, MetricType::Counter)?;
            for ((namespace, one), value) in &inner.events {
                if *one == what {
                    let labels = [("namespace", namespace.as_str())];
                    ConstCounter::new(*value).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

#[cfg(test)]
mod tests {
    use api::EtcdClusterSpec;
    use api::cluster::MembersStatus;
    use api::conditions::{Finding, Reason, set};
    use etcd::MemberId;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::plan::actions;

    fn cluster(uid: &str, generation: i64) -> EtcdCluster {
        let mut cluster = EtcdCluster::new("db", EtcdClusterSpec::default());
        cluster.metadata.namespace = Some("prod".into());
        cluster.metadata.uid = Some(uid.into());
        cluster.metadata.generation = Some(generation);
        cluster
    }

    fn member(name: &str, role: MemberRole, healthy: bool) -> MemberStatus {
        MemberStatus {
            name: name.into(),
            id: None,
            role: Some(role),
            healthy,
            version: None,
            db_size: Some(20_480),
            db_size_in_use: Some(8192),
            revision_lag: None,
            node: None,
        }
    }

    fn status() -> EtcdClusterStatus {
        let mut conditions = Vec::new();
        let finding = Finding::new(ConditionType::Available, true, Reason::QuorumHealthy, "");
        set(
            &mut conditions,
            &finding,
            None,
            &Time(jiff::Timestamp::UNIX_EPOCH),
        );
        EtcdClusterStatus {
            members: Some(MembersStatus {
                ready: vec!["db-a".into(), "db-b".into()],
                unready: vec![],
            }),
            member_details: vec![
                member("db-a", MemberRole::Leader, true),
                member("db-b", MemberRole::Voter, false),
                member("db-c", MemberRole::Learner, true),
            ],
            conditions,
            ..EtcdClusterStatus::default()
        }
    }

    fn page(metrics: &Metrics) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(metrics.clone()));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn metrics_of_deleted_cluster_are_dropped_without_scrape() {
        let metrics = Metrics::default();
        metrics.alive_with(|| HashMap::from([("1".to_owned(), true)]));
        metrics.see(&cluster("1", 1), &status(), &[]);
        metrics.see(&cluster("2", 1), &status(), &[]);
        metrics.forget();
        let inner = metrics.inner();
        assert_eq!(inner.clusters.keys().collect::<Vec<_>>(), ["1"]);
    }

    #[test]
    fn metrics_carry_namespace_and_cluster_name() {
        let metrics = Metrics::default();
        let done = [actions::move_leader("db-a", "db-b", MemberId(2))];
        metrics.see(&cluster("1", 1), &status(), &done);
        metrics.see(&cluster("1", 2), &status(), &done);
        let page = page(&metrics);
        for line in [
            "etcd_operator_cluster_desired_members{namespace=\"prod\",cluster=\"db\"} 3",
            "etcd_operator_cluster_ready_members{namespace=\"prod\",cluster=\"db\"} 2",
            "etcd_operator_cluster_healthy_voters{namespace=\"prod\",cluster=\"db\"} 1",
            "etcd_operator_cluster_has_quorum{namespace=\"prod\",cluster=\"db\"} 1",
            "etcd_operator_cluster_available{namespace=\"prod\",cluster=\"db\"} 1",
            "etcd_operator_cluster_ready{namespace=\"prod\",cluster=\"db\"} 0",
            "etcd_operator_cluster_degraded{namespace=\"prod\",cluster=\"db\"} 0",
            "etcd_operator_cluster_paused{namespace=\"prod\",cluster=\"db\"} 0",
            "etcd_operator_cluster_db_size_bytes{namespace=\"prod\",cluster=\"db\"} 20480",
            "etcd_operator_cluster_db_size_in_use_bytes{namespace=\"prod\",cluster=\"db\"} 8192",
            "etcd_operator_cluster_db_quota_bytes{namespace=\"prod\",cluster=\"db\"} 2147483648",
            "etcd_operator_cluster_members{namespace=\"prod\",cluster=\"db\",role=\"voter\"} 2",
            "etcd_operator_cluster_members{namespace=\"prod\",cluster=\"db\",role=\"learner\"} 1",
            "etcd_operator_cluster_changes_total{namespace=\"prod\",cluster=\"db\",change=\"LeaderMoved\"} 2",
            "etcd_operator_controller_clusters_modified_total{namespace=\"prod\"} 1",
        ] {
            assert!(page.contains(line), "{line} is missing in\n{page}");
        }
    }

    #[test]
    fn scrape_removes_metrics_of_deleted_cluster() {
        let metrics = Metrics::default();
        metrics.see(&cluster("1", 1), &status(), &[]);
        metrics.alive_with(HashMap::new);
        let page = page(&metrics);
        assert!(!page.contains("cluster=\"db\""), "{page}");
        let deleted = "etcd_operator_controller_clusters_deleted_total{namespace=\"prod\"} 1";
        assert!(page.contains(deleted), "{page}");
    }

    #[test]
    fn cluster_of_released_shard_is_not_measured_and_not_counted_as_deleted() {
        let metrics = Metrics::default();
        metrics.see(&cluster("1", 1), &status(), &[]);
        metrics.alive_with(|| HashMap::from([("1".to_owned(), false)]));
        let page = page(&metrics);
        assert!(!page.contains("cluster=\"db\""), "{page}");
        assert!(!page.contains("deleted_total{"), "{page}");
    }

    #[test]
    fn quorum_metric_is_absent_unless_quorum_is_expected() {
        use crate::reason::Reason;
        let cases = [
            (Reason::QuorumHealthy, Some(true)),
            (Reason::NoEndpoint, Some(true)),
            (Reason::QuorumLost, Some(false)),
            (Reason::ForeignCluster, Some(false)),
            (Reason::Bootstrapping, None),
            (Reason::Hibernating, None),
            (Reason::Hibernated, None),
        ];
        for (reason, expected) in cases {
            let mut status = EtcdClusterStatus::default();
            let finding = Finding::new(ConditionType::Available, false, reason.into(), "");
            let now = Time(jiff::Timestamp::UNIX_EPOCH);
            set(&mut status.conditions, &finding, None, &now);
            assert_eq!(has_quorum(&status), expected, "{reason:?}");
        }
        assert_eq!(has_quorum(&EtcdClusterStatus::default()), None);
    }

    #[test]
    fn documented_metrics_are_the_metrics_of_the_operator() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let document = std::fs::read_to_string(path).unwrap();
        let page = page(&Metrics::default());
        let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let own = types.map(|line| match line.split_once(' ').unwrap() {
            (name, "counter") => format!("{name}_total"),
            (name, _) => name.to_owned(),
        });
        let own: std::collections::BTreeSet<String> = own.collect();
        let (_, section) = document.split_once("\n## The cluster operator\n").unwrap();
        let section = section.split("\n## ").next().unwrap();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
        let documented = rows.filter_map(|row| row.split('`').next());
        assert_eq!(own, documented.map(str::to_owned).collect());
    }
}
