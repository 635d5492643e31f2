//! `cargo xtask demo`, `bench` and `soak` prepare a cluster and the image like `test`, and then run programs of the
//! crate `e2e` with environment variables.

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::image::Profile;
use crate::origin::{Origin, VERSION};
use crate::packages::{Purpose, ensure_packages};
use crate::testbed::{Dns, Options, Platform};
use crate::{checkout, image, progress, release, shell, testbed};

/// The cluster to use.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Where {
    /// Use an existing cluster instead of the testbed: a context of your kubeconfig, or `current`. Requires kubectl
    /// and helm on the PATH, E2E_IMAGE with an image that the cluster can pull, and E2E_S3_ENDPOINT, E2E_S3_ACCESS_KEY
    /// and E2E_S3_SECRET_KEY of an S3 server.
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// Do not stop the testbed at the end.
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    pub(crate) platform: Platform,
}

/// The options of a program of the crate `e2e`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Program {
    #[command(flatten)]
    place: Where,
    /// DNS cache of the testbed [default: nocache on a new testbed, unchanged on a running one]
    #[arg(long, value_enum)]
    dns: Option<Dns>,
    /// Compilation profile of the operators [default: fast for `demo`, release for `bench`]. `bench backup` always
    /// uses `fast`.
    #[arg(long, value_enum)]
    profile: Option<Profile>,
    /// Arguments of the program, which `-- --help` lists.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// The options of `cargo xtask soak`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Soak {
    /// Minutes to inject faults. The last fault is repaired afterwards
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// The seed of the faults, to repeat a soak [default: a random seed]
    #[arg(long)]
    seed: Option<u64>,
    /// Do not stop the testbed at the end.
    #[arg(long)]
    keep: bool,
}

/// Runs `cargo xtask soak`, only on the testbed, because the soak stops nodes and the API server.
pub(crate) fn soak(options: &Soak) -> Result<ExitCode> {
    let output = checkout::target()?.join("soak").display().to_string();
    let minutes = options.minutes.to_string();
    let mut args = vec![
        "--minutes".to_owned(),
        minutes,
        "--output".to_owned(),
        output,
    ];
    if let Some(seed) = options.seed {
        args.extend(["--seed".to_owned(), seed.to_string()]);
    }
    let place = Where {
        context: None,
        keep: options.keep,
        platform: Platform::default(),
    };
    let program = Program {
        place,
        dns: None,
        profile: Some(Profile::Fast),
        args,
    };
    self::program("soak", &program)
}

