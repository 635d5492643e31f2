//! Prometheus scrapes operators and members as the chart's PodMonitors describe, and evaluates the chart's rules with
//! shortened time ranges. The test causes and repairs faults, and checks that each alert fires and ends. The test also
//! checks that the queries of the dashboards and the recording rules return data. With the environment variable
//! `UPDATE`, the test replaces pictures and command outputs in the documentation.

mod load;
mod stores;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicUsize;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};
use e2e::bucket::Bucket;
use e2e::manifests::{aws_secret, backup, backup_with, restore_with};
use e2e::objects::{Kind, await_complete, field, leader, ready_members};
use e2e::rules::{self, Rules};
use e2e::sandbox::bare_scenario;
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Prometheus, Sandbox, Testbed, plugin, step, until};
use futures::try_join;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::Value;

use self::load::{fill, keep_full, keep_writing, move_leader};
use crate::dashboards;
use crate::fixtures::{cluster_with, newest_version, root};

/// Chart values that enable all scrape jobs and alerts. The cluster `orders` with TLS has its own PodMonitor.
const MONITORS: &str = "podMonitor.enabled=true,memberMonitor.enabled=true,prometheusRule.enabled=true,\
                        prometheusRule.certificateSeconds=3600,clusterMonitors[0].cluster=orders,\
                        clusterMonitors[0].relabelings[0].targetLabel=team,\
                        clusterMonitors[0].relabelings[0].replacement=payments";
/// Lines under `spec` of the cluster `orders`. Its certificates expire before `certificateSeconds`, so an alert fires.
const TLS: &str = "  TLS: {generated: {certificateDuration: 30m}}\n";
/// Lines under `spec` of the cluster `carts`, which has a small quota.
const SMALL: &str = "  etcd: {quotaBackendBytes: 16777216}
  pod:
    persistentVolumeClaimSpec:
      accessModes: [ReadWriteOnce]
      resources: {requests: {storage: 128Mi}}
";
/// Alerts that this test does not cause, each with the reason. Tests with promtool cover all alerts.
const NOT_CAUSED: [(&str, &str); 2] = [
    (
        "EtcdHighRoundTrip",
        "etcd records a moving average of round trips every 30 s, so the alert ends minutes after a repair",
    ),
    (
        "EtcdOperatorQueueOld",
        "an operator reconciles 64 objects at a time, so only hundreds of hanging objects form a queue",
    ),
];
/// Alerts that a slow disk causes.
const SLOW_DISK: [&str; 3] = ["EtcdSlowFsync", "EtcdSlowCommit", "EtcdSlowApply"];
/// The number of writes per second to which the test limits a disk to make it slow.
const SLOW_WRITES: u32 = 10;
/// Number of leadership transfers within a few seconds. The alert EtcdLeaderChangesOften needs four.
const LEADER_MOVES: usize = 6;
/// The size from which the test scales a cluster to one member. The alert EtcdMembersReplacedOften fires after more
/// than three removals.
const LARGE: usize = 6;

/// The objects that the steps of the test share.
struct Monitor<'a> {
    sandbox: &'a Sandbox,
    testbed: Testbed<'a>,
    prometheus: Prometheus,
    /// The time at which Prometheus started.
    started: SystemTime,
    /// The alerts of the chart.
    alerts: BTreeSet<String>,
    /// The names of the chart's recording rules.
    recordings: Vec<String>,
    /// The alerts that have fired. The value is true after the alert has ended.
    fired: RefCell<BTreeMap<String, bool>>,
}

