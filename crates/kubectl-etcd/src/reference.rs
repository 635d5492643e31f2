//! Generates the reference page of the plugin's commands from the clap definitions. Performs no I/O.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory};

use crate::cli::Cli;

/// The reference page in Markdown.
pub fn page() -> String {
    let mut root = Cli::command();
    root.build();
    let mut text = String::from(
        "<!-- Generated from the crate `kubectl-etcd` by `UPDATE=1 cargo test -p kubectl-etcd --test reference`. Do not edit. -->\n\n# Commands of kubectl etcd\n\n",
    );
    let _ = writeln!(text, "{}\n", about(&root));
    text.push_str(
        "[kubectl.md](kubectl.md) explains the tasks.\n\n## Options of every command\n\n",
    );
    text.push_str(&options(&root, Arg::is_global_set));
    for command in root
        .get_subcommands()
        .filter(|one| one.get_name() != "help")
    {
        let _ = writeln!(text, "\n## {}\n", command.get_name());
        let _ = writeln!(text, "{}\n", about(command));
        let usage = command.clone().render_usage().to_string();
        let usage = usage.trim_start_matches("Usage:").trim();
        let _ = writeln!(text, "```text\n{usage}\n```");
        let table = options(command, |arg| !arg.is_global_set());
        if !table.is_empty() {
            let _ = write!(text, "\n{table}");
        }
    }
    text
}

fn about(command: &Command) -> String {
    let text = command.get_long_about().or_else(|| command.get_about());
    sentence(text.map(ToString::to_string).unwrap_or_default())
}

/// Adds a period, because clap removes the period of a short help text.
fn sentence(mut text: String) -> String {
    if !text.is_empty() && !text.ends_with('.') {
        text.push('.');
    }
    text
}

/// A table of the command's arguments and options for which `wanted` returns true. Empty if `wanted` never returns
/// true.
fn options(command: &Command, wanted: impl Fn(&Arg) -> bool) -> String {
    let mut rows = String::new();
    let shown = command.get_arguments().filter(|arg| {
        wanted(arg) && !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str())
    });
    for arg in shown {
        let _ = writeln!(rows, "| `{}` | {} |", name(arg), description(arg));
    }
    if rows.is_empty() {
        return rows;
    }
    format!("| argument or option | meaning |\n|---|---|\n{rows}")
}

fn name(arg: &Arg) -> String {
    let takes_value = arg.get_action().takes_values();
    let value = arg.get_value_names().and_then(<[_]>::first);
    let value = value.map_or_else(|| arg.get_id().as_str().to_uppercase(), ToString::to_string);
    let Some(long) = arg.get_long() else {
        return value;
    };
    let mut name = String::new();
    if let Some(short) = arg.get_short() {
        let _ = write!(name, "-{short}, ");
    }
    let _ = write!(name, "--{long}");
    if takes_value {
        let _ = write!(name, " {value}");
    }
    name
}

fn description(arg: &Arg) -> String {
    let help = arg.get_long_help().or_else(|| arg.get_help());
    let mut text = sentence(help.map(ToString::to_string).unwrap_or_default());
    text = text.replace('\n', " ").replace('|', "\\|");
    let values: Vec<String> = arg
        .get_possible_values()
        .iter()
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !values.is_empty() && arg.get_action().takes_values() {
        let _ = write!(text, " One of {}.", values.join(", "));
    }
    let defaults: Vec<String> = arg
        .get_default_values()
        .iter()
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    if !defaults.is_empty() && arg.get_action().takes_values() {
        let _ = write!(text, " Default: {}.", defaults.join(", "));
    }
    text
}
