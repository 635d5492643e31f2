//! The jobs of `cargo xtask test`: one for each program with unit tests, and one for each end-to-end test.

use std::path::Path;

use crate::pool::Job;
use crate::previous::Commit;
use crate::{checkout, image, libtest};

/// Modules with this name contain end-to-end tests that break nodes, the control plane, or other parts of the cluster
/// that all tests share. These tests run one by one, after all other tests.
pub(super) const ALONE: &str = "alone";
/// Modules with this name contain end-to-end tests of which only one may run at a time.
const SERIAL: &str = "serial";
/// Modules with this name contain end-to-end tests that run only with `--full`.
const FULL: &str = "full";
/// Modules with this name contain end-to-end tests that run only with `--previous`.
pub(super) const PREVIOUS: &str = "previous";

/// The job for the test program in a message of cargo. `None` for a message without a test program.
pub(super) fn unit_job(message: &str) -> Option<Job> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let program = message["executable"].as_str()?;
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let package = folder.file_name()?.to_str()?;
    let target = message["target"]["name"].as_str()?;
    let name = match message["target"]["kind"][0].as_str()? {
        "lib" => target.to_owned(),
        "bin" => format!("{package}/bin/{target}"),
        _ => format!("{package}/{target}"),
    };
    Some(Job {
        prefix: format!("{name}::"),
        name,
        program: program.into(),
        args: json_args(),
        folder: folder.to_owned(),
        // Some tests need the variables `CARGO_MANIFEST_DIR` and `CARGO`, which `cargo test` would set.
        vars: vec![
            json_var(),
            (
                "CARGO_MANIFEST_DIR".to_owned(),
                folder.display().to_string(),
            ),
            (
                "CARGO".to_owned(),
                image::cargo().to_string_lossy().into_owned(),
            ),
        ],
        ..Job::default()
    })
}

/// The job of one end-to-end test. Each test has its own process, so that the longest test can start first.
pub(super) fn e2e_job(program: &Path, name: String) -> Job {
    Job {
        args: [json_args(), vec!["--exact".to_owned(), name.clone()]].concat(),
        serial: is_in(SERIAL, &name),
        name,
        program: program.to_owned(),
        folder: checkout::root().join("e2e"),
        vars: vec![json_var()],
        tests: 1,
        ..Job::default()
    }
}

fn json_args() -> Vec<String> {
    libtest::ARGS.iter().map(|arg| (*arg).to_owned()).collect()
}

fn json_var() -> (String, String) {
    let (name, value) = libtest::UNLOCK;
    (name.to_owned(), value.to_owned())
}

/// True if the test is in a module with this name.
pub(super) fn is_in(module: &str, test: &str) -> bool {
    test.rsplit("::").skip(1).any(|part| part == module)
}

/// The reason why a selected end-to-end test does not run. `None` if it runs. `previous` is the commit of
/// `--previous`.
pub(super) fn why_omitted(name: &str, full: bool, previous: Option<&Commit>) -> Option<String> {
    if is_in(FULL, name) && !full {
        return Some("needs --full".to_owned());
    }
    match previous {
        _ if !is_in(PREVIOUS, name) => None,
        Some(Commit::Found(_)) => None,
        Some(Commit::Missing(why)) => Some(why.clone()),
        None => Some("needs --previous COMMIT".to_owned()),
    }
}