impl<'a> Monitor<'a> {
    /// Starts Prometheus with the scrape jobs and alerts of the chart.
    async fn start(sandbox: &'a Sandbox) -> Result<Self> {
        let testbed = Testbed::of(sandbox)?;
        let Rules { jobs, groups } = Rules::render(sandbox, MONITORS).await?;
        ensure!(jobs.len() == 5, "{} jobs", jobs.len());
        // Most time ranges in the alerts become 30 s. The ranges 1h and 15m become 2 min and 1 min, because some
        // faults of this test need more than 30 s.
        let range = |time: &str| match time {
            "1h" => String::from("2m"),
            "15m" => String::from("1m"),
            _ => String::from("30s"),
        };
        let groups = rules::with_times(&groups, |_| "1s".to_owned(), range);
        // `EtcdFragmented` ignores databases below a limit. The test lowers this limit, because the databases of the
        // test are small.
        let smaller = groups.to_string().replace("> 268435456", "> 1048576");
        ensure!(smaller.contains("> 1048576"), "{groups}");
        let groups: Value = serde_json::from_str(&smaller)?;
        let rules = groups.as_array().into_iter().flatten();
        let rules = rules.flat_map(|group| group["rules"].as_array().into_iter().flatten());
        let (mut alerts, mut recordings) = (BTreeSet::new(), Vec::new());
        for rule in rules {
            alerts.extend(rule["alert"].as_str().map(str::to_owned));
            recordings.extend(rule["record"].as_str().map(str::to_owned));
        }
        ensure!(!recordings.is_empty(), "no recording rules: {groups}");
        Ok(Self {
            alerts,
            recordings,
            started: SystemTime::now(),
            prometheus: Prometheus::start(sandbox, jobs, &groups).await?,
            sandbox,
            testbed,
            fired: RefCell::default(),
        })
    }

    /// Creates the cluster `orders` with three members and TLS, the cluster `carts` with one member, and two backups of
    /// `carts`. The alert of a lost quorum must not fire during the bootstrap.
    async fn clusters(&self, path: &str) -> Result<()> {
        let (sandbox, s3) = (self.sandbox, self.sandbox.env.s3()?);
        let clusters = [
            cluster_with(&sandbox.env, "orders", 3, TLS)?,
            cluster_with(&sandbox.env, "carts", 1, SMALL)?,
            aws_secret(s3, "aws"),
        ];
        sandbox.apply(&clusters.join("---\n")).await?;
        sandbox.await_members("orders", 3).await?;
        sandbox.await_members("carts", 1).await?;
        for name in ["first", "proven"] {
            let path = path.replace("first", name);
            sandbox.apply(&backup(s3, name, "carts", &path)).await?;
            await_complete(&sandbox.objects(Kind::EtcdBackup), name, DEADLINE).await?;
        }
        let lost = self
            .prometheus
            .query("max_over_time(ALERTS{alertname=\"EtcdQuorumLost\"}[1h])");
        let lost = lost.await?;
        ensure!(lost.is_empty(), "a bootstrap is no lost quorum: {lost:?}");
        Ok(())
    }

    /// Waits until Prometheus has exactly one target for each member, with the labels that the alerts need. The
    /// PodMonitor of `orders` adds the label `team`.
    async fn members_are_found(&self) -> Result<()> {
        let mut expected = BTreeSet::new();
        for cluster in ["orders", "carts"] {
            for pod in self.sandbox.member_pods(cluster).await? {
                expected.insert((cluster.to_owned(), pod.name_any()));
            }
        }
        ensure!(expected.len() == 4, "{expected:?}");
        until("every member is scraped", DEADLINE, async || {
            let mut targets = self.prometheus.targets().await?;
            let is_member = |target: &Value| {
                let pool = target["scrapePool"].as_str().unwrap_or_default();
                pool.contains("-members") && target["health"] == "up"
            };
            targets.retain(is_member);
            let text = |target: &Value, label: &str| {
                target["labels"][label]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned()
            };
            let found = targets.iter();
            let found = found.map(|target| (text(target, "cluster"), text(target, "pod")));
            let found: BTreeSet<(String, String)> = found.collect();
            let own = |target: &Value| {
                let team = if text(target, "cluster") == "orders" {
                    "payments"
                } else {
                    ""
                };
                text(target, "namespace") == self.sandbox.namespace && text(target, "team") == team
            };
            let once = targets.len() == expected.len();
            Ok(if once && found == expected && targets.iter().all(own) {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{found:?}"))
            })
        })
        .await
    }

