//! A client that writes continuously. After a test with faults, every acknowledged write must exist.
//!
//! Like an application, the client uses the client Service, reconnects after errors, and has a deadline for each
//! write. It writes each key only once, so a missing key is a lost write.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use etcd_client::{Client, ConnectOptions, GetOptions};
use k8s_openapi::api::core::v1::Service;
use kube::{Api, ResourceExt};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::health::MemberHealth;
use crate::kubectl::PortForward;
use crate::ledger::{AcknowledgedWrite, Ledger, Tally, key, value};
use crate::tls::Identity;
use crate::wait::{Poll, until};
use crate::{DEADLINE, Sandbox};

const PREFIX: &str = "written/";
/// The prefix of the keys of a health-aware client ([`Writer::start_health_aware`]). It differs from [`PREFIX`], so
/// this client can run at the same time as another client.
const HEALTH_AWARE_PREFIX: &str = "listening/";
/// The time between two writes, long enough not to load the machine.
const WRITE_INTERVAL: Duration = Duration::from_millis(60);
/// Time limit for one write. The outcome of a write that exceeds this limit is unknown.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit for the retries of one write. It exceeds the time of a leader election or of a short freeze of the
/// machine.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The interval and the prefix of the writes, and the time limit for retries. Without `retries`, a failed write is not
/// repeated.
#[derive(Clone, Copy)]
struct WritePattern {
    every: Duration,
    retries: Option<Duration>,
    prefix: &'static str,
}

/// A client that writes in the background until [`Writer::finish`] is called.
pub struct Writer {
    task: JoinHandle<()>,
    ledger: Arc<Mutex<Ledger>>,
    access: Access,
    prefix: &'static str,
}

/// How a client connects to the cluster and authenticates.
#[derive(Clone)]
pub(crate) struct Access {
    pub(crate) route: Route,
    pub(crate) identity: Option<Identity>,
}

/// The addresses of the cluster for a client.
#[derive(Clone)]
pub(crate) enum Route {
    /// The client Service. This machine can reach Services only on the testbed.
    Service {
        services: Box<Api<Service>>,
        name: String,
        /// The address of the Service at the start. The client uses it while the API server is stopped, like a client
        /// with a cached DNS record.
        first: String,
    },
    /// The Services of all members, with the health that each member reports.
    Members(Arc<Vec<(String, MemberHealth)>>),
    /// A forwarded port, because this machine cannot reach the Services of a user's cluster.
    Forward {
        env: Box<crate::Env>,
        namespace: String,
        service: String,
    },
}

/// A connection to etcd. Dropping it closes its forwarded port.
pub(crate) struct Connection {
    pub(crate) client: Client,
    /// The index of the member in [`Route::Members`]. `None` if the connection uses the Service.
    member: Option<usize>,
    _forward: Option<PortForward>,
}

impl Writer {
    /// Starts to write. Returns after the first acknowledged write.
    ///
    /// # Errors
    /// Fails if etcd acknowledges no write.
    pub async fn start(sandbox: &Sandbox, cluster: &str) -> Result<Self> {
        let pattern = WritePattern {
            every: WRITE_INTERVAL,
            retries: None,
            prefix: PREFIX,
        };
        Self::start_as(pattern, sandbox, cluster, None).await
    }

    /// Like [`Self::start`], for a cluster with TLS.
    ///
    /// # Errors
    /// Fails if etcd acknowledges no write.
    pub async fn start_tls(sandbox: &Sandbox, cluster: &str, identity: &Identity) -> Result<Self> {
        let pattern = WritePattern {
            every: WRITE_INTERVAL,
            retries: None,
            prefix: PREFIX,
        };
        Self::start_as(pattern, sandbox, cluster, Some(identity.clone())).await
    }

    /// Like [`Self::start`], but retries a failed write over a new connection, like an ordinary client library. The
    /// write counts as failed after [`RETRY_TIMEOUT`].
    ///
    /// # Errors
    /// Fails if etcd acknowledges no write.
    pub async fn start_retrying(sandbox: &Sandbox, cluster: &str, every: Duration) -> Result<Self> {
        let pattern = WritePattern {
            every,
            retries: Some(RETRY_TIMEOUT),
            prefix: PREFIX,
        };
        Self::start_as(pattern, sandbox, cluster, None).await
    }

    /// Like [`Self::start_retrying`], but connects with TLS, and to the Service with the name `service`.
    ///
    /// # Errors
    /// Fails if etcd acknowledges no write.
    pub async fn start_retrying_through(
        sandbox: &Sandbox,
        service: &str,
        identity: &Identity,
    ) -> Result<Self> {
        let pattern = WritePattern {
            every: WRITE_INTERVAL,
            retries: Some(RETRY_TIMEOUT),
            prefix: PREFIX,
        };
        let access = Access {
            route: Route::to_service(sandbox, service).await?,
            identity: Some(identity.clone()),
        };
        Self::start_on(pattern, access).await
    }

