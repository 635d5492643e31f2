//! `cargo xtask fuzz` runs the tests with damaged input for some minutes. Each round uses the next seed.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use crate::packages::{Purpose, ensure_packages};
use crate::{checkout, image, progress, suite};

/// The options of `cargo xtask fuzz`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Fuzz {
    /// Minutes in which new rounds start. The last round is completed
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// The seed of the first round, to repeat a failed round [default: a random seed]
    #[arg(long)]
    seed: Option<u64>,
    /// Number of cases of each test in a round
    #[arg(long, default_value_t = 5_000)]
    cases: u32,
}

/// Runs `cargo xtask fuzz`.
pub(crate) fn fuzz(options: &Fuzz) -> Result<ExitCode> {
    ensure_packages(&[Purpose::Build])?;
    let clock = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let mut seed = options.seed.unwrap_or(clock.as_secs() % 1_000_000);
    if !run(&["--no-run"], seed, options.cases)? {
        bail!("the tests with damaged input do not compile");
    }
    let end = Instant::now() + Duration::from_secs(options.minutes.saturating_mul(60));
    loop {
        let cases = options.cases;
        progress::say(&format!("seed {seed}: {cases} cases of each test"));
        if !run(&["--no-fail-fast"], seed, cases)? {
            progress::say(&failure(seed, cases));
            return Ok(ExitCode::FAILURE);
        }
        if Instant::now() >= end {
            return Ok(ExitCode::SUCCESS);
        }
        seed = seed.wrapping_add(1);
    }
}

/// Runs `cargo test` with the arguments `more` for all test programs `damaged_input`. Returns true if it succeeded.
fn run(more: &[&str], seed: u64, cases: u32) -> Result<bool> {
    let status = Command::new(image::cargo())
        .arg("test")
        .args(suite::WORKSPACE)
        .args(image::FAIL_POINTS)
        .args(["--test", "damaged_input"])
        .args(more)
        .env("PROPTEST_CASES", cases.to_string())
        .env("PROPTEST_RNG_SEED", seed.to_string())
        .current_dir(checkout::root())
        .status()
        .context("cannot start cargo")?;
    Ok(status.success())
}

fn failure(seed: u64, cases: u32) -> String {
    format!(
        "seed {seed} failed. The failed test printed its smallest input. To repeat: cargo xtask fuzz --minutes 0 --seed \
         {seed} --cases {cases}"
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        fuzz: Fuzz,
    }

    #[test]
    fn failed_fuzz_round_prints_command_that_repeats_it() {
        let text = failure(4_711, 100);
        let (_, command) = text.split_once("cargo xtask ").unwrap();
        let parsed = Arguments::try_parse_from(command.split(' ')).unwrap().fuzz;
        assert_eq!(
            (parsed.minutes, parsed.seed, parsed.cases),
            (0, Some(4_711), 100)
        );
    }
}
