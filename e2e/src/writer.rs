//! A client that writes all along: what was acknowledged to it has to be there at the end, whatever happened.
//!
//! It goes the way applications go: to the client Service, with a connection it makes anew when it breaks and a
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

use crate::health::Health;
use crate::kubectl::PortForward;
use crate::ledger::{Ledger, Tally, Written, key, value};
use crate::tls::Identity;
use crate::wait::{Look, until};
use crate::{PATIENCE, Sandbox};

/// Where its keys begin.
const PREFIX: &str = "written/";
/// Those of a client that listens to the members' health: it writes beside the other.
const LISTENING: &str = "listening/";
/// From one write to the next: cheap enough to run in every test.
const EVERY: Duration = Duration::from_millis(60);
/// A write that takes longer is given up; whether it was done is unknown then.
const DEADLINE: Duration = Duration::from_secs(1);

/// How long a client with ordinary retries goes on with one write: longer than an election and a machine that stands
/// still for a while.
const RETRIES: Duration = Duration::from_secs(30);
/// How soon such a client tries again.
const PAUSE: Duration = Duration::from_millis(20);

/// How often a client writes, and how long it goes on with one write.
#[derive(Clone, Copy)]
struct Manner {
    every: Duration,
    retries: Option<Duration>,
    prefix: &'static str,
}

/// A client that writes in the background until [`Writer::finish`].
pub struct Writer {
    task: JoinHandle<()>,
    ledger: Arc<Mutex<Ledger>>,
    way: Way,
    prefix: &'static str,
}

/// How the cluster is reached, and what is shown there.
#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) road: Road,
    pub(crate) identity: Option<Identity>,
}

/// Where the cluster is reached.
#[derive(Clone)]
pub(crate) enum Road {
    /// The client Service's own address: the machine reaches the testbed's Services.
    Service {
        services: Box<Api<Service>>,
        name: String,
        /// Its address at first: what DNS servers would still answer while the API server is away.
        first: String,
    },
    /// The members' own Services, each with what the member says of its health.
    Members(Arc<Vec<(String, Health)>>),
    /// A forwarded port: a cluster of the user's own is reached like this only.
    Forward {
        env: Box<crate::Env>,
        namespace: String,
        cluster: String,
    },
}

