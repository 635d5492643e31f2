//! The drill for on-call engineers: makes hidden faults in a fleet of clusters. `cargo xtask drill` runs it on the
//! testbed.

#![allow(clippy::large_futures)] // The set-up of a fleet is one large future.

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
use e2e::{Testbed, step, until};
use jiff::Timestamp;
use serde_json::Value;

use crate::fleet::Fleet;

/// Time limit for the first alert of a fault. Without a speedup, the slowest alert needs an hour.
const ALERT_TIMEOUT: Duration = Duration::from_mins(75);
/// The pause between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Make hidden faults in a fleet of clusters.
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
    /// Create the fleet.
    Start {
        #[arg(long)]
        seed: Option<u64>,
        #[arg(long)]
        speedup: u32,
    },
    /// Run Prometheus until the drill stops.
    Serve,
    /// Make the next fault.
    Fault,
    /// Report whether the fleet is healthy.
    Check {
        #[arg(long)]
        wait: bool,
    },
    /// Print the alerts.
    Alerts,
    /// Print the faults that were made.
    Reveal,
    /// Delete the fleet.
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
    let file = fleet.record();
    let mut record = Record::read(&file)?;
    if record
        .made
        .last()
        .is_some_and(|made| made.healthy.is_none())
    {
        bail!("the last fault is not repaired yet: repair it, then run `cargo xtask drill check`");
    }
    let Some(fault) = record.next() else {
        println!("All faults were made. Run `cargo xtask drill reveal`.");
        return Ok(());
    };
    // The user may have repaired the last fault without starting its node again, so the testbed is repaired too.
    record.slow = None;
    record.write(&file)?;
    Testbed::of(&fleet.sandbox)?.repair().await?;
    fleet.await_healthy().await?;

    let at = Timestamp::now();
    let effect = faults::make(fault, fleet, &mut record.dice()).await?;
    record.slow = effect.slow;
    record.made.push(Made {
        fault,
        victim: effect.victim,
        at,
        alert: None,
        healthy: None,
    });
    record.write(&file)?;
    println!("A fault was made at {}. Waiting for an alert.", shown(at));
    let alert = await_alert(fleet).await?;
    let now = Timestamp::now();
    if let Some(made) = record.made.last_mut() {
        made.alert = Some((now, alert));
    }
    record.write(&file)?;
    println!(
        "An alert fires {} s after the fault. To see the alert, run `cargo xtask drill alerts`.",
        seconds(at, now)
    );
    Ok(())
}

/// Waits until an alert fires. Returns the name of the alert.
async fn await_alert(fleet: &Fleet) -> Result<String> {
    let prometheus = fleet.prometheus()?;
    until("an alert fires", ALERT_TIMEOUT, async || {
        let alerts = prometheus.active_alerts().await?;
        let mut firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        Ok(match firing.next() {
            Some(alert) => Poll::Done(text(&alert["labels"]["alertname"]).to_owned()),
            None => Poll::NotYet(format!("{} pending alerts", alerts.len())),
        })
    })
    .await
}

/// Reports whether the fleet is healthy after the last fault. The output does not name the fault.
async fn check(fleet: &Fleet, wait: bool) -> Result<ExitCode> {
    let file = fleet.record();
    loop {
        let mut record = Record::read(&file)?;
        let problems = fleet.problems().await?;
        let Some(made) = record.made.last_mut() else {
            println!("No fault was made. To make a fault, run `cargo xtask drill fault`.");
            return Ok(ExitCode::SUCCESS);
        };
        let now = Timestamp::now();
        let since = seconds(made.at, made.healthy.unwrap_or(now));
        // Before the first alert, the objects can still look healthy.
        if problems.none() && made.alert.is_some() {
            println!("The fleet is healthy, {since} s after the fault.");
            made.healthy.get_or_insert(now);
            record.write(&file)?;
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

/// Prints the firing alerts like a pager: the critical alerts first, then by age.
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
    println!("{} faults are left", Fault::ALL.len() - record.made.len());
}

async fn stop(fleet: &Fleet) -> Result<()> {
    Testbed::of(&fleet.sandbox)?.repair().await?;
    fleet.delete("--wait=false").await?;
    // Without its files, the background process ends.
    let folder = fleet.folder();
    std::fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    println!("The drill is stopped. To stop the testbed too, run `cargo xtask testbed down`.");
    Ok(())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
