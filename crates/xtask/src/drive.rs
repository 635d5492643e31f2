//! The commands `test`, `demo` and `bench`: they prepare a cluster and the
//! image, hand both to the programs of the e2e crate through the environment,
//! and tell what came out.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::libtest::{self, Summary};
use crate::packages::{Purpose, ensure_packages};
use crate::testbed::{Dns, Options};
use crate::{checkout, image, programs, progress, shell, testbed, times};

/// The module name of e2e tests that break nodes.
const ALONE: &str = "alone::";
const BREAKING: &str = "end-to-end tests that break nodes";

/// Where to run.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Where {
    /// Use a cluster you have: a context of your kubeconfig, or `current`. No testbed is brought up, only the image is
    /// built; kubectl and helm have to be on the PATH. Name an image the cluster can pull in E2E_IMAGE, and an S3
    /// server in E2E_S3_ENDPOINT, E2E_S3_ACCESS_KEY, E2E_S3_SECRET_KEY.
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Leave the testbed up at the end.
    #[arg(long)]
    keep: bool,
}

/// Which tests to run.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Tests {
    #[command(flatten)]
    place: Where,
    /// Only the unit tests.
    #[arg(long, conflicts_with = "e2e")]
    unit: bool,
    /// Only the end-to-end tests.
    #[arg(long)]
    e2e: bool,
    /// How many end-to-end tests run at a time; those that break nodes run alone.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,
    /// Only tests with this in their name.
    filter: Option<String>,
}

/// A program of the e2e crate and what it is given.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Program {
    #[command(flatten)]
    place: Where,
    /// How the testbed's DNS caches meanwhile [default: nocache on a new testbed, as it is on a running one]
    #[arg(long, value_enum)]
    dns: Option<Dns>,
    /// Given to the program as they are; `-- --help` shows what it knows.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// A cluster with the image in it.