    /// Creates the Service of `example-metrics-service.yaml`, and waits until its endpoints are the metrics ports of
    /// the three members of `orders`.
    async fn service_has_endpoints(&self) -> Result<()> {
        let path = root().join("examples/example-metrics-service.yaml");
        let example = std::fs::read_to_string(path)?.replace("example-etcd-cluster", "orders");
        self.sandbox.apply(&example).await?;
        let fields = "-o=jsonpath={.items[*].ports[*].port} {.items[*].endpoints[*].addresses[*]}";
        let selector = "--selector=kubernetes.io/service-name=example-metrics";
        until("the Service has three endpoints", DEADLINE, async || {
            let words = ["get", "endpointslices", selector, fields];
            let found = self.sandbox.kubectl(&words).await?;
            let parts: Vec<&str> = found.split_whitespace().collect();
            let complete = parts.len() == 4 && parts[0] == "2381";
            Ok(if complete {
                Poll::Done(())
            } else {
                Poll::NotYet(found)
            })
        })
        .await
    }

    async fn fires(&self, alert: &str, labels: &[(&str, &str)]) -> Result<()> {
        self.prometheus.await_firing(alert, labels).await?;
        self.fired.borrow_mut().insert(alert.to_owned(), false);
        Ok(())
    }

    /// Waits until an alert that has fired is neither pending nor firing.
    async fn ends(&self, alert: &str, labels: &[(&str, &str)]) -> Result<()> {
        self.prometheus.await_resolved(alert, labels).await?;
        let mut fired = self.fired.borrow_mut();
        *fired.get_mut(alert).context("the alert has not fired")? = true;
        Ok(())
    }

    /// Checks that every alert has fired and ended, except the alerts in [`NOT_CAUSED`].
    fn all_alerts_ended(&self) -> Result<()> {
        let fired = self.fired.borrow();
        let ended = fired.iter().filter(|(_, ended)| **ended);
        let mut tested: BTreeSet<&str> = ended.map(|(alert, _)| alert.as_str()).collect();
        for (alert, reason) in NOT_CAUSED {
            ensure!(tested.insert(alert), "{alert} ({reason}) has fired");
        }
        let alerts: BTreeSet<&str> = self.alerts.iter().map(String::as_str).collect();
        ensure!(tested == alerts, "{tested:?} of {alerts:?} are tested");
        Ok(())
    }

