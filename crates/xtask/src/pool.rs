//! Runs test programs concurrently, the longest first. Prints each completed program, the output of each failed test,
//! and progress at least every 30 s.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead as _, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::libtest::{self, Line, Outcome};
use crate::progress;
use crate::report::Test;
use crate::times::Times;

/// The maximum time between two lines of progress.
const HEARTBEAT: Duration = Duration::from_secs(30);
/// Time limit for the last output of a completed test program. A process that the test program started may keep the
/// pipe open forever.
const LAST_OUTPUT: Duration = Duration::from_secs(2);
/// Number of last output lines that are printed if a test program crashes. Lines in JSON do not count.
const TAIL: usize = 30;

/// One run of a test program.
#[derive(Debug, Clone, Default)]
pub(crate) struct Job {
    /// The name by which durations are recorded.
    pub(crate) name: String,
    /// The prefix of the names of its tests in the output.
    pub(crate) prefix: String,
    /// The test program. The arguments must include [`libtest::ARGS`], so that it prints JSON.
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) folder: PathBuf,
    pub(crate) vars: Vec<(String, String)>,
    /// Number of tests that the job runs.
    pub(crate) tests: usize,
    /// True if no other serial job may run at the same time.
    pub(crate) serial: bool,
}

/// The results of all jobs.
#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) tests: Vec<Test>,
    /// Durations of the jobs that succeeded.
    pub(crate) jobs: Vec<(String, Duration)>,
}

/// Runs all jobs, up to `slots` at the same time. `later` is the expected duration of the following stages, for the
/// printed estimate. `None` if unknown.
pub(crate) fn run(jobs: Vec<Job>, slots: usize, times: &Times, later: Option<Duration>) -> Done {
    let expected: Vec<_> = jobs.iter().map(|job| times.job(&job.name)).collect();
    let mut pool = Pool::new(jobs, expected, slots, later);
    let (sender, events) = mpsc::channel();
    thread::scope(|scope| {
        loop {
            while pool.running.len() < slots
                && let Some(index) = pool.next()
            {
                let (job, sender) = (pool.jobs[index].clone(), sender.clone());
                scope.spawn(move || run_job(&job, index, &sender));
            }
            if pool.running.is_empty() {
                break;
            }
            pool.take_event(&events);
        }
    });
    pool.done
}

/// The expected duration of the jobs, with up to `slots` at the same time. `None` if no duration was recorded.
pub(crate) fn forecast(jobs: &[Job], slots: usize, times: &Times) -> Option<Duration> {
    let expected: Vec<_> = jobs.iter().map(|job| times.job(&job.name)).collect();
    let mean = mean(&expected)?;
    let left: Vec<_> = expected.iter().map(|one| one.unwrap_or(mean)).collect();
    Some(spread(&left, slots))
}

enum Event {
    Line(usize, String),
    /// A line that a test program wrote to standard error. The number is the index of its job.
    Error(usize, String),
    Ended(usize, Result<ExitStatus, String>),
}

struct Running {
    since: Instant,
    /// Tests that run now.
    open: BTreeSet<String>,
    failed: bool,
    tail: VecDeque<String>,
}

struct Pool {
    jobs: Vec<Job>,
    expected: Vec<Option<Duration>>,
    mean: Option<Duration>,
    slots: usize,
    later: Option<Duration>,
    /// Jobs that have not started, in their order of start.
    waiting: VecDeque<usize>,
    running: BTreeMap<usize, Running>,
    done: Done,
    total: usize,
    /// The time of the last line of progress.
    printed: Instant,
}

impl Pool {
    fn new(
        jobs: Vec<Job>,
        expected: Vec<Option<Duration>>,
        slots: usize,
        later: Option<Duration>,
    ) -> Self {
        let mut waiting: Vec<usize> = (0..jobs.len()).collect();
        // A job without an expected duration starts first, because it may be the longest.
        waiting.sort_by_key(|index| std::cmp::Reverse(expected[*index].unwrap_or(Duration::MAX)));
        Self {
            total: jobs.iter().map(|job| job.tests).sum(),
            mean: mean(&expected),
            waiting: waiting.into(),
            jobs,
            expected,
            slots,
            later,
            running: BTreeMap::new(),
            done: Done::default(),
            printed: Instant::now(),
        }
    }

