//! The reasons of an operator: one closed enum for each operator, declared once, and a reason with its message.

use std::fmt;

/// Declares the enum of all reasons that one operator writes to conditions and Events. The text of a reason is the name of
/// its variant.
#[macro_export]
macro_rules! reasons {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$about:meta])* $variant:ident,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$about])* $variant,)+
        }

        impl $name {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The text in objects.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($variant),)+
                }
            }

            /// The reason of this text; `None` for a text that another release has written.
            pub fn parse(text: &str) -> Option<Self> {
                let mut all = Self::ALL.iter().copied();
                all.find(|reason| reason.as_str() == text)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.as_str())
            }
        }

        impl From<$name> for api::conditions::Reason {
            fn from(reason: $name) -> Self {
                Self::from(reason.as_str())
            }
        }
    };
}

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

    reasons! {
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
