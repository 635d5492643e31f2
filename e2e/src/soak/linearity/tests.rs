//! Tests: the checker accepts correct histories, and finds each violation.

use std::path::PathBuf;

use super::*;

/// The path of the checker: the variable `LINEARIZE_BIN`. If it is not set, the newest build in the cache of the
/// testbed.
fn program() -> PathBuf {
    if let Some(named) = std::env::var_os("LINEARIZE_BIN") {
        return named.into();
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|dir| !dir.is_empty());
    let cache = cache.map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache"),
        PathBuf::from,
    );
    let folders = std::fs::read_dir(cache.join("etcd-operator-testbed"));
    let mut found: Vec<PathBuf> = folders
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| {
            entry
                .file_name()
                .to_string_lossy()
                .starts_with("linearize-")
        })
        .map(|entry| entry.path().join("linearize"))
        .filter(|path| path.is_file())
        .collect();
    found.sort_by_key(|path| path.metadata().and_then(|data| data.modified()).ok());
    found.pop().expect(
        "no build of linearize was found: run `cargo xtask testbed build`, or set LINEARIZE_BIN",
    )
}

fn put(value: &str, (call, end): (u64, Option<u64>), revision: i64) -> Operation {
    Operation {
        client: call % 3,
        key: "soak/0".to_owned(),
        kind: "put",
        value: value.to_owned(),
        call,
        end,
        revision,
        ..Operation::default()
    }
}

fn get(found: &str, (call, end): (u64, u64), revision: i64) -> Operation {
    Operation {
        kind: "get",
        found: found.to_owned(),
        ..put("", (call, Some(end)), revision)
    }
}

fn swap(expect: &str, value: &str, (call, end): (u64, Option<u64>), revision: i64) -> Operation {
    Operation {
        kind: "swap",
        expect: expect.to_owned(),
        swapped: end.is_some(),
        ..put(value, (call, end), revision)
    }
}

fn rejected(swap: Operation, found: &str) -> Operation {
    Operation {
        swapped: false,
        found: found.to_owned(),
        ..swap
    }
}

async fn check(operations: &[Operation]) -> Verdict {
    let pages = tempfile::tempdir().unwrap();
    linearity(&program(), operations, pages.path())
        .await
        .unwrap()
}

async fn accepted(operations: &[Operation]) {
    let verdict = check(operations).await;
    assert!(matches!(verdict, Verdict::Linearizable(_)), "{verdict:?}");
}

async fn violated(operations: &[Operation]) {
    let verdict = check(operations).await;
    assert!(
        matches!(&verdict, Verdict::Violated(text) if text.contains("not linearizable")),
        "{verdict:?}"
    );
}

#[tokio::test]
async fn linearity_check_accepts_sequential_operations() {
    accepted(&[
        get("", (1, 2), 0),
        put("a", (3, Some(4)), 10),
        get("a", (5, 6), 10),
        swap("a", "b", (7, Some(8)), 11),
        rejected(swap("a", "c", (9, Some(10)), 11), "b"),
        get("b", (11, 12), 11),
    ])
    .await;
}

#[tokio::test]
async fn linearity_check_accepts_concurrent_writes_in_either_order() {
    let writes = [put("a", (1, Some(9)), 11), put("b", (2, Some(8)), 10)];
    accepted(&[&writes[..], &[get("a", (10, 11), 11)]].concat()).await;
    // The revisions show that `a` was written last, so a later read must not return `b`.
    violated(&[&writes[..], &[get("b", (10, 11), 10)]].concat()).await;
}

#[tokio::test]
async fn linearity_check_accepts_unanswered_write_with_and_without_effect() {
    let writes = [put("a", (1, Some(2)), 10), put("b", (3, None), 0)];
    accepted(&[&writes[..], &[get("a", (9, 10), 10)]].concat()).await;
    accepted(&[&writes[..], &[get("b", (9, 10), 11)]].concat()).await;
    // The write of `b` has no response, so it may take effect between the two reads.
    let reads = [get("a", (9, 10), 10), get("b", (11, 12), 11)];
    accepted(&[&writes[..], &reads].concat()).await;
    // The first read has returned `b`, so the second read must not return `a`.
    let reads = [get("b", (9, 10), 11), get("a", (11, 12), 10)];
    violated(&[&writes[..], &reads].concat()).await;
}

#[tokio::test]
async fn linearity_check_accepts_unanswered_swap_with_and_without_effect() {
    let writes = [put("a", (1, Some(2)), 10), swap("a", "b", (3, None), 0)];
    accepted(&[&writes[..], &[get("a", (9, 10), 10)]].concat()).await;
    accepted(&[&writes[..], &[get("b", (9, 10), 11)]].concat()).await;
    // The swap expects `x`, which the key never contains, so it cannot write `b`.
    let writes = [put("a", (1, Some(2)), 10), swap("x", "b", (3, None), 0)];
    violated(&[&writes[..], &[get("b", (9, 10), 11)]].concat()).await;
}

