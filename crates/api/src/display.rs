//! Formats values for the columns of kubectl.

/// The host of a URL, without its scheme, user, password and port. `None` if the URL has no host.
pub fn host(url: &str) -> Option<String> {
    let address = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = address.split(['/', '?', '#']).next().unwrap_or(address);
    let host = authority.rsplit('@').next().unwrap_or(authority);
    let host = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    (!host.is_empty()).then(|| host.to_owned())
}

/// Formats a size in bytes, such as `24.0 MiB`.
pub fn bytes(size: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut tenths = u128::from(size) * 10;
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    if unit == 0 {
        format!("{size} B")
    } else {
        format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    }
}

/// Formats a number of seconds like [`crate::duration::DurationText`], such as `45s`, `12m5s` or `1h0m5s`.
pub fn duration(seconds: i64) -> String {
    let seconds = seconds.max(0);
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        _ => format!("{hours}h{minutes}m{rest}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::duration::DurationText;

    #[test]
    fn sizes_of_at_least_one_kib_are_displayed_with_one_decimal() {
        for (size, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (2 << 30, "2.0 GiB"),
            (25_165_825, "24.0 MiB"),
        ] {
            assert_eq!(bytes(size), text);
        }
    }

    #[test]
    fn displayed_durations_can_be_parsed_again() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m0s"),
            (3599, "59m59s"),
            (90_061, "25h1m1s"),
        ] {
            assert_eq!(duration(seconds), text);
            let parsed = DurationText(text.to_owned()).parse().unwrap();
            assert_eq!(i64::try_from(parsed.as_secs()).unwrap(), seconds);
        }
        assert_eq!(duration(-5), "0s");
    }
}