    /// Like [`Self::start_retrying`], but watches the health of all members, and connects only to a healthy member, as
    /// etcd recommends. Its keys have another prefix, so it can run at the same time as a client of the Service.
    ///
    /// # Errors
    /// Fails if etcd acknowledges no write.
    pub async fn start_health_aware(
        sandbox: &Sandbox,
        cluster: &str,
        every: Duration,
    ) -> Result<Self> {
        let pattern = WritePattern {
            every,
            retries: Some(RETRY_TIMEOUT),
            prefix: HEALTH_AWARE_PREFIX,
        };
        let access = Access {
            route: Route::to_members(sandbox, cluster).await?,
            identity: None,
        };
        Self::start_on(pattern, access).await
    }

    async fn start_as(
        pattern: WritePattern,
        sandbox: &Sandbox,
        cluster: &str,
        identity: Option<Identity>,
    ) -> Result<Self> {
        let access = Access {
            route: Route::to(sandbox, cluster).await?,
            identity,
        };
        Self::start_on(pattern, access).await
    }

    async fn start_on(pattern: WritePattern, access: Access) -> Result<Self> {
        let prefix = pattern.prefix;
        let ledger = Arc::new(Mutex::new(Ledger::new(prefix, Instant::now())));
        let task = tokio::spawn(write(pattern, access.clone(), Arc::clone(&ledger)));
        let writer = Self {
            task,
            ledger,
            access,
            prefix,
        };
        writer.await_more(1).await?;
        Ok(writer)
    }

    /// Waits for `count` more acknowledged writes, which show that the cluster serves clients.
    ///
    /// # Errors
    /// Fails if etcd does not acknowledge these writes in time.
    pub async fn await_more(&self, count: usize) -> Result<()> {
        let before = self.acknowledged();
        until(&format!("{count} more writes"), DEADLINE, async || {
            let (now, why) =
                self.with_ledger(|ledger| (ledger.acknowledged(), ledger.last_error().to_owned()));
            Ok(if now >= before + count {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{} ({why})", now - before))
            })
        })
        .await
    }

    /// The number of acknowledged writes.
    #[must_use]
    pub fn acknowledged(&self) -> usize {
        self.with_ledger(Ledger::acknowledged)
    }

    /// The writes with a revision greater than `revision` that were acknowledged before `at`: their number, and the
    /// time from the first of them to the last write that was acknowledged before `at`.
    #[must_use]
    pub fn newer_than(&self, revision: i64, at: Instant) -> (usize, Duration) {
        self.with_ledger(|ledger| ledger.newer_than(revision, at))
    }

