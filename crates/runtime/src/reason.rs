//! A reason with its message. Each operator declares its reasons with the macro `api::reasons!`.

use std::fmt;

/// A problem that a condition or an Event reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble<R> {
    /// The reason of the condition.
    pub reason: R,
    /// The message, with the remedy if a user can act.
    pub message: String,
}

impl<R> Trouble<R> {
    /// Creates a problem with this reason and this message.
    pub fn new(reason: R, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
        }
    }
}

impl<R: fmt::Display> fmt::Display for Trouble<R> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.reason, self.message)
    }
}

#[cfg(test)]
#[allow(
    unreachable_pub,
    reason = "the operators call this macro to declare public reasons"
)]
mod tests {
    use super::Trouble;

    api::reasons! {
        /// Reasons for the test.
        pub enum Reason {
            SecretMissing,
            InvalidSpec,
        }
    }

    #[test]
    fn reason_is_parsed_only_from_its_exact_text() {
        for reason in Reason::ALL {
            assert_eq!(Reason::parse(reason.as_str()), Some(*reason));
            assert_eq!(
                api::conditions::Reason::from(*reason).as_str(),
                reason.as_str()
            );
        }
        assert_eq!(Reason::parse("ReasonOfLaterRelease"), None);
        let trouble = Trouble::new(Reason::SecretMissing, "create it");
        assert_eq!(trouble.to_string(), "SecretMissing: create it");
    }
}
