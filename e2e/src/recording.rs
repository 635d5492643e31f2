//! The objects of a continuous backup in the store, and the recovery point that follows from them.
//!
//! The names of the segments contain their revisions, so the newest revision in the store is known from one listing
//! (docs/internals/continuous-format.md).

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DynamicObject, ListParams};

use crate::bucket::Bucket;
use crate::manifests::backup_with;
use crate::objects::{Kind, await_object, field, has_condition, is_ready};
use crate::wait::{Poll, until};
use crate::{DEADLINE, Sandbox, Testbed, Writer};

/// Label of the agent's pod. The agent is the process that writes the continuous backup to the bucket.
const LABEL: &str = "etcd.database.coreos.com/backup-uid";

/// The continuous backup of a cluster to a bucket.
pub struct Recording<'a> {
    sandbox: &'a Sandbox,
    bucket: &'a Bucket,
    /// The name of the EtcdBackup.
    name: String,
    /// The prefix of the keys of all objects of the backup in the bucket.
    prefix: String,
}

/// A base, which names the snapshot at the start of a chain. The name of its object contains these fields.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Base {
    /// The name of the base's directory.
    directory: String,
    revision: i64,
    digest: String,
}

/// A segment, which contains the changes of consecutive revisions. The name of its object contains these fields.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Segment {
    directory: String,
    first: i64,
    last: i64,
    previous: String,
    digest: String,
}

/// The first and the last revision of a chain: the revision of its base, and the end of its segments. The chain
/// contains all revisions between the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The revision of the base.
    pub base: i64,
    /// The last revision.
    pub last: i64,
}

fn base(key: &str) -> Option<Base> {
    let directory = key.strip_prefix("bases/")?.strip_suffix(".json")?;
    let (revision, digest) = directory.split_once('-')?;
    Some(Base {
        revision: revision.parse().ok()?,
        digest: digest.to_owned(),
        directory: directory.to_owned(),
    })
}

fn segment(key: &str) -> Option<Segment> {
    let (directory, name) = key.strip_suffix(".segment")?.split_once('/')?;
    let parts: Vec<&str> = name.split('-').collect();
    let &[first, last, previous, digest] = parts.as_slice() else {
        return None;
    };
    Some(Segment {
        directory: directory.to_owned(),
        first: first.parse().ok()?,
        last: last.parse().ok()?,
        previous: previous.to_owned(),
        digest: digest.to_owned(),
    })
}

/// Builds the chain of `base`. Each segment names the digest of the base or segment before it.
fn follow(base: &Base, segments: &[Segment]) -> Chain {
    let mut last = base.revision;
    let mut ends = vec![(base.digest.as_str(), base.revision)];
    while let Some((digest, end)) = ends.pop() {
        last = last.max(end);
        let next = segments.iter().filter(|it| {
            it.directory == base.directory && it.previous == digest && it.first == end + 1
        });
        ends.extend(next.map(|it| (it.digest.as_str(), it.last)));
    }
    Chain {
        base: base.revision,
        last,
    }
}

impl<'a> Recording<'a> {
    /// Applies an EtcdBackup that records the cluster, and waits until its condition `Recording` is True. The Secret
    /// `aws` must exist.
    ///
    /// # Errors
    /// Fails if the agent does not record.
    pub async fn start(
        sandbox: &'a Sandbox,
        bucket: &'a Bucket,
        name: &str,
        cluster: &str,
    ) -> Result<Self> {
        let path = format!("{}/etcd/{name}", bucket.name);
        let more = "  continuous: {flushInterval: 1s}\n";
        let manifest = backup_with(sandbox.env.s3()?, name, cluster, &path, more);
        sandbox.apply(&manifest).await?;
        let mut recording = Self {
            sandbox,
            bucket,
            name: name.to_owned(),
            prefix: String::new(),
        };
        let object = recording.await_condition("True").await?;
        let location = field(&object, "/status/continuous/location");
        let location = location.as_str().context("the location")?;
        let bucket = format!("s3://{}/", bucket.name);
        let prefix = location.strip_prefix(&bucket).context(bucket.clone())?;
        prefix.clone_into(&mut recording.prefix);
        Ok(recording)
    }

    /// Waits until the condition `Recording` has this status.
    ///
    /// # Errors
    /// Fails if the condition has another status at the time limit.
    pub async fn await_condition(&self, status: &str) -> Result<DynamicObject> {
        let what = format!("Recording={status}");
        self.await_status(&what, |object| has_condition(object, "Recording", status))
            .await
    }

    /// Waits until `holds` is true for the EtcdBackup.
    ///
    /// # Errors
    /// Fails after the time limit. The error contains the conditions of the EtcdBackup.
    pub async fn await_status(
        &self,
        what: &str,
        holds: impl Fn(&DynamicObject) -> bool,
    ) -> Result<DynamicObject> {
        let backups = self.sandbox.objects(Kind::EtcdBackup);
        await_object(&backups, &self.name, what, DEADLINE, holds).await
    }

    /// The EtcdBackup.
    ///
    /// # Errors
    /// Fails if the API server does not respond.
    pub async fn status(&self) -> Result<DynamicObject> {
        let backups = self.sandbox.objects(Kind::EtcdBackup);
        Ok(backups.get(&self.name).await?)
    }

    /// The names of all objects without the prefix, and their sizes in bytes.
    async fn objects(&self) -> Result<Vec<(String, u64)>> {
        let listed = self.bucket.list(&self.prefix).await?;
        let names = listed.into_iter().filter_map(|(key, size)| {
            let name = key.strip_prefix(&self.prefix)?;
            Some((name.to_owned(), size))
        });
        Ok(names.collect())
    }

