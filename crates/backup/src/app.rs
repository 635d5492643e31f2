//! The wiring: what is watched, and what runs the driver.

use std::sync::Arc;

use api::EtcdBackup;
use etcd::{Access, EtcdClient};
use jiff::Timestamp;
use runtime::Operator;
use runtime::controller::{controller, drive};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::controller::BackupOperator;
use crate::observe::Means;
use crate::workers::Workers;

/// Runs until the operator is told to stop; transfers that run then are given up and leave nothing behind.
pub async fn work(operator: Operator) {
    let (news, ended) = mpsc::unbounded_channel();
    // A transfer that ends is reported at once. All EtcdBackups are looked at then; for those that are done with
    // that costs no call.
    let controller =
        controller::<EtcdBackup>(&operator).reconcile_all_on(UnboundedReceiverStream::new(ended));
    let workers = Workers::new(operator.shutdown.clone(), news);
    let reconciler = BackupOperator {
        means: Means {
            client: operator.client.clone(),
            etcd: Arc::new(EtcdClient::new(Access::default())),
            since: Timestamp::now(),
        },
        workers: workers.clone(),
        objects: controller.store(),
    };
    drive(&operator, controller, Arc::new(reconciler)).await;
    workers.ended().await;
}
