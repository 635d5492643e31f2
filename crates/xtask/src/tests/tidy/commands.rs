//! Checks the commands in the documents and in the comments of the examples. The flags, chart values, fields,
//! conditions and files that they use must exist.

use std::collections::BTreeSet;
use std::fs;
use std::sync::LazyLock;

use clap::{CommandFactory, Parser};
use serde_json::Value;

use super::blocks::{all_commands, inline_code, pages};
use super::documents::operator_flags;
use super::root;
use super::schemas::{KINDS, Schema, nested};
use crate::Cli;

/// Flags of other programs in the documents: kubectl, Helm, Docker, skopeo, cargo, etcd, etcdctl, etcdutl, and the
/// benchmarks.
const OTHER_FLAGS: &[&str] = &[
    "cascade",
    "delete-all",
    "snapshot-count",
    "force",
    "previous",
    "raw",
    "server-side",
    "watch",
    "force-conflicts",
    "reset-then-reuse-values",
    "reuse-values",
    "set",
    "set-string",
    "take-ownership",
    "cgroupns",
    "privileged",
    "preserve-digests",
    "lib",
    "client-cert-auth",
    "corrupt-check-time",
    "experimental-corrupt-check-time",
    "force-new-cluster",
    "initial-cluster",
    "log-level",
    "max-learners",
    "max-request-bytes",
    "max-txn-ops",
    "peer-skip-client-san-verification",
    "bump-revision",
    "cert",
    "cluster",
    "mark-compacted",
    "skip-hash-check",
    "aws",
    "enable-certificate-owner-ref",
    "member",
    "replicas",
    "rounds",
];

/// Filters of the log, which look like chart values.
const NO_VALUES: [&str; 2] = ["kube=warn", "kube_runtime=warn"];

fn words(command: &str) -> Vec<String> {
    shlex::split(command).unwrap_or_default()
}

/// The mistakes in one command: flags, chart values, fields, conditions and files that do not exist.
fn faults(command: &str) -> Vec<String> {
    let words = words(command);
    let mut found = Vec::new();
    found.extend(command_of_xtask(command).and_then(|it| fault_of_xtask(&it)));
    if words.first().is_some_and(|it| it == "helm") {
        found.extend(faults_of_values(&words));
    }
    if let Some(kind) = kind(&words) {
        found.extend(faults_of_patch(kind, &words));
        found.extend(faults_of_paths(kind, command));
        found.extend(faults_of_conditions(&words));
    }
    let files = words.iter().filter(|word| {
        ["examples/", "charts/"]
            .iter()
            .any(|it| word.starts_with(it))
    });
    let missing = files.filter(|file| !root().join(file).exists());
    found.extend(missing.map(|file| format!("{file} does not exist")));
    found
}

/// The arguments of a `cargo xtask` command, which can be in `$(...)`. `None` if the line contains no such command.
fn command_of_xtask(line: &str) -> Option<Vec<String>> {
    let (_, rest) = line.split_once("cargo xtask ")?;
    let ends = [" #", " |", " &&", ";", ")"];
    let end = ends.iter().filter_map(|end| rest.find(end)).min();
    let rest = &rest[..end.unwrap_or(rest.len())];
    Some(words(rest))
}

fn fault_of_xtask(arguments: &[String]) -> Option<String> {
    let all = ["cargo xtask".to_owned()]
        .into_iter()
        .chain(arguments.iter().cloned());
    match Cli::try_parse_from(all) {
        Err(error) if error.use_stderr() => Some(error.to_string()),
        _ => None,
    }
}

/// The mistakes in the arguments of `--set` and `--set-string`: chart values that do not exist.
fn faults_of_values(words: &[String]) -> Vec<String> {
    let schema = Schema::of_values();
    let mut found = Vec::new();
    for pair in words.windows(2) {
        let is_text = pair[0] == "--set-string";
        if pair[0] != "--set" && !is_text {
            continue;
        }
        for setting in settings(&pair[1]) {
            found.extend(fault_of_value(schema, setting, is_text));
        }
    }
    found
}

