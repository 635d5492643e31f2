//! What runs in the pod beside a claim. It talks to etcd and to the file system, and to nobody else.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use etcd::{Access, EtcdClient};
use jiff::Timestamp;
use runtime::progress;
use store::{LocalStore, Store};
use tokio_util::sync::CancellationToken;

use super::order::{Order, Report, Snapshot, Task};
use super::pod::ROOT;
use crate::observed::{Moved, Trouble};
use crate::removal::{Removal, What};
use crate::transfer::{Meter, Name, Transfer, Written, written};

/// Arguments of `volume`.
#[derive(Args, Clone, Debug)]
pub struct Volume {
    /// What is to be done, as JSON. Holds no credentials
    #[arg(long, value_name = "JSON")]
    order: String,
    /// Where the claim is mounted
    #[arg(long, default_value = ROOT)]
    root: PathBuf,
    /// Where the result is reported
    #[arg(long, default_value = "/dev/termination-log")]
    report: PathBuf,
}

/// Does the work and reports. Says whether it worked.
pub async fn run(arguments: &Volume) -> bool {
    let meter = Meter::default();
    let now = || {
        let Moved { bytes, total } = meter.read();
        progress::Moved { bytes, total }
    };
    let report = tokio::select! {
        report = work(arguments, &meter) => report.unwrap_or_else(Report::failed),
        // It ends only with the process.
        report = async { progress::serve(now).await; std::future::pending().await } => report,
    };
    let text = serde_json::to_string(&report).unwrap_or_default();
    if let Err(error) = fs::write(&arguments.report, &text) {
        tracing::warn!(%error, "the result cannot be reported to the kubelet");
    }
    tracing::info!(report = text, "ended");
    !matches!(report, Report::Failed { .. })
}

async fn work(arguments: &Volume, meter: &Meter) -> Result<Report, Trouble> {
    let order: Order = serde_json::from_str(&arguments.order).map_err(|error| {
        Trouble::new(
            api::conditions::Reason::StepFailed,
            format!("the order cannot be read: {error}"),
        )
    })?;
    let store: Arc<dyn Store> = Arc::new(LocalStore::named(&arguments.root, order.store()));
    let removal = |what| Removal {
        store: store.clone(),
        path: order.path.clone(),
        uid: order.uid.clone(),
        what,
        now: Timestamp::now(),
    };
    let kept = match order.task.clone() {
        Task::Store(snapshot) => return stored(&order, snapshot, store, meter).await,
        Task::Surplus { rules, newest } => removal(What::Surplus { rules, newest }).run().await?,
        Task::Everything => removal(What::Everything).run().await?,
    };
    Ok(Report::removed(&kept))
}

async fn stored(
    order: &Order,
    snapshot: Snapshot,
    store: Arc<dyn Store>,
    meter: &Meter,
) -> Result<Report, Trouble> {
    let Snapshot {
        endpoints,
        begun,
        numbered,
        compress,
        cluster,
    } = snapshot;
    let name = if numbered {
        Name::Numbered {
            path: order.path.clone(),
            time: begun,
            left: None,
        }
    } else {
        Name::Exact(order.path.clone())
    };
    // A pod before this one may have done it all.
    let name = match written(store.as_ref(), name, &order.uid, begun).await? {
        Written::Whole(stored) => return Ok(Report::Stored(stored)),
        Written::Not(name) => name,
    };
    let transfer = Transfer {
        etcd: Arc::new(EtcdClient::new(Access::default())),
        endpoints,
        store,
        name,
        compress,
        uid: order.uid.clone(),
        cluster,
        since: Timestamp::now(),
    };
    let stored = transfer.run(meter, &CancellationToken::new()).await?;
    Ok(Report::Stored(stored))
}
