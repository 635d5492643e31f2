//! The command `test`: compiles, runs unit tests and end-to-end tests in stages, and prints a report. With `--lint`, it
//! checks the formatting first.

mod jobs;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::jobs::{ALONE, PREVIOUS, e2e_job, is_in, unit_job, why_omitted};
use crate::drive::{Prepared, Where, begin_cluster, end_cluster, finish};
use crate::image::Compiler;
use crate::libtest::{self, Outcome};
use crate::origin::Origin;
use crate::packages::{Purpose, ensure_packages};
use crate::pool::{self, Job};
use crate::previous::Commit;
use crate::report::Report;
use crate::times::Times;
use crate::{checkout, image, preflight, previous, programs, progress, shell, testbed};

/// Modules with end-to-end tests that take more than 150 s. These tests start first if no durations are recorded.
const LONG: [&str; 12] = [
    "object_repair",
    "backup_pvc",
    "tls_generated",
    "tls_switch",
    "tls_static",
    "restore_failures",
    "restore_sources",
    "tls_backup_restore",
    "nospace",
    "scale_edges",
    "upgrade",
    "restore_interrupted",
];
/// The environment variable with the path of a lock file. The end-to-end tests of one run use this file to install the
/// CRDs only once. `cargo xtask test` empties the file before the end-to-end tests.
const RUN_LOCK: &str = "E2E_RUN_LOCK";

const FORMATTING: &str = "formatting";
const COMPILE: &str = "compiling";
const UNITS: &str = "unit tests";
const EARLIER: &str = "compiling the earlier commit";
const TESTBED: &str = "testbed up, and the image";
const IMAGE: &str = "image into the testbed";
const E2E: &str = "end-to-end tests";
const BREAKING: &str = "end-to-end tests that break nodes";
const DOWN: &str = "testbed down";

/// Selects all crates except `xtask`, which is compiled separately. `xtask` needs other features of large dependencies
/// than the other crates, and a single call of cargo would compile these dependencies twice.
pub(crate) const WORKSPACE: &[&str] = &["--workspace", "--exclude", "xtask"];
const XTASK: &[&str] = &["-p", "xtask"];
/// The feature that compiles the end-to-end tests. A plain `cargo test` does not set it, because these tests need a
/// cluster.
const E2E_TESTS: &[&str] = &["--features", "e2e/tests"];
/// The name that [`unit_job`] gives to the program of the end-to-end tests.
const E2E_PROGRAM: &str = "e2e/e2e";

/// The tests to run.
#[derive(Debug, Clone, clap::Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each field is a flag of `cargo xtask test`"
)]
pub(crate) struct Tests {
    #[command(flatten)]
    place: Where,
    /// Check the formatting first, and lint during compilation. Warnings are errors.
    #[arg(long)]
    lint: bool,
    /// Run only the unit tests.
    #[arg(long, conflicts_with = "e2e")]
    unit: bool,
    /// Run only the end-to-end tests.
    #[arg(long)]
    e2e: bool,
    /// Also run the end-to-end tests that the default run omits (see docs/contributing/testing.md).
    #[arg(long, conflicts_with = "unit")]
    full: bool,
    /// Also test the upgrade of the operators from the release of COMMIT to this checkout, and the rollback. Compiles
    /// the operators of COMMIT.
    #[arg(long, value_name = "COMMIT", conflicts_with_all = ["unit", "context"])]
    previous: Option<String>,
    /// Number of concurrent end-to-end tests. Tests that break nodes run one by one.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,
    /// Run only tests whose names contain this text.
    filter: Option<String>,
}