    /// Moves the next job from `waiting` to `running`, and returns its index. `None` if no job may start now.
    fn next(&mut self) -> Option<usize> {
        let serial = self.running.keys().any(|index| self.jobs[*index].serial);
        let may = |index: &usize| !(serial && self.jobs[*index].serial);
        let at = self.waiting.iter().position(may)?;
        let index = self.waiting.remove(at)?;
        self.running.insert(
            index,
            Running {
                since: Instant::now(),
                open: BTreeSet::new(),
                failed: false,
                tail: VecDeque::new(),
            },
        );
        Some(index)
    }

    fn take_event(&mut self, events: &Receiver<Event>) {
        let patience = HEARTBEAT.saturating_sub(self.printed.elapsed());
        match events.recv_timeout(patience) {
            Ok(Event::Line(index, line)) => self.read(index, line),
            Ok(Event::Error(index, line)) => self.keep(index, line),
            Ok(Event::Ended(index, status)) => self.end(index, status),
            // `Disconnected` cannot occur, because this thread also holds a sender.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => self.heartbeat(),
        }
    }

    fn read(&mut self, index: usize, line: String) {
        let Some(running) = self.running.get_mut(&index) else {
            return;
        };
        match libtest::read(&line) {
            Line::Started(name) => {
                running.open.insert(name);
            }
            Line::Ended(ended) => {
                running.open.remove(&ended.name);
                running.failed |= ended.outcome == Outcome::Failed;
                self.note(Test {
                    name: format!("{}{}", self.jobs[index].prefix, ended.name),
                    outcome: ended.outcome,
                    took: ended.took,
                    output: ended.output,
                });
            }
            Line::Suite => {}
            Line::Other => self.keep(index, line),
        }
    }

    fn keep(&mut self, index: usize, line: String) {
        if let Some(running) = self.running.get_mut(&index) {
            running.tail.push_back(line);
            if running.tail.len() > TAIL {
                running.tail.pop_front();
            }
        }
    }

    fn note(&mut self, test: Test) {
        if test.outcome == Outcome::Failed {
            eprintln!(
                "----- failed: {} -----\n{}\n----- end of {} -----",
                test.name,
                test.output.trim_end(),
                test.name
            );
        }
        self.done.tests.push(test);
    }

    fn end(&mut self, index: usize, status: Result<ExitStatus, String>) {
        let Some(running) = self.running.remove(&index) else {
            return;
        };
        let (took, job) = (running.since.elapsed(), self.jobs[index].clone());
        let ended = match status {
            Ok(status) if status.success() => None,
            Ok(status) => Some(status.to_string()),
            Err(error) => Some(error),
        };
        let mut is_well = !running.failed;
        if let Some(ended) = ended
            && (!running.failed || !running.open.is_empty())
        {
            is_well = false;
            let tail: Vec<String> = running.tail.into();
            let output = format!(
                "Error: the test program ended before its tests: {ended}\n{}",
                tail.join("\n")
            );
            let mut names: Vec<String> = running.open.into_iter().collect();
            if names.is_empty() {
                names.push("(its program)".to_owned());
            }
            for name in names {
                self.note(Test {
                    name: format!("{}{name}", job.prefix),
                    outcome: Outcome::Failed,
                    took: Duration::ZERO,
                    output: output.clone(),
                });
            }
        }
        if is_well {
            self.done.jobs.push((job.name.clone(), took));
        }
        let word = if is_well { "ok" } else { "FAILED" };
        self.say(&format!(
            "{word:6} {:>8}  {}",
            progress::seconds(took),
            job.name
        ));
    }

    fn heartbeat(&mut self) {
        let running: Vec<String> = self
            .running
            .iter()
            .map(|(index, running)| {
                let name = &self.jobs[*index].name;
                format!("{name} ({})", progress::rough(running.since.elapsed()))
            })
            .collect();
        self.say(&format!("running: {}", running.join(", ")));
    }

