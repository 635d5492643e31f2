//! Durations in Go's format (`60s`, `1h30m`), which Kubernetes uses.
//!
//! The original text is kept, so that validation can report an invalid text.

use std::borrow::Cow;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// A duration as text: numbers with `ms`, `s`, `m` or `h`, such as `90s` or `1h30m`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DurationText(pub String);

impl DurationText {
    /// The duration. `None` if the text is invalid.
    pub fn parse(&self) -> Option<Duration> {
        let mut rest = self.0.as_str();
        let mut total = Duration::ZERO;
        if rest.is_empty() {
            return None;
        }
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !c.is_ascii_digit())?;
            let number: u64 = rest[..digits].parse().ok()?;
            rest = &rest[digits..];
            let unit = rest
                .find(|c: char| c.is_ascii_digit())
                .unwrap_or(rest.len());
            let part = match &rest[..unit] {
                "ms" => Duration::from_millis(number),
                "s" => Duration::from_secs(number),
                "m" => Duration::from_secs(number.checked_mul(60)?),
                "h" => Duration::from_secs(number.checked_mul(3600)?),
                _ => return None,
            };
            total = total.checked_add(part)?;
            rest = &rest[unit..];
        }
        Some(total)
    }
}

impl JsonSchema for DurationText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "DurationText".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "maxLength": 32,
            "x-kubernetes-validations": [{
                "rule": "self.matches('^([0-9]+(ms|s|m|h))+$')",
                "message": "the text must be a duration: use a form such as 60s, 5m or 1h30m"
            }]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_texts_in_go_format_are_parsed() {
        let cases = [
            ("0s", 0),
            ("60s", 60_000),
            ("1h30m", 5_400_000),
            ("250ms", 250),
            ("1m1s1ms", 61_001),
        ];
        for (text, millis) in cases {
            assert_eq!(
                DurationText(text.into()).parse(),
                Some(Duration::from_millis(millis)),
                "{text}"
            );
        }
    }

    #[test]
    fn invalid_duration_texts_are_rejected() {
        for text in [
            "",
            "60",
            "s",
            "1d",
            "-1s",
            "1.5h",
            "99999999999999999999s",
            "99999999999999999h",
        ] {
            assert_eq!(DurationText(text.into()).parse(), None, "{text}");
        }
    }
}
