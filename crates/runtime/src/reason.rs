//! A reason with its message. The macro `api::reasons!` declares the reasons of each operator.

use std::fmt;

/// A problem that a condition or an Event reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble<R> {
    /// The reason of the condition.
    pub reason: R,
    /// The problem. If a user can act, the message also contains the remedy.
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