/// The checker assumes that a write without a response happened just before the first read of its value, and ignores
/// the write if no operation read its value. Without this assumption, the check would take more than a minute.
#[tokio::test]
async fn linearity_check_accepts_many_unanswered_writes_without_long_search() {
    let mut all = vec![put("first", (1, Some(2)), 1)];
    for number in 1..300 {
        let at = number * 10;
        all.push(put(&format!("lost-{number}"), (at, None), 0));
        let value = format!("kept-{number}");
        let revision = i64::try_from(number).unwrap() * 2;
        all.push(put(&value, (at + 1, None), 0));
        all.push(get(&value, (at + 4, at + 5), revision));
    }
    accepted(&all).await;
}

#[tokio::test]
async fn linearity_check_finds_lost_write() {
    let lost = [
        put("a", (1, Some(2)), 10),
        put("b", (3, Some(4)), 11),
        get("a", (5, 6), 10),
    ];
    violated(&lost).await;
    violated(&[put("a", (1, Some(2)), 10), get("", (5, 6), 0)]).await;
}

#[tokio::test]
async fn linearity_check_finds_stale_read() {
    violated(&[
        put("a", (1, Some(2)), 10),
        put("b", (3, Some(9)), 11),
        get("b", (4, 5), 11),
        get("a", (6, 7), 10),
    ])
    .await;
}

#[tokio::test]
async fn linearity_check_finds_duplicated_swap() {
    // Two swaps of the same value `a` have succeeded, but only the first swap can have found `a`.
    violated(&[
        put("a", (1, Some(2)), 10),
        swap("a", "b", (3, Some(6)), 11),
        swap("a", "c", (4, Some(7)), 12),
    ])
    .await;
    // The read returns `b` after the write of `c`, so the swap took effect twice.
    violated(&[
        put("a", (1, Some(2)), 10),
        swap("a", "b", (3, Some(4)), 11),
        put("c", (5, Some(6)), 12),
        get("b", (7, 8), 13),
    ])
    .await;
}

#[tokio::test]
async fn linearity_check_finds_swap_rejected_despite_expected_value() {
    let write = put("a", (1, Some(2)), 10);
    let swap = swap("a", "b", (3, Some(4)), 10);
    violated(&[write, rejected(swap, "a")]).await;
}

#[tokio::test]
async fn linearity_check_finds_value_at_wrong_revision() {
    violated(&[put("a", (1, Some(2)), 10), get("a", (3, 4), 9)]).await;
    violated(&[put("a", (1, Some(2)), 10), put("b", (3, Some(4)), 9)]).await;
}

#[tokio::test]
async fn linearity_check_finds_read_of_value_that_no_client_wrote() {
    violated(&[put("a", (1, Some(2)), 10), get("x", (3, 4), 11)]).await;
    // The read has the revision of an existing write, but a value that no client wrote.
    violated(&[put("a", (1, Some(2)), 10), get("x", (3, 4), 10)]).await;
}

#[tokio::test]
async fn linearity_check_finds_violation_of_one_key_among_others() {
    let other = |mut operation: Operation| {
        operation.key = "soak/1".to_owned();
        operation
    };
    violated(&[
        put("a", (1, Some(2)), 10),
        get("a", (3, 4), 10),
        other(put("b", (1, Some(2)), 11)),
        other(get("", (3, 4), 0)),
    ])
    .await;
}

#[tokio::test]
async fn linearity_violation_report_contains_operations_and_html_page() {
    let pages = tempfile::tempdir().unwrap();
    let lost = [put("a", (1, Some(2)), 10), get("", (3, 4), 0)];
    let verdict = linearity(&program(), &lost, pages.path()).await.unwrap();
    let Verdict::Violated(text) = verdict else {
        panic!("{verdict:?}");
    };
    for words in ["key soak/0", "put \"a\" -> revision 10", "get -> \"\""] {
        assert!(text.contains(words), "{text}");
    }
    assert!(pages.path().join("soak-0.html").is_file());
}

#[tokio::test]
async fn linearity_check_rejects_history_with_same_value_written_twice() {
    let twice = [put("a", (1, Some(2)), 10), put("a", (3, Some(4)), 11)];
    let pages = tempfile::tempdir().unwrap();
    let refused = linearity(&program(), &twice, pages.path()).await;
    assert!(refused.unwrap_err().to_string().contains("written twice"));
}