    /// Waits until each recording rule has a value for `cluster`.
    async fn recordings_have_data(&self, cluster: &str) -> Result<()> {
        let mut missing = self.recordings.clone();
        until("every recording rule has a value", DEADLINE, async || {
            for name in missing.clone() {
                let namespace = &self.sandbox.namespace;
                let series = format!("{name}{{namespace=\"{namespace}\", cluster=\"{cluster}\"}}");
                if !self.prometheus.query(&series).await?.is_empty() {
                    missing.retain(|one| *one != name);
                }
            }
            Ok(if missing.is_empty() {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("no value: {missing:?}"))
            })
        })
        .await
    }

    async fn patch(&self, kind: &str, name: &str, patch: &str) -> Result<()> {
        let words = ["patch", kind, name, "--type=merge", "-p", patch];
        self.sandbox.kubectl(&words).await.map(drop)
    }

    /// Causes faults in the cluster `orders`: expiring certificates, frequent elections, a missing member, and a lost
    /// quorum. Waits until the alert of each fault fires, and until it ends after the repair. Checks or replaces the
    /// command outputs in the documentation that show a lost quorum.
    async fn faults_of_tls_cluster(&self) -> Result<()> {
        let sandbox = self.sandbox;
        let labels = [
            ("namespace", sandbox.namespace.as_str()),
            ("cluster", "orders"),
        ];
        self.fires("EtcdCertificateExpiring", &labels).await?;
        self.renew_certificates().await?;
        self.ends("EtcdCertificateExpiring", &labels).await?;

        let object = sandbox.await_members("orders", 3).await?;
        let survivor = leader(&object)?;
        let mut members = ready_members(&object);
        members.retain(|member| *member != survivor);
        let victims = members.clone();
        // `survivor` is the current leader. The list ends with `survivor`, so that no transfer has the current leader
        // as its target.
        members.push(survivor.clone());
        for next in members.iter().cycle().take(LEADER_MOVES) {
            move_leader(sandbox, next).await?;
        }
        // The test writes a key, because without writes the dashboard shows no durations of commits.
        let words = ["ctl", "orders", "--", "put", "orders/1", "paid"];
        plugin::run(sandbox, &words).await?;
        self.fires("EtcdLeaderChangesOften", &labels).await?;

        let mut pods = Vec::new();
        for victim in victims {
            pods.push(sandbox.api::<Pod>().get(&victim).await?);
        }
        self.testbed
            .signal_containers(&pods[..1], "SIGSTOP")
            .await?;
        self.fires("EtcdMemberMissing", &labels).await?;
        self.fires("EtcdQuorumAtRisk", &labels).await?;
        self.testbed
            .signal_containers(&pods[1..], "SIGSTOP")
            .await?;
        self.fires("EtcdQuorumLost", &labels).await?;
        let of_survivor = [labels[0], labels[1], ("pod", survivor.as_str())];
        self.fires("EtcdNoLeader", &of_survivor).await?;
        self.fires("EtcdStepStuck", &labels).await?;
        let all = sandbox.kubectl(&["get", "etcds"]).await?;
        dashboards::show("troubleshooting.md", "kubectl get etcds", &all)?;
        let all = plugin::run(sandbox, &["status", "-A"]).await?;
        dashboards::show("kubectl.md", "kubectl etcd status -A", &all)?;
        self.testbed.signal_containers(&pods, "SIGCONT").await?;
        for alert in [
            "EtcdStepStuck",
            "EtcdQuorumLost",
            "EtcdNoLeader",
            "EtcdMemberMissing",
            "EtcdQuorumAtRisk",
            "EtcdLeaderChangesOften",
        ] {
            self.ends(alert, &labels).await?;
        }
        sandbox.await_members("orders", 3).await.map(drop)
    }

    /// Sets a longer validity, and deletes the certificates, so that the operator issues new certificates.
    async fn renew_certificates(&self) -> Result<()> {
        let sandbox = self.sandbox;
        let longer = r#"{"spec":{"TLS":{"generated":{"certificateDuration":"2160h"}}}}"#;
        self.patch("etcdcluster", "orders", longer).await?;
        let mut secrets = vec![
            "orders-operator-tls".to_owned(),
            "orders-client-tls".to_owned(),
        ];
        for pod in sandbox.member_pods("orders").await? {
            let pod = pod.name_any();
            secrets.extend([format!("{pod}-peer-tls"), format!("{pod}-server-tls")]);
        }
        let mut words = vec!["delete", "secret"];
        words.extend(secrets.iter().map(String::as_str));
        sandbox.kubectl(&words).await?;
        sandbox.trigger_reconcile("orders").await
    }

    /// Slows down the disk of a member of `carts` while a client writes, and waits until the alerts fire.
    async fn slow_disk(&self, keys: &Keyspace, labels: &[(&str, &str)], pod: &str) -> Result<()> {
        let directory = self.sandbox.volume_directory(pod).await?;
        let pod = self.sandbox.api::<Pod>().get(pod).await?;
        let limit = async |rate| self.testbed.limit_writes(&pod, &directory, rate).await;
        limit(SLOW_WRITES).await?;
        for alert in SLOW_DISK {
            tokio::select! {
                fires = self.fires(alert, labels) => fires?,
                () = keep_writing(keys) => {}
            }
        }
        limit(0).await
    }

    /// Deletes most data of `carts`, and waits until the alert about free space fires. The alert must end after a
    /// defragmentation.
    async fn fragments(&self, labels: &[(&str, &str)], pod: &str) -> Result<()> {
        // The test connects again, because the caller has raised the quota of the cluster, which restarted the member.
        let env = &self.sandbox.env;
        let keys = Keyspace::of_cluster(env, &self.sandbox.namespace, "carts").await?;
        keys.compact(keys.delete("big/").await?).await?;
        tokio::select! {
            fires = self.fires("EtcdFragmented", labels) => fires?,
            () = keep_writing(&keys) => {}
        }
        let defragment = ["exec", pod, "--", "etcdctl", "defrag"];
        self.sandbox.kubectl(&defragment).await?;
        self.ends("EtcdFragmented", labels).await
    }

    /// Causes faults in the cluster `carts`: the alarm CORRUPT, a slow disk, a full database, and much free space.
    /// Waits until the alert of each fault fires, and until it ends after the repair.
    async fn faults_of_plain_cluster(&self) -> Result<()> {
        let sandbox = self.sandbox;
        let labels = [
            ("namespace", sandbox.namespace.as_str()),
            ("cluster", "carts"),
        ];
        let object = sandbox.await_members("carts", 1).await?;
        let member = field(&object, "/status/memberDetails/0");
        let (Some(id), Some(pod)) = (member["id"].as_str(), member["name"].as_str()) else {
            bail!("no member: {member}");
        };
        let keys = Keyspace::of_cluster(&sandbox.env, &sandbox.namespace, "carts").await?;
        keys.raise_corrupt(u64::from_str_radix(id, 16)?).await?;
        self.fires("EtcdDataDiffers", &labels).await?;
        let disarm = ["exec", pod, "--", "etcdctl", "alarm", "disarm"];
        sandbox.kubectl(&disarm).await?;
        self.ends("EtcdDataDiffers", &labels).await?;

        let of_pod = [labels[0], labels[1], ("pod", pod)];
        self.slow_disk(&keys, &of_pod, pod).await?;
        let number = AtomicUsize::new(0);
        fill(&keys, &number).await?;
        self.fires("EtcdQuotaNearlyFull", &labels).await?;
        // `keep_full` writes until the alert fires, because the operator frees space with defragmentations.
        tokio::select! {
            fires = self.fires("EtcdDatabaseFull", &labels) => fires?,
            stopped = keep_full(&keys, &number) => stopped?,
        }
        let larger = r#"{"spec":{"etcd":{"quotaBackendBytes":67108864}}}"#;
        self.patch("etcdcluster", "carts", larger).await?;
        self.ends("EtcdQuotaNearlyFull", &labels).await?;
        self.ends("EtcdDatabaseFull", &labels).await?;
        sandbox.await_members("carts", 1).await?;
        self.fragments(&of_pod, pod).await?;
        for alert in SLOW_DISK {
            self.ends(alert, &of_pod).await?;
        }
        Ok(())
    }

    /// Creates the Service `stock-client` before the cluster `stock`, so that the cluster does not own its client
    /// Service. Later scales the cluster from six members to one. Waits until the alert of each fault fires and ends.
    async fn faults_of_changed_cluster(&self) -> Result<()> {
        let sandbox = self.sandbox;
        let labels = [
            ("namespace", sandbox.namespace.as_str()),
            ("cluster", "stock"),
        ];
        let service = "apiVersion: v1\nkind: Service\nmetadata: {name: stock-client}\nspec: {ports: [{port: 2379}]}\n";
        let cluster = cluster_with(&sandbox.env, "stock", 1, "")?;
        sandbox.apply(&[service, &cluster].join("---\n")).await?;
        self.fires("EtcdNoEndpoint", &labels).await?;
        let delete = ["delete", "service", "stock-client"];
        sandbox.kubectl(&delete).await?;
        self.ends("EtcdNoEndpoint", &labels).await?;

        sandbox.scale("stock", LARGE).await?;
        sandbox.await_members("stock", LARGE).await?;
        sandbox.scale("stock", 1).await?;
        self.fires("EtcdMembersReplacedOften", &labels).await?;
        self.ends("EtcdMembersReplacedOften", &labels).await?;
        sandbox.await_members("stock", 1).await.map(drop)
    }

    /// Changes one byte of a stored backup, and verifies the backup. Waits until the alert fires, and until it ends
    /// after the repair.
    async fn damages_backup(&self, bucket: &Bucket) -> Result<()> {
        let verify = async |settings: &str| {
            let patch = format!(r#"{{"spec":{{"verification":{settings}}}}}"#);
            self.patch("etcdbackup", "proven", &patch).await
        };
        let whole = bucket.read("proven").await?;
        let mut damaged = whole.clone();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 1;
        bucket.write("proven", damaged).await?;
        verify("{}").await?;
        let namespace = ("namespace", self.sandbox.namespace.as_str());
        let proven = [namespace, ("name", "proven")];
        self.fires("EtcdBackupUnrestorable", &proven).await?;
        bucket.write("proven", whole).await?;
        verify("null").await?;
        self.ends("EtcdBackupUnrestorable", &proven).await
    }

    /// Damages a stored backup, and makes and verifies backups with a Secret whose credentials the store rejects. Waits
    /// until the alert of each fault fires, and until it ends after the repair.
    async fn faults_of_backups(&self, bucket: &Bucket) -> Result<()> {
        self.damages_backup(bucket).await?;
        let (sandbox, s3) = (self.sandbox, self.sandbox.env.s3()?);
        let mut other = s3.clone();
        "wrong".clone_into(&mut other.secret_key);
        sandbox.apply(&aws_secret(&other, "wrong")).await?;
        for (name, policy) in [
            ("often", "{backupIntervalInSecond: 5, maxBackups: 2}"),
            ("late", "{timeoutInSecond: 3}"),
        ] {
            let (path, more) = (
                format!("{}/{name}", bucket.name),
                format!("  backupPolicy: {policy}\n"),
            );
            let manifest = backup_with(s3, name, "carts", &path, &more);
            let manifest = manifest.replace("awsSecret: aws", "awsSecret: wrong");
            sandbox.apply(&manifest).await?;
        }
        let namespace = ("namespace", sandbox.namespace.as_str());
        let (often, late) = (
            [namespace, ("name", "often")],
            [namespace, ("name", "late")],
        );
        // The verification pod cannot read the backup with the Secret `wrong`, so the verification has no result.
        let proven = [namespace, ("name", "proven")];
        let rejected = r#"{"spec":{"s3":{"awsSecret":"wrong"},"verification":{}}}"#;
        self.patch("etcdbackup", "proven", rejected).await?;
        self.fires("EtcdBackupNotVerified", &proven).await?;
        let accepted = r#"{"spec":{"s3":{"awsSecret":"aws"},"verification":null}}"#;
        self.patch("etcdbackup", "proven", accepted).await?;
        self.ends("EtcdBackupNotVerified", &proven).await?;
        self.fires("EtcdBackupFailing", &often).await?;
        self.fires("EtcdBackupFailed", &late).await?;
        self.fires("EtcdBackupOld", &often).await?;
        sandbox.apply(&aws_secret(s3, "wrong")).await?;
        sandbox.kubectl(&["delete", "etcdbackup", "late"]).await?;
        self.ends("EtcdBackupFailed", &late).await?;
        self.ends("EtcdBackupFailing", &often).await?;
        self.ends("EtcdBackupOld", &often).await
    }

    /// Removes the permissions of the restore operator, creates an EtcdRestore that fails, and scales the Deployment of
    /// the operator to zero. Waits until the alert of each fault fires, and until it ends after the repair.
    async fn faults_of_restore_operator(&self, path: &str) -> Result<()> {
        const OPERATOR: &str = "etcd-restore-operator";
        let (sandbox, s3) = (self.sandbox, self.sandbox.env.s3()?);
        let bind = async |account: &str| {
            let subject =
                format!(r#"[{{"op":"replace","path":"/subjects/0/name","value":"{account}"}}]"#);
            let words = [
                "patch",
                "rolebinding",
                OPERATOR,
                "--type=json",
                "-p",
                &subject,
            ];
            sandbox.kubectl(&words).await
        };
        bind("nobody").await?;
        let version = newest_version(&sandbox.env)?;
        let into = format!("{{name: r, template: {{spec: {{size: 1, version: \"{version}\"}}}}}}");
        sandbox
            .apply(&restore_with(s3, "back", &into, path, ""))
            .await?;
        let labels = [("operator", OPERATOR)];
        let namespace = ("namespace", sandbox.namespace.as_str());
        let (back, refused) = (
            [namespace, ("name", "back")],
            [namespace, ("name", "refused")],
        );
        self.fires("EtcdOperatorFails", &labels).await?;
        self.fires("EtcdRestoreSlow", &back).await?;
        bind(OPERATOR).await?;
        await_complete(&sandbox.objects(Kind::EtcdRestore), "back", DEADLINE).await?;
        self.ends("EtcdOperatorFails", &labels).await?;
        self.ends("EtcdRestoreSlow", &back).await?;

        // This restore must fail, because the cluster `carts` exists and the EtcdRestore does not overwrite it.
        sandbox
            .apply(&restore_with(s3, "refused", "{name: carts}", path, ""))
            .await?;
        self.fires("EtcdRestoreFailed", &refused).await?;
        let delete = ["delete", "etcdrestore", "refused"];
        sandbox.kubectl(&delete).await?;
        self.ends("EtcdRestoreFailed", &refused).await?;

        let scale = async |replicas: &str| {
            let words = ["scale", "deployment", OPERATOR, replicas];
            sandbox.kubectl(&words).await
        };
        scale("--replicas=0").await?;
        self.fires("EtcdOperatorAbsent", &labels).await?;
        scale("--replicas=1").await?;
        self.ends("EtcdOperatorAbsent", &labels).await
    }
}

#[tokio::test]
async fn prometheus_finds_members_fires_alerts_and_fills_dashboards() {
    bare_scenario("monitoring", async |sandbox| {
        let set = ["--set", "dashboards.enabled=true"];
        sandbox.install_operators_with(&set).await?;
        let monitor = step("start Prometheus", Monitor::start(sandbox)).await?;
        let bucket = Bucket::create(sandbox.env.s3()?, &sandbox.namespace).await?;
        let path = format!("{}/first", bucket.name);
        step("create clusters and a backup", monitor.clusters(&path)).await?;
        step("find the members", monitor.members_are_found()).await?;
        step("find the Service", monitor.service_has_endpoints()).await?;
        step("cause and repair faults", async {
            try_join!(
                Box::pin(monitor.faults_of_tls_cluster()),
                Box::pin(monitor.faults_of_plain_cluster()),
                Box::pin(monitor.faults_of_changed_cluster()),
                Box::pin(monitor.faults_of_backups(&bucket)),
                Box::pin(monitor.faults_of_restore_operator(&path)),
                Box::pin(monitor.faults_of_continuous_backup(&bucket)),
                Box::pin(monitor.faults_of_copies(&bucket)),
                Box::pin(monitor.faults_of_mirror()),
            )
        })
        .await?;
        monitor.all_alerts_ended()?;
        let data = dashboards::have_data(sandbox, &monitor.prometheus, "orders");
        step("run the queries of the dashboards", data).await?;
        let pictures =
            dashboards::are_drawn(sandbox, &monitor.prometheus, "orders", monitor.started);
        step("draw the dashboards", pictures).await?;
        let one = plugin::run(sandbox, &["status", "orders"]).await?;
        dashboards::show("kubectl.md", "kubectl etcd status orders", &one)?;
        let data = monitor.recordings_have_data("orders");
        step("read the values of the recording rules", data).await
    })
    .await;
}
