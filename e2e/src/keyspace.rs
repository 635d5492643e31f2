//! A client's view of a cluster: keys written before, read after, revisions compared.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, Client, CompactionOptions, ConnectOptions, DeleteOptions,
    GetOptions, WatchOptions,
};
use futures::{StreamExt, TryStreamExt, stream};

use crate::Env;
use crate::kubectl::PortForward;
use crate::retry::retry_transient;
use crate::tls::Identity;
use crate::wait::{Poll, until};

/// Writes in flight at a time.
const IN_FLIGHT: usize = 64;
/// How long a client Service may take to lead to a pod.
const SERVICE_TIMEOUT: Duration = Duration::from_mins(1);

/// A connection to a cluster, through a forwarded port.
pub struct Keyspace {
    pub(crate) client: Client,
    _forward: PortForward,
}

impl Keyspace {
    /// Connects to the cluster through its client Service.
    ///
    /// # Errors
    /// When the Service has no ready pod.
    pub async fn of_cluster(env: &Env, namespace: &str, cluster: &str) -> Result<Self> {
        let service = format!("service/{cluster}-client");
        // kubectl reads the Service once, and it may lead nowhere until the cluster's ID is recorded.
        until(
            "the client Service leads to a pod",
            SERVICE_TIMEOUT,
            async || {
                let keys = Self::connect(env, namespace, &service).await?;
                Ok(Poll::Done(keys))
            },
        )
        .await
    }

    /// As [`Self::of_cluster`], to a cluster that asks for TLS.
    ///
    /// # Errors
    /// When the Service has no ready pod, or the identity is refused.
    pub async fn of_tls_cluster(
        env: &Env,
        namespace: &str,
        cluster: &str,
        identity: &Identity,
    ) -> Result<Self> {
        Self::of_tls(env, namespace, cluster, identity.options()).await
    }

    /// As [`Self::of_tls_cluster`], as a user of etcd's own authentication.
    ///
    /// # Errors
    /// When the Service has no ready pod, or the identity or the user is refused.
    pub async fn of_tls_cluster_as(
        env: &Env,
        namespace: &str,
        cluster: &str,
        identity: &Identity,
        (user, password): (&str, &str),
    ) -> Result<Self> {
        let options = identity.options().with_user(user, password);
        let options = options.with_auto_token_refresh(true);
        Self::of_tls(env, namespace, cluster, options).await
    }

    async fn of_tls(
        env: &Env,
        namespace: &str,
        cluster: &str,
        options: ConnectOptions,
    ) -> Result<Self> {
        let target = format!("service/{cluster}-client");
        until(
            "the client Service leads to a pod",
            SERVICE_TIMEOUT,
            async || {
                let forward = PortForward::open(env, namespace, &target, 2379).await?;
                let url = format!("https://127.0.0.1:{}", forward.port);
                let keys = Self::connect_over(forward, url, options.clone(), &target).await?;
                keys.read().await?;
                Ok(Poll::Done(keys))
            },
        )
        .await
    }

    /// As [`Self::of_cluster`], as a user of etcd's own authentication.
    ///
    /// # Errors
    /// When the Service has no ready pod, or etcd does not let the user in.
    pub async fn of_cluster_as(
        env: &Env,
        namespace: &str,
        cluster: &str,
        (user, password): (&str, &str),
    ) -> Result<Self> {
        let target = format!("service/{cluster}-client");
        until(
            "the client Service leads to a pod that lets the user in",
            SERVICE_TIMEOUT,
            async || {
                let forward = PortForward::open(env, namespace, &target, 2379).await?;
                let url = format!("http://127.0.0.1:{}", forward.port);
                let options = ConnectOptions::new()
                    .with_user(user, password)
                    .with_auto_token_refresh(true);
                let keys = Self::connect_over(forward, url, options, &target).await?;
                Ok(Poll::Done(keys))
            },
        )
        .await
    }

