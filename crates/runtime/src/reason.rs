//! A reason with its message. `api::reasons!` declares the reasons of each operator.

use std::fmt;

/// A problem that a condition or an Event reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble<R> {
    /// The reason of the condition.
    pub reason: R,
    /// The problem and, where a person can act, the remedy.
    pub message: String,
}

impl<R> Trouble<R> {
    /// A problem with this message.
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
#[allow(unreachable_pub, reason = "declared as operators declare it")]
mod tests {
    use super::Trouble;

    api::reasons! {
        /// Two reasons.
        pub enum Reason {
            /// One.
            SecretMissing,
            /// The other.
            InvalidSpec,
        }
    }

    #[test]
    fn reason_is_read_from_its_own_text_alone() {
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
