//! Converts Kubernetes quantities to bytes. Performs no I/O.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The bytes of a quantity, rounded up as in Kubernetes; `None` if the quantity cannot be parsed.
pub fn bytes(quantity: &Quantity) -> Option<u64> {
    let text = quantity.0.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let digits: u128 = format!("0{whole}{fraction}").parse().ok()?;
    let (multiplier, divisor) = scale(suffix)?;
    let divisor = divisor.checked_mul(10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?)?;
    let product = digits.checked_mul(multiplier)?;
    u64::try_from(product.div_ceil(divisor)).ok()
}

/// The factor for a quantity's suffix, as a multiplier and a divisor.
fn scale(suffix: &str) -> Option<(u128, u128)> {
    let binary = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let decimal = ["k", "M", "G", "T", "P", "E"];
    let at = |list: &[&str]| list.iter().position(|one| *one == suffix);
    if let Some(power) = at(&binary) {
        return Some((1 << (10 * (power + 1)), 1));
    }
    if let Some(power) = at(&decimal) {
        return Some((1000_u128.checked_pow(u32::try_from(power).ok()? + 1)?, 1));
    }
    match suffix {
        "" => Some((1, 1)),
        "m" => Some((1, 1000)),
        "u" => Some((1, 1_000_000)),
        "n" => Some((1, 1_000_000_000)),
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            let power = 10_u128.checked_pow(exponent.unsigned_abs())?;
            Some(if exponent < 0 { (1, power) } else { (power, 1) })
        }
    }
}

/// The bytes as text, in the largest of the units Gi, Mi and Ki that divides them.
pub fn in_words(bytes: u64) -> String {
    for (unit, name) in [(1_u64 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")] {
        if bytes >= unit && bytes.is_multiple_of(unit) {
            return format!("{}{name}", bytes / unit);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_in_every_kubernetes_format_are_parsed() {
        for (text, expected) in [
            ("1Gi", Some(1 << 30)),
            ("1.5Gi", Some(3 << 29)),
            ("500M", Some(500_000_000)),
            ("1e9", Some(1_000_000_000)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("1024", Some(1024)),
            ("1500m", Some(2)),
            (".5Ki", Some(512)),
            ("2Ti", Some(2 << 40)),
            ("", None),
            ("Gi", None),
            ("1Xi", None),
            ("1e99", None),
        ] {
            assert_eq!(bytes(&Quantity(text.to_owned())), expected, "{text:?}");
        }
    }

    #[test]
    fn bytes_are_formatted_with_largest_exact_binary_unit() {
        assert_eq!(in_words(2 << 30), "2Gi");
        assert_eq!(in_words(1536 << 10), "1536Ki");
        assert_eq!(in_words(1000), "1000");
    }
}
