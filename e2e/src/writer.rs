//! A client that writes all along: what was acknowledged to it has to be there at the end, whatever happened.
//!
//! It goes the access applications go: to the client Service, with a connection it makes anew when it breaks and a
//! deadline for each write. Every key is written once, so a key says by itself whether it was lost.

use std::collections::BTreeMap;
use std::io::Write as _;
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

/// Where its keys begin.
const PREFIX: &str = "written/";
/// Those of a client that listens to the members' health: it writes beside the other.
const HEALTH_AWARE_PREFIX: &str = "listening/";
/// From one write to the next: cheap enough to run in every test.
const WRITE_INTERVAL: Duration = Duration::from_millis(60);
/// A write that takes longer is given up; whether it was done is unknown then.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a client with ordinary retries goes on with one write: longer than an election and a machine that stands
/// still for a while.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
/// How soon such a client tries again.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// How often a client writes, and how long it goes on with one write.
#[derive(Clone, Copy)]
struct WritePattern {
    every: Duration,
    retries: Option<Duration>,
    prefix: &'static str,
}

/// A client that writes in the background until [`Writer::finish`].
pub struct Writer {
    task: JoinHandle<()>,
    ledger: Arc<Mutex<Ledger>>,
    access: Access,
    prefix: &'static str,
}

/// How the cluster is reached, and what is shown there.
#[derive(Clone)]
pub(crate) struct Access {
    pub(crate) route: Route,
    pub(crate) identity: Option<Identity>,
}

/// Where the cluster is reached.
#[derive(Clone)]
pub(crate) enum Route {
    /// The client Service's own address: the machine reaches the testbed's Services.
    Service {
        services: Box<Api<Service>>,
        name: String,
        /// Its address at first: what DNS servers would still answer while the API server is away.
        first: String,
    },
    /// The members' own Services, each with what the member says of its health.
    Members(Arc<Vec<(String, MemberHealth)>>),
    /// A forwarded port: a cluster of the user's own is reached like this only.
    Forward {
        env: Box<crate::Env>,
        namespace: String,
        cluster: String,
    },
}

/// A connection; a forwarded port lives as long as it does.
pub(crate) struct Connection {
    pub(crate) client: Client,
    /// The member, where it leads to one.
    member: Option<usize>,
    _forward: Option<PortForward>,
}

impl Writer {
    /// Begins to write to the cluster; returns when the first write is acknowledged.
    ///
    /// # Errors
    /// When no write is acknowledged.
    pub async fn start(sandbox: &Sandbox, cluster: &str) -> Result<Self> {
        let pattern = WritePattern {
            every: WRITE_INTERVAL,
            retries: None,
            prefix: PREFIX,
        };
        Self::start_as(pattern, sandbox, cluster, None).await
    }

    /// As [`Self::start`], to a cluster that asks for TLS.
    ///
    /// # Errors
    /// When no write is acknowledged.
    pub async fn start_tls(sandbox: &Sandbox, cluster: &str, identity: &Identity) -> Result<Self> {
        let pattern = WritePattern {
            every: WRITE_INTERVAL,
            retries: None,
            prefix: PREFIX,
        };
        Self::start_as(pattern, sandbox, cluster, Some(identity.clone())).await
    }

    /// As [`Self::start`], with the retries every client library has: a write that fails is sent again over a new
    /// connection, and has failed when that does not help for half a minute.
    ///
    /// # Errors
    /// When no write is acknowledged.
    pub async fn start_retrying(sandbox: &Sandbox, cluster: &str, every: Duration) -> Result<Self> {
        let pattern = WritePattern {
            every,
            retries: Some(RETRY_TIMEOUT),
            prefix: PREFIX,
        };
        Self::start_as(pattern, sandbox, cluster, None).await
    }

    /// As [`Self::start_retrying`], the access etcd recommends it to clients: with the addresses of all members, and away
    /// from one that says it does not serve. Its keys are others, so it can write beside a client of the Service.
    ///
    /// # Errors
    /// When no write is acknowledged.
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

    /// Waits until this many more writes are acknowledged: the cluster serves.
    ///
    /// # Errors
    /// When they are not.
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

    /// How many writes were acknowledged so far.
    #[must_use]
    pub fn acknowledged(&self) -> usize {
        self.with_ledger(Ledger::acknowledged)
    }

    /// How long ago the last write was acknowledged.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.with_ledger(Ledger::silence)
    }

    /// Reads back as another client: the certificate of the one that wrote is accepted no longer.
    pub fn read_as(&mut self, identity: &Identity) {
        self.access.identity = Some(identity.clone());
    }

    /// Ends the writing, looks for every acknowledged write, and says what became of them.
    ///
    /// # Errors
    /// When an acknowledged write is lost, or the cluster does not serve.
    pub async fn finish(self, what: &str) -> Result<Tally> {
        let tally = self.finish_counting(what).await?;
        ensure!(
            tally.lost.is_empty(),
            "{what}: acknowledged writes are lost: {tally}; the first of them: {:?}",
            tally.lost.iter().take(5).collect::<Vec<_>>()
        );
        Ok(tally)
    }

    /// As [`Self::finish`], where a loss is expected: it is counted and no error.
    ///
    /// # Errors
    /// When the cluster does not serve.
    pub async fn finish_counting(self, what: &str) -> Result<Tally> {
        // The last write is ended between two others, so the ledger has an entry for each.
        self.task.abort();
        let silence = self.silence();
        let found = until("every key can be read back", DEADLINE, async || {
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
        // Past the test harness, which shows what passing tests print to nobody.
        let _ = writeln!(std::io::stderr(), "    {what}: {tally}");
        Ok(tally)
    }

    fn with_ledger<T>(&self, with_ledger: impl FnOnce(&Ledger) -> T) -> T {
        with_ledger(&self.ledger.lock().unwrap_or_else(PoisonError::into_inner))
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
            let spec = service.spec.context("a Service without a spec")?;
            let address = spec.cluster_ip.context("a Service without an address")?;
            let url = format!("http://{address}:2379");
            members.push((url.clone(), MemberHealth::watch(&url)));
        }
        Ok(Self::Members(Arc::new(members)))
    }

    pub(crate) async fn to(sandbox: &Sandbox, cluster: &str) -> Result<Self> {
        if sandbox.env.xtask.is_none() {
            return Ok(Self::Forward {
                env: Box::new(sandbox.env.clone()),
                namespace: sandbox.namespace.clone(),
                cluster: cluster.to_owned(),
            });
        }
        let name = format!("{cluster}-client");
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
    /// Whether the member at the other end has said that it does not serve.
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
                let (url, _) = found.context("no member says that it serves")?;
                (url.clone(), None)
            }
            Route::Forward {
                env,
                namespace,
                cluster,
            } => {
                let target = format!("service/{cluster}-client");
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

/// The current address of the client Service: a Service that was created again has another address.
async fn address(services: &Api<Service>, name: &str) -> Result<String> {
    let service = services.get(name).await.context("the client Service")?;
    let address = service.spec.and_then(|spec| spec.cluster_ip);
    address.context("the client Service has no address")
}

/// Writes until it is aborted.
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
            let retries = pattern.retries.is_some_and(|most| begun.elapsed() < most);
            if outcome.is_ok() || !retries {
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

/// One write, over the connection there is or a new one.
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
        let header = answer.header().context("an answer without a header")?;
        anyhow::Ok(header.revision())
    };
    // A forwarded port takes its time to open; a write does not.
    let outcome = timeout(WRITE_TIMEOUT * 5, attempt).await;
    outcome.unwrap_or_else(|_| Err(anyhow::anyhow!("no connection in time")))
}