struct Prepared {
    vars: Vec<(String, String)>,
    steps: Vec<(&'static str, Duration)>,
}

/// What the end-to-end tests run with.
struct Compiled {
    /// The operators and the programs of the e2e crate.
    built: Vec<PathBuf>,
    /// The program of the tests.
    executable: PathBuf,
    /// The tests that were asked for.
    names: Vec<String>,
}

/// `cargo xtask test`.
pub(crate) fn test(options: &Tests) -> Result<ExitCode> {
    let begun = Instant::now();
    ensure_packages(&[Purpose::Build])?;
    let mut summary = Summary::default();
    if options.unit {
        compile_unit_tests()?;
        summary += run_unit_tests(options.filter.as_deref())?;
    } else {
        // The testbed comes up while cargo compiles.
        let (early, units, compiled) = thread::scope(|scope| {
            let early = scope.spawn(|| begin_cluster(&options.place, None));
            let units = if options.e2e {
                Ok(Summary::default())
            } else {
                compile_unit_tests().and_then(|()| run_unit_tests(options.filter.as_deref()))
            };
            (early.join(), units, compile(options))
        });
        let early = early.map_err(|_| anyhow::anyhow!("the testbed's thread panicked"))??;
        let result = units.and_then(|units| {
            summary += units;
            let compiled = compiled?;
            let prepared = finish(early.clone(), &options.place, &compiled.built)?;
            e2e_tests(options, &prepared, &compiled)
        });
        end_cluster(&early, &options.place);
        summary += result?;
    }
    Ok(report(&summary, begun.elapsed()))
}

fn report(summary: &Summary, took: Duration) -> ExitCode {
    for name in &summary.ignored {
        println!("skipped: {name}");
    }
    for name in &summary.failures {
        println!("failed: {name}");
        for line in summary.reasons.get(name).into_iter().flatten() {
            println!("    {line}");
        }
    }
    progress::say(&format!("all tests took {}", progress::seconds(took)));
    println!("{}", summary.line());
    if summary.failed == 0 && summary.passed > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// What cargo is told of the unit tests. xtask by itself: together, its dependencies' features would have the large ones
/// compiled a second time.
const UNITS: [&[&str]; 2] = [&["--workspace", "--exclude", "xtask"], &["-p", "xtask"]];

fn compile_unit_tests() -> Result<()> {
    progress::say("cargo test --no-run");
    let compiled = Command::new(cargo())
        .args(["test", "--no-run"])
        .args(UNITS[0])
        .current_dir(checkout::root())
        .status()
        .context("cargo")?;
    if !compiled.success() {
        bail!("the unit tests do not compile");
    }
    Ok(())
}

fn run_unit_tests(filter: Option<&str>) -> Result<Summary> {
    // Many of them start real servers. On a fresh machine those are built meanwhile, and have to be there first.
    programs::ensure()?;
    let mut summary = Summary::default();
    for selection in UNITS {
        progress::say(&format!("cargo test {}", selection.join(" ")));
        let mut command = Command::new(cargo());
        command
            .args(["test", "--no-fail-fast"])
            .args(selection)
            .args(filter)
            .current_dir(checkout::root());
        summary += run_tests("unit tests", &mut command)?;
    }
    Ok(summary)
}

/// Builds the end-to-end tests; returns their program.
fn test_program() -> Result<PathBuf> {
    let built = image::cargo_executables(
        &[&["test", "--test", "e2e", "--no-run"], image::SELECTION].concat(),
    )?;
    // Beside the tests, cargo names the crate's programs.
    built
        .into_iter()
        .find(|file| file.parent().is_some_and(|folder| folder.ends_with("deps")))
        .context("cargo built no end-to-end tests")
}

/// Compiles all that the end-to-end tests need.
fn compile(options: &Tests) -> Result<Compiled> {
    let built = image::compile_with_fail_points()?;
    let executable = test_program()?;
    let list = shell::output(Command::new(&executable).args(["--list", "--format", "terse"]))?;
    let names = chosen(libtest::listed(&list), options.filter.as_deref());
    Ok(Compiled {
        built,
        executable,
        names,
    })
}

fn e2e_tests(options: &Tests, prepared: &Prepared, compiled: &Compiled) -> Result<Summary> {
    let mut summary = Summary::default();
    let (together, alone) = divide(compiled.names.clone());
    let times = times::begin()?;
    for (what, names, jobs) in [
        ("end-to-end tests", together, options.jobs),
        (BREAKING, alone, 1),
    ] {
        if names.is_empty() {
            continue;
        }
        if options.place.context.is_some() && what == BREAKING {
            summary.skip(&names, "a cluster of the user's own is not broken");
            continue;
        }
        progress::say(&format!("{}: {what}, {jobs} at a time", names.len()));
        let mut command = Command::new(&compiled.executable);
        command
            .arg("--exact")
            .arg(format!("--test-threads={jobs}"))
            .args(&names);
        command
            .current_dir(checkout::root().join("e2e"))
            .env(times::FILE, &times)
            // As in the testbed's daemons: less collecting of garbage by kubectl and helm.
            .env("GOGC", testbed::GOGC)
            .envs(prepared.vars.iter().cloned());
        summary += run_tests(what, &mut command)?;
    }
    if let Some(told) = fs::read_to_string(&times)
        .ok()
        .and_then(|lines| times::longest(&lines))
    {
        progress::say(&told);
    }
    if summary.failed > 0 {
        progress::say(
            "logs of the testbed's daemons: target/testbed-logs, or its run folder while it is up",
        );
    }
    Ok(summary)
}

fn chosen(names: Vec<String>, filter: Option<&str>) -> Vec<String> {
    let is_wanted = |name: &String| filter.is_none_or(|filter| name.contains(filter));
    names.into_iter().filter(is_wanted).collect()
}

/// The tests that run together, and those that need the cluster for themselves.
fn divide(names: Vec<String>) -> (Vec<String>, Vec<String>) {
    names.into_iter().partition(|name| !name.contains(ALONE))
}

/// Runs a test program, showing and reading what it says.
fn run_tests(what: &str, command: &mut Command) -> Result<Summary> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start the {what}"))?;
    let output = child.stdout.take().context("output")?;
    let mut summary = Summary::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = line.with_context(|| format!("output of the {what}"))?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        summary.read(&line);
    }
    let status = child.wait().with_context(|| what.to_owned())?;
    if !status.success() && summary.failed == 0 {
        summary.broke(what);
    }
    Ok(summary)
}