/// The single settings in the argument of `--set`. A comma in braces separates list items, not settings.
fn settings(argument: &str) -> Vec<&str> {
    let mut depth = 0;
    let separates = |c: char| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    };
    argument.split(separates).collect()
}

fn fault_of_value(schema: &Schema, setting: &str, is_text: bool) -> Vec<String> {
    let Some((path, value)) = setting.split_once('=') else {
        return vec![format!("{setting} has no value")];
    };
    // In an argument of Helm, a list has braces. In YAML, it has brackets.
    let list = value.strip_prefix('{').and_then(|it| it.strip_suffix('}'));
    let yaml = list.map_or_else(|| value.to_owned(), |list| format!("[{list}]"));
    let parsed = serde_yaml_ng::from_str(&yaml).ok().filter(|_| !is_text);
    let value = parsed.unwrap_or_else(|| Value::String(value.to_owned()));
    schema.faults(&nested(path, value))
}

/// The custom resource kind, such as `EtcdCluster`, that a kubectl command reads or changes. `None` for other
/// resources.
fn kind(words: &[String]) -> Option<&'static str> {
    if words.first().is_none_or(|it| it != "kubectl") {
        return None;
    }
    // The word after `-n` is a namespace. The namespace `etcd` must not be taken for `etcd`, the short name of
    // EtcdClusters.
    let pairs = words.windows(2).filter(|pair| pair[0] != "-n");
    let resources = pairs.filter_map(|pair| pair[1].split('/').next());
    let mut resources = resources.map(|word| word.trim_end_matches('s'));
    resources.find_map(|word| match word {
        "etcd" => Some(KINDS[0]),
        _ => KINDS.into_iter().find(|kind| kind.to_lowercase() == word),
    })
}

/// The mistakes in the JSON of a `kubectl patch`: fields and values that the schema of the kind does not allow.
fn faults_of_patch(kind: &str, words: &[String]) -> Vec<String> {
    let after = |flag: &str| {
        let at = words.iter().position(|word| word == flag)?;
        words.get(at + 1)
    };
    let Some(patch) = after("-p") else {
        return Vec::new();
    };
    match serde_json::from_str::<Value>(patch) {
        Ok(patch) => Schema::of_kind(kind).faults(&patch),
        Err(error) => vec![format!("{patch} is not JSON: {error}")],
    }
}

/// The fields under `spec` and `status` in the JSONPath of a command that are not in the schema of the kind.
fn faults_of_paths(kind: &str, command: &str) -> Vec<String> {
    let schema = Schema::of_kind(kind);
    let paths = command.split("jsonpath=").skip(1).flat_map(fields);
    let known = paths.filter(|path| path.starts_with("spec") || path.starts_with("status"));
    known
        .filter(|path| !schema.has(path))
        .map(|path| format!("{kind} has no field {path}"))
        .collect()
}

/// The fields that a JSONPath template reads, without their first dot. A list item is written as `[]`.
fn fields(template: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut range = String::new();
    for part in template.split('{').skip(1) {
        let inside = part.split('}').next().unwrap_or_default();
        if inside == "end" {
            range.clear();
        } else if let Some(path) = inside.strip_prefix("range ") {
            range = plain(path);
            found.push(range.clone());
        } else if inside.starts_with('.') {
            let is_absolute = inside.starts_with(".spec") || inside.starts_with(".status");
            let start = if is_absolute { "" } else { range.as_str() };
            found.push(plain(&format!("{start}{inside}")));
        }
    }
    found
}

/// The path of a field without its first dot. Each index or filter becomes `[]`.
fn plain(path: &str) -> String {
    let mut parts = path.trim_start_matches('.').split('[');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain.push_str("[]");
        plain.push_str(part.split_once(']').map_or("", |(_, rest)| rest));
    }
    plain
}

static CONDITIONS: LazyLock<String> =
    LazyLock::new(|| fs::read_to_string(root().join("crates/api/src/conditions.rs")).unwrap());