    /// The number of segments in the store, and their total size in bytes.
    ///
    /// # Errors
    /// Fails if the store does not respond.
    pub async fn size(&self) -> Result<(u64, u64)> {
        let (mut count, mut bytes) = (0, 0);
        for (name, size) in self.objects().await? {
            if segment(&name).is_some() {
                count += 1;
                bytes += size;
            }
        }
        Ok((count, bytes))
    }

    /// The newest revision in the names of the segments and bases.
    ///
    /// # Errors
    /// Fails if the store does not respond, or has no base.
    pub async fn revision(&self) -> Result<i64> {
        let objects = self.objects().await?;
        let of = |name: &String| {
            let base = base(name).map(|it| it.revision);
            base.or_else(|| segment(name).map(|it| it.last))
        };
        let revisions = objects.iter().filter_map(|(name, _)| of(name));
        revisions.max().context("the store has no base")
    }

    /// Waits until the store contains this revision.
    ///
    /// # Errors
    /// Fails if the revision is not stored in time.
    pub async fn await_revision(&self, revision: i64) -> Result<()> {
        until("all revisions are stored", DEADLINE, async || {
            let stored = self.revision().await?;
            Ok(if stored >= revision {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{stored} of {revision}"))
            })
        })
        .await
    }

    /// The chains of all bases in the order of their revisions.
    ///
    /// # Errors
    /// Fails if the store does not respond.
    pub async fn chains(&self) -> Result<Vec<Chain>> {
        let objects = self.objects().await?;
        let names = || objects.iter().map(|(name, _)| name.as_str());
        let segments: Vec<Segment> = names().filter_map(segment).collect();
        let mut chains: Vec<Chain> = names()
            .filter_map(base)
            .map(|base| follow(&base, &segments))
            .collect();
        chains.sort_by_key(|chain| chain.base);
        Ok(chains)
    }

    /// The pods of the agent.
    ///
    /// # Errors
    /// Fails if the API server does not respond.
    pub async fn agents(&self) -> Result<Vec<Pod>> {
        let own = ListParams::default().labels(LABEL);
        Ok(self.sandbox.api::<Pod>().list(&own).await?.items)
    }

    /// Waits until the agent has `count` pods, which are all ready.
    ///
    /// # Errors
    /// Fails if the number differs at the time limit, or if a pod is not ready.
    pub async fn await_agents(&self, count: usize) -> Result<()> {
        until("the agent has its pods", DEADLINE, async || {
            let agents = self.agents().await?;
            Ok(if agents.len() == count && agents.iter().all(is_ready) {
                Poll::Done(())
            } else {
                Poll::NotYet(format!("{} agents", agents.len()))
            })
        })
        .await
    }

    /// The writes that would be lost if all members and the agent were lost now: their number, and the time between the
    /// first and the last of their acknowledgments. A segment that is stored during the listing counts as stored.
    ///
    /// # Errors
    /// Fails if the store does not respond.
    pub async fn recovery_point(&self, writer: &Writer) -> Result<(usize, Duration)> {
        let at = Instant::now();
        let revision = self.revision().await?;
        Ok(writer.newer_than(revision, at))
    }

    /// The time of [`Self::recovery_point`] at `count` random moments, sorted from the shortest to the longest.
    ///
    /// # Errors
    /// Fails if the store does not respond.
    pub async fn sample(&self, writer: &Writer, count: usize) -> Result<Vec<Duration>> {
        let mut points = Vec::new();
        while points.len() < count {
            pause().await?;
            let (_, point) = self.recovery_point(writer).await?;
            points.push(point);
        }
        points.sort();
        Ok(points)
    }

    /// Kills all members and the agent at a random moment. Returns the killed pods and the recovery point. The cluster
    /// `cluster` must have three members.
    ///
    /// # Errors
    /// Fails if a container is not running.
    pub async fn kill(
        &self,
        testbed: &Testbed<'_>,
        cluster: &str,
        writer: &Writer,
    ) -> Result<(Vec<Pod>, Duration)> {
        let mut pods = self.sandbox.member_pods(cluster).await?;
        pods.extend(self.agents().await?);
        ensure!(pods.len() == 4, "{} pods", pods.len());
        pause().await?;
        testbed.kill_containers(&pods).await?;
        let (_, point) = self.recovery_point(writer).await?;
        Ok((pods, point))
    }
}

/// A pause of up to 1.2 s, so that the samples are spread over the interval of the segments.
async fn pause() -> Result<()> {
    let nanos = SystemTime::UNIX_EPOCH.elapsed()?.subsec_nanos();
    let pause = Duration::from_micros(u64::from(nanos) % 1_200_000);
    tokio::time::sleep(pause).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(first: i64, last: i64, previous: &str, digest: &str) -> String {
        format!(
            "{:020}-b0/{first:020}-{last:020}-{previous}-{digest}.segment",
            10
        )
    }

    #[test]
    fn chain_ends_before_missing_segment() {
        let base = base("bases/00000000000000000010-b0.json").unwrap();
        let keys = [
            key(11, 15, "b0", "s1"),
            key(16, 20, "s1", "s2"),
            // The segment `s3` contains only a record of a gap, and no transaction. Its last revision is therefore less
            // than its first revision.
            key(21, 20, "s2", "s3"),
        ];
        let segments: Vec<Segment> = keys.iter().filter_map(|key| segment(key)).collect();
        assert_eq!(follow(&base, &segments), Chain { base: 10, last: 20 });
        assert_eq!(follow(&base, &segments[1..]).last, 10);
        assert_eq!(follow(&base, &segments[..1]).last, 15);
        let others = [
            "bases/x.json",
            "snapshots/00000000000000000001.snapshot",
            "a/1-2-x.segment",
        ];
        for other in others {
            assert_eq!(
                (super::base(other), segment(other)),
                (None, None),
                "{other}"
            );
        }
    }
}