    /// Whether etcd lets this user in with this password.
    ///
    /// # Errors
    /// When the Service leads nowhere.
    pub async fn accepts_login(
        env: &Env,
        namespace: &str,
        cluster: &str,
        (user, password): (&str, &str),
    ) -> Result<bool> {
        let target = format!("service/{cluster}-client");
        until("etcd says who gets in", SERVICE_TIMEOUT, async || {
            let keys = Self::connect(env, namespace, &target).await?;
            let mut auth = keys.client.auth_client();
            let answer = auth
                .authenticate(user.to_owned(), password.to_owned())
                .await;
            Ok(match answer.map_err(anyhow::Error::from) {
                Ok(_) => Poll::Done(true),
                Err(error) if is_transient(&error) => Poll::NotYet(format!("{error:#}")),
                Err(_) => Poll::Done(false),
            })
        })
        .await
    }

    /// Turns authentication on as a user does: root with this password and the role root, then the switch.
    ///
    /// # Errors
    /// When etcd refuses.
    pub async fn enable_auth(&self, password: &str) -> Result<()> {
        let auth = || self.client.auth_client();
        retry_transient(is_transient, async |is_retry| {
            let added = auth().user_add("root", password, None).await;
            accept_if_done(is_retry, added.map(drop))
        })
        .await?;
        retry_transient(is_transient, async |is_retry| {
            accept_if_done(is_retry, auth().role_add("root").await.map(drop))
        })
        .await?;
        retry_transient(is_transient, async |_| {
            Ok(auth().user_grant_role("root", "root").await?)
        })
        .await?;
        retry_transient(is_transient, async |is_retry| {
            let enabled = auth().auth_enable().await;
            self.ensure_root_login(is_retry, password, enabled.map(drop))
                .await
        })
        .await
    }

    /// As [`accept_if_done`], of what changes who gets in: when it was accept_if_done, whoever asks for it once more is nobody, or has a login
    /// of before. It was accept_if_done if root gets in with this password.
    async fn ensure_root_login(
        &self,
        is_retry: bool,
        password: &str,
        outcome: Result<(), etcd_client::Error>,
    ) -> Result<()> {
        let Err(error) = outcome else { return Ok(()) };
        let error = anyhow::Error::from(error);
        if !is_retry || is_transient(&error) {
            return Err(error);
        }
        let login = (String::from("root"), password.to_owned());
        match self
            .client
            .auth_client()
            .authenticate(login.0, login.1)
            .await
        {
            Ok(_) => Ok(()),
            Err(other) => {
                let other = anyhow::Error::from(other);
                Err(if is_transient(&other) { other } else { error })
            }
        }
    }

    /// Sets root's password as a user does.
    ///
    /// # Errors
    /// When etcd refuses.
    pub async fn change_password(&self, password: &str) -> Result<()> {
        retry_transient(is_transient, async |is_retry| {
            let mut auth = self.client.auth_client();
            let changed = auth.user_change_password("root", password).await;
            self.ensure_root_login(is_retry, password, changed.map(drop))
                .await
        })
        .await
    }

    /// Connects once to the pod of a member that asks for TLS, and reads from it.
    ///
    /// # Errors
    /// When it cannot be reached, or the identity is refused.
    pub async fn of_tls_member(
        env: &Env,
        namespace: &str,
        member: &str,
        identity: &Identity,
    ) -> Result<Self> {
        let target = format!("pod/{member}");
        let forward = PortForward::open(env, namespace, &target, 2379).await?;
        let url = format!("https://127.0.0.1:{}", forward.port);
        let keys = Self::connect_over(forward, url, identity.options(), &target).await?;
        keys.read().await?;
        Ok(keys)
    }

    /// Connects to one member's pod.
    ///
    /// # Errors
    /// When the pod is not running.
    pub async fn of_pod(env: &Env, namespace: &str, pod: &str) -> Result<Self> {
        Self::connect(env, namespace, &format!("pod/{pod}")).await
    }

    async fn connect(env: &Env, namespace: &str, target: &str) -> Result<Self> {
        let forward = PortForward::open(env, namespace, target, 2379).await?;
        let url = format!("http://127.0.0.1:{}", forward.port);
        Self::connect_over(forward, url, ConnectOptions::new(), target).await
    }

