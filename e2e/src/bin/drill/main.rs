//! A drill for on-call engineers: it injects faults into clusters and does not name them. `cargo xtask drill` runs it
//! on the testbed.

#![allow(clippy::large_futures)] // The set-up of a drill is one large future.

mod faults;
mod fleet;
mod serve;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use e2e::drill::{Fault, Made, Record, seconds, shown};
use e2e::wait::Poll;
use e2e::{Prometheus, Testbed, step, until};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::fleet::Fleet;

/// Time limit for the first alert of a fault. With a speedup of 1, the slowest alert fires after an hour.
const ALERT_TIMEOUT: Duration = Duration::from_mins(75);
/// The maximum number of values of each time series in the result of one query, below Prometheus' limit of 11,000.
const MAX_STEPS: f64 = 10_000.0;
/// The pause between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Inject unnamed faults into clusters, for an on-call engineer to find and repair.
#[derive(Parser)]
struct Arguments {
    /// The folder with the files of the drill.
    #[arg(long)]
    folder: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Create the clusters.
    Start {
        #[arg(long)]
        seed: Option<u64>,
        #[arg(long)]
        speedup: u32,
    },
    /// Run Prometheus in the background until the drill stops.
    Serve,
    /// Inject the next fault.
    Fault,
    /// Report whether the clusters are healthy.
    Check {
        #[arg(long)]
        wait: bool,
    },
    /// Print the alerts.
    Alerts,
    /// Print the faults that were injected.
    Reveal,
    /// Delete the clusters.
    Stop,
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let fleet = Fleet::of(&arguments.folder).await?;
    match arguments.command {
        Command::Start { seed, speedup } => start(&fleet, seed, speedup).await?,
        Command::Serve => serve::serve(&fleet).await?,
        Command::Fault => fault(&fleet).await?,
        Command::Check { wait } => return check(&fleet, wait).await,
        Command::Alerts => alerts(&fleet).await?,
        Command::Reveal => reveal(&Record::read(&fleet.record())?),
        Command::Stop => stop(&fleet).await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn start(fleet: &Fleet, seed: Option<u64>, speedup: u32) -> Result<()> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let seed = seed.unwrap_or(clock.as_secs() % 1_000_000);
    Record::new(seed, speedup).write(&fleet.record())?;
    // All nodes are repaired first, because an earlier drill may have left a node stopped or cordoned.
    Testbed::of(&fleet.sandbox)?.repair().await?;
    fleet.create().await?;
    step("start Prometheus", serve::spawn(fleet)).await?;
    step("wait until no alert is active", fleet.await_healthy()).await?;
    let program = std::env::current_exe().context("own path")?;
    let programs = program.parent().context("own folder")?;
    println!(
        "\nThe fleet is ready. The on-call engineer runs in a shell:\n\
         \n  eval \"$(cargo xtask testbed env)\"\
         \n  export PATH=\"$PATH:{}\"    # kubectl etcd\
         \n  kubectl -n {} get etcds\
         \n  cargo xtask drill alerts    # Prometheus: http://{}\n\
         \nKeys and passwords of the team: {}\
         \nTo make a fault: cargo xtask drill fault",
        programs.display(),
        fleet.sandbox.namespace,
        fleet.prometheus()?.address(),
        fleet.vault().display(),
    );
    Ok(())
}

async fn fault(fleet: &Fleet) -> Result<()> {
    // No fault is made if Prometheus does not run, because then no alert could fire.
    fleet.prometheus()?;
    let file = fleet.record();
    let mut record = Record::read(&file)?;
    match record.unrepaired() {
        Some(made) if made.alert.is_some() => {
            bail!(
                "the last fault is not repaired yet: repair it, then run `cargo xtask drill check`"
            )
        }
        Some(_) => println!("Continues the last fault, because its command was interrupted."),
        None => {
            let Some(fault) = record.next() else {
                println!("All faults were made. Run `cargo xtask drill reveal`.");
                return Ok(());
            };
            // The stopped node and the slow disk of the last fault are repaired here, because the user may have made
            // the clusters healthy without repairing the node or the disk.
            record.slow = None;
            record.write(&file)?;
            Testbed::of(&fleet.sandbox)?.repair().await?;
            fleet.await_healthy().await?;
            let victim = faults::victim(fault, fleet, &mut record.dice()).await?;
            record.begin(fault, victim, Timestamp::now());
            record.write(&file)?;
        }
    }
    let made = complete(fleet, record).await?;
    println!(
        "A fault was injected at {}. Waiting for an alert.",
        shown(made.at)
    );
    let made = await_alert(fleet).await?;
    match &made.alert {
        Some((at, _)) => println!(
            "An alert fired {} s after the fault. To see the active alerts, run `cargo xtask drill alerts`.",
            seconds(made.at, *at)
        ),
        None => println!("The fault was repaired before an alert fired."),
    }
    Ok(())
}

/// Injects the last recorded fault again if its first injection was interrupted. Returns the fault.
async fn complete(fleet: &Fleet, mut record: Record) -> Result<Made> {
    let made = record.made.last_mut().context("no fault was begun")?;
    if !made.complete {
        let slow = faults::make(made.fault, &made.victim, fleet).await?;
        made.complete = true;
        record.slow = slow;
        record.write(&fleet.record())?;
    }
    record.made.pop().context("no fault was begun")
}

/// Waits until an alert has fired, or until `drill check` has found the clusters healthy. Returns the last fault.
async fn await_alert(fleet: &Fleet) -> Result<Made> {
    until("an alert fires", ALERT_TIMEOUT, async || {
        let made = updated_record(fleet).await?.made.pop();
        let made = made.context("the record has no fault")?;
        Ok(if made.alert.is_some() || made.healthy.is_some() {
            Poll::Done(made)
        } else {
            Poll::NotYet("no alert has fired yet".to_owned())
        })
    })
    .await
    .context("the fault was injected: to wait for its alert again, run `cargo xtask drill fault`")
}

/// Reads the recorded faults. If the last fault has no alert yet, asks Prometheus for the first alert after this fault,
/// and records the alert. Prometheus stores the time of the alert, so the time is exact even if no command of the drill
/// ran then.
async fn updated_record(fleet: &Fleet) -> Result<Record> {
    let file = fleet.record();
    let mut record = Record::read(&file)?;
    if let Some(made) = record.made.last_mut()
        && made.complete
        && made.alert.is_none()
        && made.healthy.is_none()
        && let Some(alert) = first_alert(&fleet.prometheus()?, made.at).await?
    {
        made.alert = Some(alert);
        record.write(&file)?;
    }
    Ok(record)
}

/// The time and the name of the first alert that fired after `since`. `None` if no alert has fired.
async fn first_alert(
    prometheus: &Prometheus,
    since: Timestamp,
) -> Result<Option<(Timestamp, String)>> {
    let of = |time: Timestamp| time.as_duration().as_secs_f64();
    let range = (of(since), of(Timestamp::now()));
    let step = ((range.1 - range.0) / MAX_STEPS).ceil().max(1.0);
    let fired = "ALERTS{alertstate=\"firing\"}";
    let mut first: Option<(f64, String)> = None;
    for series in prometheus.query_range(fired, range, step).await? {
        let time = series["values"][0][0].as_f64().context("no time")?;
        if first.as_ref().is_none_or(|(earliest, _)| time < *earliest) {
            first = Some((time, text(&series["metric"]["alertname"]).to_owned()));
        }
    }
    let Some((time, alert)) = first else {
        return Ok(None);
    };
    let time = Timestamp::from_duration(SignedDuration::try_from_secs_f64(time)?)?;
    Ok(Some((time, alert)))
}

/// Prints whether the clusters are healthy after the last fault, without the name of the fault.
async fn check(fleet: &Fleet, wait: bool) -> Result<ExitCode> {
    loop {
        let mut record = updated_record(fleet).await?;
        let problems = fleet.problems().await?;
        // After a fault, the objects may be reported as healthy until the operator notices the fault. Healthy objects
        // therefore count only after the first alert, or after the time limit for this alert.
        let limit = i64::try_from(ALERT_TIMEOUT.as_secs())? / i64::from(record.speedup.max(1));
        let Some(made) = record.made.last_mut() else {
            println!("No fault was made. To make a fault, run `cargo xtask drill fault`.");
            return Ok(ExitCode::SUCCESS);
        };
        let now = Timestamp::now();
        let since = seconds(made.at, made.healthy.unwrap_or(now));
        if !made.complete {
            println!(
                "The last fault is not complete. If `cargo xtask drill fault` was interrupted, run it again."
            );
            return Ok(ExitCode::FAILURE);
        }
        if problems.none() && (made.alert.is_some() || since > limit) {
            println!("The fleet is healthy, {since} s after the fault.");
            made.healthy.get_or_insert(now);
            record.write(&fleet.record())?;
            return Ok(ExitCode::SUCCESS);
        }
        if !wait {
            let (objects, alerts) = (problems.objects, problems.alerts);
            println!(
                "The fleet is not healthy, {since} s after the fault: {objects} objects are not ready, {alerts} alerts \
                 are active."
            );
            return Ok(ExitCode::FAILURE);
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// Prints the firing alerts: first the critical alerts, then all less severe alerts. Each group starts with its oldest
/// alert.
async fn alerts(fleet: &Fleet) -> Result<()> {
    let mut alerts = fleet.prometheus()?.active_alerts().await?;
    alerts.retain(|alert| alert["state"] == "firing");
    if alerts.is_empty() {
        println!("No alert fires.");
    }
    let rank = |alert: &Value| {
        let is_warning = alert["labels"]["severity"] != "critical";
        (is_warning, text(&alert["activeAt"]).to_owned())
    };
    alerts.sort_by_key(rank);
    for alert in &alerts {
        let (labels, annotations) = (&alert["labels"], &alert["annotations"]);
        println!(
            "{} ({}), active since {}\n  {}\n  {}\n  {}\n  {labels}\n",
            text(&labels["alertname"]),
            text(&labels["severity"]),
            text(&alert["activeAt"]),
            text(&annotations["summary"]),
            text(&annotations["description"]),
            text(&annotations["runbook_url"]),
        );
    }
    Ok(())
}

fn reveal(record: &Record) {
    println!("seed {}, speedup {}", record.seed, record.speedup);
    for made in &record.made {
        println!("{made}");
    }
    println!(
        "{} faults were not injected",
        Fault::ALL.len() - record.made.len()
    );
}

async fn stop(fleet: &Fleet) -> Result<()> {
    Testbed::of(&fleet.sandbox)?.repair().await?;
    fleet.delete().await?;
    // The background process, which `start` has spawned, exits when the folder of the drill is deleted.
    let folder = fleet.folder();
    std::fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    println!("The drill is stopped. To stop the testbed too, run `cargo xtask testbed down`.");
    Ok(())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