    /// The time since the last acknowledged write.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.with_ledger(Ledger::silence)
    }

    /// Sets the client certificate with which [`Self::finish`] reads. Use this if etcd no longer accepts the
    /// certificate of the writes.
    pub fn read_as(&mut self, identity: &Identity) {
        self.access.identity = Some(identity.clone());
    }

    /// Stops the writes, reads all keys, and returns the summary.
    ///
    /// # Errors
    /// Fails if an acknowledged write is lost, or if the cluster does not serve clients.
    pub async fn finish(self, what: &str) -> Result<Tally> {
        let tally = self.finish_counting(what).await?;
        ensure!(
            tally.lost.is_empty(),
            "{what}: acknowledged writes are lost: {tally}; the first lost writes: {:?}",
            tally.lost.iter().take(5).collect::<Vec<_>>()
        );
        Ok(tally)
    }

    /// Like [`Self::finish`], but returns lost writes in the summary instead of failing.
    ///
    /// # Errors
    /// Fails if the cluster does not serve clients.
    pub async fn finish_counting(self, what: &str) -> Result<Tally> {
        // The ledger contains all acknowledged writes, because the task records an acknowledgment before its next
        // `await`, and `abort` takes effect only at an `await`.
        self.task.abort();
        let silence = self.silence();
        let found = until("all keys are read back", DEADLINE, async || {
            let connection = self.access.connect().await?;
            let mut client = connection.client.kv_client();
            let answer = client.get(self.prefix, Some(GetOptions::new().with_prefix()));
            let answer = timeout(Duration::from_secs(20), answer)
                .await
                .context("no answer in 20 s")??;
            let pairs = answer.kvs().iter().map(|pair| {
                (
                    String::from_utf8_lossy(pair.key()).into_owned(),
                    (
                        String::from_utf8_lossy(pair.value()).into_owned(),
                        pair.mod_revision(),
                    ),
                )
            });
            Ok(Poll::Done(pairs.collect::<BTreeMap<_, _>>()))
        })
        .await?;
        let tally = self.with_ledger(|ledger| ledger.tally(&found, silence));
        // The line is written to standard error directly, because the test harness hides the output of `eprintln!` if
        // the test passes.
        let _ = writeln!(std::io::stderr(), "    {what}: {tally}");
        Ok(tally)
    }

    fn with_ledger<T>(&self, read: impl FnOnce(&Ledger) -> T) -> T {
        read(&self.ledger.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Route {
    async fn to_members(sandbox: &Sandbox, cluster: &str) -> Result<Self> {
        let services = sandbox.api::<Service>();
        let mut members = Vec::new();
        for pod in sandbox.member_pods(cluster).await? {
            let service = services.get(&pod.name_any()).await?;
            let url = format!("http://{}:2379", url_host(service)?);
            members.push((url.clone(), MemberHealth::watch(&url)));
        }
        Ok(Self::Members(Arc::new(members)))
    }

    pub(crate) async fn to(sandbox: &Sandbox, cluster: &str) -> Result<Self> {
        Self::to_service(sandbox, &format!("{cluster}-client")).await
    }

    async fn to_service(sandbox: &Sandbox, service: &str) -> Result<Self> {
        let name = service.to_owned();
        if sandbox.env.xtask.is_none() {
            return Ok(Self::Forward {
                env: Box::new(sandbox.env.clone()),
                namespace: sandbox.namespace.clone(),
                service: name,
            });
        }
        let services = Box::new(sandbox.api());
        let first = address(&services, &name).await?;
        Ok(Self::Service {
            services,
            name,
            first,
        })
    }
}

impl Access {
    /// True if the connection leads to a member that does not report itself as healthy now.
    fn must_reconnect(&self, connection: &Connection) -> bool {
        let Route::Members(members) = &self.route else {
            return false;
        };
        let member = connection.member.and_then(|member| members.get(member));
        member.is_none_or(|(_, health)| !health.serves())
    }

    pub(crate) async fn connect(&self) -> Result<Connection> {
        let scheme = self.identity.as_ref().map_or("http", |_| "https");
        let mut member = None;
        let (url, forward) = match &self.route {
            Route::Service {
                services,
                name,
                first,
            } => {
                let now = timeout(WRITE_TIMEOUT, address(services, name)).await;
                let address = now.ok().and_then(Result::ok).unwrap_or(first.clone());
                (format!("{scheme}://{address}:2379"), None)
            }
            Route::Members(members) => {
                member = members.iter().position(|(_, health)| health.serves());
                let found = member.and_then(|member| members.get(member));
                let (url, _) = found.context("no member reports itself as healthy")?;
                (url.clone(), None)
            }
            Route::Forward {
                env,
                namespace,
                service,
            } => {
                let target = format!("service/{service}");
                let forward = PortForward::open(env, namespace, &target, 2379).await?;
                (
                    format!("{scheme}://127.0.0.1:{}", forward.port),
                    Some(forward),
                )
            }
        };
        let options = self
            .identity
            .as_ref()
            .map_or_else(ConnectOptions::new, Identity::options);
        let options = options.with_connect_timeout(WRITE_TIMEOUT);
        Ok(Connection {
            client: Client::connect([url], Some(options)).await?,
            member,
            _forward: forward,
        })
    }
}

/// The current address of the client Service, as the host of a URL. A recreated Service has a new address.
async fn address(services: &Api<Service>, name: &str) -> Result<String> {
    url_host(services.get(name).await.context("the client Service")?)
}

/// The address of a Service as the host of a URL. An IPv6 address is in brackets.
fn url_host(service: Service) -> Result<String> {
    let address = service.spec.and_then(|spec| spec.cluster_ip);
    let address = address.context("a Service without an address")?;
    Ok(match address.parse()? {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    })
}

/// Writes until the caller aborts the task.
async fn write(pattern: WritePattern, access: Access, ledger: Arc<Mutex<Ledger>>) {
    let mut beat = interval(pattern.every);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut connection: Option<Connection> = None;
    for number in 0.. {
        beat.tick().await;
        let begun = Instant::now();
        let mut retried = false;
        let outcome = loop {
            let pair = (key(pattern.prefix, number), value(pattern.prefix, number));
            let outcome = attempt(&access, &mut connection, pair).await;
            if outcome.is_err() {
                connection = None;
            }
            let may_retry = pattern.retries.is_some_and(|most| begun.elapsed() < most);
            if outcome.is_ok() || !may_retry {
                break outcome.map(|revision| AcknowledgedWrite { revision, retried });
            }
            retried = true;
            tokio::time::sleep(RETRY_INTERVAL).await;
        };
        ledger
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .record(number, outcome);
    }
}

/// Sends one write over `connection`, which is opened if it is `None`.
async fn attempt(
    access: &Access,
    connection: &mut Option<Connection>,
    pair: (String, String),
) -> Result<i64> {
    let attempt = async {
        if connection
            .as_ref()
            .is_some_and(|connection| access.must_reconnect(connection))
        {
            *connection = None;
        }
        if connection.is_none() {
            *connection = Some(access.connect().await?);
        }
        let client = connection
            .as_ref()
            .map(|connection| connection.client.kv_client());
        let mut client = client.context("no connection")?;
        let answer = client.put(pair.0, pair.1, None);
        let answer = timeout(WRITE_TIMEOUT, answer)
            .await
            .context("no answer in time")??;
        let header = answer.header().context("the response has no header")?;
        anyhow::Ok(header.revision())
    };
    // This time limit is longer than `WRITE_TIMEOUT`, because the attempt may have to open a forwarded port before it
    // writes.
    let outcome = timeout(WRITE_TIMEOUT * 5, attempt).await;
    outcome.unwrap_or_else(|_| Err(anyhow::anyhow!("no connection in time")))
}
