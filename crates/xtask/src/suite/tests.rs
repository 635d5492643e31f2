//! Unit tests of the command `test`.

use std::path::Path;

use super::*;

fn options(args: &[&str]) -> Tests {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        tests: Tests,
    }
    <Line as clap::Parser>::parse_from([&["test"], args].concat()).tests
}

#[test]
fn test_stages_depend_on_options() {
    assert_eq!(options(&["--unit"]).stages(), [COMPILE, UNITS]);
    let e2e = [COMPILE, TESTBED, IMAGE, E2E, BREAKING, DOWN];
    assert_eq!(options(&["--e2e"]).stages(), e2e);
    let previous = options(&["--e2e", "--previous", "v0.1.0"]).stages();
    assert_eq!(previous[..2], [COMPILE, EARLIER]);
    assert_eq!(options(&["--lint"]).stages().len(), 8);
}

#[test]
fn modules_of_long_tests_exist() {
    let folder = checkout::root().join("e2e/tests/e2e");
    for module in LONG {
        let file = folder.join(module).with_extension("rs");
        assert!(file.is_file(), "{module}");
    }
}

#[test]
fn modules_named_alone_or_serial_are_recognized() {
    assert!(is_in(ALONE, "replace_member::alone::node_lost"));
    assert!(!is_in(ALONE, "scale::grows_alone"));
    assert!(!is_in(ALONE, "scale::alone"));
    assert!(e2e_job(Path::new("x"), "clusterwide::serial::y".into()).serial);
}

#[test]
fn test_without_required_option_is_omitted_with_reason() {
    let why = why_omitted;
    let (found, missing) = (
        Commit::Found("0123".into()),
        Commit::Missing("the checkout is shallow".into()),
    );
    assert_eq!(why("drain::x", false, None), None);
    assert_eq!(why("drain::full::x", true, None), None);
    assert!(why("drain::full::x", false, None).is_some());
    let test = "release::previous::x";
    assert!(why(test, true, None).unwrap().contains("--previous"));
    assert_eq!(why(test, false, Some(&found)), None);
    assert_eq!(
        why(test, false, Some(&missing)).unwrap(),
        "the checkout is shallow"
    );
}

#[test]
fn test_programs_are_found_in_messages_of_cargo() {
    let message = |kind: &str, test: bool| {
        serde_json::json!({
            "reason": "compiler-artifact",
            "manifest_path": "/w/crates/cluster/Cargo.toml",
            "target": { "name": "model", "kind": [kind] },
            "profile": { "test": test },
            "executable": "/t/model-1234",
        })
        .to_string()
    };
    let job = unit_job(&message("test", true)).unwrap();
    assert_eq!(
        (&*job.name, &*job.prefix),
        ("cluster/model", "cluster/model::")
    );
    assert_eq!(job.folder, Path::new("/w/crates/cluster"));
    assert_eq!(
        unit_job(&message("bin", true)).unwrap().name,
        "cluster/bin/model"
    );
    assert_eq!(unit_job(&message("lib", true)).unwrap().name, "model");
    assert!(unit_job(&message("bin", false)).is_none());
    assert!(unit_job("not json").is_none());
}

#[test]
fn filter_that_selects_no_test_is_rejected() {
    let mut compiled = Compiled::default();
    let says = |compiled: &Compiled| compiled.ensure_tests("drain").unwrap_err().to_string();
    assert!(says(&compiled).contains("no test of this run has \"drain\""));
    let omitted = ("drain::full".to_owned(), "needs --full".to_owned());
    compiled.omitted.push(omitted);
    assert!(says(&compiled).ends_with("drain::full: needs --full"));
    let drain = e2e_job(Path::new("e2e"), "drain::alone".into());
    compiled.alone.push(drain);
    compiled.ensure_tests("drain").unwrap();
}

#[test]
fn duration_of_later_stages_is_known_only_after_first_run() {
    let mut run = Run {
        stages: vec![FORMATTING, COMPILE, UNITS],
        forecasts: BTreeMap::new(),
        times: Times::default(),
        report: Report::default(),
        jobs: Vec::new(),
        filtered: false,
    };
    assert_eq!(run.later(FORMATTING), None);
    run.times.note_stage(COMPILE, Duration::from_secs(5));
    run.forecasts.insert(UNITS, Some(Duration::from_secs(2)));
    assert_eq!(run.later(FORMATTING), Some(Duration::from_secs(7)));
    assert_eq!(run.later(UNITS), Some(Duration::ZERO));
}
