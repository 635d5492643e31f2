//! Changes the clusters of a sandbox, and waits until their status reports the effects.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::api::{Api, DynamicObject, ListParams, WatchEvent, WatchParams};

use super::Sandbox;
use crate::DEADLINE;
use crate::objects::{self, Kind};
use crate::watch::watch_until;

impl Sandbox {
    /// Waits until the cluster has a leader, `count` members that are ready voters, and no pending work.
    ///
    /// # Errors
    /// Fails after the time limit. The error contains the last status.
    pub async fn await_members(&self, cluster: &str, count: usize) -> Result<DynamicObject> {
        let what = format!("{count} ready voters and no pending work");
        objects::await_object(
            &self.objects(Kind::EtcdCluster),
            cluster,
            &what,
            DEADLINE,
            |object| {
                let details = objects::field(object, "/status/memberDetails");
                let voters = details.as_array().map_or(0, |list| {
                    list.iter()
                        .filter(|member| member["role"] != "Learner")
                        .count()
                });
                objects::ready_members(object).len() == count
                    && voters == count
                    && objects::leader(object).is_ok()
                    && objects::field(object, "/status/size") == count
                    && objects::field(object, "/status/observedGeneration").as_i64()
                        == object.metadata.generation
                    && objects::has_condition(object, "Available", "True")
                    && objects::has_condition(object, "Progressing", "False")
            },
        )
        .await
    }

    /// The pods of a cluster without terminating pods, sorted by name.
    ///
    /// # Errors
    /// Fails if the API server does not respond.
    pub async fn member_pods(&self, cluster: &str) -> Result<Vec<Pod>> {
        let pods: Api<Pod> = self.api();
        let list = pods
            .list(&ListParams::default().labels(&format!("app=etcd,etcd_cluster={cluster}")))
            .await?;
        Ok(list
            .items
            .into_iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .collect())
    }

    /// The directory on the testbed that contains the volume of the PVC.
    ///
    /// # Errors
    /// Fails if the PVC has no volume, or if the volume has no host path.
    pub async fn volume_directory(&self, claim: &str) -> Result<String> {
        let claims: Api<PersistentVolumeClaim> = self.api();
        let spec = claims.get(claim).await?.spec.context("no spec")?;
        let name = spec.volume_name.context("the PVC has no volume")?;
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let spec = volumes.get(&name).await?.spec.context("no spec")?;
        let path = spec.host_path.map(|it| it.path);
        path.context("the volume is not a host path")
    }

    /// Changes `spec.size` with `kubectl scale`.
    ///
    /// # Errors
    /// Fails if kubectl fails. The error contains the error output of kubectl.
    pub async fn scale(&self, cluster: &str, size: usize) -> Result<()> {
        let (cluster, size) = (
            format!("etcdcluster/{cluster}"),
            format!("--replicas={size}"),
        );
        self.kubectl(&["scale", &cluster, &size]).await.map(drop)
    }

    /// Triggers a reconcile, in which the operator reads the Secrets of the cluster. The operator does not watch
    /// Secrets: it reads those of an idle cluster once a minute. Tests of this interval must not call this function.
    ///
    /// # Errors
    /// Fails if kubectl fails. The error contains the error output of kubectl.
    pub async fn trigger_reconcile(&self, cluster: &str) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
        let trigger = format!("e2e-trigger=at-{now}");
        let words = ["annotate", "etcdcluster", cluster, &trigger, "--overwrite"];
        self.kubectl(&words).await.map(drop)
    }

    /// Makes the kubelets read the Secrets of a cluster's pods. Without this trigger, a kubelet reads the Secrets of
    /// its pods once a minute.
    ///
    /// # Errors
    /// Fails if kubectl fails. The error contains the error output of kubectl.
    pub async fn trigger_kubelet_sync(&self, cluster: &str) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
        let (members, trigger) = (
            format!("--selector=app=etcd,etcd_cluster={cluster}"),
            format!("e2e-trigger=at-{now}"),
        );
        let words = ["annotate", "pods", &members, &trigger, "--overwrite"];
        self.kubectl(&words).await.map(drop)
    }

    /// Deletes the pod of a member, and waits until the status reports the loss. This wait is necessary, because right
    /// after the deletion the status still lists the member as ready.
    ///
    /// # Errors
    /// Fails if the loss is not reported.
    pub async fn lose_pod(&self, cluster: &str, pod: &str) -> Result<()> {
        let before = self.objects(Kind::EtcdCluster).get(cluster).await?;
        let since = before.metadata.resource_version.unwrap_or_default();
        // The pod may already be deleted, because the operator deletes the pod of a member that it considers lost.
        let delete = ["delete", "pod", pod, "--now", "--wait=false"];
        self.kubectl(&[&delete[..], &["--ignore-not-found"]].concat())
            .await?;
        // A watch observes the loss in the status. Polls could miss it, because the member may restart on its volume
        // between two polls.
        let only = WatchParams::default().fields(&format!("metadata.name={cluster}"));
        let clusters = self.objects(Kind::EtcdCluster);
        let seen = watch_until(&clusters, &only, &since, DEADLINE, |change| {
            let WatchEvent::Modified(object) = change else {
                return None;
            };
            let ready = objects::ready_members(&object);
            (!ready.iter().any(|name| name == pod)).then_some(())
        })
        .await;
        match seen {
            Ok(()) => Ok(()),
            Err(_) => self.await_unready(cluster, pod).await,
        }
    }

    /// Waits until the status lists the member as not ready.
    ///
    /// # Errors
    /// Fails if the member stays ready.
    pub async fn await_unready(&self, cluster: &str, member: &str) -> Result<()> {
        objects::await_object(
            &self.objects(Kind::EtcdCluster),
            cluster,
            &format!("{member} is not ready"),
            DEADLINE,
            |object| {
                !objects::ready_members(object)
                    .iter()
                    .any(|name| name == member)
            },
        )
        .await
        .map(drop)
    }

    /// Waits until the status lists the member as unhealthy. The operator asks etcd for the health of a member, so the
    /// status is correct even if the kubelet does not run.
    ///
    /// # Errors
    /// Fails if the member stays healthy.
    pub async fn await_unhealthy(&self, cluster: &str, member: &str) -> Result<()> {
        let is_member = |one: &serde_json::Value| one["name"] == member && one["healthy"] == false;
        objects::await_object(
            &self.objects(Kind::EtcdCluster),
            cluster,
            &format!("{member} is unhealthy"),
            DEADLINE,
            |object| {
                let details = objects::field(object, "/status/memberDetails").as_array();
                details.into_iter().flatten().any(is_member)
            },
        )
        .await
        .map(drop)
    }

    /// Deletes a cluster, and waits until its pods and PVCs are deleted.
    ///
    /// # Errors
    /// Fails if pods or PVCs remain at the time limit. The error contains their number.
    pub async fn delete_cluster(&self, cluster: &str) -> Result<()> {
        self.kubectl(&["delete", "etcdcluster", cluster]).await?;
        objects::await_no_data(&self.client, &self.namespace, cluster, DEADLINE).await
    }
}
