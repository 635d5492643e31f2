//! A notice about an object, published as an Event and logged.

/// A message about an object, which becomes an Event and a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Whether the Event has the type Warning.
    pub warning: bool,
    /// The reason of the Event, in PascalCase. It must not change between releases.
    pub reason: &'static str,
    /// The operator's action, as a verb in PascalCase. It must not change between releases.
    pub action: &'static str,
    /// The message. If a user must act, it contains the remedy.
    pub note: String,
    /// True if the notice is about a change that the operator has made, false if it is about a state. Each change is
    /// published. A state is published only once while it lasts.
    pub change: bool,
}

impl Notice {
    /// A notice about a state that needs no attention.
    pub fn normal(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: false,
            reason,
            action,
            note: note.into(),
            change: false,
        }
    }

    /// A notice about a change that the operator has made.
    pub fn change(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            change: true,
            ..Self::normal(reason, action, note)
        }
    }

    /// A notice about a state that needs attention.
    pub fn warning(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: true,
            reason,
            action,
            note: note.into(),
            change: false,
        }
    }
}
