//! Damaged variants of real inputs, to test the parsers of every crate. A parser must not panic, and must use little
//! time and memory.

#![allow(dead_code)] // Each crate that includes this module uses only a part of it.

use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Texts that parsers often handle wrongly.
const TOKENS: &[&str] = &[
    "",
    "0",
    "-1",
    "007",
    "18446744073709551616",
    "9223372036854775807",
    "1e999",
    "NaN",
    "null",
    "{",
    "[[[[[[[[",
    "\"",
    "<",
    "/>",
    "&#x0;",
    "\u{0}",
    "\u{feff}",
    "\u{e9}\u{1f600}",
    "/..",
    " ",
    "\r\n",
    ",",
    "*/0",
];

/// Time limit for one parse, which is long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(5);

/// The number of test cases: the environment variable `PROPTEST_CASES`, or `default`.
pub(crate) fn cases(default: u32) -> ProptestConfig {
    let config = ProptestConfig {
        // With `None`, proptest only prints the input of a failed test. By default, it also writes this input to a file
        // in the checkout.
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_some() {
        return config;
    }
    ProptestConfig {
        cases: default,
        ..config
    }
}

/// A sample with up to five random changes, or without a change.
pub(crate) fn damaged(samples: &[&[u8]]) -> impl Strategy<Value = Vec<u8>> + use<> {
    let samples: Vec<Vec<u8>> = samples.iter().map(|sample| sample.to_vec()).collect();
    let change = (
        0..6_u8,
        any::<(Index, Index)>(),
        any::<u8>(),
        select(TOKENS),
    );
    (select(samples), vec(change, 0..6)).prop_map(|(mut bytes, changes)| {
        for (kind, (from, to), byte, token) in changes {
            let (from, to) = (from.index(bytes.len() + 1), to.index(bytes.len() + 1));
            let range = from.min(to)..from.max(to).min(from.min(to) + 256);
            match kind {
                0 => drop(bytes.splice(from..from, token.bytes())),
                1 => drop(bytes.splice(range, token.bytes())),
                2 => bytes.truncate(from),
                3 => {
                    let copy = bytes[range].to_vec();
                    drop(bytes.splice(to..to, copy));
                }
                _ => {
                    if let Some(changed) = bytes.get_mut(from) {
                        *changed = if kind == 4 {
                            byte
                        } else {
                            *changed ^ (1 << (byte % 8))
                        };
                    }
                }
            }
        }
        bytes
    })
}

/// Like [`damaged`], for texts.
pub(crate) fn damaged_text(samples: &[&str]) -> impl Strategy<Value = String> + use<> {
    let samples: Vec<&[u8]> = samples.iter().map(|sample| sample.as_bytes()).collect();
    damaged(&samples).prop_map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs a parser, and panics if it exceeds the time limit.
pub(crate) fn bounded<T>(parse: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = parse();
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    result
}

/// Asserts that the process has never used more than 256 MiB of memory.
pub(crate) fn assert_little_memory() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().split_whitespace().next().unwrap();
    let kib: u64 = kib.parse().unwrap();
    assert!(kib < 256 << 10, "{kib} KiB");
}
