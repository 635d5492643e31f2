//! Formats numbers with Grafana's units.

/// Units of rates: the name in Grafana, and the text after the number.
const RATES: [(&str, &str); 2] = [("reqps", " req/s"), ("ops", " ops/s")];
/// Units of durations, with their length in seconds, the smallest first.
const DURATIONS: [(f64, &str); 6] = [
    (1e-6, "µs"),
    (1e-3, "ms"),
    (1.0, "s"),
    (60.0, "min"),
    (3600.0, "h"),
    (86400.0, "d"),
];
/// Units of sizes, with their number of bytes, the smallest first.
const BYTES: [(f64, &str); 5] = [
    (1.0, "B"),
    (1024.0, "KiB"),
    (1_048_576.0, "MiB"),
    (1_073_741_824.0, "GiB"),
    (1_099_511_627_776.0, "TiB"),
];
/// Units of byte rates, with their number of bytes per second, the smallest first.
const BYTE_RATES: [(f64, &str); 4] = [(1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s")];

/// The largest unit that does not exceed the number: its size and its name.
fn largest<'a>(sizes: &[(f64, &'a str)], number: f64) -> (f64, &'a str) {
    let fits = |(size, _): &&(f64, &str)| number.abs() >= *size;
    let found = sizes.iter().rev().find(fits).or(sizes.first());
    found.copied().unwrap_or((1.0, ""))
}

fn sizes(unit: &str) -> &'static [(f64, &'static str)] {
    match unit {
        "s" => &DURATIONS,
        "bytes" => &BYTES,
        "Bps" => &BYTE_RATES,
        _ => &[],
    }
}

/// The size of the unit for an axis up to `high`, such as 1024 for KiB.
pub(super) fn scale(unit: &str, high: f64) -> f64 {
    largest(sizes(unit), high).0
}

/// The number with its unit.
pub(super) fn shown(unit: &str, number: f64) -> String {
    if let Some((_, text)) = RATES.iter().find(|(name, _)| *name == unit) {
        return format!("{}{text}", digits(number));
    }
    match (unit, sizes(unit)) {
        ("percentunit", _) => format!("{} %", digits(number * 100.0)),
        (_, []) => digits(number),
        ("s", _) if number == 0.0 => "0 s".to_owned(),
        (_, sizes) => {
            let (size, name) = largest(sizes, number);
            format!("{} {name}", digits(number / size))
        }
    }
}

/// The number with at most three digits, or with its whole integer part if this part has more digits.
fn digits(number: f64) -> String {
    let decimals = match number.abs() {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    let text = format!("{number:.decimals$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_with_units_of_grafana() {
        for (unit, number, expected) in [
            ("none", 0.0, "0"),
            ("none", 0.0421, "0.042"),
            ("none", 12345.0, "12345"),
            ("s", 0.0, "0 s"),
            ("s", 0.0042, "4.2 ms"),
            ("s", 90.0, "1.5 min"),
            ("s", 7_776_000.0, "90 d"),
            ("bytes", 0.0, "0 B"),
            ("bytes", 16_777_216.0, "16 MiB"),
            ("Bps", 1500.0, "1.5 kB/s"),
            ("reqps", 16.0, "16 req/s"),
            ("percentunit", 0.856, "85.6 %"),
        ] {
            assert_eq!(shown(unit, number), expected, "{unit} {number}");
        }
    }

    #[test]
    fn axis_uses_largest_unit_that_does_not_exceed_maximum() {
        let tolerance = 1e-9;
        assert!((scale("bytes", 20_000_000.0) - 1_048_576.0).abs() < tolerance);
        assert!((scale("s", 0.02) - 1e-3).abs() < tolerance);
        assert!((scale("none", 20_000_000.0) - 1.0).abs() < tolerance);
    }
}