/// The conditions in a `kubectl wait` that no kind of this project has.
fn faults_of_conditions(words: &[String]) -> Vec<String> {
    let named = words
        .iter()
        .filter_map(|word| word.strip_prefix("--for=condition="));
    let named = named.filter_map(|condition| condition.split('=').next());
    named
        .filter(|name| *name != "Managed" && !CONDITIONS.contains(&format!(" = \"{name}\",")))
        .map(|name| format!("{name} is not a condition"))
        .collect()
}

#[test]
fn commands_in_documents_use_existing_flags_and_fields() {
    let commands = all_commands();
    let faults = commands.iter().flat_map(|(file, command)| {
        let faults = faults(command).into_iter();
        faults.map(move |fault| format!("{file}: {command}\n{fault}"))
    });
    let faults: Vec<String> = faults.collect();
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
    let count = |word: &str| commands.iter().filter(|(_, it)| it.contains(word)).count();
    for (word, least) in [
        ("cargo xtask", 60),
        ("helm", 20),
        ("jsonpath=", 40),
        ("patch", 15),
    ] {
        assert!(
            count(word) > least,
            "the documents contain only {} commands with {word}",
            count(word)
        );
    }
}

#[test]
fn wrong_commands_in_documents_are_detected() {
    for (command, expected) in [
        ("cargo xtask image --profile slow", "slow"),
        ("eval \"$(cargo xtask testbed envs)\"", "envs"),
        (
            "helm install a charts/etcd-operator --set image.tak=1",
            ".image.tak is not a field",
        ),
        (
            "helm upgrade a charts/etcd-operator --set backupOperator.replicas=two",
            "another type",
        ),
        (
            "helm install a charts/etcd --set clusterWide=true",
            "charts/etcd does not exist",
        ),
        (
            "kubectl apply -f examples/none.yaml",
            "examples/none.yaml does not exist",
        ),
        (
            "kubectl -n N patch etcdcluster main --type merge -p '{\"spec\":{\"pause\":true}}'",
            ".spec.pause is not a field",
        ),
        ("kubectl patch etcdbackup/a -p '{\"spec\":'", "is not JSON"),
        (
            "kubectl get etcdcluster a -o jsonpath='{range .status.memberDetails[*]}{.nam}{end}'",
            "status.memberDetails[].nam",
        ),
        (
            "kubectl wait etcdrestore/a --for=jsonpath='{.status.completionTimes}'",
            "status.completionTimes",
        ),
        (
            "kubectl wait etcd/a --for=condition=Finished --timeout=5m",
            "Finished is not a condition",
        ),
        (
            "helm install a charts/etcd-operator --set 'watchNamespaces={a,b},clusterWyde=true'",
            "clusterWyde",
        ),
    ] {
        let faults = faults(command);
        assert!(
            faults.iter().any(|it| it.contains(expected)),
            "{command}: {faults:?}"
        );
    }
    let good = "kubectl -n etcd wait etcdcluster main --for=condition=Upgrading=False --timeout=5m";
    assert_eq!(faults(good), Vec::<String>::new());
}

/// The flags of all `cargo xtask` commands.
fn xtask_flags() -> BTreeSet<String> {
    fn collect(command: &clap::Command, found: &mut BTreeSet<String>) {
        let flags = command.get_arguments().filter_map(clap::Arg::get_long);
        found.extend(flags.map(str::to_owned));
        for command in command.get_subcommands() {
            collect(command, found);
        }
    }
    let mut found = BTreeSet::from(["help".to_owned(), "version".to_owned()]);
    collect(&Cli::command(), &mut found);
    found
}

/// The flags of `kubectl etcd`, from docs/kubectl-reference.md. The tests of the crate `kubectl-etcd` generate this
/// page, and check the plugin's commands in the documents.
fn plugin_flags() -> BTreeSet<String> {
    let page = fs::read_to_string(root().join("docs/kubectl-reference.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let flags = rows.filter_map(|row| {
        let (_, flag) = row.split('`').next()?.split_once("--")?;
        flag.split(' ').next()
    });
    flags.map(str::to_owned).collect()
}

