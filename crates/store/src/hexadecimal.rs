//! Digests as text.

use std::fmt::Write as _;

/// Lower-case hexadecimal, as `sha256sum` prints it.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::hexadecimal;

    #[test]
    fn keeps_leading_zeros() {
        assert_eq!(hexadecimal(&[0, 10, 255]), "000aff");
    }
}