    fn say(&mut self, what: &str) {
        let tests = &self.done.tests;
        let failed = tests
            .iter()
            .filter(|test| test.outcome == Outcome::Failed)
            .count();
        eprintln!(
            "    {:>width$} of {}  {what}  ({failed} failed, {})",
            tests.len(),
            self.total,
            self.time_left(),
            width = self.total.to_string().len()
        );
        self.printed = Instant::now();
    }

    fn time_left(&self) -> String {
        match (self.left(), self.later) {
            (Some(left), Some(later)) => format!("{} left", progress::rough(left + later)),
            (Some(left), None) => format!("{} left in this stage", progress::rough(left)),
            (None, _) => "time left unknown in the first run".to_owned(),
        }
    }

    fn left(&self) -> Option<Duration> {
        let mean = self.mean?;
        let expected = |index: &usize| self.expected[*index].unwrap_or(mean);
        let running = self
            .running
            .iter()
            .map(|(index, running)| expected(index).saturating_sub(running.since.elapsed()));
        let left: Vec<_> = self.waiting.iter().map(expected).chain(running).collect();
        Some(spread(&left, self.slots))
    }
}

/// The mean of the known durations, which is used for jobs without a recorded duration.
fn mean(expected: &[Option<Duration>]) -> Option<Duration> {
    let known: Vec<Duration> = expected.iter().flatten().copied().collect();
    let count = u32::try_from(known.len()).ok().filter(|count| *count > 0)?;
    Some(known.iter().sum::<Duration>() / count)
}

/// The shortest possible duration of these jobs, with up to `slots` at the same time.
fn spread(left: &[Duration], slots: usize) -> Duration {
    let slots = u32::try_from(slots.max(1)).unwrap_or(u32::MAX);
    let longest = left.iter().max().copied().unwrap_or_default();
    longest.max(left.iter().sum::<Duration>() / slots)
}

fn run_job(job: &Job, index: usize, events: &Sender<Event>) {
    let ended = start(job)
        .and_then(|mut child| {
            let (reading, all_read) = mpsc::channel::<()>();
            if let Some(output) = child.stdout.take() {
                follow(output, &reading, events, move |line| {
                    Event::Line(index, line)
                });
            }
            if let Some(output) = child.stderr.take() {
                follow(output, &reading, events, move |line| {
                    Event::Error(index, line)
                });
            }
            drop(reading);
            let status = child.wait()?;
            // Each of the two threads that read the output holds a sender. `recv_timeout` returns when both threads
            // have ended, at the latest after `LAST_OUTPUT`.
            let _ = all_read.recv_timeout(LAST_OUTPUT);
            Ok(status)
        })
        .map_err(|error| format!("{}: {error}", job.program.display()));
    // An error is ignored, because `send` fails only if the thread of the receiver has panicked.
    let _ = events.send(Event::Ended(index, ended));
}