/// The flags in the prose of a document that no known program has.
fn unknown_flags(text: &str) -> Vec<&str> {
    let mut known = operator_flags();
    known.extend(xtask_flags());
    known.extend(plugin_flags());
    known.extend(OTHER_FLAGS.iter().map(|flag| (*flag).to_owned()));
    let flags = inline_code(text)
        .into_iter()
        .filter_map(|code| code.strip_prefix("--"))
        .filter_map(|code| code.split([' ', '=']).next());
    flags
        .filter(|flag| !flag.is_empty() && !known.contains(*flag))
        .collect()
}

#[test]
fn flags_named_in_documents_exist() {
    for page in pages() {
        let unknown = unknown_flags(&page.text);
        assert!(
            unknown.is_empty(),
            "{}: no program has the flags {unknown:?}",
            page.path
        );
    }
    let text = "`--cluster-wide`, `--verify-reproducible`, `--keep-old-data`, `--cluster-wode=true` and `--`";
    assert_eq!(unknown_flags(text), ["cluster-wode"]);
}

/// True if the inline code sets a chart value, such as `crds.install=false`.
fn sets_value(code: &str) -> bool {
    code.split_once('=').is_some_and(|(path, value)| {
        let is_path = path.starts_with(|c: char| c.is_ascii_lowercase())
            && path.chars().all(|c| c.is_ascii_alphabetic() || c == '.');
        let is_value = !value.is_empty() && value.chars().all(|c| c.is_ascii_alphanumeric());
        is_path && is_value && !NO_VALUES.contains(&code)
    })
}

#[test]
fn chart_values_named_in_documents_exist() {
    let schema = Schema::of_values();
    let mut found = Vec::new();
    let mut checked = 0;
    for page in pages() {
        for code in inline_code(&page.text)
            .into_iter()
            .filter(|it| sets_value(it))
        {
            checked += 1;
            let faults = fault_of_value(schema, code, false).into_iter();
            found.extend(faults.map(|fault| format!("{}: {fault}", page.path)));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
    assert!(
        checked > 20,
        "the documents set only {checked} chart values: does this check still parse their format?"
    );
    assert!(sets_value("crds.install=false") && !sets_value("serves: app"));
}

/// The annotations, labels and finalizers in a text that the API does not have. `names` is the source file with the
/// names of the API.
fn unknown_names<'a>(text: &'a str, names: &str) -> Vec<&'a str> {
    const PREFIX: &str = "etcd.database.coreos.com/";
    // A match after a dot is no annotation, label or finalizer: `kubectl get` prints an object as
    // `etcdcluster.etcd.database.coreos.com/NAME`.
    let prefixes = text.match_indices(PREFIX);
    let prefixes = prefixes.filter(|(at, _)| !text[..*at].ends_with('.'));
    let found = prefixes.map(|(at, prefix)| {
        let rest = &text[at + prefix.len()..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        rest[..end.unwrap_or(rest.len())].trim_end_matches('-')
    });
    let exists = |name: &str| name == "v1beta2" || names.contains(&format!("\"{PREFIX}{name}\""));
    found.filter(|name| !exists(name)).collect()
}

/// A misspelled annotation in a command has no effect and causes no error, because Kubernetes accepts every
/// annotation.
#[test]
fn annotations_named_in_documents_exist() {
    let names = fs::read_to_string(root().join("crates/api/src/names.rs")).unwrap();
    for page in pages() {
        let unknown = unknown_names(&page.text, &names);
        assert!(
            unknown.is_empty(),
            "{}: the API does not have the names {unknown:?}",
            page.path
        );
    }
    let text = "etcd.database.coreos.com/join- etcd.database.coreos.com/joins=a";
    assert_eq!(unknown_names(text, &names), ["joins"]);
}
