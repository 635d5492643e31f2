//! Terminal output: colors, confirmations, and the progress of waits.

use std::io::{BufRead, IsTerminal, Write};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::cli::{Consent, Output};
use crate::error::{Error, Result};
use crate::text::{Paint, Tone};

/// Time between two reads of an awaited object.
const POLL: Duration = Duration::from_secs(1);

/// The colors of standard output. They are on if standard output is a terminal, `NO_COLOR` is missing or empty
/// (https://no-color.org), and `TERM` is not `dumb`.
pub fn paint() -> Paint {
    Paint(std::io::stdout().is_terminal() && wants_colors())
}

/// The colors of standard error, under the same conditions as in [`paint`].
pub fn paint_errors() -> Paint {
    Paint(std::io::stderr().is_terminal() && wants_colors())
}

fn wants_colors() -> bool {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    !no_color && !is_dumb
}

/// Prints a line to standard output.
///
/// # Errors
/// Fails if the output is closed.
pub fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", text.trim_end_matches('\n'))?;
    Ok(out.flush()?)
}

/// Prints a line about the progress to standard error, because standard output must contain only the result.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Formats the value as JSON or YAML. Returns `None` for `table` and `wide`, which the caller formats.
///
/// # Errors
/// Fails if the value cannot be converted to this format.
pub fn machine_readable(value: &impl Serialize, output: Output) -> Result<Option<String>> {
    match output {
        Output::Table | Output::Wide => Ok(None),
        Output::Json => serde_json::to_string_pretty(value)
            .map(Some)
            .map_err(|_| Error::Format("JSON")),
        Output::Yaml => serde_yaml_ng::to_string(value)
            .map(Some)
            .map_err(|_| Error::Format("YAML")),
    }
}

/// Asks the user to confirm `question`. Returns true if the user confirms or has set `--yes`, and false with
/// `--dry-run`.
///
/// # Errors
/// Fails if the user does not confirm, or if standard input is not a terminal and `--yes` is missing.
pub fn confirm(question: &str, consent: Consent) -> Result<bool> {
    if consent.dry_run {
        say("dry run: nothing was changed")?;
        return Ok(false);
    }
    if consent.yes {
        return Ok(true);
    }
    let input = std::io::stdin();
    if !input.is_terminal() {
        return Err(Error::refused(
            "the command needs a confirmation, and standard input is no terminal",
            "read the output above, and add --yes",
        ));
    }
    let mut errors = std::io::stderr().lock();
    write!(errors, "{question} [y/N] ")?;
    errors.flush()?;
    let mut answer = String::new();
    input.lock().read_line(&mut answer)?;
    if is_yes(&answer) {
        return Ok(true);
    }
    Err(Error::refused(
        "not confirmed, nothing was changed",
        "answer y to continue",
    ))
}

fn is_yes(answer: &str) -> bool {
    matches!(answer.trim().to_lowercase().as_str(), "y" | "yes")
}

/// The state of an awaited object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// The object is not in the awaited state yet. The text describes its current state.
    Waiting(String),
    /// The object is in the awaited state.
    Done(String),
    /// The object has failed and cannot reach the awaited state.
    Failed(String),
}

/// Reads an object every second until it is in the awaited state. Prints each change of its state to standard error.
///
/// # Errors
/// Fails if the object has failed, or if the time limit has ended.
pub async fn wait(
    object: &str,
    goal: &'static str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> Result<Look>,
) -> Result<String> {
    let begin = Instant::now();
    let mut last = String::new();
    loop {
        let found = look().await?;
        match found {
            Look::Done(text) => return Ok(text),
            Look::Failed(message) => {
                return Err(Error::EndedBadly {
                    object: object.to_owned(),
                    message,
                });
            }
            Look::Waiting(text) if text != last => {
                note(&format!("{:>4}s  {text}", begin.elapsed().as_secs()));
                last = text;
            }
            Look::Waiting(_) => {}
        }
        if begin.elapsed() >= limit {
            return Err(Error::TimedOut {
                object: object.to_owned(),
                goal,
                seconds: limit.as_secs(),
                last,
            });
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Formats an error with its remedy for the user.
pub fn error_text(error: &Error, paint: Paint) -> String {
    let text = format!("{} {}", paint.paint("error:", Tone::Bad), error.chain());
    match error.remedy() {
        Some(remedy) => format!(
            "{text}\n{} {remedy}",
            paint.paint("what to do:", Tone::Bold)
        ),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_is_confirmed_only_by_yes() {
        for (answer, expected) in [
            ("y\n", true),
            ("YES\n", true),
            ("\n", false),
            ("yep", false),
        ] {
            assert_eq!(is_yes(answer), expected, "{answer:?}");
        }
    }

    #[test]
    fn printed_error_has_cause_and_remedy() {
        let error = Error::refused("member a is down", "wait");
        assert_eq!(
            error_text(&error, Paint(false)),
            "error: member a is down\nwhat to do: wait"
        );
    }

    #[tokio::test]
    async fn wait_ends_at_goal_or_failure_or_timeout() {
        let limit = Duration::from_mins(1);
        let mut looks = vec![Look::Done("b".into()), Look::Waiting("a".into())];
        let done = wait("x", "ready", limit, async || Ok(looks.pop().unwrap())).await;
        assert_eq!(done.unwrap(), "b");
        let failed = wait("x", "ready", limit, async || Ok(Look::Failed("no".into()))).await;
        assert_eq!(failed.unwrap_err().exit_code(), 5);
        let late = wait("x", "ready", Duration::ZERO, async || {
            Ok(Look::Waiting("a".into()))
        })
        .await;
        assert_eq!(late.unwrap_err().exit_code(), 4);
    }
}