fn start(job: &Job) -> std::io::Result<Child> {
    Command::new(&job.program)
        .args(&job.args)
        .current_dir(&job.folder)
        .envs(job.vars.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
}

/// Starts a thread that sends each line of `output` to the pool.
fn follow(
    output: impl Read + Send + 'static,
    reading: &Sender<()>,
    events: &Sender<Event>,
    event: impl Fn(String) -> Event + Send + 'static,
) {
    let (reading, events) = (reading.clone(), events.clone());
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            if events.send(event(line)).is_err() {
                break;
            }
        }
        drop(reading);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job that runs a shell script instead of a test program.
    fn job(name: &str, script: &str) -> Job {
        Job {
            name: name.into(),
            prefix: format!("{name}::"),
            program: "sh".into(),
            args: vec!["-c".into(), script.into()],
            folder: ".".into(),
            tests: 1,
            ..Job::default()
        }
    }

    fn run_scripts(scripts: &[(&str, &str)]) -> Done {
        let jobs = scripts.iter().map(|(name, script)| job(name, script));
        run(jobs.collect(), 2, &Times::default(), None)
    }

    const BEGIN: &str = r#"echo '{ "type": "test", "event": "started", "name": "t" }'"#;
    const OK: &str = r#"echo '{ "type": "test", "name": "t", "event": "ok", "exec_time": 0.5 }'"#;

    #[test]
    fn outcomes_of_all_test_programs_are_collected() {
        let failed = r#"echo '{ "type": "test", "name": "t", "event": "failed", "stdout": "why" }'; exit 101"#;
        let mut done = run_scripts(&[("a", OK), ("b", failed)]);
        done.tests.sort_by(|one, other| one.name.cmp(&other.name));
        assert_eq!(done.tests.len(), 2);
        assert_eq!(
            (&*done.tests[0].name, done.tests[0].outcome),
            ("a::t", Outcome::Passed)
        );
        assert_eq!(
            (&*done.tests[1].output, done.tests[1].outcome),
            ("why", Outcome::Failed)
        );
        assert_eq!(done.jobs.len(), 1, "only successful jobs are recorded");
    }

    #[test]
    fn unfinished_tests_of_crashed_program_count_as_failed() {
        let dies = format!("{BEGIN}; echo the cause >&2; kill -9 $$");
        let done = run_scripts(&[("a", &dies)]);
        assert_eq!(
            (&*done.tests[0].name, done.tests[0].outcome),
            ("a::t", Outcome::Failed)
        );
        assert!(done.tests[0].output.contains("signal: 9"), "{done:?}");
        assert!(done.tests[0].output.contains("the cause"), "{done:?}");
    }

    #[test]
    fn test_program_that_fails_without_failed_test_is_reported() {
        let done = run_scripts(&[("a", &format!("{OK}; exit 3"))]);
        assert_eq!(done.tests[1].name, "a::(its program)");
        assert!(
            run_scripts(&[("b", "exit 3")]).tests[0]
                .output
                .contains("exit status: 3")
        );
    }

    #[test]
    fn background_process_of_ended_test_program_does_not_block_run() {
        let begun = Instant::now();
        let done = run_scripts(&[("a", &format!("{OK}; sleep 20 &"))]);
        assert_eq!(done.tests.len(), 1);
        assert!(begun.elapsed() < Duration::from_secs(15));
    }

    fn pool(known: &[Option<u64>]) -> Pool {
        let jobs = (0..known.len()).map(|n| job(&n.to_string(), "")).collect();
        let expected = known
            .iter()
            .map(|one| one.map(Duration::from_secs))
            .collect();
        Pool::new(jobs, expected, 2, None)
    }

    #[test]
    fn jobs_of_unknown_duration_start_first_then_longest_jobs() {
        let mut pool = pool(&[Some(1), Some(9), None, Some(3)]);
        let order: Vec<_> = std::iter::from_fn(|| pool.next()).collect();
        assert_eq!(order, [2, 1, 3, 0]);
    }

    #[test]
    fn serial_jobs_never_run_concurrently() {
        let mut pool = pool(&[Some(9), Some(8), Some(1)]);
        (pool.jobs[0].serial, pool.jobs[1].serial) = (true, true);
        assert_eq!(
            (pool.next(), pool.next(), pool.next()),
            (Some(0), Some(2), None)
        );
        pool.running.remove(&0);
        assert_eq!(pool.next(), Some(1));
    }

    #[test]
    fn time_left_depends_on_slots_and_longest_job() {
        assert_eq!(pool(&[None, None]).left(), None);
        // A job without an expected duration counts with the mean of the other jobs, 15 s. The three jobs then need 45
        // s in two slots.
        assert_eq!(
            pool(&[Some(10), Some(20), None]).left(),
            Some(Duration::from_millis(22_500))
        );
        assert_eq!(
            pool(&[Some(50), Some(10)]).left(),
            Some(Duration::from_secs(50))
        );
        let first = pool(&[None]).time_left();
        assert_eq!(first, "time left unknown in the first run");
    }
}
