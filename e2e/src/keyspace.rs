//! An etcd client that writes keys, reads them, and compares revisions.

mod auth;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, Client, CompactionOptions, ConnectOptions, DeleteOptions,
    GetOptions, WatchOptions, WatchStream,
};
use futures::{StreamExt, TryStreamExt, stream};

use crate::Env;
use crate::kubectl::PortForward;
use crate::retry::retry_transient;
use crate::tls::Identity;
use crate::wait::{Poll, until};

const IN_FLIGHT: usize = 64;
/// Time limit until a client Service has a ready endpoint.
const SERVICE_TIMEOUT: Duration = Duration::from_mins(1);

/// A connection to an etcd cluster through `kubectl port-forward`.
pub struct Keyspace {
    pub(crate) client: Client,
    _forward: PortForward,
}

impl Keyspace {
    /// Connects to the client Service of the cluster.
    ///
    /// # Errors
    /// Fails if the Service has no ready pod.
    pub async fn of_cluster(env: &Env, namespace: &str, cluster: &str) -> Result<Self> {
        let service = format!("service/{cluster}-client");
        // The connection is retried: kubectl reads the endpoints of the Service only once, and the operator lets the
        // Service select pods only after it has recorded the cluster ID.
        until(
            "the client Service reaches a pod",
            SERVICE_TIMEOUT,
            async || {
                let keys = Self::connect(env, namespace, &service).await?;
                Ok(Poll::Done(keys))
            },
        )
        .await
    }

    /// Like [`Self::of_cluster`], for a cluster with TLS.
    ///
    /// # Errors
    /// Fails if the Service has no ready pod, or if etcd rejects the client certificate.
    pub async fn of_tls_cluster(
        env: &Env,
        namespace: &str,
        cluster: &str,
        identity: &Identity,
    ) -> Result<Self> {
        Self::of_tls(env, namespace, cluster, identity.options()).await
    }

    /// Like [`Self::of_tls_cluster`], but also logs in to etcd.
    ///
    /// # Errors
    /// Fails if the Service has no ready pod, or if etcd rejects the client certificate or the user.
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
            "the client Service reaches a pod",
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

