//! `cargo xtask drill` runs the program `drill` of the crate `e2e`, which injects the faults. `start` stores the
//! environment of the program, so that the other commands need no build.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::drive::{self, Where};
use crate::origin::Origin;
use crate::packages::{Purpose, ensure_packages};
use crate::{checkout, image, progress, testbed};

#[derive(Debug, Clone, clap::Subcommand)]
pub(crate) enum Drill {
    /// Create the operators, three clusters, a scheduled backup, and Prometheus with the chart's alerts on the
    /// testbed. Starts the testbed if necessary, and deletes an earlier drill.
    Start {
        /// Seed of the order of the faults, to repeat a drill [default: a random seed]
        #[arg(long)]
        seed: Option<u64>,
        /// Factor by which alerts fire faster than in production. 1 keeps the times of the chart
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=60))]
        speedup: u32,
    },
    /// Inject the next fault without naming it, and wait until an alert fires. If this command was interrupted before,
    /// it completes the last fault and injects no other fault.
    Fault,
    /// Report whether the clusters are healthy, and the time since the fault. The exit code is 0 if they are healthy.
    Check {
        /// Wait until the clusters are healthy.
        #[arg(long)]
        wait: bool,
    },
    /// Print the firing alerts with their runbooks.
    Alerts,
    /// Print the injected faults, with the times of their alerts and repairs.
    Reveal,
    /// Start stopped nodes, and delete the clusters. The testbed stays up.
    Stop,
}

impl Drill {
    /// The arguments of the program `drill`.
    fn arguments(&self) -> Vec<String> {
        let words: Vec<&str> = match self {
            Self::Start { seed, speedup } => {
                let mut words = vec!["start".to_owned(), format!("--speedup={speedup}")];
                words.extend(seed.map(|seed| format!("--seed={seed}")));
                return words;
            }
            Self::Fault => vec!["fault"],
            Self::Check { wait: false } => vec!["check"],
            Self::Check { wait: true } => vec!["check", "--wait"],
            Self::Alerts => vec!["alerts"],
            Self::Reveal => vec!["reveal"],
            Self::Stop => vec!["stop"],
        };
        words.into_iter().map(str::to_owned).collect()
    }
}

/// Runs `cargo xtask drill`.
pub(crate) fn run(drill: &Drill) -> Result<ExitCode> {
    let program = if matches!(drill, Drill::Start { .. }) {
        Program::prepare()?
    } else {
        Program::read()?
    };
    program.run(&drill.arguments())
}

/// The path and the environment of the program `drill`.
#[derive(Debug, Serialize, Deserialize)]
struct Program {
    path: PathBuf,
    vars: Vec<(String, String)>,
}

impl Program {
    /// The folder with the files of the drill, which `testbed down` deletes.
    fn folder() -> PathBuf {
        checkout::run_folder().join("drill")
    }

    fn file() -> PathBuf {
        Self::folder().join("program.json")
    }

    /// Starts the testbed, builds the operators and the program, and replaces the folder of an earlier drill.
    fn prepare() -> Result<Self> {
        ensure_packages(&[Purpose::Build])?;
        // An earlier drill may have stopped nodes of the testbed. `mend_if_up` starts these nodes, because
        // `begin_cluster` rejects a testbed with stopped nodes.
        testbed::commands::mend_if_up()?;
        let place = Where::default();
        let (early, _) = progress::timed("testbed", || drive::begin_cluster(&place, None))?;
        let (built, _) = progress::timed("compiling", image::compile)?;
        let prepared = drive::finish(early, &place, &built, &Origin::unreleased())?;
        let program = Self {
            path: drive::program_among(&built, "drill")?.clone(),
            vars: prepared.vars,
        };
        let folder = Self::folder();
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
        }
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        fs::write(Self::file(), serde_json::to_vec(&program)?).context("program.json")?;
        Ok(program)
    }

    fn read() -> Result<Self> {
        let text = fs::read(Self::file());
        let text = text.context("no drill is in progress: run `cargo xtask drill start`")?;
        serde_json::from_slice(&text).context("program.json")
    }

    fn run(&self, arguments: &[String]) -> Result<ExitCode> {
        let mut command = Command::new(&self.path);
        command.arg("--folder").arg(Self::folder()).args(arguments);
        let status = command.envs(self.vars.iter().cloned()).status();
        let status = status.with_context(|| format!("cannot start {}", self.path.display()))?;
        Ok(if status.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drill_passes_its_options_to_program() {
        let start = Drill::Start {
            seed: Some(7),
            speedup: 20,
        };
        assert_eq!(start.arguments(), ["start", "--speedup=20", "--seed=7"]);
        assert_eq!(Drill::Check { wait: true }.arguments(), ["check", "--wait"]);
        assert_eq!(Drill::Fault.arguments(), ["fault"]);
    }
}