/// One backup of a large database beside doing it by hand: etcd and an S3 server as processes, no Kubernetes
#[derive(Debug, clap::Parser)]
#[command(name = "bench backup", bin_name = "cargo xtask bench backup")]
struct BackupBench {
    /// Sizes of the databases, in MiB; four times the largest has to be free on the disk
    #[arg(long, value_name = "MIB,...", default_value = "100,1024")]
    sizes: String,
    /// Rounds of each size; the median is reported
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn bench_backup(args: &[String]) -> Result<ExitCode> {
    let name = "bench backup".to_owned();
    let options =
        match <BackupBench as clap::Parser>::try_parse_from(std::iter::once(&name).chain(args)) {
            Ok(options) => options,
            // The help, or what is wrong with the options.
            Err(said) => {
                said.print().context("cannot write")?;
                return Ok(if said.use_stderr() {
                    ExitCode::FAILURE
                } else {
                    ExitCode::SUCCESS
                });
            }
        };
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
    command.arg("test").args(image::SELECTION);
    command.args(["--test", "bench", "--", "--ignored", "--nocapture"]);
    command
        .env("BENCH_MIB", options.sizes)
        .env("BENCH_ROUNDS", options.rounds.to_string());
    if let Some(file) = options.json {
        command.env("BENCH_JSON", std::path::absolute(file)?);
    }
    let status = command
        .current_dir(checkout::root())
        .status()
        .context("cannot start cargo")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// `cargo xtask demo` and `cargo xtask bench`: runs a program of the e2e crate on a prepared cluster.
pub(crate) fn program(name: &str, options: &Program) -> Result<ExitCode> {
    if let ("bench", Some((first, rest))) = (name, options.args.split_first())
        && first == "backup"
    {
        return bench_backup(rest);
    }
    ensure_packages(&[Purpose::Build])?;
    // What the program knows needs no cluster.
    if options
        .args
        .iter()
        .any(|arg| arg == "--help" || arg == "-h")
    {
        let (built, _) = progress::timed("compiling", image::compile)?;
        let status = Command::new(program_among(&built, name)?)
            .arg("--help")
            .status()?;
        return Ok(if status.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    let (early, built) = thread::scope(|scope| {
        let early = scope.spawn(|| begin_cluster(&options.place, options.dns));
        let built = progress::timed("compiling", image::compile);
        (early.join(), built)
    });
    let mut early = early.map_err(|_| anyhow::anyhow!("the testbed's thread panicked"))??;
    let result = built.and_then(|(built, took)| {
        early.steps.push(("compiling", took));
        let prepared = finish(early.clone(), &options.place, &built)?;
        for (step, took) in &prepared.steps {
            eprintln!("    set-up: {step:24}{:>10}", progress::seconds(*took));
        }
        let mut command = Command::new(program_among(&built, name)?);
        command.args(&options.args).envs(prepared.vars);
        if options.place.keep && name == "demo" {
            command.arg("--keep");
        }
        command
            .status()
            .with_context(|| format!("cannot start {name}"))
    });
    end_cluster(&early, &options.place);
    Ok(if result?.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn program_among<'a>(built: &'a [PathBuf], name: &str) -> Result<&'a PathBuf> {
    built
        .iter()
        .find(|file| file.file_name().is_some_and(|file| file == name))
        .with_context(|| format!("cargo built no program {name}"))
}

/// A cluster, still without the image.
#[derive(Clone)]
struct Early {
    vars: Vec<(String, String)>,
    /// Taken down when the work is done.
    end: bool,
    steps: Vec<(&'static str, Duration)>,
}

fn begin_cluster(place: &Where, dns: Option<Dns>) -> Result<Early> {
    if let Some(context) = &place.context {
        for program in ["kubectl", "helm"] {
            if shell::which(program).is_none() {
                bail!(
                    "--context needs {program} on the PATH; without --context the testbed brings its own"
                );
            }
        }
        let versions = crate::programs::etcd_versions()?.join(",");
        let mut vars = vec![(
            "E2E_ETCD_VERSIONS".to_owned(),
            std::env::var("E2E_ETCD_VERSIONS").unwrap_or(versions),
        )];
        if context != "current" {
            vars.push(("E2E_CONTEXT".to_owned(), context.clone()));
        }
        return Ok(Early {
            vars,
            end: false,
            steps: Vec::new(),
        });
    }
    let options = Options {
        dns: dns.unwrap_or(Options::default().dns),
        ..Options::default()
    };
    let (up, took) = progress::timed("testbed", || testbed::up(options))?;
    let mut env = up.env;
    if let Some(dns) = dns.filter(|dns| *dns != env.dns) {
        testbed::set_dns(dns)?;
        env.dns = dns;
    }
    let mut vars = env.vars();
    vars.push((
        "E2E_XTASK".to_owned(),
        std::env::current_exe()
            .context("own path")?
            .display()
            .to_string(),
    ));
    Ok(Early {
        vars,
        end: !up.found,
        steps: vec![("testbed", took)],
    })
}

/// Adds the image and the chart.
fn finish(early: Early, place: &Where, built: &[PathBuf]) -> Result<Prepared> {
    let Early {
        mut vars,
        mut steps,
        ..
    } = early;
    let given = std::env::var("E2E_IMAGE")
        .ok()
        .filter(|name| place.context.is_some() && !name.is_empty());
    let reference = if let Some(reference) = given {
        reference
    } else {
        let (built, took) = progress::timed("image", || image::build(built))?;
        steps.push(("image", took));
        if place.context.is_some() {
            tell_how_to_load(&built);
        } else {
            let ((), took) = progress::timed("image into the nodes", || image::load(&built))?;
            steps.push(("image into the nodes", took));
        }
        built.reference
    };
    vars.push(("E2E_IMAGE".to_owned(), reference));
    vars.push((
        "E2E_CHART".to_owned(),
        checkout::root()
            .join("charts/etcd-operator")
            .display()
            .to_string(),
    ));
    Ok(Prepared { vars, steps })
}

/// Says how an image gets into a cluster that is not the testbed.
pub(crate) fn tell_how_to_load(image: &image::ImageRef) {
    let (archive, reference) = (image.archive.display(), &image.reference);
    let (name, tag) = reference.rsplit_once(':').unwrap_or((reference, ""));
    progress::say(&format!(
        "the image is {archive}\n    \
         kind:        kind load image-archive {archive}\n    \
         minikube:    minikube image load {archive}\n    \
         containerd:  ctr -n k8s.io images import {archive}    (on each node)\n    \
         a registry:  docker load -i {archive} && docker tag {reference} REGISTRY/etcd-operator:TAG && docker push REGISTRY/etcd-operator:TAG\n    \
                      and, with --context, E2E_IMAGE=REGISTRY/etcd-operator:TAG\n    \
         the chart:   --set image.repository={name} --set-string image.tag={tag}, or REGISTRY/etcd-operator and TAG"
    ));
}

fn end_cluster(early: &Early, place: &Where) {
    if !early.end {
        return;
    }
    if place.keep {
        progress::say(
            "the testbed stays up: `eval \"$(cargo xtask testbed env)\"` to use it, `cargo xtask testbed down` to end it",
        );
    } else if let Err(error) = testbed::down() {
        // What came out of the work matters more than that the testbed stays.
        progress::say(&format!("the testbed could not be taken down: {error:#}"));
    }
}

fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn tests_that_break_nodes_run_alone() {
        let (together, alone) =
            divide(names(&["scale::grows", "replace_member::alone::node_lost"]));
        assert_eq!(together, ["scale::grows"]);
        assert_eq!(alone, ["replace_member::alone::node_lost"]);
    }

    #[test]
    fn a_filter_chooses_among_both() {
        let all = names(&["scale::grows", "scale::alone::x", "other"]);
        let (together, alone) = divide(chosen(all, Some("scale")));
        assert_eq!((together.len(), alone.len()), (1, 1));
    }

    #[test]
    fn a_test_program_that_crashes_is_a_failure() {
        let summary = run_tests(
            "crash",
            Command::new("sh").args(["-c", "echo 'test a ... ok'; exit 101"]),
        )
        .unwrap();
        assert_eq!(summary.failed, 1);
    }

    #[test]
    fn what_tests_print_need_not_be_text() {
        let script = r"printf '\377\n'; echo 'test result: ok. 1 passed; 0 failed; 0 ignored'";
        assert_eq!(
            run_tests("x", Command::new("sh").args(["-c", script]))
                .unwrap()
                .passed,
            1
        );
    }
}
