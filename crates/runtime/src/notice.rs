//! A notice about an object, published as an Event and logged.

/// A notice about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// True for an Event of type Warning.
    pub warning: bool,
    /// Reason of the Event: stable, PascalCase.
    pub reason: &'static str,
    /// The operator's action: a stable verb in PascalCase.
    pub action: &'static str,
    /// The message, with the remedy.
    pub note: String,
    /// True if the operator changed something: the notice is published each time. Otherwise the notice describes a
    /// state and is published once while the state lasts.
    pub change: bool,
}

impl Notice {
    /// A state that needs no attention.
    pub fn normal(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: false,
            reason,
            action,
            note: note.into(),
            change: false,
        }
    }

    /// A change that the operator made.
    pub fn change(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            change: true,
            ..Self::normal(reason, action, note)
        }
    }

    /// A state that needs attention.
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
