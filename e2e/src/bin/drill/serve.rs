//! The background process of a drill. It runs Prometheus, writes to a cluster as a client, and limits the disk of the
//! fault `SlowDisk`.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::drill::{Record, SlowVolume};
use e2e::rules::{self, Rules};
use e2e::wait::Poll;
use e2e::{DEADLINE, Keyspace, Prometheus, Testbed, until};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use tokio::time::sleep;

use crate::faults::SLOW_WRITES;
use crate::fleet::{Fleet, SESSIONS};

/// Chart values that enable all scrape jobs and alerts. `backupDelaySeconds` is shorter than the default, because the
/// drill makes a backup every minute.
const MONITORS: &str = "podMonitor.enabled=true,memberMonitor.enabled=true,prometheusRule.enabled=true,\
                        prometheusRule.runbookUrl=docs,prometheusRule.backupDelaySeconds=2400";
/// The time between two writes.
const WRITE_INTERVAL: Duration = Duration::from_millis(200);
/// The number of keys that the client overwrites in turn.
const KEYS: usize = 200;
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The pause before the client reconnects.
const RECONNECT_PAUSE: Duration = Duration::from_secs(5);

/// Starts this executable as the background process, and waits until Prometheus answers.
pub(crate) async fn spawn(fleet: &Fleet) -> Result<()> {
    let log = std::fs::File::create(fleet.log()).context("create the log")?;
    // `setsid` keeps the process running after the terminal is closed.
    Command::new("setsid")
        .arg(std::env::current_exe().context("own path")?)
        .arg("--folder")
        .arg(fleet.folder())
        .arg("serve")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("setsid cannot be started: install the package util-linux")?;
    until("Prometheus answers", DEADLINE, async || {
        fleet.prometheus()?.active_alerts().await.map(Poll::Done)
    })
    .await
    .map(drop)
    .with_context(|| format!("see {}", fleet.log().display()))
}

/// Runs until the file with the address of Prometheus is deleted or replaced: then the drill was stopped, or a new
/// drill was started.
pub(crate) async fn serve(fleet: &Fleet) -> Result<()> {
    let speedup = Record::read(&fleet.record())?.speedup;
    let Rules { jobs, groups } = Rules::render(&fleet.sandbox, MONITORS).await?;
    let groups = rules::accelerated(&groups, speedup);
    let prometheus = Prometheus::start(&fleet.sandbox, jobs, &groups).await?;
    let address = fleet.address();
    std::fs::write(&address, prometheus.address()).context("write the address")?;
    let is_current =
        || std::fs::read_to_string(&address).is_ok_and(|text| text == prometheus.address());
    let served = async {
        let mut limited = None;
        while is_current() {
            if let Err(error) = keep_slow(fleet, &mut limited).await {
                println!("{error:#}");
            }
            sleep(POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        () = served => {}
        () = write(fleet) => {}
    }
    Ok(())
}

/// Writes keys without end, because the alerts for slow disks measure the duration of writes.
async fn write(fleet: &Fleet) {
    let (env, namespace) = (&fleet.sandbox.env, &fleet.sandbox.namespace);
    let mut number = 0;
    loop {
        if let Ok(keys) = Keyspace::of_cluster(env, namespace, SESSIONS).await {
            loop {
                let key = format!("sessions/{}", number % KEYS);
                if let Err(error) = keys.write(&key, vec![7; 512]).await {
                    println!("{error:#}");
                    break;
                }
                number += 1;
                sleep(WRITE_INTERVAL).await;
            }
        }
        sleep(RECONNECT_PAUSE).await;
    }
}

/// Limits the writes of the container that uses the recorded slow volume. Does nothing if this volume was deleted.
/// `limited` is the ID of the last limited container, because a restarted container has a new ID and no limit yet.
async fn keep_slow(fleet: &Fleet, limited: &mut Option<String>) -> Result<()> {
    let Some(SlowVolume { claim, uid }) = Record::read(&fleet.record())?.slow else {
        return Ok(());
    };
    let sandbox = &fleet.sandbox;
    let found = sandbox
        .api::<PersistentVolumeClaim>()
        .get_opt(&claim)
        .await?;
    if found.and_then(|it| it.uid()) != Some(uid) {
        return Ok(());
    }
    let Some(pod) = sandbox.api::<Pod>().get_opt(&claim).await? else {
        return Ok(());
    };
    let container = running_container(&pod);
    if container.is_none() || container == *limited {
        return Ok(());
    }
    let directory = sandbox.volume_directory(&claim).await?;
    let testbed = Testbed::of(sandbox)?;
    testbed.limit_writes(&pod, &directory, SLOW_WRITES).await?;
    *limited = container;
    Ok(())
}

/// The ID of the pod's first container, if this container runs.
fn running_container(pod: &Pod) -> Option<String> {
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    let container = containers.first()?;
    container.state.as_ref()?.running.as_ref()?;
    container.container_id.clone()
}