/// A cluster that has the image of the operators, and the environment variables for the programs of the crate `e2e`.
pub(crate) struct Prepared {
    pub(crate) vars: Vec<(String, String)>,
    steps: Vec<(&'static str, Duration)>,
}

/// Compare the backup of a large database with the manual steps: `etcdctl snapshot save`, and an upload. Needs no
/// Kubernetes
#[derive(Debug, clap::Parser)]
#[command(name = "bench backup", bin_name = "cargo xtask bench backup")]
struct BackupBench {
    /// Sizes of the databases in MiB. Needs four times the largest size as free disk space
    #[arg(long, value_name = "MIB,...", default_value = "100,1024")]
    sizes: String,
    /// Number of measurements for each size. The result is their median
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the results to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn bench_backup(args: &[String]) -> Result<ExitCode> {
    let name = "bench backup".to_owned();
    let options =
        match <BackupBench as clap::Parser>::try_parse_from(std::iter::once(&name).chain(args)) {
            Ok(options) => options,
            // clap also returns an error for `--help`. `use_stderr` is false for this error, so only invalid options
            // fail.
            Err(message) => {
                message.print().context("cannot write")?;
                return Ok(if message.use_stderr() {
                    ExitCode::FAILURE
                } else {
                    ExitCode::SUCCESS
                });
            }
        };
    let mut command = Command::new(image::cargo());
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

/// Runs a program of the crate `e2e` for `cargo xtask demo`, `bench` or `soak`.
pub(crate) fn program(name: &str, options: &Program) -> Result<ExitCode> {
    if let ("bench", Some((first, rest))) = (name, options.args.split_first())
        && first == "backup"
    {
        return bench_backup(rest);
    }
    ensure_packages(&[Purpose::Build])?;
    // `--help` needs no cluster, so the testbed is not started.
    if options
        .args
        .iter()
        .any(|arg| arg == "--help" || arg == "-h")
    {
        let (built, _) = progress::timed("compiling", image::compile)?;
        let status = Command::new(program_among(&built, name)?)
            .args(&options.args)
            .status()?;
        return Ok(if status.success() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    let (early, built) = thread::scope(|scope| {
        let early = scope.spawn(|| begin_cluster(&options.place, options.dns));
        let built = progress::timed("compiling", || compile(name, options));
        (early.join(), built)
    });
    let mut early = early.map_err(|_| anyhow::anyhow!("the thread of the testbed panicked"))??;
    let result = built.and_then(|(built, took)| {
        early.steps.push(("compiling", took));
        let mut prepared = finish(
            early.clone(),
            &options.place,
            &built.operators,
            &built.origin,
        )?;
        if name == "bench" {
            let program = program_among(&built.operators, image::PROGRAM)?;
            let program = program.display().to_string();
            prepared.vars.push(("E2E_OPERATOR".to_owned(), program));
            let profile = built.profile.name().to_owned();
            prepared.vars.push(("E2E_PROFILE".to_owned(), profile));
        }
        for (step, took) in &prepared.steps {
            eprintln!("    set-up: {step:24}{:>10}", progress::seconds(*took));
        }
        let mut command = Command::new(program_among(&built.programs, name)?);
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

/// The compiled programs for `demo`, `bench` or `soak`.
struct Build {
    /// Programs of the crate `e2e`.
    programs: Vec<PathBuf>,
    operators: Vec<PathBuf>,
    profile: Profile,
    origin: Origin,
}

/// Compiles the programs of the crate `e2e`, and the operators.
fn compile(name: &str, options: &Program) -> Result<Build> {
    let default = match name {
        "bench" if given_image(&options.place).is_none() => Profile::Release,
        _ => Profile::Fast,
    };
    let programs = image::compile()?;
    let profile = options.profile.unwrap_or(default);
    let (operators, origin) = match profile {
        Profile::Release => (release::compile()?, Origin::of_checkout(VERSION, None)?),
        Profile::Fast => {
            progress::say("operators: profile fast, which is larger and slower than a release");
            (programs.clone(), Origin::unreleased())
        }
    };
    Ok(Build {
        programs,
        operators,
        profile,
        origin,
    })
}

/// The image in `E2E_IMAGE`, if the cluster is not the testbed.
fn given_image(place: &Where) -> Option<String> {
    std::env::var("E2E_IMAGE")
        .ok()
        .filter(|name| place.context.is_some() && !name.is_empty())
}

pub(crate) fn program_among<'a>(built: &'a [PathBuf], name: &str) -> Result<&'a PathBuf> {
    built
        .iter()
        .find(|file| file.file_name().is_some_and(|file| file == name))
        .with_context(|| format!("cargo built no program {name}"))
}

/// The cluster, before its nodes have the image.
#[derive(Clone)]
pub(crate) struct Early {
    vars: Vec<(String, String)>,
    /// True if this command stops the testbed at the end.
    end: bool,
    steps: Vec<(&'static str, Duration)>,
}

pub(crate) fn begin_cluster(place: &Where, dns: Option<Dns>) -> Result<Early> {
    if let Some(context) = &place.context {
        if !place.platform.is_default() {
            bail!("--ip-family and --kubernetes choose a testbed: omit them with --context");
        }
        for program in ["kubectl", "helm"] {
            if shell::which(program).is_none() {
                bail!(
                    "--context needs {program} on the PATH; without --context, the testbed provides it"
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
        platform: place.platform.clone(),
        ..Options::default()
    };
    let (up, took) = progress::timed("testbed", || testbed::up(&options))?;
    let mut env = up.env;
    if let Some(dns) = dns.filter(|dns| *dns != env.dns) {
        testbed::commands::set_dns(dns)?;
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

/// Builds the image, and loads it into the nodes of the testbed. With `--context`, uses the image in `E2E_IMAGE`
/// instead or, without `E2E_IMAGE`, prints the commands that load the image. Adds the environment variables with the
/// image and the chart.
pub(crate) fn finish(
    early: Early,
    place: &Where,
    operators: &[PathBuf],
    origin: &Origin,
) -> Result<Prepared> {
    let Early {
        mut vars,
        mut steps,
        ..
    } = early;
    let reference = if let Some(reference) = given_image(place) {
        reference
    } else {
        let (built, took) = progress::timed("image", || image::build(operators, origin))?;
        steps.push(("image", took));
        if place.context.is_some() {
            print_load_commands(&built);
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

/// Prints the commands that load the image into other clusters.
pub(crate) fn print_load_commands(image: &image::ImageRef) {
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

pub(crate) fn end_cluster(early: &Early, place: &Where) {
    if !early.end {
        return;
    }
    if place.keep {
        progress::say(
            "the testbed stays up; use it with `eval \"$(cargo xtask testbed env)\"`, stop it with `cargo xtask testbed down`",
        );
    } else if let Err(error) = testbed::down() {
        // The error is printed and not returned, so that it does not replace the result of the command.
        progress::say(&format!("cannot take down the testbed: {error:#}"));
    }
}