    /// Like [`Self::of_cluster`], but also logs in to etcd.
    ///
    /// # Errors
    /// Fails if the Service has no ready pod, or if etcd rejects the user.
    pub async fn of_cluster_as(
        env: &Env,
        namespace: &str,
        cluster: &str,
        (user, password): (&str, &str),
    ) -> Result<Self> {
        let target = format!("service/{cluster}-client");
        until(
            "the client Service reaches a pod that accepts the user",
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

    /// Connects with TLS to the pod of a member, and reads a key. Does not retry.
    ///
    /// # Errors
    /// Fails if the connection fails, or if the member rejects the client certificate.
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

    /// Connects to the pod of one member.
    ///
    /// # Errors
    /// Fails if the pod is not running.
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

    /// Writes `count` keys with this prefix, and returns the revision after the last write. The name of a key
    /// determines its value.
    ///
    /// Retries writes that fail during a leader election, as ordinary clients do.
    ///
    /// # Errors
    /// Fails if etcd does not acknowledge a write within the time limit of the retries.
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

    /// Reads all keys with this prefix, and compares them with the keys and values that [`Self::fill`] wrote. Returns
    /// the current revision.
    ///
    /// # Errors
    /// Fails if a key is missing or has another value. The error names the first such key.
    pub async fn verify(&self, prefix: &str, count: usize) -> Result<i64> {
        let response = retry_transient(is_transient, async |_| {
            let options = GetOptions::new().with_prefix();
            let mut kv = self.client.kv_client();
            Ok(kv.get(prefix, Some(options)).await?)
        });
        let response = response.await.context("read the keys back")?;
        ensure!(
            response.kvs().len() == count,
            "{} keys under {prefix:?} exist, but {count} were written",
            response.kvs().len()
        );
        let mut expected: Vec<String> = (0..count).map(|number| key(prefix, number)).collect();
        expected.sort();
        for (pair, expected) in response.kvs().iter().zip(&expected) {
            let found = pair.key_str()?;
            ensure!(
                found == expected,
                "expected key {expected}, but read {found}"
            );
            ensure!(
                pair.value_str()? == value(expected),
                "{expected} does not have the value that was written"
            );
        }
        Ok(response
            .header()
            .map_or(0, etcd_client::ResponseHeader::revision))
    }

    /// Writes one key.
    ///
    /// # Errors
    /// Fails if etcd rejects the write.
    pub async fn write(&self, key: &str, value: Vec<u8>) -> Result<()> {
        let put = retry_transient(is_transient, async |_| {
            let mut kv = self.client.kv_client();
            Ok(kv.put(key, value.clone(), None).await?)
        });
        put.await.map(drop).with_context(|| format!("write {key}"))
    }

    /// Deletes all keys with this prefix, and returns the revision after the deletion.
    ///
    /// # Errors
    /// Fails without a quorum.
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

    /// Raises the alarm CORRUPT for a member, as etcd does if the data of the members differs.
    ///
    /// # Errors
    /// Fails without a quorum.
    pub async fn raise_corrupt(&self, member: u64) -> Result<()> {
        let raised = retry_transient(is_transient, async |_| {
            let mut options = AlarmOptions::new();
            options.with_member(member);
            let mut client = self.client.maintenance_client();
            let answer = client.alarm(AlarmAction::Activate, AlarmType::Corrupt, Some(options));
            Ok(answer.await?)
        });
        raised.await.map(drop).context("raise the alarm")
    }

    /// Compacts the history up to `revision`.
    ///
    /// # Errors
    /// Fails without a quorum.
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

    /// The current revision, from a linearizable read.
    ///
    /// # Errors
    /// Fails without a quorum.
    pub async fn revision(&self) -> Result<i64> {
        retry_transient(is_transient, async |_| self.read().await).await
    }

    /// Like [`Self::revision`], but without retries.
    async fn read(&self) -> Result<i64> {
        let response = self.client.kv_client().get("revision", None).await?;
        Ok(response
            .header()
            .map_or(0, etcd_client::ResponseHeader::revision))
    }

    /// Reads a snapshot in the format of `etcdctl snapshot save`: the database, then its checksum.
    ///
    /// # Errors
    /// Fails if the member does not send the complete snapshot.
    pub async fn snapshot(&self) -> Result<Vec<u8>> {
        let mut stream = self.client.maintenance_client().snapshot().await?;
        let mut content = Vec::new();
        while let Some(part) = stream
            .message()
            .await
            .context("the snapshot stream was interrupted")?
        {
            content.extend_from_slice(part.blob());
        }
        Ok(content)
    }

    /// Starts a watch of a key at `revision`. Returns 0 if etcd accepts the watch. If `revision` is compacted, etcd
    /// cancels the watch, and this function returns the compact revision.
    ///
    /// # Errors
    /// Fails if etcd does not respond.
    pub async fn watch_from(&self, key: &str, revision: i64) -> Result<i64> {
        let options = WatchOptions::new().with_start_revision(revision);
        let mut watch = self.client.watch_client();
        let mut stream = watch.watch(key, Some(options)).await?;
        let answer = stream.message().await?.context("the watch ended")?;
        if answer.canceled() || answer.compact_revision() > 0 {
            return Ok(answer.compact_revision());
        }
        // The first response only confirms that the watch was created. If the start revision is compacted, etcd cancels
        // the watch in the second response.
        let next = tokio::time::timeout(Duration::from_secs(30), stream.message()).await;
        Ok(match next {
            Ok(answer) => answer?.context("the watch ended")?.compact_revision(),
            Err(_) => 0,
        })
    }

    /// Starts `count` watches of a key, each in a separate stream.
    ///
    /// # Errors
    /// Fails if etcd does not respond.
    pub async fn watches(&self, key: &str, count: usize) -> Result<Vec<WatchStream>> {
        let mut watches = Vec::new();
        for _ in 0..count {
            watches.push(self.client.watch_client().watch(key, None).await?);
        }
        Ok(watches)
    }

    /// The client URLs in the member list.
    ///
    /// # Errors
    /// Fails without a quorum.
    pub async fn client_urls(&self) -> Result<Vec<String>> {
        let response = retry_transient(is_transient, async |_| {
            Ok(self.client.cluster_client().member_list().await?)
        });
        let response = response.await?;
        let members = response.members().iter();
        Ok(members
            .flat_map(|member| member.client_urls().to_vec())
            .collect())
    }

    /// The name of each member, with true for learners. The list comes from a linearizable request.
    ///
    /// # Errors
    /// Fails without a quorum.
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

    /// The cluster ID in the response of a member.
    ///
    /// # Errors
    /// Fails if the member does not respond.
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

/// After a retry, ignores an error that shows that the first attempt succeeded, although its response was lost.
fn accept_if_done(is_retry: bool, outcome: Result<(), etcd_client::Error>) -> Result<()> {
    match outcome {
        Err(etcd_client::Error::GRpcStatus(status))
            if is_retry
                && ["already exists", "has been compacted"]
                    .iter()
                    .any(|text| status.message().contains(text)) =>
        {
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// True if the error shows that etcd or the connection is temporarily unavailable.
pub(crate) fn is_transient(error: &anyhow::Error) -> bool {
    // The gRPC codes are Unavailable (14), DeadlineExceeded (4) and Unknown (2). etcd returns Unknown if its leader
    // has dropped a proposal.
    error.chain().any(|cause| {
        let error = cause.downcast_ref::<etcd_client::Error>();
        matches!(error, Some(etcd_client::Error::GRpcStatus(status)) if matches!(status.code() as i32, 2 | 4 | 14))
    })
}
