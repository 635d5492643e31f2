//! Runs the events of many seeds on several threads, and prints the events of a failing seed as a story. A seed is the
//! number from which all events of a run are generated.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::event::{Event, draw};
use crate::mutation::Mutation;
use crate::run::{Run, Setup};

/// The result of a run.
#[derive(Debug, Default)]
pub(crate) struct Played {
    pub(crate) rounds: usize,
    pub(crate) broken: Option<String>,
    /// Number of events until the failure.
    events: usize,
    pub(crate) story: Vec<String>,
}

/// Runs events, stops the faults, and checks that the cluster converges.
pub(crate) fn play(
    setup: &Setup,
    events: &[Event],
    mutation: Option<Mutation>,
    telling: bool,
) -> Played {
    let mut run = Run::new(setup, mutation, telling);
    let mut played = 0;
    let whole = catch_unwind(AssertUnwindSafe(|| {
        for event in events {
            played += 1;
            run.event(*event);
            if run.broken().is_some() {
                return;
            }
        }
        run.converges();
    }));
    let panicked = whole.err().map(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        format!("panicked: {}", text.unwrap_or_default())
    });
    let broken = run.broken().map(str::to_owned).or(panicked);
    let mut story = std::mem::take(&mut run.world.story);
    if telling && broken.is_some() && std::env::var_os("MODEL_WORLD").is_some() {
        story.extend(run.world.to_string().lines().map(str::to_owned));
    }
    Played {
        rounds: run.rounds(),
        broken,
        events: played,
        story,
    }
}

pub(crate) fn play_seed(seed: u64, two: bool, mutation: Option<Mutation>) -> Played {
    let (setup, events) = draw(seed, two);
    play(&setup, &events, mutation, false)
}

/// Runs seeds from 0 on until the model detects the mutation. Returns the seed, the number of rounds of all seeds
/// together, and the violation.
pub(crate) fn hunt(mutation: Mutation, rounds: usize) -> Option<(u64, usize, String)> {
    let mut played = 0;
    for seed in 0.. {
        let run = play_seed(seed, mutation.needs_two(), Some(mutation));
        played += run.rounds;
        // A failure to converge is no detection, because every mistake can prevent convergence.
        if let Some(broken) = run
            .broken
            .filter(|broken| !["does not", "a lost"].contains(&kind(broken)))
        {
            return Some((seed, played, broken));
        }
        if played >= rounds {
            return None;
        }
    }
    None
}

/// The seed of a failing run, and its events as a story.
pub(crate) struct Failure {
    seed: u64,
    setup: Setup,
    what: String,
    story: Vec<String>,
}

/// Runs seeds from `first` on for this number of rounds. Returns the numbers of seeds and rounds, or the first failure.
pub(crate) fn explore(first: u64, two: bool, rounds: usize) -> Result<(u64, usize), Box<Failure>> {
    let (next, count, failed) = (
        AtomicU64::new(first),
        AtomicUsize::new(0),
        AtomicBool::new(false),
    );
    let worker = || {
        let mut found = Vec::new();
        while count.load(Ordering::Relaxed) < rounds && !failed.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let played = play_seed(seed, two, None);
            count.fetch_add(played.rounds, Ordering::Relaxed);
            if played.broken.is_some() {
                failed.store(true, Ordering::Relaxed);
                found.push(seed);
            }
        }
        found
    };
    let mut found = std::thread::scope(|scope| {
        let workers = [scope.spawn(worker), scope.spawn(worker)];
        let found = workers.into_iter().map(|worker| worker.join().unwrap());
        found.flatten().collect::<Vec<_>>()
    });
    found.sort_unstable();
    match found.first() {
        Some(seed) => Err(Box::new(tell(*seed, two, None))),
        None => Ok((next.into_inner() - first, count.into_inner())),
    }
}

/// Plays a seed and returns its events as a story: all events of a passing run, or only the events that the failure
/// needs.
pub(crate) fn tell(seed: u64, two: bool, mutation: Option<Mutation>) -> Failure {
    let (setup, mut events) = draw(seed, two);
    let first = play(&setup, &events, mutation, false);
    let mut what = "the run has no violation".to_owned();
    if let Some(broken) = first.broken {
        events.truncate(first.events);
        events = shrink(&setup, events, mutation, kind(&broken));
        what = play(&setup, &events, mutation, false)
            .broken
            .unwrap_or_default();
    }
    let story = play(&setup, &events, mutation, true).story;
    Failure {
        seed,
        setup,
        what,
        story,
    }
}