impl Tests {
    fn stages(&self) -> Vec<&'static str> {
        let groups: [(bool, &[&'static str]); 5] = [
            (self.lint, &[FORMATTING]),
            (true, &[COMPILE]),
            (!self.e2e, &[UNITS]),
            (self.previous.is_some(), &[EARLIER]),
            (!self.unit, &[TESTBED, IMAGE, E2E, BREAKING, DOWN]),
        ];
        let chosen = groups.into_iter().filter(|(wanted, _)| *wanted);
        chosen.flat_map(|(_, stages)| stages).copied().collect()
    }

    fn is_chosen(&self, name: &str) -> bool {
        self.filter
            .as_ref()
            .is_none_or(|filter| name.contains(filter))
    }
}

/// Runs `cargo xtask test`.
pub(crate) fn test(options: &Tests) -> Result<ExitCode> {
    let begun = Instant::now();
    ensure_packages(&[Purpose::Build])?;
    let mut run = Run {
        stages: options.stages(),
        forecasts: BTreeMap::new(),
        times: Times::read()?,
        report: Report::default(),
        jobs: Vec::new(),
        filtered: options.filter.is_some(),
    };
    if let Err(error) = run.all(options) {
        run.report.fail(&error);
    } else if !run.filtered && !options.unit && !options.e2e {
        let jobs = std::mem::take(&mut run.jobs);
        run.times
            .retain_jobs(|name| jobs.iter().any(|job| job == name));
    }
    run.times.write();
    print!("{}", run.report.text(begun.elapsed()));
    let failed = run.report.count(Outcome::Failed);
    Ok(if failed == 0 && run.report.count(Outcome::Passed) > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// One `cargo xtask test`, with its results so far.
struct Run {
    stages: Vec<&'static str>,
    /// The expected duration of each stage that runs tests. It is known as soon as the tests are listed.
    forecasts: BTreeMap<&'static str, Option<Duration>>,
    times: Times,
    report: Report,
    /// The names of the jobs of all stages so far.
    jobs: Vec<String>,
    /// True if the options contain a filter.
    filtered: bool,
}

/// The stages that run tests. Their duration depends on the filter.
const OF_TESTS: &[&str] = &[UNITS, E2E, BREAKING];

/// The compiled programs and the selected tests.
#[derive(Default)]
struct Compiled {
    units: Vec<Job>,
    operators: Vec<PathBuf>,
    concurrent: Vec<Job>,
    alone: Vec<Job>,
    /// The selected tests that do not run, each with the reason.
    omitted: Vec<(String, String)>,
}

impl Compiled {
    /// Fails if the filter selects no test of the selected stages.
    fn ensure_tests(&self, filter: &str) -> Result<()> {
        if [&self.units, &self.concurrent, &self.alone]
            .iter()
            .any(|jobs| !jobs.is_empty())
        {
            return Ok(());
        }
        match self.omitted.as_slice() {
            [] => bail!("no test of this run has {filter:?} in its name: correct the filter"),
            omitted => {
                let lines = omitted.iter().map(|(name, why)| format!("{name}: {why}"));
                bail!(
                    "the selected tests do not run: {}",
                    lines.collect::<Vec<_>>().join(", ")
                )
            }
        }
    }

    /// True if a selected test needs the release of an earlier commit.
    fn needs_previous(&self) -> bool {
        self.alone.iter().any(|job| is_in(PREVIOUS, &job.name))
    }
}

impl Run {
    fn all(&mut self, options: &Tests) -> Result<()> {
        if options.lint {
            self.stage(FORMATTING, |_| check_formatting())?;
        }
        let no_testbed = options.unit || options.place.context.is_some();
        if !no_testbed {
            // `preflight::check` runs before the compilation, so that a missing requirement is reported within
            // seconds.
            preflight::check(&checkout::run_folder(), options.place.platform.ip_family())?;
        }
        let kubernetes = options.place.platform.kubernetes()?;
        let commit = options
            .previous
            .as_deref()
            .map(previous::find)
            .transpose()?;
        thread::scope(|scope| {
            // The programs of the testbed are built while cargo compiles the tests, because on a new machine both
            // builds take minutes.
            let programs = (!no_testbed).then(|| scope.spawn(|| programs::ensure(&kubernetes)));
            let compiled = self.stage(COMPILE, |_| compile(options, commit.as_ref()))?;
            let is_needed = compiled.needs_previous();
            for (name, why) in compiled.omitted {
                self.report.skip(vec![name], &why);
            }
            self.forecast(UNITS, &compiled.units, processors());
            self.forecast(E2E, &compiled.concurrent, usize::from(options.jobs));
            self.forecast(BREAKING, &compiled.alone, 1);
            if let Some(programs) = programs {
                joined(programs)?;
            }
            if !options.e2e {
                if no_testbed {
                    // Even without a testbed, unit tests need the programs of the testbed, because many unit tests
                    // start real servers.
                    programs::ensure(&kubernetes)?;
                }
                self.run_jobs(UNITS, compiled.units, processors())?;
            }
            if options.unit {
                return Ok(());
            }
            let earlier = match &commit {
                // The previous commit is built after the unit tests, because this build overwrites the program of the
                // operators, which unit tests use.
                Some(Commit::Found(commit)) if is_needed => {
                    Some(self.stage(EARLIER, |_| previous::build(commit))?)
                }
                _ => None,
            };
            let early = self.stage(TESTBED, |_| {
                let early = scope.spawn(|| begin_cluster(&options.place, None));
                // The image is built while the testbed starts. The next stage loads the image into the nodes.
                let image = image::build(&compiled.operators, &Origin::unreleased());
                joined(early).and_then(|early| image.map(|_| early))
            })?;
            let outcome = self.stage(IMAGE, |_| {
                let origin = Origin::unreleased();
                let operators = &compiled.operators;
                let mut prepared = finish(early.clone(), &options.place, operators, &origin)?;
                if let Some(earlier) = &earlier {
                    image::load(&earlier.image)?;
                    prepared.vars.extend(earlier.vars());
                }
                Ok(prepared)
            });
            let outcome = outcome.and_then(|prepared| {
                self.e2e_tests(options, prepared, compiled.concurrent, compiled.alone)
            });
            let ended = self.stage(DOWN, |_| {
                end_cluster(&early, &options.place);
                Ok(())
            });
            outcome.and(ended)
        })
    }

    /// Runs a stage: prints its name, calls `work`, and records the duration.
    fn stage<T>(
        &mut self,
        name: &'static str,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let number = self
            .stages
            .iter()
            .position(|stage| *stage == name)
            .map_or(0, |at| at + 1);
        let expected = match (self.expected(name), self.later(name)) {
            (Some(stage), Some(later)) => format!(
                ": about {}, in total about {}",
                progress::rough(stage),
                progress::rough(stage + later)
            ),
            (Some(stage), None) => format!(": about {}", progress::rough(stage)),
            (None, _) => String::new(),
        };
        progress::say(&format!(
            "stage {number} of {}: {name}{expected}",
            self.stages.len()
        ));
        let (result, took) = if OF_TESTS.contains(&name) {
            let begun = Instant::now();
            (work(self)?, begun.elapsed())
        } else {
            progress::stage(name, || work(self))?
        };
        self.report.stages.push((name.to_owned(), took));
        if !(self.filtered && OF_TESTS.contains(&name)) {
            self.times.note_stage(name, took);
        }
        Ok(result)
    }

    fn expected(&self, stage: &str) -> Option<Duration> {
        match self.forecasts.get(stage) {
            Some(forecast) => *forecast,
            None if self.filtered && OF_TESTS.contains(&stage) => None,
            None => self.times.stage(stage),
        }
    }

    /// The expected duration of all stages after `stage`.
    fn later(&self, stage: &str) -> Option<Duration> {
        let after = self.stages.iter().skip_while(|one| **one != stage).skip(1);
        after.map(|one| self.expected(one)).sum()
    }

    fn forecast(&mut self, stage: &'static str, jobs: &[Job], slots: usize) {
        let forecast = pool::forecast(jobs, slots, &self.times);
        self.forecasts.insert(stage, forecast);
    }

    fn e2e_tests(
        &mut self,
        options: &Tests,
        prepared: Prepared,
        mut concurrent: Vec<Job>,
        mut alone: Vec<Job>,
    ) -> Result<()> {
        let vars = e2e_vars(prepared)?;
        for job in concurrent.iter_mut().chain(&mut alone) {
            job.vars.extend(vars.iter().cloned());
        }
        self.run_jobs(E2E, concurrent, usize::from(options.jobs))?;
        if options.place.context.is_some() {
            let names = alone.into_iter().map(|job| job.name).collect();
            self.report.skip(
                names,
                "the test needs the testbed and does not run on another cluster",
            );
        } else {
            self.run_jobs(BREAKING, alone, 1)?;
        }
        if self.report.count(Outcome::Failed) > 0 {
            progress::say(
                "logs of the testbed daemons: target/testbed-logs, or the run folder while the testbed is up",
            );
        }
        Ok(())
    }

    fn run_jobs(&mut self, stage: &'static str, jobs: Vec<Job>, slots: usize) -> Result<()> {
        self.forecast(stage, &jobs, slots);
        self.stage(stage, |run| {
            run.jobs.extend(jobs.iter().map(|job| job.name.clone()));
            let done = pool::run(jobs, slots, &run.times, run.later(stage));
            for (name, took) in &done.jobs {
                run.times.note_job(name, *took);
            }
            run.report.tests.extend(done.tests);
            Ok(())
        })
    }
}

fn processors() -> usize {
    thread::available_parallelism().map_or(2, usize::from)
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread
        .join()
        .map_err(|_| anyhow::anyhow!("a thread panicked"))?
}

fn check_formatting() -> Result<()> {
    let args = ["fmt", "--all", "--check"];
    progress::say(&format!("cargo {}", args.join(" ")));
    shell::inherit(
        Command::new(image::cargo())
            .args(args)
            .current_dir(checkout::root()),
    )
}

/// Compiles the tests and the operators. All builds have failpoints, and the lints run during the compilation, so that
/// each crate is compiled only once.
fn compile(options: &Tests, commit: Option<&Commit>) -> Result<Compiled> {
    let with = if options.lint {
        Compiler::Clippy
    } else {
        Compiler::Rustc
    };
    let mut compiled = Compiled::default();
    let begin: &[&str] = &["test", "--no-run"];
    let messages = if options.e2e {
        compiled.operators = image::compile_with_fail_points(with)?;
        let test: &[&str] = &["--test", "e2e"];
        image::cargo_messages(
            &[begin, test, image::SELECTION, image::FAIL_POINTS, E2E_TESTS].concat(),
            with,
        )?
    } else if options.unit {
        image::cargo_messages(&[begin, WORKSPACE, image::FAIL_POINTS].concat(), with)?
    } else {
        let all = [begin, WORKSPACE, image::FAIL_POINTS, E2E_TESTS].concat();
        let messages = image::cargo_messages(&all, with)?;
        compiled.operators = image::operators_with_fail_points(&messages)?;
        messages
    };
    let xtask = if options.e2e {
        String::new()
    } else {
        image::cargo_messages(&[begin, XTASK].concat(), with)?
    };
    for message in messages.lines().chain(xtask.lines()) {
        let Some(mut job) = unit_job(message) else {
            continue;
        };
        let list = ["--list", "--format", "terse"];
        let mut list_tests = Command::new(&job.program);
        let names = shell::output(list_tests.args(list).current_dir(&job.folder))?;
        let mut names = libtest::listed(&names);
        names.retain(|name| options.is_chosen(name));
        if job.name == E2E_PROGRAM {
            names.retain(|name| {
                let why = why_omitted(name, options.full, commit);
                compiled
                    .omitted
                    .extend(why.iter().map(|why| (name.clone(), why.clone())));
                why.is_none()
            });
            let jobs = names.into_iter().map(|name| e2e_job(&job.program, name));
            let is_alone = |job: &Job| [ALONE, PREVIOUS].iter().any(|one| is_in(one, &job.name));
            (compiled.alone, compiled.concurrent) = jobs.partition(is_alone);
            let is_long = |job: &Job| LONG.iter().any(|module| is_in(module, &job.name));
            compiled.concurrent.sort_by_key(|job| !is_long(job));
        } else if !options.e2e && !names.is_empty() {
            job.args.extend(options.filter.clone());
            job.tests = names.len();
            compiled.units.push(job);
        }
    }
    if let Some(filter) = &options.filter {
        compiled.ensure_tests(filter)?;
    }
    Ok(compiled)
}

fn e2e_vars(prepared: Prepared) -> Result<Vec<(String, String)>> {
    let lock = checkout::target()?.join("e2e-run.lock");
    File::create(&lock).with_context(|| lock.display().to_string())?;
    let mut vars = prepared.vars;
    vars.extend([
        (RUN_LOCK.to_owned(), lock.display().to_string()),
        // GOGC makes kubectl and helm collect garbage less often, which saves CPU time. The daemons of the testbed
        // use the same value.
        ("GOGC".to_owned(), testbed::GOGC.to_owned()),
    ]);
    Ok(vars)
}

#[cfg(test)]
mod tests;
