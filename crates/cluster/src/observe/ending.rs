//! The exit reason of a member's etcd container, from its exit code and its termination message.
//!
//! The kubelet reports the last 2048 bytes of a failed container's log (`FallbackToLogsOnError`). The texts in this
//! file come from the sources of etcd and bbolt. Any other text yields [`Cause::Failed`]: the member is then replaced
//! only if the failure lasts and all other voters are healthy.

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus};

use crate::snapshot::{Cause, Ending};

/// Messages of etcd about a damaged data directory.
const DAMAGED: [&str; 20] = [
    // Messages about the write-ahead log (`server/storage/wal`).
    "walpb: crc mismatch",
    "wal: crc mismatch",
    "wal: file not found",
    "wal: slice bounds out of range",
    "wal: conflicting metadata found",
    "failed to read WAL, cannot be repaired",
    // etcd prints these errors if it cannot decode a record of the write-ahead log. The first error comes from the
    // protobuf library of etcd 3.7, and the two other errors from the library of earlier releases.
    "cannot parse invalid wire-format data",
    "proto: illegal wireType",
    "proto: wrong wireType",
    // etcd prints these errors if the raft snapshot and the database do not match, or if one of them is missing
    // (`etcdserver/bootstrap.go`).
    "failed to recover v3 backend from snapshot",
    "failed to find database snapshot file",
    // bbolt prints these errors if the database file is damaged (`bbolt/errors`, and bbolt's assertions about pages).
    "invalid database",
    "checksum error",
    "file size too small",
    "Page expected to be",
    "invalid freelist page",
    "unexpected page type",
    // The raft library prints this question if the raft log lacks entries that the member had acknowledged.
    "Was the raft log corrupted, truncated, or lost?",
    // etcd prints these errors at its start if its data differs from the data of its peers (`etcdserver/corrupt.go`).
    "found data inconsistency with peers",
    "etcdserver: corrupt cluster",
];

/// etcd's message if the data directory is empty, but the member list shows that the member has started before.
const EMPTY: &str = "has already been bootstrapped";
/// etcd's message if the data directory is empty, and `--initial-cluster` contains only the member itself, as in every
/// pod that the operator recreates on an existing volume.
const EMPTY_AND_ALONE: &str = "cannot fetch cluster info from peer urls";

/// Messages about failures that have another cause than the data. A replacement member would fail in the same way.
const SURROUNDINGS: [&str; 9] = [
    "no space left on device",
    "permission denied",
    "read-only file system",
    "address already in use",
    "flag provided but not defined",
    "error verifying flags",
    "invalid value",
    "no such host",
    "cannot allocate memory",
];

/// Go packages in a stack trace from inside the database. The first is bbolt; the others are the package that opens the
/// database, under its path since etcd 3.6 and under its earlier path.
const DATABASE: [&str; 3] = [
    "go.etcd.io/bbolt",
    "etcd/server/v3/storage/backend.",
    "etcd/server/v3/mvcc/backend.",
];

/// Texts with which etcd's final message starts. The lines before the final message are ordinary log lines. After a
/// message about a flag, etcd prints the usage of its flags.
const LAST_WORDS: [&str; 6] = [
    "flag provided but not defined",
    "invalid value \"",
    "\"level\":\"fatal\"",
    "\"level\":\"panic\"",
    "panic: ",
    "fatal error: ",
];

/// The last exit of a container; `None` if it has not exited. `alone`: the pod's `--initial-cluster` names no other
/// member.
pub(super) fn ending(status: &ContainerStatus, alone: bool) -> Option<Ending> {
    let ended = last_exit(status)?;
    let at = ended.finished_at.as_ref()?.0;
    Some(Ending {
        at,
        cause: cause(ended, alone),
    })
}

pub(super) fn last_exit(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    let mut both = [&status.state, &status.last_state].into_iter().flatten();
    both.find_map(|state| state.terminated.as_ref())
}

fn cause(ended: &ContainerStateTerminated, alone: bool) -> Cause {
    if ended.reason.as_deref() == Some("OOMKilled") {
        return Cause::Memory;
    }
    // These exit codes mean that etcd exited normally (0), was killed (137), or was terminated (143).
    if matches!(ended.exit_code, 0 | 137 | 143) {
        return Cause::Ended;
    }
    let text = ended.message.as_deref().unwrap_or_default();
    // If `begin` finds no final message of etcd, the whole text is searched. The termination message keeps only the
    // last 2048 bytes, so a long stack trace may have displaced the final message.
    let last = begin(text).map_or(text, |at| &text[at..]);
    let says = |words: &[&str]| words.iter().any(|word| last.contains(word));
    // A stack trace that displaced the final message may also lack the frames of bbolt. In this case, frames of the
    // package that opens the database are accepted too.
    let in_database = match begin(text) {
        Some(_) => &DATABASE[..1],
        None => &DATABASE[..],
    };
    if says(&DAMAGED) || says(&[EMPTY]) || alone && says(&[EMPTY_AND_ALONE]) {
        Cause::Data(sentence(text))
    } else if says(&SURROUNDINGS) {
        Cause::Surroundings(sentence(text))
    } else if ended.exit_code == 2 && says(in_database) {
        // Exit code 2 is the code of a Go program after a panic. bbolt panics if a page of the database is invalid.
        Cause::Data("the database file cannot be read".to_owned())
    } else if text.is_empty() {
        Cause::Failed(format!("exit code {}", ended.exit_code))
    } else {
        Cause::Failed(sentence(text))
    }
}

/// The position in a container's message at which etcd's final log line starts.
fn begin(text: &str) -> Option<usize> {
    LAST_WORDS.iter().filter_map(|word| text.find(word)).min()
}

