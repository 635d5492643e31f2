//! The wiring: which kinds are watched, and what runs the driver.

use std::sync::Arc;
use std::time::Duration;

use api::EtcdCluster;
use etcd::{Access, Deadlines, EtcdClient};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::runtime::watcher;
use runtime::Operator;
use runtime::controller::{controller, drive, watched};

use crate::controller::ClusterOperator;

/// Health is asked of all members at each reconcile: a member that hangs costs its own cluster this much.
const DEADLINES: Deadlines = Deadlines {
    connect: Duration::from_secs(1),
    status: Duration::from_secs(1),
    call: Duration::from_secs(3),
    hedge: Duration::from_millis(300),
    progress: Duration::from_secs(30),
    idle: Duration::from_mins(2),
};

/// Runs until the operator is told to stop. Every child's event leads to its cluster.
pub async fn work(operator: Operator) {
    let config = || watcher::Config::default().labels("app=etcd,etcd_cluster");
    let controller = controller::<EtcdCluster>(&operator)
        .owns(watched::<Pod>(&operator), config())
        .owns(watched::<Service>(&operator), config())
        .owns(watched::<PersistentVolumeClaim>(&operator), config())
        .owns(watched::<PodDisruptionBudget>(&operator), config());
    let etcd = Arc::new(EtcdClient::with_deadlines(Access::default(), DEADLINES));
    let reconciler = ClusterOperator {
        client: operator.client.clone(),
        etcd,
    };
    drive(&operator, controller, Arc::new(reconciler)).await;
}