/// Leaves out halves, quarters and smaller parts of the events, as long as the run still fails in the same way.
fn shrink(
    setup: &Setup,
    mut events: Vec<Event>,
    mutation: Option<Mutation>,
    of: &str,
) -> Vec<Event> {
    let same = |events: &[Event]| {
        play(setup, events, mutation, false)
            .broken
            .is_some_and(|broken| kind(&broken) == of)
    };
    let mut size = events.len().div_ceil(2);
    loop {
        let before = events.len();
        let mut at = 0;
        while at < events.len() {
            let mut fewer = events.clone();
            fewer.drain(at..(at + size).min(events.len()));
            if same(&fewer) {
                events = fewer;
            } else {
                at += size;
            }
        }
        if size == 1 && events.len() == before {
            return events;
        }
        size = size.div_ceil(2);
    }
}

/// The kind of a failure: its first two words, for example `invariant 6`.
pub(crate) fn kind(broken: &str) -> &str {
    let words = broken
        .match_indices(' ')
        .nth(1)
        .map_or(broken.len(), |(at, _)| at);
    broken[..words].trim_end_matches(':')
}

/// A function that generates the events of a special run from a seed, for example a run with TLS changes.
pub(crate) type Draw = fn(u64) -> (Setup, Vec<Event>);

/// Plays the runs that `drawn` generates from consecutive seeds, for this number of rounds. Panics with the story of
/// the first failure.
pub(crate) fn play_drawn(drawn: Draw, rounds: usize) {
    let (mut played, mut seed) = (0, crate::number("MODEL_FROM").unwrap_or(0));
    let rounds = crate::number("MODEL_ROUNDS").unwrap_or(rounds);
    while played < rounds {
        let (setup, events) = drawn(seed);
        let run = play(&setup, &events, None, false);
        if let Some(broken) = run.broken {
            let story = play(&setup, &events, None, true).story.join("\n");
            panic!("seed {seed}: {broken}\n{setup}\n{story}");
        }
        played += run.rounds;
        seed += 1;
    }
}

/// Checks that the runs of `drawn` detect each mistake within this number of rounds, and pass without it.
pub(crate) fn find(mistakes: &[Mutation], drawn: Draw, rounds: usize) {
    for mutation in mistakes {
        let (mut played, mut found) = (0, None);
        for seed in 0.. {
            let (setup, events) = drawn(seed);
            let run = play(&setup, &events, Some(*mutation), false);
            played += run.rounds;
            let broken = run.broken.as_deref();
            // A failure to converge is no detection, because every mistake can prevent convergence.
            let worse = broken.filter(|broken| !["does not", "a lost"].contains(&kind(broken)));
            if let Some(broken) = worse {
                println!("{mutation:?}: {played} rounds, seed {seed}: {broken:.120}");
                assert_eq!(play(&setup, &events, None, false).broken, None);
                found = Some(seed);
            }
            if found.is_some() || played > rounds {
                break;
            }
        }
        assert!(found.is_some(), "the model did not detect {mutation:?}");
    }
}

impl Failure {
    pub(crate) fn is_well(&self) -> bool {
        self.what == "the run has no violation"
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            seed,
            setup,
            what,
            story,
        } = self;
        let test = if setup.two {
            "invariant_11_holds_with_concurrent_operators"
        } else {
            "cluster_keeps_invariants_and_converges_despite_faults"
        };
        writeln!(f, "seed {seed}: {}", short(what))?;
        writeln!(f, "{setup}")?;
        for (at, line) in condensed(story).iter().enumerate() {
            writeln!(f, "{:>4}  {}", at + 1, short(line))?;
        }
        write!(
            f,
            "repeat this run: MODEL_SEED={seed} cargo test -p cluster --test model {test} -- --nocapture"
        )
    }
}

/// Combines consecutive rounds with the same text into one line.
fn condensed(story: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut same: Option<(&str, &str)> = None;
    for line in story {
        let round = line
            .strip_prefix("round ")
            .and_then(|rest| rest.split_once(": "));
        match (same, round) {
            (Some((first, before)), Some((last, what))) if before == what => {
                lines.pop();
                lines.push(format!("rounds {first} to {last}: {what}"));
            }
            _ => {
                same = round;
                lines.push(line.clone());
            }
        }
    }
    lines
}

/// Replaces the names of members by short names: `a`, `b` and so on. After the last letter, the names are `a1`, `b1`
/// and so on.
fn short(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    while let Some(at) = rest.find("db-") {
        text.push_str(&rest[..at]);
        let name = &rest[at + 3..];
        let drawn = name
            .get(..10)
            .filter(|name| name[1..].bytes().all(|byte| byte.is_ascii_digit()));
        let Some(drawn) = drawn else {
            text.push_str("db-");
            rest = name;
            continue;
        };
        text.push_str(&drawn[..1]);
        text.push_str(drawn[1..].trim_start_matches('0'));
        rest = &name[10..];
    }
    text + rest
}