/// The container's message in one sentence: the final message or, if there is none, the last line.
pub(super) fn sentence(text: &str) -> String {
    let line = match begin(text) {
        Some(at) => text[at..].lines().next(),
        None => text.trim_end().lines().last(),
    };
    let line = line.unwrap_or_default().trim();
    let field = |name: &str| {
        let begin = line.find(name)? + name.len();
        line[begin..].split("\",\"").next()
    };
    let said = match (field("\"msg\":\""), field("\"error\":\"")) {
        (Some(msg), Some(error)) => format!("{msg}: {error}"),
        (Some(msg), None) => msg.to_owned(),
        (None, _) => line.to_owned(),
    };
    let end = said
        .char_indices()
        .nth(200)
        .map_or(said.len(), |(at, _)| at);
    said[..end].trim_end_matches(['"', '}']).to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn after(code: i32, reason: &str, message: &str, alone: bool) -> Cause {
        let status: ContainerStatus = serde_json::from_value(json!({
            "name": "etcd", "image": "etcd", "imageID": "", "ready": false, "restartCount": 3,
            "state": { "waiting": { "reason": "CrashLoopBackOff" } },
            "lastState": { "terminated": { "exitCode": code, "reason": reason, "message": message,
                "finishedAt": "2026-11-21T00:00:00Z" } },
        }))
        .unwrap();
        ending(&status, alone).unwrap().cause
    }

    fn log(level: &str, msg: &str, error: &str) -> String {
        format!(
            "{{\"level\":\"info\",\"msg\":\"permission denied\"}}\n{{\"level\":\"{level}\",\"caller\":\"x.go:1\",\"msg\":\"{msg}\",\
             \"error\":\"{error}\",\"stacktrace\":\"main.main\\n\\tmain.go:1\"}}"
        )
    }

    /// Messages of etcd 3.5.35, 3.6.16 and 3.7.3 for data directories that were damaged on purpose.
    #[test]
    fn damaged_data_is_recognized_from_etcd_messages() {
        let assertion = "panic: assertion failed: Page expected to be: 38, but self identifies as 5916057363541774340\n\ngoroutine 1";
        let trace = "goroutine 140 [running]:\ngo.etcd.io/bbolt._assert(...)\n\tgo.etcd.io/bbolt@v1.3.12/db.go:1395";
        let cut_off = "etcd/server/v3/storage/backend.New(...)\n\tgo.etcd.io/etcd/server/v3@v3.7.3/storage/backend/backend.go:170";
        let damaged = [
            (2, cut_off.to_owned()),
            (
                1,
                log(
                    "fatal",
                    "discovery failed",
                    "walpb: crc mismatch: expected: 6f690bd7 computed: c1445ae",
                ),
            ),
            (
                1,
                log(
                    "fatal",
                    "discovery failed",
                    "proto: cannot parse invalid wire-format data",
                ),
            ),
            (
                2,
                log("panic", "failed to open database", "invalid database"),
            ),
            (
                2,
                log(
                    "panic",
                    "failed to recover v3 backend from snapshot",
                    "failed to find database snapshot file",
                ),
            ),
            (2, assertion.to_owned()),
            (2, trace.to_owned()),
            (
                2,
                log(
                    "panic",
                    "tocommit(9) is out of range [lastIndex(3)]. Was the raft log corrupted, truncated, or lost?",
                    "",
                ),
            ),
            (
                1,
                log(
                    "fatal",
                    "discovery failed",
                    "member 8e9e05c52164694d has already been bootstrapped",
                ),
            ),
        ];
        for (code, message) in damaged {
            let cause = after(code, "Error", &message, false);
            assert!(
                matches!(&cause, Cause::Data(words) if words.len() <= 240),
                "{message}: {cause:?}"
            );
        }
        let Cause::Data(words) = after(
            2,
            "Error",
            &log("panic", "failed to open database", "invalid database"),
            false,
        ) else {
            panic!("the message was not recognized as damaged data")
        };
        assert_eq!(words, "failed to open database: invalid database");
    }

    #[test]
    fn exit_of_sole_initial_member_on_empty_disk_counts_as_data_damage() {
        let text = log(
            "fatal",
            "discovery failed",
            "cannot fetch cluster info from peer urls: could not retrieve cluster information from the given URLs",
        );
        assert!(matches!(after(1, "Error", &text, true), Cause::Data(_)));
        // If `--initial-cluster` names other members, etcd prints the same message when it cannot reach these members.
        // The message then proves no data loss.
        assert!(matches!(after(1, "Error", &text, false), Cause::Failed(_)));
    }

    #[test]
    fn out_of_memory_bad_flags_and_signals_do_not_count_as_data_damage() {
        assert_eq!(after(137, "OOMKilled", "", false), Cause::Memory);
        assert_eq!(after(137, "Error", "", false), Cause::Ended);
        assert_eq!(after(0, "Completed", "", false), Cause::Ended);
        for error in [
            "open /var/etcd/data: permission denied",
            "write wal: no space left on device",
        ] {
            let cause = after(1, "Error", &log("fatal", "discovery failed", error), false);
            assert!(
                matches!(cause, Cause::Surroundings(_)),
                "{error}: {cause:?}"
            );
        }
        let flag = "flag provided but not defined: -nonsense";
        let text = format!("{flag}\nUsage:\n\n  etcd gateway\n    Run the stateless proxy.\n\n");
        assert_eq!(
            after(2, "Error", &text, false),
            Cause::Surroundings(flag.into())
        );
        assert_eq!(
            after(1, "Error", "", false),
            Cause::Failed("exit code 1".into())
        );
    }
}