/// A connection; a forwarded port lives as long as it does.
pub(crate) struct Line {
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
        let manner = Manner {
            every: EVERY,
            retries: None,
            prefix: PREFIX,
        };
        Self::start_as(manner, sandbox, cluster, None).await
    }

    /// As [`Self::start`], to a cluster that asks for TLS.
    ///
    /// # Errors
    /// When no write is acknowledged.
    pub async fn start_tls(sandbox: &Sandbox, cluster: &str, identity: &Identity) -> Result<Self> {
        let manner = Manner {
            every: EVERY,
            retries: None,
            prefix: PREFIX,
        };
        Self::start_as(manner, sandbox, cluster, Some(identity.clone())).await
    }

    /// As [`Self::start`], with the retries every client library has: a write that fails is sent again over a new
    /// connection, and has failed when that does not help for half a minute.
    ///
    /// # Errors
    /// When no write is acknowledged.
    pub async fn start_retrying(sandbox: &Sandbox, cluster: &str, every: Duration) -> Result<Self> {
        let manner = Manner {
            every,
            retries: Some(RETRIES),
            prefix: PREFIX,
        };
        Self::start_as(manner, sandbox, cluster, None).await
    }

    /// As [`Self::start_retrying`], the way etcd recommends it to clients: with the addresses of all members, and away
    /// from one that says it does not serve. Its keys are others, so it can write beside a client of the Service.
    ///
    /// # Errors
    /// When no write is acknowledged.
    pub async fn start_listening(
        sandbox: &Sandbox,
        cluster: &str,
        every: Duration,
    ) -> Result<Self> {
        let manner = Manner {
            every,
            retries: Some(RETRIES),
            prefix: LISTENING,
        };
        let way = Way {
            road: Road::to_members(sandbox, cluster).await?,
            identity: None,
        };
        Self::start_on(manner, way).await
    }

    async fn start_as(
        manner: Manner,
        sandbox: &Sandbox,
        cluster: &str,
        identity: Option<Identity>,
    ) -> Result<Self> {
        let way = Way {
            road: Road::to(sandbox, cluster).await?,
            identity,
        };
        Self::start_on(manner, way).await
    }

    async fn start_on(manner: Manner, way: Way) -> Result<Self> {
        let prefix = manner.prefix;
        let ledger = Arc::new(Mutex::new(Ledger::new(prefix, Instant::now())));
        let task = tokio::spawn(write(manner, way.clone(), Arc::clone(&ledger)));
        let writer = Self {
            task,
            ledger,
            way,
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
        until(&format!("{count} more writes"), PATIENCE, async || {
            let (now, why) = self.look(|ledger| (ledger.acknowledged(), ledger.why().to_owned()));
            Ok(if now >= before + count {
                Look::Done(())
            } else {
                Look::NotYet(format!("{} ({why})", now - before))
            })
        })
        .await
    }

    /// How many writes were acknowledged so far.
    #[must_use]
    pub fn acknowledged(&self) -> usize {
        self.look(Ledger::acknowledged)
    }

    /// How long ago the last write was acknowledged.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.look(Ledger::silence)
    }

    /// Reads back as another client: the certificate of the one that wrote is accepted no longer.
    pub fn read_as(&mut self, identity: &Identity) {
        self.way.identity = Some(identity.clone());
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
        let found = until("every key can be read back", PATIENCE, async || {
            let line = self.way.connect().await?;
            let mut client = line.client.kv_client();
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
            Ok(Look::Done(pairs.collect::<BTreeMap<_, _>>()))
        })
        .await?;
        let tally = self.look(|ledger| ledger.tally(&found, silence));
        // Past the test harness, which shows what passing tests print to nobody.
        let _ = writeln!(std::io::stderr(), "    {what}: {tally}");
        Ok(tally)
    }

    fn look<T>(&self, look: impl FnOnce(&Ledger) -> T) -> T {
        look(&self.ledger.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Road {
    async fn to_members(sandbox: &Sandbox, cluster: &str) -> Result<Self> {
        let services = sandbox.api::<Service>();
        let mut members = Vec::new();
        for pod in sandbox.member_pods(cluster).await? {
            let service = services.get(&pod.name_any()).await?;
            let spec = service.spec.context("a Service without a spec")?;
            let address = spec.cluster_ip.context("a Service without an address")?;
            let url = format!("http://{address}:2379");
            members.push((url.clone(), Health::of(&url)));
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

impl Way {
    /// Whether the member at the other end has said that it does not serve.
    fn leaves(&self, line: &Line) -> bool {
        let Road::Members(members) = &self.road else {
            return false;
        };
        let member = line.member.and_then(|member| members.get(member));
        member.is_none_or(|(_, health)| !health.serves())
    }

    pub(crate) async fn connect(&self) -> Result<Line> {
        let scheme = self.identity.as_ref().map_or("http", |_| "https");
        let mut member = None;
        let (url, forward) = match &self.road {
            Road::Service {
                services,
                name,
                first,
            } => {
                let now = timeout(DEADLINE, address(services, name)).await;
                let address = now.ok().and_then(Result::ok).unwrap_or(first.clone());
                (format!("{scheme}://{address}:2379"), None)
            }
            Road::Members(members) => {
                member = members.iter().position(|(_, health)| health.serves());
                let found = member.and_then(|member| members.get(member));
                let (url, _) = found.context("no member says that it serves")?;
                (url.clone(), None)
            }
            Road::Forward {
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
        let options = options.with_connect_timeout(DEADLINE);
        Ok(Line {
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
async fn write(manner: Manner, way: Way, ledger: Arc<Mutex<Ledger>>) {
    let mut beat = interval(manner.every);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut line: Option<Line> = None;
    for number in 0.. {
        beat.tick().await;
        let begun = Instant::now();
        let mut again = false;
        let outcome = loop {
            let pair = (key(manner.prefix, number), value(manner.prefix, number));
            let outcome = attempt(&way, &mut line, pair).await;
            if outcome.is_err() {
                line = None;
            }
            let retries = manner.retries.is_some_and(|most| begun.elapsed() < most);
            if outcome.is_ok() || !retries {
                break outcome.map(|revision| Written { revision, again });
            }
            again = true;
            tokio::time::sleep(PAUSE).await;
        };
        ledger
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .enter(number, outcome);
    }
}

/// One write, over the connection there is or a new one.
async fn attempt(way: &Way, line: &mut Option<Line>, pair: (String, String)) -> Result<i64> {
    let attempt = async {
        if line.as_ref().is_some_and(|line| way.leaves(line)) {
            *line = None;
        }
        if line.is_none() {
            *line = Some(way.connect().await?);
        }
        let client = line.as_ref().map(|line| line.client.kv_client());
        let mut client = client.context("no connection")?;
        let answer = client.put(pair.0, pair.1, None);
        let answer = timeout(DEADLINE, answer)
            .await
            .context("no answer in time")??;
        let header = answer.header().context("an answer without a header")?;
        anyhow::Ok(header.revision())
    };
    // A forwarded port takes its time to open; a write does not.
    let outcome = timeout(DEADLINE * 5, attempt).await;
    outcome.unwrap_or_else(|_| Err(anyhow::anyhow!("no connection in time")))
}