    async fn connect_over(
        forward: PortForward,
        url: String,
        options: ConnectOptions,
        target: &str,
    ) -> Result<Self> {
        let options = options
            .with_connect_timeout(Duration::from_secs(5))
            .with_timeout(Duration::from_secs(20));
        let client = Client::connect([url], Some(options))
            .await
            .with_context(|| format!("connect to {target}"))?;
        Ok(Self {
            client,
            _forward: forward,
        })
    }

    /// Writes `count` keys under `prefix`, each with a value that follows from its name; returns the store's
    /// revision afterwards.
    ///
    /// A write that is not acknowledged because the members are electing a leader is made is_retry, as clients do.
    ///
    /// # Errors
    /// With the first write that is not acknowledged for longer than an election may take.
    pub async fn fill(&self, prefix: &str, count: usize, progress: impl Fn(usize)) -> Result<i64> {
        let mut done = 0;
        let mut writes = stream::iter(0..count)
            .map(|number| self.put(key(prefix, number)))
            .buffer_unordered(IN_FLIGHT);
        while writes.try_next().await?.is_some() {
            done += 1;
            progress(done);
        }
        self.revision().await
    }

    async fn put(&self, key: String) -> Result<()> {
        let put = retry_transient(is_transient, async |_| {
            let mut kv = self.client.kv_client();
            Ok(kv.put(key.clone(), value(&key), None).await?)
        });
        put.await.map(drop).with_context(|| format!("put {key}"))
    }

    /// Reads every key under `prefix` back and compares it; returns the store's revision.
    ///
    /// # Errors
    /// Names the first key that is missing or differs.
    pub async fn verify(&self, prefix: &str, count: usize) -> Result<i64> {
        let response = retry_transient(is_transient, async |_| {
            let options = GetOptions::new().with_prefix();
            let mut kv = self.client.kv_client();
            Ok(kv.get(prefix, Some(options)).await?)
        });
        let response = response.await.context("read the keys back")?;
        ensure!(
            response.kvs().len() == count,
            "{} keys under {prefix:?} were read back, {count} were written",
            response.kvs().len()
        );
        let mut expected: Vec<String> = (0..count).map(|number| key(prefix, number)).collect();
        expected.sort();
        for (pair, expected) in response.kvs().iter().zip(&expected) {
            let found = pair.key_str()?;
            ensure!(found == expected, "expected key {expected}, read {found}");
            ensure!(
                pair.value_str()? == value(expected),
                "the value of {expected} differs"
            );
        }
        Ok(response
            .header()
            .map_or(0, etcd_client::ResponseHeader::revision))
    }

    /// Writes one key.
    ///
    /// # Errors
    /// When etcd refuses it.
    pub async fn write(&self, key: &str, value: Vec<u8>) -> Result<()> {
        let put = retry_transient(is_transient, async |_| {
            let mut kv = self.client.kv_client();
            Ok(kv.put(key, value.clone(), None).await?)
        });
        put.await.map(drop).with_context(|| format!("write {key}"))
    }

    /// Deletes every key under `prefix`; returns the store's revision afterwards.
    ///
    /// # Errors
    /// Without a quorum.
    pub async fn delete(&self, prefix: &str) -> Result<i64> {
        let answer = retry_transient(is_transient, async |_| {
            let options = DeleteOptions::new().with_prefix();
            let mut kv = self.client.kv_client();
            Ok(kv.delete(prefix, Some(options)).await?)
        });
        let answer = answer.await.with_context(|| format!("delete {prefix}"))?;
        Ok(answer
            .header()
            .map_or(0, etcd_client::ResponseHeader::revision))
    }

    /// Raises the alarm CORRUPT for a member, as etcd does that finds its data to differ.
    ///
    /// # Errors
    /// Without a quorum.
    pub async fn raise_corrupt(&self, member: u64) -> Result<()> {
        let raised = retry_transient(is_transient, async |_| {
            let mut whose = AlarmOptions::new();
            whose.with_member(member);
            let mut client = self.client.maintenance_client();
            let answer = client.alarm(AlarmAction::Activate, AlarmType::Corrupt, Some(whose));
            Ok(answer.await?)
        });
        raised.await.map(drop).context("raise the alarm")
    }

