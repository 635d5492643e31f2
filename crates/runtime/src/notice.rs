//! What the operator tells about an object, as an Event and as a line of the log.

/// One thing to tell the user about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Whether the user should worry.
    pub warning: bool,
    /// Stable, PascalCase.
    pub reason: &'static str,
    /// What the operator was doing: stable, PascalCase verb.
    pub action: &'static str,
    /// A sentence for people, with the remedy.
    pub note: String,
    /// Something was done: told each time, where a state of things is told once.
    pub change: bool,
}

impl Notice {
    /// Something happened as it should.
    pub fn normal(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            warning: false,
            reason,
            action,
            note: note.into(),
            change: false,
        }
    }

    /// The operator has done something.
    pub fn change(reason: &'static str, action: &'static str, note: impl Into<String>) -> Self {
        Self {
            change: true,
            ..Self::normal(reason, action, note)
        }
    }

    /// Something needs the user.
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