    /// Forgets what was before a revision.
    ///
    /// # Errors
    /// Without a quorum.
    pub async fn compact(&self, revision: i64) -> Result<()> {
        let compacted = retry_transient(is_transient, async |is_retry| {
            let options = CompactionOptions::new().with_physical();
            let mut client = self.client.kv_client();
            accept_if_done(
                is_retry,
                client.compact(revision, Some(options)).await.map(drop),
            )
        });
        compacted.await.context("compact")
    }

    /// The store's revision, read linearizably.
    ///
    /// # Errors
    /// Without a quorum.
    pub async fn revision(&self) -> Result<i64> {
        retry_transient(is_transient, async |_| self.read().await).await
    }

    /// As [`Self::revision`], asked once: whoever is refused is refused at once.
    async fn read(&self) -> Result<i64> {
        let response = self.client.kv_client().get("revision", None).await?;
        Ok(response
            .header()
            .map_or(0, etcd_client::ResponseHeader::revision))
    }

    /// A snapshot as `etcdctl snapshot save` stores it: the database with its checksum behind it.
    ///
    /// # Errors
    /// When the member does not send it whole.
    pub async fn snapshot(&self) -> Result<Vec<u8>> {
        let mut stream = self.client.maintenance_client().snapshot().await?;
        let mut content = Vec::new();
        while let Some(part) = stream.message().await.context("the snapshot breaks off")? {
            content.extend_from_slice(part.blob());
        }
        Ok(content)
    }

    /// Watches a key from a revision on, as a client that has seen everything before it, and returns the revision up
    /// to which etcd says that nothing can be told any more; 0 when the watch is served.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub async fn watch_from(&self, key: &str, revision: i64) -> Result<i64> {
        let options = WatchOptions::new().with_start_revision(revision);
        let mut watch = self.client.watch_client();
        let mut stream = watch.watch(key, Some(options)).await?;
        let answer = stream.message().await?.context("the watch ended")?;
        if answer.canceled() || answer.compact_revision() > 0 {
            return Ok(answer.compact_revision());
        }
        // The first answer says that the watch is made; what it is worth says the next.
        let next = tokio::time::timeout(Duration::from_secs(30), stream.message()).await;
        Ok(match next {
            Ok(answer) => answer?.context("the watch ended")?.compact_revision(),
            Err(_) => 0,
        })
    }

    /// `(name, is_learner)` of every member, from a linearizable list.
    ///
    /// # Errors
    /// Without a quorum.
    pub async fn members(&self) -> Result<Vec<(String, bool)>> {
        let response = retry_transient(is_transient, async |_| {
            Ok(self.client.cluster_client().member_list().await?)
        });
        let response = response.await?;
        Ok(response
            .members()
            .iter()
            .map(|member| (member.name().to_owned(), member.is_learner()))
            .collect())
    }

    /// The cluster's ID.
    ///
    /// # Errors
    /// When the member does not answer.
    pub async fn cluster_id(&self) -> Result<u64> {
        let response = retry_transient(is_transient, async |_| {
            Ok(self.client.maintenance_client().status().await?)
        });
        let response = response.await?;
        Ok(response
            .header()
            .map_or(0, etcd_client::ResponseHeader::cluster_id))
    }
}

fn key(prefix: &str, number: usize) -> String {
    format!("{prefix}{number:08}")
}

fn value(key: &str) -> String {
    format!("the value of {key}")
}

/// The second time, what the first one has accept_if_done without an answer is refused.
fn accept_if_done(is_retry: bool, outcome: Result<(), etcd_client::Error>) -> Result<()> {
    match outcome {
        Err(etcd_client::Error::GRpcStatus(status))
            if is_retry
                && ["already exists", "has been compacted"]
                    .iter()
                    .any(|said| status.message().contains(said)) =>
        {
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// Whether etcd or the way to it is only unavailable for the moment.
pub(crate) fn is_transient(error: &anyhow::Error) -> bool {
    // tonic's codes: 14 is Unavailable, 4 is DeadlineExceeded, 2 is Unknown, which etcd says of a proposal that its leader
    // has dropped.
    error.chain().any(|cause| {
        let error = cause.downcast_ref::<etcd_client::Error>();
        matches!(error, Some(etcd_client::Error::GRpcStatus(status)) if matches!(status.code() as i32, 2 | 4 | 14))
    })
}
